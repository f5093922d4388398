"""Weights & Biases: history over a step of our own, settings, a table of samples, results as the run's summary.

W&B drops history whose own step goes back, so it counts that itself, and everything is drawn over `global_step`.
Where its server cannot be reached at the start, the run is written to the disk instead, for `wandb sync`.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import structlog

from polyrl.manifest.recipe import WandbSpec
from polyrl_trainer.sinks.delivery import words_of
from polyrl_trainer.sinks.port import GLOBAL_STEP, MetricRow, SinkRun, Texts

if TYPE_CHECKING:
    from wandb.sdk.wandb_run import Run

log = structlog.get_logger()

ID_BYTES: Final = 6
"""Bytes of a run's id in W&B, which is random."""
INIT_TIMEOUT_S: Final = 30.0
"""For the server's first answer; W&B's own default is 90 s."""
FINISH_TIMEOUT_S: Final = 45.0
"""For what is still to be uploaded at the end; it lies on the disk as well."""
FLUSH_S: Final = 1.0
"""How often W&B's own process writes what it has to the disk. Its default is 15 s, and what it has not written when it
is killed is gone: every row of a short run."""
OFFLINE_SETTLES_S: Final = 2 * FLUSH_S
"""A row that W&B was given is on the disk by then."""
ONLINE_SETTLES_S: Final = 20.0
"""Its server has it by then: W&B sends every 15 s."""
TABLE_ROWS: Final = 100
"""Rows of one evaluation; samples.jsonl has all."""
COLUMNS: Final = (
    *("step", "stage", "sample", "chosen", "reward", "metrics", "advantage", "finish", "versions"),
    *("prompt", "response"),
)
DEFAULT_PROJECT: Final = "polyrl"


class WandbSink:
    """One run there, new or gone on with."""

    def __init__(self, spec: WandbSpec, run: SinkRun, known_id: str) -> None:
        import wandb

        self.id = known_id or secrets.token_hex(ID_BYTES)
        try:
            self._run = _init(spec, run, self.id, spec.mode)
        except Exception as error:  # noqa: BLE001 - no key, no network, no such entity: whatever it raises
            wandb.teardown()  # else this id counts as in use in here
            self._run = _init(spec, run, self.id, "offline")
            log.warning(
                "W&B cannot be written to; the run goes to the disk, for `wandb sync` later",
                folder=str(run.folder / "wandb"),
                why=words_of(error),
            )
        self.settles_s = OFFLINE_SETTLES_S if self._run.offline else ONLINE_SETTLES_S
        self._run.define_metric(GLOBAL_STEP, hidden=True)
        self._run.define_metric("*", step_metric=GLOBAL_STEP)

    def write(self, row: MetricRow) -> None:
        self._run.log({GLOBAL_STEP: row.step, **row.values})

    def write_texts(self, texts: Texts) -> None:
        import wandb

        rows = [
            [
                *(texts.step, one.stage, one.sample, ", ".join(one.chosen), one.reward, json.dumps(one.metrics)),
                *(one.advantage, one.finish.value, ", ".join(map(str, one.versions)), one.prompt, one.response),
            ]
            for one in texts.records[:TABLE_ROWS]
        ]
        table = wandb.Table(columns=list(COLUMNS), data=rows, allow_mixed_types=True)
        self._run.log({GLOBAL_STEP: texts.step, texts.phase: table})

    def finish(self, outcome: str, results: Mapping[str, Any]) -> None:
        self._run.summary.update({"outcome": outcome, **results})
        self._run.finish(exit_code=1 if outcome == "failed" else 0)


def _init(spec: WandbSpec, run: SinkRun, run_id: str, mode: str | None) -> Run:
    import wandb

    # A run of its own: code of the user's that calls wandb.init or wandb.log has another one. What user code prints
    # stays in its log; W&B would take over the process's output otherwise.
    settings = wandb.Settings(
        silent=True,
        console="off",
        disable_git=True,
        init_timeout=INIT_TIMEOUT_S,
        finish_timeout=FINISH_TIMEOUT_S,
        finish_timeout_raises=True,
        x_transaction_log_flush_interval=FLUSH_S,
    )
    return wandb.init(
        project=spec.project or os.environ.get("WANDB_PROJECT") or DEFAULT_PROJECT,
        entity=spec.entity,
        name=spec.name or run.name,
        group=spec.group or run.job,
        tags=list(spec.tags),
        id=run_id,
        resume="allow",
        reinit="create_new",
        dir=str(run.folder),
        mode=mode,  # type: ignore[arg-type]
        config=dict(run.settings),
        settings=settings,
    )
