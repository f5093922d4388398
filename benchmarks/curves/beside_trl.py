"""Learning curves beside TRL's and a plain transformers loop's: same start, prompts, reward and settings, some seeds.

    python benchmarks/curves/beside_trl.py --seeds 0 1 2 --out FOLDER

The sort-digits example with prompts of 2 to 20 digits, since answers that people train are uneven: its SFT stage makes,
once, the folder that every run of every side starts from. GRPO with the manifest's settings then, which `peer_run.py`
gives TRL: old logprobs of a pass before the step's first update, no importance sampling on top; two mini-batches that
mix the samples of all prompts; no KL penalty; no bound on ratios of negative advantages but the clip. A seed draws
samples and the order of prompts.
Runs are kept in FOLDER, so a second call goes on where the first one ended.

Then, in turns on the same machine, the three learners' tokens per CPU second, with the same model, and as one optimizer
step of those runs learns: the first prompts, with the right answers (`learner/run.py` has more of that). Prints the
reward at equal steps with its spread over seeds; the last line is JSON. Ends with status 1 when a curve differs from
TRL's or the loop's by more than seeds do.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from polyrl_runs import RUN_LIMIT_S, run_job
from tables import Curve, is_seed_noise, scores, table, windowed
from uneven_digits import CONTEXT, LIMIT, data_fields, learned_batch, write_data

from polyrl.manifest.parts.optimizer import OptimizerSpec

sys.path.append(str(Path(__file__).parents[1] / "learner"))
"""Its modules load torch, so they are imported where they are used."""

EXAMPLE: Final = Path(__file__).parents[2] / "examples/sort-digits"
JOB: Final = EXAMPLE / "job.yaml"
SFT_STEPS: Final = 60
"""Until some of the longer answers are right."""
PEERS: Final = ("trl", "hf")
WITHOUT_LIMIT: Final = 1_000_000
"""A dual clip that bounds nothing: TRL has none by default."""


@dataclass(frozen=True)
class Start:
    """What all runs begin with."""

    model: Path
    """Folder of the model after SFT."""
    data: Path
    """Folder of the rows."""


def common_fields() -> dict[str, Any]:
    """What is overridden in every run of ours."""
    return {
        "spec.faultInjection": [],
        "spec.recipe.sampling.maxNewTokens": LIMIT,
        "spec.rollout.engine.maxContext": CONTEXT,
        "spec.recipe.logging.tensorboard": False,
    }


def start_fields(data: Path) -> dict[str, Any]:
    """What is overridden for the run that makes the common start."""
    return {
        **common_fields(),
        "spec.recipe.mode": "sft",
        "spec.recipe.data": data_fields(data, "sft"),
        "spec.recipe.sft.steps": SFT_STEPS,
        "spec.recipe.evaluation.everySteps": 0,
    }


def our_fields(start: Start, steps: int) -> dict[str, Any]:
    """What is overridden for ours."""
    return {
        **common_fields(),
        "spec.recipe.mode": "rl",
        "spec.recipe.model": {"path": str(start.model), "dtype": "float32"},
        "spec.recipe.data": data_fields(start.data, "rl", "eval"),
        "spec.recipe.algorithm.steps": steps,
        "spec.recipe.algorithm.oldLogProbs": "recompute",
        "spec.recipe.algorithm.correction": "none",
        "spec.recipe.algorithm.dualClip": WITHOUT_LIMIT,
        "spec.recipe.evaluation.everySteps": steps,
        "spec.recipe.checkpoint.everySteps": steps,
    }


def peer_settings(side: str, seed: int, start: Start, steps: int, threads: int) -> dict[str, Any]:
    """The manifest's, as `peer_run.Settings`."""
    recipe = yaml.safe_load(JOB.read_text())["spec"]["recipe"]
    algorithm, sampling = recipe["algorithm"], recipe["sampling"]
    optimizer = algorithm["optimizer"]
    return {
        "side": side,
        "seed": seed,
        "model": str(start.model),
        "rewards": str(EXAMPLE / "reward.py"),
        "prompts_file": str(start.data / "rl.jsonl"),
        "steps": steps,
        "prompts": algorithm["promptsPerStep"],
        "mini_batches": algorithm["promptsPerStep"] // algorithm["miniBatchPrompts"],
        "group": sampling["samplesPerPrompt"],
        "limit": LIMIT,
        "rate": optimizer["learningRate"],
        "warmup": optimizer["warmupSteps"],
        "betas": list(OptimizerSpec().betas),
        "threads": threads,
    }


