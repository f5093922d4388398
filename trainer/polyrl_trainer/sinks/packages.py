"""What the sinks of a manifest need that is not installed; imports nothing of an extra, for `polyrl validate` asks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Final

from polyrl.manifest.recipe import LoggingSpec

DATABASES: Final = ("sqlite", "postgresql", "mysql", "mssql")
"""Schemes that mlflow-skinny cannot reach; what it lacks for them is SQLAlchemy."""


def missing_for_sinks(spec: LoggingSpec) -> Iterator[tuple[str, str]]:
    """Field and sentence of each sink that cannot work with what is installed here."""
    for name, chosen in (("wandb", spec.wandb), ("mlflow", spec.mlflow)):
        if chosen is not None and find_spec(name) is None:
            yield name, f"needs {name}, not installed here; pip install 'polyrl[{name}]'"
    uri = "" if spec.mlflow is None else spec.mlflow.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", "")
    if uri.partition(":")[0].partition("+")[0] in DATABASES and find_spec("sqlalchemy") is None:
        yield "mlflow", "a database as trackingUri needs the whole of MLflow; pip install mlflow"
