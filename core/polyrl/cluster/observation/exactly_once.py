"""Counts each lost pod exactly once, across crashes, stale reads and repeated reconciles.

    a pod's end is seen      -> annotate it with the next number, `preemption-7`; total + 1, + 2, ...
    the number is read back  -> the status counts to the highest number read, and lists the pod
    the status is stored     -> the pod may be deleted

Each arrow is a reconcile of its own, and each may be repeated: a pod keeps the number that it was given. A pod that
vanished before it could be numbered is known from the last reconcile and counted at once; only if the operator ends in
that very moment does such a pod go uncounted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from polyrl.cluster import names
from polyrl.cluster.observation.facts import PodFacts
from polyrl.cluster.state import LastSeenPod

MAX_DIGITS: Final = 10
"""Most digits of a number that a pod shows: whoever may annotate pods may write any, and statuses hold 64 bits."""


class LossCounter(StrEnum):
    """What is counted."""

    PREEMPTION = "preemption"
    """A rollout was taken away."""
    FAILURE = "failure"
    """A rollout failed by itself."""
    DISRUPTION = "disruption"
    """A trainer pod was taken away."""


@dataclass(frozen=True)
class LossNumber:
    """A lost pod's number in one of the counters."""

    counter: LossCounter
    number: int

    def __str__(self) -> str:
        return f"{self.counter}-{self.number}"


def loss_number_of(pod: PodFacts) -> LossNumber | None:
    """The number annotated on the pod; None without the annotation, or when another writer set it."""
    return parse_loss_number(pod.annotations.get(names.ANNOTATION_COUNTED, ""))


def parse_loss_number(text: str) -> LossNumber | None:
    """Inverse of str(LossNumber); None for any other text."""
    counter, _, number = text.partition("-")
    if counter not in {known.value for known in LossCounter} or not number.isdecimal() or len(number) > MAX_DIGITS:
        return None
    return LossNumber(LossCounter(counter), int(number))


def assign_numbers(
    uids: Iterable[str], counter: LossCounter, reached: int, last_seen: Mapping[str, LastSeenPod]
) -> dict[str, LossNumber]:
    """Numbers above `reached` for pods that show none, by uid. A pod that got one in an earlier reconcile keeps it: it
    may be gone, and only our view of it old, while pods that got later numbers are counted, and it with them."""
    kept = {uid: given for uid, pod in last_seen.items() if (given := parse_loss_number(pod.loss_number)) is not None}
    highest = max([reached, *(given.number for given in kept.values() if given.counter is counter)])
    following = itertools.count(highest + 1)
    return {uid: kept[uid] if uid in kept else LossNumber(counter, next(following)) for uid in uids}


def newly_counted(pods: Iterable[PodFacts], counter: LossCounter, stored: int) -> list[PodFacts]:
    """Pods whose number the stored counter has not reached, in the order of their numbers."""
    read = [(given.number, pod) for pod in pods if (given := loss_number_of(pod)) and given.counter is counter]
    return [pod for number, pod in sorted(read, key=lambda pair: pair[0]) if number > stored]


def total(pods: Iterable[PodFacts], counter: LossCounter, stored: int, vanished: Iterable[LastSeenPod] = ()) -> int:
    """The counter to store. Of pods that vanished, those with a number have it still; the others are preemptions, or
    disruptions of the trainer, and are counted without one."""
    missing = list(vanished)
    read = [loss_number_of(pod) for pod in pods] + [parse_loss_number(pod.loss_number) for pod in missing]
    highest = max([stored, *(given.number for given in read if given is not None and given.counter is counter)])
    return highest + (0 if counter is LossCounter.FAILURE else sum(not pod.loss_number for pod in missing))