def common_start(out: Path) -> Start:
    """Made once."""
    data, model = out / "data", out / "model"
    write_data(data)
    run = run_job(JOB, out / "start", 0, start_fields(data))
    if not model.exists():
        program = str(Path(sys.executable).with_name("polyrl"))
        subprocess.run([program, "export", str(run.folder), str(model)], check=True, timeout=RUN_LIMIT_S)
    return Start(model, data)


def peer_rewards(python: str, out: Path, settings: dict[str, Any]) -> list[float]:
    """Of a run that is kept, or made now."""
    name = f"{settings['side']}-seed{settings['seed']}"
    found = out / f"{name}.json"
    if not found.exists():
        asked = out / f"{name}.settings.json"
        asked.write_text(json.dumps(settings))
        argv = [python, str(Path(__file__).with_name("peer_run.py")), str(asked), str(found)]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        with (out / f"{name}.log").open("w") as log:
            subprocess.run(argv, stdout=log, stderr=log, check=True, env=environment, timeout=RUN_LIMIT_S)
    kept = json.loads(found.read_text())
    if kept["settings"] != settings:
        raise RuntimeError(f"{found} is of other settings; give another --out")
    rewards: list[float] = kept["rewards"]
    return rewards


def speeds(asked: argparse.Namespace, start: Start) -> dict[str, object]:
    """Of the learners alone, on a mini-batch of the runs."""
    from beside_peers import compare

    if not asked.pairs:
        return {}
    recipe = yaml.safe_load(JOB.read_text())["spec"]["recipe"]
    group = recipe["sampling"]["samplesPerPrompt"]
    batch = learned_batch(start.data, recipe["algorithm"]["miniBatchPrompts"], group, seed=0)
    return compare(recipe["model"]["config"], batch, asked.threads, asked.pairs, asked.seconds)


def main() -> None:
    from beside_peers import trl_python

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="two at least")
    parser.add_argument("--steps", type=int, default=60, help="RL steps of each run")
    parser.add_argument("--threads", type=int, default=1, help="of each side's learner")
    parser.add_argument("--pairs", type=int, default=4, help="turns of the learners' speed; 0: only curves")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each side in a turn")
    parser.add_argument("--out", type=Path, required=True, help="folder that the runs are kept in")
    asked = parser.parse_args()
    if len(asked.seeds) < 2:
        parser.error("--seeds: one seed a side says nothing about the noise between seeds")
    out, python = asked.out.resolve(), trl_python()
    start = common_start(out)
    sides: dict[str, list[Curve]] = {side: [] for side in ("polyrl", *PEERS)}
    for seed in asked.seeds:  # all sides of a seed one after the other: they share a machine's better and worse hours
        run = run_job(JOB, out / f"polyrl-seed{seed}", seed, our_fields(start, asked.steps))
        sides["polyrl"].append(windowed(run.rewards()))
        for side in PEERS:
            settings = peer_settings(side, seed, start, asked.steps, asked.threads)
            sides[side].append(windowed(peer_rewards(python, out, settings)))
        print(f"seed {seed}: done", flush=True)
    sys.exit(0 if report(sides, asked.steps, speeds(asked, start)) else 1)


def report(sides: dict[str, list[Curve]], steps: int, measured: dict[str, object]) -> bool:
    """Prints the table, the verdicts and the line of JSON; whether all are within the noise of seeds."""
    print(table(sides, steps, "polyrl"))
    verdicts = {side: is_seed_noise(sides["polyrl"], sides[side]) for side in PEERS}
    for side, alike in verdicts.items():
        print(f"PolyRL learns {'as' if alike else 'otherwise than'} {side}{', within seed noise' if alike else ''}")
    against = {side: scores(sides["polyrl"], sides[side]) for side in PEERS}
    print(json.dumps({"withinSeedNoise": verdicts, "t": against, **measured}))
    return all(verdicts.values())


if __name__ == "__main__":
    main()
