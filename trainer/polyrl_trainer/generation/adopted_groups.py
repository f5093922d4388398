"""What an earlier trainer of this run left at the manager: groups that are generated, or even scored, and not trained.

A trainer that goes on from a checkpoint submits the prompts of its next step again. Those that the manager still holds
for the same step, prompt, sampling and weight versions need not be generated twice: they are taken as they are.
All others are too old, or too new, for the weights that training goes on with.
"""

from __future__ import annotations

from collections.abc import Iterable

from polyrl.sample import Group, Purpose, group_digest
from polyrl.wire import HeldGroup


class AdoptedGroups:
    """Each held group is taken once, or is left at the end."""

    def __init__(self, held: Iterable[HeldGroup] = (), *, whole_groups: bool = False) -> None:
        """`whole_groups`: verdicts leave by whole groups, so one with some of them is of no use."""
        self._useful: dict[int, HeldGroup] = {}
        self._useless: dict[int, HeldGroup] = {}
        for group in held:
            (self._useless if whole_groups and group.scored else self._useful)[group.id] = group

    def __contains__(self, number: int) -> bool:
        return number in self._useful

    def take(self, group: Group) -> int | None:
        """The number of a held group with the prompt, sampling and allowed versions of `group`; None without."""
        digest, low, high = group_digest(group), group.min_version, group.max_version
        for number, one in self._useful.items():
            if one.digest == digest and low <= one.min_version <= one.max_version <= high:
                del self._useful[number]
                return number
        return None

    def forget(self, number: int) -> None:
        """The manager has dropped it."""
        self._useful.pop(number, None)
        self._useless.pop(number, None)

    def give_up(self, step: int, purpose: Purpose) -> list[int]:
        """Gives up what is of no use once this step was submitted: what is left of the step, and with a training step
        all that is left, since training goes on with other weights."""
        left = self._useless | self._useful
        if purpose is not Purpose.TRAIN:
            left = {number: one for number, one in left.items() if (one.step, one.purpose) == (step, purpose)}
        for number in left:
            self.forget(number)
        return list(left)
