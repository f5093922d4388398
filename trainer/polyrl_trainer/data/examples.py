"""Rows to what each stage learns from; a row that does not fit is refused, never cut. Of prompts that are too long a
small share, which the manifest states, is skipped and counted.

- prompts (RL, evaluation): `prompt` (taken as it is), or `messages` (through the chat template, ending where the
  assistant begins); all further fields reach the reward function as `sample.metadata`.
- conversations (SFT): `prompt` and `response`, or `messages`; the loss mask is 1 on what the assistant wrote, but for
  messages of `weight` 0. A row's `tools` are shown by the chat template.
- finished groups (offline RL): as conversations, and `reward` and `group` (any text or number that a prompt's samples
  share), perhaps `tokens` with `prompt_length`, and `rollout_log_probs`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import structlog

from polyrl_trainer.data.chats import is_learned
from polyrl_trainer.data.rows import DataRow, Message, is_number, messages_field, text_field, tools_field
from polyrl_trainer.data.tokenizers import MaskedIds, Tokenizer
from polyrl_trainer.sample import MAX_REWARD, REWARD_WORDS, Sample

log = structlog.get_logger()
Item = TypeVar("Item")

MAX_LOG_PROB: Final = float(np.finfo(np.float32).max)
"""Below 0; what 32 bits hold."""


@dataclass(frozen=True)
class Prompt:
    """One question, ready to submit."""

    place: str
    """`FILE:LINE` it came from."""
    text: str
    ids: tuple[int, ...]
    metadata: dict[str, Any]
    judge: str = ""
    """The evaluation's set whose own reward scores the answers; empty: the recipe's does."""


def prepare_prompts(
    rows: Sequence[DataRow], tokenizer: Tokenizer, max_prompt_tokens: int, *, max_skipped: float = 0.0
) -> list[Prompt]:
    """Those that leave room for a response; the others may be `max_skipped` of all rows.

    Raises InvalidData naming the row whose prompt is missing, malformed or unknown to the tokenizer, or the first that
    is too long, when too many are, or all.
    """
    prompts = [_prompt(row, tokenizer) for row in rows]
    long = [place for place, prompt in enumerate(prompts) if len(prompt.ids) > max_prompt_tokens]
    if len(long) > max_skipped * len(rows) or (long and len(long) == len(rows)):
        places = {rows[place].place for place in long}
        others = f"; so have {len(places) - 1} others of {len(rows)} rows" if max_skipped and len(places) > 1 else ""
        raise rows[long[0]].refuse(
            f"the prompt has {len(prompts[long[0]].ids)} tokens; at most {max_prompt_tokens} leave room for "
            f"recipe.sampling.maxNewTokens in rollout.engine.maxContext{others}"
        )
    if long:
        log.warning("prompts are skipped, too long", skipped=len(long), rows=len(rows), first=rows[long[0]].place)
    return [prompt for prompt in prompts if len(prompt.ids) <= max_prompt_tokens]


def _prompt(row: DataRow, tokenizer: Tokenizer) -> Prompt:
    if "messages" in row.fields:
        messages = messages_field(row)
        if messages[-1]["role"] == "assistant":
            raise row.refuse(f"{row.called('messages')} must end before the assistant's turn, which the policy writes")
        text, tools = messages[-1]["content"], tools_field(row)
        with row.named_in(f"{row.called('messages')}: "):
            ids = tokenizer.encode_chat_prompt(messages, tools)
    else:
        text = text_field(row, "prompt")
        with row.named_in(f"{row.called('prompt')}: "):
            ids = tokenizer.encode_prompt(text)
    read = "messages" if "messages" in row.fields else "prompt"
    metadata = row.unread or {name: value for name, value in row.fields.items() if name != read}
    return Prompt(row.place, text, ids=tuple(ids), metadata=metadata)


def prepare_conversations(rows: Iterable[DataRow], tokenizer: Tokenizer, max_tokens: int) -> list[Sample]:
    """Raises InvalidData naming the row; one that is too long is not cut, which would teach to stop mid-sentence."""
    made = [(row.place, sample) for row in rows for sample in prepare_sequences(row, tokenizer, max_tokens)]
    endless = [place for place, sample in made if not _learns_an_end(sample, tokenizer)]
    if endless:
        # As with a chat template that writes no end: the policy then goes on up to its limit.
        log.warning("answers are learned without their end", samples=len(endless), of=len(made), first=endless[0])
    return [sample for _, sample in made]


def _learns_an_end(sample: Sample, tokenizer: Tokenizer) -> bool:
    return any(end in sample.tokens[sample.loss_mask > 0] for end in tokenizer.end_ids)


def prepare_sequences(row: DataRow, tokenizer: Tokenizer, max_tokens: int) -> list[Sample]:
    """One, or several where the chat template rewrites earlier turns of the conversation. Raises InvalidData."""
    if "messages" in row.fields:
        chats, prompt, response = _from_messages(row, tokenizer)
    else:
        prompt, response = text_field(row, "prompt"), text_field(row, "response")
        chats = [_encode(row, tokenizer)]
    return [_conversation(row, chat, max_tokens, prompt=prompt, response=response) for chat in chats]


def prepare_conversation(row: DataRow, tokenizer: Tokenizer, max_tokens: int) -> Sample:
    """Where nothing but one sequence will do. Raises InvalidData."""
    return _only(row, prepare_sequences(row, tokenizer, max_tokens))


def _only(row: DataRow, sequences: list[Item]) -> Item:
    if len(sequences) > 1:
        raise row.refuse(
            "the chat template rewrites earlier turns of the assistant's, so what is learned is no single sequence; "
            "give all but the last `weight: 0`"
        )
    return sequences[0]


def _conversation(row: DataRow, chat: MaskedIds, max_tokens: int, *, prompt: str, response: str) -> Sample:
    ids, mask = chat
    if len(ids) > max_tokens:
        raise row.refuse(f"the row has {len(ids)} tokens; rollout.engine.maxContext allows {max_tokens}")
    return Sample(
        tokens=np.asarray(ids, dtype=np.int64),
        loss_mask=np.asarray(mask, dtype=np.float32),
        prompt_length=mask.index(1),
        prompt=prompt,
        response=response,
    )


def _from_messages(row: DataRow, tokenizer: Tokenizer) -> tuple[list[MaskedIds], str, str]:
    messages = messages_field(row)
    if not any(message["role"] == "assistant" for message in messages):
        raise row.refuse(f"{row.called('messages')} has no assistant turn to learn from")
    tools = tools_field(row)
    with row.named_in(f"{row.called('messages')}: "):
        chats = [chat for chat in tokenizer.encode_chats(messages, tools) if any(chat[1])]
    if not chats:
        raise row.refuse(f"{row.called('messages')}: the assistant's turns are empty, or all have weight 0")
    return chats, "", messages[-1]["content"]


def _encode(row: DataRow, tokenizer: Tokenizer) -> MaskedIds:
    """Prompt and response with its end-of-sequence, which are learned, or a conversation's answers."""
    if "messages" in row.fields:
        return _only(row, _from_messages(row, tokenizer)[0])
    with row.named_in():
        prompt_ids = tokenizer.encode_prompt(row.fields["prompt"])
        return _learned_after(prompt_ids, [*tokenizer.encode_text(row.fields["response"]), tokenizer.eos_id])


