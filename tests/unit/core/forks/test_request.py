"""What may be forked of a process that has loaded its libraries in another environment."""

from __future__ import annotations

import sys

import pytest

from polyrl.forks.request import imports_alike, module_of

LOADED_IN = {"HOME": "/home/ann", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PATH": "/bin"}


@pytest.mark.parametrize(
    ("changed", "alike"),
    [
        pytest.param({}, True, id="the same"),
        pytest.param({"POLYRL_PARENT_PID": "7", "RANK": "1", "WORLD_SIZE": "2"}, True, id="who it is"),
        pytest.param({"OMP_NUM_THREADS": "4"}, True, id="threads, which are set anew"),
        pytest.param({"WANDB_API_KEY": "secret", "https_proxy": "http://proxy"}, True, id="accounts and proxies"),
        pytest.param({"SSL_CERT_FILE": "/ca.pem", "HF_TOKEN": "secret"}, True, id="read when connecting"),
        pytest.param({"TORCHINDUCTOR_CACHE_DIR": "/tmp/torchinductor_ann"}, True, id="set by torch itself"),
        pytest.param({"NCCL_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}, True, id="read when they are needed"),
        pytest.param({"HF_HOME": "/models"}, False, id="a folder that a library reads as it is loaded"),
        pytest.param({"HF_HUB_OFFLINE": "0"}, False, id="another value"),
        pytest.param({"PYTHONPATH": "/mine"}, False, id="other modules"),
        pytest.param({"TORCH_LOGS": "dynamo"}, False, id="what nobody here knows"),
    ],
)
def test_only_variables_that_no_import_reads_may_differ(changed: dict[str, str], alike: bool) -> None:
    assert imports_alike({**LOADED_IN, **changed}, LOADED_IN) is alike
    assert imports_alike(LOADED_IN, {**LOADED_IN, **changed}) is alike


def test_a_variable_that_is_missing_differs() -> None:
    assert not imports_alike({name: text for name, text in LOADED_IN.items() if name != "HOME"}, LOADED_IN)


@pytest.mark.parametrize(
    ("command", "module"),
    [
        pytest.param([sys.executable, "-m", "polyrl_trainer", "--run", "x"], "polyrl_trainer", id="a module"),
        pytest.param(["/another/python", "-m", "polyrl_trainer"], None, id="of another Python"),
        pytest.param([sys.executable, "-c", "pass"], None, id="no module"),
        pytest.param([sys.executable, "-m"], None, id="none named"),
        pytest.param(["sleep", "5"], None, id="no Python"),
    ],
)
def test_modules_of_this_python_are_forked(command: list[str], module: str | None) -> None:
    assert module_of(command) == module
