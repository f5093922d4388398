"""One model as every rank holds it, and what all ranks do with it at the same time.

Each method is called on every rank with the same arguments; `answer` is the leader's alone. Where a method is given
none, it is a follower's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Final

import numpy as np
import torch

from polyrl.errors import InvalidData, RunFailed
from polyrl.manifest.spec import CpuOffload
from polyrl.weights import TensorEntry
from polyrl_trainer.backend import BufferPlace, StepResult, TrainFuture
from polyrl_trainer.backends import training_state
from polyrl_trainer.backends.device_load import give_back
from polyrl_trainer.backends.fsdp.commands import CreateCommand, ExportCommand, LearnCommand, ScoreCommand, Work
from polyrl_trainer.backends.fsdp.images.mapped import MappedImages
from polyrl_trainer.backends.fsdp.images.rows import export_rows
from polyrl_trainer.backends.fsdp.ranks import Ranks
from polyrl_trainer.backends.fsdp.rounds import EMPTY, Round
from polyrl_trainer.backends.fsdp.shard_files import TensorPlace, local_part, read_exactly, write_shards
from polyrl_trainer.backends.fsdp.sharding import checksum_below, product_of_rows, sharded_policy
from polyrl_trainer.backends.models import lora
from polyrl_trainer.backends.models.model_factory import serving_files
from polyrl_trainer.backends.models.value_head import HEAD_WEIGHT
from polyrl_trainer.backends.optimizers.named_state import blank_state, named_state, restore_state
from polyrl_trainer.backends.packing import PackedBatch, Pass, learned_counts, pack_pass
from polyrl_trainer.backends.saved_state import SavedState, TensorFiles
from polyrl_trainer.backends.training_state import MODEL_FILE, OPTIMIZER_FILE, RNG_FILE, VALUE_HEAD_FILE
from polyrl_trainer.backends.updates import Updates
from polyrl_trainer.backends.weight_stream import stream_places
from polyrl_trainer.sample import Sample

Answer = Callable[[Round, list[torch.Tensor]], list[torch.Tensor]]
"""What the leader makes of the columns of a round, float32[K, P] of each rank: the gradient by them, alike in shape."""

NOTHING: Final = Sample(np.zeros(2, np.int64), np.array([0, 1], np.float32), prompt_length=1)
"""What a rank computes in a round that has nothing for it; nobody sees what comes of it, its gradient is 0."""
ALONE: Final = ((0,),)
"""Rows of a pass that holds nothing else."""


class RankModel:
    """Made from the same command on every rank."""

    def __init__(self, create: CreateCommand, ranks: Ranks) -> None:
        """Raises InvalidManifest or InvalidData for a source that cannot be trained, RunFailed where only other ranks
        found that out."""
        self._ranks = ranks
        self._serving = getattr(torch, create.dtype)
        self._shares = create.engine.shares_device
        self._images = MappedImages()
        self._saved = SavedState(create.engine.wait_seconds, ranks.writer)
        self._model = create.model()
        self._base: str | None = None
        self.policy = sharded_policy(self._model, create.engine, ranks)
        self._slices = ranks.slices(create.engine.context_parallel)
        self.updates: Updates | None = None
        if create.optimizer is None:
            self.policy.model.requires_grad_(False)
        else:
            on_host = create.engine.cpu_offload is CpuOffload.OPTIMIZER
            self.updates = Updates(self.policy.model, create.optimizer, moments_on_host=on_host)

    def learn(self, work: LearnCommand, answer: Answer | None = None) -> None:
        """Adds the gradient of every round."""
        updates = self.updating()
        updates.passes += 1
        drawn = (self._model.seed, updates.steps_taken, updates.passes, self._ranks.place.rank)
        with lora.dropout_on(self.policy.model, self.policy.device, drawn):
            for batch, one, counts in self._batches(work.work):
                outputs = self.policy.outputs(batch, work.temperature, entropy_gradient=work.entropy_gradient)
                columns = torch.stack([column for column in outputs if column is not None])
                own = columns[:, : counts[self._ranks.place.rank]]
                found = self._ranks.gather(own.detach(), counts)
                parts = None if found is None or answer is None else answer(one, found)
                own.backward(self._ranks.scatter(parts, own, counts))  # type: ignore[no-untyped-call]
        self._make_room()

    @torch.no_grad()
    def score(self, work: ScoreCommand, answer: Answer | None = None) -> None:
        """Logprobs, or values, of every round; nothing goes back."""
        with lora.adapters_off(self.policy.model) if work.below else nullcontext():
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
        taken = self.updating().step(normalizer)
        self._make_room()
        return taken

    def _make_room(self) -> None:
        if self._shares:
            give_back(self.policy.device)

    def updating(self) -> Updates:
        """Raises RunFailed for a model that only scores."""
        if self.updates is None:
            raise RunFailed("this model only scores")
        return self.updates

    def served(self) -> list[TensorEntry]:
        """Where each tensor lies in a version's stream, in the dtype that engines serve in."""
        return stream_places(self._named(lora.base_state(self.policy.model)), self._serving)

    def export(self, work: ExportCommand, image: memoryview | None = None) -> None:
        """Into the image of this rank's machine, which the leader has and a follower finds, and those of others."""

        def find(buffer: BufferPlace) -> memoryview:
            return self._images.find(buffer) if image is None else image

        export_rows(self._stored(), self.served(), work.buffers, find, self._ranks)

    # --- checkpoints: the same files as a single process writes -------------------------------------------------------

    def save(self, folder: Path, *, copied: bool) -> TrainFuture[None]:
        """Copies this rank's part or not, and every rank's writer writes it. Raises RunFailed within a mini-batch; the
        future's is DiskRefused on every rank when a disk refuses on one."""
        updates, model = self.updating(), self.policy.model
        if updates.passes:
            raise RunFailed(f"{folder}: a checkpoint cannot be written within a mini-batch, before its optimizer step")
        self._ranks.together(lambda: training_state.require_empty(folder) if self._ranks.leads else None)
        files, configs = self._saved_tensors(), serving_files(model)
        if (adapter := self._model.adapter) is not None:
            self._ranks.together(lambda: (folder / lora.FOLDER).mkdir() if self._ranks.leads else None)
            configs[lora.CONFIG_FILE] = lora.adapter_config(model, adapter)
        rank = self._ranks.place.rank
        places = {
            file: {name: TensorPlace.of(one, rank) for name, one in tensors.items()} for file, tensors in files.items()
        }
        step, base = updates.steps_taken, self._base_checksum()
        generators = training_state.generator_states(self.policy.device)

        def finish() -> None:
            if self._ranks.leads:
                training_state.write_tensors(folder / RNG_FILE, generators)
                training_state.seal(folder, step, [*files, RNG_FILE], configs, fsync=True, base=base)

        def write(held: TensorFiles) -> None:
            for file, tensors in held.items():
                write_shards(folder / file, places[file], tensors, self._ranks)
            self._ranks.together(finish, saving=True)

        local = {file: {name: local_part(one) for name, one in tensors.items()} for file, tensors in files.items()}
        return self._saved.write(local, write, copied=copied)

    def state_bytes(self) -> int:
        """Bytes of all ranks' save, about; where adapters are saved alone, of theirs."""
        adapter = self._model.adapter
        model, whole = self.policy.model, adapter is None or adapter.save_merged
        weights = (one for one in model.parameters() if whole or one.requires_grad)
        return training_state.size_of([*weights, *named_state(model, self.updating().optimizer).values()])

    def load(self, folder: Path) -> None:
        """Drops accumulated gradients. Nothing is promised of the model after an error."""
        updates, model = self.updating(), self.policy.model
        # A damaged file is found by who reads all of it, and the others hear of it.
        state = self._ranks.together(lambda: training_state.read_state(folder, check=self._ranks.leads))
        moments = blank_state(model, updates.optimizer) if state.step else {}
        base = self._base_checksum()

        def read() -> None:
            if self._ranks.leads and state.base != base:
                raise InvalidData(training_state.other_base(folder))
            if self._model.adapter is None:
                read_exactly(folder / MODEL_FILE, self._stored())
            else:
                read_exactly(folder / lora.TENSORS_FILE, lora.adapter_tensors(model))
            read_exactly(folder / OPTIMIZER_FILE, moments)
            if own := self._own_value_head():
                read_exactly(folder / VALUE_HEAD_FILE, own)
            training_state.restore_generators(folder / RNG_FILE, self.policy.device)

        self._ranks.together(read)
        restore_state(model, updates.optimizer, moments)
        updates.steps_taken = state.step
        updates.drop_gradients()

    def _saved_tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """By file; with adapters every rank asks at the same time."""
        model, adapter = self.policy.model, self._model.adapter
        files: dict[str, dict[str, torch.Tensor]] = {OPTIMIZER_FILE: named_state(model, self.updating().optimizer)}
        if own := self._own_value_head():
            files[VALUE_HEAD_FILE] = own
        if adapter is not None:
            files[lora.TENSORS_FILE] = lora.adapter_tensors(model)
        if adapter is None or adapter.save_merged:
            files[MODEL_FILE] = self._stored()
        return files

    def _stored(self) -> dict[str, torch.Tensor]:
        """What `model.safetensors` and a version hold, under their names there; with adapters every rank asks at the
        same time."""
        model = self.policy.model
        adapted = self._model.adapter is not None
        return self._named(lora.merged_state(model, product_of_rows) if adapted else model.state_dict())

    def _named(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tied weights once, and what no engine knows of not at all."""
        left_out = {*self.policy.model.all_tied_weights_keys, *self._own_value_head()}
        return {name: one for name, one in state.items() if name not in left_out}

    def _base_checksum(self) -> str:
        """Right at the leader; every rank asks at the same time."""
        if self._base is None:
            adapted = self._model.adapter is not None
            self._base = checksum_below(self.policy.model, self._ranks) if adapted else ""
        return self._base

    def _own_value_head(self) -> dict[str, torch.Tensor]:
        """The value head of a policy that is its own critic: no engine knows of it."""
        return {HEAD_WEIGHT: self.policy.model.state_dict()[HEAD_WEIGHT]} if self.policy.head == "both" else {}

    # --- passes -------------------------------------------------------------------------------------------------------

    def _batches(self, work: Work) -> Iterator[tuple[PackedBatch, Round, list[int]]]:
        """This rank's pass of each round, or its slice of one, and how many learned tokens each rank has in it."""
        samples, device, packing = work.samples(), self.policy.device, self.policy.packing
        nothing = Pass(ALONE, width=packing.width(NOTHING.length))
        for one in work.rounds:
            mine = one[self._ranks.place.rank // packing.slices]
            whole = pack_pass([NOTHING], nothing, device) if mine == EMPTY else pack_pass(samples, mine, device)
            batch = whole if self._slices is None else whole.slice(self._slices)
            yield batch, one, [count for each in one for count in learned_counts(samples, each, packing.slices)]
