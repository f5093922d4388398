"""What a trainer's pod reports of its fetch, before there is a trainer: in the status, bounded, then forgotten."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from polyrl.status import MAX_FETCHES, FetchStatus
from polyrl.wire import FetchReport
from polyrl_trainer.fetch.to_manager import ToManager


def reporter(site: Any, folder: Path) -> ToManager:
    (folder / "manager.json").write_bytes(msgspec.json.encode(site.manager.endpoints))
    return ToManager(folder / "manager.json", site.keys / "trainer.key")


async def test_it_is_in_the_status_until_a_trainer_greets(site: Any, tmp_path: Path) -> None:
    sender, last = reporter(site, tmp_path), f"pod-{MAX_FETCHES + 4}"
    for number in range(MAX_FETCHES + 5):
        await asyncio.to_thread(sender.report, FetchReport(f"pod-{number}", "hf://o/n", fetched=number, total=999))
    await site.eventually(lambda: site.manager.status().fetches[-1:] and site.manager.status().fetches[-1].pod == last)
    sender.close()
    fetches = site.manager.status().fetches
    assert len(fetches) == MAX_FETCHES
    assert fetches[-1] == FetchStatus(pod=last, place="hf://o/n", fetched=MAX_FETCHES + 4, total=999)
    assert not site.manager.status().trainer_connected, "no greeting"
    async with site.client():
        await site.eventually(lambda: not site.manager.status().fetches)


async def test_without_a_manager_there_is_no_end_of_a_fetch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sender = ToManager(tmp_path / "manager.json", tmp_path / "trainer.key")
    await asyncio.to_thread(sender.report, FetchReport("p", "hf://o/n", fetched=1, total=0))
    assert "could not be reported" in capsys.readouterr().out
