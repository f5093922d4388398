"""A tree is released only if its version agrees everywhere, its changelog tells it, and a commit holds all of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from release.lock import LOCK, PINS
from release.rules import Tree, base_refusals, notes, refusals, version_of
from release.surfaces import SURFACES, names_of

ROOT = Path(__file__).parents[2]
PROJECT = '[project]\nname = "polyrl"\nversion = "0.2.0"\n'
CHART = "name: polyrl\nversion: 0.2.0\nappVersion: 0.2.0\n"
CHANGELOG = (
    "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2026-01-31\n\n### Added\n- A thing.\n\n## [0.1.0] - 2026-01-01\n"
)
RELEASE = Tree(PROJECT, CHART, changelog=CHANGELOG, elsewhere=["v0.1.0"])

CASES = [
    pytest.param(
        replace(RELEASE, chart=CHART.replace("version: 0.2.0", "version: 0.1.0", 1)),
        "charts/polyrl/Chart.yaml: version is 0.1.0, pyproject.toml has 0.2.0; make them equal",
        id="the chart's version",
    ),
    pytest.param(
        replace(RELEASE, chart=CHART.replace("appVersion: 0.2.0", "appVersion: 0.1.0")),
        "charts/polyrl/Chart.yaml: appVersion is 0.1.0, pyproject.toml has 0.2.0; make them equal",
        id="the version that the chart installs",
    ),
    pytest.param(
        replace(RELEASE, elsewhere=["v0.1.0", "v0.2.0"]),
        "tag v0.2.0 belongs to another commit; raise the version",
        id="released before",
    ),
    pytest.param(
        replace(RELEASE, changelog=CHANGELOG.replace("0.2.0", "0.3.0")),
        "CHANGELOG.md: no section [0.2.0]; head what is under [Unreleased] with it and the date",
        id="no section",
    ),
    pytest.param(
        replace(RELEASE, changelog=CHANGELOG.replace(" - 2026-01-31", "")),
        "CHANGELOG.md: the section is headed [0.2.0]; write [0.2.0] - YEAR-MONTH-DAY",
        id="no date",
    ),
    pytest.param(
        replace(RELEASE, changelog=CHANGELOG.replace("- A thing.", "")),
        "CHANGELOG.md: the section [0.2.0] is empty; name what changed for users",
        id="empty section",
    ),
    pytest.param(
        replace(RELEASE, changelog=CHANGELOG.replace("[Unreleased]", "[Unreleased]\n- Forgotten.")),
        "CHANGELOG.md: [Unreleased] has entries; they belong to [0.2.0], which holds this commit",
        id="unreleased entries",
    ),
    pytest.param(
        replace(RELEASE, changed=[f"file{n}" for n in range(7)]),
        "the tree differs from its commit: file0, file1, file2, file3, file4 and 2 more; commit or remove that",
        id="changed files",
    ),
]


def test_a_tree_that_agrees_is_a_release() -> None:
    assert refusals(RELEASE) == []


@pytest.mark.parametrize(("tree", "sentence"), CASES)
def test_what_is_wrong_is_one_sentence(tree: Tree, sentence: str) -> None:
    assert refusals(tree) == [sentence]


SURFACE = "crds/polyrljobs.yaml"
BEFORE = """
spec: {versions: [{schema: {properties: {spec: {properties: {seed: {type: integer}, mode: {enum: [rl, sft]},
  data: {properties: {rl: {items: {
  properties: {path: {type: string}, properties: {type: string}}}}}}}}}}}]}
