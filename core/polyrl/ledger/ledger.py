"""The thin front of the ledger: an input goes to its decider, then what it stirred up is decided.

Order after every input: what no longer fits is moved or discarded, work is placed, waiting requests are answered.

Refuses to hold: rules, sockets, clocks. Read next: `state`, `facts`, `fold`, then the deciders.
"""

from __future__ import annotations

from math import inf

from polyrl.ledger.batching.discards import discard_unservable
from polyrl.ledger.batching.packing import answer_pending
from polyrl.ledger.config import LedgerConfig
from polyrl.ledger.decision import Decision, Outcome
from polyrl.ledger.events import Effect, LeasesRenewed
from polyrl.ledger.messages.agents import hear_agent
from polyrl.ledger.messages.trainer import hear_trainer
from polyrl.ledger.scheduling.drains import leave_draining
from polyrl.ledger.scheduling.leases import drain_engine
from polyrl.ledger.scheduling.leases import tick as look_through
from polyrl.ledger.scheduling.placement import place
from polyrl.ledger.scheduling.rebalance import rebalance
from polyrl.ledger.scheduling.reserved import hand_over
from polyrl.ledger.state import State
from polyrl.ledger.status import LedgerStatus, status_of
from polyrl.ledger.waits import Wait, waits_of
from polyrl.wire import FromAgent, FromTrainer


class Ledger:
    """Where every sample of a run lives. Raises nothing, whatever it is told; `now` is seconds of a monotonic clock."""

    def __init__(self, config: LedgerConfig, state: State | None = None) -> None:
        """`state`: what `fold.replay` made of a journal; default: nothing has happened."""
        self.state = State(config) if state is None else state

    def from_agent(self, engine: str, message: FromAgent, now: float) -> Outcome:
        """A message that came on the route of `engine`, the name its agent greets with."""
        decision = Decision(self.state, now)
        hear_agent(decision, engine, message)
        return _settled(decision)

    def from_trainer(self, message: FromTrainer, now: float) -> Outcome:
        """A message of the trainer."""
        decision = Decision(self.state, now)
        hear_trainer(decision, message)
        return _settled(decision)

    def tick(self, now: float) -> Outcome:
        """To be called at `next_due()` or soon after; too early is harmless."""
        decision = Decision(self.state, now)
        look_through(decision)
        return _settled(decision)

    def resume(self, now: float) -> Outcome:
        """To be called once after a restart: nobody's silence counts while this ledger was not running, and engines get
        `return_s` to find it again, since what they hold need not be generated twice."""
        decision = Decision(self.state, now)
        config = decision.config
        decision.record(LeasesRenewed(now + max(0.0, config.return_s - config.lease_s)))
        return _settled(decision)

    def next_due(self) -> float | None:
        """When `tick` must be called at the latest; None while nothing waits. Inputs may lower it: ask after each."""
        return None if self.state.due == inf else self.state.due

    def drain(self, engine: str, deadline_s: float, reason: str, now: float) -> Outcome:
        """Lets an engine finish or hand back until `deadline_s` from now; saying it again changes nothing."""
        decision = Decision(self.state, now)
        drain_engine(decision, engine, deadline_s, reason)
        return _settled(decision)

    def status(self, now: float) -> LedgerStatus:
        """Counts, engines, steps."""
        return status_of(self.state, now)

    def waits(self, now: float) -> list[Wait]:
        """Who waits for whom, the longest first."""
        return waits_of(self.state, now)


def _settled(d: Decision) -> Outcome:
    if d.effects:
        if Effect.FIT in d.effects:
            hand_over(d)
            discard_unservable(d, [number for _, number in d.state.queue])
        elif d.requeued:
            discard_unservable(d, d.requeued)
        if Effect.PLACE in d.effects:
            place(d)
            leave_draining(d)
            rebalance(d)
        if Effect.PACK in d.effects:
            answer_pending(d)
    return d.outcome
