"""A manifest of somebody else's costs little: too large, too deep, a bomb of aliases, or no file at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import pytest

from polyrl.errors import InvalidManifest
from polyrl_cli.manifests import yaml_source
from polyrl_cli.manifests.load import load_manifest
from polyrl_cli.manifests.yaml_source import MAX_BYTES, MAX_FAULTS

HEAD: Final = "apiVersion: polyrl.dev/v1alpha1\nkind: PolyRLJob\nmetadata: {name: a}\n"
TEXTS: Final = {
    "aliases": ("a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(f"{b}: &{b} [{','.join(['*' + a] * 9)}]\n"
                for a, b in zip("abcdefg", "bcdefgh", strict=True)), "more than 200 values"),
    "merges": ("a0: &a0 {}\n" + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 60)),
               "more than 200 values"),
    "values": ("[" + "1," * 500, "more than 200 values"),
    "one text, often": (f"a: &x {'y' * 20_000}\nb: [{','.join(['*x'] * 60)}]", "characters once its aliases"),
    "a long key": (f"? {'k' * 100_000}\n: 1", "a key has 100,000 characters; 512 are allowed"),
}  # fmt: skip


def refusal(file: Path) -> list[str]:
    with pytest.raises(InvalidManifest) as refused:
        load_manifest(file)
    return refused.value.faults


@pytest.mark.parametrize("kind", TEXTS)
def test_a_bomb_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str) -> None:
    monkeypatch.setattr(yaml_source, "MAX_VALUES", 200)
    monkeypatch.setattr(yaml_source, "_TOO_MANY", "has more than 200 values")
    text, words = TEXTS[kind]
    (tmp_path / "job.yaml").write_text(text)
    (fault,) = refusal(tmp_path / "job.yaml")
    assert words in fault
    assert len(fault) < 1000


@pytest.mark.slow
def test_brackets_within_brackets_are_refused_before_the_stack_is_full(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("[" * 5000)
    (fault,) = refusal(tmp_path / "job.yaml")
    assert "is nested too deeply" in fault


def test_what_follows_too_many_values_is_not_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(yaml_source, "MAX_VALUES", 200)
    (tmp_path / "job.yaml").write_text("[" + "1," * 500 + "}")
    assert "values" in refusal(tmp_path / "job.yaml")[0]


def test_few_of_many_faults_are_shown(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(HEAD + "spec:\n" + "".join(f"  k{index}: 1\n" for index in range(300)))
    faults = refusal(tmp_path / "job.yaml")
    assert len(faults) == MAX_FAULTS + 1
    assert faults[-1] == f"and more: the first {MAX_FAULTS} faults are shown"


def test_no_more_than_a_manifest_is_read_of_a_large_file(tmp_path: Path) -> None:
    with (tmp_path / "job.yaml").open("wb") as file:
        file.truncate(2**40)
    assert refusal(tmp_path / "job.yaml") == [
        f"{tmp_path}/job.yaml: has {2**40:,} bytes; a manifest has at most {MAX_BYTES:,}"
    ]


def test_pipes_and_devices_are_no_manifests(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for file in (tmp_path / "pipe", Path("/dev/zero")):
        assert refusal(file) == [f"{file}: is a pipe, socket or device; name a file"]
