"""The ledger's status as the HTTP API shows it.

Refuses to hold: what the ledger does not know (connections, sequence numbers: see `control_desk`).
Read next: `http_api`.
"""

from __future__ import annotations

from polyrl.ledger import LedgerStatus
from polyrl.status import EngineState, EngineStatus, ManagerStatus, SampleCounts, TokenCounts


def view_of(status: LedgerStatus, seq: int) -> ManagerStatus:
    """The same moment in the API's words."""
    return ManagerStatus(
        seq=seq,
        run_epoch=status.run_epoch,
        phase=status.phase,
        step=status.step,
        values=status.values,
        weight_version=status.version,
        engines=_engines(status),
        engines_lost=status.losses,
        samples=_samples(status),
        tokens=TokenCounts(
            generated=status.tokens.generated, kept=status.tokens.kept, regenerated=status.tokens.regenerated
        ),
        finished=status.finished,
        ok=status.ok,
        message=status.message,
    )


def _engines(status: LedgerStatus) -> tuple[EngineStatus, ...]:
    return tuple(
        EngineStatus(
            engine=engine.name,
            pool=engine.pool,
            state=EngineState(engine.state),
            weight_version=engine.version,
            running=engine.running,
            max_running=engine.max_running,
            tokens=engine.tokens,
        )
        for engine in status.engines
    )


def _samples(status: LedgerStatus) -> SampleCounts:
    samples = status.samples
    return SampleCounts(
        submitted=samples.submitted,
        acknowledged=samples.acknowledged,
        open=sum(samples.live.values()),
        discarded=samples.discarded,
    )
