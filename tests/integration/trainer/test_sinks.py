"""Sinks of metrics: none stalls or ends a run, each row arrives once, and what arrives can be read back."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from polyrl.manifest.recipe import MlflowSpec, WandbSpec
from polyrl.sample import Finish, Purpose
from polyrl.sample_record import SampleRecord
from polyrl.testing.started import StartedProcess, ran
from polyrl_cli.local.ownership import take_over
from polyrl_cli.manifests.load import load_manifest
from polyrl_operator.secret import write_run_keys
from polyrl_trainer.metrics import EARLIER_ROWS, MetricsLogger
from polyrl_trainer.session import RESULT
from polyrl_trainer.sinks import delivery
from polyrl_trainer.sinks.delivery import Delivery, SinkReport
from polyrl_trainer.sinks.mlflow import MlflowSink
from polyrl_trainer.sinks.port import Entry, MetricRow, SinkRun, Texts
from polyrl_trainer.sinks.tensorboard import TensorBoardSink
from polyrl_trainer.sinks.wandb import WandbSink

EXAMPLE = Path(__file__).parents[3] / "examples" / "sort-digits"
DEADLINE_S = 120
RECORD = SampleRecord(
    time=1.0, purpose=Purpose.TRAIN, stage="rl", step=1, sample="1.0", group=1, reward=0.5, metrics={"length": 3.0},
    finish=Finish.STOP, versions=(0, 1), prompt_tokens=1, response_tokens=1, prompt="1+1=", response="2",
)  # fmt: skip


class MemorySink:
    id = "run-1"

    def __init__(self, fails: int = 0, blocks: threading.Event | None = None, settles_s: float = 0.0) -> None:
        self.settles_s = settles_s
        self.entries: list[Entry] = []
        self.outcome = ""
        self._fails, self._blocks = fails, blocks

    def write(self, row: MetricRow) -> None:
        if self._blocks is not None:
            self._blocks.wait(DEADLINE_S)
        if self._fails:
            self._fails -= 1
            raise ConnectionError("nobody there")
        self.entries.append(row)

    def write_texts(self, texts: Texts) -> None:
        self.entries.append(texts)

    def finish(self, outcome: str, results: Mapping[str, Any]) -> None:
        self.outcome = outcome


def finished(logger: MetricsLogger, outcome: str = "done") -> SinkReport:
    return logger.close(outcome)["memory"]


def logger(run: Path, sink: MemorySink) -> MetricsLogger:
    return MetricsLogger(run, [Delivery("memory", lambda known: sink, run / "sinks", retry_s=0.0)])


def test_a_row_that_fails_is_tried_again_and_one_that_always_does_is_counted(tmp_path: Path) -> None:
    sink = MemorySink(fails=2)
    metrics = logger(tmp_path, sink)
    metrics.log("rl", 1, {"loss": 1.0})
    metrics.log_samples([RECORD])
    assert finished(metrics) == SinkReport(2, 0, "ConnectionError: nobody there")
    assert [entry.phase for entry in sink.entries] == ["rl", "samples/train"]
    assert sink.outcome == "done"
    metrics = logger(tmp_path / "broken", MemorySink(fails=delivery.ATTEMPTS + 2))
    metrics.log("rl", 1, {"loss": 1.0})
    metrics.log("rl", 2, {"loss": 1.0})
    report = finished(metrics)
    assert (report.written, report.lost) == (1, 1)


def test_a_sink_that_cannot_be_opened_loses_its_rows_and_nothing_else(tmp_path: Path) -> None:
    def refuse(known: str) -> MemorySink:
        raise ConnectionError("no route")

    metrics = MetricsLogger(tmp_path, [Delivery("memory", refuse, tmp_path / "sinks", retry_s=0.0)])
    for step in range(1, 4):
        metrics.log("rl", step, {"loss": 1.0})
    assert finished(metrics) == SinkReport(0, 3, "ConnectionError: no route")
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_sink_that_hangs_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyrl_trainer.metrics.DELIVERY_DEADLINE_S", 0.2)
    released = threading.Event()
    metrics = logger(tmp_path, MemorySink(blocks=released))
    began = time.monotonic()
    for step in range(1, delivery.QUEUE_ENTRIES + 100):
        metrics.log("rl", step, {"loss": 1.0})
    report = finished(metrics)
    assert time.monotonic() - began < 5
    assert (report.written, report.lost) == (0, delivery.QUEUE_ENTRIES + 99)
    released.set()


def test_steps_that_are_trained_again_are_not_sent_twice(tmp_path: Path) -> None:
    first, second = MemorySink(), MemorySink()
    metrics = logger(tmp_path, first)
    for step in range(1, 8):
        metrics.log("rl", step, {"loss": 1.0}, before=10)
    metrics.log("eval", 6, {"eval/reward": 1.0}, before=10)
    finished(metrics, "stopped")
    metrics = logger(tmp_path, second)
    for step in range(6, 10):
        metrics.log("rl", step, {"loss": 1.0}, before=10)
    metrics.log("eval", 6, {"eval/reward": 1.0}, before=10)
    metrics.log("eval", 8, {"eval/reward": 1.0}, before=10)
    finished(metrics)
    assert [(entry.phase, entry.step) for entry in second.entries] == [("rl", 18), ("rl", 19), ("eval", 18)]
    assert json.loads((tmp_path / "sinks" / "memory.json").read_bytes())["id"] == "run-1"


def test_a_step_that_was_lost_is_sent_when_it_is_trained_again(tmp_path: Path) -> None:
    metrics = logger(tmp_path, MemorySink(fails=delivery.ATTEMPTS))
    for step in range(1, 4):
        metrics.log("rl", step, {"loss": 1.0})
    assert finished(metrics, "stopped").lost == 1
    again = MemorySink()
    metrics = logger(tmp_path, again)
    for step in range(1, 5):
        metrics.log("rl", step, {"loss": 1.0})
    finished(metrics)
    assert [entry.step for entry in again.entries] == [1, 4]


def test_rows_that_a_killed_process_had_just_sent_are_sent_again(tmp_path: Path) -> None:
    """W&B writes what it was given a second later, so what `write` took may be gone."""
    killed, second = MemorySink(settles_s=DEADLINE_S), MemorySink()
    metrics = logger(tmp_path, killed)
    metrics.log("sft", 1, {"loss": 1.0})
    metrics.log("eval", 1, {"eval/reward": 0.1})
    metrics.log("eval", 0, {"eval/reward": 0.2}, before=1)
    metrics.log("rl", 1, {"loss": 2.0}, before=1)
    metrics.log("eval", 1, {"eval/reward": 0.3}, before=1)
    finished(metrics, "")  # as a kill does, it leaves the sink's run open
    assert len(killed.entries) == 5
    metrics = logger(tmp_path, second)
    metrics.log("rl", 2, {"loss": 1.0}, before=1)
    finished(metrics)
    assert second.entries[:5] == killed.entries
    assert [(entry.phase, entry.step) for entry in second.entries[5:]] == [("rl", 3)]
    third = MemorySink()
    finished(logger(tmp_path, third))
    assert not third.entries, "an end that the sink has taken settles all"


def test_a_sink_that_is_new_in_a_resumed_run_gets_what_it_can_hold_and_loses_nothing(tmp_path: Path) -> None:
    metrics, sink = MetricsLogger(tmp_path), MemorySink()
    for step in range(1, delivery.QUEUE_ENTRIES + 100):
        metrics.log("rl", step, {"loss": 1.0})
    metrics.close("stopped")
    report = finished(logger(tmp_path, sink))
    assert (report.written, report.lost) == (EARLIER_ROWS, 0)
    assert sink.entries[-1].step == delivery.QUEUE_ENTRIES + 99


class SpeechlessError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


NAMED = [
    (SystemExit(3), "SystemExit: 3"),
    (SpeechlessError(), "SpeechlessError"),
    # Of MLFLOW_TRACKING_URI: what it says is in the trainer's log, the closing panel and summary.json.
    (ConnectionError("to http://me:p@ss@host:1/api failed"), "ConnectionError: to http://host:1/api failed"),
]


@pytest.mark.parametrize(("error", "words"), NAMED)
def test_whatever_a_library_raises_costs_one_row_and_is_named(tmp_path: Path, error: BaseException, words: str) -> None:
    class Raising(MemorySink):
        def write(self, row: MetricRow) -> None:
            if row.step == 1:
                raise error
            super().write(row)

    metrics = logger(tmp_path, Raising())
    for step in range(1, 4):
        metrics.log("rl", step, {"loss": 1.0})
    assert finished(metrics) == SinkReport(2, 1, words)


def test_a_store_of_files_takes_odd_names_and_no_point_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    run = SinkRun(job="job", name="run", folder=tmp_path, settings={})
    sink = MlflowSink(MlflowSpec(), run, "")
    values = {"q": 1.0, "q/r": 2.0, "a//b": 3.0, "x" * 300: 4.0, "é": 5.0}
    log_batch, calls = MlflowClient.log_batch, []

    def broken_once(self: MlflowClient, *given: Any, **more: Any) -> Any:
        calls.append(more)
        if len(calls) == 3:
            raise ConnectionError("the disk is away")
        return log_batch(self, *given, **more)

    monkeypatch.setattr(MlflowClient, "log_batch", broken_once)
    metrics = MetricsLogger(tmp_path, [Delivery("memory", lambda known: sink, tmp_path / "sinks", retry_s=0.0)])
    metrics.log("rl", 1, values)
    assert finished(metrics).lost == 0
    client = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    kept = client.get_run(sink.id).data.metrics
    assert sorted(kept.values()) == [1, 2, 3, 4, 5]
    assert [len(client.get_metric_history(sink.id, name)) for name in kept] == [1] * 5


def test_wandb_has_the_texts_of_a_step_as_a_table(tmp_path: Path) -> None:
    import wandb

    sink = WandbSink(WandbSpec(mode="offline"), SinkRun(job="job", name="run", folder=tmp_path, settings={}), "")
    metrics = MetricsLogger(tmp_path, [Delivery("memory", lambda known: sink, tmp_path / "sinks")])
    metrics.log("rl", 1, {"loss": 1.0})
    metrics.log_samples([RECORD])
    assert finished(metrics) == SinkReport(2, 0)
    wandb.teardown()  # its writer is a process of its own, and may still write when `finish` is over
    records = [record for file in tmp_path.glob("wandb/offline-run-*/run-*.wandb") for record in wandb_records(file)]
    items = [item for record in records if record.HasField("history") for item in record.history.item]
    table = {item.nested_key[1]: json.loads(item.value_json) for item in items if item.nested_key[0] == "samples/train"}
    assert (table["_type"], table["nrows"]) == ("table-file", 1)
    (file,) = tmp_path.glob(f"wandb/offline-run-*/files/{table['path']}")
    written = json.loads(file.read_bytes())
    row = dict(zip(written["columns"], written["data"][0], strict=True))
    assert (row["prompt"], row["response"], row["reward"], row["step"]) == ("1+1=", "2", 0.5, 1)
    assert (row["metrics"], row["finish"], row["versions"]) == ('{"length": 3.0}', "stop", "0, 1")


KILLED = """
import os, signal, subprocess, sys, time
from pathlib import Path
from polyrl.manifest.recipe import WandbSpec
from polyrl_trainer.metrics import MetricsLogger
from polyrl_trainer.sinks.delivery import Delivery
from polyrl_trainer.sinks.port import SinkRun
from polyrl_trainer.sinks.wandb import WandbSink
folder = Path(sys.argv[1])
run = SinkRun(folder, "job", name="run", settings={})
sink = Delivery("wandb", lambda known: WandbSink(WandbSpec(mode="offline"), run, known), folder / "sinks")
metrics = MetricsLogger(folder, [sink])
for step in map(int, sys.argv[2].split()):
    metrics.log("rl", step, {"loss": 1.0})
