"""Who makes the learners of a run: one process, or a group of them. Stages ask for a policy, a critic, a reference."""

from __future__ import annotations

from typing import Protocol

from polyrl_trainer.backend import OtherMachines, TrainingBackend
from polyrl_trainer.backends.configs import EngineConfig, ModelConfig, OptimizerConfig
from polyrl_trainer.backends.policy import ReferenceScores


class Learner(TrainingBackend, Protocol):
    """A backend of a stage, which ends with it."""

    def below_adapters(self) -> ReferenceScores:
        """The model that its adapters stand on, as a reference."""

    def close(self) -> None:
        """Queued work is dropped."""


class Learners(Protocol):
    """Makes them on the devices that it was given. All raise InvalidManifest or InvalidData for a source that cannot be
    trained."""

    def learner(self, model: ModelConfig, engine: EngineConfig, optimizer: OptimizerConfig) -> Learner:
        """One model, its optimizer and its schedule."""

    def reference(self, model: ModelConfig, engine: EngineConfig) -> ReferenceScores:
        """A frozen model that is only asked for logprobs."""

    @property
    def machines(self) -> OtherMachines | None:
        """Machines beside this one that a learner is on."""

    async def gather(self) -> None:
        """Returns once all machines that they need have come, before the first is made. Raises DeadlineExceeded."""

    async def watch(self) -> None:
        """Until cancelled; raises GroupLost when a process that they need is gone."""

    def close(self, *, done: bool = False) -> None:
        """None of them is used any more; `done` when the run is, so that nobody is started again."""
