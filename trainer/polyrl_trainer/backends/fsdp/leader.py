"""Rank 0: the backends that the trainer's loops see, each of which is one model of the whole group.

One thread does all that is collective, so that commands are in one order on every rank. An error in a collective leaves
the ranks at odds: from then on everything fails with the same reason, and the trainer's process ends.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
import structlog
import torch

from polyrl.errors import GroupLost, PolyRLError
from polyrl.weights import TensorEntry
from polyrl_trainer.backend import BufferOf, Loss, StepResult, TrainFuture
from polyrl_trainer.backends.configs import EngineConfig, ModelConfig, OptimizerConfig
from polyrl_trainer.backends.device_load import MatrixSizes, device_numbers
from polyrl_trainer.backends.fsdp import commands
from polyrl_trainer.backends.fsdp.commands import (
    CreateCommand,
    DiscardCommand,
    DropCommand,
    EndCommand,
    ExportCommand,
    LearnCommand,
    LoadCommand,
    RankCommand,
    SaveCommand,
    ScoreCommand,
    StepCommand,
    Work,
)
from polyrl_trainer.backends.fsdp.rank_model import RankModel
from polyrl_trainer.backends.fsdp.ranks import Ranks
from polyrl_trainer.backends.fsdp.rounds import Round, plan_rounds
from polyrl_trainer.backends.learners import Learner
from polyrl_trainer.backends.models.model_factory import serving_files
from polyrl_trainer.backends.packing import learned_positions, loss_inputs, unpack
from polyrl_trainer.backends.policy import Background, ReferenceScores, effective_temperature
from polyrl_trainer.losses.sft import merge
from polyrl_trainer.sample import Sample

log = structlog.get_logger()

R = TypeVar("R")
LOST_LEAVE_S: Final = 5.0
"""To tidy up after a lost rank; what hangs is left to the end of the process."""
RANKS_END_S: Final = 3.0
"""To let the ranks end, which takes milliseconds, behind what is still computed. Less than a trainer that was asked to
stop has left then (`worker.TRAINER_END_S`); what was to be kept is saved."""


class ShardedLearners:
    """The group, as what makes learners on it."""

    def __init__(
        self,
        meet: Callable[[], Ranks],
        num_ranks: int,
        threads: int,
        *,
        wait_seconds: float,
        why_lost: Callable[[], GroupLost | None],
        unless_lost: Callable[[Callable[[], None]], None],
    ) -> None:
        """`meet` waits for the others, when the first model is made; `why_lost` tells how one was lost, if one was;
        `unless_lost` does what its caller waits for, and raises GroupLost when one is lost meanwhile."""
        self._meet = meet
        self._met: Ranks | None = None
        self._num_ranks = num_ranks
        self._why_lost = why_lost
        self.unless_lost = unless_lost
        self._numbers = itertools.count()
        self._lost: GroupLost | None = None
        self.wait_seconds = wait_seconds
        self.background = Background("learner", threads, wait_seconds)

    def learner(self, model: ModelConfig, engine: EngineConfig, optimizer: OptimizerConfig) -> ShardedBackend:
        return self._made(model, engine, optimizer)

    def reference(self, model: ModelConfig, engine: EngineConfig) -> ReferenceScores:
        return self._made(model, engine, None)

    def _made(self, model: ModelConfig, engine: EngineConfig, optimizer: OptimizerConfig | None) -> ShardedBackend:
        create = CreateCommand.of(next(self._numbers), model, engine, optimizer=optimizer)
        made = self.background.wait_for(
            "a model in shards", self.all_do, create, lambda: RankModel(create, self._ranks())
        )
        return ShardedBackend(self, made, create.number, self._num_ranks)

    def _ranks(self) -> Ranks:
        if self._met is None:
            self._met = self._meet()
        return self._met

    def all_do(self, command: RankCommand, own: Callable[[], R]) -> R:
        """On the background thread: sends `command` and does this rank's part. Raises GroupLost when the ranks are at
        odds, and whatever `own` raises that all ranks raise."""
        if self._lost is not None:
            raise self._lost
        try:
            self._ranks().send(commands.to_bytes(command))
            return own()
        except (PolyRLError, OSError, ValueError):
            raise
        except BaseException as error:
            raise self._at_odds(error) from error

    def all_write(self, written: TrainFuture[None]) -> TrainFuture[None]:
        """What all ranks' writers do, with GroupLost when it leaves the ranks at odds."""
        outcome: TrainFuture[None] = TrainFuture()

        def end(done: TrainFuture[None]) -> None:
            error = done.exception()
            if error is None:
                outcome.set_result(None)
            elif isinstance(error, PolyRLError | OSError | ValueError):
                outcome.set_exception(error)
            else:
                outcome.set_exception(self._at_odds(error))

        written.add_done_callback(end)
        return outcome

    def _at_odds(self, error: BaseException) -> GroupLost:
        failed = f"a pass over the learner's ranks failed ({type(error).__name__}: {error})"
        return self.lose(self._why_lost() or GroupLost(failed))

    @property
    def is_lost(self) -> bool:
        return self._lost is not None

    def lose(self, why: GroupLost) -> GroupLost:
        """Everything from here on fails with it, or with what was lost before, which is returned."""
        self._lost = self._lost or why
        return self._lost

    def end(self) -> None:
        """Lets the other ranks end. One that is gone already takes nothing with it: what was to be kept is saved.
        Where a pass is not over in time the group counts as lost."""
        if self._met is None or self._lost is not None:
            return
        ending = self.background.submit(self.all_do, EndCommand(), self._met.leave)
        if not wait([ending], RANKS_END_S).done:
            why = self.lose(GroupLost("the run ended in the middle of a pass of its learner"))
            log.warning("the learner's ranks are ended by force", reason=str(why))
            return
        try:
            ending.result()
        except GroupLost as lost:
            log.warning("a rank was gone before the group's end", reason=str(lost))

    def close(self) -> None:
        """After `end`, and once ranks of a group that is lost are ended."""
        if self._met is not None and self._lost is not None:
            with suppress(TimeoutError, RuntimeError):
                self.background.submit(self._met.leave).result(LOST_LEAVE_S)
        self.background.close()


