"""Virtual time and the wires: an event heap, ordered links that can break, and the manager in the middle.

A link keeps order while it lasts, as ZeroMQ does; when it breaks, whatever is on it in either direction is lost.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from math import inf
from random import Random
from typing import Any, Final, Protocol

import msgspec

from polyrl.ledger import Effects, LedgerConfig
from polyrl.ledger.state import LedgerState
from polyrl.wire import FromAgent, FromTrainer, ToAgent, TokensKept, ToTrainer, TrainerHello
from polyrl_rollout.testing.simulation.invariants import Violation, Watcher
from polyrl_rollout.testing.simulation.manager import Rows, SimulatedManager, Store
from polyrl_rollout.testing.simulation.model import Model
from polyrl_rollout.testing.simulation.schedule import Schedule
from polyrl_rollout.testing.watches.batch_order import BatchOrder
from polyrl_rollout.testing.watches.device_watch import DeviceWatch
from polyrl_rollout.testing.watches.held_batches import HeldBatches
from polyrl_rollout.testing.watches.held_memory import HeldMemory
from polyrl_rollout.testing.watches.token_versions import TokenVersions

GATHER_S: Final = 0.002
"""Longest time that what agents send waits for its commit, as in production."""

QUIET_S: Final = 1.0
"""Within which a commit that nobody waits for is synced, as in production."""

SYNC_S: Final = ((0.0002, 0.002), (0.0002, 0.002), (0.005, 0.05), (0.2, 1.0))
"""Seconds of one sync, from and to, on the run's disk: a good one, twice; one that others use; one about to fail."""

LATENCY_S: Final = (0.0005, 0.02)
"""Seconds of one message, from those of a socket on the same host to a busy one far away."""

CONFIG: Final = LedgerConfig(
    run_epoch=1,
    progress_deadline_s=6.0,
    refusal_deadline_s=5.0,
    turn_resend_s=2.0,
    turn_resend_max_s=8.0,
    gap_resend_s=0.2,
)
"""Shorter than in production, so that everything they guard happens within a short run."""


EVENTS_AT_ONCE: Final = 10_000
"""More of them at one moment, and time stands still: somebody's next deadline is now, for ever."""

PAUSES_TIMES: Final = 3
"""So many times as long may a run get nowhere where an engine has paused, a minute each time at last."""


class AgentPeer(Protocol):
    """An engine's side of its link."""

    def receive(self, message: ToAgent) -> None: ...

    def partition(self) -> None: ...


