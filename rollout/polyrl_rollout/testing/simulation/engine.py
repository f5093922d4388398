"""An engine with its agent, in virtual time: the real agent's protocol and tokens, except where a fault makes it lie.

It fails the run if it is asked for tokens that it was given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final

import msgspec
import numpy as np

from polyrl.sample import Finish, Pool
from polyrl.wire import (
    Announce,
    Assign,
    Cancel,
    Deltas,
    Deregister,
    Fenced,
    GoToSleep,
    HandBack,
    HandBackReason,
    Heartbeat,
    Hello,
    Leaving,
    PrefixUnknown,
    Recall,
    Resend,
    StartDrain,
    ToAgent,
    TokensKept,
    WakeUp,
    WeightsFailed,
    WeightsLoaded,
    Welcome,
)
from polyrl_rollout.agent.protocol import AgentProtocol, Stream
from polyrl_rollout.engines.port import TokenChunk
from polyrl_rollout.engines.trial import AGAIN_S
from polyrl_rollout.testing.rests import Rests
from polyrl_rollout.testing.simulation.invariants import Violation
from polyrl_rollout.testing.simulation.model import receipt_of
from polyrl_rollout.testing.simulation.schedule import SLOWNESS, EnginePlan
from polyrl_rollout.testing.simulation.world import Link, World

FRAME_S: Final = 0.03
RECONNECT_S: Final = (0.05, 1.0)
FLOOD_S: Final = 0.01
"""Pause between two rounds of a flood: more than a sound agent says in a second is said in a tenth of it."""

LATE_END_SHARE: Final = 0.3
"""Share of the ends that come in a frame of their own."""


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
        """Lies still to be sent, by kind."""
        self._has_lied = False
        self._link: Link | None = None
        self._inbox: deque[ToAgent] = deque()
        """What came while it was frozen, in order."""
        self._protocol = AgentProtocol()
        self._book = self._protocol.book
        self._loading = False
        self._framing = False
        """Whether the next frame is planned; without runs there is none."""
        self._floods = False
        self._lost = False
        """Whether a frame of this process may ever have been lost."""
        self.sleepless_until = 0.0
        """Until when it does not get to sleep."""
        self._rests = Rests(world, self)
        self._heartbeat_at = self._tried_at = self._worked_at = world.now
        world.watcher.work.started(name, self._step_s)
        world.held.started(name, self._step_s)
        self._connect()
        world.after(1.0, self._send_heartbeat)

    # --- connection ---------------------------------------------------------------------------------------------------

    def partition(self, away_s: float = 0.0) -> None:
        """The connection breaks; the agent notices, and dials again a little later; it goes on generating, and reaches
        nobody for `away_s`."""
        if self._link is not None:
            self._link.up = False
            self._link = None
            self._protocol.disconnect()
            self._inbox.clear()  # with its socket
            self._lost = True
            self.world.agents.pop(self.name, None)
            self.world.after(max(away_s, self.world.rng.uniform(*RECONNECT_S)), self._connect)

    def kill(self) -> None:
        """Vanishes."""
        self.alive = False
        if self._link is not None:
            self._link.up = False
            self.world.agents.pop(self.name, None)

    def leave(self) -> None:
        """Says Deregister and ends."""
        if self.alive:
            self._send(Deregister("leaving"))
            self.alive = False

    def _connect(self) -> None:
        if not self.alive or self._link is not None:
            return
        if self._frozen(self._connect):
            return
        self._link = Link(self.world)
        self.world.agents[self.name] = (self._link, self)
        self._greet()

    def _greet(self) -> None:
        pool = Pool.RESERVED if self.plan.reserved else Pool.SPOT
        hello = Hello(
            1,
            self.name,
            pool=pool,
            max_running=self.plan.max_running,
            kv_tokens=self.plan.kv_tokens,
            max_context=self.plan.max_context,
            weight_version=self.version,
            held=self._book.held(),
            versions=self._book.versions(),
            seq=self._book.seq,
            receipts={one: receipt_of(one) for one in (self.version, *self._book.versions())},
            sleeps=self._rests.orders.able,
            asleep=self._rests.orders.asleep,
        )
        self._send(hello)

    def send(self, message: Any) -> None:
        """To the manager, if it can be reached."""
        self._send(message)

    def _send(self, message: Any) -> None:
        if self._link is not None:
            self._link.carry(0, lambda: self.world.from_agent(self.name, message))

    def _frozen(self, again: Callable[[], None]) -> bool:
        if self.world.now < self.frozen_until:
            self.world.at(self.frozen_until, again)
            return True
        return False

    # --- messages -----------------------------------------------------------------------------------------------------

    def receive(self, message: ToAgent) -> None:
        """One message of the manager. One that is frozen again before it was awake reads in order all the same."""
        self._inbox.append(message)
        self._read_one()

    def _read_one(self) -> None:
        if self.alive and self._inbox and not self._frozen(self._read_one):
            self._take(self._inbox.popleft())

    def _take(self, message: ToAgent) -> None:
        if not self._protocol.counts(message) or (isinstance(message, Cancel) and self._lie("lieForeign")):
            return
        if isinstance(message, Resend):
            self._check_resend(message)
        held = dict(self._book.streams)
        self._protocol.receive(message, self.world.now)
        if isinstance(message, TokensKept):
            self._check_forgotten([stream for number, stream in held.items() if number not in self._book.streams])
        handler = _HANDLERS.get(type(message))
        if handler is not None:
            handler(self, message)

    def handle_fenced(self, _: Fenced) -> None:
        self._greet()

    def handle_welcome(self, _: Welcome) -> None:
        self._rests.orders.welcomed()
        undelivered = self._protocol.undelivered()
        self._send_rows(flush=bool(undelivered))  # tokens first
        for one in undelivered:
            self._hand_back(one.assignment, HandBackReason(one.reason))

    def handle_assign(self, assign: Assign) -> None:
        if self._floods and assign.assignment in self._book.streams:
            return  # it asked for the text of what it runs
        answer = self._refusal(assign) or self._protocol.accept(assign, self.version)
        if isinstance(answer, HandBack | PrefixUnknown):
            self._send(answer)
            return
        if isinstance(answer, Stream):
            self.world.watcher.assigned(self.name, answer.assign, self.world.now)
            self._check_room()
        self._worked_at = self.world.now
        if not self._framing:
            self._framing = True
            self.world.after(max(FRAME_S, self._step_s()), self._frame)

    def _refusal(self, assign: Assign) -> HandBack | None:
        """The refusal of a sample that this engine cannot generate, or says so."""
        if self._protocol.draining or not assign.min_version <= self.version <= assign.max_version:
            return None
        if self.plan.rejects or self.world.watcher.poisoned(assign.sample) or self._lie("reject"):
            return HandBack(assign.assignment, HandBackReason.REJECTED, detail="it cannot be tokenized")
        return HandBack(assign.assignment, HandBackReason.ENGINE_ERROR) if self._lie("engineError") else None

    def handle_recall(self, recall: Recall) -> None:
        self._send_rows(flush=True)
        if self._book.is_unfinished(recall.assignment):
            self._hand_back(recall.assignment, HandBackReason.RECALLED)

    def _hand_back(self, assignment: int, reason: HandBackReason) -> None:
        message = self._protocol.hand_back(assignment, reason)
        if message is not None:
            self._send(message)

    def _check_resend(self, resend: Resend) -> None:
        stream = self._book.streams.get(resend.assignment)
        if stream is not None and resend.offset < stream.assign.offset:
            text = f"{self.name} was asked for position {resend.offset} of a sample it got at {stream.assign.offset}"
            raise Violation(self.world.now, "I10", text)

    def _check_forgotten(self, gone: list[Stream]) -> None:
        """A receipt makes an agent forget what has ended, for which nobody may still wait, and what it gave back, of
        which the manager has everything and learns so next."""
        live = self.world.manager.ledger.state.assignments
        for stream in gone:
            number = stream.assign.assignment
            if number not in live or live[number].engine != self.name or self.world.is_manager_away:
                continue
            if not stream.given_back or live[number].length < stream.length:
                text = f"{self.name} forgets assignment {number} by a receipt, of which {live[number].length} have come"
                raise Violation(self.world.now, "I10", text)

    def _check_room(self) -> None:
        # Of one that greets in a flood: a Welcome of a greeting whose connection is gone is taken for the next one's.
        running = len(self._book.unfinished())
        if running > self.plan.max_running and not (self._has_lied or self._floods):
            text = f"{self.name} takes {self.plan.max_running} at once, and was given {running}"
            raise Violation(self.world.now, "I7", text)

    def handle_rest(self, order: GoToSleep | WakeUp) -> None:
        self._rests.order(order)

    @property
    def is_welcome(self) -> bool:
        """Its last greeting was answered."""
        return self._protocol.welcome is not None

    def confirm_awake(self) -> None:
        """What it serves, if it does not load just now."""
        if self.version >= 0 and not self._loading:
            self._send_loaded(0.0)

    def rest(self) -> None:
        """Hands back what it runs; its weights are void from now on."""
        self._send_rows(flush=True)
        for stream in self._book.unfinished():
            self._hand_back(stream.assign.assignment, HandBackReason.RECALLED)
        self.version = -1

    def rise(self, version: int) -> None:
        """Has its memory again, and loads."""
        if version >= 0:
            self._load(version)

    def handle_announce(self, announce: Announce) -> None:
        if self._rests.keeps(announce.version):
            return
        if announce.version == self.version:
            self._send_loaded(0.0)
        elif announce.version < self.version:
            self._send(WeightsFailed(announce.version, self.version, reason="a newer one is served"))
        elif not self._loading:
            self._loading = True
            self.world.after(self.plan.load_s, lambda: self._load(announce.version))

    def handle_drain(self, drain: StartDrain) -> None:
        if not self._protocol.draining:
            self._protocol.draining = True
            self.world.after(drain.deadline_s * 0.8, self._hand_all_back)

    def _load(self, version: int) -> None:
        self._loading = False
        if self._rests.keeps(version):
            return
        if not self.alive or self._frozen(lambda: self._load(version)):
            return
        if self._lie("failWeights"):
            self._send(WeightsFailed(version, self.version, reason="a chunk did not match its hash"))
            return
        self._send_rows(flush=True)
        self.version = version
        self.world.watcher.verified(self.name, version)
        for stream in self._book.unfinished():
            if not stream.assign.min_version <= version <= stream.assign.max_version:
                self._hand_back(stream.assign.assignment, HandBackReason.VERSION_CHANGED)
        self._send_loaded(0.1)
        newest = self.world.watcher.published
        if newest > version:
            self._loading = True
            self.world.after(self.plan.load_s, lambda: self._load(newest))

    def _send_loaded(self, seconds: float) -> None:
        self._send(
            WeightsLoaded(
                self.version,
                seconds,
                load_seconds=seconds,
                bytes_pulled=1000,
                receipt=receipt_of(self.version),
                step_seconds=self._tried_s(),
                tried_seconds_ago=self.world.now - self._tried_at,
            )
        )

    def _tried_s(self) -> float:
        """Seconds of a decoding step, as its agent says; 0 for every other engine, as of agents from before trials."""
        return 0.0 if sum(self.name.encode()) % 2 else self._step_s()

    def _try_again(self) -> None:
        """Its agent does, of one that has had no work for a while."""
        works = self._book.streams or self._loading or self.version < 0 or self._protocol.draining or self.plan.reserved
        if not works and self.world.now >= max(self._worked_at, self._tried_at) + AGAIN_S:
            self._tried_at = self.world.now
            self._send_loaded(0.0)

    def _hand_all_back(self) -> None:
        if not self.alive or self._frozen(self._hand_all_back):
            return
        self._send_rows(flush=True)
        for stream in self._book.unfinished():
            self._hand_back(stream.assign.assignment, HandBackReason.DRAINING)
        self.world.after(0.2, self.leave)

    def leaving(self, seconds: float) -> None:
        """A preemption notice: it says so, and is gone after `seconds`."""
        self._send(Leaving(seconds, "spot notice"))
        self.world.after(seconds, self.kill)

    # --- generating ---------------------------------------------------------------------------------------------------

    def _send_heartbeat(self) -> None:
        if self.alive and not self._frozen(self._send_heartbeat):
            self._doubt_lease()
            free = max(0, self.plan.kv_tokens - self._book.text_tokens())
            self._send(Heartbeat(len(self._book.streams), 0, kv_free_tokens=free, newest=self._book.newest))
            self._try_again()
            self.world.after(1.0, self._send_heartbeat)

    def _doubt_lease(self) -> None:
        """One that shares devices reads nothing that came while it was frozen."""
        silent_s, self._heartbeat_at = self.world.now - self._heartbeat_at, self.world.now
        welcome = self._protocol.welcome
        if self._rests.orders.able and welcome is not None and silent_s > welcome.lease_s:
            self.partition()

    def _frame(self) -> None:
        if not self.alive or self._frozen(self._frame):
            return
        if self.world.now >= self.stalled_until:
            for stream in self._book.unfinished():
                self._generate(stream)
                self._worked_at = self.world.now
        self._send_rows(flush=False)
        self._framing = bool(self._book.streams)
        if self._framing:
            self.world.after(max(FRAME_S, self._step_s()), self._frame)

    def _step_s(self) -> float:
        return self.plan.step_s * (SLOWNESS if self.world.now < self.slow_until else 1)

    def _generate(self, stream: Stream) -> None:
        text, begin, limit = (
            self.world.model.text(stream.assign.sample),
            stream.length,
            stream.length + stream.remaining,
        )
        end = text.until_stop(begin, min(begin + max(1, int(FRAME_S / self._step_s())), limit))
        finish = None
        if text.stops_before(end):
            finish = Finish.STOP
        elif end >= limit:
            finish = Finish.LENGTH
            end += 3 if self._lie("lieBudget") else 0
        elif self._lie("lieLength"):
            finish = Finish.LENGTH
        ids, logprobs = text.tokens[begin:end].tolist(), np.frombuffer(text.logprobs, "<f4")[begin:end].tolist()
        self._book.add(
            stream.assign.assignment, TokenChunk(ids, logprobs, version=self.version, finish=finish), self.world.now
        )

    def _send_rows(self, *, flush: bool) -> None:
        if self._link is None or not self._protocol.welcome or (not flush and self.world.now < self.stalled_until):
            return
        late: list[tuple[Stream, int]] = []
        altered: list[tuple[Stream, int]] = []
        for stream in self._book.streams.values():
            if not stream.unsent and (not stream.finish or stream.finish_sent):
                continue
            # The end is sometimes sent only after the last token: an engine may die in between.
            if stream.finish and stream.unsent and self.world.rng.random() < LATE_END_SHARE:
                late.append((stream, stream.finish))
                stream.finish = 0
            # Only a token that the manager has can be contradicted; one that was lost on the way is sent first.
            if not self._lost and self._lie("lieTokens") and stream.sent > stream.assign.offset:
                altered.append((stream, stream.sent - 1 - stream.assign.offset))
                self._book.resend(stream.assign.assignment, stream.sent - 1, self.world.now)
        for stream, index in altered:
            stream.ids[index] += 1
        for frame in self._book.pack(self.world.now, FRAME_S, flush=True):
            self._send_deltas(frame)
        for stream, index in altered:
            stream.ids[index] -= 1
        for stream, finish in late:
            stream.finish = finish

    def _send_deltas(self, frame: Deltas) -> None:
        if self._lie("lieVersion"):
            frame = msgspec.structs.replace(frame, version=frame.version + 1)
        if self._lie("loseFrame"):
            self._lost = True
            return
        self._send(frame)
        if self._lie("repeatFrame"):
            self._send(frame)

    def flood(self, until: float) -> None:
        """Greets, sends all its tokens again, and asks for the text of all that it runs, which it has; and again, until
        then."""
        if not self.alive or self.world.now >= until:
            return
        self._floods = True
        if not self._frozen(lambda: self.flood(until)):
            self._greet()
            for stream in self._book.unfinished():
                self._book.resend(stream.assign.assignment, stream.assign.offset, self.world.now)
                self._send(PrefixUnknown(stream.assign.assignment))
            self._send_rows(flush=True)
            self.world.after(FLOOD_S, lambda: self.flood(until))

    def _lie(self, kind: str) -> bool:
        left = self.lies.get(kind, 0)
        if left:
            self.lies[kind] = left - 1
            self._has_lied = True
        return left > 0


_HANDLERS: Final[dict[type, Callable[[SimulatedEngine, Any], None]]] = {
    Fenced: SimulatedEngine.handle_fenced,
    Welcome: SimulatedEngine.handle_welcome,
    Assign: SimulatedEngine.handle_assign,
    Recall: SimulatedEngine.handle_recall,
    Announce: SimulatedEngine.handle_announce,
    GoToSleep: SimulatedEngine.handle_rest,
    WakeUp: SimulatedEngine.handle_rest,
    StartDrain: SimulatedEngine.handle_drain,
}
