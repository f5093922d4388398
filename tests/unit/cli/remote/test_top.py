"""The picture of a job on a cluster: what its manager counts, not this machine's clock."""

from collections.abc import Iterable

from polyrl.control import History, Waits
from polyrl.history.fleet import FleetEvent
from polyrl.manifest.spec import JobSpec
from polyrl.sample import Pool
from polyrl.status import ManagerStatus
from polyrl_cli.remote.manager import Snapshot
from polyrl_cli.remote.top import take
from polyrl_cli.report.progress import Progress

SPEC = {"recipe": {"mode": "rl", "model": {"path": "m"}}, "pricing": {"spotPerHour": 3600.0}}


def a_snapshot(seconds: float, machines: dict[Pool, int], events: Iterable[FleetEvent] = ()) -> Snapshot:
    history = History(
        began=0.0, resumed=False, rows=(), events=tuple(events), seconds={Pool.SPOT: seconds}, machines=machines
    )
    return Snapshot(ManagerStatus(seq=1, run_epoch=1), history, Waits(()))


def test_the_cost_is_what_the_manager_counts() -> None:
    progress = Progress("job", JobSpec.model_validate(SPEC), lambda: 3600.0, 0.0)
    started = FleetEvent(time=1.0, t=1.0, kind="started", worker="job-rollout-0", pool=Pool.SPOT)
    take(progress, a_snapshot(50.0, {Pool.SPOT: 1}, [started]))
    assert progress.cost == "50.00 USD (spot 50.00), 3600.00 per hour now"
    take(progress, a_snapshot(100.0, {}))
    assert progress.cost == "100.00 USD (spot 100.00)"
