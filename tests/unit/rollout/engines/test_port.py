"""The port: its usage example runs as it stands, and what never fits a model is refused before any engine sees it."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

from polyrl.sample import SamplingParams
from polyrl_rollout.engines import port
from polyrl_rollout.engines.port import (
    EngineFailed,
    GenerateRequest,
    ModelLimits,
    RequestRejected,
    check_request,
    read_limits,
)


def test_the_usage_example_of_the_port_runs() -> None:
    results = doctest.testmod(port)
    assert results.attempted >= 4
    assert results.failed == 0


@pytest.mark.parametrize(
    ("input_ids", "max_new_tokens", "refusal"),
    [
        pytest.param([1, 2], 6, None, id="the whole context"),
        pytest.param([1, 2], 7, "needs 2 . 7 = 9 tokens", id="more than the context"),
        pytest.param([], 1, "no input tokens", id="empty prompt"),
        pytest.param([1], 0, "at least 1", id="no budget"),
        pytest.param([10], 1, "outside the vocabulary", id="token too large"),
        pytest.param([-1], 1, "outside the vocabulary", id="negative token"),
    ],
)
def test_requests_are_checked_against_the_model(input_ids: list[int], max_new_tokens: int, refusal: str | None) -> None:
    request = GenerateRequest(
        "r", input_ids, max_new_tokens=max_new_tokens, sampling=SamplingParams(max_new_tokens), seed=0
    )
    if refusal is None:
        check_request(request, vocab_size=10, max_context=8)
        return
    with pytest.raises(RequestRejected, match=refusal):
        check_request(request, vocab_size=10, max_context=8)


@pytest.mark.parametrize(
    ("config", "limits"),
    [
        pytest.param('{"vocab_size": 7, "max_position_embeddings": 9}', ModelLimits(7, 9), id="plain"),
        pytest.param(
            '{"text_config": {"vocab_size": 7, "max_position_embeddings": 9}}', ModelLimits(7, 9), id="multimodal"
        ),
        pytest.param('{"vocab_size": 7}', None, id="without positions"),
        pytest.param("[]", None, id="no object"),
        pytest.param("{", None, id="no JSON"),
    ],
)
def test_limits_come_from_the_models_config(tmp_path: Path, config: str, limits: ModelLimits | None) -> None:
    (tmp_path / "config.json").write_text(config)
    if limits is not None:
        assert read_limits(tmp_path) == limits
        return
    with pytest.raises(EngineFailed, match=r"config\.json is not a usable model config"):
        read_limits(tmp_path)
