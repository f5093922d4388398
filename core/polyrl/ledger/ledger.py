"""The thin front of the ledger: an input is decided, then what follows from it.

Order after every input: what no longer fits is discarded, waiting requests are answered, and with them the reserved
window follows the trainer; then work is placed, and moves.
"""

from __future__ import annotations

from math import inf

from polyrl.ledger.batching import answer_pending
from polyrl.ledger.config import LedgerConfig
from polyrl.ledger.events import FollowUp, LeasesRenewed
from polyrl.ledger.fleet import Fleet
from polyrl.ledger.messages.agents import handle_agent
from polyrl.ledger.messages.trainer import end_steps, handle_trainer
from polyrl.ledger.scheduling import leases
from polyrl.ledger.scheduling.moves import end_unservable
from polyrl.ledger.scheduling.placement import place
from polyrl.ledger.scheduling.rebalance import rebalance
from polyrl.ledger.scheduling.rests import awaits_sleep, follow_window
from polyrl.ledger.scheduling.window import follow_trainer, holds_back
from polyrl.ledger.state import LedgerState
from polyrl.ledger.status import Wait, manager_status, waits_of
from polyrl.ledger.transition import Effects, Transition
from polyrl.status import ManagerStatus
from polyrl.wire import BatchRequest, FromAgent, FromTrainer


class Ledger:
    """Where every sample of a run lives. Raises nothing, whatever its peers send; `now` is seconds of a monotonic
    clock."""

    def __init__(self, config: LedgerConfig, state: LedgerState | None = None) -> None:
        """`state`: what a journal's replay made; default: nothing has happened."""
        self.state = LedgerState(config) if state is None else state
        self.fleet = Fleet(self.state)

    def from_agent(self, engine: str, message: FromAgent, now: float) -> Effects:
        """A message that came on the route of `engine`, the name its agent greets with."""
        transition = self._begin(now)
        handle_agent(transition, engine, message)
        return _settled(transition)

    def from_trainer(self, message: FromTrainer, now: float) -> Effects:
        """A message of the trainer."""
        transition = self._begin(now)
        handle_trainer(transition, message)
        return _settled(transition)

    def tick(self, now: float) -> Effects:
        """To be called at `next_due()` or soon after; too early is harmless."""
        transition = self._begin(now)
        leases.tick(transition)
        end_steps(transition)
        return _settled(transition)

    def resume(self, now: float) -> Effects:
        """To be called once after a restart: nobody's silence counts while this ledger was not running, and engines get
        `return_s` to find it again, since what they hold need not be generated twice."""
        transition = Transition(self.state, now, self.fleet)
        config = transition.config
        transition.record(LeasesRenewed(now + max(0.0, config.return_s - config.lease_s)))
        return _settled(transition)

    def next_due(self) -> float | None:
        """When `tick` must be called at the latest; None while nothing waits. Inputs may lower it: ask after each."""
        return None if self.state.due == inf else self.state.due

    def drain(self, engine: str, deadline_s: float, reason: str, now: float) -> Effects:
        """Lets an engine finish or hand back until `deadline_s` from now; a repetition changes nothing."""
        transition = self._begin(now)
        leases.drain_engine(transition, engine, deadline_s=deadline_s, reason=reason)
        return _settled(transition)

    def status(self, now: float, seq: int = 0) -> ManagerStatus:
        """Counts, engines, the trainer's report; see `manager_status`."""
        return manager_status(self.state, now, seq)

    def waits(self, now: float) -> list[Wait]:
        """Who waits for whom, the longest first."""
        return waits_of(self.state, now)

    def _begin(self, now: float) -> Transition:
        transition = Transition(self.state, now, self.fleet)
        leases.notice_absence(transition)
        return transition


def _settled(transition: Transition) -> Effects:
    if transition.follow_ups:
        end_unservable(transition)
        if FollowUp.PACK in transition.follow_ups:
            answer_pending(transition, _keeps)
        follow_trainer(transition)
        follow_window(transition)
        if FollowUp.PLACE in transition.follow_ups:
            rebalance(transition, place(transition))
    transition.fleet.refresh()
    return transition.effects


def _keeps(transition: Transition, wanted: BatchRequest) -> bool:
    """Whether a batch that could be delivered is not yet."""
    return holds_back(transition, wanted) or awaits_sleep(transition, wanted)
