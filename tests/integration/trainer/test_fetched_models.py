"""A model's folder and a file of rows that come from a store: once, whole, and again when it has changed there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import fsspec
import pytest
from fsspec.callbacks import DEFAULT_CALLBACK, Callback

from polyrl.errors import InvalidData
from polyrl.manifest.environment import FETCHED, MODEL_CLAIM
from polyrl.manifest.parts.sources import Source
from polyrl.manifest.recipe import ModelSpec
from polyrl_trainer.data.fetched import cache_place, complete_at, fetch_files
from polyrl_trainer.data.hub import WANTED, cached_folder, fetch, local_path, model_folder
from polyrl_trainer.fetch.expected import bytes_come, expected_files

FILES = {"config.json": b"{}", "model-1.safetensors": b"one" * 100, "deep/model-2.safetensors": b"two" * 100}
FIELD = "recipe.model.path"


@pytest.fixture
def uri(tmp_path: Path) -> str:
    files = fsspec.filesystem("memory")
    for name, content in {**FILES, "pytorch_model.bin": b"pickle"}.items():
        files.pipe_file(f"/{tmp_path.name}/{name}", content)
    return f"memory://{tmp_path.name}"


def contents(folder: Path) -> dict[str, bytes]:
    found = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def test_it_comes_once_and_again_where_it_changed(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, asked = fsspec.filesystem("memory"), list[str]()
    get = type(files).get_file
    monkeypatch.setattr(type(files), "get_file", lambda self, at, to, **more: (asked.append(at), get(self, at, to))[1])
    assert complete_at(uri, tmp_path) is None
    folder = fetch_files(uri, tmp_path, WANTED, FIELD)
    assert contents(folder) == FILES, "no pickle"
    assert complete_at(uri, tmp_path) == folder == fetch_files(uri, tmp_path, WANTED, FIELD)
    assert len(asked) == len(FILES)
    files.pipe_file(f"/{tmp_path.name}/config.json", b"[]")
    assert contents(fetch_files(uri, tmp_path, WANTED, FIELD)) == FILES | {"config.json": b"[]"}
    assert len(asked) == len(FILES) + 1, "the same size, another version"


def test_one_that_was_cut_off_is_not_complete_and_goes_on(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, asked = fsspec.filesystem("memory"), list[str]()
    get = type(files).get_file

    def break_off(self: object, at: str, to: str, **more: object) -> None:
        asked.append(at)
        get(self, at, to)
        if at.endswith("1.safetensors"):
            Path(to).write_bytes(b"on")
        if at.endswith("1.safetensors") and len(asked) == 3:
            raise ConnectionResetError("gone")

    monkeypatch.setattr(type(files), "get_file", break_off)
    with pytest.raises(InvalidData, match=r"^recipe\.model\.path: model-1\.safetensors of memory://.* did not come: "):
        fetch_files(uri, tmp_path, WANTED, FIELD)
    assert complete_at(uri, tmp_path) is None
    assert "model-1.safetensors" not in contents(cache_place(uri, tmp_path))
    monkeypatch.undo()
    assert contents(fetch_files(uri, tmp_path, WANTED, FIELD)) == FILES


def test_what_is_here_serves_while_the_store_does_not_answer(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fetch_files(uri, tmp_path, WANTED, FIELD)
    monkeypatch.setattr(type(fsspec.filesystem("memory")), "find", refuse)
    assert fetch_files(uri, tmp_path, WANTED, FIELD) == folder
    with pytest.raises(InvalidData, match=r"^recipe\.model\.path: memory://other cannot be read: no route"):
        fetch_files("memory://other", tmp_path, WANTED, FIELD)


def refuse(*_: object, **__: object) -> None:
    raise OSError("no route")


@pytest.mark.parametrize("name", ["../outside.json", "deep/../../outside.json"])
def test_a_strangers_store_puts_nothing_outside_of_the_models_folder(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Keys of an object store are any text, and whoever may put files there chooses them."""
    files, root = fsspec.filesystem("memory"), f"/{tmp_path.name}"
    get = type(files).get_file
    there = {f"{root}/config.json": {"size": 2}, f"{root}/{name}": {"size": 2}}
    monkeypatch.setattr(type(files), "find", lambda self, at, **more: there)
    monkeypatch.setattr(type(files), "get_file", lambda self, at, to, **more: get(self, f"{root}/config.json", to))
    with pytest.raises(InvalidData, match=r"path: memory://.* names '.*outside\.json', which lies outside"):
        fetch_files(uri, tmp_path / "cache", WANTED, FIELD)
    assert not list(tmp_path.rglob("*.json")), "nor what belongs there"


