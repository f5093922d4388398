"""What SGLang is asked at a switch of weights, so that no prompt reuses what older weights computed: an idle load
flushes the cache, and one beside running requests, which cannot, relies on a key of its own in every request."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from polyrl.manifest.rollout import EngineSpec
from polyrl.sample import SamplingParams
from polyrl_rollout.engines.port import GenerateRequest
from polyrl_rollout.engines.sglang.engine import SGLangEngine, request_body
from polyrl_rollout.engines.streams import SilenceDeadline

Asked = list[tuple[str, dict[str, Any] | None]]
FOLDER = Path("model")


async def asked_at_a_load(switch: str, monkeypatch: pytest.MonkeyPatch) -> Asked:
    engine, asked = SGLangEngine(EngineSpec(type="sglang", weight_switch=switch)), Asked()

    async def control(method: str, path: str, body: dict[str, Any] | None, deadline_s: float) -> dict[str, Any]:
        asked.append((path.partition("?")[0], body))
        return {}

    monkeypatch.setattr(engine, "_control", control)
    monkeypatch.setattr("polyrl_rollout.engines.sglang.engine.read_shapes", lambda folder: {})
    engine._silence = SilenceDeadline(asyncio.get_running_loop().time)
    engine._idle.set()
    await engine.load_weights(1, FOLDER)
    asked.clear()
    await engine.load_weights(2, FOLDER)
    assert engine.version == 2
    return asked


def loaded(asked: Asked) -> dict[str, Any]:
    (body,) = [body for path, body in asked if path == "/update_weights_from_disk"]
    assert body is not None
    return body


def test_an_idle_load_flushes_the_cache_before_and_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asyncio.run(asked_at_a_load("recompute", monkeypatch))
    assert [path for path, _ in asked] == ["/abort_request", "/flush_cache", "/update_weights_from_disk"]
    assert (loaded(asked)["flush_cache"], loaded(asked)["weight_version"]) == (True, "2")


def test_a_load_beside_running_requests_flushes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asyncio.run(asked_at_a_load("keep", monkeypatch))
    assert [path for path, _ in asked] == [
        "/pause_generation",
        "/update_weights_from_disk",
        "/continue_generation",
    ]
    assert loaded(asked)["flush_cache"] is False, "which SGLang refuses while requests hold it"


def test_a_prompt_finds_in_the_cache_only_what_its_own_version_computed() -> None:
    request = GenerateRequest("00000002", [1], max_new_tokens=4, sampling=SamplingParams(9), seed=7)
    keys = [request_body(request, version)["extra_key"] for version in (3, 3, 4)]
    assert keys[0] == keys[1] != keys[2]
