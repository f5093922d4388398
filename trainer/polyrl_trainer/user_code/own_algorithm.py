"""The user's own loss and advantage, `module:function`: called in the trainer's process, every answer checked.

They need the gradient and run between two passes of the learner, so they have no worker and no deadline of their own.
Whatever they raise or return wrongly ends the run with a sentence that names their own line. `polyrl validate` and
`polyrl run` call each once on a batch of five tokens before anything starts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from polyrl.errors import InvalidCode
from polyrl.manifest.parts.algorithm import AlgorithmSpec
from polyrl_trainer.backend import LossInputs
from polyrl_trainer.losses.own import GroupAdvantage, OwnAlgorithm, TokenLoss
from polyrl_trainer.sample import MAX_REWARD, REWARD_WORDS, Sample
from polyrl_trainer.user_code.frames import describe
from polyrl_trainer.user_code.loading import load_function

TRIAL_SEQUENCES: Final = (0, 0, 1, 1, 1)
"""Which of two samples each token of the trial batch belongs to."""
TRIAL_REWARDS: Final = (1.0, 0.0, 0.5)


def load_own(algorithm: AlgorithmSpec, code_path: Path) -> OwnAlgorithm:
    """What the manifest names. Raises InvalidCode."""
    loss, advantage = algorithm.loss_function, algorithm.advantage_function
    return OwnAlgorithm(
        loss=own_loss(loss, _plain_function(loss, code_path)) if loss else None,
        advantage=own_advantage(advantage, _plain_function(advantage, code_path)) if advantage else None,
    )


def own_loss(reference: str, function: Callable[..., Any]) -> TokenLoss:
    """Its tensor and its named ones, as `loss/NAME`. What is made raises InvalidCode."""

    def checked(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        answer = _answer(reference, function, inputs)
        loss, numbers = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, {})
        if not isinstance(numbers, Mapping):
            raise InvalidCode(f"{reference}: beside the loss goes a dict of tensors, got {type(numbers).__name__}")
        shape = inputs.log_probs.shape
        for name, value in (("the loss", loss), *numbers.items()):
            if not isinstance(value, torch.Tensor) or value.shape != shape:
                got = f"shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
                wanted = f"a tensor of shape {list(shape)}, a number per learned token"
                raise InvalidCode(f"{reference}: {name} must be {wanted}, got {got}")
        return loss, {f"loss/{name}": value.detach().float() for name, value in numbers.items()}

    return checked


def own_advantage(reference: str, function: Callable[..., Any]) -> GroupAdvantage:
    """A number of each sample of a group, or one of each of its tokens. What is made raises InvalidCode."""

    def checked(samples: Sequence[Sample]) -> list[npt.NDArray[np.float64]]:
        answer = _answer(reference, function, list(samples))
        try:
            rows = [np.asarray(value, dtype=np.float64) for value in answer]
        except (TypeError, ValueError):
            rows = []
        if len(rows) != len(samples):
            raise InvalidCode(f"{reference}: must return a list of {len(samples)} numbers, got {answer!r:.80}")
        for row, sample in zip(rows, samples, strict=True):
            if row.shape not in ((), (sample.length,)) or not (np.abs(row) <= MAX_REWARD).all():
                raise InvalidCode(
                    f"{reference}: an advantage is {REWARD_WORDS}, or {sample.length} of them (one per token of the"
                    f" sample, prompt included), got {row!r:.80}"
                )
        return [np.broadcast_to(row, sample.length) for row, sample in zip(rows, samples, strict=True)]

    return checked


def try_own(own: OwnAlgorithm, algorithm: AlgorithmSpec, metadata: Mapping[str, Any] | None = None) -> None:
    """Calls both on a batch of five tokens of two samples, and on a group of three, which have the `metadata` of a row.
    Raises InvalidCode."""
    if own.advantage is not None:
        trial = replace(_trial_sample(), metadata=dict(metadata or {}))
        own.advantage([replace(trial, id=f"0.{n}", reward=reward) for n, reward in enumerate(TRIAL_REWARDS)])
    if own.loss is not None:
        inputs = _trial_inputs()
        loss, _ = own.loss(inputs)
        reference = algorithm.loss_function
        if not loss.requires_grad:
            raise InvalidCode(f"{reference}: the loss has no gradient; it must follow from tokens.log_probs")
        loss.sum().backward()  # type: ignore[no-untyped-call]
        gradient = inputs.log_probs.grad
        if not loss.isfinite().all() or (gradient is not None and not gradient.isfinite().all()):
            raise InvalidCode(f"{reference}: on logprobs between -2 and 0 the loss or its gradient is not finite")


def _plain_function(reference: str, code_path: Path) -> Callable[..., Any]:
    function = load_function(reference, code_path)
    if inspect.iscoroutinefunction(function):
        raise InvalidCode(f"{reference}: must be a plain `def`, the learner waits for nothing")
    return function


def _answer(reference: str, function: Callable[..., Any], argument: object) -> Any:
    try:
        return function(argument)
    except (Exception, SystemExit) as error:  # User code may raise anything.
        raise InvalidCode(f"{reference} raised {describe(error)}") from error


def _trial_inputs() -> LossInputs:
    """Ratios above and below 1, of a sample with a positive and of one with a negative advantage."""

    def column(*values: float) -> torch.Tensor:
        return torch.tensor(values)

    return LossInputs(
        log_probs=column(-1.0, -2.0, -0.7, -1.5, -0.2).requires_grad_(),
        entropy=column(1.0, 0.5, 0.2, 0.4, 0.6),
        mask=torch.ones(len(TRIAL_SEQUENCES)),
        rollout_log_probs=column(-1.1, -1.4, -1.2, -2.0, -2.0),
        advantages=column(1.0, 1.0, -0.5, -0.5, -0.5),
        reference_log_probs=column(-1.1, -1.5, -1.0, -1.5, -0.6),
        old_log_probs=column(-1.2, -1.0, -1.2, -1.0, -2.0),
        sequence=torch.tensor(TRIAL_SEQUENCES),
        num_sequences=max(TRIAL_SEQUENCES) + 1,
    )


def _trial_sample() -> Sample:
    mask = np.array([0, 1, 1], dtype=np.float32)
    return Sample(
        tokens=np.arange(len(mask)), loss_mask=mask, prompt_length=1, id="0.0", group=0, finish_reason="stop",
        rollout_log_probs=-mask, reference_log_probs=-mask, turn_starts=(1,), turn_rewards=(0.0,),
    )  # fmt: skip
