"""Checkpoints in an object store: complete or absent, resumed from when the disk is gone, and as many as are kept."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import msgspec
import pytest
from fsspec.callbacks import DEFAULT_CALLBACK, Callback

from polyrl.errors import InvalidData, StoreFailed, Superseded
from polyrl_trainer.checkpoints import COMPLETE, Checkpoints, complete_checkpoints, read_checkpoint
from polyrl_trainer.checkpoints.store import CheckpointStore
from polyrl_trainer.checkpoints.writer import Writer
from polyrl_trainer.state import TrainerState, TrainingStage

WAIT_S = 30.0
HAS_MOTO = all(importlib.util.find_spec(name) for name in ("moto", "s3fs"))


class Weights:
    """A learner of one file."""

    def __init__(self) -> None:
        self._writer = Writer("weights")

    def save(self, folder: Path, *, copied: bool) -> object:
        return self._writer.submit(lambda: (folder / "model.safetensors").write_bytes(b"weights" * 1000))


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """A real server of the protocol."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with subprocess.Popen([sys.executable, "-m", "moto.server", "-p", str(port)], stderr=subprocess.DEVNULL) as server:
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                time.sleep(0.1)
        environment = {
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "x",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            fsspec.filesystem("s3").mkdir("bucket")
            yield "s3://bucket/place"
        os.kill(server.pid, signal.SIGKILL)


@pytest.fixture(
    params=["memory", "file", pytest.param("s3", marks=pytest.mark.skipif(not HAS_MOTO, reason="moto, s3fs"))]
)
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    name = tmp_path.name
    match request.param:
        case "memory":
            return f"memory://{name}"
        case "file":
            return f"file://{tmp_path}/store"
    return f"{request.getfixturevalue('s3')}/{name}"


@pytest.fixture
def run(tmp_path: Path, uri: str) -> Callable[[str], Checkpoints]:
    """A trainer that has a disk of its own, named."""

    def start(disk: str) -> Checkpoints:
        made = Checkpoints(tmp_path / disk, keep=2, store=CheckpointStore(uri))
        made.start()
        return made

    return start


def save(checkpoints: Checkpoints, step: int, *, done: bool = False, groups: int = 0) -> Path:
    state = TrainerState(seed=1, stage=TrainingStage.SFT, step=step, stage_done=done, trained_groups=groups)
    return checkpoints.save(state, Weights()).result(WAIT_S)  # type: ignore[arg-type]


def local(checkpoints: Checkpoints) -> list[str]:
    return [path.name for path in complete_checkpoints(checkpoints.folder)]


def there(uri: str) -> list[str]:
    return list(CheckpointStore(uri).complete())


def test_a_trainer_whose_disk_is_gone_goes_on_from_the_newest_there(
    run: Callable[[str], Checkpoints], uri: str
) -> None:
    first = run("first")
    for step in (1, 2):
        save(first, step)
    save(first, 3, done=True)
    for step in (4, 5, 6):
        save(first, step)
    assert there(uri) == ["sft-step-000003.3", "sft-step-000005.5", "sft-step-000006.6"], "kept as on the disk"
    second = run("second")
    assert local(second) == ["sft-step-000003", "sft-step-000006"]
    assert (newest := second.newest()) is not None
    assert read_checkpoint(newest).step == 6
    save(second, 6)
    assert there(uri)[-1] == "sft-step-000006.7", "and counts on"
    second = run("second")
    assert second.newest() == newest
    save(second, 6, groups=4)
    third = run("third")
    assert local(third) == ["sft-step-000003", "sft-step-000006-and-000004-groups"], "left in the middle of step 7"
    assert local(second)[1:] == ["sft-step-000006", "sft-step-000006-and-000004-groups"]
    save(third, 7, groups=8)
    assert there(uri)[1:] == ["sft-step-000006.7", "sft-step-000007-and-000008-groups.9"], "parts go before whole steps"


def test_what_is_half_there_is_absent_and_goes_when_the_next_is_pruned(
    run: Callable[[str], Checkpoints], uri: str
) -> None:
    first = run("first")
    save(first, 1)
    files, root = fsspec.core.url_to_fs(uri)
    seal = files.cat_file(f"{root}/sft-step-000001.1/{COMPLETE}")
    for number, cut in ((8, b""), (9, seal[:-1])):
        files.makedirs(f"{root}/sft-step-00000{number}.{number}/model", exist_ok=True)
        files.pipe_file(f"{root}/sft-step-00000{number}.{number}/model/model.safetensors", b"wei")
        if number == 9:
            files.pipe_file(f"{root}/sft-step-00000{number}.{number}/{COMPLETE}", cut)
    assert there(uri) == ["sft-step-000001.1"]
    second = run("second")
    assert local(second) == ["sft-step-000001"]
    save(second, 2)
    files.invalidate_cache()
    assert {Path(place).name for place in files.ls(root, detail=False) if "step" in place} == set(there(uri))


def test_what_the_trainer_was_killed_before_giving_is_given_at_the_next_start(
    run: Callable[[str], Checkpoints], uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run("first")
    monkeypatch.setattr(CheckpointStore, "put", refuse)
    with pytest.raises(OSError, match="no room"):
        save(first, 1, done=True)
    monkeypatch.undo()
    assert there(uri) == [], "so nothing was covered"
    assert local(run("first")) == ["sft-step-000001"]
    assert there(uri) == ["sft-step-000001.1"]


def refuse(*_: object, **_more: object) -> None:
    raise OSError("no room")


def test_who_starts_last_is_the_one_writer_there_as_well(run: Callable[[str], Checkpoints], uri: str) -> None:
    """Each on a disk of its own: the first cannot see by its own that it has a successor."""
    first = run("first")
    save(first, 1)
    run("second")
    with pytest.raises(Superseded, match="another trainer writes here by now"):
        save(first, 2)
    assert there(uri) == ["sft-step-000001.1"]


@pytest.mark.parametrize("name", ["../outside", "/outside", "model/../../outside"])
def test_names_that_lead_out_of_a_checkpoint_are_refused(
    run: Callable[[str], Checkpoints], uri: str, name: str, tmp_path: Path
) -> None:
    save(run("first"), 1)
    files, root = fsspec.core.url_to_fs(uri)
    place = f"{root}/sft-step-000001.1/{COMPLETE}"
    files.pipe_file(place, files.cat_file(place).replace(b"model/model.safetensors", name.encode()))
    with pytest.raises(InvalidData, match="which lies outside of the checkpoint"):
        run("second")
    assert not list(tmp_path.rglob("outside"))


@pytest.mark.parametrize(
    "name", [".trainer.7", ".7", "other.7", "sft-step-000009", "...-step-", ".unfinished-x-step-1.7"]
)
def test_what_has_no_checkpoints_name_is_none(run: Callable[[str], Checkpoints], uri: str, name: str) -> None:
    """Its name would be that of a file of ours, or of the folder itself."""
    save(run("first"), 1)
    files, root = fsspec.core.url_to_fs(uri)
    seal = msgspec.json.decode(files.cat_file(f"{root}/sft-step-000001.1/{COMPLETE}"))
    files.makedirs(f"{root}/{name}", exist_ok=True)
    files.pipe_file(f"{root}/{name}/{COMPLETE}", msgspec.json.encode(seal | {"serial": 7, "files": {}}))
    assert there(uri) == ["sft-step-000001.1"]
    second = run("second")
    assert local(second) == ["sft-step-000001"]
    save(second, 2)
    assert there(uri)[-1] == "sft-step-000002.2"
    assert files.exists(f"{root}/{name}/{COMPLETE}"), "what somebody put there by hand is not ours to remove"


def test_a_file_that_is_longer_than_its_seal_says_ends_where_it_should(
    run: Callable[[str], Checkpoints], uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(run("first"), 1)
    files = fsspec.core.url_to_fs(uri)[0]
    wrote = []

    def without_end(self: object, at: str, to: str, callback: Callback = DEFAULT_CALLBACK, **more: object) -> None:
        for _ in range(100):
            wrote.append(Path(to).write_bytes(b"x" * 2**20))
            callback.relative_update(2**20)

    monkeypatch.setattr(type(files), "get_file", without_end)
    with pytest.raises(StoreFailed, match="more bytes came than"):
        run("second")
    assert len(wrote) == 1


def test_a_file_that_is_not_what_was_put_there_is_named(run: Callable[[str], Checkpoints], uri: str) -> None:
    save(run("first"), 1)
    files, root = fsspec.core.url_to_fs(uri)
    files.pipe_file(f"{root}/sft-step-000001.1/model/model.safetensors", b"another" * 1000)
    with pytest.raises(InvalidData, match=r"model\.safetensors: its content differs"):
        run("second")


def test_a_place_that_cannot_be_reached_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidData, match=r"^recipe\.checkpoint\.uri: none://place: "):
        CheckpointStore("none://place")
    (tmp_path / "file").touch()
    with pytest.raises(InvalidData, match=r"^recipe\.checkpoint\.uri: nothing can be written to file://"):
        CheckpointStore(f"file://{tmp_path}/file/below").start("me")
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda uri, **_loop: __import__("no_such_package"))
    with pytest.raises(InvalidData, match=r"s3://b/p needs polyrl\[s3\], which is not installed here"):
        CheckpointStore("s3://b/p")


REFUSED = [
    # what of the library is refused, what a start says of it
    pytest.param("pipe_file", "written to", id="written"),
    pytest.param("cat_file", "read from", id="read"),
    pytest.param("ls", "listed in", id="listed"),
    pytest.param("rm_file", "removed from", id="removed"),
]


@pytest.mark.parametrize(("call", "what"), REFUSED)
def test_what_a_run_will_ask_of_its_store_is_asked_when_it_starts(
    call: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removal was refused at the first checkpoint above `keep`, hours later; who may not write takes no run over."""
    store = CheckpointStore(f"memory://{tmp_path.name}")
    store.start("first")
    files, root = fsspec.core.url_to_fs(f"memory://{tmp_path.name}")

    def denied(*_: object, **_more: object) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(type(files), call, denied)
    with pytest.raises(
        InvalidData, match=rf"^recipe\.checkpoint\.uri: nothing can be {what} memory://.*: Access Denied"
    ):
        store.start("second")
    monkeypatch.undo()
    assert files.cat_file(f"{root}/.trainer") == b"first"


def test_a_start_leaves_its_writers_name_alone(tmp_path: Path) -> None:
    CheckpointStore(f"file://{tmp_path}/store").start("me")
    assert [path.name for path in (tmp_path / "store").iterdir()] == [".trainer"]


def test_a_store_that_is_away_for_a_while_is_no_fault_of_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of InvalidData a trainer is not started again."""
    store = CheckpointStore(f"memory://{tmp_path.name}")

    def away(*_: object, **_more: object) -> None:
        raise ConnectionError("Slow Down")

    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.pipe_file", away)
    with pytest.raises(StoreFailed, match=r"^recipe\.checkpoint\.uri: memory://.* failed: Slow Down"):
        store.start("me")


def test_no_bucket_is_made_and_none_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket's name that was mistyped became one; an account of one prefix may not ask whether its bucket is."""
    kind = "fsspec.implementations.memory.MemoryFileSystem"
    monkeypatch.setattr(f"{kind}.protocol", ("s3", "s3a"))
    monkeypatch.setattr(f"{kind}.makedirs", refuse)
    CheckpointStore(f"memory://{tmp_path.name}").start("me")


@pytest.mark.skipif(not HAS_MOTO, reason="moto, s3fs")
def test_a_bucket_that_is_not_there_is_one_sentence(s3: str) -> None:
    store = CheckpointStore("s3://no-such-bucket/place")
    with pytest.raises(InvalidData, match=r"^recipe\.checkpoint\.uri: nothing can be written to s3://no-such-bucket/"):
        store.start("me")


def test_a_store_that_fails_later_fails_the_save(run: Callable[[str], Checkpoints], uri: str, tmp_path: Path) -> None:
    first = run("first")
    if uri.startswith("file"):
        shutil.rmtree(tmp_path / "store")
        (tmp_path / "store").touch()
        with pytest.raises(StoreFailed, match=r"recipe\.checkpoint\.uri: file://.*store failed: "):
            save(first, 1)
        assert local(first) == ["sft-step-000001"], "the disk has it"
