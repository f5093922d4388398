"""What came over the wire, as the learner and the user's reward function see it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from polyrl.errors import ProtocolError
from polyrl.sample import TURN_REWARD, Finish, Response, Scored, Span, sample_id
from polyrl.wire import unpack_ids
from polyrl_trainer.data.examples import Prompt
from polyrl_trainer.data.tokenizers import Tokenizer
from polyrl_trainer.sample import Sample
from polyrl_trainer.user_code.episodes import PastTurn

TRUNCATED: Final = "environment_truncated"
"""Number beside the reward of a sample that had an environment: 1 where it cut the episode."""
WORD: Final = 4
"""Bytes of a token id, and of its logprob."""


def to_sample(
    group: int, index: int, response: Response, prompt: Prompt, tokenizer: Tokenizer, reward: float = 0.0
) -> Sample:
    """Prompt and response in one row of arrays. Raises ProtocolError when their lengths disagree."""
    ids = unpack_ids(response.ids).astype(np.int64)
    log_probs = np.frombuffer(response.logprobs, dtype="<f4")
    mask = np.frombuffer(response.loss_mask, dtype=np.uint8)
    if not len(ids) == len(log_probs) == len(mask):
        raise ProtocolError(f"sample {sample_id(group, index)}: ids, logprobs and loss mask differ in length")
    prompt_length = len(prompt.ids)
    begins = [prompt_length + span.end for span in response.spans if span.version < 0]
    # A text that left no room for a turn, as the last one of a context that ended, begins none.
    starts = (prompt_length, *(begin for begin in begins if begin < prompt_length + len(ids)))
    return Sample(
        tokens=np.concatenate([np.asarray(prompt.ids, dtype=np.int64), ids]),
        loss_mask=_after_prompt(prompt_length, mask),
        prompt_length=prompt_length,
        id=sample_id(group, index),
        group=group,
        prompt=prompt.text,
        response=tokenizer.decode(ids.tolist()),
        reward=reward,
        finish_reason=response.finish.value,
        rollout_log_probs=_after_prompt(prompt_length, log_probs * mask),
        turn_starts=starts,
        versions=tuple(sorted({span.version for span in response.spans if span.version >= 0})),
        metadata=copy.deepcopy(prompt.metadata),
    )


def scored_sample(scored: Scored, prompt: Prompt, tokenizer: Tokenizer) -> Sample:
    """With its reward. Raises ProtocolError."""
    sample = to_sample(scored.group, scored.index, scored.response, prompt, tokenizer, scored.reward)
    rewards = tuple(scored.metrics.get(f"{TURN_REWARD}{turn}", 0.0) for turn in range(len(sample.turn_starts)))
    sample = replace(sample, turn_rewards=rewards if any(rewards) else ())
    return replace(sample, finish_reason=finish_of(scored).value)


def with_unpaid_turns(scored: Scored) -> dict[str, float]:
    """The numbers beside the reward, with 0 for each turn that was not paid; see `scored_sample` for what is a turn."""
    begun = sum(one.version < 0 and one.end * WORD < len(scored.response.ids) for one in scored.response.spans)
    return {f"{TURN_REWARD}{turn}": 0.0 for turn in range(begun + 1)} | scored.metrics


def finish_of(scored: Scored) -> Finish:
    """How the sample ended: an engine does not know that its last turn was where the environment cut the episode."""
    return Finish.LENGTH if scored.metrics.get(TRUNCATED) else scored.response.finish


def turn_reward_metrics(rewards: Iterable[float]) -> dict[str, float]:
    """As they travel beside the reward."""
    return {f"{TURN_REWARD}{turn}": reward for turn, reward in enumerate(rewards) if reward}


def past_turns(group: int, index: int, response: Response, prompt: Prompt, tokenizer: Tokenizer) -> Iterator[PastTurn]:
    """The turns before the one that `response` ends with, oldest first. Raises ProtocolError.

    Spans tell them apart, not the loss mask: a turn may hold no token, and then the environment's texts touch.
    """
    written = [span for span in response.spans if span.version < 0]
    if len(written) != response.turn:
        raise ProtocolError(
            f"sample {sample_id(group, index)}: in turn {response.turn}, with {len(written)} texts of its environment"
        )
    ids = unpack_ids(response.ids)
    for turn, span in enumerate(written):
        before = _until(response, span, turn)
        yield PastTurn(to_sample(group, index, before, prompt, tokenizer), ids[span.start : span.end].tolist())


def _until(response: Response, span: Span, turn: int) -> Response:
    return msgspec.structs.replace(
        response,
        ids=response.ids[: span.start * WORD],
        logprobs=response.logprobs[: span.start * WORD],
        loss_mask=response.loss_mask[: span.start],
        spans=tuple(one for one in response.spans if one.end <= span.start),
        turn=turn,
        finish=Finish.STOP,
    )


def _after_prompt(prompt_length: int, values: npt.NDArray[np.generic]) -> npt.NDArray[np.float32]:
    return np.concatenate([np.zeros(prompt_length, dtype=np.float32), values.astype(np.float32)])
