"""What a server is given that is to sleep: its memory saver, where there is a GPU."""

from __future__ import annotations

import pytest

from polyrl.manifest.rollout import EngineSpec
from polyrl_rollout.agent.__main__ import choose_engine
from polyrl_rollout.engines.sglang.launch import SAVER, sleep_arguments


@pytest.mark.parametrize(
    ("args", "added"),
    [
        pytest.param([], [SAVER], id="on a GPU"),
        pytest.param([SAVER], [], id="it is in the manifest"),
        pytest.param(["--device", "cpu"], [], id="on a CPU"),
    ],
)
def test_the_memory_saver_is_added_where_it_works(args: list[str], added: list[str]) -> None:
    assert sleep_arguments(EngineSpec(type="sglang", args=args)) == added


def test_only_an_engine_that_holds_a_devices_memory_sleeps() -> None:
    assert choose_engine(EngineSpec(type="sglang"), sleeps=True).sleeps
    assert not choose_engine(EngineSpec(type="sglang")).sleeps
    assert not choose_engine(EngineSpec(type="embedded"), sleeps=True).sleeps
