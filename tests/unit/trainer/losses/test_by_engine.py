"""Sums per engine beside a loss's own: by hand, per weight version and optimizer step, whatever the passes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from polyrl.sample import Finish, Response, Span
from polyrl.wire import EngineMeasure
from polyrl_trainer.backend import LossInputs
from polyrl_trainer.losses import merge, sft_loss
from polyrl_trainer.losses.by_engine import MAX_NATS, Drawers, with_engine_sums
from polyrl_trainer.sample import Sample


def drawn(*spans: Span) -> Response:
    return Response("0.0", b"", logprobs=b"", loss_mask=b"", spans=spans, turn=0, finish=Finish.STOP)


def inputs(drawers: np.ndarray, log_probs: list[float], rollout: list[float], mask: list[float]) -> LossInputs:
    zeros = torch.zeros(len(log_probs))
    return LossInputs(
        log_probs=torch.tensor(log_probs),
        entropy=torch.full((len(log_probs),), 0.5),
        mask=torch.tensor(mask),
        rollout_log_probs=torch.tensor(rollout),
        advantages=zeros,
        reference_log_probs=zeros,
        old_log_probs=zeros,
        sequence=torch.zeros(len(log_probs), dtype=torch.int64),
        num_sequences=1,
        drawers=torch.from_numpy(drawers),
    )


def test_means_are_per_engine_version_and_optimizer_step() -> None:
    drawers, loss = Drawers(), with_engine_sums(sft_loss)
    sample = Sample(np.arange(6), np.ones(6, np.float32), prompt_length=1)
    spans = (Span(0, 2, version=3, engine="a", attempt=1), Span(2, 3, version=-1, engine="", attempt=0))
    first = drawers.mark(sample, drawn(*spans, Span(3, 5, version=3, engine="b", attempt=2)), 0)
    assert first.drawers is not None
    assert first.drawers.tolist() == [0, 0, 0, 0, 1, 1]
    again = drawers.mark(sample, drawn(Span(0, 5, version=3, engine="a", attempt=1)), 1)
    assert again.drawers is not None
    learned = [-1.0, -2.0, 0.0, -3.0, -3.0]
    value, sums = loss(inputs(first.drawers[1:], learned, [-1.5, -2.5, 0.0, -1.0, -4.0], [1.0, 1.0, 0.0, 1.0, 1.0]))
    _, more = loss(inputs(again.drawers[1:], learned, [-1e38, *learned[1:]], [1.0] * 5))
    assert value.item() == 9.0, "the loss is what it was"
    assert drawers.measures(merge(sums, more)) == [
        EngineMeasure("a", 0, tokens=2, drift=0.5, surprise=1.0),
        EngineMeasure("b", 0, tokens=2, drift=pytest.approx(1.5), surprise=pytest.approx(2.5)),
        EngineMeasure("a", 1, tokens=5, drift=MAX_NATS / 5, surprise=pytest.approx(1.3)),
    ]


def test_without_drawers_nothing_is_added() -> None:
    empty = inputs(np.zeros(0, np.int64), [], [], [])
    assert with_engine_sums(sft_loss)(empty)[1].keys() == {"entropy"}