"""
AFTER = (
    BEFORE.replace("seed: {type: integer}, ", "").replace(", properties: {type: string}", "").replace("rl, sft", "rl")
)


ALL_GONE = ["spec.data.rl.properties", "spec.mode=sft", "spec.seed"]


def test_a_block_that_went_is_one_sentence_and_one_announcement() -> None:
    gone = replace(RELEASE, released={SURFACE: BEFORE}, surfaces={SURFACE: ""})
    assert [refusal.split(" was")[0] for refusal in refusals(gone)] == [f"{SURFACE}: spec"]
    announced = CHANGELOG.replace("A thing.", "A thing.\n\n### Removed\n- `spec`.")
    assert refusals(replace(gone, changelog=announced)) == []


def test_names_are_those_of_fields() -> None:
    assert names_of(SURFACE, BEFORE) == {
        "spec",
        "spec.seed",
        "spec.mode",
        "spec.mode=rl",
        "spec.mode=sft",
        "spec.data",
        "spec.data.rl",
    } | {f"spec.data.rl.{name}" for name in ("path", "properties")}


@pytest.mark.parametrize(
    ("announced", "unannounced"),
    [
        pytest.param("A thing.", ALL_GONE, id="silent"),
        pytest.param("A thing.\n\n### Removed\n- `spec.seed`.", ALL_GONE[:2], id="one of three"),
        pytest.param(
            "A thing.\n\n### Removed\n- `spec.seed`, `spec.mode=sft`, `spec.data.rl.properties`.", [], id="all of them"
        ),
        pytest.param("`spec.seed` does more.", ALL_GONE, id="under Added"),
        pytest.param("A thing.\n\n### Removed\n- Parts of `spec`, `spec.data`.", ALL_GONE, id="of a block that stays"),
    ],
)
def test_what_was_released_goes_only_by_an_announcement(announced: str, unannounced: list[str]) -> None:
    changelog = CHANGELOG.replace("A thing.", announced)
    tree = replace(RELEASE, changelog=changelog, released={SURFACE: BEFORE}, surfaces={SURFACE: AFTER})
    assert refusals(tree) == [
        f"{SURFACE}: {name} was released and is gone; bring it back, or write `{name}` under Removed in CHANGELOG.md"
        for name in unannounced
    ]


def test_surfaces_of_this_tree_have_names() -> None:
    found = {name: names_of(name, (ROOT / name).read_text()) for name in SURFACES}
    assert "spec.recipe.algorithm.optimizer.learningRate" in found["crds/polyrljobs.yaml"]
    assert "watch.namespaces" in found["charts/polyrl/values.schema.json"]
    assert {"polyrl run --show-prints", "polyrl ls", "polyrl --version"} <= found["docs/reference/cli.md"]
    assert "polyrl_trainer.client.RolloutClient" in found["docs/reference/python.md"]
    assert {"/v1/drain", "ManagerStatus.seq"} <= found["docs/reference/manager-api.json"]


def test_a_pre_release_is_refused() -> None:
    """Python's 0.2.0rc1 is no version to Helm."""
    texts = (text.replace("0.2.0", "0.2.0rc1") for text in (PROJECT, CHART, CHANGELOG))
    assert refusals(Tree(*texts)) == ["pyproject.toml: version is 0.2.0rc1; a release has three numbers, as 0.1.0"]


def test_a_home_is_asked_for_before_anything_is_uploaded() -> None:
    at_home = replace(RELEASE, pyproject=PROJECT + '[project.urls]\nSource = "https://example.org/polyrl"\n')
    assert [len(notes(tree)) for tree in (RELEASE, at_home)] == [1, 0]


def test_this_trees_version_is_the_same_everywhere() -> None:
    """What a release would refuse only on its day is refused on every day; its changelog's section comes last."""
    texts = [(ROOT / name).read_text() for name in ("pyproject.toml", "charts/polyrl/Chart.yaml")]
    version, pins = version_of(texts[0]), (ROOT / PINS).read_text()
    changelog, lock = f"## [{version}] - 2026-01-31\n- Any.\n", (ROOT / LOCK).read_text()
    tree = Tree(*texts, changelog=changelog, constraints=pins, lock=lock)
    assert refusals(tree) == []
    assert refusals(replace(tree, lock="")) != []
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize(
    ("options", "base"),
    [
        (["--build-arg", "BASE=python:3.11-slim"], "python:3.11-slim"),
        (["--build-arg", "BASE=python@sha256:12ab"], "python@sha256:12ab"),
        (["--build-arg=BASE=python:3.11-slim"], "python:3.11-slim"),
        (["--build-arg", "VARIANT=cpu"], "not given"),
    ],
)
def test_images_are_released_on_a_base_named_by_its_digest_only(options: list[str], base: str) -> None:
    (refusal,) = base_refusals(options)
    assert refusal.startswith(f"BASE is {base}; name the base image by its digest, as BASE=")


def test_a_base_named_by_its_digest_is_released() -> None:
    assert base_refusals(["--build-arg", f"BASE=docker.io/library/python@sha256:{'0a' * 32}"]) == []
