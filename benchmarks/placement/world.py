"""A job in virtual time: the production ledger and agents between engines that come and go and a trainer that learns.

Time goes from event to event: a sample ends, a prompt is read, a batch is learned, an engine comes, leaves or pauses,
the ledger is due; half a second at most. Reserved engines make no token while the trainer learns. The trainer asks for
`micro` samples, learns what it gets, and asks again; with the last one it acknowledges and publishes the next weights.

What is drawn: `draws`; what it is compared with: `bound`; who watches: `measures`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from typing import Any, Final

from draws import TURN_ENVIRONMENT, Fleet, Machine, Sequence, Workload

from polyrl.ledger import Effects, Event
from polyrl.sample import Group, Pool, Purpose, SamplingParams
from polyrl.wire import (
    Announce,
    Assign,
    Batch,
    GroupDropped,
    HandBack,
    HandBackReason,
    Heartbeat,
    Hello,
    Late,
    StartDrain,
    Submit,
    WeightsLoaded,
    pack_ids,
)
from polyrl_rollout.engines.trial import AGAIN_S, FIRST_TOKENS, LONGEST_S, NEW_TOKENS, READ_TOKENS
from polyrl_rollout.testing.flow import Decoding, Flow, FlowEngine

LONGEST_STEP_S: Final = 0.5
"""What agents gather at most before they send it: below a heartbeat."""
SHORTEST_STEP_S: Final = 0.02
"""Between two events at least: a frame of an agent."""
PAUSE_S: Final = 4.0
"""A silent pause: longer than a lease of 3 s."""
REQUEST_S: Final = 600.0
"""A BatchRequest's deadline."""
MOST_TOKENS: Final = 1_000_000_000


@dataclass(kw_only=True)
class Engine(FlowEngine):
    """An engine of the fleet in one of its lives."""

    machine: Machine
    at: float = 0.0
    """Up to when it has decoded."""
    heartbeat_at: float = 0.0
    loaded_at: float = inf
    loading: int = -1
    tried_at: float = -inf
    """When its agent had tried it last, which it does before the first sample."""
    idle_at: float = 0.0
    """Since when it has had nothing to do, or was tried last."""
    mail: list[Any] | None = None
    """What came while it was paused."""
    made: float = 0.0
    """Tokens that it generated."""

    def ready(self, now: float) -> list[Decoding]:
        """Those that decode since `at`: read then, as many as the KV cache holds, the oldest first."""
        if self.version < 0 or self.loading >= 0:
            return []
        found, free = [], self.speed.kv_tokens
        for run in self.decoding.values():
            free -= self.size_of(run)
            if run.ready_at <= self.at and (free >= 0 or not found):
                found.append(run)
        return found

    def trial(self) -> tuple[float, float, float]:
        """What its agent says of a step and of reading, and how long trying takes; cut short it may say nothing."""
        step_s, read_s = self.token_s(1), self.speed.prefill_s
        first_s = FIRST_TOKENS * read_s + NEW_TOKENS * step_s
        seconds = min(LONGEST_S, first_s + READ_TOKENS * read_s + NEW_TOKENS * step_s)
        knows_step = FIRST_TOKENS * read_s + 2 * step_s < LONGEST_S
        knows_read = first_s + READ_TOKENS * read_s + 2 * step_s < LONGEST_S
        return (step_s if knows_step else 0.0, read_s if knows_read else 0.0, seconds)

    def tried_again_at(self) -> float:
        """When it will have been, if nothing comes until then. A sample that comes ends a trial."""
        tries = self.pool is Pool.SPOT and self.version >= 0 and self.loading < 0 and not self.decoding
        return self.idle_at + AGAIN_S + self.trial()[2] if tries else inf

    def advance(self, now: float) -> None:
        """Decodes up to now."""
        if self.decoding:
            self.idle_at = now
        if now > self.at:
            before = sum(run.position for run in self.decoding.values())
            gone = dict(self.decoding)
            self.decode(now, now - self.at)
            self.made += sum(run.position for run in gone.values()) - before
            self.at = now

    def hold(self, seconds: float) -> None:
        """What was being read took so much longer."""
        for run in self.decoding.values():
            if run.ready_at > self.at - seconds:
                run.ready_at += seconds
        self.free_at += seconds

    def kv_free(self) -> int:
        return max(0, self.speed.kv_tokens - int(sum(map(self.size_of, self.decoding.values()))))

    def next_change(self) -> float:
        """When something of its own happens."""
        if self.frozen:
            return inf
        own = min(self.loaded_at, self.heartbeat_at + 1.0, self.tried_again_at())
        if self.stuck or not self.decoding:
            return own
        ready = self.ready(self.at)
        if ready:
            own = min(own, self.at + min(run.end - run.position for run in ready) * self.token_s(len(ready)))
        return min([own, *(run.ready_at for run in self.decoding.values() if run.ready_at > self.at)])

    @staticmethod
    def size_of(run: Decoding) -> float:
        return len(run.stream.assign.input_ids) // 4 - run.stream.assign.offset + run.position


