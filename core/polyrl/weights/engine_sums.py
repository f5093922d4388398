"""Whether an engine holds the weights that it says it serves, by what it and others of its kind add them up to.

That the right bytes reached an engine's machine is checked before it loads them; what it made of them only it can say.
Of one version all engines of a kind have one sum, so a sum is compared with those that came before:

    the sum of this version and kind                        the engine
    is the one that stands: at first the first one          serves
    is another one                                          is refused: it ends, and a new one loads everything anew
    and more engines at one time gave it than the former    serves: it stands from now on, who has the former is refused
    is what it was with another version's weights           is refused: its load did nothing

Nobody here knows machines. One that errs always alike has a follower where its engine ends, under whatever name; so
engines count that were there at one time (lives that overlap), which are as many machines or parts of one. Who is
refused counts too. So what most of a fleet says stands as soon as more of it were there together than err alike, and
the count that it takes only grows: nobody is refused back and forth. Where as many say the one as the other, the first
one stays.

LONE sums that all differ, of a kind of which no two engines ever agreed, tell nothing of weights: it is compared no
more. Nothing here outlives the manager: the next one hears all sums again by the greetings.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, NamedTuple, TypeAlias

import msgspec

OTHER_WEIGHTS: Final = "its engine holds other weights than others of its kind that loaded the same version"
SAME_WEIGHTS: Final = "its engine holds the weights that it held before, which are another version's"
REFUSALS: Final = (OTHER_WEIGHTS, SAME_WEIGHTS)
"""Reasons of a Fenced for which an agent ends with its engine."""

OUTCOMES: Final = ("first", "equal", "incomparable")

LONE: Final = 4
"""A machine that errs each time in another way gives some, with its restarts; a second good one gives none."""
MAX_COMPARED: Final = 64
"""Versions of a kind: as many as the largest allowed staleness lets engines serve."""
MAX_STARTS: Final = 4096
"""Engines of a run that are remembered, with all that were started anew; who was heard first is forgotten first."""
MAX_KINDS: Final = 64
"""A fleet has one or two, for each type of GPU."""


class EngineSum(msgspec.Struct, frozen=True, array_like=True):
    """What an engine's tensors add up to, by its own word."""

    kind: Annotated[str, msgspec.Meta(max_length=128)]
    """Whatever else the sum depends on than the weights: release, device, dtype, how they are spread."""
    sum: Annotated[bytes, msgspec.Meta(max_length=64)]
    exact: bool
    """Its tensors hold all bits of the version's: of other weights it has another sum."""


@dataclass(frozen=True)
class SumVerdict:
    """What follows from one sum."""

    refused: tuple[str, ...] = ()
    """Engines that must not serve, mostly the one that gave it."""
    reason: str = ""
    """One of REFUSALS."""
    note: str = ""
    """A sentence for people, where there is one."""
    outcome: str = ""
    """One of OUTCOMES, of one that serves; empty: it has said so before."""


_Key: TypeAlias = tuple[str, int, bytes]
"""Kind, version, and the content that tells two of one number apart."""


class _Held(NamedTuple):
    """What an engine said last."""

    key: _Key
    receipt: bytes
    given: EngineSum


@dataclass(eq=False)
class _Presence:
    """Stay of an engine, in what was heard of all: from when it was there until it was refused or no longer heard."""

    begins: int
    ends: float = math.inf


@dataclass
class _Compared:
    """Sums that engines gave of one version and kind."""

    stands: bytes
    given: dict[bytes, dict[_Presence, str]] = field(default_factory=dict)
    """By sum: who gave it."""

    def votes(self, given: bytes) -> int:
        """Most of its givers that were there at one time."""
        begins = [(life.begins, 1) for life in self.given[given]]
        ends = [(life.ends, -1) for life in self.given[given]]
        return max(itertools.accumulate(step for _, step in sorted(begins + ends)))


