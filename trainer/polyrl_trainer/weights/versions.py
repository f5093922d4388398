"""Gives each changed state of the policy a version number and makes it available to rollouts.

Version 0 is the initial policy; each publication adds one. Nothing is published twice: unchanged weights keep their
number, also when a trainer that has started again from a checkpoint finds them at the manager; other weights never get
a number that was given out before.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from polyrl_trainer.backend import TrainingBackend
from polyrl_trainer.rollouts import Rollouts
from polyrl_trainer.session import Session
from polyrl_trainer.weights.publisher import PublishedWeights, WeightPublisher


@dataclass(eq=False)
class PolicyVersions:
    """The newest version, and how the next one comes to be."""

    publisher: WeightPublisher
    rollouts: Rollouts
    session: Session
    newest: tuple[int, bytes] = (-1, b"")
    """The version, and its manifest's hash, that the manager knew when this trainer came."""
    _served_here: bool = False

    async def ensure_published(self, backend: TrainingBackend) -> float:
        """Publishes the backend's weights if they are not the newest version already; gives the seconds it took.

        A resumed run publishes again in any case: its publisher and its manager know no versions yet.
        """
        state = self.session.state
        if self._served_here and not state.weights_changed:
            return 0.0
        started = time.monotonic()
        version, published = await asyncio.to_thread(self._publish_next, state.version, backend)
        await self.rollouts.publish(version, published.endpoint, published.public_key, published.manifest_hash)
        state.version, state.weights_changed, self._served_here = version, False, True
        return time.monotonic() - started

    def _publish_next(self, last: int, backend: TrainingBackend) -> tuple[int, PublishedWeights]:
        """The number that these weights get, and where they are."""
        newest, known = self.newest
        self.newest = (-1, b"")
        if newest >= 0:
            published = self._publish(newest, backend)
            if published.manifest_hash == known:
                return newest, published
        version = max(last, newest) + 1
        return version, self._publish(version, backend)

    def _publish(self, version: int, backend: TrainingBackend) -> PublishedWeights:
        return self.publisher.publish(version, backend.export_weights(), backend.serving_files())
