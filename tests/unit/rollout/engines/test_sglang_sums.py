"""What SGLang says of the weights that it holds, and when it is asked: after a load, before anything is generated."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from safetensors.numpy import save_file

from polyrl.manifest.rollout import EngineSpec
from polyrl.weights.engine_sums import EngineSum
from polyrl_rollout.engines.port import EngineFailed, LoadSeconds
from polyrl_rollout.engines.sglang.engine import SGLangEngine, _Refused
from polyrl_rollout.engines.sglang.shapes import dtypes_of
from polyrl_rollout.engines.sglang.sums import kind_of, sum_of, unrounded
from polyrl_rollout.engines.streams import SilenceDeadline

INFO = {"version": "0.5.23", "device": "cuda", "dtype": "auto", "tp_size": 2, "dp_size": 1, "pp_size": 1, "ep_size": 1}


def ranks(*sums: str) -> dict[str, Any]:
    """As SGLang 0.5.23 answers; per_engine_checksum is of the ranks in the order in which they answered."""
    given = [{"checksums": {"lm_head.weight": one}, "per_gpu_checksum": one, "parallelism_info": []} for one in sums]
    return {"success": True, "message": "Success.", "ranks": given, "per_engine_checksum": "".join(sums)}


class Asked(SGLangEngine):
    """Answers itself; `answer` is to /weights_checker."""

    def __init__(self, switch: str, answer: Any) -> None:
        super().__init__(EngineSpec(type="sglang", weight_switch=switch))
        self.answer, self.asked, self.killed = answer, list[str](), False
        self._kind = "kind"
        self._silence = SilenceDeadline(asyncio.get_running_loop().time)
        self._idle.set()

    async def _control(self, method: str, path: str, body: Any, deadline_s: float) -> dict[str, Any]:
        self.asked.append(path)
        if path == "/weights_checker":
            assert body == {"action": "checksum", "selector": "target"}
            if isinstance(self.answer, Exception):
                raise self.answer
            return dict(self.answer)
        return {}

    def _server(self) -> Any:
        return self

    async def kill(self) -> None:
        self.killed = True


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file({"w": np.zeros(4, np.float16)}, tmp_path / "model.safetensors")
    return tmp_path


def load(
    switch: str, answer: Any, folder: Path, held: frozenset[str] = frozenset({"F16"})
) -> tuple[Asked, LoadSeconds]:
    async def loaded() -> tuple[Asked, LoadSeconds]:
        engine = Asked(switch, answer)
        engine._unrounded = held
        return engine, await engine.load_weights(1, folder)

    return asyncio.run(loaded())


@pytest.mark.parametrize(
    ("switch", "asked"),
    [
        ("recompute", ["/abort_request", "/flush_cache", "/update_weights_from_disk", "/weights_checker"]),
        ("keep", ["/pause_generation", "/update_weights_from_disk", "/weights_checker", "/continue_generation"]),
    ],
)
def test_it_is_asked_after_the_load_and_before_it_generates(switch: str, asked: list[str], folder: Path) -> None:
    engine, seconds = load(switch, ranks("a", "b"), folder)
    assert engine.asked == asked
    assert seconds.sum == EngineSum("kind", sum_of(ranks("a", "b")) or b"", exact=True)
    assert engine.version == 1


@pytest.mark.parametrize("answer", [_Refused("404: Not Found"), {"success": True}], ids=["no such call", "other words"])
def test_one_that_cannot_say_it_serves_without(answer: Any, folder: Path) -> None:
    engine, seconds = load("keep", answer, folder)
    assert (seconds.sum, engine.version, engine.killed) == (None, 1, False)


@pytest.mark.parametrize(("status", "killed"), [(404, False), (400, False), (500, True)])
def test_only_a_server_that_is_well_may_refuse_to_say(status: int, killed: bool, folder: Path) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=status)

    async def asked() -> bool:
        app = web.Application()
        app.router.add_post("/weights_checker", answer)
        async with TestServer(app) as server, aiohttp.ClientSession(server.make_url("/")) as session:
            engine = Asked("recompute", {})
            engine._session = session
            engine.answer = await answered(SGLangEngine._control(engine, "POST", "/weights_checker", {}, 9.0))
            with contextlib.suppress(EngineFailed):
                await engine.load_weights(1, folder)
            return engine.killed

    assert asyncio.run(asked()) is killed


async def answered(call: Coroutine[Any, Any, dict[str, Any]]) -> Any:
    try:
        return await call
    except EngineFailed as error:
        return error


@pytest.mark.parametrize("switch", ["recompute", "keep"])
def test_one_that_breaks_meanwhile_is_ended_for_nobody_knows_what_it_holds(switch: str, folder: Path) -> None:
    async def broken() -> Asked:
        engine = Asked(switch, EngineFailed("SGLang did not answer /weights_checker"))
        with pytest.raises(EngineFailed, match=r"cannot load version 1 .*did not answer /weights_checker"):
            await engine.load_weights(1, folder)
        return engine

    engine = asyncio.run(broken())
    assert (engine.version, engine.killed) == (-1, True)


def test_a_sum_is_of_all_ranks_in_whatever_order_they_answered() -> None:
    assert sum_of(ranks("a", "b")) == sum_of(ranks("b", "a")) != sum_of(ranks("a", "c"))
    assert len({sum_of(ranks("a")), sum_of(ranks("a", "a")), sum_of(ranks("aa"))}) == 3
    for strange in ({}, {"ranks": None}, {"ranks": []}, {"ranks": [{}]}, {"ranks": [3]}):
        assert sum_of(strange) is None


def test_a_kind_names_what_else_a_sum_depends_on() -> None:
    gpu, cpu = kind_of(INFO, "NVIDIA H100 80GB HBM3"), kind_of({**INFO, "device": "cpu", "dtype": "float32"}, None)
    assert gpu == "SGLang 0.5.23 NVIDIA H100 80GB HBM3 auto tp2 dp1 pp1 ep1"
    assert cpu == "SGLang 0.5.23 cpu float32 tp2 dp1 pp1 ep1"
    assert not kind_of({**INFO, "enable_eplb": True}, "NVIDIA H100 80GB HBM3")


@pytest.mark.parametrize("name", ["quantization", "torchao_config", "moe_runner_backend"])
def test_a_kind_names_what_else_lays_weights_out_otherwise(name: str) -> None:
    assert kind_of({**INFO, name: "other"}, "GPU") == f"{kind_of(INFO, 'GPU')} {name}=other"
    assert kind_of({**INFO, name: None}, "GPU") == kind_of({**INFO, name: ""}, "GPU") == kind_of(INFO, "GPU")


def test_cpus_that_repack_weights_are_of_another_kind() -> None:
    cpuinfo = "processor\t: 0\nflags\t\t: fpu avx512f amx_bf16 amx_tile amx_int8\n"
    on_cpu = {**INFO, "device": "cpu"}
    assert kind_of(on_cpu, None, cpuinfo) == f"{kind_of(on_cpu, None)} amx"
    assert kind_of(on_cpu, None, "flags : avx512f") == kind_of(on_cpu, None)
    assert kind_of(INFO, "GPU", cpuinfo) == kind_of(INFO, "GPU"), "a GPU's host has no part in it"


def test_kinds_that_are_too_long_are_still_two() -> None:
    long, other = ({**INFO, "quantization": name} for name in ("a", "b"))
    kinds = {kind_of(long, "x" * 500), kind_of(other, "x" * 500)}
    assert [len(kind) for kind in kinds] == [128, 128]


@pytest.mark.parametrize(
    ("server", "config", "held"),
    [
        ({"dtype": "float32"}, {}, {"F32", "BF16", "F16"}),
        ({"dtype": "bfloat16"}, {"dtype": "float32"}, {"BF16"}),
        ({"dtype": "half"}, {}, {"F16"}),
        ({"dtype": "auto"}, {"dtype": "bfloat16"}, {"BF16"}),
        ({"dtype": "auto"}, {"text_config": {"torch_dtype": "float16"}}, {"F16"}),
        ({"dtype": "auto"}, {"dtype": "float32"}, set()),
        ({"dtype": "auto"}, {}, set()),
        ({"dtype": "auto"}, None, set()),
        ({"dtype": "bfloat16", "quantization": "fp8"}, {}, set()),
        ({"dtype": "bfloat16", "torchao_config": "int8wo"}, {}, set()),
    ],
)
def test_what_an_engine_holds_without_rounding(
    server: dict[str, Any], config: dict[str, Any] | None, held: set[str], tmp_path: Path
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert unrounded(server, tmp_path) == held


@pytest.mark.parametrize(
    ("held", "exact"), [({"BF16"}, False), ({"F16"}, True), (set(), False)], ids=["other", "same", "quantized"]
)
def test_a_sum_is_exact_where_the_engine_rounds_none_of_the_tensors(held: set[str], exact: bool, folder: Path) -> None:
    save_file({"ids": np.zeros(4, np.int64)}, folder / "second.safetensors")
    assert dtypes_of(folder) == {"F16", "I64"}
    _, seconds = load("keep", ranks("a"), folder, held=frozenset(held))
    assert seconds.sum is not None
    assert seconds.sum.exact is exact
