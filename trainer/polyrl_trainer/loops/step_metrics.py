"""What one RL step looked like: where its time went, and the numbers that people look for, under the field's names.

`timing_s/gen` runs from submission to the last turn that was used; `timing_s/train` is the learner's own time, most
of it while others generate. `perf/step_ratio` is the step's wall time over the larger of the two: 1 is perfect
overlap, and `timing_s/update_weights`, `timing_s/reward_tail` and `timing_s/other` say what the rest is.
"""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from polyrl.sample import TURN_REWARD, DiscardReason, Finish
from polyrl.status import StepValue
from polyrl_trainer.backend import StepResult
from polyrl_trainer.generation.training_groups import TrainingGroups
from polyrl_trainer.sample import Sample, shown_metrics
from polyrl_trainer.state import Results

GB = 1e9
"""Bytes."""
NO_TIME_S = 1e-9
"""In place of 0 where something is divided by seconds."""


class StepClock:
    """Stopwatches of one step, in seconds of the monotonic clock."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._submitted = self._started
        self._last_batch = self._started
        self.update_weights_s = self.reserved_s = self.generate_s = self.train_s = self.wait_s = 0.0
        self.reward_tail_s = self.step_s = self.sequence_s = self.publish_s = 0.0
        self.fleet_wait_s: float | None = None
        self.optimizer_steps: list[StepResult] = []

    def submitted(self, at: float) -> None:
        """Engines generate for the step since then; with maxStaleness above 0 for a while already."""
        self._submitted = at

    def published(self, seconds: float, served_at: float | None) -> None:
        """What publishing took beside the learner, and when the first engine had the step's version."""
        self.publish_s = seconds
        if served_at is not None:
            self.fleet_wait_s = max(0.0, served_at - max(self._submitted, self._started))

    def reserved_closes(self) -> None:
        """The reserved engine hands over what it still runs."""
        self.reserved_s = time.monotonic() - self._submitted

    def generated(self, last_turn_at: float, generate_s: float) -> None:
        """Generation of all that was used had ended at `last_turn_at`; its last batch arrived a little later.
        `generate_s`: what it took, without what was generated of other steps meanwhile."""
        self.sequence_s = max(0.0, last_turn_at - self._submitted)
        self.generate_s = generate_s
        if last_turn_at > self._started:  # what was generated ahead waited for the step to begin, not for its rewards
            self.reward_tail_s = max(0.0, self._last_batch - max(last_turn_at, self._submitted))

    @contextmanager
    def training(self) -> Iterator[None]:
        """The learner works."""
        started = time.monotonic()
        yield
        self.train_s += time.monotonic() - started

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The learner has nothing to do."""
        started = time.monotonic()
        yield
        self._last_batch = time.monotonic()
        self.wait_s += self._last_batch - started

    def end(self, results: Results) -> None:
        """The step is over; its seconds are added to the run's."""
        self.step_s = time.monotonic() - self._started
        results.generate_seconds += self.generate_s
        results.train_seconds += self.train_s
        results.rl_train_seconds += self.train_s
        results.rl_step_seconds += self.step_s

    def status_values(self) -> dict[str, float]:
        """What autoscaling reads of the step."""
        return {
            StepValue.ROLLOUT_SECONDS: self.generate_s,
            StepValue.RESERVED_SECONDS: min(self.reserved_s, self.generate_s),
            StepValue.TRAIN_SECONDS: self.train_s,
            StepValue.STEP_SECONDS: self.step_s,
        }

    def values(self) -> dict[str, float]:
        """Named seconds, and the ratio."""
        longer = max(self.generate_s, self.train_s)
        covered = self.update_weights_s + self.wait_s + self.train_s
        return {
            "timing_s/step": self.step_s,
            "timing_s/gen": self.generate_s,
            "timing_s/train": self.train_s,
            "timing_s/wait": self.wait_s,
            "timing_s/update_weights": self.update_weights_s,
            "timing_s/publish_weights": self.publish_s,
            **({} if self.fleet_wait_s is None else {"timing_s/wait_for_weights": self.fleet_wait_s}),
            "perf/update_weights_share": self.update_weights_s / max(self.step_s, NO_TIME_S),
            "timing_s/reward_tail": self.reward_tail_s,
            "timing_s/other": max(0.0, self.step_s - covered),
            "timing_s/overlap": max(0.0, self.generate_s + self.train_s + self.update_weights_s - self.step_s),
            "perf/step_ratio": self.step_s / longer if longer else 1.0,
        }


