"""A time that no step can beat, whatever is known and decided: the clairvoyant lower bound.

Let T be the time of a step from its weights' publication until its last token is learned. Two kinds of numbers, of
which each is at most T; the bound is the largest.

1. Learning: there is one learner, it learns whole groups, and the first time it waits for `micro` samples. A group is
   not complete before the longest path of its samples is over: some engine has loaded the weights, read the prompt and
   generated the tokens one after the other, its tools and its verdict have taken their time; a token takes at least the
   step of the fastest engine with one sample. Of the groups in the order of their paths, none from the k-th on is
   learned before path(k), and none at all before path(m), m the groups that make `micro` samples. So for each k
   T >= path(max(k, m)) + the learning of all groups from the k-th on.
2. Work, for the k longest samples of the step, for many k up to all: at any moment no more than k of them run,
   wherever they are. So engines that are there make at most `rate(engines, k)` of their tokens per second, which is the
   most that batches give whose sum is k, each at most max_running and as many as the KV room and the context hold with
   the shortest of the prompts. An engine makes none before it has loaded and has read the shortest prompt. After the
   last of these tokens come at least `tail`, the shortest of their verdicts with the learning of its group. All
   learning, L seconds, comes after the load, at most `tail` of it after T - tail, and no reserved engine makes a token
   meanwhile: from load to T - tail that leaves it T - load - max(tail, L) seconds at most, here the best ones for it.
   The least T in which so many tokens can be made is at most the step's.

Moves, reading again, tools, idle engines and unknown lengths only add to this, so it is no estimate of what a perfect
scheduler reaches: that lies between.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence as Many
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

from draws import Fleet, Machine, Prompt, Workload, full_rate

PRECISION: Final = 1e-4
LONGEST: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""So many of the longest samples are looked at by themselves."""


class Bound(NamedTuple):
    """Seconds, and which of the reasons decides."""

    seconds: float
    reason: str


def lower_bound(fleet: Fleet, workload: Workload, step: int, began: float) -> Bound:
    """That of a step that began at `began`, in the fleet as it then was and became."""
    prompts, learn_s = workload.steps[step], workload.learn_s(fleet)
    learning = [learn_s * sum(sample.learned for sample in prompt.samples) for prompt in prompts]
    samples = [
        _Wanted(sample.tokens, prompt.tokens, sample.delays[-1] + group_s)
        for prompt, group_s in zip(prompts, learning, strict=True)
        for sample in prompt.samples
    ]
    samples.sort(key=lambda one: -one.tokens)
    counts = {count for count in (*LONGEST, len(samples)) if count <= len(samples)}
    work = max(_Work(fleet, workload, samples[:count], began, sum(learning)).least_s() for count in counts)
    return max(Bound(_learned_s(fleet, workload, prompts, learning), "learning"), Bound(work, "work"))


