"""fold(state, fact): the only way a ledger's state changes. Replay and live run are the same lines.

A fact has been decided; nothing here judges it again, and nothing here fails on a fact that a ledger recorded.

Refuses to hold: decisions, messages. Read next: `fold_samples`, then `decision`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from polyrl.ledger import events as f
from polyrl.ledger.apply import engines, samples
from polyrl.ledger.config import LedgerConfig
from polyrl.ledger.state import State


def fold(state: State, fact: f.Fact) -> None:
    """Applies one fact in place."""
    _FOLDS[type(fact)](state, fact)


def replay(config: LedgerConfig, facts: Iterable[f.Fact]) -> State:
    """The state after `facts`."""
    state = State(config)
    for fact in facts:
        fold(state, fact)
    return state


_FOLDS: Final[dict[type, Callable[[State, Any], None]]] = {
    f.GroupSubmitted: samples.group_submitted,
    f.Assigned: samples.assigned,
    f.PlacementHeld: samples.placement_held,
    f.PlacementPaused: samples.placement_paused,
    f.BalancePaused: samples.balance_paused,
    f.TokensTaken: samples.tokens_taken,
    f.ReturnAsked: samples.return_asked,
    f.Moved: samples.moved,
    f.TurnEnded: samples.turn_ended,
    f.TurnAsked: samples.turn_asked,
    f.TurnExtended: samples.turn_extended,
    f.SampleScored: samples.sample_scored,
    f.GroupCompleted: samples.group_completed,
    f.GroupDiscarded: samples.group_discarded,
    f.NextAsked: samples.next_asked,
    f.NextClosed: samples.next_closed,
    f.BatchPacked: samples.batch_packed,
    f.BatchAcknowledged: samples.batch_acknowledged,
    f.BatchReturned: samples.batch_returned,
    f.StepEnded: engines.step_ended,
    f.VersionPublished: engines.version_published,
    f.WindowSet: engines.window_set,
    f.Reported: engines.reported,
    f.RequestDone: engines.request_done,
    f.TrainerHeard: engines.trainer_heard,
    f.TrainerGreeted: engines.trainer_greeted,
    f.NumbersTaken: samples.numbers_taken,
    f.RunFinished: engines.run_finished,
    f.EngineGreeted: engines.engine_greeted,
    f.EngineHeard: engines.engine_heard,
    f.EngineLoad: engines.engine_load,
    f.EngineServing: engines.engine_serving,
    f.WeightsAwaited: engines.weights_awaited,
    f.EngineStruck: engines.engine_struck,
    f.EngineTrusted: engines.engine_trusted,
    f.EngineDraining: engines.engine_draining,
    f.DrainExpired: engines.drain_expired,
    f.EngineGone: engines.engine_gone,
    f.GapSeen: engines.gap_seen,
    f.LeasesRenewed: engines.leases_renewed,
    f.Ticked: engines.ticked,
    f.Ignored: engines.ignored,
}
