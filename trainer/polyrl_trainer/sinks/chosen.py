"""The sinks that a manifest chooses."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from polyrl.errors import InvalidData
from polyrl.manifest.job import PolyRLJob
from polyrl_trainer.sinks.delivery import Delivery
from polyrl_trainer.sinks.mlflow import MlflowSink
from polyrl_trainer.sinks.packages import missing_for_sinks
from polyrl_trainer.sinks.port import SinkRun
from polyrl_trainer.sinks.tensorboard import TensorBoardSink
from polyrl_trainer.sinks.wandb import WandbSink

MEMORY: Final = "sinks"
"""Folder of a run's folder."""


def deliveries(job: PolyRLJob, folder: Path) -> list[Delivery]:
    """All of them, at work. Raises InvalidData naming the extra that one needs and that is not installed."""
    for field, sentence in missing_for_sinks(job.spec.recipe.logging):
        raise InvalidData(f"recipe.logging.{field}: {sentence}")
    spec, name = job.spec.recipe.logging, job.metadata.name
    run = SinkRun(folder, name, name=folder.name if name in folder.name else name, settings=settings_of(job))
    found = []
    if spec.tensorboard:
        found.append(Delivery("tensorboard", lambda _: TensorBoardSink(folder / "tensorboard"), folder / MEMORY))
    if (wandb := spec.wandb) is not None:
        found.append(Delivery("wandb", lambda known: WandbSink(wandb, run, known), folder / MEMORY))
    if (mlflow := spec.mlflow) is not None:
        found.append(Delivery("mlflow", lambda known: MlflowSink(mlflow, run, known), folder / MEMORY))
    return found


def settings_of(job: PolyRLJob) -> dict[str, Any]:
    """The manifest with its defaults; of the environment of user code only the names."""
    settings = job.spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    settings["recipe"]["env"] = [variable.name for variable in job.spec.recipe.env]
    return settings
