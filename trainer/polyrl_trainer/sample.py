"""A training example as the learner sees it: numpy arrays, the field's names, no tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

ANSWER_HASH: Final = "answer_hash"
"""Among the numbers beside a reward: stands for the text that the sample answers, equal for equal ones."""

MAX_REWARD: Final = 1e12
"""Most that a reward or an advantage may be, of either sign: learners have 32 bits, and gradients that are a million
times as large must still have a norm. Of 1e200 a group's spread was infinite, and nothing was learned,
without a word."""
REWARD_WORDS: Final = f"a finite number, at most {MAX_REWARD:g} from 0"


@dataclass(frozen=True)
class Sample:
    """One sequence. T = prompt length + response length; the prompt's positions come first in every [T] array."""

    tokens: npt.NDArray[np.int64]
    """int64[T], prompt then response."""
    loss_mask: npt.NDArray[np.float32]
    """float32[T], 1 on positions whose token is learned: response tokens that the policy generated (RL) or that the
    assistant wrote (SFT)."""
    prompt_length: int
    id: str = ""
    """`GROUP.INDEX`; empty for SFT rows."""
    group: int = -1
    """Samples of one prompt share it."""
    prompt: str = ""
    response: str = ""
    reward: float = 0.0
    """What the reward function gave."""
    penalty: float | None = None
    """Added to the reward for the advantage, 0 or below: for length. None where the algorithm asks for none."""
    reward_kl: float | None = None
    """Mean k1 of its learned tokens to the reference, before the coefficient. None: it is no part of the reward."""
    finish_reason: str = ""
    """`stop`: it ended with an end token, or its environment ended it; `length`: it was cut at its token budget or at
    the engines' context. Empty for rows of a file."""
    left_out: bool = False
    """The policy learns nothing of it, neither from its advantage nor by a KL penalty or an entropy bonus; its tokens
    count in what a mini-batch is divided by."""
    rollout_log_probs: npt.NDArray[np.float32] | None = None
    """float32[T], what the engine reported when it drew each token; 0 where loss_mask is 0."""
    advantages: npt.NDArray[np.float32] | None = None
    """float32[T]"""
    reference_log_probs: npt.NDArray[np.float32] | None = None
    """float32[T], of the reference model, when a KL penalty is asked for."""
    drawers: npt.NDArray[np.int64] | None = None
    """int64[T], number of the engine that drew each token, see `losses.by_engine`."""
    old_log_probs: npt.NDArray[np.float32] | None = None
    """float32[T], of the learner before the step's first update, where the algorithm asks for them."""
    old_values: npt.NDArray[np.float32] | None = None
    """float32[T], of the critic before the step's first update, at each learned token: what it expects from there."""
    returns: npt.NDArray[np.float32] | None = None
    """float32[T], what the critic is to learn."""
    turn_rewards: tuple[float, ...] = ()
    """What an environment gave for each of the policy's turns that it answered: for the reward function, and for an
    advantage per turn."""
    turn_starts: tuple[int, ...] = ()
    """Position of each turn's first token, or of where it would stand. Empty: one turn after the prompt."""
    versions: tuple[int, ...] = ()
    """Distinct weight versions that generated it, in order."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """The data row's further fields, for the reward function; a copy, so that no sibling sees what one call writes."""

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def response_length(self) -> int:
        return len(self.tokens) - self.prompt_length


def shown_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """What is a measure of the numbers beside a reward."""
    return {name: value for name, value in metrics.items() if name != ANSWER_HASH}
