"""What a policy is worth: a ledger between engines of known speed, in small steps of virtual time.

    flow = Flow({"a": Speed(0.02), "b": Speed(0.2)}, lambda sample, turn: 400)
    flow.submit(8, n=4)
    print(flow.run())          # virtual seconds until every sample has its verdict

Engines decode with a true step time that grows with their batch, read one prompt after the other, and keep what they
have read. The ledger knows none of these numbers; it measures. Faults are attributes of an engine: `frozen` (nothing
happens), `stuck` (signs of life, no tokens), `deaf` (what is sent to it is lost), `mute` (what it sends is lost).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from polyrl.ledger import Effects, Ledger, LedgerConfig
from polyrl.sample import Finish, Pool
from polyrl.wire import (
    Assign,
    Cancel,
    Fenced,
    HandBack,
    HandBackReason,
    Heartbeat,
    Hello,
    PrefixUnknown,
    Recall,
    TurnDone,
    WeightsLoaded,
    Welcome,
)
from polyrl_rollout.agent.protocol import AgentProtocol, Stream
from polyrl_rollout.engines.port import TokenChunk
from polyrl_rollout.testing.stage import Stage

STEP_S: Final = 0.1
"""Virtual time goes on by this much: a few frames of a real agent."""

HEARTBEAT_S: Final = 1.0

TOKEN: Final = 5
STOP: Final = 2


class Speed(NamedTuple):
    """The truth about an engine."""

    step_s: float
    """Seconds per decoding step at batch size 0."""
    half_batch: float = 64.0
    prefill_s: float = 0.0002
    """Seconds per token to read."""
    max_running: int = 16
    kv_tokens: int = 1_000_000
    max_context: int = 131_072


@dataclass
class Decoding:
    """One assignment that the engine generates."""

    stream: Stream
    ready_at: float
    """When it has been read."""
    end: int
    """Response position at which it ends here."""
    finish: Finish
    """LENGTH: its engine holds no more, and the turn goes on elsewhere."""
    position: float


@dataclass
class FlowEngine:
    """One engine with its agent."""

    name: str
    speed: Speed
    pool: Pool = Pool.SPOT
    version: int = 0
    """Weights that it serves."""
    protocol: AgentProtocol = field(default_factory=AgentProtocol)
    decoding: dict[int, Decoding] = field(default_factory=dict)
    frozen: bool = False
    stuck: bool = False
    deaf: bool = False
    mute: bool = False
    generated: int = 0
    """Tokens that it has generated so far."""
    read: int = 0
    """Tokens that it had to read so far."""
    free_at: float = 0.0
    """When it has read all prompts that it got."""
    _known: dict[str, int] = field(default_factory=dict)
    """Tokens of prompts (by group) and responses (by sample) in its cache."""

    def start(self, stream: Stream, end: int, now: float) -> None:
        """Reads what it does not know, after what it reads already. `end`: response position at which the turn ends."""
        assign = stream.assign
        limit = assign.offset + assign.max_new_tokens
        group = assign.sample.partition(".")[0]
        prompt = len(assign.input_ids) // 4 - assign.offset
        known = self._known.get(assign.sample, 0) or (prompt if group in self._known else 0)
        unread = max(0, prompt + assign.offset - known)
        self.read += unread
        self.free_at = max(now, self.free_at) + unread * self.speed.prefill_s
        self._known[group] = prompt
        finish = Finish.STOP if end <= limit else Finish.LENGTH
        run = Decoding(stream, self.free_at, end=min(end, limit), finish=finish, position=assign.offset)
        self.decoding[assign.assignment] = run

    def decode(self, now: float, seconds: float = STEP_S) -> None:
        """What happened in the last `seconds`."""
        if self.stuck:
            return
        ready = self.ready(now)
        gained = seconds / self.token_s(len(ready))
        for run in ready:
            run.position = min(run.position + gained, run.end)
            assign, count = run.stream.assign, int(run.position) - run.stream.length
            self._known[assign.sample] = len(assign.input_ids) // 4 - assign.offset + int(run.position)
            if count:
                self.generated += count
                done = run.position >= run.end
                stops = done and run.finish is Finish.STOP
                ids = [TOKEN] * (count - stops) + [STOP] * stops
                chunk = TokenChunk(ids, [0.0] * count, version=self.version, finish=run.finish if done else None)
                self.protocol.book.add(assign.assignment, chunk, now)
                if done:
                    del self.decoding[assign.assignment]

    def ready(self, now: float) -> list[Decoding]:
        """Whose prompts have been read."""
        return [run for run in self.decoding.values() if run.ready_at <= now]

    def token_s(self, running: int) -> float:
        """Seconds per token of each of `running` samples."""
        return self.speed.step_s * (1 + running / self.speed.half_batch)


class Flow(Stage):
    """A stage whose engines act by themselves; every sample is scored, or extended by `environment` tokens."""

    def __init__(
        self,
        engines: dict[str, Speed],
        length: Callable[[str, int], int],
        config: LedgerConfig | None = None,
        *,
        turns: int = 1,
        environment: int = 16,
        verdict_s: Callable[[str, int], float] = lambda sample, turn: 0.0,
    ) -> None:
        """`length`: tokens of a sample's turn; `turns`: of each sample; `verdict_s`: until a turn has its verdict."""
        super().__init__(config)
        self.engines: dict[str, FlowEngine] = {}
        self.ended: dict[str, float] = {}
        """When each sample got its verdict."""
        self._length, self._turns, self._environment, self._verdict_s = length, turns, environment, verdict_s
        self._mail: list[tuple[str, Any]] = []
        self._scored: set[tuple[str, int]] = set()
        self._verdicts: list[tuple[float, TurnDone]] = []
        for name, speed in engines.items():
            self.join(name, speed)

    def join(self, name: str, speed: Speed) -> FlowEngine:
        """An engine greets and serves version 0."""
        made = self.engines[name] = FlowEngine(name, speed)
        self._greet(made)
        return made

    def vanish(self, name: str) -> None:
        """An engine is gone without a word."""
        del self.engines[name]

    def run(self, until: float = 100_000.0, each: Callable[[Flow], None] = lambda flow: None) -> float:
        """Goes on until every submitted sample has its verdict, or until the time is `until`; returns the time.
        `each` is called before every step."""
        while self.now < until and self._is_busy():
            each(self)
            self.step()
        return self.now

    def step(self) -> None:
        """A step of virtual time."""
        self.now = round(self.now + STEP_S, 6)
        for engine in tuple(self.engines.values()):
            if not engine.frozen:
                self._speak(engine)
        due = self.ledger.next_due()
        if due is not None and due <= self.now:
            self._keep(self.ledger.tick(self.now))
        self._judge()
        self._deliver()

    def _is_busy(self) -> bool:
        return len(self.ended) < self.ledger.state.counters.submitted - sum(
            self.ledger.state.counters.discarded.values()
        )

    def _current(self) -> Ledger:
        return self.ledger  # nobody changes its state by hand

    def _greet(self, engine: FlowEngine) -> None:
        speed = engine.speed
        hello = Hello(
            1,
            engine.name,
            pool=engine.pool,
            max_running=speed.max_running,
            kv_tokens=speed.kv_tokens,
            max_context=speed.max_context,
            weight_version=engine.version if engine.decoding else -1,
            held=engine.protocol.book.held(),
            versions=engine.protocol.book.versions(),
        )
        self.agent(engine.name, hello)
        self.agent(engine.name, WeightsLoaded(0, 0.1, load_seconds=0.1, bytes_pulled=100))

    def _speak(self, engine: FlowEngine) -> None:
        engine.decode(self.now)
        frames = engine.protocol.book.pack(self.now, STEP_S, flush=True)
        if engine.mute:
            return
        if self.now % HEARTBEAT_S < STEP_S:
            self.agent(engine.name, Heartbeat(len(engine.decoding), 0, kv_free_tokens=engine.speed.kv_tokens))
        for frame in frames:
            self.agent(engine.name, frame)

    def _judge(self) -> None:
        due = [turn for at, turn in self._verdicts if at <= self.now]
        self._verdicts = [(at, turn) for at, turn in self._verdicts if at > self.now]
        for turn in due:
            sample, number = turn.response.sample, turn.response.turn
            if (sample, number) in self._scored:
                continue
            self._scored.add((sample, number))
            if number + 1 < self._turns:
                self.extend(sample, [TOKEN] * self._environment, number)
            else:
                self.ended[sample] = self.now
                self.score(sample, turn=number)

    def _deliver(self) -> None:
        mail, self._mail = self._mail, []
        for name, message in mail:
            engine = self.engines.get(name)
            if engine is None or engine.deaf or engine.frozen:
                continue
            self._receive(engine, message)

    def _receive(self, engine: FlowEngine, message: Any) -> None:
        engine.protocol.receive(message, self.now)
        if isinstance(message, Assign):
            stream = engine.protocol.accept(message, engine.version)
            if isinstance(stream, PrefixUnknown | HandBack):
                self.agent(engine.name, stream)
            elif isinstance(stream, Stream):
                engine.start(stream, self._end_of(message), self.now)
        elif isinstance(message, Cancel):
            engine.decoding.pop(message.assignment, None)
        elif isinstance(message, Recall):
            if engine.decoding.pop(message.assignment, None) is not None:
                self._hand_back(engine, message.assignment)
        elif isinstance(message, Welcome):
            for undelivered in engine.protocol.undelivered():
                self._hand_back(engine, undelivered.assignment)
        elif isinstance(message, Fenced):
            if not message.lease_over:
                engine.decoding.clear()
            self._greet(engine)

    def _hand_back(self, engine: FlowEngine, assignment: int) -> None:
        frames = engine.protocol.book.pack(self.now, STEP_S, flush=True)
        message = engine.protocol.hand_back(assignment, HandBackReason.RECALLED)
        for one in [*frames, message]:
            if one is not None and not engine.mute:
                self.agent(engine.name, one)

    def _end_of(self, assign: Assign) -> int:
        sample = self.ledger.state.samples.get(assign.sample)
        begin, turn = (sample.turn_start, sample.turn) if sample is not None else (assign.offset, 0)
        return begin + self._length(assign.sample, turn)

    def _keep(self, outcome: Effects) -> Effects:
        if hasattr(self, "_mail"):
            self._mail += outcome.to_agents
            for turn in (message for message in outcome.to_trainer if isinstance(message, TurnDone)):
                self._verdicts.append((self.now + self._verdict_s(turn.response.sample, turn.response.turn), turn))
        return super()._keep(outcome)
