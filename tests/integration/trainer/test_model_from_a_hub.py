"""`recipe.model.path` names a model on a Hub, or a file of rows one of a data set there: downloaded once from where
HF_ENDPOINT says, then found without network.

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
from urllib.parse import parse_qs

import pytest

FILES = {"config.json": b'{"model_type": "qwen2"}', "model.safetensors": b"weights", "pytorch_model.bin": b"pickle"}
ROWS = {"train.jsonl": b'{"prompt": "1+1="}\n'}
COMMIT = "c" * 40
DEADLINE_S = 120
PROGRAM = """
import sys
from pathlib import Path
from polyrl.errors import InvalidData
from polyrl.manifest.parts.sources import Source
from polyrl_trainer.data.hub import cached_path, local_path
is_rows, base = sys.argv[1].startswith("hf://datasets/"), Path(sys.argv[3])
field = "recipe.data.rl[0].path" if is_rows else "recipe.model.path"
source = Source(field, sys.argv[1], sys.argv[2] or None, is_rows=is_rows)
try:
    print(local_path(source, base))
    assert cached_path(source, base) == local_path(source, base)
except InvalidData as error:
    print(error)
    sys.exit(2)
"""
COUNTS = """
import sys
from polyrl.manifest.parts.sources import Source
from polyrl_trainer.fetch.expected import bytes_come, expected_files
sources = Source("recipe.model.path", "ada/tiny"), Source("recipe.data.rl[0].path", sys.argv[1], is_rows=True)
print(bytes_come([file for source in sources for file in expected_files(source)]))
"""


class Hub(BaseHTTPRequestHandler):
    """What huggingface_hub asks of a Hub with one public and one private model, and one data set."""

    asked: list[str]
    refused: threading.Event
    """That there is no such model; how large its files are is answered only then."""

    def do_GET(self) -> None:
        self.asked.append(self.path)
        path = self.path.split("?")[0].replace("/api/datasets/", "/api/models/").removeprefix("/datasets")
        if path.startswith("/ada/tiny") and path.rsplit("/", 1)[1] not in FILES | ROWS:
            return self._send(b"{}", 404, {"X-Error-Code": "EntryNotFound"})
        if path.startswith("/api/models/ada/closed"):
            return self._send(b"{}", 403, {"X-Error-Code": "GatedRepo"})
        if path.startswith("/api/models/ada/none/tree"):
            self.refused.wait(DEADLINE_S)
        if not path.startswith(("/api/models/ada/tiny", "/ada/tiny")):
            self._send(b"{}", 404, {"X-Error-Code": "RepoNotFound"})
            return self.refused.set()
        if "/revision/" in path and not path.endswith(("/main", COMMIT)):
            return self._send(b"{}", 404, {"X-Error-Code": "RevisionNotFound"})
        if path.startswith("/api/models/ada/tiny/tree"):
            return self._send(f"[{', '.join(self._entry(name) for name in FILES)}]".encode())
        if path.startswith("/api/"):
            names = ", ".join(f'{{"rfilename": "{name}"}}' for name in FILES)
            return self._send(f'{{"id": "ada/tiny", "sha": "{COMMIT}", "siblings": [{names}]}}'.encode())
        return self._send((FILES | ROWS)[path.rsplit("/", 1)[1]])

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Sizes of the files of a data set that are named."""
        self.asked.append(self.path)
        named = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())["paths"]
        self._send(f"[{', '.join(self._entry(name) for name in named if name in ROWS)}]".encode())

    def log_message(self, *_: object) -> None:
        """Nothing to the terminal."""

    def _entry(self, name: str) -> str:
        content = (FILES | ROWS)[name]
        oid = hashlib.sha1(content).hexdigest()
        return json.dumps({"type": "file", "path": name, "size": len(content), "oid": oid})

    def _send(self, content: bytes, status: int = 200, more: dict[str, str] | None = None) -> None:
        self.send_response(status)
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
        for name, value in {**headers, "Content-Length": str(len(content)), **(more or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@pytest.fixture
def hub() -> Iterator[ThreadingHTTPServer]:
    Hub.asked, Hub.refused = [], threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def find(
    place: Path,
    endpoint: str,
    path: str = "ada/tiny",
    revision: str = "",
    *,
    program: str = PROGRAM,
    **environment: str,
) -> tuple[int, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    env |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(place / "cache"), "HF_HUB_DISABLE_XET": "1", **environment}
    argv = [sys.executable, "-P", "-c", program, path, revision, str(place)]
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
        ("hf://datasets/ada/gone/train.jsonl", "", "0", "has no such data set, or none that you may see (HF_TOKEN)"),
        ("hf://datasets/ada/tiny/test.jsonl", "", "0", "has no file test.jsonl in ada/tiny"),
        ("hf://datasets/ada/tiny/train.jsonl", "", "1", "does not answer or HF_HUB_OFFLINE is set, and the cache"),
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


def fetch(
    place: Path, endpoint: str, path: str, rows: str = "x.jsonl", **environment: str
) -> subprocess.CompletedProcess[str]:
    """As the init container of a trainer's pod."""
    recipe = {"mode": "sft", "model": {"path": path}, "data": {"sft": [{"path": rows}]}, "sft": {"steps": 1}}
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


@pytest.mark.slow
def test_one_file_of_a_data_set_comes_beside_the_model_and_is_found_without_network(
    hub: ThreadingHTTPServer, tmp_path: Path
) -> None:
    uri, fetched = f"hf://datasets/ada/tiny@{COMMIT}/train.jsonl", {"POLYRL_FETCHED": str(tmp_path / "cache")}
    done = fetch(tmp_path, endpoint(hub), "hf://ada/tiny", uri, **fetched)
    assert done.returncode == 0, done.stderr
    asked = len(Hub.asked)
    code, file = find(tmp_path, endpoint(hub), uri, **fetched)
    assert (code, Path(file).read_bytes()) == (0, ROWS["train.jsonl"])
    assert Hub.asked[asked:] == []
    code, counted = find(tmp_path, endpoint(hub), uri, program=COUNTS, **fetched)
    total = sum(map(len, (FILES["config.json"], FILES["model.safetensors"], ROWS["train.jsonl"])))
    assert (code, counted) == (0, f"({total}, {total})"), "as the Hub lists model and rows"
    (tmp_path / "tiny").mkdir()
    missing = fetch(tmp_path, endpoint(hub), "tiny", uri.replace("train", "test"), **fetched)
    assert missing.returncode == 75
    assert missing.stderr.strip().endswith("has no file test.jsonl in ada/tiny")
