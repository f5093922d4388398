"""A model's folder from somebody else is loaded by what it holds: no pickle, no pipe, no device, no kernel of a hub."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner, Result

from polyrl.history.model_card import ORIGIN, model_origin
from polyrl.manifest.job import PolyRLJob
from polyrl.testing.job_values import raw_job
from polyrl_cli.app import app

WEIGHTS = "model.safetensors"
LETTERS = ["<pad>", "<end>", "<odd>", *"abcdefghijklm"]


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of a few thousand parameters, as `polyrl export` leaves one."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("honest") / "model"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        sizes: dict[str, Any] = {"vocab_size": len(LETTERS), "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
        GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=1)).save_pretrained(folder)
    letters = Tokenizer(models.WordLevel({letter: number for number, letter in enumerate(LETTERS)}, unk_token="<odd>"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=letters, unk_token="<odd>", eos_token="<end>", pad_token="<pad>"
    ).save_pretrained(folder)
    origin = model_origin(PolyRLJob.model_validate(raw_job()), "rl", step=1, chat=False, version="0")
    (folder / ORIGIN).write_bytes(msgspec.json.encode(origin))
    return folder


@pytest.fixture
def received(honest: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(honest, tmp_path / "model"))


def answered(folder: Path) -> Result:
    """What `generate` did; what is no sentence of its own is raised."""
    done = CliRunner().invoke(app, ["generate", str(folder), "abc", "--max-tokens", "6"])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def changed(name: str, **fields: object) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | fields))


def written(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def linked(name: str, place: str) -> Callable[[Path], object]:
    def replace(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(place)

    return replace


def pipe(name: str) -> Callable[[Path], object]:
    def replace(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return replace


def pickled(folder: Path) -> None:
    import torch

    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


DEEP = '{"a":' * 5000 + "1" + "}" * 5000
REFUSED: dict[str, Callable[[Path], object]] = {
    "a pickle": pickled,
    "a pipe as the origin": pipe(ORIGIN),
    "a device as the origin": linked(ORIGIN, "/dev/zero"),
    "a device as the tokenizer": linked("tokenizer.json", "/dev/zero"),
    "a pipe as the weights": pipe(WEIGHTS),
    "a link to nothing": linked("generation_config.json", "nothing"),
    "weights that are none": written(WEIGHTS, "x" * 100),
    "a deep config": written("config.json", DEEP),
    "a list as the config": written("config.json", "[]"),
    "a deep tokenizer": written("tokenizer.json", DEEP),
    "a word as a size": changed("config.json", n_layer="many"),
    "an end that is no token": changed("generation_config.json", eos_token_id="x"),
}
"""What nobody's `polyrl export` leaves."""


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
def test_what_no_export_leaves_is_refused_in_a_sentence(received: Path, change: Callable[[Path], object]) -> None:
    """Pipes were waited for without an end, a device filled the memory, and the rest was loaded or a traceback."""
    change(received)
    done = answered(received)
    assert (done.exit_code, done.stderr.startswith(str(received))) == (2, True), done.output
    assert len(done.stderr.splitlines()) == 1


def test_an_origin_beyond_reading_is_refused(received: Path) -> None:
    os.truncate(received / ORIGIN, (16 << 20) + 1)
    done = answered(received)
    assert (done.exit_code, "at most 16,777,216 are read" in done.stderr) == (2, True)


def template(text: str) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        changed(ORIGIN, chat=True)(folder)
        (folder / "chat_template.jinja").write_text(text)

    return write


ENDLESS: dict[str, Callable[[Path], object]] = {
    "a billion layers": changed("config.json", n_layer=10**9),
    "a template of loops": template("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"),
    "a template's number": template("{{ 9 ** (9 ** 9) }}"),
}


# The first reminder may come within a callback of the collector, where Python prints what is raised and goes on: the
# next one ends it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("change", ENDLESS.values(), ids=ENDLESS)
def test_what_would_be_read_for_ever_ends(
    received: Path, change: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each was, until somebody ended the command."""
    monkeypatch.setattr("polyrl_cli.model.bounds.LEAST_S", 1.0)
    change(received)
    done = answered(received)
    assert (done.exit_code, "not read within 1" in done.stderr) == (2, True), done.output


def test_memory_that_no_file_explains_is_an_error(received: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of a template took all that there was."""
    monkeypatch.setattr("polyrl_cli.model.bounds.LEAST_BYTES", 1 << 28)
    template("{{ 'a' * 1000000000 }}")(received)
    done = answered(received)
    assert (done.exit_code, "MemoryError" in done.stderr) == (2, True), done.output


def test_a_folder_names_no_length_without_an_end(received: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyrl_cli.model.generate.MOST_TOKENS", 3)
    changed(ORIGIN, maxNewTokens=10**12)(received)
    done = CliRunner().invoke(app, ["generate", str(received), "abc"])
    assert (done.exit_code, len(done.stdout.split())) == (0, 3), done.output


def test_links_of_a_hubs_cache_are_followed(received: Path) -> None:
    blob = received.with_name("blob")
    (received / WEIGHTS).rename(blob)
    (received / WEIGHTS).symlink_to(blob)
    assert answered(received).exit_code == 0


IGNORED: dict[str, Callable[[Path], object]] = {
    "attention of a hub": changed("config.json", attn_implementation="kernels-community/flash-attn2"),
    "beams": changed("generation_config.json", num_beams=3, repetition_penalty=9.0, num_return_sequences=3),
    "code that generates": changed("generation_config.json", custom_generate="somebody/code"),
}


@pytest.mark.parametrize("change", IGNORED.values(), ids=IGNORED)
def test_the_policy_answers_whatever_a_config_asks_for(
    honest: Path, received: Path, change: Callable[[Path], object]
) -> None:
    change(received)
    done = answered(received)
    assert (done.exit_code, done.stdout) == (0, answered(honest).stdout), done.output