@pytest.mark.parametrize("name", ["\udcff.json", "a\nb.json", "a\0.json", "\x1b[2J.json", ".fetched.json"])
def test_a_name_that_no_models_file_has_is_one_sentence(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    there = {f"/{tmp_path.name}/{name}": {"size": 2}}
    monkeypatch.setattr(type(fsspec.filesystem("memory")), "find", lambda self, at, **more: there)
    with pytest.raises(InvalidData, match=r"path: memory://.* names '.*json', which is no name") as refused:
        fetch_files(uri, tmp_path / "cache", WANTED, FIELD)
    assert str(refused.value).isprintable()


def test_a_store_of_more_files_than_a_model_has_is_refused_before_any_comes(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their notes are written anew with each: 4,000 took 16 s, and eight times as many some 20 minutes."""
    there = {f"/{tmp_path.name}/{at}.json": {"size": 2} for at in range(2049)}
    monkeypatch.setattr(type(fsspec.filesystem("memory")), "find", lambda self, at, **more: there)
    with pytest.raises(InvalidData, match="holds 2049 files of a model, of which 2048 are read at most"):
        fetch_files(uri, tmp_path / "cache", WANTED, FIELD)
    assert not (tmp_path / "cache").exists()


def test_a_file_that_is_longer_than_the_store_says_ends_where_it_should(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrote = []

    def without_end(self: object, at: str, to: str, callback: Callback = DEFAULT_CALLBACK, **more: object) -> None:
        with Path(to).open("wb") as file:
            for _ in range(100):
                wrote.append(file.write(b"x" * 2**16))
                callback.relative_update(2**16)

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "get_file", without_end)
    with pytest.raises(InvalidData, match=r"config\.json of memory://.* did not come: more bytes came than 2"):
        fetch_files(uri, tmp_path, WANTED, FIELD)
    assert len(wrote) == 1
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_place_without_a_model_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidData, match=r"holds no file of a model \(\*\.json, "):
        fetch_files(f"file://{tmp_path}/empty", tmp_path / "cache", WANTED, FIELD)


def test_a_claim_is_where_it_is_mounted_and_no_folder_of_a_laptop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ModelSpec(path="pvc://models/qwen/7b")
    assert cached_folder(model, tmp_path) is None
    with pytest.raises(InvalidData, match="is a claim of a cluster; name a folder of this machine"):
        model_folder(model, tmp_path)
    monkeypatch.setenv(MODEL_CLAIM, "/polyrl/model")
    assert model_folder(model, tmp_path) == Path("/polyrl/model/qwen/7b")


def test_a_trainer_takes_what_was_fetched_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store/config.json").write_text("{}")
    model = ModelSpec(path=f"file://{tmp_path}/store")
    monkeypatch.setenv(FETCHED, str(tmp_path / "cache"))
    with pytest.raises(InvalidData, match="was not fetched into"):
        model_folder(model, tmp_path)
    assert model.source is not None
    fetched = fetch(model.source, tmp_path)
    monkeypatch.setattr("fsspec.core.url_to_fs", refuse)
    assert model_folder(model, tmp_path) == fetched


def test_fewer_bytes_than_there_are_is_no_file_and_what_is_being_changed_is_not_complete(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch_files(uri, tmp_path, WANTED, FIELD)
    files = fsspec.filesystem("memory")
    for name in ("config.json", "model-1.safetensors"):
        files.pipe_file(f"/{tmp_path.name}/{name}", b"[1]")
    get = type(files).get_file

    def short(self: object, at: str, to: str, **more: object) -> None:
        get(self, at, to)
        if at.endswith("1.safetensors"):
            Path(to).write_bytes(b"[")

    monkeypatch.setattr(type(files), "get_file", short)
    with pytest.raises(InvalidData, match=r"model-1\.safetensors of memory://.* did not come: 1 bytes came of 3"):
        fetch_files(uri, tmp_path, WANTED, FIELD)
    assert complete_at(uri, tmp_path) is None, "one file is new, the other is old"


def test_what_has_come_is_counted_of_this_model_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a cache that many share, with what is under way."""
    monkeypatch.setenv(FETCHED, str(tmp_path))
    (tmp_path / "there/deep").mkdir(parents=True)
    for name, content in FILES.items():
        (tmp_path / "there" / name).write_bytes(content)
    uri = f"file://{tmp_path}/there"
    place, total = cache_place(uri, tmp_path / "stores"), sum(map(len, FILES.values()))
    files = expected_files(Source("recipe.model.path", uri))
    assert bytes_come(files) == (0, total)
    (place / "deep").mkdir(parents=True)
    (tmp_path / "stores/other.safetensors").write_bytes(b"x" * 1000)
    (place / ".model-1.safetensors.cafe").write_bytes(b"o" * 10)
    (place / ".model-1.safetensors.beef").write_bytes(b"o" * 20)
    (place / "deep/model-2.safetensors").write_bytes(b"of another version")
    assert bytes_come(files) == (20, total)
    fetch_files(uri, tmp_path / "stores", WANTED, FIELD)
    assert bytes_come(files) == (total, total)


@pytest.fixture
def rows(tmp_path: Path) -> Source:
    files = fsspec.filesystem("memory")
    for name, content in {"a.jsonl": b"{}", "deep/a.jsonl": b"[]", "a.jsonl.gz": b"z"}.items():
        files.pipe_file(f"/{tmp_path.name}/{name}", content)
    return Source("recipe.data.rl[0].path", f"memory://{tmp_path.name}/a.jsonl", is_rows=True)


def test_of_rows_the_one_file_comes_and_is_counted(
    rows: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FETCHED, str(tmp_path / "cache"))
    with pytest.raises(InvalidData, match=r"^recipe\.data\.rl\[0\]\.path: memory://.*a\.jsonl was not fetched into"):
        local_path(rows, tmp_path)
    expected = expected_files(rows)
    assert bytes_come(expected) == (0, 2)
    file = fetch(rows, tmp_path)
    assert (file.name, file.read_bytes()) == ("a.jsonl", b"{}")
    assert [one.name for one in file.parent.iterdir() if not one.name.startswith(".")] == ["a.jsonl"]
    assert bytes_come(expected) == (2, 2)
    monkeypatch.setattr("fsspec.core.url_to_fs", refuse)
    assert local_path(rows, tmp_path) == file == fetch(rows, tmp_path), "and while the store does not answer"


def test_rows_that_have_changed_there_come_again(rows: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FETCHED, str(tmp_path / "cache"))
    file = fetch(rows, tmp_path)
    fsspec.filesystem("memory").pipe_file(f"/{tmp_path.name}/a.jsonl", b"[]")
    assert file.read_bytes() == b"{}"
    assert fetch(rows, tmp_path).read_bytes() == b"[]"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("gone.jsonl", r"there is no file memory://\S*/gone\.jsonl$"),
        ("*.jsonl", r"there is no file memory://\S*; a name is no pattern \(\*\): list each file as a path of its own"),
        ("deep", r"memory://.*/deep is a folder; name one of its files"),
    ],
    ids=["gone", "a pattern", "a folder"],
)
def test_rows_that_are_not_there_are_one_sentence(
    rows: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, sentence: str
) -> None:
    monkeypatch.setenv(FETCHED, str(tmp_path / "cache"))
    with pytest.raises(InvalidData, match=rf"^recipe\.data\.rl\[0\]\.path: {sentence}"):
        fetch(Source(rows.field, f"memory://{tmp_path.name}/{name}", is_rows=True), tmp_path)


def test_whether_rows_are_here_is_known_without_torch() -> None:
    """A check of rows has none, and ended by it."""
    program = (
        "import sys; sys.modules['torch'] = None; from pathlib import Path;"
        " from polyrl_trainer.data.fetched import complete_at; print(complete_at('s3://b/a.jsonl', Path('none')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "None\n", done.stderr
