"""A run's folder that somebody else made is gone on with only where nothing in it points out of it."""

import asyncio
import os
import stat
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from polyrl.errors import UserError
from polyrl.manifest.job import PolyRLJob
from polyrl.testing.job_values import raw_job
from polyrl.worker import Role, Worker
from polyrl_cli.app import app
from polyrl_cli.local.ownership import take_over
from polyrl_cli.local.process_fleet import ProcessFleet
from polyrl_cli.local.run import resume_command, run_command
from polyrl_cli.local.run_folder import RunFolder, new_run_folder, prepare_folder


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    file = tmp_path / ".bashrc"
    file.write_text("mine\n")
    return file


@pytest.fixture
def received(tmp_path: Path) -> Path:
    root = tmp_path / "received"
    (root / "run").mkdir(parents=True)
    (root / "job.json").write_text("{}")
    return root


@pytest.mark.parametrize(
    "name",
    ["run/lock", "run/epoch", ".epoch", "fleet.jsonl", "summary.json", "run/manifest-dir", "checkpoints", "keys"],
)
def test_a_link_out_of_the_folder_is_refused_and_followed_by_nothing(received: Path, victim: Path, name: str) -> None:
    (received / name).symlink_to(victim)
    with pytest.raises(UserError, match=rf"received/{name}: a link "):
        run_command(received / "job.json", [], None, resume=received)
    with pytest.raises(UserError, match=rf"received/{name}: a link "):
        resume_command(received, [])
    assert victim.read_text() == "mine\n"


def test_a_folder_that_is_a_link_is_refused(received: Path, tmp_path: Path) -> None:
    (received / "logs").symlink_to(tmp_path)
    with pytest.raises(UserError, match=r"received/logs: a link"):
        take_over(received)


def test_a_second_name_of_a_file_elsewhere_is_refused(received: Path, victim: Path) -> None:
    os.link(victim, received / "metrics.jsonl")
    with pytest.raises(UserError, match=r"metrics.jsonl: has a second name"):
        take_over(received)


def test_a_pipe_that_would_be_read_for_ever_is_refused(received: Path) -> None:
    os.mkfifo(received / "metrics.jsonl")
    with pytest.raises(UserError, match=r"metrics.jsonl: neither a file nor a folder"):
        take_over(received)


def test_what_belongs_to_somebody_else_is_refused(received: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 123456)
    with pytest.raises(UserError, match=r"received: belongs to user \d+, not to you"):
        take_over(received)


def test_a_link_within_the_folder_is_fine_and_the_folder_is_closed_to_others(received: Path) -> None:
    (received / "wandb" / "run-1").mkdir(parents=True)
    (received / "wandb" / "latest-run").symlink_to("run-1")
    received.chmod(0o755)
    take_over(received)
    assert stat.S_IMODE(received.stat().st_mode) == 0o700


def test_a_new_folder_is_closed_to_others(tmp_path: Path) -> None:
    made = new_run_folder(tmp_path / "runs" / "mine", "job", datetime.now(UTC))
    assert stat.S_IMODE(made.root.stat().st_mode) == 0o700


def test_what_a_worker_writes_is_closed_to_others(tmp_path: Path) -> None:
    async def start() -> None:
        fleet = ProcessFleet(tmp_path)
        await fleet.start(Worker("engine-0", Role.ROLLOUT, argv=("touch", str(tmp_path / "made"))))
        while any(worker.lives for worker in await fleet.list()):
            await fleet.changed(5.0)

    asyncio.run(start())
    assert stat.S_IMODE((tmp_path / "made").stat().st_mode) == 0o600


def test_a_journal_of_an_odd_name_is_none_of_the_run(tmp_path: Path) -> None:
    for name in ("2", "10", "x", "-3", "9" * 200, "²"):
        (tmp_path / f"journal-of-epoch-{name}.sqlite").touch()
    assert [file.stem for file in RunFolder(tmp_path).older_journals()] == ["journal-of-epoch-2", "journal-of-epoch-10"]


def test_keys_are_drawn_anew_at_each_start(tmp_path: Path) -> None:
    run, job = RunFolder(tmp_path), PolyRLJob.model_validate(raw_job())
    prepare_folder(run, job, tmp_path)
    (run.keys / "of-the-sender").write_text("known to the sender")
    before = {file.name: file.read_text() for file in run.keys.iterdir()}
    prepare_folder(run, job, tmp_path)
    after = {file.name: file.read_text() for file in run.keys.iterdir()}
    assert before.keys() - after.keys() == {"of-the-sender"}
    assert all(before[name] != text for name, text in after.items())


@pytest.mark.parametrize("depth", [100, 400, 900, 5000])
@pytest.mark.parametrize(("begin", "end"), [("[", "]"), ('{"a":[', "]}")], ids=["lists", "maps"])
def test_a_manifest_that_is_nested_too_deeply_is_as_good_as_none(
    tmp_path: Path, depth: int, begin: str, end: str
) -> None:
    """`report` ended in a traceback at 900 levels: what writes YAML takes a few frames for each."""
    run = tmp_path / "run"
    run.mkdir()
    nested = begin * depth + end * depth
    (run / "job.json").write_text(f'{{"metadata":{{"name":"received"}},"spec":{{"recipe":{nested}}}}}')
    for command in (["report", run], ["compare", run, run], ["ls", tmp_path]):
        result = CliRunner().invoke(app, [str(word) for word in command])
        assert result.exit_code == 0, result.output
        assert not isinstance(result.exception, RecursionError)


