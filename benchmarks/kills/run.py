"""Rollouts killed without notice, again and again: `python benchmarks/kills/run.py --kills 50 --seed 0`.

A run of real processes: the manager with its journal, three rollouts with their embedded engines, the runner's own loop
(`LocalRun`) that replaces what dies. Only the trainer is a stand-in, which keeps greedy groups in flight. A rollout at
work is killed at a random moment, then the next one. Prints one JSON object; ends with 1 when a promise did not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import msgspec
from evidence import Report, judge
from journal import Kill
from killer import Killer, LeaseOnly, longest_s
from plan import MODEL, PROMPT_TOKENS, PROMPTS, Plan
from reference import decode

from polyrl.forks import ForkServer
from polyrl.worker import RunLocation, Worker, Workers, workers_of
from polyrl_cli.local.chaos import FaultSchedule
from polyrl_cli.local.loaded import loaded_libraries
from polyrl_cli.local.manager import LocalManager
from polyrl_cli.local.process_fleet import ProcessFleet
from polyrl_cli.local.run_folder import RunFolder, locked, prepare_folder
from polyrl_cli.local.runner import LocalRun
from polyrl_cli.report.timeline import Timeline

HERE: Final = Path(__file__).parent

TOKENS: Final = 240

TOKENS_BETWEEN: Final = (8_000, 24_000)
"""Twenty seconds on two busy cores. Real markets leave hours; what is lost is a moment's tokens per kill, so the share
lost says how often there are kills before it says anything else."""

ENDING_S: Final = 120.0
"""For what is in flight after the last kill."""


def workers(plan: Plan, folder: RunFolder, run_epoch: int) -> Workers:
    """The job's own workers; the trainer is the stand-in, the rollouts count their tokens."""
    place = RunLocation(
        str(folder.root),
        str(folder.root),
        python=sys.executable,
        run_epoch=run_epoch,
        cpus=len(os.sched_getaffinity(0)),
    )
    wanted = workers_of(plan.job().spec, place)
    assert wanted.rollout is not None
    counters = folder.root / "counters"
    counters.mkdir()
    return dataclasses.replace(
        wanted,
        trainer=started_by(wanted.trainer, str(HERE / "workload.py")),
        rollout=started_by(wanted.rollout, str(HERE / "counted_agent.py"), str(counters)),
    )


def started_by(worker: Worker, *script: str) -> Worker:
    """The worker with `script` in the place of its module."""
    python, flag, _, *rest = worker.argv
    assert flag == "-m"
    return dataclasses.replace(worker, argv=(python, flag, "polyrl.testing.script", *script, *rest))


async def run(folder: RunFolder, run_epoch: int, plan: Plan, forks: ForkServer | None) -> list[Kill]:
    """The whole run. Raises RuntimeError when it does not end well, TimeoutError when it does not end."""
    client_class = LocalManager if plan.exits_reported else LeaseOnly
    client = client_class(folder.endpoints, folder.keys / "operator.key", run_epoch)
    timeline = Timeline(folder.timeline, time.monotonic, lambda _: None)
    fleet = ProcessFleet(folder.logs, forks)
    local = LocalRun(workers(plan, folder, run_epoch), fleet, client, timeline, folder.keys)
    killer = Killer(local, fleet, plan)
    killing = asyncio.create_task(killer.kill())
    killing.add_done_callback(lambda _: (folder.root / "enough").touch())
    try:
        async with asyncio.timeout(plan.kills * longest_s(plan) + ENDING_S):
            end = await local.run(FaultSchedule([]))
    finally:
        killing.cancel()
        timeline.close()
    if not end.ok:
        raise RuntimeError(f"{end.why}; see {folder.logs}")
    await killing
    return killer.kills


def measure(root: Path, plan: Plan) -> Report:
    """Runs in the empty folder `root` and judges."""
    reference = decode(MODEL, plan.seed, PROMPTS, PROMPT_TOKENS, plan.tokens)
    (root / "workload.json").write_bytes(msgspec.json.encode(plan.workload(reference.prompts)))
    folder = RunFolder(root)
    began = time.monotonic()
    with locked(folder), loaded_libraries() as forks:
        kills = asyncio.run(run(folder, prepare_folder(folder, plan.job(), root), plan, forks))
    return judge(root, kills, reference, plan, time.monotonic() - began)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each response")
    parser.add_argument(
        "--between", type=int, nargs=2, default=TOKENS_BETWEEN, metavar=("LEAST", "MOST"), help="tokens between kills"
    )
    parser.add_argument("--rollouts", type=int, default=3)
    parser.add_argument("--engine", choices=("embedded", "sglang"), default="embedded")
    parser.add_argument("--lease-only", action="store_true", help="the manager learns of a loss from silence alone")
    parser.add_argument("--out", type=Path, help="an empty folder to keep; default: one that is removed")
    return parser.parse_args()


def main() -> int:
    """Exit code."""
    options = arguments()
    least, most = options.between
    plan = Plan(
        kills=options.kills,
        seed=options.seed,
        tokens=options.tokens,
        tokens_between=(least, most),
        rollouts=options.rollouts,
        engine=options.engine,
        exits_reported=not options.lease_only,
    )
    with tempfile.TemporaryDirectory() as scratch:
        root = (options.out or Path(scratch)).resolve()
        root.mkdir(parents=True, exist_ok=True)
        report = measure(root, plan)
    print(msgspec.json.format(msgspec.json.encode(report)).decode())
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
