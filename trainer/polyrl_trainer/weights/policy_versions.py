"""Which version the policy is, which number it gets next, and its publication beside what the learner does.

    claim          the number: prompts that want it can be submitted
    snapshot       a copy of the weights: all that the learner waits for
    run            cuts, hashes and announces what was copied, one version after the other

A copy that still waits while the next one is made is never published: the step that wanted it has ended. So at most one
is under way and one waits, however slow publishing is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from polyrl_trainer.backend import TrainingBackend
from polyrl_trainer.rollouts import Rollouts
from polyrl_trainer.session import Session
from polyrl_trainer.weights.forms import WeightsCopy
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
    """The version, and the hash of its weights, that the manager knew when this trainer came."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Files that go with every version; name to content."""
    publish_s: float = 0.0
    """What the newest publication took, beside the learner."""
    _has_number: bool = False
    """Whether the weights that this trainer came with have one."""
    _is_claimed: bool = False
    _waiting: tuple[int, WeightsCopy] | None = None
    _came: asyncio.Event = field(default_factory=asyncio.Event)
    _publishing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def claim(self) -> bool:
        """Gives changed weights their number before they are copied. False when it depends on the weights themselves,
        as that of a trainer that has just come: then `ensure_published` comes first."""
        state = self.session.state
        if not self._has_number:
            return False
        if state.weights_changed:
            self._number(state.version + 1)
            self._is_claimed = True
        return True

    async def snapshot(self, backend: TrainingBackend) -> float:
        """Copies what was claimed, to be published by `run`; the seconds that the learner waited."""
        if not self._is_claimed:
            return 0.0
        started, self._is_claimed = time.monotonic(), False
        self._hand_over(self.session.state.version, await asyncio.to_thread(self._copy, backend))
        return time.monotonic() - started

    async def run(self) -> None:
        """Publishes what was copied, for as long as the run lives; raises what ends the run."""
        while True:
            await self._came.wait()
            await self._publish_waiting()

    async def ensure_published(self, backend: TrainingBackend) -> float:
        """Returns once the backend's weights are the newest announced version; gives the seconds it took.

        A resumed run publishes again in any case: its publisher knows no versions yet."""
        started = time.monotonic()
        if self.claim():
            await self.snapshot(backend)
        else:
            copied = await asyncio.to_thread(self._copy, backend)
            version = self._first_number(await asyncio.to_thread(self.publisher.content, copied))
            if version > self.session.state.version + 1:
                self.session.state.oldest_version = version
            self._number(version)
            self._has_number = True
            self._hand_over(version, copied)
        await self._publish_waiting()
        return time.monotonic() - started

    def _first_number(self, content: bytes) -> int:
        newest, known = self.newest
        return newest if newest >= 0 and content == known else max(self.session.state.version, newest) + 1

    def _number(self, version: int) -> None:
        self.session.state.version, self.session.state.weights_changed = version, False
        # Those of the version before, and not yet known of this one.
        self.session.weights_content = b""

    def _copy(self, backend: TrainingBackend) -> WeightsCopy:
        return self.publisher.snapshot(backend.export_weights, {**backend.serving_files(), **self.files})

    def _hand_over(self, version: int, copied: WeightsCopy) -> None:
        if self._waiting is not None:
            self.publisher.drop(self._waiting[1])
        self._waiting = version, copied
        self._came.set()

    async def _publish_waiting(self) -> None:
        """Returns once nothing waits and nothing is under way."""
        async with self._publishing:
            while self._waiting is not None:
                (version, copied), self._waiting, started = self._waiting, None, time.monotonic()
                ref = await asyncio.to_thread(self.publisher.publish_snapshot, version, copied)
                await self.session.answered(self.rollouts.publish(ref))
                self.publish_s = time.monotonic() - started
                if version == self.session.state.version:
                    self.session.weights_content = ref.content
            self._came.clear()
