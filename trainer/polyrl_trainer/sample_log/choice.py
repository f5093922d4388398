"""Which few samples of a step are kept: the best, the worst, and whole groups that are drawn, as many as there is room.

Extremes show what the reward pays for and what it punishes; a drawn group shows what the policy usually does, and
siblings side by side are what a group's advantage is made of. The draw is the run's seed's, so a step that is trained
again keeps the same places. Ties are drawn as well: in order of arrival the shortest of many equals would win.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

from polyrl.sample_record import Chosen

EXTREMES: Final = 2
"""Places of the best and the worst; where there is one place only, it is drawn."""


def choose(groups: Sequence[int], rewards: Sequence[float], limit: int, draw: random.Random) -> dict[int, list[Chosen]]:
    """At most `limit` positions of a step's samples with the reasons of each; one sample may have several."""
    order = _whole_groups(groups, draw)
    extremes = [] if limit < EXTREMES or min(rewards) == max(rewards) else _extremes(rewards, draw)
    chosen: dict[int, list[Chosen]] = {}
    for position, reason in extremes:
        chosen.setdefault(position, []).append(reason)
    for position in order[: max(0, limit - len(extremes))]:
        chosen.setdefault(position, []).append(Chosen.RANDOM)
    return dict(sorted(chosen.items()))


def _extremes(rewards: Sequence[float], draw: random.Random) -> list[tuple[int, Chosen]]:
    at_random = list(range(len(rewards)))
    draw.shuffle(at_random)
    best = max(at_random, key=lambda position: rewards[position])
    return [(best, Chosen.BEST), (min(at_random, key=lambda position: rewards[position]), Chosen.WORST)]


def _whole_groups(groups: Sequence[int], draw: random.Random) -> list[int]:
    """All positions, group by group in a drawn order, and in a drawn order within each."""
    members: dict[int, list[int]] = {}
    for position, group in enumerate(groups):
        members.setdefault(group, []).append(position)
    numbers = list(members)
    draw.shuffle(numbers)
    for positions in members.values():
        draw.shuffle(positions)
    return [position for number in numbers for position in members[number]]
