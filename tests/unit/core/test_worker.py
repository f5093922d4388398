"""What runs for which manifest: the single description, as values."""

import pytest

from polyrl.manifest.job import JobSpec
from polyrl.worker import Role, RunLocation, Worker, Workers, workers_of

PLACE = RunLocation(run="/run", manifest_dir="/job", python="python", run_epoch=3, cpus=8)
REWARD = {"function": "reward:score"}
EVAL = {"eval": [{"path": "eval.jsonl"}]}


def a_spec(mode: str = "rl", recipe: dict | None = None, **parts: object) -> JobSpec:
    base = {"mode": mode, "model": {"config": {"model_type": "qwen2"}}, "reward": REWARD}
    return JobSpec.model_validate({"recipe": {**base, **(recipe or {})}, **parts})


def wanted(*args: object, **parts: object) -> Workers:
    return workers_of(a_spec(*args, **parts), PLACE)  # type: ignore[arg-type]


def value_of(worker: Worker, flag: str) -> str:
    return worker.argv[worker.argv.index(flag) + 1]


@pytest.mark.parametrize("mode", ["rl", "sft+rl"])
def test_sampling_modes_want_everything(mode: str) -> None:
    workers = wanted(mode, rollout={"maxReplicas": 2, "replicas": 2})
    assert workers.manager is not None
    assert workers.reserved is not None
    assert workers.rollout is not None
    assert workers.rollouts == 2


@pytest.mark.parametrize("mode", ["sft", "offline-rl", "dpo", "reward-model"])
@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param({"reward": None}, id="no reward"),
        pytest.param({"data": EVAL, "reward": None}, id="nothing but an evaluation that nothing scores"),
        pytest.param({}, id="nothing to evaluate"),
    ],
)
def test_modes_that_sample_nothing_want_only_the_trainer(mode: str, recipe: dict) -> None:
    workers = wanted(mode, recipe)
    assert (workers.manager, workers.reserved, workers.rollout, workers.rollouts) == (None, None, None, 0)
    assert "--manager-endpoints" not in workers.trainer.argv


@pytest.mark.parametrize("mode", ["sft", "offline-rl", "dpo"])
def test_modes_that_only_evaluate_want_the_reserved_engine_alone(mode: str) -> None:
    workers = wanted(mode, {"data": EVAL}, trainer={"reservedEngine": False}, rollout={"maxReplicas": 4})
    assert workers.reserved is not None
    assert (workers.rollout, workers.rollouts) == (None, 0)
    assert value_of(workers.trainer, "--manager-endpoints") == "/run/run/endpoints/manager.json"


@pytest.mark.parametrize(
    ("rollout", "expected"),
    [
        pytest.param({}, 1, id="one where nothing is said"),
        pytest.param({"maxReplicas": 0}, 0, id="none where none are allowed"),
        pytest.param({"minReplicas": 3, "maxReplicas": 5}, 3, id="the least"),
        pytest.param({"replicas": 0, "maxReplicas": 5}, 0, id="none where it is asked for"),
        pytest.param({"replicas": 9, "maxReplicas": 5}, 5, id="at most the most"),
        pytest.param({"replicas": 1, "minReplicas": 2, "maxReplicas": 5}, 2, id="at least the least"),
    ],
)
def test_the_first_size_of_the_fleet(rollout: dict, expected: int) -> None:
    assert wanted(rollout=rollout).rollouts == expected


def test_a_rollout_template_becomes_a_worker_by_its_name() -> None:
    workers = wanted()
    assert workers.rollout is not None
    worker = workers.rollout.named("rollout-7")
    assert (worker.name, worker.role) == ("rollout-7", Role.ROLLOUT)
    assert value_of(worker, "--engine-name") == "rollout-7"
    assert value_of(worker, "--pool") == "spot"


def test_every_worker_has_its_own_keys_and_the_epoch_and_no_secret() -> None:
    workers = wanted()
    for worker, keys in ((workers.manager, "manager"), (workers.trainer, "trainer"), (workers.reserved, "{name}")):
        assert worker is not None
        assert value_of(worker, "--keys") == f"/run/keys/{keys}.key"
        assert value_of(worker, "--epoch") == "3"


def test_the_trainer_takes_the_cores_that_rollouts_leave() -> None:
    rollout = {"replicas": 2, "maxReplicas": 2, "engine": {"threads": 3}}
    workers = wanted(rollout=rollout)
    assert workers.trainer.env["OMP_NUM_THREADS"] == "2"
    assert workers.rollout is not None
    assert workers.rollout.env["OMP_NUM_THREADS"] == "3"


def test_rollouts_of_a_local_run_exchange_weights_only_where_that_is_asked_for() -> None:
    for choice, exchanged in (("Auto", False), ("Always", True), ("Never", False)):
        workers = wanted(rollout={"weightExchange": choice})
        assert workers.rollout is not None
        assert workers.reserved is not None
        asked = ("--exchange-bind", "127.0.0.1", "--exchange-port", "0", "--exchange-least", "0")
        assert (workers.rollout.argv[-6:] == asked) is exchanged, choice
        assert "--exchange-bind" not in workers.reserved.argv, choice
