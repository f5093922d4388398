"""A time that no step can beat, whatever is known and decided: the clairvoyant lower bound.

Let T be the time of a step from its weights' publication until its last token is learned. Three kinds of numbers, of
which each is at most T; the bound is the largest.

1. Learning: there is one learner, it learns whole groups, and the first time it waits for `micro` samples. A group is
   not complete before the longest path of its samples is over: some engine has loaded the weights, read the prompt and
   generated the tokens one after the other, its tools and its verdict have taken their time; a token takes at least the
   step of the fastest engine with one sample. Of the groups in the order of their paths, none from the k-th on is
   learned before path(k), and none at all before path(m), m the groups that make `micro` samples. So for each k
   T >= path(max(k, m)) + the learning of all groups from the k-th on.
2. Work: an engine generates at most `full_rate` tokens per second, which grows with its batch, and its batch is at most
   its max_running and at most all samples of the step. A reserved engine generates nothing while the learner learns,
   nor while it loads: at most T - max(load, L) seconds. A spot engine generates when it is there and has loaded. So all
   tokens <= sum of rate * seconds(T), whose right side grows with T: the least T that fulfils it is at most the step's.
3. The end: all samples longer than h tokens must still generate what they have above h; before that, each has
   spent h tokens' time. Their number limits the batch: from the time when the first token above h can be made, work (2)
   holds with that many samples and only the tokens above h, and generation before cannot help.

Moves, reading again, idle engines, unknown lengths, KV room and context only add to this, so it is no estimate of what
a perfect scheduler reaches: that lies between.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import NamedTuple

from draws import Fleet, Machine, Prompt, Workload, full_rate

PRECISION = 1e-4


class Bound(NamedTuple):
    """Seconds, and which of the reasons decides."""

    seconds: float
    reason: str


def lower_bound(fleet: Fleet, workload: Workload, step: int, began: float) -> Bound:
    """That of a step that began at `began`, in the fleet as it then was and became."""
    prompts, learn_s = workload.steps[step], workload.learn_s(fleet)
    samples = [sample for prompt in prompts for sample in prompt.samples]
    learning = learn_s * sum(sample.learned for sample in samples)
    fastest = _Fastest(fleet, workload)
    found = [Bound(_learned_s(workload, prompts, fastest, learn_s), "learning")]
    lengths = sorted(sample.tokens for sample in samples)
    floors = {0, *(lengths[len(lengths) * share // 8] for share in range(1, 8))}
    for floor in floors:
        above = [length - floor for length in lengths if length > floor]
        if above:
            found.append(Bound(_work_s(fleet, workload, above, began, learning, fastest.token_s * floor), "work"))
    return max(found)


def _learned_s(workload: Workload, prompts: Many[Prompt], fastest: _Fastest, learn_s: float) -> float:
    groups = sorted(
        (
            max(fastest.path(prompt, index) for index in range(len(prompt.samples))),
            learn_s * sum(sample.learned for sample in prompt.samples),
        )
        for prompt in prompts
    )
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


def _work_s(
    fleet: Fleet, workload: Workload, tokens: Many[int], began: float, learning: float, not_before: float
) -> float:
    load_s, total, samples = workload.load_s, sum(tokens), len(tokens)
    earliest = load_s + not_before

    def made(seconds: float) -> float:
        shared = max(0.0, seconds - max(earliest, learning))
        found = sum(shared * full_rate(machine.speed, samples) for machine in fleet.reserved)
        for machine in fleet.spot:
            there = 0.0 if machine.rejects else _there_s(machine, began, began + seconds, load_s, earliest)
            found += there * full_rate(machine.speed, samples)
        return found

    low, high = 0.0, earliest + learning + total / sum(full_rate(m.speed, samples) for m in fleet.reserved) + 1.0
    while high - low > PRECISION * high:
        middle = (low + high) / 2
        low, high = (low, middle) if made(middle) >= total else (middle, high)
    return low


def _there_s(machine: Machine, begin: float, end: float, load_s: float, earliest: float) -> float:
    """Seconds in [begin + earliest, end) in which it serves."""
    spans = ((max(begin + earliest, up + load_s), min(down, end)) for up, down in machine.up)
    return sum(max(0.0, down - up) for up, down in spans)