class Link:
    """One connection: ordered, slow, and gone when it is cut."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._free_at = [0.0, 0.0]
        self.up = True

    def carry(self, direction: int, deliver: Callable[[], None]) -> None:
        """Calls `deliver` later, after everything sent before in this direction, unless the link is cut first."""
        at = max(self._free_at[direction], self._world.now + self._world.rng.uniform(*LATENCY_S))
        self._free_at[direction] = at
        self._world.at(at, lambda: deliver() if self.up else None)


class World:
    """One run."""

    def __init__(self, schedule: Schedule, make_store: Callable[[LedgerState], Store] = Rows) -> None:
        self.schedule = schedule
        self.rng = Random(schedule.seed + 1)
        self._disk_rng = Random(schedule.seed + 3)
        self._sync_s = self._disk_rng.choice(SYNC_S)
        self.now = 0.0
        longest = 8 + schedule.max_new_tokens + 8 * schedule.max_turns
        self.model = Model(schedule.seed, longest, schedule.mean_turn, schedule.longest_prompt)
        config = msgspec.structs.replace(CONFIG, group_filter=schedule.group_filter)
        self.manager = SimulatedManager(config, make_store)
        self.watcher = Watcher(self.manager.ledger, self.model, schedule)
        self.devices = DeviceWatch()
        self._learn_s = 0.0 if schedule.alone_share else schedule.learn_s  # what is learned alone takes other times
        self.held = HeldBatches(self._learn_s)
        self._memory = HeldMemory()
        self._order, self._versions = BatchOrder(), TokenVersions()
        self.agents: dict[str, tuple[Link, AgentPeer]] = {}
        """By engine name, while a link is up."""
        self.to_trainer: Callable[[ToTrainer], None] = lambda message: None
        self.partition_trainer: Callable[[], None] = lambda: None
        self._away_until = self._heard_from = 0.0
        """When the manager hears again, and when what it was sent meanwhile has been heard."""
        self._sockets: list[Callable[[], None]] = []
        """What came while the manager was away, in order."""
        self.dies_midway: float | None = None
        """The manager is killed between its next commit and the messages that wait for it, and begun so much later."""
        self.power_loss_midway: float | None = None
        """Its machine loses power at the end of its next sync, before that counts."""
        self._survived: int | None = None
        """Up to which commit the journal of a dead manager goes."""
        self._journal_lost = False
        """Whether the dead manager's journal is gone."""
        self._life = 0
        """Counts managers: what one has planned does not happen to the next."""
        self._gathers = self._syncs = self._sync_waits = False
        self.events = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._tick_at = inf

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Does `action` at `time`; what was planned first goes first."""
        self.events += 1
        heapq.heappush(self._heap, (max(time, self.now), self.events, action))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Does `action` in `seconds`."""
        self.at(self.now + seconds, action)

    def run(self, done: Callable[[], bool], quiet_s: float) -> None:
        """Goes on until `done`. Raises Violation when it gets nowhere for `quiet_s`, or nothing is left to happen."""
        at_once = 0
        while not done():
            if not self._heap:
                raise Violation(self.now, "I5", "nothing is left to happen, and the run has not ended")
            at_once = at_once + 1 if self._heap[0][0] <= self.now else 0
            if at_once > EVENTS_AT_ONCE:
                raise Violation(self.now, "I5", f"time stands still: {at_once:,} events at one moment")
            self.now, _, action = heapq.heappop(self._heap)
            if self._is_stuck(quiet_s):
                clock = self.manager.clock(self.now)
                waits = "; ".join(wait.sentence(clock) for wait in self.manager.ledger.waits(clock))
                raise Violation(self.now, "I5", f"the run gets nowhere: {waits}")
            action()

    def _is_stuck(self, quiet_s: float) -> bool:
        """A pause ends: where every frame of the only engine that fits is lost five times, its pauses add up."""
        quiet = self.now - self.watcher.progress_at
        if quiet <= quiet_s:
            return False
        since, engines = self.manager.clock(self.watcher.progress_at), self.manager.ledger.state.engines.values()
        paused = any(since < engine.quarantined_until < inf for engine in engines)
        return not paused or quiet > PAUSES_TIMES * quiet_s

    def send_manager_away(self, seconds: float) -> None:
        """The manager hears nothing for a while, as when its process is stopped; the sockets keep what comes."""
        self._away_until = max(self._away_until, self.now + seconds)
        self.watcher.deaf_until(self._away_until)
        self._heard_from = max(self._heard_from, self._away_until + QUIET_S)
        self.at(self._away_until, self._empty_sockets)

    @property
    def is_manager_away(self) -> bool:
        """What is sent now lies in its sockets."""
        return self.now < self._away_until

    def kill_manager(self, seconds: float, *, power_loss: bool = False, journal_loss: bool = False) -> None:
        """kill -9, or its machine loses power, or is gone with its disk: every connection breaks, what was on the wires
        is lost; `seconds` later another process goes on."""
        self._journal_lost |= journal_loss
        if self._survived is None:
            self._survived = self.manager.store.die(self._disk_rng, power_loss=power_loss)
        self._sockets = [self._restart_manager]
        self._life += 1
        self._gathers = self._syncs = self._sync_waits = False
        self._tick_at = inf
        for _, peer in tuple(self.agents.values()):
            peer.partition()
        self.partition_trainer()
        self.send_manager_away(seconds)

    def _restart_manager(self) -> None:
        assert self._survived is not None
        if self._journal_lost:
            self.manager.begin_anew(self.now)
            self.watcher.journal_lost(self.manager.ledger, self.manager.clock(self.now))
            self.held = HeldBatches(self._learn_s, self.held.paces)
        else:
            self.watcher.survived(self._survived, self.now)
            self.manager.restart(self.now)
            self.held.restarted(self.manager.ledger.state)
            self.watcher.restarted(self.manager.ledger, self.now, self.manager.clock(self.now))
        self._survived, self._journal_lost = None, False
        self._memory.restarted()
        self._order.follow(self.manager.ledger.state)
        config = self.manager.ledger.state.config
        self.watcher.deaf_until(self.now + config.return_s - config.lease_s)
        self._heard_from = self.now + config.return_s
        self._act(self.manager.ledger.resume(self.manager.clock(self.now)))

    def _wait_in_socket(self, again: Callable[[], None]) -> bool:
        """Whether the manager is away: then `again` is called when it looks into its sockets, if it still lives."""
        away = self.now < self._away_until
        if away:
            self._sockets.append(again)
        return away

    def _empty_sockets(self) -> None:
        while self._sockets and self.now >= self._away_until:
            self._sockets.pop(0)()

    def from_agent(self, engine: str, message: FromAgent) -> None:
        """A message arrives at the ledger."""
        if self._wait_in_socket(lambda: self.from_agent(engine, message)):
            return
        tokens = self.watcher.before_agent(engine, message, self.now)
        outcome = self.manager.ledger.from_agent(engine, message, self.manager.clock(self.now))
        self._act(outcome, message, at_once=False, tokens=tokens)

    def from_trainer(self, message: FromTrainer) -> None:
        """A message of the trainer arrives at the ledger."""
        if self._wait_in_socket(lambda: self.from_trainer(message)):
            return
        self.watcher.before_trainer(message)
        self._act(self.manager.ledger.from_trainer(message, self.manager.clock(self.now)), message)
        if isinstance(message, TrainerHello):
            self._sync(self._life, self.manager.store.commits)

    def operator_drains(self, engine: str, seconds: float) -> None:
        """The operator asks for a drain, twice, as it may."""
        if self._wait_in_socket(lambda: self.operator_drains(engine, seconds)):
            return
        for _ in range(2):
            ledger, clock = self.manager.ledger, self.manager.clock(self.now)
            self._act(ledger.drain(engine, seconds, "drained by the operator", clock))

    def rests(self, engine: str, *, asleep: bool) -> None:
        """An engine on the trainer's devices holds no memory there from now on, or takes it again."""
        wrong = self.devices.rests(engine, self.manager.ledger.state.engines.keys(), asleep=asleep)
        # A manager that has lost its journal does not know that the trainer learns.
        if all(fault.kind != "journalLoss" for fault in self.schedule.faults):
            self._check(wrong)

    def _check(self, wrong: str, invariant: str = "I9") -> None:
        if wrong:
            raise Violation(self.now, invariant, wrong)

    def _act(self, outcome: Effects, message: Any = None, *, at_once: bool = True, tokens: int = 0) -> None:
        """Agents' frames share commits; everybody else is answered at once. `message`: None as time passes."""
        self.manager.gather(outcome)
        self.watcher.after(outcome, self.now, tokens)
        self._check(self.devices.happened(outcome.events, self.manager.ledger.state.engines.keys()))
        state, clock = self.manager.ledger.state, self.manager.clock(self.now)
        if self.now < self._heard_from:
            self.held.deaf(state, clock)
        else:
            self._check(self.held.overdue(state, clock))
        self.held.happened(outcome.events, state)
        self._check(self._order.happened(outcome.events, state), "I2")
        self._check(self._versions.happened(message, outcome, state), "I6")
        self._check(self._memory.happened(message, outcome, state, clock), "I11")
        life = self._life
        if at_once:
            self._commit(life)
        elif not self._gathers:
            self._gathers = True
            self.after(self._disk_rng.uniform(0.0, GATHER_S), lambda: self._commit(life))
        due = self.manager.due()
        if life == self._life and due is not None and due < self._tick_at:
            self._tick_at = due
            self.at(due, self._tick)

    def _commit(self, life: int) -> None:
        if life != self._life or self._wait_in_socket(lambda: self._commit(life)):
            return
        self._gathers = False
        speaks = self.manager.commit(self.now)
        self.watcher.committed(self.manager.store.commits)
        if self.dies_midway is not None and speaks:
            seconds, self.dies_midway = self.dies_midway, None
            self.kill_manager(seconds)
            return
        self._send()

    def _send(self) -> None:
        """What may leave; for the rest the disk is waited for, and where nobody waits it is synced now and then."""
        outbox, store = self.manager.outbox, self.manager.store
        ready = outbox.take(store.synced)
        self.watcher.survived(store.synced, self.now)
        for engine, message in ready.to_agents:
            if isinstance(message, TokensKept):
                self.watcher.tokens_kept(engine, message.seq)
            if engine in self.agents:
                link, peer = self.agents[engine]
                link.carry(1, lambda peer=peer, message=message: peer.receive(message))  # type: ignore[misc]
        for answer in ready.to_trainer:
            self.to_trainer(answer)
        life = self._life
        if outbox.waits:
            self._begin_sync(life)
        elif store.commits > store.synced and not self._sync_waits:
            self._sync_waits = True
            self.after(QUIET_S, lambda: self._begin_sync(life))

    def _begin_sync(self, life: int) -> None:
        if life != self._life or self._syncs:
            return
        self._syncs, self._sync_waits, commits = True, False, self.manager.store.commits
        self.after(self._disk_rng.uniform(*self._sync_s), lambda: self._sync(life, commits))

    def _sync(self, life: int, commits: int) -> None:
        if life != self._life or self._wait_in_socket(lambda: self._sync(life, commits)):
            return
        if self.power_loss_midway is not None:
            seconds, self.power_loss_midway = self.power_loss_midway, None
            self.kill_manager(seconds, power_loss=True)
            return
        self._syncs = False
        self.manager.store.sync(commits)
        self._send()

    def _tick(self) -> None:
        if self._wait_in_socket(self._tick) or self.now < self._tick_at:
            return
        self._tick_at = inf
        self._act(self.manager.ledger.tick(self.manager.clock(self.now)))