class WeightSums:
    """Sums of the weights that the engines of one run hold, compared."""

    def __init__(self) -> None:
        self._compared: dict[str, dict[_Key, _Compared]] = {}
        """By kind."""
        self._agreed: dict[str, bool] = {}
        """Kinds of which two engines gave one sum (True), or that tell nothing (False)."""
        self._held: dict[str, _Held] = {}
        """By engine."""
        self._lives: dict[str, _Presence] = {}
        """Stays of the engines that are there, by name."""
        self._heard = itertools.count()

    def begins(self, engine: str) -> None:
        """It holds no weights: whoever had its name before is another one."""
        self.gone(engine)
        self._held.pop(engine, None)
        self._lives[engine] = _Presence(next(self._heard))

    def gone(self, engine: str) -> None:
        """It is not heard. It may have ended, or come again with what it holds."""
        if engine in self._lives:
            self._lives.pop(engine).ends = next(self._heard)

    def judge(self, engine: str, version: int, content: bytes, *, given: EngineSum, receipt: bytes) -> SumVerdict:
        """Verdict on a sum that an engine gives of the version that it loaded; `content`: `weights_hash` of it;
        `receipt`: `receipt_of` it, which other files do not change."""
        key = (given.kind, version, content)
        held = _Held(key, receipt, given=given)
        contradicts = self._contradicts(engine, held)
        if contradicts:
            return contradicts
        if engine in self._lives and self._held.get(engine) == held:
            return SumVerdict()
        self._held[engine] = held
        _bound(self._held, MAX_STARTS)
        life = self._lives.setdefault(engine, _Presence(next(self._heard)))
        if self._agreed.get(given.kind) is False:
            return SumVerdict(outcome="incomparable")
        versions = self._compared.setdefault(given.kind, {})
        _bound(self._compared, MAX_KINDS)
        compared = versions.setdefault(key, _Compared(given.sum))
        _bound(versions, MAX_COMPARED)
        outcome = "equal" if compared.given else "first"
        lives = compared.given.setdefault(given.sum, {})
        lives[life] = engine
        _bound(lives, MAX_STARTS)
        return self._compare(compared, engine, key, given.sum) or SumVerdict(outcome=outcome)

    def _contradicts(self, engine: str, now: _Held) -> SumVerdict | None:
        """Refuses an engine whose sum contradicts what it said before; None: it does not."""
        if engine not in self._held:
            return None
        before, version = self._held[engine], self._held[engine].key[1]
        other_kind, other_sum = before.given.kind != now.given.kind, before.given.sum != now.given.sum
        if engine in self._lives and (other_kind or (before.key == now.key and other_sum)):
            note = f"it contradicts what it said before of version {version}, or of itself ({before.given.kind})"
            return self._refuse((engine,), OTHER_WEIGHTS, note)
        if now.given.exact and not other_sum and before.receipt != now.receipt:
            note = f"it has loaded version {now.key[1]}, and holds what it held of version {version}"
            return self._refuse((engine,), SAME_WEIGHTS, note)
        return None

    def _compare(self, compared: _Compared, engine: str, key: _Key, given: bytes) -> SumVerdict | None:
        """Compares a sum with what others gave; None: the engine serves."""
        stands = compared.stands
        if given == stands and key[0] in self._agreed:
            return None
        votes = compared.votes(given)
        if votes > 1:
            self._agreed[key[0]] = True
            _bound(self._agreed, MAX_KINDS)
        if given == stands:
            return None
        if votes > compared.votes(stands):
            return self._stands(compared, key, given)
        if key[0] in self._agreed or len(compared.given) < LONE:
            return self._refuse((engine,), OTHER_WEIGHTS, _differing(key, given, stands))
        self._agreed[key[0]] = False
        _bound(self._agreed, MAX_KINDS)
        many = f"{len(compared.given)} engines of a kind ({key[0]}) add version {key[1]} up to as many sums"
        note = f"{many}: they tell nothing of weights, and are compared no more"
        return SumVerdict(note=note, outcome="incomparable")

    def _stands(self, compared: _Compared, key: _Key, given: bytes) -> SumVerdict:
        """From now on; whoever serves with the former one is refused."""
        former, compared.stands = compared.stands, given
        serve = {one for life, one in compared.given[former].items() if self._lives.get(one) is life}
        false = tuple(sorted(one for one in serve if one in self._held and self._held[one].key == key))
        return self._refuse(false, OTHER_WEIGHTS, _differing(key, former, given) if false else "", outcome="equal")

    def _refuse(self, engines: tuple[str, ...], reason: str, note: str, outcome: str = "") -> SumVerdict:
        """None of them may say the same again and be taken for what it was."""
        for engine in engines:
            self.gone(engine)
        return SumVerdict(engines, reason, note=note, outcome=outcome)


def _differing(key: _Key, given: bytes, reference: bytes) -> str:
    sums = f"adds it up to {given.hex()[:16]}, not to {reference.hex()[:16]}"
    return f"it has loaded version {key[1]}, and {sums} as others of its kind ({key[0]})"


def _bound(table: dict[Any, Any], most: int) -> None:
    if len(table) > most:
        del table[next(iter(table))]
