"""The history of a run, and the audit that checks the invariants against it.

- `history`: events without tokens, as a journal keeps them for good; `HistoryProjection` makes them.
- `audit`: goes through a history and compares the ledger's own state; `Audit` is the one checker, of journals
  (`polyrl check`) and of the simulation.
- `engines`, `samples`, `batches`, `window`: what the audit knows of each, and the checks on it.
- `findings`: the invariants, and what was found.

Nothing here may import how the ledger decides or applies events: an audit that shared that code would share its faults.
"""
