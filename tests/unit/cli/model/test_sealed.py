"""A model is taken out of a checkpoint whole and as it was sealed, or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import xxhash

from polyrl.errors import UserError
from polyrl_cli.model.sealed import SealedFile, copy_sealed, find_checkpoint, new_folder, read_seal


def seal(*names: str) -> bytes:
    return json.dumps({"stage_final": False, "files": {name: {"size": 1, "xxh3": "0"} for name in names}}).encode()


def checkpoints(folder: Path, **serials: int) -> Path:
    for name, serial in serials.items():
        place = folder / name.replace("_", "-")
        place.mkdir()
        (place / "COMPLETE.json").write_text(json.dumps({"files": {}, "serial": serial}))
    (folder / ".unfinished-rl-step-000009").mkdir()
    return folder


@pytest.mark.parametrize(("step", "name"), [(None, "rl-step-000001"), (2, "sft-step-000002"), (1, "rl-step-000001")])
def test_the_newest_is_the_one_saved_last(tmp_path: Path, step: int | None, name: str) -> None:
    folder = checkpoints(tmp_path, sft_step_000001=1, sft_step_000002=2, rl_step_000001=3)
    assert find_checkpoint(folder, step) == folder / name


@pytest.mark.parametrize(("step", "sentence"), [(9, "has kept sft-step-000001"), (None, "no complete checkpoint")])
def test_one_that_is_not_there_is_refused(tmp_path: Path, step: int | None, sentence: str) -> None:
    folder = checkpoints(tmp_path, **({} if step is None else {"sft_step_000001": 1}))
    with pytest.raises(UserError, match=sentence):
        find_checkpoint(folder, step)


def test_a_models_files_are_those_that_its_users_need() -> None:
    names = ("state.json", "model/config.json", "model/optimizer.safetensors", "model/rng.safetensors", "model/a/b")
    assert set(read_seal(seal(*names), "here").of_model()) == {"config.json", "a/b"}


@pytest.mark.parametrize("name", ["model/../state.json", "model//etc/passwd", "model/a/../../../b"])
def test_a_name_that_leaves_the_folder_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"no model.s folder has"):
        read_seal(seal(name), "here").of_model()


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff", b'{"files": {"a": 1}}'])
def test_what_is_no_seal_is_refused_by_its_place(content: bytes) -> None:
    with pytest.raises(UserError, match="here: not written by PolyRL"):
        read_seal(content, "here")


@pytest.mark.parametrize("content", [b"wort", b"word", b"words and more", b"wor", b""])
def test_only_what_was_sealed_is_copied(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "source").write_bytes(content)
    sealed = SealedFile(4, xxhash.xxh3_128(b"word").hexdigest())
    if content == b"word":
        copy_sealed(tmp_path / "source", tmp_path / "a" / "file", sealed)
        assert (tmp_path / "a" / "file").read_bytes() == content
        return
    with pytest.raises(UserError, match="is not what the checkpoint was sealed with"):
        copy_sealed(tmp_path / "source", tmp_path / "a" / "file", sealed)


@pytest.mark.parametrize("kind", ["a device without an end", "a link", "a pipe", "a folder that is a link"])
def test_nothing_is_read_through_a_link_or_from_a_pipe(tmp_path: Path, kind: str) -> None:
    """A link to /dev/zero filled the disk; a pipe was waited for."""
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "word").write_bytes(b"word")
    source = tmp_path / "source" / "word"
    if kind == "a folder that is a link":
        source.parent.symlink_to(tmp_path / "there")
    else:
        source.parent.mkdir()
    match kind:
        case "a device without an end":
            source.symlink_to("/dev/zero")
        case "a link":
            source.symlink_to(tmp_path / "there" / "word")
        case "a pipe":
            os.mkfifo(source)
    with pytest.raises(UserError, match=r"a link|is not what the checkpoint was sealed with"):
        copy_sealed(source, tmp_path / "copy", SealedFile(4, xxhash.xxh3_128(b"word").hexdigest()))


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    with new_folder(tmp_path / "a" / "model") as folder:
        (folder / "file").touch()
        assert not (tmp_path / "a" / "model").exists()
    assert [path.name for path in (tmp_path / "a" / "model").iterdir()] == ["file"]
    with pytest.raises(ValueError, match="broken"), new_folder(tmp_path / "b") as folder:
        raise ValueError("broken")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(("kind", "sentence"), [("full", "is not empty"), ("file", "is a file")])
def test_nothing_is_written_over(tmp_path: Path, kind: str, sentence: str) -> None:
    target = tmp_path / "target"
    if kind == "file":
        target.touch()
    else:
        (target / "inside").mkdir(parents=True)
    with pytest.raises(UserError, match=sentence), new_folder(target):
        pytest.fail("nothing is begun")


def test_an_empty_folder_may_be_filled(tmp_path: Path) -> None:
    with new_folder(tmp_path) as folder:
        (folder / "file").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_place_that_cannot_be_written_is_named_as_the_user_did(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError) as refused, new_folder(tmp_path / "file" / "model"):
        pass
    assert str(refused.value) == f"{tmp_path}/file/model: Not a directory"
    with pytest.raises(UserError) as full, new_folder(tmp_path / "model") as unfinished:
        raise OSError(28, "No space left on device", str(unfinished / "model.safetensors"))
    assert str(full.value) == f"{tmp_path}/model: No space left on device"
