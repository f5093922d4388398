"""A context beyond a model's table of positions is refused when its learner is made, not by an IndexError at the first
row that is longer."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from polyrl.errors import InvalidData
from polyrl.manifest.recipe import RecipeSpec
from polyrl.manifest.spec import JobSpec
from polyrl.wire.checks import CheckFault
from polyrl_trainer.backends.configs import EngineConfig
from polyrl_trainer.backends.models.model_factory import load_model
from polyrl_trainer.check.rows import check_data
from polyrl_trainer.checkpoints import Checkpoints
from polyrl_trainer.data.tokenizers import CharacterTokenizer
from polyrl_trainer.loops.stages import Stages
from polyrl_trainer.preparation import POSITION_TABLES, context_fault
from polyrl_trainer.session import Session
from polyrl_trainer.state import TrainerState, TrainingStage

POSITIONS = 16
GPT2 = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": POSITIONS}
LAYERS = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": POSITIONS}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gpt_bigcode": GPT2,
    "ctrl": {**GPT2, "dff": 16},
    "biogpt": {**LAYERS, "intermediate_size": 16},
    "opt": {**LAYERS, "ffn_dim": 16, "word_embed_proj_dim": 16},
    "qwen2": {**LAYERS, "num_key_value_heads": 2, "intermediate_size": 16},
}


def config_of(kind: str) -> dict[str, Any]:
    return {"model_type": kind, "vocab_size": 20, "bos_token_id": 1, "eos_token_id": 2, **MODELS[kind]}


def stages(folder: Path, kind: str, max_context: int) -> Stages:
    nowhere: Any = None
    state = TrainerState(seed=0, stage=TrainingStage.SFT)
    session = Session(state, Checkpoints(folder, keep=2), nowhere, checkpoint_every_steps=1)
    recipe = RecipeSpec.model_validate({"mode": "sft", "model": {"config": config_of(kind), "dtype": "float32"}})
    prepared: Any = SimpleNamespace(tokenizer=CharacterTokenizer("0123456789"))
    engine = EngineConfig("cpu")
    return Stages(recipe, folder, prepared=prepared, session=session, engine=engine, max_context=max_context)


@pytest.mark.parametrize("kind", MODELS)
def test_whatever_has_a_table_of_positions_and_nothing_else_is_refused_a_longer_context(kind: str) -> None:
    model = load_model(config_of(kind), 0, "float32")
    for length in (POSITIONS, POSITIONS + 1):
        ids, places = torch.ones(1, length, dtype=torch.long), torch.arange(length)[None]
        fault = context_fault(model.config.to_dict(), length)
        if kind in POSITION_TABLES and length > POSITIONS:
            assert fault == f"17 is more than the 16 positions that the model has, a {kind}: take 16 at most"
            with pytest.raises(IndexError):
                model(input_ids=ids, position_ids=places, use_cache=False)
        else:
            assert fault == ""
            model(input_ids=ids, position_ids=places, use_cache=False)


def test_every_table_is_tried() -> None:
    assert {*MODELS} > POSITION_TABLES


def test_a_learner_is_made_for_no_longer_context_than_its_model_has(tmp_path: Path) -> None:
    optimizer = RecipeSpec.model_validate({"model": {"config": config_of("gpt2")}}).sft.optimizer
    with pytest.raises(InvalidData, match=r"^rollout.engine.maxContext: 17 is more than the 16 positions "):
        stages(tmp_path, "gpt2", POSITIONS + 1)._backend(config_of("gpt2"), optimizer, 1)
    stages(tmp_path, "gpt2", POSITIONS)._backend(config_of("gpt2"), optimizer, 1).close()
    stages(tmp_path, "qwen2", POSITIONS + 1)._backend(config_of("qwen2"), optimizer, 1).close()


@pytest.mark.parametrize(("max_context", "refused"), [(POSITIONS, False), (POSITIONS + 1, True)])
def test_a_folders_model_is_looked_at_before_a_run(tmp_path: Path, max_context: int, refused: bool) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config_of("gpt2")))
    model = {"path": "model", "tokenizer": {"type": "characters", "alphabet": "01"}}
    recipe = {"mode": "sft", "model": model, "data": {"sft": [{"path": "rows.jsonl"}]}, "sft": {"steps": 1}}
    spec = JobSpec.model_validate({"recipe": recipe, "rollout": {"engine": {"maxContext": max_context}}})
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "response": "1"}\n')
    faults = [one for one in check_data(spec, tmp_path) if isinstance(one, CheckFault)]
    assert [one.field for one in faults] == [("spec", "rollout", "engine", "maxContext")] * refused
