"""Counting each lost pod once, across crashes, stale reads and repeated looks.

    a pod's end is seen      -> annotate it with the next number, `preemption-7`; total + 1, + 2, ...
    the number is read back  -> the status counts to the highest number read, and lists the pod
    the status is stored     -> the pod may be deleted

Each arrow is a look of its own, and each may be repeated: a pod keeps the number that it was given. One that vanished
before it could be numbered is known from the last look and counted at once; only if the operator ends in that very
moment, such a one goes uncounted.
Refuses to hold: which ends count as what (see `rollouts`). Read next: `names`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from polyrl.cluster import names
from polyrl.cluster.observation.facts import PodFacts
from polyrl.cluster.state import SeenPod


class Tally(StrEnum):
    """What is counted."""

    PREEMPTION = "preemption"
    """A rollout was taken away."""
    FAILURE = "failure"
    """A rollout failed by itself."""
    DISRUPTION = "disruption"
    """A trainer pod was taken away."""


@dataclass(frozen=True)
class Counted:
    """A pod's place in a tally."""

    tally: Tally
    number: int

    def __str__(self) -> str:
        return f"{self.tally}-{self.number}"


def counted(pod: PodFacts) -> Counted | None:
    """What is written on the pod; None when nothing is, or nothing that we wrote."""
    return parsed(pod.annotations.get(names.ANNOTATION_COUNTED, ""))


def parsed(mark: str) -> Counted | None:
    """Inverse of str(Counted); None for any other text."""
    tally, _, number = mark.partition("-")
    if tally not in {known.value for known in Tally} or not number.isdecimal():
        return None
    return Counted(Tally(tally), int(number))


def numbers(uids: Iterable[str], tally: Tally, reached: int, seen: Mapping[str, SeenPod]) -> dict[str, Counted]:
    """Numbers above `reached` for pods that show none, by uid. A pod that got one in an earlier look keeps it: it may
    be gone, and only our view of it old, while pods that got later numbers are counted, and it with them."""
    kept = {uid: mark for uid, pod in seen.items() if (mark := parsed(pod.mark)) is not None}
    given = [mark.number for mark in kept.values() if mark.tally is tally]
    following = itertools.count(max([reached, *given]) + 1)
    return {uid: kept[uid] if uid in kept else Counted(tally, next(following)) for uid in uids}


def newly_counted(pods: Iterable[PodFacts], tally: Tally, stored: int) -> list[PodFacts]:
    """Pods whose number the stored counter has not reached, in the order of their numbers."""
    numbered = [(mark.number, pod) for pod in pods if (mark := counted(pod)) is not None and mark.tally is tally]
    return [pod for number, pod in sorted(numbered, key=lambda pair: pair[0]) if number > stored]


def total(pods: Iterable[PodFacts], tally: Tally, stored: int, vanished: Iterable[SeenPod] = ()) -> int:
    """The counter to store. Of pods that vanished, those with a number have it still; the others are preemptions, or
    disruptions of the trainer, and are counted without one."""
    gone = list(vanished)
    marks = [counted(pod) for pod in pods] + [parsed(pod.mark) for pod in gone]
    highest = max([stored, *(mark.number for mark in marks if mark is not None and mark.tally is tally)])
    return highest + (0 if tally is Tally.FAILURE else sum(not pod.mark for pod in gone))
