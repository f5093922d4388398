"""Frames that were dropped are counted and logged, and a flood of them is not a flood of lines."""

from __future__ import annotations

from typing import Any

from structlog.testing import capture_logs

from polyrl_trainer.client.link import ManagerLink
from polyrl_trainer.dropped_messages import DroppedMessages


def test_the_first_is_logged_and_then_ever_fewer() -> None:
    dropped = DroppedMessages("frames")
    with capture_logs() as lines:
        for number in range(1000):
            dropped.add(f"frame {number} is odd")
    assert dropped.count == 1000
    assert [line["count"] for line in lines] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    logged = {"event": "dropped", "log_level": "warning", "what": "frames", "count": 1, "why": "frame 0 is odd"}
    assert lines[0] == logged


async def test_a_trainer_warns_of_a_manager_that_it_cannot_read() -> None:
    unused: Any = None
    link = ManagerLink(unused, unused, unused, max_manager_outage_s=1.0)
    with capture_logs() as lines:
        for _ in range(3):
            link._handle(b"\xc1")
    link._context.destroy()
    assert link.undecodable.count == 3
    assert [line["count"] for line in lines] == [1, 2]
    assert "not a frame" in lines[0]["why"]
