"""Which worker gets which GPUs."""

from dataclasses import replace

import pytest

from polyrl.local.devices import Gpu
from polyrl.local.gpu_assignment import (
    GpuAssignment,
    GpuRefusal,
    assign_gpus,
    assignment_line,
    with_gpus,
)
from polyrl.manifest.job import JobSpec
from polyrl.worker import RunLocation, workers_of

PLACE = RunLocation(run="/run", manifest_dir="/job", python="python", run_epoch=1, cpus=8)


def spec(
    rollouts: int,
    each: int = 1,
    reserved: bool = True,
    engine: str = "sglang",
    mode: str = "rl",
    *,
    pods: int = 1,
    processes: int = 1,
) -> JobSpec:
    recipe = {"mode": mode, "model": {"path": "model"}, "reward": {"function": "reward:score"}}
    evaluated = {"data": {"eval": [{"path": "eval.jsonl"}]}}
    rollout = {"replicas": rollouts, "maxReplicas": 16, "engine": {"type": engine, "tensorParallel": each}}
    trainer = {"reservedEngine": reserved, "replicas": pods, "processesPerPod": processes}
    return JobSpec.model_validate({"recipe": {**recipe, **evaluated}, "trainer": trainer, "rollout": rollout})


def gpus(number: int) -> list[Gpu]:
    return [Gpu(name=str(index), model="NVIDIA L4", uuid=f"GPU-{index}") for index in range(number)]


def shown(given: GpuAssignment | GpuRefusal) -> str:
    if isinstance(given, GpuRefusal):
        return f"{given.field}: {given.sentence}"
    return assignment_line(given).removeprefix("GPUs (NVIDIA L4): ")


ROWS = [
    (spec(0), 1, "the learner and the reserved engine 0"),
    (spec(1), 2, "the learner and the reserved engine 0 · rollout 0 1"),
    (spec(1, reserved=False), 2, "the learner 0 · rollout 0 1"),
    (spec(2), 4, "the learner and the reserved engine 0 · rollout 0 1 · rollout 1 2 · unused 3"),
    (spec(2, each=2), 7, "the learner 0 · the reserved engine 1,2 · rollout 0 3,4 · rollout 1 5,6"),
    (spec(2, each=2, reserved=False), 5, "the learner 0 · rollout 0 1,2 · rollout 1 3,4"),
    (spec(3, engine="embedded"), 2, "the learner 0 · unused 1"),
    (spec(3, mode="sft"), 2, "the learner and the reserved engine 0 · unused 1"),
    (spec(3), 0, ""),
    (spec(1, reserved=False, pods=2, processes=2), 6, "the learner 0,1,2,3 · rollout 0 4 · unused 5"),
    (
        spec(1),
        1,
        "rollout.replicas: 1 rollout of 1 GPU each (rollout.engine.tensorParallel), beside 1 of the learner, need 2"
        " GPUs, and this run sees 1 (0); set 0: the reserved engine generates alone, or use a cluster",
    ),
    (
        spec(4, each=2),
        8,
        "rollout.replicas: 4 rollouts of 2 GPUs each (rollout.engine.tensorParallel), beside 1 of the learner and 2 of"
        " the reserved engine, need 11 GPUs, and this run sees 8 (0,1,2,3,4,5,6,7); set 2, or use a cluster",
    ),
    (
        spec(0, each=8),
        8,
        "trainer.reservedEngine: 1 GPU of the learner and 8 of the reserved engine (rollout.engine.tensorParallel), and"
        " this run sees 8 (0,1,2,3,4,5,6,7); spread engines over fewer GPUs, or set it to false",
    ),
]


NAMES = [
    *(
        "one GPU, the reserved engine alone",
        "one for the learner, one for a rollout",
        "no reserved engine",
        "one too many",
    ),
    *("engines over two", "engines over two, no reserved one", "embedded engines", "only evaluated", "no GPU"),
    "two pods of two processes each",
    *("a rollout too many", "two rollouts too many", "a reserved engine that is too wide"),
]


@pytest.mark.parametrize(("job", "number", "words"), ROWS, ids=NAMES)
def test_gpus_in_an_assignment_or_one_refusal_out(job: JobSpec, number: int, words: str) -> None:
    assert shown(assign_gpus(job, gpus(number))) == words


NO_INSTANCES = "rollout.engine.tensorParallel: an engine over 2 GPUs cannot have instances of a divided GPU"


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (spec(1), "the learner and the reserved engine 0 · rollout 0 MIG-1 · unused MIG-2"),
        (
            spec(1, each=2, reserved=False),
            NO_INSTANCES,
        ),
        (spec(0, each=2), NO_INSTANCES),
    ],
    ids=["one each", "a rollout over two", "the reserved engine over two"],
)
def test_an_instance_of_a_divided_gpu_serves_alone(job: JobSpec, words: str) -> None:
    """CUDA shows a process one instance, whatever it is given."""
    whole, *others = gpus(3)
    instances = [replace(gpu, name=f"MIG-{gpu.name}", uuid=f"MIG-{gpu.name}") for gpu in others]
    assert words in shown(assign_gpus(job, [whole, *instances]))


@pytest.mark.parametrize("number", range(10))
@pytest.mark.parametrize("each", [1, 2, 3])
@pytest.mark.parametrize("rollouts", range(4))
@pytest.mark.parametrize("reserved", [True, False])
def test_no_gpu_is_given_twice_and_none_is_lost(number: int, each: int, rollouts: int, reserved: bool) -> None:
    given = assign_gpus(spec(rollouts, each=each, reserved=reserved), gpus(number))
    if isinstance(given, GpuRefusal):
        assert number < 1 + rollouts * each + (each if reserved and each > 1 else 0)
        return
    own = () if given.shared else given.reserved
    every = [*given.trainer, *own, *sum(given.rollouts, ()), *given.unused]
    assert every == gpus(number)
    assert [len(one) for one in given.rollouts] == [each] * (rollouts if number else 0)


def test_workers_see_their_gpus_and_no_others() -> None:
    job = spec(2)
    given = assign_gpus(job, gpus(3))
    assert isinstance(given, GpuAssignment)
    workers = with_gpus(workers_of(job, PLACE), given)
    assert workers.trainer.env["CUDA_VISIBLE_DEVICES"] == "0"
    assert workers.trainer.env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert workers.trainer.env["POLYRL_LEARNER_DEVICE"] == "cuda"
    assert workers.reserved is not None
    assert workers.reserved.gpus == ("0",)
    assert "POLYRL_ENGINE_APART" not in workers.trainer.env | workers.reserved.env
    assert workers.rollout_gpus == (("1",), ("2",))
    assert workers.rollout is not None
    assert "CUDA_VISIBLE_DEVICES" not in workers.rollout.env


def test_an_engine_with_gpus_of_its_own_is_said_to_be_apart() -> None:
    job = spec(0, each=2)
    given = assign_gpus(job, gpus(3))
    assert isinstance(given, GpuAssignment)
    workers = with_gpus(workers_of(job, PLACE), given)
    assert workers.reserved is not None
    assert workers.trainer.env["POLYRL_ENGINE_APART"] == workers.reserved.env["POLYRL_ENGINE_APART"] == "1"


def test_without_gpus_workers_are_left_as_they_are() -> None:
    workers = workers_of(spec(2), PLACE)
    assert with_gpus(workers, GpuAssignment()) == workers


def test_sglang_on_the_cpu_takes_none() -> None:
    assert shown(assign_gpus(spec(5), gpus(1), engines_on_cpu=True)) == "the learner 0"