def step_metrics(
    samples: Sequence[Sample],
    reward_metrics: Sequence[Mapping[str, float]],
    groups: TrainingGroups,
    learned: Mapping[str, float],
    clock: StepClock,
) -> dict[str, float]:
    """All numbers of a step; `learned` are the loss's averages over learned tokens."""
    tokens = float(sum(sample.loss_mask.sum() for sample in samples))
    return {
        **mean_metrics(reward_metrics, prefix="reward/"),
        **learning_metrics(samples, learned, clock.optimizer_steps),
        "rollout/samples": float(len(samples)),
        "rollout/dropped_groups": float(sum(groups.dropped.values())),
        "rollout/replaced_groups": float(groups.own.replaced),
        "rollout/filtered_groups": float(groups.dropped[DiscardReason.FILTERED.value]),
        **solved_shares(samples, groups.filtered_rewards),
        "rollout/untrained_share": groups.untrained_share,
        "rollout/carried_groups": float(len(groups.carried.used)) if groups.carried is not None else 0.0,
        **_staleness(samples, groups),
        "perf/throughput": tokens / max(clock.step_s, NO_TIME_S),
        "perf/throughput_gen": tokens / max(clock.generate_s, NO_TIME_S),
        "weights/version": float(groups.version),
        **clock.values(),
    }


def learning_metrics(
    samples: Sequence[Sample], learned: Mapping[str, float], optimizer_steps: Sequence[StepResult]
) -> dict[str, float]:
    """The numbers of a step that do not depend on where its samples came from."""
    return {
        **_rewards(samples),
        **_lengths(samples),
        **_advantages(samples),
        **_reward_kl(samples),
        **_device(learned),
        "rollout/duplicates_in_group": duplicates_in_group(samples),
        **_actor(learned, optimizer_steps),
        "perf/padding_fraction": learned["padding_fraction"],
    }


def _rewards(samples: Sequence[Sample]) -> dict[str, float]:
    rewards = np.array([sample.reward for sample in samples])
    penalties = [sample.penalty for sample in samples if sample.penalty is not None]
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
        **({"reward/overlong_penalty": float(np.mean(penalties))} if penalties else {}),
        **solved_shares(samples),
    }


def solved_shares(samples: Sequence[Sample], filtered: Sequence[Sequence[float]] = ()) -> dict[str, float]:
    """Shares of groups, of those that train and those that the filter took away before: whose rewards are all equal, so
    that they teach nothing (those of turns too, where the advantage is of them); equal at the end and above 0 (too
    easy); none of them above 0 (too hard)."""
    taught = {(sample.group, sample.reward, sample.turn_rewards) for sample in samples}
    spread = Counter(group for group, *_ in taught)
    by_group: dict[int, list[float]] = {}
    for sample in samples:
        by_group.setdefault(sample.group, []).append(sample.reward)
    groups = [*by_group.values(), *filtered]
    return {
        "rollout/zero_std": float(
            np.mean([count == 1 for count in spread.values()] + [min(one) == max(one) for one in filtered])
        ),
        "rollout/solve_all": float(np.mean([min(one) == max(one) > 0 for one in groups])),
        "rollout/solve_none": float(np.mean([max(one) <= 0 for one in groups])),
    }


def duplicates_in_group(samples: Sequence[Sample]) -> float:
    """Share of samples that an earlier one of their group equals token for token: they teach nothing new. A policy that
    is sure of short answers repeats itself; where answers are long and free, siblings were not drawn independently."""
    distinct = {(sample.group, sample.tokens.tobytes()) for sample in samples}
    return 1.0 - len(distinct) / len(samples)


def mean_metrics(rows: Sequence[Mapping[str, float]], prefix: str) -> dict[str, float]:
    """Mean of each named number over the rows that have it; none of a turn that was never paid."""
    names = sorted({one for row in rows for one in shown_metrics(row) if row[one] or not one.startswith(TURN_REWARD)})
    return {f"{prefix}{name}": float(np.mean([row[name] for row in rows if name in row])) for name in names}


def _lengths(samples: Sequence[Sample]) -> dict[str, float]:
    lengths = [sample.response_length for sample in samples]
    cut = [sample.finish_reason == Finish.LENGTH for sample in samples if sample.finish_reason]
    turns = [_turn_lengths(sample) for sample in samples]
    return {
        **_spread("response_length", lengths),
        "response_length/std": float(np.std(lengths)),
        **_spread("prompt_length", [sample.prompt_length for sample in samples]),
        **_spread("num_turns", [len(one) for one in turns]),
        **_spread("turn_length", [length for one in turns for length in one]),
        **({"response_length/clip_ratio": float(np.mean(cut))} if cut else {}),
    }


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    mean, least, most = float(np.mean(values)), float(min(values)), float(max(values))
    return {f"{name}/mean": mean, f"{name}/min": least, f"{name}/max": most}


def _turn_lengths(sample: Sample) -> list[int]:
    """Learned tokens of each stretch without text of an environment; at least one number."""
    edges = np.diff(sample.loss_mask > 0, prepend=False, append=False).nonzero()[0]
    return [int(length) for length in edges[1::2] - edges[::2]] or [0]


def _advantages(samples: Sequence[Sample]) -> dict[str, float]:
    """Over learned tokens, as the loss gets them."""
    values = [one.advantages[one.loss_mask > 0] for one in samples if one.advantages is not None]
    every = np.concatenate(values) if values else np.zeros(0)
    if not len(every):
        return {}
    return {**_spread("critic/advantages", every.tolist()), "critic/advantages/std": float(every.std())}


def _reward_kl(samples: Sequence[Sample]) -> dict[str, float]:
    """As verl has it: a mean over samples of their mean over tokens."""
    divergences = [sample.reward_kl for sample in samples if sample.reward_kl is not None]
    return {"actor/reward_kl_penalty": float(np.mean(divergences))} if divergences else {}


