"""What a pass says of the engines that drew its tokens: sums per drawer beside a loss's own, from the logprobs that the
loss needs anyway. What they mean is the ledger's matter, see `polyrl.ledger.measures.departures`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np
import torch

from polyrl.sample import Response
from polyrl.wire import EngineMeasure
from polyrl_trainer.backend import Loss, LossInputs
from polyrl_trainer.sample import Sample

MAX_NATS: Final = 20.0
"""A token's part in a mean: an engine may say that a logprob is -1e38, and one must not be all that a mean shows."""
_PREFIX: Final = "drawer/"
_SUMS: Final = ("tokens", "drift", "surprise")


def with_engine_sums(loss: Loss) -> Loss:
    """`loss`, with sums per drawer among its named sums."""

    def both(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, float]]:
        value, sums = loss(inputs)
        return value, sums | _engine_sums(inputs)

    return both


@torch.no_grad()
def _engine_sums(inputs: LossInputs) -> dict[str, float]:
    if inputs.drawers is None or not len(inputs.drawers):
        return {}
    drift = (inputs.log_probs - inputs.rollout_log_probs).abs().clamp(max=MAX_NATS)
    surprise = (-inputs.log_probs - inputs.entropy).clamp(-MAX_NATS, MAX_NATS)
    zeros = inputs.mask.new_zeros(int(inputs.drawers.max()) + 1)
    columns = [zeros.index_add(0, inputs.drawers, values * inputs.mask) for values in (1.0, drift, surprise)]
    rows = torch.stack(columns, dim=1).tolist()
    return {
        f"{_PREFIX}{number}/{name}": value
        for number, row in enumerate(rows)
        if row[0]
        for name, value in zip(_SUMS, row, strict=True)
    }


class Drawers:
    """Who drew the tokens of a step: engines, each once per weight version and number of optimizer steps since."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, int, int], int] = {}

    def mark(self, sample: Sample, response: Response, optimizer_steps: int) -> Sample:
        """The sample, with the number of who drew it at each position."""
        drawers = np.zeros(sample.length, dtype=np.int64)
        for span in response.spans:
            if span.version >= 0:
                key = (span.engine, span.version, optimizer_steps)
                number = self._numbers.setdefault(key, len(self._numbers))
                drawers[sample.prompt_length + span.start : sample.prompt_length + span.end] = number
        return replace(sample, drawers=drawers)

    def measures(self, sums: Mapping[str, float]) -> list[EngineMeasure]:
        """What all passes of a step together say of each engine."""
        cohorts: dict[tuple[int, int], int] = {}
        rows = []
        for (engine, *cohort), number in self._numbers.items():
            tokens, drift, surprise = (sums.get(f"{_PREFIX}{number}/{name}", 0.0) for name in _SUMS)
            key = cohorts.setdefault((cohort[0], cohort[1]), len(cohorts))
            if tokens:
                means = {"drift": drift / tokens, "surprise": surprise / tokens}
                rows.append(EngineMeasure(engine, key, tokens=int(tokens), **means))
        return rows
