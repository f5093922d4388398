"""A trainer killed at any moment of a save: what was covered is there, whole, and nothing half is taken for a
checkpoint."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

from polyrl_trainer.checkpoints import Checkpoints, complete_checkpoints, read_checkpoint

KILLS = 20
SCRIPT = """
import os, random, sys, time
from concurrent.futures import Future
from pathlib import Path
from polyrl_trainer.checkpoints import Checkpoints
from polyrl_trainer.checkpoints.writer import Writer
from polyrl_trainer.state import TrainerState, TrainingStage

class Weights:
    def __init__(self):
        self.writer = Writer("weights")

    def save(self, folder, *, copied):
        def write():
            for name in ("model.safetensors", "optimizer.safetensors"):
                (folder / name).write_bytes(os.urandom(1 << 16))
        return self.writer.submit(write)

def run(folder, step, out):
    checkpoints, weights = Checkpoints(folder, keep=2), Weights()
    checkpoints.start()
    while True:
        step += 1
        checkpoints.save(TrainerState(seed=1, stage=TrainingStage.RL, step=step), weights).result(30)
        os.write(out, f"{step}\\n".encode())

folder = Path(sys.argv[1])
for line in sys.stdin:
    share, step = line.split()
    began = time.monotonic()
    mine, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        run(folder, int(step), theirs)
    os.close(theirs)
    first = os.read(mine, 64)
    time.sleep(float(share) * (time.monotonic() - began))
    os.kill(child, 9)
    os.waitpid(child, 0)
    with os.fdopen(mine) as covered:
        print((first.decode() + covered.read()).split()[-1], flush=True)
"""


def test_what_was_covered_is_there_whole_whenever_the_trainer_is_killed(tmp_path: Path) -> None:
    chance, covered, interrupted = random.Random(4), 0, 0
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            for _ in range(KILLS):
                process.stdin.write(f"{chance.uniform(0, 1.5)} {covered}\n")
                covered = int(process.stdout.readline())
                whole = complete_checkpoints(tmp_path / "checkpoints")
                newest = max(read_checkpoint(one).step for one in whole)
                assert newest in (covered, covered + 1), "durable a moment before it was covered"
                interrupted += any((tmp_path / "checkpoints").glob(".unfinished-*"))
                covered = newest
        finally:
            os.kill(process.pid, signal.SIGKILL)
    assert covered >= KILLS
    assert interrupted > KILLS // 5, "or nothing was killed in a save"
    Checkpoints(tmp_path, keep=2).start()
    assert not list((tmp_path / "checkpoints").glob(".unfinished-*"))
