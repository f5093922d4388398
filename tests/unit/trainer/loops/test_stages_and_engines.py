"""Which evaluations end with engines asleep: those before rows of a file are learned on the same devices."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from polyrl.manifest.recipe import RecipeSpec
from polyrl_trainer.backends.configs import EngineConfig, OptimizerConfig
from polyrl_trainer.backends.training_state import FORMAT_VERSION, STATE_FILE, TrainingState
from polyrl_trainer.checkpoints import Checkpoints
from polyrl_trainer.data.tokenizers import CharacterTokenizer
from polyrl_trainer.loops import stages as module
from polyrl_trainer.loops.stages import Stages
from polyrl_trainer.session import Session
from polyrl_trainer.state import Results, TrainerState, TrainingStage


class RecordingEvaluator:
    def __init__(self) -> None:
        self.learns_on: list[Any] = []
        self.made_up_beside: list[Any] = []

    async def evaluate(self, step: int, *, learns_on: Any = None) -> dict[str, float]:
        self.learns_on.append(learns_on)
        return {}

    async def make_up(self, every: int, versions: Any, backend: Any, *, learns_on: Any = None) -> None:
        self.made_up_beside.append(learns_on)

    async def evaluate_if_due(self, every: int, versions: Any, backend: Any, *, learns_on: Any = None) -> bool:
        self.learns_on.append(learns_on)
        return True


async def nothing(*given: Any, **more: Any) -> bool:
    return True


async def one_step(*given: Any, after_step: Any, **more: Any) -> bool:
    await after_step()
    return True


@pytest.mark.parametrize(
    ("mode", "asleep"), [("sft", [True, True, False]), ("dpo", [True, False])], ids=["answers", "pairs"]
)
def test_engines_are_to_sleep_before_rows_are_learned_and_not_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, asleep: list[bool]
) -> None:
    run, evaluator = evaluated(tmp_path, monkeypatch, mode)
    assert [one is run.devices for one in evaluator.learns_on] == asleep
    assert [one is None for one in evaluator.learns_on] == [not one for one in asleep]
    assert evaluator.made_up_beside == ([run.devices] if mode == "sft" else [])
    assert list(run.session.state.results.evaluations) == ["base", "afterSft" if mode == "sft" else "afterDpo"]


@pytest.mark.parametrize("mode", ["sft", "dpo"])
def test_what_has_learned_is_not_called_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """A run that goes on with rows to evaluate, and had none before: its summary would compare the end with that."""
    run, _ = evaluated(tmp_path, monkeypatch, mode, step=5)
    assert list(run.session.state.results.evaluations) == ["afterSft" if mode == "sft" else "afterDpo"]


@pytest.mark.parametrize(("step", "groups", "loaded"), [(0, 0, False), (0, 4, True), (1, 0, True)])
def test_what_has_learned_goes_on_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, groups: int, loaded: bool
) -> None:
    """Mini-batches of the very first step were counted as learned, and the model was that of the beginning."""
    recipe = RecipeSpec.model_validate({"model": {"config": {"model_type": "qwen2"}}})
    state = TrainerState(seed=0, stage=TrainingStage.RL, step=step, trained_groups=groups)
    session = Session(state, Checkpoints(tmp_path, keep=2), None, checkpoint_every_steps=1)  # type: ignore[arg-type]
    loads: list[Path] = []
    learner: Any = SimpleNamespace(serving_files=lambda: {"config.json": b'{"vocab_size": 16}'}, load=loads.append)
    learners: Any = SimpleNamespace(learner=lambda *given: learner)
    prepared: Any = SimpleNamespace(tokenizer=CharacterTokenizer("0123456"))
    run = Stages(
        recipe, tmp_path, prepared=prepared, session=session, engine=EngineConfig("cpu"), max_context=64,
        learners=learners, resumed_from=tmp_path,
    )  # fmt: skip
    monkeypatch.setattr(module, "context_fault", lambda *given: "")
    checkpoint(tmp_path, taken=step)
    run._rl_backend({})
    assert loads == [tmp_path / "model"] * loaded


@pytest.mark.parametrize(
    ("state", "taken", "ahead"),
    [
        ({"step": 4}, 8, 0),
        ({"step": 4, "trained_groups": 3}, 9, 0),
        ({"step": 4}, 4, 4),
        ({"step": 4}, 16, -8),
        ({"step": 4, "results": Results(skipped_steps=2)}, 6, 0),
        ({"step": 4, "results": Results(skipped_steps=2)}, 5, 3),
        ({}, 7, 0),
    ],
    ids=["as it was", "amid a step", "more since", "fewer since", "skipped some", "skipped too few", "a new stage"],
)
def test_a_schedule_goes_on_where_the_steps_are_whatever_mini_batches_they_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: dict[str, Any], taken: int, ahead: int
) -> None:
    """Two mini-batches a step after one let the rate rise again, and it was half of its peak at the end."""
    model = {"config": {"model_type": "qwen2"}}
    run = of_model(tmp_path, model, algorithm={"promptsPerStep": 6, "miniBatchPrompts": 3})
    run.session.state = TrainerState(seed=0, stage=TrainingStage.RL, **state)
    config = {"config.json": b'{"vocab_size": 16}'}
    learner = SimpleNamespace(serving_files=lambda: config, load=lambda folder: None)
    schedules: list[OptimizerConfig] = []

    def learns(model: Any, engine: Any, schedule: OptimizerConfig) -> SimpleNamespace:
        schedules.append(schedule)
        return learner

    monkeypatch.setattr(run, "learners", SimpleNamespace(learner=learns))
    monkeypatch.setattr(module, "context_fault", lambda *given: "")
    run.resumed_from = checkpoint(tmp_path, taken)
    run._rl_backend({})
    run.resumed_from = None
    run._rl_backend({})
    assert [one.ahead for one in schedules] == [ahead, 0]


def checkpoint(folder: Path, taken: int) -> Path:
    """Of a run that took so many optimizer steps."""
    (folder / "model").mkdir()
    state = TrainingState(format_version=FORMAT_VERSION, step=taken, checksums={})
    (folder / "model" / STATE_FILE).write_bytes(msgspec.json.encode(state))
    return folder


def test_a_model_ends_at_all_tokens_that_end_an_answer(tmp_path: Path) -> None:
    """It goes on without end in transformers else: a base model after SFT on chats ends as the chat template does."""
    run = of_model(tmp_path, {"config": {"model_type": "qwen2"}})
    run.prepared.tokenizer.end_ids = (2, 5)
    assert run._model({}).special_tokens.ends == (2, 5)


def test_adapters_on_what_an_earlier_stage_made_do_not_name_the_model_before_it(tmp_path: Path) -> None:
    """On that one they would be of no use."""
    (tmp_path / "tiny").mkdir()
    run = of_model(tmp_path, {"path": "tiny", "lora": {}})
    first, second = (run._model(tmp_path / folder).adapter for folder in ("tiny", "sft-step-000004/model"))
    assert first is not None
    assert first.base == "tiny"
    assert second == replace(first, base=None)


def of_model(folder: Path, model: dict[str, Any], **recipe: Any) -> Stages:
    session: Any = SimpleNamespace(state=TrainerState(seed=0, stage=TrainingStage.SFT))
    prepared: Any = SimpleNamespace(tokenizer=CharacterTokenizer("0123456"))
    spec = RecipeSpec.model_validate({"model": model, **recipe})
    return Stages(spec, folder, prepared, session=session, engine=EngineConfig("cpu"), max_context=64)


def evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, step: int = 0
) -> tuple[Stages, RecordingEvaluator]:
    """A run from whole step `step` on."""
    recipe = RecipeSpec.model_validate({"mode": mode, "model": {"config": {"model_type": "qwen2"}}})
    nowhere, anything = (SimpleNamespace(close=lambda: None, ensure_published=nothing) for _ in range(2))
    state = TrainerState(seed=0, stage=TrainingStage.SFT if mode == "sft" else TrainingStage.DPO, step=step)
    session = Session(state, Checkpoints(tmp_path, keep=2), nowhere, checkpoint_every_steps=1)  # type: ignore[arg-type]
    prepared: Any = SimpleNamespace(conversations=anything, pairs=anything)
    run = Stages(recipe, tmp_path, prepared=prepared, session=session, engine=EngineConfig("cpu"), max_context=64)
    monkeypatch.setattr(module, "run_sft_training", one_step)
    monkeypatch.setattr(module, "run_preference_training", nothing)
    for made in ("_backend", "_start_of"):
        monkeypatch.setattr(run, made, lambda *given: anything)
    evaluator = RecordingEvaluator()
    side: Any = SimpleNamespace(evaluator=evaluator, versions=anything)
    assert asyncio.run(run.run(side))
    return run, evaluator
