"""A finished run as its trainer's stand-in recorded it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec


class Client:
    """The trainer's own account: every batch it was given and every group of which it learnt that it is dropped."""

    def __init__(self, run: Path) -> None:
        lines = (run / "batches.jsonl").read_bytes().splitlines()
        batches: list[dict[str, Any]] = [msgspec.json.decode(line) for line in lines]
        self.samples: list[dict[str, Any]] = [sample for batch in batches for sample in batch["samples"]]
        self.longest_next: float = max(batch["waitedSeconds"] for batch in batches)
        last: dict[str, Any] = msgspec.json.decode((run / "client.json").read_bytes())
        self.groups: list[int] = last["groups"]
        self.dropped: list[dict[str, Any]] = last["dropped"]
        self.next_deadline_s: float = last["nextDeadlineSeconds"]
