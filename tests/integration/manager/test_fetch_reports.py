"""What a trainer's pod tells of its fetch, before there is a trainer: in the status, bounded, then forgotten."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from polyrl.status import MAX_FETCHES, FetchStatus
from polyrl.wire import FetchReport
from polyrl_trainer.fetch.told_manager import ToldManager


def told(site: Any, folder: Path) -> ToldManager:
    (folder / "manager.json").write_bytes(msgspec.json.encode(site.manager.endpoints))
    return ToldManager(folder / "manager.json", site.keys / "trainer.key")


async def test_it_is_in_the_status_until_a_trainer_greets(site: Any, tmp_path: Path) -> None:
    teller, last = told(site, tmp_path), f"pod-{MAX_FETCHES + 4}"
    for number in range(MAX_FETCHES + 5):
        await asyncio.to_thread(teller.tell, FetchReport(f"pod-{number}", "hf://o/n", fetched=number, total=999))
    await site.eventually(lambda: site.manager.status().fetches[-1:] and site.manager.status().fetches[-1].pod == last)
    teller.close()
    fetches = site.manager.status().fetches
    assert len(fetches) == MAX_FETCHES
    assert fetches[-1] == FetchStatus(pod=last, place="hf://o/n", fetched=MAX_FETCHES + 4, total=999)
    assert not site.manager.status().trainer_connected, "no greeting"
    async with site.client():
        await site.eventually(lambda: not site.manager.status().fetches)


async def test_nobody_to_tell_is_no_end_of_a_fetch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    teller = ToldManager(tmp_path / "manager.json", tmp_path / "trainer.key")
    await asyncio.to_thread(teller.tell, FetchReport("p", "hf://o/n", fetched=1, total=0))
    assert "was not told" in capsys.readouterr().out