ODD = {
    "job.json": os.mkfifo,
    "trainer-result.json": os.mkfifo,
    "run/lock": os.mkfifo,
    "metrics.jsonl": lambda place: place.symlink_to("/etc/passwd"),
    "summary.json": lambda place: place.symlink_to("/nonexistent"),
    "run": lambda place: place.symlink_to("/tmp"),
    "checkpoints/c/COMPLETE.json": os.mkfifo,
    "checkpoints/c": lambda place: place.symlink_to("/tmp"),
}
"""What no run makes, where commands read."""


@pytest.mark.parametrize("name", ODD)
def test_commands_read_no_pipe_and_through_no_link(received: Path, name: str) -> None:
    if name == "run":
        (received / "run").rmdir()
    elif name == "job.json":
        (received / name).unlink()
    (received / name).parent.mkdir(parents=True, exist_ok=True)
    ODD[name](received / name)
    honest = received.with_name("honest")
    honest.mkdir()
    (honest / "job.json").write_text("{}")
    listed = CliRunner().invoke(app, ["ls", str(received.parent)])
    assert listed.exit_code == 0
    assert "honest" in listed.stdout
    assert "received" not in listed.stdout
    assert f"{name}: a link or a pipe" in listed.stderr
    for command in (["compare", str(honest), str(received)], ["report", str(received)], ["why", str(received)]):
        refused = CliRunner().invoke(app, command)
        assert refused.exit_code == 2
        assert "a link or a pipe" in refused.stderr


def test_a_file_beyond_reading_is_left_out(received: Path) -> None:
    """Two kilobytes of an archive may be a file of any size without content: whoever read it took all memory."""
    with (received / "metrics.jsonl").open("w") as file:
        file.truncate(60 << 30)
    listed = CliRunner().invoke(app, ["ls", str(received.parent)])
    assert listed.exit_code == 0
    assert "metrics.jsonl: has 64,424,509,440 bytes; at most" in listed.stderr
    for command in ("top", "report", "why"):
        assert CliRunner().invoke(app, [command, str(received)]).exit_code == 2


ROW = '{"time": 1.0, "phase": "rl", "step": 1, "reward/mean": 0.5}'
HUGE = "1" + "0" * 400
MOMENTS = """{"time": 1e308, "t": -1e308, "event": "run"}
{"time": -1e308, "t": 1e308, "event": "started", "worker": "rollout-0"}
{"time": 1e308, "t": 1e308, "event": "serving", "worker": "rollout-0"}
{"time": -1e308, "t": 1, "event": "reclaimed", "worker": "rollout-0"}
"""
NUMBERS = {
    "step": ("metrics.jsonl", ROW + ROW.replace('"step": 1', f'"step": {HUGE}')),
    "time": ("metrics.jsonl", ROW + ROW.replace("1.0", HUGE)),
    "late": ("metrics.jsonl", ROW + ROW.replace("1.0", "1e308")),
    "value": ("metrics.jsonl", ROW + ROW.replace("0.5", f"-{HUGE}")),
    "seconds": ("summary.json", f'{{"outcome": "succeeded", "wallSeconds": {HUGE}}}'),
    "many-seconds": ("summary.json", '{"outcome": "succeeded", "wallSeconds": 1e308}'),
    "words": ("summary.json", '{"outcome": "succeeded", "samplesTrained": "x", "stepTimeRatio": "x"}'),
    "lists": ("summary.json", '{"outcome": "succeeded", "cost": {"total": [1], "currency": []}}'),
    "values": ("metrics.jsonl", "".join(ROW.replace("0.5", text) for text in ("1e308", "-1e308") * 15)),
    "evaluated": (
        "metrics.jsonl",
        ROW.replace("rl", "eval").replace("reward/mean", "eval/reward").replace("0.5", HUGE) * 2,
    ),
    "moments": ("fleet.jsonl", MOMENTS),
    "digits": ("summary.json", f'{{"outcome": "succeeded", "samplesTrained": {HUGE * 9}}}'),
}
"""A file of a received run, and what stands in it."""


@pytest.mark.parametrize("what", NUMBERS)
def test_numbers_that_are_none_end_no_command(received: Path, what: str) -> None:
    name, text = NUMBERS[what]
    (received / name).write_text(text.replace("}{", "}\n{"))
    job = PolyRLJob.model_validate(raw_job()).model_dump_json(by_alias=True, exclude_none=True)
    (received / "job.json").write_text(job)
    run = str(received)
    for command in (["ls", str(received.parent)], ["compare", run, run], ["report", run], ["top", run, "--once"]):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.exception
        assert len(done.stdout) < 4000
