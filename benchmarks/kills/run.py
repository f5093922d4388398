"""Rollouts killed without notice, again and again: `python benchmarks/kills/run.py --kills 50 --seed 0`.

A run of real processes: the manager with its journal, three rollouts with their embedded engines, the runner's own loop
(`LocalRun`) that replaces what dies. Only the trainer is a stand-in, which keeps greedy groups in flight. A rollout at
work is killed (SIGKILL to its whole process group) at a random moment, then the next one. Prints one JSON object;
ends with 1 when a promise did not hold.

Refuses to hold: what is measured (see `evidence`). Read next: `workload`, `evidence`.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import msgspec
from evidence import Kill, Report, judge
from reference import Reference, decode

from polyrl.manifest.job import PolyRLJob
from polyrl.status import EngineState
from polyrl.worker import Place, Worker, Workers, workers_of
from polyrl_operator.control_client import ControlClient
from polyrl_operator.fault_injection import FaultDrill
from polyrl_operator.local_run import LocalRun
from polyrl_operator.process_fleet import ProcessFleet
from polyrl_operator.run_folder import RunFolder, held, prepare
from polyrl_operator.timeline import Timeline

HERE: Final = Path(__file__).parent
ROLLOUTS: Final = 3
PROMPTS, PROMPT_TOKENS, TOKENS = 32, 12, 240
GROUPS_IN_FLIGHT, SAMPLES_PER_GROUP = 12, 2

TOKENS_BETWEEN: Final = (8_000, 24_000)
"""Accepted tokens between two kills, drawn evenly: twenty seconds on two busy cores. Real markets leave hours; what is
lost is a moment's tokens per kill, so the share lost says how often there are kills before it says anything else."""

JITTER_S: Final = 0.5
"""Upper end of a further random pause: the status comes five times a second, a kill at any moment."""

LOOK_S: Final = 0.05
"""Between two looks at the status; `LocalRun` keeps the newest one and announces it to nobody."""

SECONDS_PER_KILL: Final = 120.0
"""Longest time from one kill to the next: a start costs several seconds of a core, and cores may be shared."""

ENDING_S: Final = 120.0
"""For what is in flight after the last kill."""

MODEL: Final[dict[str, Any]] = {
    "model_type": "qwen2",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": 0.15,
}

MANIFEST: Final = {
    "apiVersion": "polyrl.dev/v1alpha1",
    "kind": "PolyRLJob",
    "metadata": {"name": "kills"},
    "spec": {
        "recipe": {
            "mode": "rl",
            "model": {"config": MODEL, "tokenizer": {"type": "characters", "alphabet": "0123456789"}},
            "data": {"rl": [{"path": "rl.jsonl"}]},
            "reward": {"function": "reward:score"},
            "algorithm": {"steps": 1},
            "sampling": {"maxNewTokens": TOKENS},
        },
        "trainer": {"reservedEngine": False},
        "rollout": {
            "replicas": ROLLOUTS,
            "maxReplicas": ROLLOUTS,
            "engine": {"type": "embedded", "maxRunning": 32, "kvTokens": 16384, "maxContext": 320},
        },
    },
}


class LeaseOnly(ControlClient):
    """A runner that does not tell the manager whose process has ended: what a machine that vanishes looks like."""

    async def drain(self, engine: str, deadline_s: float, reason: str) -> bool:
        """Says nothing."""
        return True


def workers(job: PolyRLJob, folder: RunFolder, epoch: int) -> Workers:
    """The job's own workers; the trainer is the stand-in, the rollouts count their tokens."""
    place = Place(str(folder.root), str(folder.root), sys.executable, epoch, len(os.sched_getaffinity(0)))
    wanted = workers_of(job.spec, place)
    assert wanted.rollout is not None
    counters = folder.root / "counters"
    counters.mkdir()
    return dataclasses.replace(
        wanted,
        trainer=started_by(wanted.trainer, str(HERE / "workload.py")),
        rollout=started_by(wanted.rollout, str(HERE / "counted_agent.py"), str(counters)),
    )