while sink._written < len(sys.argv[2].split()):
    time.sleep(0.01)
if sys.argv[3] == "killed":
    (writer,) = subprocess.check_output(["pgrep", "-f", f"wandb-core .*--pid {os.getpid()}"]).split()
    os.kill(int(writer), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
metrics.close("done")
"""


@pytest.mark.slow
def test_a_wandb_run_whose_processes_were_all_killed_goes_on_as_one_and_whole(tmp_path: Path) -> None:
    (tmp_path / "killed.py").write_text(KILLED)
    script = (sys.executable, "-m", "polyrl.testing.script", tmp_path / "killed.py", tmp_path)
    assert StartedProcess([*script, "1 2 3", "killed"]).wait(DEADLINE_S) == -signal.SIGKILL
    take_over(tmp_path)  # as the command that resumes it does
    assert StartedProcess([*script, "4 5", "ended"]).wait(DEADLINE_S) == 0
    files = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert len({file.name for file in files}) == 1
    rows = [record.history.item for file in files for record in wandb_records(file) if record.HasField("history")]
    steps = [
        json.loads(item.value_json) for row in rows for item in row if "global_step" in (item.key, *item.nested_key)
    ]
    assert sorted(set(steps)) == [1, 2, 3, 4, 5]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_has_each_tag_once_per_step_and_no_name_twice(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def open_sink(known: str) -> TensorBoardSink:
        return TensorBoardSink(tmp_path / "tensorboard")

    for steps in (range(1, 4), range(2, 6)):
        metrics = MetricsLogger(tmp_path, [Delivery("tensorboard", open_sink, tmp_path / "sinks")])
        for step in steps:
            metrics.log("sft", step, {"sft/loss": 1.0, "actor/lr": 1.0})
        metrics.log("eval", 5, {"eval/reward": 1.0})
        metrics.log("rl", 5, {"actor/lr": 1.0, "reward/mean": 1.0}, before=5)
        metrics.log("eval", 5, {"eval/reward": 1.0}, before=5)
        metrics.log_samples([RECORD], before=5)
        metrics.close("done")
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    tags = read.Tags()["scalars"]
    assert sorted(tags) == ["actor/lr", "eval/reward", "reward/mean", "sft/loss"]
    # Two files of one second and one process are read in no certain order.
    steps_of = {tag: sorted(event.step for event in read.Scalars(tag)) for tag in tags}
    assert steps_of["sft/loss"] == [1, 2, 3, 4, 5]
    assert steps_of["actor/lr"].count(10) == 1
    assert max(count for steps in steps_of.values() for count in Counter(steps).values()) == 1


def trained(folder: Path, steps: int) -> dict[str, Any]:
    """Runs the trainer's process on supervised steps; gives its result."""
    sets = {
        "mode": "sft",
        "sft.steps": steps,
        "checkpoint.everySteps": 2,
        "evaluation.everySteps": 0,
        "data.eval": "[]",
        "logging.wandb": "{project: digits, mode: offline, tags: [test]}",
        "logging.mlflow": "{experiment: digits}",
    }
    job = load_manifest(
        EXAMPLE / "job.yaml",
        [f"spec.recipe.{path}={value}" for path, value in sets.items()] + ["spec.faultInjection=[]"],
    )
    (folder / "job.json").write_text(job.model_dump_json(by_alias=True, exclude_none=True))
    argv = [sys.executable, "-m", "polyrl_trainer", "--job", f"{folder}/job.json", "--epoch", "1"]
    argv += ["--manifest-dir", str(EXAMPLE), "--run", f"{folder}/run", "--keys", f"{folder}/keys/trainer.key"]
    env = {name: text for name, text in os.environ.items() if not name.startswith(("WANDB_", "MLFLOW_"))}
    ended = ran(argv, timeout_s=DEADLINE_S, env=env)
    assert ended.returncode == 0, ended.stderr
    return json.loads((folder / "run" / RESULT).read_text())


@pytest.mark.slow
def test_a_run_that_goes_on_from_an_earlier_checkpoint_is_one_run_everywhere(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    write_run_keys(tmp_path / "keys")
    assert trained(tmp_path, steps=5)["sinks"]["wandb"] == {"written": 5, "lost": 0, "error": ""}
    newest = tmp_path / "run" / "checkpoints" / "sft-step-000005"
    for file in sorted(newest.rglob("*"), reverse=True):
        file.unlink() if file.is_file() else file.rmdir()
    newest.rmdir()
    result = trained(tmp_path, steps=6)
    assert {name: (one["written"], one["lost"]) for name, one in result["sinks"].items()} == dict.fromkeys(
        ("tensorboard", "wandb", "mlflow"), (1, 0)
    )
    wandb_has_one_run_of_six_steps(tmp_path / "run")
    mlflow_has_one_run_of_six_steps(tmp_path / "run" / "mlruns")


def wandb_has_one_run_of_six_steps(run: Path) -> None:
    files = sorted(run.glob("wandb/offline-run-*/run-*.wandb"))
    assert len({file.name for file in files}) == 1
    assert len(files) == 2
    records = [record for file in files for record in wandb_records(file)]
    began = next(record.run for record in records if record.HasField("run"))
    config = {item.key: json.loads(item.value_json) for item in began.config.update}
    assert (began.project, began.run_group, list(began.tags)) == ("digits", "sort-digits", ["test"])
    assert config["recipe"]["sft"]["steps"] == 5
    rows = [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    assert [row["global_step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(row["sft/loss"] > 0 for row in rows)


def wandb_records(file: Path) -> Iterator[Any]:
    """Reads LevelDB's log format after W&B's seven bytes: blocks of 32 KiB; chunks with checksum, size and kind. W&B
    ships no reader for Python any more."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768  # the rest of a block that no chunk's head fits into
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def mlflow_has_one_run_of_six_steps(store: Path) -> None:
    runs = [meta.parent for meta in store.glob("*/*/meta.yaml")]
    assert len(runs) == 1
    steps = [int(line.split()[2]) for line in (runs[0] / "metrics" / "sft" / "loss").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert (runs[0] / "params" / "recipe.sft.steps").read_text() == "5"
    assert (runs[0] / "metrics" / "summary" / "steps" / "sft").exists()