def _learned_after(prompt: list[int], response: list[int]) -> MaskedIds:
    return [*prompt, *response], [0] * len(prompt) + [1] * len(response)


FinishedGroup = tuple[Sample, ...]

_OWN_FIELDS = frozenset(
    {"prompt", "response", "messages", "reward", "group", "tokens", "prompt_length", "rollout_log_probs"}
)


def prepare_finished_groups(rows: Iterable[DataRow], tokenizer: Tokenizer, max_tokens: int) -> list[FinishedGroup]:
    """Groups in the order of their first rows; groups are numbered in that order. Raises InvalidData."""
    members: dict[str | int, list[DataRow]] = {}
    for row in rows:
        members.setdefault(_group_name(row), []).append(row)
    for name, group_rows in members.items():
        if len(group_rows) < 2:
            raise group_rows[0].refuse(f"group {name!r} has one sample only; an advantage needs at least two")
    groups = []
    for number, (name, group_rows) in enumerate(members.items()):
        groups.append(tuple(_finished(row, tokenizer, max_tokens, number) for row in group_rows))
        # Tokens are compared with tokens: of some samples only the text may be known.
        for alike, shown in ((group_rows, _shown_first), ([row for row in group_rows if _read(row)], _read)):
            for row in alike[1:]:
                if shown(row) != shown(alike[0]):
                    raise row.refuse(f"field `group`: {name!r} is that of another prompt at {alike[0].place}")
    return groups


