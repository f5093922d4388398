"""What sinks are given: names, settings, texts, and what is missing for them here."""

import posixpath
import re
from pathlib import Path

import pytest

from polyrl.manifest.recipe import LoggingSpec
from polyrl.sample import Finish, Purpose
from polyrl.sample_record import Chosen, SampleRecord
from polyrl_cli.manifests.load import load_manifest
from polyrl_trainer.sinks import packages
from polyrl_trainer.sinks.chosen import settings_of
from polyrl_trainer.sinks.mlflow import MAX_KEY_CHARS, Names, key
from polyrl_trainer.sinks.packages import missing_for_sinks
from polyrl_trainer.sinks.port import by_path
from polyrl_trainer.sinks.tensorboard import markdown

ROOT = Path(__file__).parents[4]


def sample(name: str, response: str, chosen: Chosen = Chosen.RANDOM) -> SampleRecord:
    return SampleRecord(
        time=1.0, purpose=Purpose.TRAIN, stage="rl", step=1, sample=name, group=1, chosen=(chosen,), reward=0.5,
        metrics={}, finish=Finish.STOP, versions=(0,), prompt_tokens=1, response_tokens=1, prompt="1+1=",
        response=response,
    )  # fmt: skip


def test_a_text_for_tensorboard_is_a_block_in_which_nothing_is_markup() -> None:
    text = markdown([sample("1.0", "<script>x</script>\n# head\n")])
    assert text.splitlines()[-2:] == ["    <script>x</script>", "    # head"]
    assert text.startswith("**1.0** reward 0.5, stop\n\n    1+1=\n")
    assert len(markdown([sample("1.0", "x" * 100_000)])) < 1200


def test_names_that_mlflow_refuses_stay_apart() -> None:
    assert key("reward/mean length") == "reward/mean length"
    assert len({key("a%b"), key("a&b"), key("a_b")}) == 3


@pytest.mark.parametrize("name", ["a//b", "../b", ".", "b/", "/b", "é日" * 86, "x" * 300, "a/" * 200, "\ud800", ". /a"])
def test_any_name_is_one_that_mlflow_takes(name: str) -> None:
    found = key(name)
    assert len(found) <= MAX_KEY_CHARS
    assert posixpath.normpath(found) == found
    assert re.fullmatch(r"[/\w.\- ]+", found, re.ASCII)
    assert not found.startswith(("/", ".."))


def test_long_names_that_begin_alike_stay_apart() -> None:
    assert key("x" * 300) != key("x" * 301)


def test_a_metric_is_no_folder_of_others_whichever_comes_first() -> None:
    for order in (["q", "q/r", "q/r/s"], ["q/r/s", "q/r", "q"]):
        names = Names()
        placed = [names.place(name) for name in order]
        assert placed == [names.place(name) for name in order]
        assert len(set(placed)) == 3
        assert not any(one.startswith(f"{other}/") for one in placed for other in placed)


def test_values_by_path() -> None:
    assert by_path({"a": {"b": 1, "c": {"d": [2]}}, "e": 3}, ".") == {"a.b": 1, "a.c.d": [2], "e": 3}


def test_settings_are_the_whole_manifest_without_values_of_variables() -> None:
    sets = ["spec.recipe.env=[{name: JUDGE, value: at-home}]"]
    settings = settings_of(load_manifest(ROOT / "examples" / "sort-digits" / "job.yaml", sets))
    assert settings["recipe"]["env"] == ["JUDGE"]
    assert "at-home" not in str(settings)
    assert settings["recipe"]["algorithm"]["klCoefficient"] == 0.0


@pytest.mark.parametrize(
    ("logging", "installed", "fields"),
    [
        ({}, (), []),
        ({"wandb": {}, "mlflow": {}}, ("wandb", "mlflow"), []),
        ({"wandb": {}, "mlflow": {}}, (), ["wandb", "mlflow"]),
        ({"mlflow": {"trackingUri": "sqlite:///m.db"}}, ("mlflow",), ["mlflow"]),
        ({"mlflow": {"trackingUri": "postgresql+psycopg://db/m"}}, ("mlflow",), ["mlflow"]),
        ({"mlflow": {"trackingUri": "sqlite:///m.db"}}, ("mlflow", "sqlalchemy"), []),
    ],
)
def test_what_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, logging: dict[str, object], installed: tuple[str, ...], fields: list[str]
) -> None:
    monkeypatch.setattr(packages, "find_spec", lambda name: name if name in installed else None)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert [field for field, _ in missing_for_sinks(LoggingSpec.model_validate(logging))] == fields


@pytest.mark.parametrize("uri", ["mlruns", "http://me:secret@mlflow", "databricks"])
def test_tracking_uris_that_are_none_or_hold_a_password(uri: str) -> None:
    with pytest.raises(ValueError, match="trackingUri"):
        LoggingSpec.model_validate({"mlflow": {"trackingUri": uri}})


def test_validate_asks_without_any_package_of_an_extra() -> None:
    source = (ROOT / "trainer/polyrl_trainer/sinks/packages.py").read_text()
    imported = [line.split()[1] for line in source.splitlines() if line.startswith(("from ", "import "))]
    assert [name for name in imported if name.startswith("polyrl")] == ["polyrl.manifest.recipe"]
