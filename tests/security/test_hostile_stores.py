"""An object store of a stranger's, by HTTP: listings without an end, bytes that trickle, seals of any size."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest

from polyrl.errors import InvalidData, StoreFailed
from polyrl_trainer.checkpoints import COMPLETE, bounded_reads, store
from polyrl_trainer.checkpoints.store import CheckpointStore
from polyrl_trainer.data.fetched import fetch_files
from polyrl_trainer.data.hub import WANTED

FIELD = "recipe.model.path"
PIECE = b"<p>nothing</p>" * 5000
LISTING = b'<a href="config.json">config.json</a>'
Answer = Callable[[str], Iterator[bytes]]


class Store(ThreadingHTTPServer):
    daemon_threads = True
    answer: Answer
    closing = threading.Event()


class Handler(BaseHTTPRequestHandler):
    server: Store

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        with suppress(OSError):
            for piece in self.server.answer(self.path):
                self.wfile.write(piece)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hostile() -> Iterator[Store]:
    server = Store(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    server.closing.clear()
    yield server
    server.closing.set()
    server.shutdown()
    server.server_close()
    thread.join()


def uri(server: Store) -> str:
    return f"http://127.0.0.1:{server.server_port}/model"


def trickle(server: Store) -> Iterator[bytes]:
    while not server.closing.wait(0.01):
        yield b" "


def test_one_page_without_an_end_is_refused(hostile: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyrl_trainer.checkpoints.bounded_reads.LISTED_BYTES", 1 << 20)
    hostile.answer = lambda path: itertools.repeat(PIECE)
    with pytest.raises(InvalidData, match=r"cannot be read: more bytes came than a listing and its seals have"):
        fetch_files(uri(hostile), tmp_path, WANTED, FIELD)


def test_pages_without_an_end_are_refused(hostile: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyrl_trainer.checkpoints.bounded_reads.LISTED_BYTES", 1 << 20)
    hostile.answer = lambda path: iter([f'<a href="{path.rstrip("/")}/a/">next</a>'.encode(), PIECE])
    with pytest.raises(InvalidData, match=r"cannot be read: more bytes came than a listing and its seals have"):
        fetch_files(uri(hostile), tmp_path, WANTED, FIELD)


def test_a_listing_that_trickles_is_refused(hostile: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte is in time for the deadline of a read, and the last one never comes."""
    monkeypatch.setattr(bounded_reads, "PACE_S", 1.0)
    hostile.answer = lambda path: trickle(hostile)
    with pytest.raises(InvalidData, match=r"cannot be read: \d+ bytes came in 1 s, and 1048576 are the least"):
        fetch_files(uri(hostile), tmp_path, WANTED, FIELD)


def test_a_file_that_trickles_is_refused_and_leaves_nothing(
    hostile: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_reads, "PACE_S", 1.0)
    there = {f"{uri(hostile)}/config.json": {"size": 1 << 40}}
    monkeypatch.setattr(fsspec.get_filesystem_class("http"), "find", lambda *_, **more: there, raising=False)
    hostile.answer = lambda path: trickle(hostile)
    with pytest.raises(InvalidData, match=r"config\.json of http.* did not come: \d+ bytes came in 1 s, and"):
        fetch_files(uri(hostile), tmp_path, WANTED, FIELD)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_store_that_is_honest_after_a_refusal_is_read(
    hostile: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was ended leaves no trace in what comes after it."""
    monkeypatch.setattr(store, "LISTED_BYTES", 1 << 20)
    reads = CheckpointStore(uri(hostile))
    hostile.answer = lambda path: itertools.repeat(PIECE)
    for _ in range(2):
        with pytest.raises(StoreFailed, match=r"recipe\.checkpoint\.uri: http.* failed: more bytes came than"):
            reads.complete()
    hostile.answer = lambda path: iter([LISTING])
    assert reads.complete() == {}


def test_a_seal_of_any_size_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = fsspec.filesystem("memory")
    seal = b'{"stage_final": false, "files": {}, "serial": 1}'
    for name, content in {"rl-step-000001.1": seal, "rl-step-000002.2": seal + b" " * (store.SEAL_BYTES)}.items():
        files.pipe_file(f"/{tmp_path.name}/{name}/{COMPLETE}", content)
    read, asked = type(files).cat_file, list[str]()
    monkeypatch.setattr(type(files), "cat_file", lambda self, at, **more: (asked.append(at), read(self, at))[1])
    assert list(CheckpointStore(f"memory://{tmp_path.name}").complete()) == ["rl-step-000001.1"]
    assert asked == [f"/{tmp_path.name}/rl-step-000001.1/{COMPLETE}"]