class ShardedBackend(Learner):
    """One model of the group."""

    def __init__(self, learners: ShardedLearners, model: RankModel, number: int, ranks: int) -> None:
        self._learners = learners
        self._model = model
        self._number = number
        self._ranks = ranks
        self._sizes = MatrixSizes.of(model.policy.model)
        self._hidden_size = int(model.policy.model.config.get_text_config().hidden_size)

    def forward_backward(
        self,
        batch: Sequence[Sample],
        loss: Loss,
        temperature: float = 1.0,
        *,
        entropy_gradient: bool = False,
        together: int = 1,
    ) -> TrainFuture[dict[str, float]]:
        """After an error in the loss, `optim_step` refuses until `load` or `discard_gradients`."""
        return self._submit(self._forward_backward, batch, loss, temperature, entropy_gradient, together)

    def log_probs(
        self, batch: Sequence[Sample], temperature: float = 1.0
    ) -> TrainFuture[list[npt.NDArray[np.float32]]]:
        return self._submit(self._scored, batch, temperature, values=False)

    def values(self, batch: Sequence[Sample]) -> TrainFuture[list[npt.NDArray[np.float32]]]:
        return self._submit(self._scored, batch, 1.0, values=True)

    def optim_step(self, normalizer: float) -> TrainFuture[StepResult]:
        """See `Updates.step`."""
        return self._submit(self._step, normalizer)

    def discard_gradients(self) -> TrainFuture[None]:
        return self._submit(self._all_do, DiscardCommand(self._number), lambda: self._model.updating().drop_gradients())

    def export_weights(self, buffer: BufferOf) -> list[TensorEntry]:
        """Every rank copies its own rows."""
        return self._learners.background.wait_for("a snapshot of the weights", self._export, buffer)

    def serving_files(self) -> dict[str, bytes]:
        return serving_files(self._model.policy.model)

    def save(self, folder: Path, *, copied: bool = True) -> TrainFuture[None]:
        """Every rank writes its own rows. Raises RunFailed within a mini-batch: gradients are not saved."""
        return self._learners.background.wait_for("a copy of the learner's state", self._save, folder, copied)

    def state_bytes(self) -> int:
        return self._model.state_bytes()

    def load(self, folder: Path) -> None:
        """Drops accumulated gradients."""
        command = LoadCommand(self._number, str(folder))
        # Whoever goes on from a checkpoint waits on the thread that would notice a loss.
        self._learners.unless_lost(
            lambda: self._wait("a checkpoint to be read", command, lambda: self._model.load(folder))
        )

    def below_adapters(self) -> ReferenceScores:
        return _BelowAdapters(partial(self._submit, self._scored, values=False, below=True))

    def close(self) -> None:
        """Every rank forgets the model."""
        self._submit(self._all_do, DropCommand(self._number), lambda: None)

    # --- below: on the background thread only -------------------------------------------------------------------------

    def _all_do(self, command: RankCommand, own: Callable[[], R]) -> R:
        return self._learners.all_do(command, own)

    def _step(self, normalizer: float) -> StepResult:
        # Of a gradient with a hole only this rank knows.
        self._model.updating().require_gradient(normalizer)
        return self._all_do(StepCommand(self._number, normalizer), lambda: self._model.step(normalizer))

    def _save(self, folder: Path, copied: bool) -> TrainFuture[None]:
        command = SaveCommand(self._number, str(folder), copied=copied)
        return self._learners.all_write(self._all_do(command, lambda: self._model.save(folder, copied=copied)))

    def _forward_backward(
        self, batch: Sequence[Sample], loss: Loss, temperature: float, entropy_gradient: bool, together: int
    ) -> dict[str, float]:
        effective_temperature(temperature)
        work, began = self._work(batch, together), time.monotonic()
        answering = _Answering(batch, loss, entropy_gradient)
        command = LearnCommand(self._number, work, temperature=temperature, entropy_gradient=entropy_gradient)
        self._all_do(command, lambda: self._model.learn(command, answering.answer))
        if answering.error is not None:
            self._model.updating().give_up(answering.error)
            raise answering.error
        return {**answering.sums, **self._counts(work), "learn_seconds": time.monotonic() - began}

    def _scored(
        self, batch: Sequence[Sample], temperature: float, *, values: bool, below: bool = False
    ) -> list[npt.NDArray[np.float32]]:
        effective_temperature(temperature)
        found: dict[int, npt.NDArray[np.float32]] = {}

        def keep(one: Round, columns: list[torch.Tensor]) -> list[torch.Tensor]:
            indices = _indices(one)
            arrays = unpack([batch[index] for index in indices], torch.cat(columns, dim=1)[0])
            found.update(zip(indices, arrays, strict=True))
            return columns

        work = self._work(batch, together=1)
        command = ScoreCommand(self._number, work, temperature=temperature, values=values, below=below)
        self._all_do(command, lambda: self._model.score(command, keep))
        return [found[index] for index in range(len(batch))]

    def _work(self, batch: Sequence[Sample], together: int) -> Work:
        """Raises ValueError for what no pass can take, before any rank hears of it."""
        if not batch:
            raise ValueError("a batch needs at least one sample")
        for sample in batch:
            learned_positions(sample)
        lengths, packing = [sample.length for sample in batch], self._model.policy.packing
        learners = self._ranks // packing.slices
        rounds = plan_rounds(lengths, packing, learners, hidden_size=self._hidden_size, together=together)
        return Work.of(batch, rounds)

    def _counts(self, work: Work) -> dict[str, float]:
        """Counts over all ranks; the device's memory is this rank's."""
        positions = sum(len(one.rows) * one.width for each in work.rounds for one in each)
        used, tokens = sum(work.lengths), sum(work.learned)
        device = device_numbers(self._model.policy.device)
        if "device_flops_max" in device:
            device["device_flops_max"] *= self._ranks
        counts = {
            "tokens": tokens,
            "positions": positions,
            "padded_positions": positions - used,
            "padding_fraction": (positions - used) / positions,
            "flops": self._sizes.operations(work.lengths, tokens),
        }
        return {**device, **{name: float(count) for name, count in counts.items()}}

    def _export(self, buffer: BufferOf) -> list[TensorEntry]:
        places = self._model.served()
        made = buffer(places)
        command = ExportCommand(self._number, made.places)
        self._all_do(command, lambda: self._model.export(command, made.data))
        return places

    # --- below: on the caller's thread --------------------------------------------------------------------------------

    def _submit(self, work: Callable[..., R], *arguments: object, **named: object) -> TrainFuture[R]:
        return self._learners.background.submit(work, *arguments, **named)

    def _wait(self, awaited: str, command: RankCommand, own: Callable[[], None]) -> None:
        self._learners.background.wait_for(awaited, self._all_do, command, own)


