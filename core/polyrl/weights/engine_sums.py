"""Whether an engine holds the weights that it says it serves, by what it and others of its kind add them up to.

That the right bytes reached an engine's machine is checked before it loads them; what it made of them only it can say.
Of one version all engines of a kind have one sum, so a sum is compared with those that came before:

    the sum of this version and kind                        the engine
    is the first one                                        serves
    is that of the first one, or the one that stands        serves
    is another one                                          is refused: it ends, and a new one loads everything anew
    is what it was with another version's weights           is refused: its load did nothing

A sum that two engines gave stands. Until then the first one counts, and may be the false one: where two others agree
against it, they stand, and who gave it is refused. An engine that was started anew is another one, so one machine that
always errs alike has its way only where no two others have come yet. What stands never changes, so a refusal is not
taken back and forth; who is refused again and again is bounded by the back-off of whoever starts engines.

LONE sums that all differ, of a kind of which no two engines ever agreed, tell nothing of weights: it is compared no
more. Nothing here outlives the manager: the next one hears all sums again by the greetings.
"""

from __future__ import annotations

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
"""Versions, by kind: as many as the largest allowed staleness lets engines serve."""
MAX_STARTS: Final = 4096
"""Of a run, with all that were started anew; who was heard first is forgotten first."""
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


@dataclass
class _Compared:
    """Of one version and kind."""

    given: dict[bytes, set[str]] = field(default_factory=dict)
    """Sums in the order in which they came, and the engines that gave them."""
    stands: bytes | None = None

    @property
    def reference(self) -> bytes:
        return next(iter(self.given)) if self.stands is None else self.stands


class WeightSums:
    """Of one run."""

    def __init__(self) -> None:
        self._compared: dict[_Key, _Compared] = {}
        self._agreed: dict[str, bool] = {}
        """Kinds of which two engines gave one sum (True), or that tell nothing (False)."""
        self._held: dict[str, _Held] = {}
        """By engine."""
        self._live: set[str] = set()

    def begins(self, engine: str) -> None:
        """It holds no weights: whoever had its name before is another one."""
        self.gone(engine)
        self._held.pop(engine, None)

    def gone(self, engine: str) -> None:
        """It is not heard. It may have ended, or come again with what it holds."""
        self._live.discard(engine)

    def judge(self, engine: str, version: int, content: bytes, *, given: EngineSum, receipt: bytes) -> SumVerdict:
        """Of a sum that an engine gives of the version that it loaded; `content`: `weights_hash` of it; `receipt`:
        `receipt_of` it, which other files do not change."""
        key = (given.kind, version, content)
        held = _Held(key, receipt, given)
        contradicts = self._contradicts(engine, held)
        if contradicts:
            return contradicts
        if engine in self._live and self._held[engine] == held:
            return SumVerdict()
        self._held[engine] = held
        _bound(self._held, MAX_STARTS)
        self._live.add(engine)
        if self._agreed.get(given.kind) is False:
            return SumVerdict(outcome="incomparable")
        compared = self._compared.setdefault(key, _Compared())
        _bound(self._compared, MAX_COMPARED)
        outcome = "equal" if compared.given else "first"
        givers = compared.given.setdefault(given.sum, set())
        givers.add(engine)
        if compared.stands is None and len(givers) > 1:
            return self._stands(compared, key, given.sum)
        if given.sum != compared.reference:
            return self._differs(compared, engine, key, given.sum)
        return SumVerdict(outcome=outcome)

    def _contradicts(self, engine: str, now: _Held) -> SumVerdict | None:
        """What it said before."""
        if engine not in self._held:
            return None
        before, version = self._held[engine], self._held[engine].key[1]
        other_kind, other_sum = before.given.kind != now.given.kind, before.given.sum != now.given.sum
        if engine in self._live and (other_kind or (before.key == now.key and other_sum)):
            note = f"it contradicts what it said before of version {version}, or of itself ({before.given.kind})"
            return self._refuse((engine,), OTHER_WEIGHTS, note)
        if now.given.exact and not other_sum and before.receipt != now.receipt:
            note = f"it has loaded version {now.key[1]}, and holds what it held of version {version}"
            return self._refuse((engine,), SAME_WEIGHTS, note)
        return None

    def _stands(self, compared: _Compared, key: _Key, given: bytes) -> SumVerdict:
        """From now on; whoever serves with the first one's is refused, if that was another."""
        first, compared.stands = compared.reference, given
        self._agreed[key[0]] = True
        _bound(self._agreed, MAX_KINDS)
        serve = () if first == given else tuple(sorted(compared.given[first]))
        false = tuple(one for one in serve if one in self._live and one in self._held and self._held[one].key == key)
        return self._refuse(false, OTHER_WEIGHTS, _differing(key, first, given) if false else "", outcome="equal")

    def _differs(self, compared: _Compared, engine: str, key: _Key, given: bytes) -> SumVerdict:
        if compared.stands is not None or key[0] in self._agreed or len(compared.given) < LONE:
            return self._refuse((engine,), OTHER_WEIGHTS, _differing(key, given, compared.reference))
        self._agreed[key[0]] = False
        _bound(self._agreed, MAX_KINDS)
        many = f"{len(compared.given)} engines of a kind ({key[0]}) add version {key[1]} up to as many sums"
        note = f"{many}: they tell nothing of weights, and are compared no more"
        return SumVerdict(note=note, outcome="incomparable")

    def _refuse(self, engines: tuple[str, ...], reason: str, note: str, outcome: str = "") -> SumVerdict:
        """None of them may say the same again and be taken for what it was."""
        self._live.difference_update(engines)
        return SumVerdict(engines, reason, note=note, outcome=outcome)


def _differing(key: _Key, given: bytes, reference: bytes) -> str:
    sums = f"adds it up to {given.hex()[:16]}, not to {reference.hex()[:16]}"
    return f"it has loaded version {key[1]}, and {sums} as others of its kind ({key[0]})"


def _bound(table: dict[Any, Any], most: int) -> None:
    if len(table) > most:
        del table[next(iter(table))]