def _learned_s(fleet: Fleet, workload: Workload, prompts: Many[Prompt], learning: Many[float]) -> float:
    fastest = _Fastest(fleet, workload)
    paths = [max(fastest.path(prompt, index) for index in range(len(prompt.samples))) for prompt in prompts]
    groups = sorted(zip(paths, learning, strict=True))
    first = -(-workload.micro // len(prompts[0].samples)) - 1
    found, left = 0.0, 0.0
    for index in reversed(range(len(groups))):
        left += groups[index][1]
        found = max(found, groups[max(index, first)][0] + left)
    return found


class _Fastest:
    """An engine that has the best of all of them."""

    def __init__(self, fleet: Fleet, workload: Workload) -> None:
        speeds = [machine.speed for machine in (*fleet.reserved, *(m for m in fleet.spot if not m.rejects))]
        self.token_s = min(speed.step_s * (1 + 1 / speed.half_batch) for speed in speeds)
        self.prefill_s = min(speed.prefill_s for speed in speeds)
        self.load_s = workload.load_s

    def path(self, prompt: Prompt, index: int) -> float:
        """Seconds until a sample is done if nothing is ever in its way; siblings share a prompt's reading."""
        sample = prompt.samples[index]
        return self.load_s + self.prefill_s * prompt.tokens + self.token_s * sample.tokens + sum(sample.delays)


class _Wanted(NamedTuple):
    """A sample."""

    tokens: int
    prompt: int
    """Tokens to read."""
    tail_s: float
    """After its last token: its verdict, and the learning of its group."""


class _Work:
    """Number 2, for some samples."""

    def __init__(self, fleet: Fleet, workload: Workload, samples: Many[_Wanted], began: float, learning: float) -> None:
        self._load_s, self._began, self._learning = workload.load_s, began, learning
        self._reserved, self._spot = fleet.reserved, [machine for machine in fleet.spot if not machine.rejects]
        self._tokens, self._count = sum(one.tokens for one in samples), len(samples)
        self._tail_s = min(one.tail_s for one in samples)
        self._prompts = sorted(one.prompt for one in samples)
        self._rates: dict[tuple[int, ...], tuple[float, float]] = {}

    def least_s(self) -> float:
        """The least T."""
        reserved = self._rate(self._reserved)
        low, high = (
            0.0,
            self._ready_s(self._reserved[0]) + self._tail_s + self._learning + self._tokens / reserved + 1.0,
        )
        while high - low > PRECISION * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self._made(middle) >= self._tokens else (middle, high)
        return low

    def _made(self, seconds: float) -> float:
        """Tokens at most, in a step of so many seconds."""
        begin, end = self._began + self._load_s, self._began + seconds - self._tail_s
        lives = [(*life, number) for number, one in enumerate(self._spot) for life in self._lives(one, end)]
        own = self._began + self._ready_s(self._reserved[0])
        cuts = sorted({own, end, *(at for life in lives for at in life[:2])})
        total, gains = 0.0, []
        for left, right in pairwise(at for at in cuts if begin <= at <= end):
            there = tuple(number for up, down, number in lives if up <= left and right <= down)
            alone, together = self._rates_of(there)
            total += (right - left) * alone
            gains.append((together - alone if left >= own else 0.0, right - left))
        free = max(0.0, seconds - self._load_s - max(self._tail_s, self._learning))
        for gain, length in sorted(gains, reverse=True):
            total += gain * min(free, length)
            free -= min(free, length)
        return total

    def _lives(self, machine: Machine, end: float) -> list[tuple[float, float]]:
        """When it may generate, until `end`."""
        ready_s = self._ready_s(machine)
        spans = ((max(self._began, up) + ready_s, min(down, end)) for up, down in machine.up)
        return [(up, down) for up, down in spans if up < down]

    def _ready_s(self, machine: Machine) -> float:
        return self._load_s + machine.speed.prefill_s * self._prompts[0]

    def _rates_of(self, there: tuple[int, ...]) -> tuple[float, float]:
        """Of these spot engines, and of them and the reserved ones."""
        if there not in self._rates:
            spot = [self._spot[number] for number in there]
            self._rates[there] = self._rate(spot), self._rate([*self._reserved, *spot])
        return self._rates[there]

    def _rate(self, machines: Many[Machine]) -> float:
        """Tokens per second at most: what a further sample adds to a batch falls, so each goes where it adds most."""
        adds = [(-full_rate(one.speed, 1), place, 1) for place, one in enumerate(machines) if self._batch(one)]
        heapq.heapify(adds)
        total = 0.0
        for _ in range(self._count):
            if not adds:
                break
            gain, place, batch = heapq.heappop(adds)
            total -= gain
            speed = machines[place].speed
            if batch < self._batch(machines[place]):
                heapq.heappush(adds, (full_rate(speed, batch) - full_rate(speed, batch + 1), place, batch + 1))
        return total

    def _batch(self, machine: Machine) -> int:
        """Of these samples at most."""
        fitting = self._prompts[: bisect_right(self._prompts, machine.speed.max_context - 1)]
        held = bisect_right(list(accumulate(fitting)), machine.speed.kv_tokens)
        return min(machine.speed.max_running, len(fitting), max(1, held))