def _device(learned: Mapping[str, float]) -> dict[str, float]:
    """What the learner's device did in its passes, and held."""
    values = {"perf/max_cpu_memory_used_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GB}
    for name, held in (("allocated", "device_allocated_max"), ("reserved", "device_reserved_max")):
        if held in learned:
            values[f"perf/max_memory_{name}_gb"] = learned[held] / GB
    seconds = learned.get("learn_seconds", 0.0)
    if seconds:
        values["perf/throughput_train"] = learned["tokens"] / seconds
        if "device_flops_max" in learned:
            values["perf/mfu/actor"] = learned["flops"] / seconds / learned["device_flops_max"]
    return values


def separate_movement(learned: Mapping[str, float], first: Mapping[str, float]) -> dict[str, float]:
    """The averages of a step, with the mismatch between engine and learner apart from how far the policy moved.

    Recomputed old logprobs tell the two apart by token. Without, the learner of the step's first mini-batch (`first`)
    is the one that the engines have, so what is seen there is mismatch. What is more on the whole step is movement (k1
    is linear in the logprobs) only as far as the other mini-batches' tokens mismatch as the first one's do: it is named
    an estimate; with one mini-batch nothing has moved. With maxStaleness above 0 the mismatch holds the versions
    between as well.
    """
    if "moved_k1" in learned or "mismatch_k1" not in first:
        return dict(learned)
    mismatch = {name: first[name] for name in ("mismatch_k1", "mismatch_k3")}
    moved = learned["mismatch_k1"] - first["mismatch_k1"]
    return {**learned, **mismatch, "moved_k1_estimate" if moved else "moved_k1": moved}


_ACTOR_NAMES = {
    "pg_loss": "actor/pg_loss",
    "clip_fraction": "actor/pg_clipfrac",
    "dual_clip_fraction": "actor/pg_clipfrac_lower",
    "entropy": "actor/entropy",
    "moved_k1": "actor/ppo_kl",
    "moved_k1_estimate": "actor/ppo_kl_estimate",
    "mismatch_k1": "rollout_corr/kl",
    "mismatch_k3": "rollout_corr/k3_kl",
    "correction_weight": "rollout_corr/rollout_is_mean",
    "correction_fraction": "rollout_corr/bounded_fraction",
    "kl_reference": "actor/kl_loss",
    "rollout_drift": "actor/rollout_drift",
    "rollout_drift_max": "actor/rollout_drift_max",
    "ratio": "actor/ratio",
    "ratio_max": "actor/ratio_max",
}


def _actor(learned: Mapping[str, float], optimizer_steps: Sequence[StepResult]) -> dict[str, float]:
    named = {_ACTOR_NAMES[name]: value for name, value in learned.items() if name in _ACTOR_NAMES}
    own = {name: value for name, value in learned.items() if name.startswith("loss/")}
    norms = [result.grad_norm for result in optimizer_steps if not result.not_finite]
    return {
        **named,
        **own,
        **_spreads(learned),
        **({"actor/grad_norm": float(np.mean(norms))} if norms else {}),
        "actor/skipped_steps": float(len(optimizer_steps) - len(norms)),
        **({"actor/lr": optimizer_steps[-1].learning_rate} if optimizer_steps else {}),
        "actor/optimizer_steps": float(len(norms)),
    }


def _spreads(learned: Mapping[str, float]) -> dict[str, float]:
    """From means of squares: the ratio's standard deviation, and how many of n weighted tokens count,
    (sum w)^2 / (n sum w^2), as in verl."""
    values = {}
    if "ratio_square" in learned:
        values["actor/ratio_std"] = max(0.0, learned["ratio_square"] - learned["ratio"] ** 2) ** 0.5
    if learned.get("correction_square"):
        weight = learned["correction_weight"]
        values["rollout_corr/rollout_is_eff_sample_size"] = weight**2 / learned["correction_square"]
    return values


def _versions_behind(sample: Sample, groups: TrainingGroups) -> int:
    if not sample.versions:
        return 0
    is_of_step = sample.versions[0] >= groups.oldest_version
    return (groups.version if is_of_step else sample.versions[-1]) - sample.versions[0]


def _staleness(samples: Sequence[Sample], groups: TrainingGroups) -> dict[str, float]:
    """Versions between the one that the step began with and a sample's oldest token: mean, largest, and the share of
    samples at each number of them where any is possible. Samples that are trained again have the numbers of an earlier
    trainer's versions, and are compared with their newest."""
    begun, oldest = groups.version, groups.oldest_version
    behind = [_versions_behind(sample, groups) for sample in samples]
    possible = range(begun - oldest + 1) if begun > oldest else ()
    return {
        "rollout/staleness": float(np.mean(behind)),
        "rollout/staleness_max": float(max(behind)),
        **{f"rollout/staleness_share/{versions}": behind.count(versions) / len(behind) for versions in possible},
        "rollout/versions_per_sample": float(np.mean([len(set(sample.versions)) or 1 for sample in samples])),
    }
