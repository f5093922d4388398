"""A run whose manager is real and whose trainer and agents are a few lines each; started by test_run_endings.

python -m polyrl.testing.script run_with_stand_ins.py RUN_FOLDER TRAINER_CODE AGENT_CODE [frozen: its fork server is]
"""

import dataclasses
import os
import signal
import sys
from pathlib import Path

from rich.console import Console

from polyrl.errors import UserError
from polyrl.forks import ForkServer, own_server
from polyrl.manifest.environment import EVERY_WORKER, inherited
from polyrl.manifest.job import PolyRLJob
from polyrl.worker import NAME_SLOT, Role, RunLocation, Worker, workers_of
from polyrl_cli.local.run import execute
from polyrl_cli.local.run_folder import RunFolder, locked, prepare_folder

MANIFEST = {
    "apiVersion": "polyrl.dev/v1alpha1",
    "kind": "PolyRLJob",
    "metadata": {"name": "stand-ins"},
    "spec": {
        "recipe": {
            "mode": "rl",
            "model": {
                "config": {"model_type": "qwen2", "hidden_size": 8, "num_attention_heads": 1},
                "tokenizer": {"type": "characters", "alphabet": "ab"},
            },
            "data": {"rl": [{"path": "rl.jsonl"}]},
            "reward": {"function": "reward:score"},
            "algorithm": {"steps": 1},
        },
        "backoffLimit": 0,
        "rollout": {"engine": {"type": "embedded"}, "replicas": 2, "maxReplicas": 2},
    },
}
END_WITH_PARENT = "from polyrl import parent_death_signal; parent_death_signal.hold()\n"


def main() -> int:
    root, trainer, agent = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    job, folder = PolyRLJob.model_validate(MANIFEST), RunFolder(root)
    with locked(folder):
        run_epoch = prepare_folder(folder, job, root)
        wanted = workers_of(
            job.spec, RunLocation(str(root), str(root), python=sys.executable, run_epoch=run_epoch, cpus=2)
        )
        assert wanted.reserved is not None
        assert wanted.rollout is not None
        wanted = dataclasses.replace(
            wanted,
            trainer=stand_in(wanted.trainer, trainer, root),
            reserved=stand_in(wanted.reserved, agent, root),
            rollout=stand_in(wanted.rollout, agent, root),
        )
        try:
            return execute(
                job, wanted, folder, run_epoch, Console(width=120), frozen() if sys.argv[4:] else own_server()
            )
        except UserError as error:
            print(error, file=sys.stderr)
            return 2


def frozen() -> ForkServer:
    """One that answers nobody."""
    forks = ForkServer.start([], inherited(os.environ, EVERY_WORKER))
    assert forks._process is not None
    forks._process.send_signal(signal.SIGSTOP)
    return forks


def stand_in(worker: Worker, code: str, root: Path) -> Worker:
    """The worker with other code; its run's folder stays in its command line, by which tests find it."""
    argv = (sys.executable, "-c", END_WITH_PARENT + code, str(root), NAME_SLOT)
    changed = dataclasses.replace(worker, argv=argv, grace_s=1.0)
    return changed if worker.role is Role.ROLLOUT else changed.named(worker.name)


if __name__ == "__main__":
    sys.exit(main())
