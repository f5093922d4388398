"""Rows whose tokens lie on several ranks, each of which has an equal slice of them (context parallel).

All of a model computes token by token, but attention. Before it each rank gives its tokens' queries, keys and values
away and gets those of all tokens for its own part of the heads; after it the same the other way round (Ulysses: Jacobs
et al. 2023, arXiv 2309.14509). So the attention of a rank sees whole documents, with no mask and by any kernel, and
what is exchanged is linear in tokens. Where there are fewer heads of keys than ranks, each is given to several.
Shapes: N slices, T tokens of a row, S = T / N of a slice, A heads of queries, K of keys, E head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_to_all_single_autograd
from transformers import PreTrainedConfig

from polyrl.errors import InvalidManifest


@dataclass(frozen=True)
class SequenceSlices:
    """Ranks that have a row together."""

    group: ProcessGroup
    """In the order of their slices."""
    number: int
    own: int
    """Which slice is this rank's, 0-based."""

    def to_heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """From [S, A, E], and [S, K, E] of keys and values, to those of all T tokens and a part of the heads, in the
        dtype of the values. Query heads of a rank belong to its key heads, in order, as they did in the whole."""
        parts = query.to(value.dtype), self._enough(key).to(value.dtype), self._enough(value)
        # In one exchange, which waits for the slowest rank once instead of three times.
        widths = [one.shape[1] * one.shape[2] // self.number for one in parts]
        given = torch.cat([one.reshape(len(one), self.number, -1) for one in parts], dim=2)
        taken = self._exchange(given.transpose(0, 1)).flatten(0, 1)
        q, k, v = (
            found.reshape(len(found), -1, one.shape[2])
            for found, one in zip(torch.split(taken, widths, dim=1), parts, strict=True)
        )
        return q, k, v

    def to_slices(self, found: torch.Tensor) -> torch.Tensor:
        """Inverse: [S, A, E] from [T, A / N, E]."""
        return self._exchange(found.reshape(self.number, -1, *found.shape[1:])).transpose(0, 1).flatten(1, 2)

    def _enough(self, one: torch.Tensor) -> torch.Tensor:
        """Each head as often as it takes for every rank to have one that its queries ask."""
        times = self.number // math.gcd(one.shape[1], self.number)
        return one if times == 1 else one.repeat_interleave(times, dim=1)

    def _exchange(self, given: torch.Tensor) -> torch.Tensor:
        """[N, ...], of which each is another rank's, to what each of them had for this one."""
        taken: torch.Tensor = all_to_all_single_autograd(given.contiguous(), None, None, self.group)
        return taken


def require_heads(config: PreTrainedConfig, number: int) -> None:
    """Raises InvalidManifest for a model whose heads cannot be shared out among so many ranks."""
    heads = int(config.get_text_config().num_attention_heads)
    if heads % number:
        fitting = [str(one) for one in range(1, heads + 1) if heads % one == 0]
        raise InvalidManifest(
            [
                f"spec.trainer.contextParallel: {number} does not divide the model's {heads} attention heads;"
                f" set one of {', '.join(fitting)}"
            ]
        )
