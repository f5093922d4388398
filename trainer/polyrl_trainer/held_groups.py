"""What an earlier trainer of this run left at the manager: groups that are generated, or even scored, and not trained.

A trainer that goes on from a checkpoint submits the prompts of its next step again. Those that the manager still holds
for the same step, prompt, sampling and weight versions need not be generated twice: they are taken as they are.
Everything else that is held is too old, or too new, for the weights that training goes on with.

Refuses to hold: messages, prompts (see `group_supply`). Read next: `group_supply`.
"""

from __future__ import annotations

from collections.abc import Iterable

from polyrl.sample import Group, group_digest
from polyrl.wire import HeldGroup


class HeldGroups:
    """Each held group is taken once, or is left at the end."""

    def __init__(self, held: Iterable[HeldGroup] = (), *, gated: bool = False, plays: bool = False) -> None:
        """`gated`: verdicts leave by whole groups, so one with some of them is of no use. `plays`: environments live in
        the trainer, so one in its second turn or beyond has lost its own."""
        self._useful: dict[int, HeldGroup] = {}
        self._useless: list[int] = []
        for one in held:
            if (gated and one.scored) or (plays and one.turn):
                self._useless.append(one.group)
            else:
                self._useful[one.group] = one

    def __contains__(self, number: int) -> bool:
        return number in self._useful

    def take(self, group: Group) -> int | None:
        """The number of one that asks for the same as `group` does and may be trained in its place; None without."""
        digest, low, high = group_digest(group), group.min_version, group.max_version
        for number, one in self._useful.items():
            if one.digest == digest and low <= one.min_version <= one.max_version <= high:
                del self._useful[number]
                return number
        return None

    def forget(self, number: int) -> None:
        """The manager has dropped it."""
        self._useful.pop(number, None)

    def leave(self) -> list[int]:
        """All that nobody took; none is held any more."""
        left = [*self._useless, *self._useful]
        self._useless, self._useful = [], {}
        return left