def started_by(worker: Worker, *script: str) -> Worker:
    """The worker with `script` in the place of `-m module`."""
    python, flag, _, *rest = worker.argv
    assert flag == "-m"
    return dataclasses.replace(worker, argv=(python, *script, *rest))


class Killer:
    """Kills rollouts at work at random moments, as often as asked."""

    def __init__(self, run: LocalRun, fleet: ProcessFleet, seed: int) -> None:
        self.kills: list[Kill] = []
        self._run, self._fleet, self._random = run, fleet, random.Random(seed)

    async def kill(self, count: int) -> None:
        """Raises TimeoutError when rollouts do not come back."""
        for number in range(count):
            async with asyncio.timeout(SECONDS_PER_KILL):
                await self._generated(self._random.randint(*TOKENS_BETWEEN))
                await asyncio.sleep(self._random.uniform(0.0, JITTER_S))
                victim = self._random.choice(await self._at_work(2))
            self.kills.append(Kill(victim, time.time()))
            await self._fleet.kill(victim)
            print(f"kill {number + 1}: {victim}", file=sys.stderr, flush=True)

    async def _generated(self, tokens: int) -> None:
        goal = self._run.status.tokens.generated + tokens
        while self._run.status.tokens.generated < goal:  # noqa: ASYNC110 - the status has no event of its own
            await asyncio.sleep(LOOK_S)

    async def _at_work(self, least: int) -> list[str]:
        """Rollouts that generate; waits until there are so many, so that one is left."""
        gone = {kill.victim for kill in self.kills}
        while True:
            serving = [engine for engine in self._run.status.engines if engine.state is EngineState.SERVING]
            busy = [engine.engine for engine in serving if engine.running and engine.engine not in gone]
            if len(busy) >= least:
                return busy
            await asyncio.sleep(LOOK_S)


async def run(folder: RunFolder, epoch: int, job: PolyRLJob, options: argparse.Namespace) -> list[Kill]:
    """The whole run. Raises RuntimeError when it does not end well, TimeoutError when it does not end."""
    client_class = LeaseOnly if options.lease_only else ControlClient
    client = client_class(folder.endpoints, folder.keys / "operator.key", epoch)
    timeline = Timeline(folder.timeline, time.monotonic, lambda _: None)
    fleet = ProcessFleet(folder.logs)
    local = LocalRun(workers(job, folder, epoch), fleet, client, timeline)
    killer = Killer(local, fleet, options.seed)
    killing = asyncio.create_task(killer.kill(options.kills))
    killing.add_done_callback(lambda _: (folder.root / "enough").touch())
    try:
        async with asyncio.timeout(options.kills * SECONDS_PER_KILL + ENDING_S):
            end = await local.run(FaultDrill([]))
    finally:
        killing.cancel()
        timeline.close()
    if not end.ok:
        raise RuntimeError(f"{end.why}; see {folder.logs}")
    await killing
    return killer.kills


def measure(root: Path, options: argparse.Namespace) -> Report:
    """Runs in the empty folder `root` and judges."""
    reference: Reference = decode(MODEL, options.seed, PROMPTS, PROMPT_TOKENS, TOKENS)
    plan = {"config": MODEL, "seed": options.seed, "prompts": reference.prompts, "tokens": TOKENS}
    plan |= {"groupsInFlight": GROUPS_IN_FLIGHT, "samplesPerGroup": SAMPLES_PER_GROUP}
    (root / "workload.json").write_bytes(msgspec.json.encode(plan))
    folder, job = RunFolder(root), PolyRLJob.model_validate(MANIFEST)
    began = time.monotonic()
    with held(folder):
        kills = asyncio.run(run(folder, prepare(folder, job), job, options))
    seconds = time.monotonic() - began
    return judge(root, kills, reference, SAMPLES_PER_GROUP, options.seed, not options.lease_only, seconds)


def main() -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lease-only", action="store_true", help="the manager learns of a loss from silence alone")
    parser.add_argument("--out", type=Path, help="an empty folder to keep; default: one that is removed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = (options.out or Path(scratch)).resolve()
        root.mkdir(parents=True, exist_ok=True)
        report = measure(root, options)
    print(msgspec.json.format(msgspec.json.encode(report)).decode())
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