class _BelowAdapters:
    """The group's model with its adapters off: the reference model of a run that learns adapters."""

    def __init__(self, score: Callable[[Sequence[Sample], float], TrainFuture[list[npt.NDArray[np.float32]]]]) -> None:
        self._score = score

    def log_probs(
        self, batch: Sequence[Sample], temperature: float = 1.0
    ) -> TrainFuture[list[npt.NDArray[np.float32]]]:
        return self._score(batch, temperature)

    def close(self) -> None:
        """The group is the learner's."""


class _Answering:
    """The loss over one call's rounds: its sums, and the gradient by what the ranks computed."""

    def __init__(self, batch: Sequence[Sample], loss: Loss, entropy_gradient: bool) -> None:
        self._batch, self._loss, self._entropy_gradient = batch, loss, entropy_gradient
        self.sums: dict[str, float] = {}
        self.error: Exception | None = None

    def answer(self, one: Round, found: list[torch.Tensor]) -> list[torch.Tensor]:
        """Zeros from the first error on: the ranks finish what they have begun, and no step is taken."""
        columns = torch.cat(found, dim=1).requires_grad_()
        if self.error is None:
            try:
                self._learn(one, columns)
            except Exception as error:  # noqa: BLE001 - a user's loss may raise anything, and the ranks wait
                self.error = error
        gradient = columns.grad if self.error is None and columns.grad is not None else torch.zeros_like(columns)
        return list(torch.split(gradient, [part.shape[1] for part in found], dim=1))

    def _learn(self, one: Round, columns: torch.Tensor) -> None:
        samples = [self._batch[index] for index in _indices(one)]
        counts = torch.tensor([len(learned_positions(sample)) for sample in samples])
        sequence = torch.repeat_interleave(torch.arange(len(samples)), counts).to(columns.device)
        entropy = columns[1] if self._entropy_gradient else columns[1].detach()
        values = columns[2] if len(columns) > 2 else None
        value, sums = self._loss(loss_inputs(samples, sequence, columns[0], entropy, values))
        value.backward()  # type: ignore[no-untyped-call]
        self.sums = merge(self.sums, {**sums, "loss": float(value.detach())})


def _indices(one: Round) -> list[int]:
    """Indices of the batch's samples, in the order in which the ranks' columns follow each other."""
    return [index for of_rank in one for row in of_rank.rows for index in row]
