"""What this trainer has told the manager and got from it: enough to go on with one that has lost its journal.

A manager without its journal knows no group. The greeting says which numbers are taken, so that no verdict on an old
sample is believed for a new one; every group that was open counts as dropped for `journalLost`, and whoever submitted
it submits its prompt anew. The newest weights and the reserved window are told again.

Refuses to hold: sockets, requests (see `client`). Read next: `group_supply`, which replaces what was dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from polyrl.sample import DiscardReason, Group, Purpose
from polyrl.wire import Batch, FromTrainer, GroupDropped, PublishVersion, ReservedWindow, TrainerWelcome


@dataclass
class Cursor:
    """One trainer's view of one run."""

    acknowledged: int = -1
    """Newest acknowledged batch."""
    next_group: int = 0
    """Groups below it were accepted."""
    next_batch: int = 0
    """Batches below it were received."""
    journal: str = ""
    """The manager's; empty before the first welcome."""
    _told: dict[type, FromTrainer] = field(default_factory=dict)
    """The newest version and window."""
    _open: dict[int, tuple[int, Purpose]] = field(default_factory=dict)
    """Step and purpose of each group that was submitted and neither came in a batch, nor was dropped, nor cancelled."""

    def tell(self, message: PublishVersion | ReservedWindow) -> None:
        """The newest of its kind counts until the next one."""
        self._told[type(message)] = message

    def submit(self, groups: Sequence[Group]) -> None:
        """They are asked for."""
        self._open.update({group.id: (group.step, group.purpose) for group in groups})

    def accept(self, groups: Sequence[Group]) -> None:
        """The manager has them."""
        self.next_group = max(self.next_group, *(group.id + 1 for group in groups), 0)

    def receive(self, batch: Batch) -> None:
        """Its groups are the trainer's now."""
        self.next_batch = max(self.next_batch, batch.number + 1)
        for scored in batch.samples:
            self._open.pop(scored.group, None)

    def drop(self, dropped: GroupDropped) -> None:
        """It will not come."""
        self._open.pop(dropped.group, None)

    def end_step(self, step: int, purpose: Purpose) -> None:
        """What is left of it will not come."""
        self._open = {number: of for number, of in self._open.items() if of != (step, purpose)}

    def meet(self, welcome: TrainerWelcome) -> tuple[list[GroupDropped], list[FromTrainer]]:
        """The groups that are lost, and what the manager must be told again; nothing as long as the journal is the
        same. Groups beyond `next_group` were not accepted yet: their submission is repeated like any request."""
        known, self.journal = self.journal, welcome.journal
        if known in ("", welcome.journal):
            return [], []
        lost = {number: of for number, of in self._open.items() if number < self.next_group}
        self._open = {number: of for number, of in self._open.items() if number not in lost}
        why = "the manager lost its journal"
        drops = [GroupDropped(number, *of, DiscardReason.JOURNAL_LOST, why) for number, of in sorted(lost.items())]
        return drops, list(self._told.values())
