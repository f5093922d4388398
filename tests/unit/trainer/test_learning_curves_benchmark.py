"""benchmarks/curves compares learning curves: what differs by more than seeds do is found, what does not is let be."""

from __future__ import annotations

import importlib
import json
import random
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from polyrl_cli.manifests.load import load_manifest

FILE = Path(__file__).parents[3] / "benchmarks" / "curves" / "tables.py"


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = spec_from_file_location("curve_tables", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_curve_is_the_mean_of_each_window(tables: ModuleType) -> None:
    assert tables.windowed([1, 3, 2, 2, 0, 4, 5, 7]) == [2, 2, 2, 6]
    assert tables.windowed([0, 1, 2, 3, 4, 5]) == [0.5, 2, 3, 4.5]
    with pytest.raises(ValueError, match="3 steps make no 4 windows"):
        tables.windowed([1, 2, 3])


def test_t_is_welchs(tables: ModuleType) -> None:
    # Means 0.5 and 0.3; variances 0.01 and 0.0025, of three values each: 0.2 / sqrt(0.0125 / 3).
    assert tables.t_of([0.4, 0.5, 0.6], [0.25, 0.3, 0.35]) == pytest.approx(3.0984, abs=1e-4)
    assert tables.t_of([0.5, 0.5, 0.5], [0.51, 0.51, 0.51]) == pytest.approx(-0.01 / tables.NOISE_FLOOR)


def test_noise_is_found_to_be_noise_and_a_difference_is_not(tables: ModuleType) -> None:
    chance = random.Random(0)

    def side(gain: float) -> list[list[float]]:
        return [[0.2 + 0.1 * part + gain + chance.gauss(0, 0.02) for part in range(4)] for _ in range(3)]

    alike = sum(tables.is_seed_noise(side(0.0), side(0.0)) for _ in range(200))
    found = sum(not tables.is_seed_noise(side(0.15), side(0.0)) for _ in range(200))
    assert alike >= 180
    assert found >= 180


def test_the_table_names_each_side_and_window(tables: ModuleType) -> None:
    lines = tables.table({"k = 0": [[0.1] * 4, [0.3] * 4], "k = 1": [[0.1] * 4, [0.3] * 4]}, 60, "k = 0").splitlines()
    assert "1-15" in lines[0]
    assert "46-60" in lines[0]
    assert lines[1].count("0.200 ± 0.141") == 4
    assert lines[2].endswith("0.0 0.0 0.0 0.0")


@pytest.fixture(scope="module")
def beside_trl() -> ModuleType:
    sys.path.append(str(FILE.parent))
    try:
        return importlib.import_module("beside_trl")
    finally:
        sys.path.remove(str(FILE.parent))


def test_both_sides_get_the_settings_of_the_manifest(beside_trl: ModuleType) -> None:
    start = beside_trl.Start(Path("/m"), Path("/d"))
    theirs = beside_trl.peer_settings("trl", 7, start, 60, 1)
    sets = sys.modules["polyrl_runs"].overrides(beside_trl.our_fields(start, 60))
    recipe = load_manifest(beside_trl.JOB, sets).spec.recipe
    ours = recipe.algorithm
    optimizer = ours.optimizer
    assert (theirs["steps"], theirs["prompts"]) == (ours.steps, ours.prompts_per_step)
    assert theirs["prompts"] == theirs["mini_batches"] * ours.mini_batch_prompts
    assert (theirs["group"], theirs["limit"]) == (recipe.sampling.samples_per_prompt, recipe.sampling.max_new_tokens)
    assert (theirs["rate"], theirs["warmup"]) == (optimizer.learning_rate, optimizer.warmup_steps)
    assert tuple(theirs["betas"]) == optimizer.betas
    # What peer_run.py gives TRL without asking.
    assert (ours.name, ours.old_log_probs, ours.correction, ours.kl_coefficient) == ("grpo", "recompute", "none", 0)
    assert (optimizer.schedule, optimizer.weight_decay, optimizer.max_grad_norm) == ("linear", 0, 1)
    assert (recipe.sampling.temperature, recipe.sampling.top_p, ours.update_epochs) == (1, 1, 1)


def test_the_learners_are_timed_on_an_optimizer_step_of_the_runs(beside_trl: ModuleType, tmp_path: Path) -> None:
    task = sys.modules["uneven_digits"]
    task.write_data(tmp_path)
    batch = task.learned_batch(tmp_path, 16, 8, seed=0)
    lengths = [len(one["response"]) for one in batch["samples"]]
    first = json.loads((tmp_path / "rl.jsonl").read_text().splitlines()[0])["prompt"]
    assert len(lengths) == batch["micro_batch"] == 128
    assert max(lengths) <= task.LIMIT
    assert max(lengths) > 2 * sum(lengths) / len(lengths), "most are short, some are long"
    assert lengths[0] == lengths[7] == len(first)
    sets = sys.modules["polyrl_runs"].overrides(beside_trl.start_fields(tmp_path))
    assert load_manifest(beside_trl.JOB, sets).spec.recipe.sampling.max_new_tokens == task.LIMIT


def test_curves_that_differ_are_no_success(beside_trl: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    seeds = [[0.1, 0.2, 0.3, 0.4], [0.12, 0.22, 0.32, 0.42]]
    lower = [[value - 0.2 for value in curve] for curve in seeds]
    assert beside_trl.report({"polyrl": seeds, "trl": seeds, "hf": seeds}, 60, {})
    assert not beside_trl.report({"polyrl": seeds, "trl": lower, "hf": seeds}, 60, {"vsTrl": 3.0})
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["withinSeedNoise"] == {"trl": False, "hf": True}
    assert last["vsTrl"] == 3.0


def test_a_kept_run_of_other_settings_is_refused(beside_trl: ModuleType, tmp_path: Path) -> None:
    settings = beside_trl.peer_settings("hf", 0, beside_trl.Start(tmp_path, tmp_path), 60, 1)
    (tmp_path / "hf-seed0.json").write_text(json.dumps({"rewards": [0.5], "settings": settings}))
    assert beside_trl.peer_rewards("no such interpreter", tmp_path, settings) == [0.5]
    with pytest.raises(RuntimeError, match=r"hf-seed0\.json is of other settings"):
        beside_trl.peer_rewards("no such interpreter", tmp_path, {**settings, "steps": 30})
