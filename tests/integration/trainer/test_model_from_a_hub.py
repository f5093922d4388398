"""`recipe.model.path` names a model on a Hub: downloaded once from where HF_ENDPOINT says, then found without network.

huggingface_hub reads its environment when it is imported, so each case is a process.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

FILES = {"config.json": b'{"model_type": "qwen2"}', "model.safetensors": b"weights", "pytorch_model.bin": b"pickle"}
COMMIT = "c" * 40
DEADLINE_S = 120
PROGRAM = """
import sys
from pathlib import Path
from polyrl.errors import InvalidData
from polyrl.manifest.recipe import ModelSpec
from polyrl_trainer.data.hub import cached_folder, model_folder
model, base = ModelSpec(path=sys.argv[1], revision=sys.argv[2] or None), Path(sys.argv[3])
try:
    print(model_folder(model, base))
    assert cached_folder(model, base) == model_folder(model, base)
except InvalidData as error:
    print(error)
    sys.exit(2)
"""


class Hub(BaseHTTPRequestHandler):
    """What snapshot_download asks of a Hub with one public and one private model."""

    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        path = self.path.split("?")[0]
        if path.startswith("/api/models/ada/closed"):
            return self._send(b"{}", 403, {"X-Error-Code": "GatedRepo"})
        if not path.startswith(("/api/models/ada/tiny", "/ada/tiny")):
            return self._send(b"{}", 404, {"X-Error-Code": "RepoNotFound"})
        if "/revision/" in path and not path.endswith(("/main", COMMIT)):
            return self._send(b"{}", 404, {"X-Error-Code": "RevisionNotFound"})
        if path.startswith("/api/models/ada/tiny/tree"):
            return self._send(f"[{', '.join(self._entry(name) for name in FILES)}]".encode())
        if path.startswith("/api/"):
            names = ", ".join(f'{{"rfilename": "{name}"}}' for name in FILES)
            return self._send(f'{{"id": "ada/tiny", "sha": "{COMMIT}", "siblings": [{names}]}}'.encode())
        return self._send(FILES[path.rsplit("/", 1)[1]])

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Nothing to the terminal."""

    def _entry(self, name: str) -> str:
        content = FILES[name]
        oid = hashlib.sha1(content).hexdigest()
        return json.dumps({"type": "file", "path": name, "size": len(content), "oid": oid})

    def _send(self, content: bytes, status: int = 200, more: dict[str, str] | None = None) -> None:
        self.send_response(status)
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
        for name, value in {**headers, "Content-Length": str(len(content)), **(more or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


@pytest.fixture
def hub() -> Iterator[ThreadingHTTPServer]:
    Hub.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def find(place: Path, endpoint: str, path: str = "ada/tiny", revision: str = "", **environment: str) -> tuple[int, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    env |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(place / "cache"), "HF_HUB_DISABLE_XET": "1", **environment}
    argv = [sys.executable, "-P", "-c", PROGRAM, path, revision, str(place)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S, check=False, env=env)
    assert done.returncode in (0, 2), done.stderr
    return done.returncode, done.stdout.strip()


def endpoint(hub: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{hub.server_address[1]}"


@pytest.mark.slow
def test_it_is_downloaded_and_found_again_without_network(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    code, folder = find(tmp_path, endpoint(hub))
    assert code == 0, folder
    assert {path.name for path in Path(folder).iterdir()} == {"config.json", "model.safetensors"}, "no other weights"
    assert (Path(folder) / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    asked = len(Hub.asked)
    assert find(tmp_path, endpoint(hub), HF_HUB_OFFLINE="1") == (0, folder)
    assert len(Hub.asked) == asked


@pytest.mark.slow
def test_a_folder_that_is_there_is_what_is_meant(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    (tmp_path / "ada/tiny").mkdir(parents=True)
    assert find(tmp_path, endpoint(hub)) == (0, str(tmp_path / "ada/tiny"))
    assert Hub.asked == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "revision", "offline", "sentence"),
    [
        ("ada/gone", "", "0", "has no such model, or none that you may see (HF_TOKEN)"),
        ("ada/closed", "", "0", "accept its terms, set HF_TOKEN"),
        ("ada/tiny", "v9", "0", "has no revision v9 of ada/tiny"),
        ("ada/tiny", "", "1", "does not answer or HF_HUB_OFFLINE is set, and the cache does not hold it"),
    ],
)
def test_what_cannot_be_had_is_one_sentence(
    hub: ThreadingHTTPServer, tmp_path: Path, path: str, revision: str, offline: str, sentence: str
) -> None:
    code, answer = find(tmp_path, endpoint(hub), path, revision, HF_HUB_OFFLINE=offline)
    assert (code, answer.count("\n")) == (2, 0), answer
    assert sentence in answer


@pytest.mark.slow
def test_a_hub_that_does_not_answer_is_named(tmp_path: Path) -> None:
    code, answer = find(tmp_path, "http://127.0.0.1:9")
    assert (code, answer.count("\n")) == (2, 0), answer
    assert "http://127.0.0.1:9 does not answer" in answer


def fetch(place: Path, endpoint: str, path: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """As the init container of a trainer's pod."""
    recipe = {"mode": "sft", "model": {"path": path}, "data": {"sft": [{"path": "x.jsonl"}]}, "sft": {"steps": 1}}
    job = {
        "apiVersion": "polyrl.dev/v1alpha1",
        "kind": "PolyRLJob",
        "metadata": {"name": "j"},
        "spec": {"recipe": recipe},
    }
    (place / "job.json").write_text(json.dumps(job))
    env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    env |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(place / "cache"), "HF_HUB_DISABLE_XET": "1", **environment}
    argv = [sys.executable, "-m", "polyrl_trainer.fetch", "--job", str(place / "job.json")]
    argv += ["--manifest-dir", str(place)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S, check=False, env=env)


@pytest.mark.slow
def test_what_was_fetched_for_a_pod_is_all_that_its_trainer_asks_for(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    """Whose credentials it does not have."""
    fetched = {"POLYRL_FETCHED": str(tmp_path / "cache")}
    done = fetch(tmp_path, endpoint(hub), f"hf://ada/tiny@{COMMIT}", **fetched)
    assert done.returncode == 0, done.stderr
    assert '"event": "fetched"' in done.stderr
    assert f'"of": {len(FILES["config.json"]) + len(FILES["model.safetensors"])},' in done.stderr, "as the Hub lists it"
    asked = len(Hub.asked)
    code, folder = find(tmp_path, endpoint(hub), f"hf://ada/tiny@{COMMIT}", **fetched)
    assert code == 0, folder
    assert (Path(folder) / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert len(Hub.asked) == asked
    code, words = find(tmp_path, endpoint(hub), "hf://ada/other", **fetched)
    assert (code, words) == (
        2,
        f"recipe.model.path: hf://ada/other was not fetched into {tmp_path / 'cache'} before the run",
    )
    refused = fetch(tmp_path, endpoint(hub), "hf://ada/none", **fetched)
    assert refused.returncode == 75, "a Secret may be mended"
    assert refused.stderr.strip().endswith("has no such model, or none that you may see (HF_TOKEN)")
