"""Which variables of the user's environment reach which worker, by name."""

import pytest

from polyrl.forks.request import imports_alike
from polyrl.manifest.environment import EVERY_WORKER, inherited
from polyrl.manifest.job import PolyRLJob
from polyrl.testing.job_values import raw_job
from polyrl.worker import RunLocation, Workers, workers_of

NAMES = [
    # name, reaches every worker, reaches the trainer
    ("PATH", True, True),
    ("HF_HUB_OFFLINE", True, True),
    ("HF_HOME", True, True),
    ("HF_TOKEN", False, True),
    ("HF_ENDPOINT", False, True),
    ("WANDB_MODE", False, True),
    ("MLFLOW_TRACKING_URI", False, True),
    ("OPENAI_API_KEY", False, True),
    ("OPENAI_BASE_URL", False, True),
    ("https_proxy", False, True),
    ("NO_PROXY", False, True),
    ("SSL_CERT_FILE", False, True),
    ("JUDGE_MODEL", False, True),
    ("AWS_SECRET_ACCESS_KEY", False, False),
    ("HF", False, False),
    ("PYTHONPATH", False, False),
    ("hf_token", False, False),
]


def workers(env: list[dict[str, str]]) -> Workers:
    raw = raw_job()
    raw["spec"]["recipe"]["env"] = env
    place = RunLocation("/run", "/job", python="python", run_epoch=1, cpus=2)
    return workers_of(PolyRLJob.model_validate(raw).spec, place)


@pytest.mark.parametrize(("name", "everywhere", "trainer"), NAMES, ids=[row[0] for row in NAMES])
def test_a_variable_reaches_whom_it_is_for(name: str, everywhere: bool, trainer: bool) -> None:
    all_of_them = workers([{"name": "JUDGE_MODEL"}])
    assert all_of_them.rollout is not None
    assert all_of_them.rollout.inherits == EVERY_WORKER
    assert (name in inherited({name: "x"}, all_of_them.rollout.inherits)) is everywhere
    assert (name in inherited({name: "x"}, all_of_them.trainer.inherits)) is trainer


def test_a_value_of_the_manifest_is_the_trainers_alone() -> None:
    all_of_them = workers([{"name": "JUDGE_MODEL", "value": "large"}])
    assert all_of_them.trainer.env["JUDGE_MODEL"] == "large"
    assert all_of_them.rollout is not None
    assert "JUDGE_MODEL" not in all_of_them.rollout.env
    assert "JUDGE_MODEL" not in all_of_them.trainer.inherits


def test_all_workers_may_be_forked_of_one_that_loaded_libraries_in_what_each_gets() -> None:
    """Certificates, accounts and proxies reach the trainer alone: with them it was spawned, unseen by any test."""
    names = ("HOME", "HF_HOME", "HF_TOKEN", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "https_proxy", "OPENAI_API_KEY")
    environ, found = dict.fromkeys(names, "x"), workers([])
    assert found.rollout is not None
    for worker in (found.manager, found.trainer, found.rollout):
        gets = inherited(environ, worker.inherits) | worker.env
        assert imports_alike(gets, inherited(environ, EVERY_WORKER)), worker.name
