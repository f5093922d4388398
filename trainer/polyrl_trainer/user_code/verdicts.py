"""What user code returned becomes a number or a typed reason; anything else is `Unscored`, and never becomes 0."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from polyrl import wire
from polyrl.sample import TURN_REWARD, DiscardReason
from polyrl_trainer.sample import ANSWER_HASH, MAX_REWARD, REWARD_WORDS
from polyrl_trainer.sample_log.texts import MAX_NAME_CHARS, readable

ANSWER: Final = "answer"
"""A text, a number or None that the reward names: what the sample answers, for a vote among a prompt's samples."""

_OURS: Final = re.compile(
    r"mean|std|min|max|overlong_penalty|clip_ratio|scored|unscored|(pass|avg|maj)@\d+"
    rf"|environment_truncated|{TURN_REWARD}.*|{ANSWER_HASH}",
    re.DOTALL,
)
"""Names beside which the means of a reward's numbers stand in a step's metrics and in an evaluation's, and those by
which an environment's numbers and an answer's are known on a sample."""


@dataclass(frozen=True)
class Reward:
    """A finite number, and named finite numbers beside it."""

    value: float
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Unscored:
    """No reward can be had, and why."""

    reason: DiscardReason
    detail: str


Verdict = Reward | Unscored


def read_reward(result: object, function: str = "the reward") -> Verdict:
    """A number or a dict with `reward`; anything else is REWARD_INVALID."""
    named = dict(result) if isinstance(result, Mapping) else {"reward": result}
    if isinstance(answer := _as_text(named.get(ANSWER)), str | None):
        named.pop(ANSWER, None)
    if "reward" not in named:
        names = readable(str(sorted(map(str, named))), MAX_NAME_CHARS)
        return Unscored(DiscardReason.REWARD_INVALID, f"the dict has no `reward`, only {names}")
    numbers: dict[str, float] = {}
    for name, value in named.items():
        if fault := _fault_of_name(name):
            shown = readable(ascii(name), MAX_NAME_CHARS)
            return Unscored(DiscardReason.REWARD_INVALID, f"{function} names a number {shown}{fault}")
        number = finite(value)
        if number is None:
            shown = readable(name, MAX_NAME_CHARS)
            return Unscored(DiscardReason.REWARD_INVALID, f"`{shown}` must be a finite number, got {value!r:.80}")
        numbers[name] = number
    value = numbers.pop("reward")
    if abs(value) > MAX_REWARD:
        return Unscored(DiscardReason.REWARD_INVALID, f"`reward` must be {REWARD_WORDS}, got {value:g}")
    if isinstance(answer, str):
        numbers[ANSWER_HASH] = _number_of(answer)
    excess = wire.excess_of_metrics(numbers)
    if excess:
        return Unscored(DiscardReason.REWARD_INVALID, f"the numbers that {function} names beside `reward` {excess}")
    return Reward(value, numbers)


def read_rewards(results: object, n: int, *, function: str) -> list[Verdict]:
    """Verdicts of a function of `n` samples: as many results, each read as one; else all are REWARD_INVALID."""
    try:
        each = None if isinstance(results, str | bytes | Mapping) else list(results)  # type: ignore[call-overload]
    except TypeError:
        each = None
    if each is None or len(each) != n:
        got = f"{results!r:.80}" if each is None else f"{len(each)}"
        detail = f"{function} must return a list with a result for each of its {n} samples, got {got}"
        return [Unscored(DiscardReason.REWARD_INVALID, detail)] * n
    return [read_reward(result, function) for result in each]


def _fault_of_name(name: object) -> str:
    """Why a number may not be named so, after the name; empty: it may."""
    if not isinstance(name, str) or not name.strip() or not _has_utf8(name):
        return "; a name is text that is not empty and has a form in UTF-8"
    return ", as the run names one of its own; name it otherwise" if _OURS.fullmatch(name) else ""


def _as_text(answer: object) -> object:
    """42, 42.0 and "42" are one answer, 0 and -0.0 too; what is no finite number is left as it is."""
    number = finite(answer)
    if number is None:
        return answer
    return str(answer) if type(answer) is int else f"{number + 0.0:.15g}"


def _number_of(answer: str) -> float:
    """53 bits, which a float holds exactly."""
    digest = hashlib.blake2b(answer.strip().encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return float(int.from_bytes(digest) >> 11)


def _has_utf8(text: str) -> bool:
    """False with half a surrogate pair, which Python allows and no file or wire does."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _plain(value: object) -> object:
    """Python's own of what numpy or torch have one of; anything else as it is."""
    try:
        return value.item() if callable(getattr(value, "item", None)) else value  # type: ignore[attr-defined]
    except (ValueError, RuntimeError, TypeError):
        return value


def finite(value: object) -> float | None:
    """Python's, numpy's and torch's numbers alike; None for what is none."""
    value = _plain(value)
    if not isinstance(value, bool | int | float | np.number | np.bool_) or isinstance(value, np.complexfloating):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def read_admission(wanted: object) -> Unscored | None:
    """What a group filter returned; None lets the group pass."""
    wanted = _plain(wanted)
    if not isinstance(wanted, bool):
        return Unscored(DiscardReason.REWARD_INVALID, f"filterFunction must return True or False, got {wanted!r:.80}")
    return None if wanted else Unscored(DiscardReason.FILTERED, "filterFunction returned False")