class Observer:
    """Watches a world; this one sees nothing."""

    def passed(self, world: World, seconds: float) -> None:
        """Time went on."""

    def generated(self, tokens: float) -> None:
        """An engine made tokens."""

    def learning(self, now: float, seconds: float) -> None:
        """The trainer begins a batch."""

    def lost(self, name: str, now: float) -> None:
        """An engine is gone."""

    def paused(self, name: str, now: float) -> None:
        """An engine is silent."""

    def dropped(self, message: GroupDropped) -> None:
        """The trainer was notified that a group is given up."""

    def events(self, events: Iterable[Event], now: float) -> None:
        """What the ledger decided."""


class World(Flow):
    """A fleet that works at a workload, or only its reserved part."""

    engines: dict[str, Engine]  # type: ignore[assignment]

    def __init__(self, fleet: Fleet, workload: Workload, *, alone: bool = False) -> None:
        self.fleet, self.workload = fleet, workload
        self.learn_s = workload.learn_s(fleet)
        self.observer = Observer()
        self._faults: list[tuple[float, int, Callable[[], None]]] = []
        self.truth: dict[str, Sequence] = {}
        self.version, self.missing, self._batches = 0, 0, list[int]()
        self._asked = False
        self._batch: Batch | None = None
        self.learned_at = inf
        self._stuck_at = 0.0
        super().__init__(
            {},
            lambda sample, turn: self.truth[sample].turns[turn],
            turns=len(workload.steps[0][0].samples[0].turns),
            environment=TURN_ENVIRONMENT,
            verdict_s=self._delay,
        )
        for index, machine in enumerate(fleet.reserved):
            self._come(f"r{index}", Pool.RESERVED, machine)
        for index, machine in enumerate(() if alone else fleet.spot):
            self._fate(f"s{index}", machine)

    def _delay(self, sample: str, turn: int) -> float:
        return self.truth[sample].delays[turn]

    # The fleet.

    def _later(self, at: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._faults, (at, len(self._faults), what))

    def _fate(self, name: str, machine: Machine) -> None:
        for life, (up, down) in enumerate(machine.up):
            self._later(up, lambda each=f"{name}.{life}": self._come(each, Pool.SPOT, machine))  # type: ignore[misc]
            if down < inf:
                if machine.notice_s:
                    notice = max(up, down - machine.notice_s)
                    self._later(notice, lambda each=f"{name}.{life}", s=down - notice: self._notice(each, s))  # type: ignore[misc]
                self._later(down, lambda each=f"{name}.{life}": self._lose(each))  # type: ignore[misc]
        if machine.pause_at < inf:
            self._later(machine.pause_at, lambda: self._pause(f"{name}.0"))

    def _come(self, name: str, pool: Pool, machine: Machine) -> None:
        made = Engine(name, machine.speed, pool, version=-1, machine=machine, at=self.now, heartbeat_at=self.now)
        self.engines[name] = made
        self._greet(made)

    def _notice(self, name: str, seconds: float) -> None:
        if name in self.engines:
            self._keep(self.ledger.drain(name, seconds, "the machine is taken back", self.now))

    def _lose(self, name: str) -> None:
        if name in self.engines:
            self._advance(self.engines[name])
            self.observer.lost(name, self.now)
            self.vanish(name)

    def _pause(self, name: str) -> None:
        engine = self.engines.get(name)
        if engine is not None:
            self._advance(engine)
            self.observer.paused(name, self.now)
            engine.frozen, engine.mail = True, []
            self._later(self.now + PAUSE_S, lambda: self._wake(engine))

    def _wake(self, engine: Engine) -> None:
        engine.frozen, engine.at = False, self.now
        engine.hold(PAUSE_S)
        self._mail += [(engine.name, message) for message in engine.mail or ()]
        engine.mail = None

    def _greet(self, engine: FlowEngine) -> None:
        speed = engine.speed
        engine.decoding.clear()
        hello = Hello(
            1,
            engine.name,
            pool=engine.pool,
            max_running=speed.max_running,
            kv_tokens=speed.kv_tokens,
            max_context=speed.max_context,
            weight_version=engine.version,
        )
        self.agent(engine.name, hello)

    # Time.

    def step(self) -> None:
        """To the next event."""
        due = self.ledger.next_due()
        changes = [engine.next_change() for engine in self.engines.values()]
        verdict = min((at for at, _ in self._verdicts), default=inf)
        fault = self._faults[0][0] if self._faults else inf
        until = min([*changes, verdict, fault, self.learned_at, inf if due is None else due])
        before = self.now
        self.now = max(before + SHORTEST_STEP_S, min(until, before + LONGEST_STEP_S))
        self.observer.passed(self, self.now - before)
        while self._faults and self._faults[0][0] <= self.now:
            heapq.heappop(self._faults)[2]()
        for engine in tuple(self.engines.values()):
            if not engine.frozen:
                self._speak(engine)
        if due is not None and due <= self.now:
            self._keep(self.ledger.tick(self.now))
        self._judge()
        self._learn()
        self._deliver()
        self.observer.events(self.events, self.now)
        self.events.clear()

    def _advance(self, engine: Engine) -> None:
        before = engine.made
        engine.advance(self.now)
        if engine.made > before:
            self.observer.generated(engine.made - before)

    def _speak(self, engine: FlowEngine) -> None:
        assert isinstance(engine, Engine)
        self._advance(engine)
        if engine.loaded_at <= self.now:
            engine.version, engine.loading, engine.loaded_at = engine.loading, -1, inf
            engine.tried_at = self.now if engine.tried_at == -inf else engine.tried_at
            engine.idle_at = max(engine.idle_at, self.now - AGAIN_S)  # not sooner: it loaded
            self._send_loaded(engine)
        if engine.tried_again_at() <= self.now:
            engine.tried_at = engine.idle_at = self.now
            self._send_loaded(engine)
        if self.now >= engine.heartbeat_at + 1.0:
            engine.heartbeat_at = self.now
            self.agent(engine.name, Heartbeat(len(engine.decoding), 0, kv_free_tokens=engine.kv_free()))
        for frame in engine.protocol.book.pack(self.now, LONGEST_STEP_S, flush=True):
            self.agent(engine.name, frame)

    def _send_loaded(self, engine: Engine) -> None:
        """What it serves, and what its agent has tried."""
        step_s, read_s, _ = engine.trial()
        loaded = WeightsLoaded(
            engine.version,
            0.1,
            load_seconds=self.workload.load_s,
            bytes_pulled=100,
            step_seconds=step_s,
            read_seconds=read_s,
            tried_seconds_ago=self.now - engine.tried_at,
        )
        self.agent(engine.name, loaded)

    def _deliver(self) -> None:
        for name, message in self._mail:
            engine = self.engines.get(name)
            if engine is not None and engine.mail is not None:
                engine.mail.append(message)
        super()._deliver()

    def _receive(self, engine: FlowEngine, message: Any) -> None:
        assert isinstance(engine, Engine)
        self._advance(engine)
        if isinstance(message, Announce):
            trying_s = engine.trial()[2] if engine.tried_at == -inf else 0.0
            engine.loading = message.version
            engine.loaded_at = self.now + self.workload.load_s + trying_s
        elif isinstance(message, StartDrain):
            engine.protocol.draining = True
        elif isinstance(message, Assign) and engine.machine.rejects:
            self.agent(engine.name, HandBack(message.assignment, HandBackReason.REJECTED, detail="400"))
        else:
            super()._receive(engine, message)

    # The trainer.

    def train(self, step: int, limit_s: float, observer: Observer) -> float:
        """One step, watched; given up after `limit_s`. Returns its seconds."""
        began = self.now
        self.observer = observer
        self.version, self._batches = step, []
        if step:
            self.publish(step)
        self._submit(step)
        self._learn()
        self._deliver()  # now: messages take milliseconds, and the next event may be half a second away
        while self.missing > 0 and self.now < began + limit_s:
            self.step()
        for batch in self._batches:
            self.acknowledge(batch)
        return self.now - began

    def _submit(self, step: int) -> None:
        sampling = SamplingParams(self.workload.budget, stop_token_ids=(2,))
        groups, self.missing = [], 0
        for prompt in self.workload.steps[step]:
            for index, sample in enumerate(prompt.samples):
                self.truth[f"{self._group}.{index}"] = sample
            self.missing += len(prompt.samples)
            groups.append(
                Group(
                    self._group,
                    step=step,
                    purpose=Purpose.TRAIN,
                    prompt_ids=pack_ids([9] * prompt.tokens),
                    n=len(prompt.samples),
                    sampling=sampling,
                    min_version=step,
                    max_version=step,
                )
            )
            self._group += 1
        self.trainer(Submit(self.request(), tuple(groups)))

    def _learn(self) -> None:
        if self.learned_at <= self.now:
            assert self._batch is not None
            self.missing -= len(self._batch.samples)
            self._batches.append(self._batch.number)
            self._batch, self.learned_at, self._asked = None, inf, False
            self._hold_reserved(stuck=False)
        if self.missing > 0 and not self._asked:
            self._asked = True
            self.ask(
                least=min(self.workload.micro, self.missing),
                most=self.missing,
                step=self.version,
                max_tokens=MOST_TOKENS,
                deadline_s=REQUEST_S,
            )

    def _begin_learning(self, batch: Batch) -> None:
        self._batch = batch
        tokens = sum(self.truth[scored.response.sample].learned for scored in batch.samples)
        self.learned_at = self.now + tokens * self.learn_s
        self.observer.learning(self.now, tokens * self.learn_s)
        self._hold_reserved(stuck=True)

    def _hold_reserved(self, *, stuck: bool) -> None:
        for engine in self.engines.values():
            if engine.pool is Pool.RESERVED and engine.stuck != stuck:
                self._advance(engine)
                if not stuck:
                    engine.hold(self.now - self._stuck_at)
                engine.stuck = stuck
        self._stuck_at = self.now

    def _keep(self, outcome: Effects) -> Effects:
        for message in outcome.to_trainer:
            if isinstance(message, Batch) and message.samples and self._batch is None:
                self._begin_learning(message)
            elif isinstance(message, Late | Batch):
                self._asked = False
            elif isinstance(message, GroupDropped):
                self.missing -= len(self._dropped(message.group))
                self.observer.dropped(message)
        return super()._keep(outcome)

    def _dropped(self, group: int) -> list[str]:
        return [name for name in self.truth if name.partition(".")[0] == str(group)]
