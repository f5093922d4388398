"""Folders of runs as they come from elsewhere, or as a crash leaves them: every command that reads one copes."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from polyrl.manifest.job import PolyRLJob
from polyrl_cli.app import USER_ERROR, app
from polyrl_cli.inspection.top import ask_manager, begun
from polyrl_cli.local.run_folder import RunFolder, locked
from polyrl_cli.manifests.load import load_manifest

JOB = Path(__file__).parents[3] / "examples/sort-digits/job.yaml"
DEADLINE_S = 30
READERS = ("ls", "compare", "report", "top")


@pytest.fixture(scope="module")
def job() -> PolyRLJob:
    return load_manifest(JOB, [])


@pytest.fixture
def run(tmp_path: Path, job: PolyRLJob) -> Path:
    """A run that ended after three RL steps."""
    root = tmp_path / "runs" / "one"
    kept = root / "checkpoints" / "rl-step-000003"
    kept.mkdir(parents=True)
    (root / "run").mkdir()
    (root / "run" / "epoch").write_text("1\n")
    (root / "job.json").write_text(job.model_dump_json(by_alias=True, exclude_none=True))
    (root / "run" / "manifest-dir").write_text(str(JOB.parent))
    (root / "summary.json").write_text(json.dumps({"outcome": "failed", "why": "it did", "wallSeconds": 7.0}))
    row = {"time": 100.0, "phase": "rl", "step": 3, "reward/mean": 0.5}
    (root / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (kept / "COMPLETE.json").write_text('{"files": {}, "serial": 1}')
    (kept / "state.json").write_text('{"stage": "rl", "step": 3}')
    return root


def ask(command: str, run: Path) -> Result:
    where = [run.parent] if command == "ls" else [run, run] if command == "compare" else [run]
    return CliRunner().invoke(app, [command, *map(str, where)], catch_exceptions=False)


BREAKS: dict[str, Callable[[Path], object]] = {
    "metadata is a list": lambda run: (run / "job.json").write_text('{"metadata": [1], "kind": "PolyRLJob"}'),
    "no recipe": lambda run: (run / "job.json").write_text('{"metadata": {"name": "x"}, "spec": {"recipe": null}}'),
    "steps are text": lambda run: (run / "job.json").write_text('{"spec": {"recipe": {"algorithm": {"steps": "x"}}}}'),
    "seconds are text": lambda run: (run / "summary.json").write_text('{"wallSeconds": "x", "outcome": []}'),
    "metrics are a folder": lambda run: ((run / "metrics.jsonl").unlink(), (run / "metrics.jsonl").mkdir()),
    "events are a folder": lambda run: (run / "fleet.jsonl").mkdir(),
    "events are no events": lambda run: (run / "fleet.jsonl").write_bytes(b'7\n{"event"\n\xff\n'),
}


@pytest.mark.parametrize("command", READERS)
@pytest.mark.parametrize("broken", BREAKS)
def test_a_broken_folder_is_shown_as_far_as_it_goes_or_refused_in_a_sentence(
    run: Path, command: str, broken: str
) -> None:
    BREAKS[broken](run)
    done = ask(command, run)
    assert done.exit_code == 0 or (done.exit_code == USER_ERROR and len(done.stderr.strip().splitlines()) == 1)


def test_a_copy_of_a_run_tells_the_same(run: Path) -> None:
    copy = run.parent / "two"
    copy.mkdir()
    for name in ("summary.json", "metrics.jsonl", "job.json"):  # in the order in which a copy may be written
        (copy / name).write_bytes((run / name).read_bytes())
    listed = CliRunner().invoke(app, ["ls", str(run.parent), "--json"]).stdout.splitlines()
    one, two = sorted((json.loads(line) for line in listed), key=lambda row: row["run"])
    assert (one["state"], one["wallSeconds"]) == (two["state"], two["wallSeconds"]) == ("failed", 7.0)


def test_events_are_shown_once_in_order_and_can_give_no_command_to_the_terminal(run: Path) -> None:
    texts = ["", "first", "\x1b]0;taken\x07second", ""]
    events = [{"time": 90.0 + t, "t": t, "event": "fault", "text": text} for t, text in enumerate(texts)]
    (run / "fleet.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    shown = ask("top", run).stdout
    assert shown.count("first") == shown.count("second") == 1
    assert "\x1b]" not in shown
    assert shown.index("00:01") < shown.index("00:02")
    assert "00:03" not in shown


def test_top_says_why_it_cannot_ask_the_manager_and_asks_again(run: Path) -> None:
    endpoints = run / "run" / "endpoints" / "manager.json"
    folder = RunFolder(run)
    with locked(folder):
        assert "has not said yet where it listens" in ask("top", run).stdout
        endpoints.parent.mkdir()
        progress, broken = begun(folder), asyncio.Event()

        async def watched() -> list[str]:
            asking = asyncio.create_task(ask_manager(folder, progress, broken))
            shown = []
            async with asyncio.timeout(DEADLINE_S):
                for text in (None, "{"):
                    if text is not None:
                        endpoints.write_text(text)
                    while list(progress.waits) in ([], shown[-1:]):  # noqa: ASYNC110 - nothing announces it
                        await asyncio.sleep(0.01)
                    shown += progress.waits
            asking.cancel()
            return shown

        first, second = asyncio.run(watched())
    assert "has not said yet" in first
    assert "cannot be asked" in second


def left_in_mid_step(run: Path, groups: int) -> None:
    left = run / f"checkpoints/rl-step-000003-and-{groups:06d}-groups"
    left.mkdir()
    (left / "COMPLETE.json").write_text('{"files": {}, "serial": 2}')
    (left / "state.json").write_text(json.dumps({"stage": "rl", "step": 3, "trained_groups": groups}))


def of_stage(run: Path, stage: str) -> None:
    (run / "checkpoints/rl-step-000003/state.json").write_text(json.dumps({"stage": stage, "step": 3}))


REFUSED: dict[str, tuple[Callable[[Path], object], list[str], str]] = {
    "seal is empty": (
        lambda run: (run / "checkpoints/rl-step-000003/COMPLETE.json").write_text(""), [], "not a trainer's state",
    ),
    "epoch is no number": (lambda run: (run / "run/epoch").write_text("x"), [], "number of the run's last start"),
    "fewer steps than done": (
        lambda run: None, ["--set=spec.recipe.algorithm.steps=2", "--set=spec.faultInjection=[]"],
        "the newest checkpoint is of step 3",
    ),
    "fewer steps of SFT than done": (
        lambda run: of_stage(run, "sft"), ["--set=spec.recipe.sft.steps=2", "--set=spec.faultInjection=[]"],
        "--set spec.recipe.sft.steps: 2 steps, but the newest checkpoint is of step 3: ask for 3 or more",
    ),
    "as many steps as done, where another is begun": (
        lambda run: left_in_mid_step(run, 4), ["--set=spec.recipe.algorithm.steps=3", "--set=spec.faultInjection=[]"],
        "3 steps, but the newest checkpoint is in the middle of step 4: ask for 4 or more",
    ),
    "another mini-batch than that of the step which is begun": (
        lambda run: left_in_mid_step(run, 4), ["--set=spec.recipe.algorithm.promptsPerStep=10",
                                               "--set=spec.recipe.algorithm.miniBatchPrompts=5"],
        "the checkpoint has learned 4 groups of the next step, and what is left of promptsPerStep 10 is no multiple of",
    ),
}  # fmt: skip


@pytest.mark.parametrize("refused", REFUSED)
def test_what_cannot_be_resumed_is_refused_and_left_as_it_is(run: Path, refused: str) -> None:
    spoil, flags, sentence = REFUSED[refused]
    spoil(run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    done = CliRunner().invoke(app, ["resume", str(run), "--no-check", *flags], catch_exceptions=False)
    assert done.exit_code == USER_ERROR, done.stdout
    assert sentence in done.stderr
    kept = {path: path.read_bytes() for path in before if path.is_file()}
    assert kept == before
