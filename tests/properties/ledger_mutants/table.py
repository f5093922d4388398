"""Ledgers broken on purpose, as a colleague would break them; by the part of the ledger that is broken.

tokens    what agents send, and what becomes of it
samples   samples and groups: their phases, verdicts and ends
batches   what the trainer asks for and gets
fleet     leases, drains, pauses, placement, moves
devices   what the trainer's devices do, and how long its batches wait for that
growth    what a manager holds and sends, beyond what tokens take
disk      events, snapshots, pages, and what leaves before they are safe
"""

from __future__ import annotations

from typing import Final

from ledger_mutants import batches, devices, disk, fleet, growth, samples, tokens
from ledger_mutants.mutant import Mutant

MUTANTS: Final[tuple[Mutant, ...]] = (
    *tokens.MUTANTS,
    *samples.MUTANTS,
    *batches.MUTANTS,
    *fleet.MUTANTS,
    *devices.MUTANTS,
    *growth.MUTANTS,
    *disk.MUTANTS,
)
