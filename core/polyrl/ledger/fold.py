"""fold(state, fact): the only way a ledger's state changes. Replay and live run are the same lines.

A fact has been decided; nothing here judges it again, and nothing here fails on a fact that a ledger recorded.

Refuses to hold: decisions, messages. Read next: `fold_samples`, then `decision`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from polyrl.ledger import facts as f
from polyrl.ledger import fold_engines, fold_samples
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
    f.GroupSubmitted: fold_samples.group_submitted,
    f.Assigned: fold_samples.assigned,
    f.PlacementHeld: fold_samples.placement_held,
    f.PlacementPaused: fold_samples.placement_paused,
    f.BalancePaused: fold_samples.balance_paused,
    f.TokensTaken: fold_samples.tokens_taken,
    f.ReturnAsked: fold_samples.return_asked,
    f.Moved: fold_samples.moved,
    f.TurnEnded: fold_samples.turn_ended,
    f.TurnAsked: fold_samples.turn_asked,
    f.TurnExtended: fold_samples.turn_extended,
    f.SampleScored: fold_samples.sample_scored,
    f.GroupCompleted: fold_samples.group_completed,
    f.GroupDiscarded: fold_samples.group_discarded,
    f.NextAsked: fold_samples.next_asked,
    f.NextClosed: fold_samples.next_closed,
    f.BatchPacked: fold_samples.batch_packed,
    f.BatchAcknowledged: fold_samples.batch_acknowledged,
    f.BatchReturned: fold_samples.batch_returned,
    f.StepEnded: fold_engines.step_ended,
    f.VersionPublished: fold_engines.version_published,
    f.WindowSet: fold_engines.window_set,
    f.Reported: fold_engines.reported,
    f.RequestDone: fold_engines.request_done,
    f.TrainerHeard: fold_engines.trainer_heard,
    f.TrainerGreeted: fold_engines.trainer_greeted,
    f.NumbersTaken: fold_samples.numbers_taken,
    f.RunFinished: fold_engines.run_finished,
    f.EngineGreeted: fold_engines.engine_greeted,
    f.EngineHeard: fold_engines.engine_heard,
    f.EngineLoad: fold_engines.engine_load,
    f.EngineServing: fold_engines.engine_serving,
    f.WeightsAwaited: fold_engines.weights_awaited,
    f.EngineStruck: fold_engines.engine_struck,
    f.EngineTrusted: fold_engines.engine_trusted,
    f.EngineDraining: fold_engines.engine_draining,
    f.DrainExpired: fold_engines.drain_expired,
    f.EngineGone: fold_engines.engine_gone,
    f.GapSeen: fold_engines.gap_seen,
    f.LeasesRenewed: fold_engines.leases_renewed,
    f.Ticked: fold_engines.ticked,
    f.Ignored: fold_engines.ignored,
}
