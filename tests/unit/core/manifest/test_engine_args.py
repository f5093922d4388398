"""What SGLang's arguments say of GPUs, and pod templates that ask for others."""

import pytest
from pydantic import ValidationError

from polyrl.manifest.engine_args import argument, gpus_per_engine, typed_arguments
from polyrl.manifest.job import JobSpec
from polyrl.manifest.rollout import EngineSpec
from polyrl.manifest.rules.template_gpus import template_notes


@pytest.mark.parametrize(
    ("fields", "number", "arguments"),
    [
        ({}, 1, []),
        ({"tensor_parallel": 4}, 4, ["--tp-size", "4"]),
        ({"tensor_parallel": 2, "args": ["--pp-size", "2"]}, 4, ["--tp-size", "2"]),
        ({"args": ["--pp-size", "many"]}, 1, []),
        ({"args": ["--pp-size"]}, 1, []),
        ({"tensor_parallel": 2, "data_parallel": 2}, 4, ["--tp-size", "2", "--dp-size", "2"]),
        (
            {"tensor_parallel": 4, "data_parallel": 2, "args": ["--enable-dp-attention"]},
            4,
            ["--tp-size", "4", "--dp-size", "2"],
        ),
        ({"mem_fraction": 0.25}, 1, ["--mem-fraction-static", "0.25"]),
        ({"type": "embedded"}, 0, []),
    ],
    ids=[
        *("one", "layers spread", "two kinds", "no number", "no value", "replicas", "attention only", "a share"),
        "on the CPU",
    ],
)
def test_fields_say_how_many_gpus_an_engine_has(fields: dict, number: int, arguments: list[str]) -> None:
    engine = EngineSpec(**fields)
    assert gpus_per_engine(engine) == number
    assert typed_arguments(engine) == arguments


def test_an_argument_is_found_in_both_spellings() -> None:
    args = ["--a", "1", "--b=2", "--a=3"]
    assert (argument(args, ["--a"]), argument(args, ["--b"]), argument(args, ["--c"])) == ("3", "2", None)


def template(gpus: int | float | str | None, name: str = "theirs") -> dict:
    resources = {} if gpus is None else {"resources": {"limits": {"nvidia.com/gpu": gpus}}}
    return {"template": {"spec": {"containers": [{"name": name, **resources}]}}}


def job(trainer: dict, rollout: dict, each: int = 1, engine: str = "sglang", reserved: bool = False) -> JobSpec:
    recipe = {"model": {"path": "model"}, "reward": {"function": "reward:score"}}
    return JobSpec.model_validate(
        {
            "recipe": recipe,
            "trainer": {**trainer, "reservedEngine": reserved},
            "rollout": {**rollout, "engine": {"type": engine, "tensorParallel": each}},
        }
    )


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (job(template(1), template(1)), []),
        (job(template(8), template(1)), []),
        (
            job({**template(8), "processesPerPod": 1}, template(1)),
            ["trainer.template asks for 8 nvidia.com/gpu, and the learner uses 1"],
        ),
        (job({**template("2"), "processesPerPod": 1}, template(1)), ["asks for 2"]),
        (job(template(1), template(8)), ["rollout.template asks for 8 nvidia.com/gpu, and an engine uses 1"]),
        (job(template(1), template(1), 2), ["asks for 1 nvidia.com/gpu, and an engine uses 2"]),
        (job(template(1), template(2), 2), []),
        (job(template(1), template(1), engine="embedded"), ["asks for 1 nvidia.com/gpu, and an engine uses 0"]),
        (job(template(1), template(1), reserved=True), []),
        (job({**template(4), "processesPerPod": 4}, template(1), reserved=True), []),
        (job({**template(4), "processesPerPod": 4}, template(2), 2, reserved=True), []),
        (
            job({**template(3), "processesPerPod": 3}, template(2), 2, reserved=True),
            ["asks for 3 nvidia.com/gpu, and a reserved engine lies on 2"],
        ),
        (job(template(None), template(None), reserved=True), []),
        (job({}, {}, reserved=True), []),
    ],
    ids=[
        *(
            "as used",
            "eight that learn",
            "eight for a learner of one",
            "as text",
            "eight for an engine",
            "fewer than it is spread over",
            "as many",
        ),
        *("an engine on the CPU", "one that is shared", "four that are shared", "two groups", "one over"),
        *("none at all", "no templates"),
    ],
)
def test_templates_that_ask_for_other_gpus_than_are_used_are_noted(spec: JobSpec, words: list[str]) -> None:
    notes = template_notes(spec)
    assert len(notes) == len(words)
    assert all(one in note for one, note in zip(words, notes, strict=True))


@pytest.mark.parametrize(
    ("trainer", "processes"),
    [
        ({}, 1),
        (template(None), 1),
        (template(8), 8),
        (template("4"), 4),
        (template(4.0), 4),
        (template(0), 1),
        ({**template(8), "processesPerPod": 2}, 2),
        ({**template(8), "processesPerPod": None}, 8),
        ({"template": {"spec": {"containers": [{"name": "a", "resources": {"claims": [{"name": "gpus"}]}}]}}}, 1),
    ],
    ids=["no pod", "no GPUs", "eight", "as text", "with a point", "none", "chosen", "left empty", "of a DRA driver"],
)
def test_the_learner_has_a_process_for_each_gpu_of_its_pod_unless_it_is_set(trainer: dict, processes: int) -> None:
    assert job(trainer, {}).trainer.processes_per_pod == processes


@pytest.mark.parametrize(
    "wrong",
    ["8", [], {"spec": 8}, {"spec": {"containers": {}}}, {"spec": {"containers": [8]}}],
    ids=["a text", "a list", "no spec", "no containers", "no container"],
)
def test_a_template_that_is_none_has_its_own_fault_and_no_other(wrong: object) -> None:
    with pytest.raises(ValidationError) as refused:
        job({"template": wrong}, {})
    assert {one["loc"][:2] for one in refused.value.errors()} == {("trainer", "template")}


@pytest.mark.parametrize(
    ("trainer", "fraction"), [({}, 0.8), ({"reservedMemFraction": 0.2}, 0.2)], ids=["as rollouts", "its own"]
)
def test_the_reserved_engine_is_like_rollouts_but_for_its_share_of_memory(trainer: dict, fraction: float) -> None:
    spec = JobSpec.model_validate(
        {
            "recipe": {"model": {"path": "model"}, "reward": {"function": "reward:score"}},
            "trainer": trainer,
            "rollout": {"engine": {"type": "sglang", "memFraction": 0.8, "tensorParallel": 2}},
        }
    )
    assert (spec.reserved_engine.mem_fraction, spec.reserved_engine.tensor_parallel) == (fraction, 2)
    assert spec.rollout.engine.mem_fraction == 0.8
