"""The planner's sums beside torch's own accounting of whole steps, on fake tensors: no GPU, and no memory is taken.

One GPU is `MemTracker`'s, several are `FSDPMemTracker`'s of a group that is not there. AdamW is taken apart tensor by
tensor (`foreach=False`): the trackers book the temporaries of its other forms as its state.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedModel

from polyrl.manifest.recipe import RecipeSpec
from polyrl.memory.learner import learner_memory
from polyrl.memory.sizes import ModelSizes
from polyrl_trainer.backends.configs import AdapterConfig, OptimizerConfig
from polyrl_trainer.backends.fsdp.shard_files import local_part
from polyrl_trainer.backends.models.lora import add_adapter
from polyrl_trainer.backends.models.model_factory import load_model
from polyrl_trainer.backends.optimizers.adamw import create_optimizer
from polyrl_trainer.backends.optimizers.named_state import blank_state

TOLERANCE = 0.1
LENGTH = 256

SMALL: dict[str, Any] = {
    **{"model_type": "qwen2", "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 2048},
    **{"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": False},
}
DEEP = {**SMALL, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 4}
NORMED = {**SMALL, "model_type": "qwen3", "head_dim": 64, "num_attention_heads": 16, "num_hidden_layers": 6}
"""As Qwen3: queries are twice as wide as the model, and normed as the keys are."""
ODD = {**SMALL, "hidden_size": 384, "num_attention_heads": 6}
"""As Qwen2.5 0.5B: rows of hidden size are no number of blocks."""
TIED = {**SMALL, "vocab_size": 8192, "tie_word_embeddings": True, "num_key_value_heads": 8}


def recipe(dtype: str) -> RecipeSpec:
    return RecipeSpec.model_validate({"model": {"path": "model", "dtype": dtype}})


def steps(model: PreTrainedModel, optimizer: torch.optim.Optimizer, rows: int, dtype: str, tracker: MemTracker) -> None:
    """One without a pass, which makes the optimizer's state, then one of two: its last pass has all that a pass ever
    meets. All tokens are learned.

    Casts are autocast's, where FSDP's modules do not cast.
    """
    ids = torch.zeros(rows, LENGTH, dtype=torch.long)
    targets = torch.zeros(rows, LENGTH, 1, dtype=torch.long)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for _ in range(2):
        with torch.autocast(
            "cpu", torch.bfloat16, enabled=dtype == "bfloat16" and not isinstance(tracker, FSDPMemTracker)
        ):
            logits = model(input_ids=ids, use_cache=False).logits.float()
        torch.log_softmax(logits, dim=-1).gather(-1, targets).sum().backward()
        tracker.reset_mod_stats()
    optimizer.step()
    optimizer.zero_grad()


@contextmanager
def mesh_of_ranks_that_are_not_there(number: int) -> Iterator[DeviceMesh]:
    distributed.init_process_group("fake", rank=0, world_size=number, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (number,))
    finally:
        distributed.destroy_process_group()


def shard(model: PreTrainedModel, mesh: DeviceMesh, dtype: str) -> None:
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, dtype), reduce_dtype=torch.float32)
    layers: list[nn.Module] = list(model.base_model.layers)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


@dataclass(frozen=True)
class Counted:
    total: int
    held: int
    """Of parameters and optimizer state."""


def counted_on_one(fields: dict[str, Any], rows: int, dtype: str) -> Counted:
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = load_model(fields, 0, dtype)  # type: ignore[arg-type]
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            steps(model, optimizer, rows, dtype, tracker)
    return of_snapshot(tracker, ("PARAM", "OPT"))


def counted_on_many(fields: dict[str, Any], rows: int, dtype: str, ranks: int) -> Counted:
    with mesh_of_ranks_that_are_not_there(ranks) as mesh, FakeTensorMode(allow_non_fake_inputs=True):
        model = load_model(fields, 0, dtype)  # type: ignore[arg-type]
        shard(model, mesh, dtype)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        tracker = FSDPMemTracker(model, optimizer)
        with tracker:
            steps(model, optimizer, rows, dtype, tracker)
    return of_snapshot(tracker, ("SHARDED_PARAM", "OPT"))


def of_snapshot(tracker: MemTracker, held: tuple[str, ...]) -> Counted:
    (snapshot,) = tracker.get_tracker_snapshot("peak").values()
    by_name = {str(kind).rpartition(".")[2].upper(): size for kind, size in snapshot.items()}
    print(by_name)
    return Counted(total=by_name["TOTAL"], held=sum(size for name, size in by_name.items() if name.startswith(held)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "rows", "dtype", "ranks"),
    [
        (SMALL, 4, "bfloat16", 1),
        (DEEP, 8, "float32", 1),
        (SMALL, 4, "bfloat16", 2),
        (TIED, 8, "bfloat16", 8),
        (DEEP, 8, "float32", 4),
        (NORMED, 8, "bfloat16", 1),
        (NORMED, 8, "bfloat16", 4),
    ],
    ids=[
        "one",
        "one, in float32",
        "two",
        "eight, with tied embeddings",
        "four, in float32",
        "one with normed heads",
        "four with normed heads",
    ],
)
def test_a_step_takes_what_was_planned(fields: dict[str, Any], rows: int, dtype: str, ranks: int) -> None:
    sizes = ModelSizes.of(fields)
    assert sizes is not None
    counted = counted_on_one(fields, rows, dtype) if ranks == 1 else counted_on_many(fields, rows, dtype, ranks)
    planned = learner_memory(sizes, recipe(dtype), tokens=rows * LENGTH, ranks=ranks)
    assert planned.total - planned.process == pytest.approx(counted.total, rel=TOLERANCE)
    assert planned.weights + planned.optimizer == pytest.approx(counted.held, rel=0.01)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize(
    ("fields", "lora"),
    [
        (SMALL, None),
        (DEEP, None),
        (TIED, None),
        (NORMED, None),
        (ODD, None),
        (SMALL, {"rank": 16}),
        (TIED, {"rank": 256}),
    ],
    ids=["small", "deep", "tied", "normed heads", "rows that blocks do not fill", "adapters", "wide adapters"],
)
def test_moments_in_8_bits_take_what_was_planned(
    fields: dict[str, Any], lora: dict[str, int] | None, ranks: int
) -> None:
    """To the byte, of all ranks; the largest has a row more."""
    optimizer = {"optimizer": {"name": "adamw_8bit"}}
    of_job = RecipeSpec.model_validate({"model": {"path": "model", "lora": lora}, "algorithm": optimizer})
    sizes = ModelSizes.of(fields)
    assert sizes is not None
    with mesh_of_ranks_that_are_not_there(ranks) as mesh:
        model = load_model(fields, 0, "float32")
        if (adapter := AdapterConfig.from_manifest(of_job.model)) is not None:
            add_adapter(model, adapter, 0)
        if ranks > 1:
            shard(model, mesh, "float32")
        made = create_optimizer(model, OptimizerConfig.from_manifest(of_job.algorithm.optimizer, 1))
        state = {name: one for name, one in blank_state(model, made).items() if not name.startswith("step/")}
    whole = sum(one.numel() * one.element_size() for one in state.values())
    own = sum(local_part(one).numel() * one.element_size() for one in state.values())
    assert learner_memory(sizes, of_job, tokens=1).optimizer == whole
    assert learner_memory(sizes, of_job, tokens=1, ranks=ranks).optimizer == pytest.approx(own, rel=0.01)
