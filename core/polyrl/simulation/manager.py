"""The manager process in virtual time: the production ledger on its journal's rows, killed and begun again.

    outcome -> rows (the journal's own form) -> messages leave
    kill -9 -> rows -> replay -> ledger; its clock goes on where the last row was written

What is not in the rows is gone, as after the death of a process. Refuses to hold: files (SQLite keeps rows whole, or
not at all), rules. Read next: `world`.
"""

from __future__ import annotations

from typing import Final

from polyrl.ledger import Fact, Ledger, LedgerConfig
from polyrl.ledger import journal_format as form
from polyrl.ledger.codec import encode_facts, encode_state

SNAPSHOT_ROWS: Final = 97
"""Rows between two snapshots: few enough that runs of a minute meet both a snapshot and a tail."""


class SimulatedManager:
    """One manager with its journal; the ledger inside is another after each restart."""

    def __init__(self, config: LedgerConfig) -> None:
        self.ledger = Ledger(config)
        self._clock_s = 0.0
        """The ledger's clock minus virtual time: it stands still while no manager runs."""
        self._snapshot = form.row(0, 0.0, encode_state(self.ledger.state))
        self._rows: list[form.Row] = []

    def clock(self, now: float) -> float:
        """The ledger's clock at virtual time `now`."""
        return now + self._clock_s

    def due(self) -> float | None:
        """Virtual time of the next tick; None while nothing waits."""
        due = self.ledger.next_due()
        return None if due is None else due - self._clock_s

    def keep(self, facts: list[Fact], now: float) -> None:
        """One commit of the journal; every so often a snapshot takes the place of its rows."""
        body = encode_facts(facts)
        if not body:
            return
        seq = self._snapshot[0] + len(self._rows) + 1
        self._rows.append(form.row(seq, self.clock(now), body))
        if len(self._rows) >= SNAPSHOT_ROWS:
            self._snapshot = form.row(seq, self.clock(now), encode_state(self.ledger.state))
            self._rows.clear()

    def restart(self, now: float) -> None:
        """The process is dead; another one reads the journal."""
        replayed = form.replay(self._snapshot, self._rows)
        assert replayed is not None, "the first snapshot is always there"
        self.ledger = Ledger(replayed.state.config, replayed.state)
        self._clock_s = replayed.at - now
