"""The wheel in a fresh environment, outside the repository and without any extra: every command works or says in one
sentence what it needs. Commands that only read need nothing."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
import venv
import zipfile
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement

from polyrl.testing.job_values import raw_job
from polyrl_cli.extras import EXTRA_OF

ROOT = Path(__file__).parents[2]
JOB = "examples/sort-digits/job.yaml"


def core_distributions() -> set[str]:
    """What `pip install polyrl` brings: the core's requirements and theirs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    waiting, found = list(project["dependencies"]), set()
    while waiting:
        requirement = Requirement(waiting.pop())
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if wanted and requirement.name.lower() not in found:
            found.add(requirement.name.lower())
            waiting += distribution(requirement.name).requires or []
    return found


def link(name: str, site: Path) -> None:
    """The packages of an installed distribution, into another environment."""
    for file in distribution(name).files or []:
        source = Path(str(distribution(name).locate_file(file.parts[0])))
        target = site / file.parts[0]
        if file.parts[0] not in ("..", "__pycache__") and source.exists() and not target.exists():
            target.symlink_to(source)


@pytest.fixture(scope="module")
def polyrl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command of a fresh environment."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder / "venv", with_pip=False)
    site = next((folder / "venv").glob("lib/python3*/site-packages"))
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    zipfile.ZipFile(wheel).extractall(site)
    for name in core_distributions():
        link(name, site)
    command = folder / "venv/bin/polyrl"
    command.write_text(f"#!{folder}/venv/bin/python -P\nfrom polyrl_cli.app import main\nmain()\n")
    command.chmod(0o755)
    return command


def run(polyrl: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([polyrl, *arguments], cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working folder with a run that was begun and wrote nothing."""
    (tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / "runs" / "one" / "job.json").write_text(json.dumps(raw_job()))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path


WORKS = [("--help",), ("--version",), ("version",), ("crd",), ("validate", str(ROOT / JOB)), ("ls",)]
WORKS += [("reward", str(ROOT / JOB), "--response", "012345"), ("init", "my-task")]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", WORKS, ids=lambda row: row[0])
def test_what_needs_no_extra_works(polyrl: Path, folder: Path, arguments: tuple[str, ...]) -> None:
    done = run(polyrl, folder, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr


READS = [("why", "runs/one"), ("check", "runs/one"), ("explain", "runs/one", "0.0"), ("samples", "runs/one")]
READS += [("export", "runs/one", "exported"), ("report", "runs/one")]
NEEDS = [
    (("run", str(ROOT / JOB)), "all"),
    (("resume", "runs/one"), "all"),
    (("run", "--on", "kubernetes", str(ROOT / JOB)), "operator"),
    (("status", "j"), "operator"),
    (("logs", "j"), "operator"),
    (("chaos", "kill", "runs/one"), "operator"),
    (("get", "j", "got"), "operator"),
    (("generate", "model", "hello"), "trainer"),
]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", READS, ids=lambda row: row[0])
def test_what_only_reads_asks_for_no_extra(polyrl: Path, folder: Path, arguments: tuple[str, ...]) -> None:
    done = run(polyrl, folder, *arguments)
    assert "pip install" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "extra"), NEEDS, ids=[" ".join(row[0])[:22] for row in NEEDS])
def test_what_needs_an_extra_names_it(polyrl: Path, folder: Path, arguments: tuple[str, ...], extra: str) -> None:
    done = run(polyrl, folder, *arguments)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"polyrl {arguments[0]}: needs ")
    assert done.stderr.endswith(f"not installed here; pip install 'polyrl[{extra}]'\n")


@pytest.mark.slow
def test_a_model_of_a_hub_is_no_fault_of_the_manifest(polyrl: Path, folder: Path) -> None:
    assert run(polyrl, folder, "init", "chat", "--task", "chat").returncode == 0
    done = run(polyrl, folder, "validate", "chat/job.yaml")
    assert (done.returncode, done.stderr) == (0, "")
    assert "not on this machine yet" in done.stdout
    tried = run(polyrl, folder, "reward", "chat/job.yaml")
    assert (tried.returncode, len(tried.stderr.splitlines())) == (2, 1)
    assert "not on this machine yet" in tried.stderr


@pytest.mark.slow
def test_validate_says_what_it_could_not_look_at(polyrl: Path, folder: Path) -> None:
    done = run(polyrl, folder, "validate", str(ROOT / JOB))
    assert (
        "note: needs the trainer extra (pip install 'polyrl[trainer]'); these checks were not made: the model's config"
        in (done.stdout)
    )


def test_extras_are_those_of_the_project() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    brought = {extra: {Requirement(text).name.lower() for text in texts} for extra, texts in extras.items()}
    brought["trainer"] |= {Requirement(text).name.lower() for text in distribution("transformers").requires or []}
    found = packages_distributions()
    strangers = {
        module: extra
        for module, extra in EXTRA_OF.items()
        if not brought[extra] & {name.lower().replace("_", "-") for name in found[module]}
    }
    assert strangers == {}


def test_what_is_carried_over_to_a_machine_without_a_network_holds_the_project(tmp_path: Path) -> None:
    """`pip download` would leave it out; what it needs comes likewise, and is left out here."""
    page = (ROOT / "docs/how-to/run-without-a-network.md").read_text()
    (line,) = re.findall(r"^pip (wheel --wheel-dir wheels .*'\.\[all\]')$", page, re.MULTILINE)
    packed = [*shlex.split(line.replace("wheels", str(tmp_path))), "--no-deps", "--no-build-isolation", "-q"]
    subprocess.run([sys.executable, "-m", "pip", *packed], cwd=ROOT, timeout=60, check=True)
    assert [file.name.split("-")[0] for file in tmp_path.iterdir()] == ["polyrl"]
