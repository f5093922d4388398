"""An agent with its engine, in virtual time: keeps the protocol, except where a fault makes it not.

It keeps an assignment until TokensKept covers its end, says what it holds when it greets again, resends from where it
is asked, and fails the run if it is asked for tokens that it was given.

Refuses to hold: the ledger's rules. Read next: `trainer`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from polyrl.sample import Pool
from polyrl.wire import (
    Announce,
    Assign,
    Cancel,
    Deltas,
    Deregister,
    Fenced,
    HandBack,
    Heartbeat,
    HeldAssignment,
    Hello,
    Leaving,
    Recall,
    Resend,
    StartDrain,
    ToAgent,
    TokensKept,
    WeightsFailed,
    WeightsLoaded,
    Welcome,
    pack_rows,
)
from polyrl_rollout.testing.simulation.invariants import Violation
from polyrl_rollout.testing.simulation.model import Text
from polyrl_rollout.testing.simulation.schedule import SLOWNESS, EnginePlan
from polyrl_rollout.testing.simulation.world import Link, World

FRAME_S: Final = 0.03
RECONNECT_S: Final = (0.05, 1.0)


class Run:
    """One assignment as the agent sees it."""

    def __init__(self, assign: Assign, text: Text) -> None:
        self.assign = assign
        self.text = text
        self.position = assign.offset
        """After the last generated token."""
        self.sent = assign.offset
        self.limit = assign.offset + assign.max_new_tokens
        self.finish = 0
        self.finish_sent = False


class SimulatedEngine:
    """One engine process from start to end."""

    def __init__(self, world: World, name: str, plan: EnginePlan) -> None:
        self.world, self.name, self.plan = world, name, plan
        self.alive = True
        self.version = -1
        self.frozen_until = 0.0
        self.stalled_until = 0.0
        self.slow_until = 0.0
        self.lies: dict[str, int] = {}
        """Lies still to be told, by kind."""
        self.runs: dict[int, Run] = {}
        self._link: Link | None = None
        self._seq = 0
        self._frames: dict[int, list[tuple[int, int, int]]] = {}
        """Unsafe frames: (assignment, end position, finish) per row."""
        self._draining = False
        self._welcome = False
        self._loading = False
        self._framing = False
        """Whether the next frame is planned; without runs there is none."""
        self._lost = False
        """Whether a frame of this process may ever have been lost."""
        self._connect()
        world.after(1.0, self._beat)

    # --- connection ---------------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """The connection breaks; the agent notices, and dials again a little later."""
        if self._link is not None:
            self._link.up = False
            self._link = None
            self._welcome, self._lost = False, True
            self.world.agents.pop(self.name, None)
            self.world.after(self.world.rng.uniform(*RECONNECT_S), self._connect)

    def kill(self) -> None:
        """Vanishes."""
        self.alive = False
        if self._link is not None:
            self._link.up = False
            self.world.agents.pop(self.name, None)

    def leave(self) -> None:
        """Says Deregister and ends."""
        if self.alive:
            self._say(Deregister("leaving"))
            self.alive = False

    def _connect(self) -> None:
        if not self.alive or self._link is not None:
            return
        if self._asleep(self._connect):
            return
        self._link = Link(self.world)
        self.world.agents[self.name] = (self._link, self)
        self._greet()

    def _greet(self) -> None:
        self._seq, self._frames, self._welcome = 0, {}, False
        held = tuple(HeldAssignment(n, r.assign.sample, r.assign.attempt, r.position) for n, r in self.runs.items())
        pool = Pool.RESERVED if self.plan.reserved else Pool.SPOT
        room = (self.plan.max_running, self.plan.kv_tokens, 10_000)
        self._say(Hello(1, self.name, pool, *room, self.version, held))

    def _say(self, message: Any) -> None:
        if self._link is not None:
            self._link.carry(0, lambda: self.world.agent_says(self.name, message))

    def _asleep(self, again: Callable[[], None]) -> bool:
        if self.world.now < self.frozen_until:
            self.world.at(self.frozen_until, again)
            return True
        return False

    # --- messages -----------------------------------------------------------------------------------------------------

    def hear(self, message: ToAgent) -> None:
        """One message of the manager."""
        if not self.alive or self._asleep(lambda: self.hear(message)):
            return
        _HEARD[type(message)](self, message)

    def hear_welcome(self, _: Welcome) -> None:
        self._welcome = True

    def hear_fenced(self, _: Fenced) -> None:
        self.runs.clear()
        self._greet()

    def hear_assign(self, assign: Assign) -> None:
        self.world.watcher.assigned(self.name, assign, self.world.now)
        number = assign.assignment
        if self._draining:
            self._say(HandBack(number, "draining"))
        elif not assign.min_version <= self.version <= assign.max_version:
            self._say(HandBack(number, "versionChanged"))
        elif self.world.watcher.poisoned(assign.sample) or self._lie("reject"):
            self._say(HandBack(number, "rejected", "it cannot be tokenized"))
        elif self._lie("engineError"):
            self._say(HandBack(number, "engineError"))
        else:
            self.runs[number] = Run(assign, self.world.model.text(assign.sample))
            if not self._framing:
                self._framing = True
                self.world.after(max(FRAME_S, self._step_s()), self._frame)

    def hear_cancel(self, cancel: Cancel) -> None:
        if not self._lie("lieForeign"):
            self.runs.pop(cancel.assignment, None)

    def hear_return(self, asked: Recall) -> None:
        self._send_rows(flush=True)
        if asked.assignment in self.runs and not self.runs[asked.assignment].finish:
            del self.runs[asked.assignment]
            self._say(HandBack(asked.assignment, "asked"))

    def hear_kept(self, kept: TokensKept) -> None:
        for seq in [seq for seq in self._frames if seq <= kept.seq]:
            for number, end, finish in self._frames.pop(seq):
                run = self.runs.get(number)
                if run is not None and finish and run.sent == end:
                    del self.runs[number]

    def hear_resend(self, resend: Resend) -> None:
        run = self.runs.get(resend.assignment)
        if run is None:
            return
        if resend.offset < run.assign.offset:
            text = f"{self.name} was asked for position {resend.offset} of a sample that it got at {run.assign.offset}"
            raise Violation(self.world.now, "I10", text)
        run.sent = min(run.sent, resend.offset)
        run.finish_sent = False

    def hear_announce(self, announce: Announce) -> None:
        if announce.version > self.version and not self._loading:
            self._loading = True
            self.world.after(self.plan.load_s, lambda: self._load(announce.version))

    def hear_drain(self, drain: StartDrain) -> None:
        if not self._draining:
            self._draining = True
            self.world.after(drain.deadline_s * 0.8, self._hand_back)

    def _load(self, version: int) -> None:
        self._loading = False
        if not self.alive or self._asleep(lambda: self._load(version)):
            return
        if self._lie("failWeights"):
            self._say(WeightsFailed(version, self.version, "a chunk did not match its hash"))
            return
        self._send_rows(flush=True)
        self.version = version
        self.world.watcher.verified(self.name, version)
        for number, run in tuple(self.runs.items()):
            if not run.assign.min_version <= version <= run.assign.max_version and not run.finish:
                self._say(HandBack(number, "versionChanged"))
                del self.runs[number]
        self._say(WeightsLoaded(version, 0.1, 0.1, 1000))
        newest = self.world.watcher.published
        if newest > version:
            self._loading = True
            self.world.after(self.plan.load_s, lambda: self._load(newest))

    def _hand_back(self) -> None:
        if not self.alive or self._asleep(self._hand_back):
            return
        self._send_rows(flush=True)
        for number in tuple(self.runs):
            if not self.runs[number].finish:
                self._say(HandBack(number, "draining"))
        self.world.after(0.2, self.leave)

    def leaving(self, seconds: float) -> None:
        """A preemption notice: it says so, and is gone after `seconds`."""
        self._say(Leaving(seconds, "spot notice"))
        self.world.after(seconds, self.kill)

    # --- generating ---------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        if self.alive and not self._asleep(self._beat):
            self._say(Heartbeat(len(self.runs), 0, 100))
            self.world.after(1.0, self._beat)

    def _frame(self) -> None:
        if not self.alive or self._asleep(self._frame):
            return
        if self.world.now >= self.stalled_until:
            for run in self.runs.values():
                self._generate(run)
        self._send_rows(flush=False)
        self._framing = bool(self.runs)
        if self._framing:
            self.world.after(max(FRAME_S, self._step_s()), self._frame)

    def _step_s(self) -> float:
        return self.plan.step_s * (SLOWNESS if self.world.now < self.slow_until else 1)

    def _generate(self, run: Run) -> None:
        if run.finish:
            return
        count = max(1, int(FRAME_S / self._step_s()))
        end = run.text.until_stop(run.position, min(run.position + count, run.limit))
        run.position = end
        if run.text.stops_before(end):
            run.finish = 1
        elif end >= run.limit:
            run.finish = 2
            if self._lie("lieBudget"):
                run.position += 3
        elif self._lie("lieLength"):
            run.finish = 2

    def _send_rows(self, *, flush: bool) -> None:
        if self._link is None or not self._welcome or (not flush and self.world.now < self.stalled_until):
            return
        rows, ids, logprobs = [], bytearray(), bytearray()
        for number, run in self.runs.items():
            if run.position == run.sent and (not run.finish or run.finish_sent):
                continue
            # The end is sometimes told only after the last token: an engine may die in between.
            late = run.finish and run.position > run.sent and self.world.rng.random() < 0.3
            finish = 0 if late else run.finish
            # Only a token that the manager has can be told otherwise; one that was lost on the way is told first.
            begin = max(run.assign.offset, run.sent - 1) if not self._lost and self._lie("lieTokens") else run.sent
            new = run.text.ids[4 * begin : 4 * run.position]
            rows.append((number, begin, run.position - begin, finish))
            ids += _next_id(new) if begin < run.sent else new
            logprobs += run.text.logprobs[4 * begin : 4 * run.position]
            run.sent, run.finish_sent = run.position, bool(finish)
        if rows:
            self._send(rows, bytes(ids), bytes(logprobs))

    def _send(self, rows: list[tuple[int, int, int, int]], ids: bytes, logprobs: bytes) -> None:
        self._seq += 1
        self._frames[self._seq] = [(number, begin + count, finish) for number, begin, count, finish in rows]
        version = self.version + 1 if self._lie("lieVersion") else self.version
        message = Deltas(self._seq, version, pack_rows(rows), ids, logprobs)
        if self._lie("loseFrame"):
            self._lost = True
            return
        self._say(message)
        if self._lie("repeatFrame"):
            self._say(message)

    def _lie(self, kind: str) -> bool:
        left = self.lies.get(kind, 0)
        if left:
            self.lies[kind] = left - 1
        return left > 0


def _next_id(ids: bytes) -> bytes:
    """The same tokens, but for the first."""
    return (int.from_bytes(ids[:4], "little") + 1).to_bytes(4, "little") + ids[4:]


_HEARD: Final[dict[type, Callable[[SimulatedEngine, Any], None]]] = {
    Welcome: SimulatedEngine.hear_welcome,
    Fenced: SimulatedEngine.hear_fenced,
    Assign: SimulatedEngine.hear_assign,
    Cancel: SimulatedEngine.hear_cancel,
    Recall: SimulatedEngine.hear_return,
    TokensKept: SimulatedEngine.hear_kept,
    Resend: SimulatedEngine.hear_resend,
    Announce: SimulatedEngine.hear_announce,
    StartDrain: SimulatedEngine.hear_drain,
}
