"""A run's folder that somebody else made is gone on with only where nothing in it points out of it."""

import asyncio
import errno
import json
import os
import shutil
import stat
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

from polyrl import errors, sample_record
from polyrl.errors import MAX_UNREADABLE, UserError
from polyrl.history import rows
from polyrl.history.fleet import FLEET, RECLAIMED, FleetEvent
from polyrl.history.results import EvaluationPoint
from polyrl.manifest.job import PolyRLJob
from polyrl.page import contents
from polyrl.sample_record import MAX_RECORD_BYTES
from polyrl.testing.job_values import raw_job
from polyrl.worker import Role, Worker
from polyrl_cli.app import app
from polyrl_cli.inspection import run_facts
from polyrl_cli.inspection.kept_samples import read_samples
from polyrl_cli.inspection.run_facts import read_facts
from polyrl_cli.local.ownership import take_over
from polyrl_cli.local.process_fleet import ProcessFleet
from polyrl_cli.local.run import resume_command, run_command
from polyrl_cli.local.run_folder import VALUE_BYTES, RunFolder, new_run_folder, prepare_folder
from polyrl_cli.page.page import record_of
from polyrl_cli.report.plot import draw_comparison, draw_run
from polyrl_cli.report.timeline import read_metrics, read_timeline


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


