"""An SGLang server that is killed, as by a machine without memory, is lost: its agent's end says nothing of its
settings, whatever the server was asked just then.

By a stand-in that answers what a start asks, and when weights are to be loaded ends by a signal, or by itself, or says
nothing more."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from polyrl.manifest.rollout import EngineSpec, EngineType
from polyrl_rollout.engines.port import EngineFailed, EngineLost
from polyrl_rollout.engines.sglang.engine import SGLangEngine
from polyrl_rollout.engines.sglang.launch import PYTHON

STAND_IN = """#!{python}
import http.server, json, os, signal, sys, time

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({{"max_total_num_tokens": 4096}})

    def do_POST(self):
        if self.path == "/update_weights_from_disk":
            {end}
        self.answer({{}})

    def answer(self, value):
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *text):
        pass

port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
LIMITS = '{"vocab_size": 100, "max_position_embeddings": 512}'
KILLED, ENDED, SILENT = "os.kill(os.getpid(), signal.SIGKILL)", "os._exit(3)", "time.sleep(600)"


@pytest.fixture
async def engine(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[SGLangEngine]:
    server = tmp_path / "python"
    server.write_text(STAND_IN.format(python=sys.executable, end=request.param))
    server.chmod(0o755)
    monkeypatch.setenv(PYTHON, str(server))
    monkeypatch.setattr("polyrl_rollout.engines.sglang.engine.read_shapes", lambda folder: {})
    (tmp_path / "config.json").write_text(LIMITS)
    engine = SGLangEngine(EngineSpec(type=EngineType.SGLANG))
    try:
        await engine.start(tmp_path)
        yield engine
    finally:
        await engine.close()


@pytest.mark.parametrize("engine", [KILLED], indirect=True)
async def test_a_server_that_is_killed_while_it_loads_is_lost(engine: SGLangEngine, tmp_path: Path) -> None:
    with pytest.raises(EngineLost, match=r"^cannot load version 1 from "):
        await engine.load_weights(1, tmp_path)


@pytest.mark.parametrize("engine", [SILENT], indirect=True)
async def test_one_that_does_not_answer_in_time_is_lost(
    engine: SGLangEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOAD_DEADLINE_S", "LOAD_IN_PLACE_DEADLINE_S"):
        monkeypatch.setattr(f"polyrl_rollout.engines.sglang.engine.{name}", 0.5)
    with pytest.raises(EngineLost, match=r"did not answer /update_weights_from_disk within 0\.5 s"):
        await engine.load_weights(1, tmp_path)


@pytest.mark.parametrize("engine", [ENDED], indirect=True)
async def test_one_that_ends_by_itself_has_failed(engine: SGLangEngine, tmp_path: Path) -> None:
    with pytest.raises(EngineFailed) as raised:
        await engine.load_weights(1, tmp_path)
    assert not isinstance(raised.value, EngineLost)
