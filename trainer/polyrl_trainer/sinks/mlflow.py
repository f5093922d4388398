"""MLflow's tracking, by its client alone: metrics over the step, settings as parameters, results at the end."""

from __future__ import annotations

import hashlib
import math
import os
import re
import time
from collections.abc import Mapping
from typing import Any, Final

from polyrl.manifest.recipe import MlflowSpec
from polyrl_trainer.sinks.port import MetricRow, SinkRun, Texts, by_path

TIMEOUT_S: Final = 10
"""Longest time of one request; MLflow's own default is 120 s."""
RETRIES: Final = 1
"""By MLflow itself; `delivery` tries again as well."""
METRICS_AT_ONCE: Final = 1000
PARAMS_AT_ONCE: Final = 100
"""Most that a server takes in one request."""
MAX_PARAM_CHARS: Final = 6000
"""Characters of a parameter's value in MLflow."""
STATUS_OF: Final = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
MAX_KEY_CHARS: Final = 250
"""Characters of a name in MLflow."""
DIGEST_CHARS: Final = 16
"""Characters of a longer name's hash, which keeps names apart that begin alike."""
_FOREIGN: Final = re.compile(r"[^\w.\-/ ]", re.ASCII)


class MlflowSink:
    """One run there, new or gone on with."""

    settles_s = 0.0

    def __init__(self, spec: MlflowSpec, run: SinkRun, known_id: str) -> None:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(TIMEOUT_S))
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", str(RETRIES))
        uri = spec.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or (run.folder / "mlruns").as_uri()
        if uri.startswith("file:"):
            # MLflow prefers databases and asks who wants files to say so. They need no package beside mlflow-skinny.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=uri)
        self._names = Names()
        # Files are written one by one: what a failed row had written is there, and must not be written again.
        self._at_once = 1 if uri.startswith("file:") else METRICS_AT_ONCE
        self._sent: tuple[tuple[int, int], set[str]] = ((-1, -1), set())
        self.id = known_id
        self._step = 0
        if known_id:
            self._client.update_run(known_id, status="RUNNING")
        else:
            self.id = self._create(spec, run)

    def write(self, row: MetricRow) -> None:
        self._step = row.step
        self._log(row.values, row.step, row.time)

    def write_texts(self, texts: Texts) -> None:
        """It has no place for texts that grow with the run; samples.jsonl has them."""

    def finish(self, outcome: str, results: Mapping[str, Any]) -> None:
        numbers = {f"summary/{name}": value for name, value in results.items() if isinstance(value, int | float)}
        self._log(numbers, self._step, time.time())
        self._client.set_terminated(self.id, STATUS_OF[outcome])

    def _create(self, spec: MlflowSpec, run: SinkRun) -> str:
        from mlflow.entities import Param

        name = spec.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.job
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(name)
        tags = {"polyrl.job": run.job}
        made = self._client.create_run(experiment, run_name=spec.run_name or run.name, tags=tags)
        params = [Param(key(path), str(value)[:MAX_PARAM_CHARS]) for path, value in by_path(run.settings, ".").items()]
        for first in range(0, len(params), PARAMS_AT_ONCE):
            self._client.log_batch(made.info.run_id, params=params[first : first + PARAMS_AT_ONCE])
        return str(made.info.run_id)

    def _log(self, values: Mapping[str, float], step: int, unix_time: float) -> None:
        from mlflow.entities import Metric

        milliseconds = int(unix_time * 1000)
        if self._sent[0] != (step, milliseconds):
            self._sent = ((step, milliseconds), set())
        left = [name for name, value in values.items() if math.isfinite(value) and name not in self._sent[1]]
        for first in range(0, len(left), self._at_once):
            names = left[first : first + self._at_once]
            metrics = [Metric(self._names.place(name), float(values[name]), milliseconds, step) for name in names]
            self._client.log_batch(self.id, metrics=metrics)
            self._sent[1].update(names)


class Names:
    """Keys of the metrics of one run: what is a metric is no folder of others, which a store of files cannot have."""

    def __init__(self) -> None:
        self._metrics: dict[str, str] = {}
        self._folders: set[str] = set()

    def place(self, name: str) -> str:
        """The name's key, the same each time."""
        if name not in self._metrics:
            found = key(name)
            if not _above(found).isdisjoint(self._metrics.values()):
                found = found.replace("/", _number("/"))
            self._metrics[name] = f"{found}_" if found in self._folders else found
            self._folders |= _above(found)
        return self._metrics[name]


def key(name: str) -> str:
    """A name that MLflow takes; a character that it does not stands as its number, so that no two names meet."""
    parts = (_FOREIGN.sub(lambda found: _number(found[0]), part) for part in name.split("/"))
    whole = "/".join(part if part.strip(". ") else f"_{part.strip()}" for part in parts)
    if len(whole) <= MAX_KEY_CHARS:
        return whole
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:DIGEST_CHARS]
    return f"{whole[: MAX_KEY_CHARS - DIGEST_CHARS - 1].rstrip('/. ')}_{digest}"


def _number(character: str) -> str:
    return f"_{ord(character):x}_"


def _above(found: str) -> set[str]:
    """The folders in which it lies."""
    return {found[:at] for at, character in enumerate(found) if character == "/"}