def test_a_folder_that_cannot_be_looked_into_is_refused(
    received: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of mode 0300 lists nothing, but what is written to a name in it goes through a link of that name."""
    (received / "run" / ".epoch").symlink_to(victim)
    scandir = os.scandir

    def closed(path: str) -> object:  # root could look into it
        if Path(path).name == "run":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", closed)
    with pytest.raises(UserError, match=r"received/run: cannot be looked into: Permission denied"):
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
    "journal.sqlite-journal": os.mkfifo,
    "journal-of-epoch-1.sqlite-wal": lambda place: place.symlink_to("/etc/passwd"),
}
"""What no run makes, where commands read."""


@pytest.mark.parametrize("name", ODD)
def test_commands_read_no_pipe_and_through_no_link(received: Path, name: str) -> None:
    if name == "run":
        (received / "run").rmdir()
    elif name == "job.json":
        (received / name).unlink()
    (received / name).parent.mkdir(parents=True, exist_ok=True)
    (received / "journal-of-epoch-1.sqlite").touch()
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


@pytest.mark.parametrize("name", ["summary.json", "run/epoch", "checkpoints/c/COMPLETE.json"])
def test_a_value_beyond_reading_is_refused(received: Path, name: str) -> None:
    """Python makes of a list of empty lists twenty times its bytes: 200 MB of a manifest took 5 GB."""
    (received / name).parent.mkdir(parents=True, exist_ok=True)
    with (received / name).open("w") as file:
        file.truncate(VALUE_BYTES + 1)
    for command in (["report"], ["export"]):
        words = [*command, str(received), *([str(received / "out")] if command == ["export"] else [])]
        refused = CliRunner().invoke(app, words)
        assert refused.exit_code == 2
        assert f"{name}: has 16,777,217 bytes; at most 16,777,216 are read" in refused.stderr


SAMPLE = """{"time": 1, "purpose": "train", "stage": "rl", "step": 1, "sample": "1.0", "group": 1, "reward": 1,
"metrics": {}, "finish": "stop", "versions": [0], "prompt_tokens": 1,
"response_tokens": 1, "prompt": "a", "response": "b"}"""
READERS: dict[str, Callable[[RunFolder], Sequence[object]]] = {
    '{"time": 1.0, "phase": "rl", "step": 1}': lambda run: read_metrics(run.metrics),
    '{"time": 1.0, "t": 1.0, "event": "run"}': lambda run: read_timeline(run.timeline),
    SAMPLE.replace("\n", " "): read_samples,
}
"""Who reads rows, by one of them."""


@pytest.mark.parametrize("row", READERS)
def test_a_file_of_no_rows_is_not_read_to_its_end(received: Path, row: str) -> None:
    """200 MB of line ends, some kilobytes of an archive, took minutes and gigabytes."""
    run = RunFolder(received)
    for torn, read in ((MAX_UNREADABLE, 1), (MAX_UNREADABLE + 1, 0)):
        for file in (run.metrics, run.timeline, run.samples):
            file.write_text("\n" * torn + row + "\n")
        assert len(READERS[row](run)) == read


@pytest.mark.parametrize(("field", "filled"), [
    ('"metrics": {}', f'"metrics": {json.dumps(dict.fromkeys(map(str, range(1001)), 1))}'),
    ('"versions": [0]', f'"versions": [{"0," * 1000}0]'),
    ('"metrics": {}', '"metrics": {}, "chosen": ["best", "best", "best", "best"]'),
    ('"response": "b"', f'"response": "{"b" * MAX_RECORD_BYTES}"'),
])  # fmt: skip
def test_a_sample_of_more_than_any_has_is_none(received: Path, field: str, filled: str) -> None:
    """One row of 40 MB of names took 46 s and 1.1 GB to show as 37 MB of a line, and a gigabyte may be read."""
    run, row = RunFolder(received), SAMPLE.replace("\n", " ")
    assert field in row
    run.samples.write_text(row + "\n" + row.replace(field, filled).replace("1.0", "1.1") + "\n")
    assert [record.sample for record in read_samples(run)] == ["1.0"]
    assert len(CliRunner().invoke(app, ["samples", str(received), "--full"]).stdout) < 1000


def test_samples_of_more_numbers_than_a_run_names_are_refused(received: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_record, "MAX_SAMPLE_NUMBERS", 2)
    (received / "samples.jsonl").write_text(SAMPLE.replace("\n", " ") + "\n")
    assert len(read_samples(RunFolder(received))) == 1
    (received / "samples.jsonl").write_text((SAMPLE.replace("\n", " ") + "\n") * 3)
    refused = CliRunner().invoke(app, ["samples", str(received)])
    assert (refused.exit_code, "samples.jsonl: has more than 2 numbers" in refused.stderr) == (2, True)


def test_a_row_of_lists_without_number_is_none(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(ROW.replace("}", f', "x": [{"[]," * (1 << 19)}[]]}}\n') + ROW + "\n")
    assert [row.values for row in read_metrics(tmp_path / "metrics.jsonl")] == [{"reward/mean": 0.5}]


def test_a_model_that_fills_the_disk_is_not_copied(received: Path) -> None:
    """A file without content may claim any size: the disk was filled to its last byte before it was refused."""
    checkpoint = received / "checkpoints" / "rl-step-000001"
    (checkpoint / "model").mkdir(parents=True)
    size = shutil.disk_usage(received).free + (1 << 30)
    with (checkpoint / "model" / "a").open("w") as file:
        file.truncate(size)
    (checkpoint / "COMPLETE.json").write_text(f'{{"files": {{"model/a": {{"size": {size}, "xxh3": ""}}}}}}')
    with patch.object(shutil, "copyfileobj", side_effect=AssertionError):
        refused = CliRunner().invoke(app, ["export", str(received), str(received / "out")])
    assert (refused.exit_code, f"{size:,} bytes would come" in refused.stderr) == (2, True)
    assert not (received / "out").exists()


def test_a_seal_that_names_what_no_file_is_called_is_refused(received: Path) -> None:
    checkpoint = received / "checkpoints" / "rl-step-000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMPLETE.json").write_text('{"files": {"model/a\\u0000b": {"size": 1, "xxh3": ""}}}')
    refused = CliRunner().invoke(app, ["export", str(received), str(received / "out")])
    assert (refused.exit_code, "names a file that no model's folder has: a\\x00b" in refused.stderr) == (2, True)


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
    "halves": ("summary.json", r'{"outcome": "succeeded", "stepTimeRatio": "\ud800", "samples": {"\ud800": 1}}'),
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


@pytest.mark.parametrize(("text", "what"), [
    (f"{ROW}\n" * 3, "has more than 2 rows"),
    (ROW.replace("}", ', "a": 1, "b": 2, "c": 3}') + "\n", "has more than 3 numbers"),
])  # fmt: skip
def test_more_rows_than_a_run_has_are_not_read(
    received: Path, monkeypatch: pytest.MonkeyPatch, text: str, what: str
) -> None:
    """40 MB of rows of forty bytes took 13 s and 441 MB, and a gigabyte may be read."""
    monkeypatch.setattr(errors, "MAX_FILE_ROWS", 2)
    monkeypatch.setattr(rows, "MAX_METRIC_NUMBERS", 3)
    (received / "job.json").write_text(PolyRLJob.model_validate(raw_job()).model_dump_json(by_alias=True))
    (received / "metrics.jsonl").write_text(text)
    run = str(received)
    listed = CliRunner().invoke(app, ["ls", str(received.parent)])
    assert (listed.exit_code, f"{run}: metrics.jsonl: {what}" in listed.stderr) == (0, True)
    for command in (["compare", run, run], ["report", run], ["top", run, "--once"]):
        refused = CliRunner().invoke(app, command)
        assert (refused.exit_code, what in refused.stderr) == (2, True)


def test_a_fleet_of_any_size_and_losses_of_any_text_are_drawn(tmp_path: Path) -> None:
    """Each engine that a line claims was a tick, each loss took milliseconds, and dollars were read as formulas."""
    odd = FleetEvent(time=1.0, t=1.0, kind=RECLAIMED, worker="rollout-0", text="$\\frac{$")
    fleet = FleetEvent(time=2.0, t=2.0, kind=FLEET, engines=10**15)
    draw_run("a run", [rows.MetricsRow(1.0, "rl", step=1, values={})], [odd] * 20_000 + [fleet], tmp_path / "run.png")
    draw_comparison({"$\\frac{$": []}, tmp_path / "runs.png")
    assert all((tmp_path / name).stat().st_size for name in ("run.png", "runs.png"))


class _Watched(dict[str, float]):
    """Counts how often it is asked whether it has a name."""

    asked = 0

    def __contains__(self, name: object) -> bool:
        _Watched.asked += 1
        return super().__contains__(name)


@pytest.mark.parametrize("phase", ["rl", "eval"])
def test_names_without_number_are_read_once(received: Path, phase: str) -> None:
    """Each name was looked for in each row: 7 MB, a name of its own in each of 100,000 rows, was more than 40 s."""
    prefix = "reward" if phase == "rl" else "eval"
    names = [{f"{prefix}/{number}": 1.0} for number in range(100)]
    read = [rows.MetricsRow(1.0 + n, phase, step=n, values=_Watched(values)) for n, values in enumerate(names)]
    read.append(rows.MetricsRow(200.0, phase, step=100, values=_Watched({name: 2.0 for one in names for name in one})))
    _Watched.asked = 0
    points = [EvaluationPoint(stage="", step=row.step, values=_Watched(row.values)) for row in read]
    with (
        patch.object(run_facts, "read_metrics", return_value=read),
        patch.object(contents, "evaluations", return_value=points),
    ):
        figures = contents.make_contents(record_of(RunFolder(received), now=300.0)).figures
    assert figures["0, training" if phase == "rl" else "eval/0, evaluation"] == "1.000 → 2.000"
    assert _Watched.asked < 20 * len(read)


def test_a_manifest_larger_than_any_is_refused(received: Path) -> None:
    (received / "job.json").write_text('{"a": "' + "x" * (1 << 20) + '"}')
    refused = CliRunner().invoke(app, ["report", str(received)])
    assert (refused.exit_code, "job.json: has 1,048,585 bytes; at most 1,048,576" in refused.stderr) == (2, True)


@pytest.mark.parametrize(
    ("settings", "known"),
    [
        ({"spec": {"x" * 300: {"y" * 300: 1}}}, False),
        ({"spec": {"x" * 508: 1}}, True),
        ({"a": [1] * 5_001}, False),
        ({"a": [{"b": {}}] * 3000}, False),
        ({"a": [{"b": 1}] * 3000}, False),
        ({"a": [{"b": {}}] * 1500}, True),
    ],
)
def test_a_manifest_of_more_than_anybody_writes_is_as_good_as_none(
    received: Path, settings: dict[str, object], known: bool
) -> None:
    """One key of 1 MB above 20,000 settings was written 20,000 times: `compare` took 6 GB and ended in a traceback. Ten
    million bytes of ones took `report` 1.4 GB and more than 20 s."""
    (received / "job.json").write_text(json.dumps(settings))
    assert read_facts(RunFolder(received), now=1.0).settings == (settings if known else {})


def test_a_setting_of_any_length_fits_a_terminal(received: Path, tmp_path: Path) -> None:
    """1.5 MB of control characters were 6.7 MB of lines."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "job.json").write_text("{}")
    (received / "job.json").write_text(json.dumps({"a": "\x1b" * 100_000}))
    shown = CliRunner().invoke(app, ["compare", str(received), str(other)])
    assert (shown.exit_code, len(shown.stdout) < 5000) == (0, True)
