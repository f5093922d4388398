"""Whatever a sink's library says of an address, the account in it is in no log."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from polyrl.manifest.recipe import WandbSpec
from polyrl_trainer.sinks import wandb as wandb_sink
from polyrl_trainer.sinks.delivery import words_of
from polyrl_trainer.sinks.port import SinkRun


@pytest.mark.parametrize(
    ("raised", "shown"),
    [
        ("no http://me:p@ss@host:1/api", "no http://host:1/api"),
        # SQLAlchemy, by which MLflow reaches databases, takes such passwords.
        ("unsupported URI 'postgresql://me:p4/ss@host/db'", "unsupported URI 'postgresql://host/db'"),
        ("Invalid url: http://me:p/@ss@host/", "Invalid url: http://host/"),
        ("http://me:p4@one and http://me:p4@other", "http://one and http://other"),
        ("http://host/path of me@host", "http://host/path of me@host"),
    ],
)
def test_an_address_loses_its_account(raised: str, shown: str) -> None:
    assert words_of(ConnectionError(raised)) == f"ConnectionError: {shown}"


def test_why_wandb_goes_to_the_disk_names_no_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(spec: Any, run: Any, run_id: str, mode: str | None) -> Any:
        if mode != "offline":
            raise ConnectionError("no http://me:p4/ss@host")  # WANDB_BASE_URL
        return SimpleNamespace(offline=True, define_metric=lambda *names, **more: None)

    monkeypatch.setattr(wandb_sink, "_init", init)
    with capture_logs() as logged:
        wandb_sink.WandbSink(WandbSpec(), SinkRun(tmp_path, "j", name="n", settings={}), "")
    assert [one["why"] for one in logged] == ["ConnectionError: no http://host"]
