"""A model card says where a model comes from and how it did, and nothing of the machine that it was made on."""

from __future__ import annotations

import msgspec
import pytest
import yaml

from polyrl.history.model_card import ModelOrigin, base_model, model_card, model_origin
from polyrl.manifest.job import PolyRLJob

JOB = {
    "apiVersion": "polyrl.dev/v1alpha1",
    "kind": "PolyRLJob",
    "metadata": {"name": "sums"},
    "spec": {
        "recipe": {
            "mode": "sft+rl",
            "model": {"path": "/home/ada/models/tiny|one"},
            "data": {"sft": [{"path": "a.jsonl"}], "rl": [{"path": "b.jsonl"}]},
            "sft": {"steps": 4, "optimizer": {"learningRate": 1e-3}},
            "algorithm": {"steps": 7, "promptsPerStep": 8},
            "reward": {"function": "reward:score"},
        },
        "rollout": {"engine": {"type": "embedded"}},
    },
}


def origin(**changes: object) -> ModelOrigin:
    made = model_origin(PolyRLJob.model_validate(JOB), "rl", 5, chat=False, version="9.9")
    return msgspec.structs.replace(made, **changes)


def front_matter(card: str) -> dict[str, object]:
    found = yaml.safe_load(card.split("---")[1])
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    ("model", "name"),
    [
        pytest.param({"path": "/home/ada/secret/qwen"}, "qwen", id="a path at home"),
        pytest.param({"path": "../models/qwen/"}, "qwen", id="a relative path"),
        pytest.param({"path": "Qwen/Qwen2.5-0.5B"}, "Qwen/Qwen2.5-0.5B", id="an id"),
        pytest.param({"path": "hf://Qwen/Qwen2.5-0.5B@main"}, "Qwen/Qwen2.5-0.5B", id="an id with its revision"),
        pytest.param({"path": "s3://models/of-ada/qwen"}, "qwen", id="in a store"),
        pytest.param(
            {"config": {"model_type": "qwen2"}, "tokenizer": {"path": "words"}},
            "a fresh qwen2 with random weights",
            id="a fresh one",
        ),
    ],
)
def test_a_base_model_has_a_name_for_strangers(model: dict[str, object], name: str) -> None:
    recipe = JOB["spec"]["recipe"] | {"model": model}  # type: ignore[index]
    job = PolyRLJob.model_validate(JOB | {"spec": JOB["spec"] | {"recipe": recipe}})
    assert base_model(job.spec.recipe.model) == name


def test_a_card_says_what_was_run_and_measured() -> None:
    card = model_card(origin(reward=0.5, evaluations={"afterRl": {"reward": 0.75, "scored": 4}}))
    for line in (
        "# sums",
        "Trained with PolyRL 9.9 from tiny\\|one.",
        "These are the weights after step 5 of stage rl.",
        "| recipe | SFT: 4 steps of 32 sequences, learning rate 0.001 |",
        "| recipe | GRPO: 7 steps of 8 prompts, 8 samples each, learning rate 1e-06 |",
        "| reward | `reward:score` |",
        "| mean reward of the newest RL step | 0.500 |",
        "| evaluation after RL | reward 0.750 |",
        "Prompts are plain text, without a chat template.",
    ):
        assert line in card.splitlines()
    assert "/home" not in card
    begun = model_card(origin(groups=4))
    assert "These are the weights after step 5 of stage rl and 4 groups of the next." in begun.splitlines()


@pytest.mark.parametrize(
    ("base", "linked"),
    [pytest.param("Qwen/Qwen2.5-0.5B", True, id="an id"), pytest.param("tiny: [", False, id="no id")],
)
def test_only_a_models_id_links_to_it(base: str, linked: bool) -> None:
    found = front_matter(model_card(origin(base_model=base)))
    assert found["library_name"] == "transformers"
    assert found.get("base_model") == (base if linked else None)


@pytest.mark.parametrize("chat", [True, False])
def test_its_example_is_a_program(chat: bool) -> None:
    card = model_card(origin(chat=chat))
    compile(card.split("```python\n")[1].split("```")[0], "card", "exec")
    assert ("apply_chat_template(" in card) is chat
