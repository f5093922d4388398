"""The nouns every part shares: prompts in groups, samples, how they are sampled, how they end.

A *group* is one prompt with `n` samples. A *sample* is one sequence, possibly of several turns: the prompt, then tokens
that an engine generated and, between turns, tokens that an environment wrote. Everything here is a frozen value.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum
from math import inf
from typing import Final

import msgspec


class Purpose(StrEnum):
    """Why a group is generated: it trains, or it measures."""

    TRAIN = "train"
    """Its samples are trained on."""
    EVAL = "eval"
    """Its samples are scored only."""


class Pool(StrEnum):
    """What kind of capacity an engine runs on."""

    RESERVED = "reserved"
    """On the trainer's own devices; generates only while the reserved window is open."""
    SPOT = "spot"
    """May vanish at any moment, with or without notice."""
    ON_DEMAND = "on-demand"
    """A machine of its own that nobody takes back."""


class Finish(StrEnum):
    """Why a turn ended, as the engine saw it."""

    STOP = "stop"
    """An end-of-sequence or stop token, or the token that completes a stop string; it is the last generated token."""
    LENGTH = "length"
    """The sample's token budget is used up, or the context of every engine that may serve it."""


class DiscardReason(StrEnum):
    """Why a sample will never be trained. Infrastructure never becomes a reward: these are outcomes, not zeros."""

    # The user's side: data and code.
    REWARD_RAISED = "rewardRaised"
    """The reward function or the filter function raised an exception."""
    REWARD_TIMED_OUT = "rewardTimedOut"
    """The reward function gave nothing in time, or the trainer no verdict."""
    REWARD_INVALID = "rewardInvalid"
    """The reward function gave something that is not a finite number."""
    ENVIRONMENT_FAILED = "environmentFailed"
    """The environment raised an exception, took too long, or wrote something that cannot be used."""
    ENVIRONMENT_DIVERGED = "environmentDiverged"
    """Played again after a restart of the trainer, the environment wrote something else than before."""
    PROMPT_TOO_LONG = "promptTooLong"
    """Its prompt leaves no room for a response in the context of any engine that may serve it."""
    # The algorithm's side: generated, but not wanted.
    FILTERED = "filtered"
    """Its group did not pass the group filter."""
    SURPLUS = "surplus"
    """Over-sampling produced more complete groups than the step needed."""
    STALE = "stale"
    """Its oldest token is further behind the learner than `maxStaleness` allows."""
    GROUP_INCOMPLETE = "groupIncomplete"
    """A sibling was discarded, so the group's statistics would be wrong."""
    # The infrastructure's side.
    ENGINE_REJECTED = "engineRejected"
    """Engines refused this very sample again and again (see the ledger's limit), for a reason they name."""
    CANCELLED = "cancelled"
    """The trainer withdrew it, or the run ended."""
    JOURNAL_LOST = "journalLost"
    """The manager lost its journal, and the sample with it; its prompt is generated anew under another name."""

    @property
    def is_infrastructure(self) -> bool:
        """True when neither the user's code nor the algorithm chose this end."""
        return self in (DiscardReason.ENGINE_REJECTED, DiscardReason.CANCELLED, DiscardReason.JOURNAL_LOST)


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """How to draw tokens; names as in SGLang.

    Logprobs that engines report are those of the temperature-scaled distribution before top-p and top-k cut it,
    log_softmax(logits / temperature); at temperature 0 (greedy) those of log_softmax(logits).
    """

    max_new_tokens: int
    """Tokens that engines may generate for the whole sample, over all turns and attempts; environments' don't count."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1 keeps the whole vocabulary."""
    stop_token_ids: tuple[int, ...] = ()
    """A turn ends right after one of these; the token is kept."""
    seed: int | None = None
    """Seed of the whole group, for draws that can be repeated; see `sample_seed`."""
    stop: tuple[str, ...] = ()
    """A turn ends right after the token that completes one of these; all its tokens are kept. Engines know tokens only:
    the agent beside one reads its text, by the `tokenizer.json` that comes with the weights."""


