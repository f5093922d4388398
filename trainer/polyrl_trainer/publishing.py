"""Gives each changed state of the policy a version number and makes it available to rollouts.

Version 0 is the initial policy; each publication adds one. Nothing is published twice: unchanged weights keep their
number.
Refuses to hold: transfer (see `publisher`), the decision when to publish (see the loops). Read next: `publisher`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Protocol

import torch

from polyrl_trainer.backend import TrainingBackend
from polyrl_trainer.rollouts import Rollouts
from polyrl_trainer.session import Session


class Published(Protocol):
    """Where a version can be pulled, and what it must hash to."""

    @property
    def endpoint(self) -> str: ...
    @property
    def public_key(self) -> str: ...
    @property
    def manifest_hash(self) -> bytes: ...


class Publisher(Protocol):
    """Serves versions to pullers; `publisher.WeightPublisher` does it over a socket."""

    def publish(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]], files: dict[str, bytes]) -> Published:
        """Keeps a copy of tensors and files; blocks while they are hashed, so it is called on a thread."""
        ...


class PolicyVersions:
    """The newest version, and how the next one comes to be."""

    def __init__(self, publisher: Publisher, rollouts: Rollouts, session: Session) -> None:
        self._publisher = publisher
        self._rollouts = rollouts
        self._session = session
        self._served_here = False

    async def ensure_published(self, backend: TrainingBackend) -> float:
        """Publishes the backend's weights if they are not the newest version already; gives the seconds it took.

        A resumed run publishes again in any case: its publisher and its manager know no versions yet.
        """
        state = self._session.state
        if self._served_here and not state.weights_changed:
            return 0.0
        started = time.monotonic()
        version = state.version + 1
        published = await asyncio.to_thread(self._publish, version, backend)
        await self._rollouts.publish(version, published.endpoint, published.public_key, published.manifest_hash)
        state.version, state.weights_changed, self._served_here = version, False, True
        return time.monotonic() - started

    def _publish(self, version: int, backend: TrainingBackend) -> Published:
        return self._publisher.publish(version, backend.export_weights(), backend.serving_files())
