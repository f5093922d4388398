"""What comes from a cluster is written only if it is what the checkpoint was sealed with, and only below the folder."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from polyrl.cluster import names
from polyrl.errors import PolyRLError, RunFailed, UserError
from polyrl_cli.model.get import ByteReader, Offer, check_offer, reading_command, receive
from polyrl_cli.model.sealed import CheckpointFiles, SealedFile

CONFIG, METRICS = b'{"model_type": "qwen2"}', b'{"step": 1}\n'


def sealed(content: bytes = CONFIG) -> dict[str, Any]:
    return {"size": len(content), "xxh3": xxhash.xxh3_128(content).hexdigest()}


def stream(names_and_contents: dict[str, bytes], seal: dict[str, Any] | None = None, checkpoint: str = "rl") -> bytes:
    files = [[name, len(content)] for name, content in names_and_contents.items()]
    offer = {"checkpoint": checkpoint, "seal": {"files": seal or {"model/config.json": sealed()}}, "files": files}
    return json.dumps(offer).encode() + b"\n" + b"".join(names_and_contents.values())


def reader(content: bytes, size: int = 7) -> ByteReader:
    async def parts() -> AsyncIterator[bytes]:
        for start in range(0, len(content), size):
            yield content[start : start + size]

    return ByteReader(parts())


def received(folder: Path, content: bytes, size: int = 7, step: int | None = None) -> dict[str, bytes]:
    asyncio.run(receive(reader(content, size), folder, "job", step))
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("size", [1, 3, 100_000])
def test_all_that_comes_is_written(tmp_path: Path, size: int) -> None:
    wanted = {"model/config.json": CONFIG, "metrics.jsonl": METRICS}
    assert received(tmp_path, stream(wanted), size) == wanted


@pytest.mark.parametrize("less", range(1, 12, 5))
def test_what_breaks_off_is_no_whole(tmp_path: Path, less: int) -> None:
    with pytest.raises(RunFailed, match="broke off"):
        received(tmp_path, stream({"model/config.json": CONFIG, "metrics.jsonl": METRICS})[:-less])


def test_a_trickle_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte was waited for anew, so one a minute kept the command for ever."""
    monkeypatch.setattr("polyrl_cli.model.get.PIECE_WAIT_S", 0.1)

    async def trickle() -> AsyncIterator[bytes]:
        for _ in range(200):
            await asyncio.sleep(0.01)
            yield b" "

    with pytest.raises(RunFailed, match="bytes came within"):
        asyncio.run(ByteReader(trickle()).line())


def test_slow_links_are_fast_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyrl_cli.model.get.PIECE_WAIT_S", 0.5)
    monkeypatch.setattr("polyrl_cli.model.get.PIECE_BYTES", 2)

    async def steady() -> AsyncIterator[bytes]:
        for part in [b" "] * 60 + [b"\n"]:
            await asyncio.sleep(0.01)
            yield part

    assert asyncio.run(ByteReader(steady()).line()) == b" " * 60


UP = "model/../../up"


@pytest.mark.parametrize(
    ("files", "seal", "error"),
    [
        ({"model/config.json": CONFIG[::-1]}, None, UserError),
        ({"model/config.json": CONFIG + b" "}, None, RunFailed),
        ({"metrics.jsonl": METRICS}, None, RunFailed),
        ({"model/config.json": CONFIG, "model/more": b"x"}, None, RunFailed),
        ({"model/config.json": CONFIG, "../up": b"x"}, None, RunFailed),
        ({"model/config.json": CONFIG, "/tmp/up": b"x"}, None, RunFailed),
        ({UP: CONFIG}, {UP: sealed()}, UserError),
    ],
    ids=["other bytes", "other size", "one missing", "one more", "above the folder", "absolute", "sealed above"],
)
def test_anything_else_is_refused(
    tmp_path: Path, files: dict[str, bytes], seal: dict[str, Any] | None, error: type[PolyRLError]
) -> None:
    (tmp_path / "in").mkdir()
    with pytest.raises(error):
        received(tmp_path / "in", stream(files, seal))
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("content", [b"", b"\n", b"no list\n", b"[1]\n", b"\xff\n", b'{"files": [["a", "b"]]}\n'])
def test_what_is_no_list_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(PolyRLError):
        received(tmp_path, content)


@pytest.mark.parametrize(
    ("step", "kept", "sentence"),
    [
        (None, [], "job: it has no complete checkpoint yet"),
        (3, ["rl-step-000001"], "--step 3: the job has kept rl-step-000001"),
    ],
)
def test_one_that_is_not_there_is_named(tmp_path: Path, step: int | None, kept: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        received(tmp_path, json.dumps({"kept": kept}).encode() + b"\n", step=step)


def test_what_does_not_fit_is_refused_before_it_comes() -> None:
    seal = CheckpointFiles({"model/a": SealedFile(100, "0")})
    check_offer(Offer(checkpoint="rl", seal=seal, files=[("model/a", 100)]), free_bytes=200)
    with pytest.raises(UserError, match="100 bytes would come, 105 are free"):
        check_offer(Offer(checkpoint="rl", seal=seal, files=[("model/a", 100)]), free_bytes=105)


def run_folder(folder: Path) -> Path:
    for step in (1, 2):
        place = folder / f"checkpoints/rl-step-{step:06d}"
        (place / "model").mkdir(parents=True)
        content = b"weights of %d" % step
        (place / "model/model.safetensors").write_bytes(content)
        (place / "model/optimizer.safetensors").write_bytes(b"moments")
        files = {"model/model.safetensors": sealed(content), "model/optimizer.safetensors": sealed(b"moments")}
        (place / "COMPLETE.json").write_text(json.dumps({"serial": step, "files": files}))
    (folder / "checkpoints/.unfinished-rl-step-000003").mkdir()
    (folder / "metrics.jsonl").write_bytes(METRICS)
    return folder


@pytest.mark.parametrize(("step", "content"), [(None, b"weights of 2"), (1, b"weights of 1"), (7, None)])
def test_the_program_sends_what_is_received(tmp_path: Path, step: int | None, content: bytes | None) -> None:
    python, flag, text, order = reading_command(sys.executable, step)
    order = order.replace(names.RUN_DIR, str(run_folder(tmp_path / "run")))
    sent = subprocess.run([python, "-I", flag, text, order], capture_output=True, check=True, timeout=60).stdout
    (tmp_path / "here").mkdir()
    if content is None:
        with pytest.raises(UserError, match="has kept rl-step-000001, rl-step-000002"):
            received(tmp_path / "here", sent, step=step)
        return
    found = received(tmp_path / "here", sent)
    assert found == {"model/model.safetensors": content, "metrics.jsonl": METRICS}
