"""Rows to groups of finished, scored samples, for offline RL.

A row holds `prompt`, `response`, `reward` and `group` (any text or number; rows that share it form one group), and
may hold `tokens` (prompt and response ids, instead of encoding the texts again) with `prompt_length`, and
`rollout_log_probs` (one per response token, of the policy that drew them).

Refuses: a reward that is not a finite number, and groups of one, which carry no advantage. Read next: `offline_loop`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from polyrl.errors import InvalidData
from polyrl_trainer.data.rows import DataRow, text_field
from polyrl_trainer.data.tokenizers import Tokenizer
from polyrl_trainer.sample import Sample

FinishedGroup = tuple[Sample, ...]

_OWN_FIELDS = frozenset({"prompt", "response", "reward", "group", "tokens", "prompt_length", "rollout_log_probs"})


def prepare_finished_groups(rows: Iterable[DataRow], tokenizer: Tokenizer, max_tokens: int) -> list[FinishedGroup]:
    """Groups in the order of their first rows; groups are numbered in that order. Raises InvalidData."""
    members: dict[str | int, list[DataRow]] = {}
    for row in rows:
        members.setdefault(_group_name(row), []).append(row)
    for name, group_rows in members.items():
        if len(group_rows) < 2:
            raise group_rows[0].refuse(f"group {name!r} has one sample only; an advantage needs at least two")
    return [
        tuple(prepare_finished(row, tokenizer, max_tokens, number) for row in group_rows)
        for number, group_rows in enumerate(members.values())
    ]


def _group_name(row: DataRow) -> str | int:
    name = row.fields.get("group")
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise row.refuse("field `group` must be text or a whole number that the prompt's samples share")
    return name


def prepare_finished(row: DataRow, tokenizer: Tokenizer, max_tokens: int, group: int) -> Sample:
    """Raises InvalidData."""
    prompt, response, reward = text_field(row, "prompt"), text_field(row, "response"), _reward(row)
    ids, prompt_length = _given_tokens(row) if "tokens" in row.fields else _encode(row, tokenizer)
    if len(ids) > max_tokens:
        raise row.refuse(f"the sample has {len(ids)} tokens; rollout.engine.maxContext allows {max_tokens}")
    loss_mask = np.ones(len(ids), dtype=np.float32)
    loss_mask[:prompt_length] = 0
    return Sample(
        tokens=np.asarray(ids, dtype=np.int64),
        loss_mask=loss_mask,
        prompt_length=prompt_length,
        group=group,
        prompt=prompt,
        response=response,
        reward=reward,
        rollout_log_probs=_given_log_probs(row, len(ids), prompt_length),
        metadata={name: value for name, value in row.fields.items() if name not in _OWN_FIELDS},
    )


def _reward(row: DataRow) -> float:
    reward = row.fields.get("reward")
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise row.refuse(f"field `reward` must be a finite number, got {reward!r}")
    return float(reward)


def _encode(row: DataRow, tokenizer: Tokenizer) -> tuple[list[int], int]:
    try:
        prompt_ids = tokenizer.encode_prompt(row.fields["prompt"])
        return [*prompt_ids, *tokenizer.encode_text(row.fields["response"]), tokenizer.eos_id], len(prompt_ids)
    except InvalidData as error:
        raise row.refuse(str(error)) from error


def _given_tokens(row: DataRow) -> tuple[list[int], int]:
    ids, prompt_length = row.fields["tokens"], row.fields.get("prompt_length")
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
        raise row.refuse("field `tokens` must be a list of token ids")
    if type(prompt_length) is not int or not 0 < prompt_length < len(ids):
        raise row.refuse(f"field `prompt_length` must be between 1 and {len(ids) - 1}, the number of tokens less one")
    return ids, prompt_length


def _given_log_probs(row: DataRow, length: int, prompt_length: int) -> npt.NDArray[np.float32] | None:
    given = row.fields.get("rollout_log_probs")
    if given is None:
        return None
    expected = length - prompt_length
    if not isinstance(given, list) or len(given) != expected:
        raise row.refuse(f"field `rollout_log_probs` must be a list of {expected} numbers, one per response token")
    if not all(isinstance(value, int | float) and math.isfinite(value) and value <= 0 for value in given):
        raise row.refuse("field `rollout_log_probs` must hold finite numbers that are at most 0")
    return np.concatenate([np.zeros(prompt_length), np.asarray(given)]).astype(np.float32)
