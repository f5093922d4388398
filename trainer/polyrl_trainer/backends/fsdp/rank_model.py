"""One model as every rank holds it, and what all ranks do with it at the same time.

Each method is called on every rank with the same arguments; `answer` is the leader's alone. Where a method is given
none, it is a follower's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
import torch
from safetensors.torch import save_file

from polyrl.errors import RunFailed
from polyrl_trainer.backend import StepResult
from polyrl_trainer.backends import training_state
from polyrl_trainer.backends.fsdp.commands import CreateCommand, LearnCommand, ScoreCommand, Work
from polyrl_trainer.backends.fsdp.ranks import Ranks
from polyrl_trainer.backends.fsdp.rounds import EMPTY, Round
from polyrl_trainer.backends.fsdp.shard_files import local_part, read_exactly, write_shards
from polyrl_trainer.backends.fsdp.sharding import sharded_policy
from polyrl_trainer.backends.models.model_factory import serving_files
from polyrl_trainer.backends.models.value_head import HEAD_WEIGHT
from polyrl_trainer.backends.packing import PackedBatch, Pass, pack_pass
from polyrl_trainer.backends.training_state import (
    MODEL_FILE,
    OPTIMIZER_FILE,
    RNG_FILE,
    SAFETENSORS_METADATA,
    VALUE_HEAD_FILE,
)
from polyrl_trainer.backends.updates import (
    MOMENTS,
    STEP,
    Updates,
    named_state,
    restore_state,
    trained_parameters,
    whole,
)
from polyrl_trainer.sample import Sample

Answer = Callable[[Round, list[torch.Tensor]], list[torch.Tensor]]
"""What the leader makes of the columns of a round, float32[K, P] of each rank: the gradient by them, alike in shape."""

NOTHING: Final = Sample(np.zeros(2, np.int64), np.array([0, 1], np.float32), prompt_length=1)
"""What a rank computes in a round that has nothing for it; nobody sees what comes of it, its gradient is 0."""
ALONE: Final = Pass(rows=((0,),), width=2)


class RankModel:
    """Made from the same command on every rank."""

    def __init__(self, create: CreateCommand, ranks: Ranks) -> None:
        """Raises InvalidManifest or InvalidData for a source that cannot be trained, RunFailed where only other ranks
        found that out."""
        self._ranks = ranks
        self._serving = getattr(torch, create.dtype)
        self.policy = sharded_policy(create.model(), create.engine, ranks)
        self.updates = None if create.optimizer is None else Updates(self.policy.model, create.optimizer)
        if self.updates is None:
            self.policy.model.requires_grad_(False)

    def learn(self, work: LearnCommand, answer: Answer | None = None) -> None:
        """Adds the gradient of every round."""
        updates = self.updating()
        updates.has_gradient = True
        for batch, one, counts in self._batches(work.work):
            outputs = self.policy.outputs(batch, work.temperature, entropy_gradient=work.entropy_gradient)
            columns = torch.stack([column for column in outputs if column is not None])
            own = columns[:, : counts[self._ranks.place.rank]]
            found = self._ranks.gather(own.detach(), counts)
            parts = None if found is None or answer is None else answer(one, found)
            own.backward(self._ranks.scatter(parts, own, counts))  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def score(self, work: ScoreCommand, answer: Answer | None = None) -> None:
        """Logprobs, or values, of every round; nothing goes back."""
        for batch, one, counts in self._batches(work.work):
            if work.values:
                column = self.policy.position_values(batch)
            else:
                column = self.policy.outputs(batch, work.temperature).log_probs
            found = self._ranks.gather(column[None, : counts[self._ranks.place.rank]], counts)
            if found is not None and answer is not None:
                answer(one, found)

    def step(self, normalizer: float) -> StepResult:
        """The norm is over all ranks, so that all do the same."""
        return self.updating().step(normalizer)

    def updating(self) -> Updates:
        """Raises RunFailed for a model that only scores."""
        if self.updates is None:
            raise RunFailed("this model only scores")
        return self.updates

    def exported(self) -> Iterator[tuple[str, torch.Tensor]]:
        """One whole tensor after the other, gathered in the dtype that engines serve in."""
        tied = {*self.policy.model.all_tied_weights_keys, *self._own_value_head()}
        for name, tensor in self.policy.model.state_dict().items():
            if name not in tied:
                served = tensor.detach().to(self._serving if tensor.is_floating_point() else tensor.dtype, copy=True)
                yield name, whole(served)

    # --- checkpoints: the same files as a single process writes -------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Raises RunFailed within a mini-batch; RunFailed or OSError on every rank when a disk refuses on one."""
        updates, model = self.updating(), self.policy.model
        if updates.has_gradient:
            raise RunFailed(f"{folder}: a checkpoint cannot be written within a mini-batch, before its optimizer step")
        self._ranks.together(lambda: training_state.require_empty(folder) if self._ranks.leads else None)
        names = [MODEL_FILE, OPTIMIZER_FILE, RNG_FILE]
        write_shards(folder / MODEL_FILE, self._stored(), self._ranks)
        if own := self._own_value_head():
            write_shards(folder / VALUE_HEAD_FILE, own, self._ranks)
            names.append(VALUE_HEAD_FILE)
        write_shards(folder / OPTIMIZER_FILE, named_state(model, updates.optimizer), self._ranks)

        def finish() -> None:
            if self._ranks.leads:
                save_file({"cpu": torch.get_rng_state()}, folder / RNG_FILE, metadata=SAFETENSORS_METADATA)
                training_state.seal(folder, updates.steps_taken, names, serving_files(model), fsync=True)

        self._ranks.together(finish)

    def load(self, folder: Path) -> None:
        """Drops accumulated gradients. Nothing is promised of the model after an error."""
        updates, model = self.updating(), self.policy.model
        # A damaged file is found by who reads all of it, and the others hear of it.
        state = self._ranks.together(lambda: training_state.read_state(folder, check=self._ranks.leads))
        moments = self._moments() if state.step else {}

        def read() -> None:
            if state.base:
                raise RunFailed(f"{folder}: holds adapters, which several processes cannot learn yet")
            read_exactly(folder / MODEL_FILE, self._stored())
            read_exactly(folder / OPTIMIZER_FILE, moments)
            if own := self._own_value_head():
                read_exactly(folder / VALUE_HEAD_FILE, own)
            generators = training_state.read_tensors(folder / RNG_FILE, None)
            torch.set_rng_state(generators["cpu"])

        self._ranks.together(read)
        restore_state(model, updates.optimizer, moments)
        updates.steps_taken = state.step
        updates.drop_gradients()

    def _stored(self) -> dict[str, torch.Tensor]:
        """What `model.safetensors` holds, under its names there."""
        left_out = {*self.policy.model.all_tied_weights_keys, *self._own_value_head()}
        return {name: one for name, one in self.policy.model.state_dict().items() if name not in left_out}

    def _own_value_head(self) -> dict[str, torch.Tensor]:
        """Of a policy that is its own critic: no engine knows of it."""
        return {HEAD_WEIGHT: self.policy.model.state_dict()[HEAD_WEIGHT]} if self.policy.head == "both" else {}

    def _moments(self) -> dict[str, torch.Tensor]:
        """Room for what `named_state` gives after a step, in shards."""
        room: dict[str, torch.Tensor] = {}
        for name, parameter in trained_parameters(self.policy.model):
            room |= {f"{moment}/{name}": torch.zeros_like(parameter) for moment in MOMENTS}
            room[f"{STEP}/{name}"] = torch.zeros((), dtype=torch.float32, device=local_part(parameter).device)
        return room

    # --- passes -------------------------------------------------------------------------------------------------------

    def _batches(self, work: Work) -> Iterator[tuple[PackedBatch, Round, list[int]]]:
        """This rank's pass of each round, and how many learned tokens each rank has in it."""
        samples, device = work.samples(), self.policy.device
        learned = [int(sample.loss_mask.sum()) for sample in samples]
        for one in work.rounds:
            mine = one[self._ranks.place.rank]
            batch = pack_pass([NOTHING], ALONE, device) if mine == EMPTY else pack_pass(samples, mine, device)
            yield batch, one, [sum(learned[index] for row in each.rows for index in row) for each in one]
