"""Which version the policy is, and which number it gets next."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from polyrl.weights import WeightsRef
from polyrl_trainer.backend import TrainingBackend
from polyrl_trainer.rollouts import Rollouts
from polyrl_trainer.session import Session
from polyrl_trainer.weights.publisher import WeightPublisher


@dataclass(eq=False)
class PolicyVersions:
    """Gives each changed state of the policy a version number and makes it available to rollouts.

    Version 0 is the initial policy; each publication adds one. Unchanged weights keep their number, also when a trainer
    that has started again from a checkpoint finds them at the manager; other weights never get a number that was given
    out before.
    """

    publisher: WeightPublisher
    rollouts: Rollouts
    session: Session
    newest: tuple[int, bytes] = (-1, b"")
    """The version, and its manifest's hash, that the manager knew when this trainer came."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """That go with every version; name to content."""
    _served_here: bool = False

    async def ensure_published(self, backend: TrainingBackend) -> float:
        """Publishes the backend's weights if they are not the newest version already; gives the seconds it took.

        A resumed run publishes again in any case: its publisher and its manager know no versions yet.
        """
        state = self.session.state
        if self._served_here and not state.weights_changed:
            return 0.0
        started = time.monotonic()
        ref = await asyncio.to_thread(self._publish_next, state.version, backend)
        await self.rollouts.publish(ref)
        if ref.version > state.version + 1:
            state.oldest_version = ref.version
        state.version, state.weights_changed, self._served_here = ref.version, False, True
        self.session.weights_content = ref.content
        return time.monotonic() - started

    def _publish_next(self, last: int, backend: TrainingBackend) -> WeightsRef:
        newest, known = self.newest
        self.newest = (-1, b"")
        if newest >= 0:
            ref = self._publish(newest, backend)
            if ref.manifest_hash == known:
                return ref
        return self._publish(max(last, newest) + 1, backend)

    def _publish(self, version: int, backend: TrainingBackend) -> WeightsRef:
        return self.publisher.publish(version, backend.export_weights(), {**backend.serving_files(), **self.files})
