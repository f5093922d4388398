"""fold(state, event): the only way a ledger's state changes. Replay and live run are the same lines.

An event has been decided; nothing here judges it again, and nothing here fails on an event that a ledger recorded.

Refuses to hold: decisions, messages. Read next: `fold_samples`, then `decision`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from polyrl.ledger import events
from polyrl.ledger.apply import engines, samples
from polyrl.ledger.config import LedgerConfig
from polyrl.ledger.state import LedgerState


def apply(state: LedgerState, event: events.Event) -> None:
    """Applies one event in place."""
    _APPLY[type(event)](state, event)


def replay(config: LedgerConfig, history: Iterable[events.Event]) -> LedgerState:
    """The state after `history`."""
    state = LedgerState(config)
    for event in history:
        apply(state, event)
    return state


_APPLY: Final[dict[type, Callable[[LedgerState, Any], None]]] = {
    events.GroupSubmitted: samples.group_submitted,
    events.Assigned: samples.assigned,
    events.PlacementHeld: samples.placement_held,
    events.PlacementPaused: samples.placement_paused,
    events.BalancePaused: samples.balance_paused,
    events.TokensTaken: samples.tokens_taken,
    events.RecallSent: samples.recall_sent,
    events.Moved: samples.moved,
    events.TurnEnded: samples.turn_ended,
    events.VerdictRequested: samples.verdict_requested,
    events.TurnExtended: samples.turn_extended,
    events.SampleScored: samples.sample_scored,
    events.GroupCompleted: samples.group_completed,
    events.GroupDiscarded: samples.group_discarded,
    events.BatchRequested: samples.batch_requested,
    events.BatchRequestClosed: samples.batch_request_closed,
    events.BatchPacked: samples.batch_packed,
    events.BatchAcknowledged: samples.batch_acknowledged,
    events.BatchReturned: samples.batch_returned,
    events.StepEnded: engines.step_ended,
    events.VersionPublished: engines.version_published,
    events.WindowSet: engines.window_set,
    events.Reported: engines.reported,
    events.RequestDone: engines.request_done,
    events.TrainerHeard: engines.trainer_heard,
    events.TrainerGreeted: engines.trainer_greeted,
    events.NumbersTaken: samples.numbers_taken,
    events.RunFinished: engines.run_finished,
    events.EngineGreeted: engines.engine_greeted,
    events.EngineHeard: engines.engine_heard,
    events.EngineLoad: engines.engine_load,
    events.EngineServing: engines.engine_serving,
    events.WeightsAwaited: engines.weights_awaited,
    events.EngineQuarantined: engines.engine_quarantined,
    events.EngineRestored: engines.engine_restored,
    events.EngineDraining: engines.engine_draining,
    events.DrainExpired: engines.drain_expired,
    events.EngineGone: engines.engine_gone,
    events.GapSeen: engines.gap_seen,
    events.LeasesRenewed: engines.leases_renewed,
    events.Ticked: engines.ticked,
    events.Ignored: engines.ignored,
}
