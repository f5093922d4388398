"""fleet.jsonl of a run that was killed and resumed, and of one whose disk is full for a while."""

import errno
from pathlib import Path
from typing import Any

import pytest

from polyrl.history.fleet import seconds_by_pool, worker_lives
from polyrl.sample import Pool
from polyrl_cli.report.timeline import Timeline, read_timeline


def test_whoever_was_there_before_a_kill_is_not_held_until_the_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, now = tmp_path / "fleet.jsonl", 1000.0
    monkeypatch.setattr("polyrl_cli.report.timeline.time.time", lambda: now)
    for now, worker in ((1000.0, "rollout-0"), (2000.0, "rollout-1")):
        timeline = Timeline(file, lambda: now, lambda event: None)  # noqa: B023 - used within its turn
        timeline.note("started", worker, f"start {worker}")
        now += 30.0
        timeline.note("serving", worker, f"{worker} serves")
        timeline.close()
    events = read_timeline(file)
    assert seconds_by_pool(events, until=2050.0) == {Pool.SPOT: 30.0 + 50.0}
    assert [life.ended for life in worker_lives(events, 1000.0)] == [30.0, None]


def test_what_a_full_disk_refused_is_written_once_it_has_room_and_ends_no_run(tmp_path: Path) -> None:
    """A loss that is not in the file is not in the summary, either."""

    class Disk:
        room = 0

        def __init__(self, file: Any) -> None:
            self.file = file

        def write(self, data: bytes) -> int:
            if not self.room:
                raise OSError(errno.ENOSPC, "No space left on device")
            written: int = self.file.write(data[: self.room])
            return written

    def shown(event: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    timeline = Timeline(tmp_path / "fleet.jsonl", lambda: 0.0, shown)
    disk = timeline._file = Disk(timeline._file)  # type: ignore[assignment]
    for worker, room in (("a", 0), ("b", 30), ("c", 0), ("d", 1 << 20)):
        disk.room = room
        timeline.note("reclaimed", worker, "is gone")
    disk.file.close()
    events = read_timeline(tmp_path / "fleet.jsonl")
    assert [event.worker for event in events if event.kind == "reclaimed"] == ["a", "b", "c", "d"]
