"""Refuses engines that hold other weights than they say, before the ledger hears that they serve.

An engine serves a version once the ledger has taken its WeightsLoaded, or its greeting; so what it adds its weights up
to is compared at that moment, and costs no message more. For the ledger one that is refused has left, and its samples
move; its agent is fenced for good, drops what it holds, and ends with its engine. Whoever started it starts another,
which checks every tensor before it loads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import structlog

from polyrl.ledger.state import LedgerState
from polyrl.weights.engine_sums import OUTCOMES, EngineSum, SumVerdict, WeightSums
from polyrl.wire import FromAgent, Hello, WeightsLoaded

REFUSED: Final = "refused"

log = structlog.get_logger(__name__)


class SumCheck:
    """Between the agents' sessions and the ledger."""

    def __init__(
        self, state: LedgerState, *, refuse: Callable[[str, str], None], note: Callable[[str, str], None]
    ) -> None:
        """`refuse` ends an engine for a reason; `note` keeps a sentence about one for the run's report."""
        self._state, self._refuse, self._note = state, refuse, note
        self.sums = WeightSums()
        self.outcomes = dict.fromkeys((*OUTCOMES, REFUSED), 0)
        """How many sums had each outcome."""

    def admits(self, engine: str, message: FromAgent) -> bool:
        """Whether the ledger may hear the message. Another engine may be refused because of it."""
        match message:
            case WeightsLoaded(version, receipt=receipt, sum=EngineSum() as given):
                verdict = self._judge(engine, version, receipt, given)
            case Hello(weight_version=version, receipts=receipts, sum=EngineSum() as given):
                verdict = self._judge(engine, version, receipts.get(version, b""), given)
            case Hello(weight_version=version) if version < 0:
                self.sums.begins(engine)
                return True
            case _:
                return True
        if verdict.outcome:
            self.outcomes[verdict.outcome] += 1
        if verdict.note and not verdict.refused:
            log.error("weights are not compared", why=verdict.note)
            self._note(engine, verdict.note)
        for one in verdict.refused:
            if one in self._state.engines:  # one that stays, and says it again, is not named again
                self.outcomes[REFUSED] += 1
                log.error("engine refused", engine=one, why=verdict.note)
                self._note(one, f"{one} is refused: {verdict.note}")
            self._refuse(one, verdict.reason)
        return engine not in verdict.refused

    def _judge(self, engine: str, version: int, receipt: bytes, given: EngineSum) -> SumVerdict:
        """The verdict on a sum, for those versions alone for which the ledger takes an engine's word."""
        known = self._state.receipts.get(version) if self._state.weights.receipt else receipt
        if not 0 <= version <= self._state.weights.version or not receipt or known != receipt:
            return SumVerdict()
        content = self._state.contents.get(version) or receipt
        return self.sums.judge(engine, version, content, given=given, receipt=receipt)
