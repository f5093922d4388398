"""PolyRL's learner, TRL's and a plain transformers loop, in turns on the same batch: tokens per CPU second.

All three take GRPO's loss on samples that are already drawn, clip the gradient and take an AdamW step, with the same
model, threads and torch. A token is one of a prompt or of an answer; padding is none.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from peer_process import LIMIT, WAIT_S, Bench, PeerProcess, Shape, draw_batch, peers, samples_of

from polyrl.manifest.parts.algorithm import AlgorithmSpec
from polyrl_trainer.backends.configs import EngineConfig
from polyrl_trainer.backends.single_process import TorchBackend
from polyrl_trainer.losses import normalizer, policy_loss
from polyrl_trainer.sample import Sample

SHAPE: Final = Shape(samples=64, pairs=1, median=48)
ALGORITHM: Final = AlgorithmSpec(steps=1)
SIDES: Final = ("polyrl", "trl", "hf")


def trl_python() -> str:
    """The interpreter of TRL's environment, which is made if there is none."""
    programs = Path(sys.executable).parent
    argv = [str(Path(__file__).with_name("install_trl.sh")), str(programs / "uv"), sys.executable]
    return subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True, timeout=WAIT_S).stdout.strip()


def drawn_batch(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Of lengths as of real answers, for a model with these fields."""
    return draw_batch(SHAPE, int(fields["vocab_size"]))


def compare(
    fields: Mapping[str, Any], batch: dict[str, Any], threads: int, pairs: int, seconds: float
) -> dict[str, object]:
    """`vsTrl` and `vsHf`: the median over turns of our tokens per CPU second, divided by theirs."""
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), fields, batch, EngineConfig("cpu", threads))
        bench.prepare()
        with (
            peers(trl_python(), bench.folder, threads) as process,
            closing(bench.backend(bench.config("model"))) as backend,
        ):
            samples = samples_of(bench.batch)
            turns = [_turn(number, process, backend, samples, seconds) for number in range(pairs + 1)][1:]  # one warms
            versions = process.versions
    found = {side: statistics.median(turn[side] for turn in turns) for side in SIDES}
    ratios = {side: sorted(round(turn["polyrl"] / turn[side], 3) for turn in turns) for side in ("trl", "hf")}
    return {
        "vsTrl": round(statistics.median(ratios["trl"]), 3),
        "vsHf": round(statistics.median(ratios["hf"]), 3),
        "vsTrlTurns": ratios["trl"],
        "vsHfTurns": ratios["hf"],
        "tokensPerCpuSecond": {side: round(speed) for side, speed in found.items()},
        "versions": versions,
    }


def _turn(
    number: int, process: PeerProcess, backend: TorchBackend, samples: Sequence[Sample], seconds: float
) -> dict[str, float]:
    first = number % len(SIDES)
    found = {}
    for side in (*SIDES[first:], *SIDES[:first]):
        if side == "polyrl":
            found[side] = _ours(backend, samples, seconds)
        else:
            theirs = process.ask(do="work", side=side, seconds=seconds)
            found[side] = theirs["tokens"] / theirs["cpuSeconds"]
    print(f"turn {number}:", *(f"{side} {found[side]:.0f}" for side in SIDES), file=sys.stderr, flush=True)
    return found


def _ours(backend: TorchBackend, samples: Sequence[Sample], seconds: float) -> float:
    loss = policy_loss(ALGORITHM)
    tokens, began, cpu = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - began < seconds:
        sums = backend.forward_backward(samples, loss).result(WAIT_S)
        backend.optim_step(normalizer(ALGORITHM, len(samples), sums["tokens"], LIMIT)).result(WAIT_S)
        tokens += sum(sample.length for sample in samples)
    return tokens / (time.process_time() - cpu)
