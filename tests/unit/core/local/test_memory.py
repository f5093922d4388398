"""What one machine holds, and what it surely does not."""

import pytest

from polyrl.local.memory import Machine, engines_fault, memory_fault, num_engines
from polyrl.manifest.job import JobSpec
from polyrl.memory.sizes import GIB


def spec(dtype: str = "bfloat16", kl: float = 0.0, mode: str = "rl", **parts: object) -> JobSpec:
    recipe = {
        "mode": mode,
        "model": {"config": {"model_type": "qwen2"}, "dtype": dtype},
        "algorithm": {"klCoefficient": kl},
        "reward": {"function": "reward:score"},
    }
    return JobSpec.model_validate({"recipe": recipe, "rollout": {"engine": {"type": "embedded"}}, **parts})


def machine(gib: float, gpu: bool = False) -> Machine:
    return Machine(memory_bytes=int(gib * GIB), has_gpu=gpu)


FORTY = {"replicas": 40, "maxReplicas": 40}
ENGINES = {"engine": {"type": "embedded"}, **FORTY}
ROWS = [
    # parameters, job, machine, what does not fit
    (600_000, spec(), machine(2), None),
    (7_600_000_000, spec(), machine(64), "needs at least 142.4 GiB of memory here (learner 113.2"),
    (7_600_000_000, spec(), machine(64, gpu=True), None),
    (7_600_000_000, spec(), machine(16, gpu=True), "learner 28.3"),
    (1_000_000_000, spec(), machine(20), None),
    (1_000_000_000, spec(kl=0.1), machine(20), "learner 18.6"),
    (1_000_000_000, spec(dtype="float32"), machine(20), "weights of 2 engines 7.5"),
    (1_000, spec(rollout=ENGINES), machine(8), "processes 12.3"),
    (1_000, spec(rollout={"engine": {"type": "sglang"}, **FORTY}), machine(8), None),
]  # fmt: skip
NAMES = [
    "a tiny model",
    "7B on a CPU",
    "7B with a GPU",
    "7B with a GPU and little memory",
    "1B",
    "1B with a reference policy",
    "1B in float32",
    "forty engines of their own weights",
    "forty engines elsewhere",
]


@pytest.mark.parametrize(("parameters", "job", "here", "words"), ROWS, ids=NAMES)
def test_what_surely_does_not_fit_is_refused_with_its_sizes(
    parameters: int, job: JobSpec, here: Machine, words: str | None
) -> None:
    fault = memory_fault(job, parameters, here)
    assert (fault is None) if words is None else (fault is not None and words in fault[1])


def test_what_takes_most_is_blamed() -> None:
    model, fleet = (
        memory_fault(spec(), 7_600_000_000, machine(8)),
        memory_fault(spec(rollout=ENGINES), 1_000, machine(8)),
    )
    assert (model and model[0], fleet and fleet[0]) == ("recipe.model", "rollout.replicas")


NOBODY = {"trainer": {"reservedEngine": False}, "rollout": {"replicas": 0, "maxReplicas": 1}}


@pytest.mark.parametrize(
    ("job", "engines", "refused"),
    [
        (spec(**NOBODY), 0, True),
        (spec(rollout={"replicas": 0}), 1, False),
        (spec(trainer={"reservedEngine": False}), 1, False),
        (spec(mode="sft", **NOBODY), 0, False),
    ],
    ids=["none at all", "the reserved one", "one rollout", "none is needed"],
)
def test_a_job_without_engines_is_refused(job: JobSpec, engines: int, refused: bool) -> None:
    assert num_engines(job) == engines
    assert (engines_fault(job) is not None) is refused
