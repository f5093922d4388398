"""The cluster's time, learnt from its answers: stamps on objects are compared with this, never with our own clock.

Every answer of the API server carries its Date in whole seconds, so that its time lies between two bounds; an estimate
that leaves them is put right. Between answers our monotonic clock goes on: setting the machine's clock changes nothing,
and one that is minutes wrong is wrong until the first answer only.
Refuses to hold: waits (those are by the monotonic clock alone). Read next: `client`, `worker`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from typing import Final

import structlog

log = structlog.get_logger(__name__)

WHOLE_S: Final = 1.0
"""A Date is cut to its second."""

TOLD_S: Final = 2.0
"""A correction that is worth a line: more than the cut and a slow answer explain."""


class ClusterClock:
    """One per operator. `steady` is monotonic, `wall` what is believed before the first answer."""

    def __init__(self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = time.monotonic) -> None:
        self.steady = steady
        self._lead = wall() - steady()

    def now(self) -> float:
        """Unix seconds, as the API server counts them."""
        return self.steady() + self._lead

    def heard(self, date: str | None, sent_at: float) -> None:
        """An answer just came that bears this Date, to a request sent at `sent_at` of the steady clock."""
        if date is None:
            return
        try:
            stamp = parsedate_to_datetime(date).timestamp()
        except ValueError:
            return
        before = self._lead
        self._lead = min(max(before, stamp - self.steady()), stamp + WHOLE_S - sent_at)
        if abs(self._lead - before) > TOLD_S:
            log.warning("clock put right by the API server's", by_s=round(self._lead - before, 1))