def what_was_asked(row: DataRow) -> str | list[Message]:
    """What the answers to one prompt share: of a conversation all before the first one, since what tools say after it
    is each answer's own. Raises InvalidData."""
    if "messages" not in row.fields:
        return text_field(row, "prompt")
    messages = messages_field(row)
    greeting = list(takewhile(lambda message: message["role"] == "assistant" and not is_learned(message), messages))
    return [*greeting, *takewhile(lambda message: message["role"] != "assistant", messages[len(greeting) :])]


def _shown_first(row: DataRow) -> object:
    """What a group's samples share: what was asked, of a prompt of messages all of it, and the tools for it."""
    return what_was_asked(row), isinstance(row.fields.get("prompt"), list) and row.fields["prompt"], tools_field(row)


def _read(row: DataRow) -> object:
    """Token ids that an engine read before it answered; nothing where they are not given."""
    return row.fields.get("tokens") and row.fields["tokens"][: row.fields["prompt_length"]]


def _group_name(row: DataRow) -> str | int:
    name = row.fields.get("group")
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise row.refuse("field `group` must be text or a whole number that the prompt's samples share")
    return name


def _finished(row: DataRow, tokenizer: Tokenizer, max_tokens: int, group: int) -> Sample:
    has_tokens = row.fields.get("tokens") is not None
    prompt, response = _last_words(row, may_be_empty=has_tokens)
    reward = _reward(row)
    ids, mask = _given_tokens(row, tokenizer) if has_tokens else _encode(row, tokenizer)
    end = len(mask) - mask[::-1].index(1)  # templates put more behind it, of which no engine has a logprob
    ids, mask = ids[:end], mask[:end]
    if len(ids) > max_tokens:
        raise row.refuse(f"the sample has {len(ids)} tokens; rollout.engine.maxContext allows {max_tokens}")
    prompt_length = mask.index(1)
    return Sample(
        tokens=np.asarray(ids, dtype=np.int64),
        loss_mask=np.asarray(mask, dtype=np.float32),
        prompt_length=prompt_length,
        group=group,
        prompt=prompt,
        response=response,
        reward=reward,
        rollout_log_probs=_given_log_probs(row, len(ids), prompt_length),
        metadata={name: value for name, value in row.fields.items() if name not in _OWN_FIELDS},
    )


def _last_words(row: DataRow, *, may_be_empty: bool) -> tuple[str, str]:
    """Prompt and response, of a conversation what was asked and answered last. An answer that ended at once has a token
    and no text."""
    if "messages" not in row.fields:
        return text_field(row, "prompt"), text_field(row, "response", may_be_empty=may_be_empty)
    *before, answer = messages_field(row)
    if answer["role"] != "assistant":
        raise row.refuse(f"{row.called('messages')} must end with the assistant's answer")
    return before[-1]["content"] if before else "", answer["content"]


def _reward(row: DataRow) -> float:
    reward = row.fields.get("reward")
    if not is_number(reward, MAX_REWARD):
        raise row.refuse(f"field `reward` must be {REWARD_WORDS}, got {reward!r:.80}")
    return float(reward)  # type: ignore[arg-type] # a number


def _given_tokens(row: DataRow, tokenizer: Tokenizer) -> MaskedIds:
    ids, prompt_length = row.fields["tokens"], row.fields.get("prompt_length")
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
        raise row.refuse("field `tokens` must be a list of token ids")
    if max(ids, default=0) >= tokenizer.vocabulary:
        raise row.refuse(f"field `tokens`: {max(ids)} is no token; the tokenizer has {tokenizer.vocabulary}")
    if type(prompt_length) is not int or not 0 < prompt_length < len(ids):
        raise row.refuse(f"field `prompt_length` must be between 1 and {len(ids) - 1}, the number of tokens less one")
    return _learned_after(ids[:prompt_length], ids[prompt_length:])


def _given_log_probs(row: DataRow, length: int, prompt_length: int) -> npt.NDArray[np.float32] | None:
    given = row.fields.get("rollout_log_probs")
    if given is None:
        return None
    expected = length - prompt_length
    if not isinstance(given, list) or len(given) != expected:
        raise row.refuse(f"field `rollout_log_probs` must be a list of {expected} numbers, one per response token")
    if not all(is_number(value, MAX_LOG_PROB) and value <= 0 for value in given):
        raise row.refuse("field `rollout_log_probs` must hold finite numbers that are at most 0")
    return np.concatenate([np.zeros(prompt_length), np.asarray(given)]).astype(np.float32)
