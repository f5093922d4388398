"""Ranks of a learner killed at random instants: `python benchmarks/ranks/run.py --kills 50 --ranks 2 --seed 0`.

Runs of a few steps follow each other; each start of a run's group is killed once, by SIGKILL to a rank that is drawn,
the leader's among them, at an instant that is drawn: while it starts, in a pass, in a step, in a save. Then nothing of
the group may live on after BOUND_S, the next start goes on from the newest checkpoint, and a run that got to its end
must have saved, bit for bit, what an undisturbed one saves. Prints a line a kill; ends with 1 when it was otherwise.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil

from polyrl.parent_death_signal import PARENT_PID
from polyrl.testing.started import StartedProcess, words_of
from polyrl.worker import TEMPORARY_EXIT
from polyrl_trainer.backends.training_state import RNG_FILE
from polyrl_trainer.checkpoints import checksum

BOUND_S: Final = 60.0
"""From a kill to the end of every process of the group."""
RUN_S: Final = 300.0
"""Of a start that is not killed, or that ends before its instant."""
STEPS: Final = 10
STEP_S: Final = 0.3
"""About what a step takes: instants are drawn within it."""
START_S: Final = 12.0
"""About what a start takes on a busy machine."""
FOLLOWER: Final = "polyrl_trainer.backends.fsdp"


@dataclass
class Instant:
    """When and whom."""

    steps: int
    """Of this start that are over; -1: while it starts."""
    after_s: float
    rank: int


@dataclass
class RankFaults:
    """What was done and found."""

    ranks: int
    kills: int = 0
    runs: int = 0
    violations: list[str] = field(default_factory=list)


class Start:
    """One start of a group, with the number of its steps so far."""

    def __init__(self, folder: Path, ranks: int) -> None:
        script = (sys.executable, "-m", "polyrl.testing.script", str(Path(__file__).with_name("rank_run.py")))
        command = [*script, str(folder), "--ranks", str(ranks), "--steps", str(STEPS)]
        env = {**os.environ, PARENT_PID: str(os.getpid()), "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        self.process = StartedProcess(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=env)
        self.steps = 0
        self.output: list[str] = []
        self._stepped = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line)
            with self._stepped:
                self.steps += line.startswith("step ")
                self._stepped.notify_all()
        with self._stepped:
            self.steps = STEPS + 1
            self._stepped.notify_all()

    def wait(self, instant: Instant) -> bool:
        """Until the instant; False when it ended by itself before."""
        if instant.steps >= 0:
            with self._stepped:
                self._stepped.wait_for(lambda: self.steps >= instant.steps, RUN_S)
        time.sleep(instant.after_s)
        return self.process.poll() is None

    def group(self) -> list[psutil.Process]:
        """The leader and the followers that live, and whatever they started."""
        try:
            leader = psutil.Process(self.process.pid)
            return [leader, *leader.children(recursive=True)]
        except psutil.Error:
            return []

    def end(self, within_s: float) -> int | None:
        """Its exit status; None when it did not end."""
        try:
            code = self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return None
        self._reader.join(within_s)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


def draw_instant(dice: random.Random, ranks: int) -> Instant:
    """Mostly after a step or two, so that runs get on; now and then while the group starts."""
    if dice.random() < 0.15:
        return Instant(-1, dice.uniform(0, START_S), rank=dice.randrange(ranks))
    return Instant(dice.randint(1, 5), dice.uniform(0, STEP_S), rank=dice.randrange(ranks))


def victim(group: Sequence[psutil.Process], rank: int) -> psutil.Process | None:
    """The leader for rank 0, else one of the followers; None where it has not started yet."""
    if rank == 0:
        return group[0] if group else None
    followers = [one for one in group[1:] if FOLLOWER in words_of(one)]
    return followers[rank - 1] if len(followers) >= rank else None


def kill_once(faults: RankFaults, folder: Path, instant: Instant) -> bool:
    """One start, killed once; True when the run got to its end before."""
    start = Start(folder, faults.ranks)
    group: list[psutil.Process] = []
    hit = None
    if start.wait(instant):
        group = start.group()
        hit = victim(group, instant.rank)
    if hit is not None:
        hit.send_signal(signal.SIGKILL)
    began = time.monotonic()
    code = start.end(BOUND_S if hit is not None else RUN_S)
    _, alive = psutil.wait_procs(group, BOUND_S)
    took = time.monotonic() - began
    if hit is not None:
        faults.kills += 1
        whom = "the leader" if instant.rank == 0 else f"rank {instant.rank}"
        steps = sum(line.startswith("step ") for line in start.output)
        when = "at its start" if instant.steps < 0 else f"after {steps} steps"
        print(f"{faults.kills:3} {whom} {when}: exit {code}, all gone after {took:.1f} s", flush=True)
    for one in alive:
        faults.violations.append(f"kill {faults.kills}: {one} lives on")
        one.kill()
    if code is None:
        faults.violations.append(f"kill {faults.kills}: the group hung for {BOUND_S:g} s:\n{''.join(start.output)}")
    elif code not in {0, TEMPORARY_EXIT, -signal.SIGKILL} or (code != 0 and hit is None):
        faults.violations.append(f"kill {faults.kills}: exit {code}:\n{''.join(start.output)}")
    return code == 0


def outcome(folder: Path) -> dict[str, str]:
    """Checksums of weights and moments of the last checkpoint. Torch's generator begins anywhere, and nothing draws by
    it while this model learns."""
    model = folder / "checkpoints" / f"sft-step-{STEPS:06d}" / "model"
    return {path.name: checksum(path) for path in sorted(model.glob("*.safetensors")) if path.name != RNG_FILE}


def run(kills: int, ranks: int, seed: int, root: Path) -> RankFaults:
    """So many kills."""
    faults, dice = RankFaults(ranks), random.Random(seed)
    undisturbed = Start(root / "undisturbed", ranks)
    if undisturbed.end(RUN_S) != 0:
        sys.exit(f"the undisturbed run failed:\n{''.join(undisturbed.output)}")
    wanted = outcome(root / "undisturbed")
    while faults.kills < kills and not faults.violations:
        folder = root / f"run-{faults.runs}"
        folder.mkdir()
        while not kill_once(faults, folder, draw_instant(dice, ranks)) and not faults.violations:
            if faults.kills >= kills:
                last = Start(folder, ranks)
                if last.end(RUN_S) != 0:
                    faults.violations.append(f"the last run does not end:\n{''.join(last.output)}")
                break
        faults.runs += 1
        if not faults.violations and outcome(folder) != wanted:
            faults.violations.append(f"{folder}: another outcome than the undisturbed run")
    return faults


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        (Path(folder) / "undisturbed").mkdir()
        faults = run(asked.kills, asked.ranks, asked.seed, Path(folder))
    for sentence in faults.violations:
        print(sentence)
    if not faults.violations:
        print(
            f"{faults.kills} kills of {faults.ranks} ranks in {faults.runs} runs: all ended equal, no orphan, no hang"
        )
    return 1 if faults.violations else 0


if __name__ == "__main__":
    raise SystemExit(main())