LEAST_TEMPERATURE: Final = 0.01
"""Above 0: with less no second token has a chance, SGLang draws greedily (below 1e-6), and float32 overflows."""


def fault_of(sampling: SamplingParams) -> str | None:
    """What engines would refuse, or each understand differently."""
    temperature, top_p, top_k = sampling.temperature, sampling.top_p, sampling.top_k
    if temperature != 0 and not LEAST_TEMPERATURE <= temperature < inf:
        return f"temperature is {temperature:g}, neither 0 nor at least {LEAST_TEMPERATURE}"
    if not 0 < top_p <= 1:
        return f"top_p is {top_p:g}, not above 0 and at most 1"
    return None if top_k == -1 or top_k > 0 else f"top_k is {top_k}, neither -1 nor at least 1"


class Group(msgspec.Struct, frozen=True, array_like=True):
    """One prompt, n samples, as the trainer submits it."""

    id: int
    """Unique within a run and increasing in submission order; sample ids are derived from it."""
    step: int
    purpose: Purpose
    prompt_ids: bytes
    """uint32 little-endian token ids."""
    n: int
    sampling: SamplingParams
    min_version: int
    """Oldest weight version that may generate for it. Sync mode: the step's own version."""
    max_version: int
    """Newest weight version that may generate for it; equal to min_version in sync mode."""
    priority: int = 0
    """Higher goes first."""


ENVIRONMENT_VERSION: Final = -1
"""Version stamped on tokens that no engine generated."""
TURN_REWARD: Final = "turn_reward/"
"""Begins the names of the numbers beside the reward that are an environment's for its turns 0, 1 ..., unless 0; they
are there where the advantage is of them too."""


class Span(msgspec.Struct, frozen=True, array_like=True):
    """A run of response tokens that share one origin; the spans of a sample cover its generated tokens exactly."""

    start: int
    """First response position, inclusive."""
    end: int
    """Last response position, exclusive."""
    version: int
    """Weight version that generated them; -1 for tokens that an environment wrote."""
    engine: str
    attempt: int


class Response(msgspec.Struct, frozen=True, array_like=True):
    """What was generated (and written by environments) after the prompt. All arrays have the response's length T."""

    sample: str
    ids: bytes
    """uint32[T]"""
    logprobs: bytes
    """float32[T]; 0 where an environment wrote."""
    loss_mask: bytes
    """uint8[T]; 1 where an engine generated."""
    spans: tuple[Span, ...]
    turn: int
    finish: Finish


class Scored(msgspec.Struct, frozen=True, array_like=True):
    """A finished sample with its reward, as it is packed for the learner."""

    group: int
    index: int
    """0 <= index < n within the group."""
    response: Response
    reward: float
    metrics: dict[str, float]
    """Named components of the reward, for the log."""


def group_digest(group: Group) -> bytes:
    """bytes[16]: the same for two groups that ask for the same samples of the same step, whatever their numbers."""
    content = (group.step, group.purpose, group.prompt_ids, group.n, group.sampling)
    return hashlib.blake2b(msgspec.msgpack.encode(content), digest_size=16).digest()


def sample_seed(run_seed: int, sample: str, group_seed: int | None = None) -> int:
    """63 bits that seed the draws of one sample: the same in every attempt and on every engine, another for each
    sibling. A group's own seed counts without its number, so that the group can be drawn again under another."""
    name = f"run {run_seed} {sample}" if group_seed is None else f"group {group_seed} {split_sample_id(sample)[1]}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 1


def sample_id(group: int, index: int) -> str:
    """The name of a sample everywhere: in logs, in `explain`, on the wire."""
    return f"{group}.{index}"


def split_sample_id(sample: str) -> tuple[int, int]:
    """Inverse of `sample_id`. Raises ValueError when `sample` is not such a name."""
    group, _, index = sample.partition(".")
    return int(group), int(index)
