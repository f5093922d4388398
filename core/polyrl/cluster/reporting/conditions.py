"""The conditions of a job, as `kubectl wait` and people read them: what holds, one word why, one sentence.

    Accepted  TrainerReady  RolloutAvailable  Progressing  CapacityLimited  ScalingActive  ScalingLimited  Disrupting
    Suspended; and, once it ended, exactly one of Complete and Failed

RolloutAvailable=False is no failure: the trainer goes on with its own engine. Sentences name no times that pass, so
that a condition changes only when something did.
Refuses to hold: the state in one word (see `status_of`). Read next: `judged`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

from polyrl.cluster.fleet.pools import REASON_LENGTH
from polyrl.cluster.lifecycle import Stage
from polyrl.cluster.observation.rollouts import Standing
from polyrl.cluster.reporting.assessment import Judged
from polyrl.cluster.timestamps import second, unix
from polyrl.manifest.scaling import ScalingMode
from polyrl.manifest.status import Condition
from polyrl.status import StepValue
from polyrl.worker import Role

FAILED_STARTS: Final = 3
"""Rollouts that failed in a row before one registered: a wrong setting fails every time, bad luck does not."""

STALL_STEPS: Final = 5.0
"""Times the length of the last step after which a step counts as stalled."""

SHORTEST_STALL_S: Final = 300.0
"""No step is called stalled earlier; the first one's length is not known, and models load for minutes."""

MESSAGE_LENGTH: Final = 512
"""Characters of a sentence that are kept: schedulers and webhooks can go on for pages."""

Verdict = Literal["True", "False", "Unknown"]


class Said(NamedTuple):
    """One condition without its times."""

    type: str
    status: Verdict
    reason: str
    message: str


def conditions(judged: Judged) -> list[Condition]:
    """All conditions after this look; lastTransitionTime moves only when a status flips."""
    before = {known.type: known for known in judged.look.status.conditions}
    return [_stamped(judged, said, before.get(said.type)) for said in _all(judged)]


def stall_due(judged: Judged) -> float | None:
    """When the step under way will count as stalled, if nothing happens; None: it does, or none is under way."""
    since = unix(judged.look.status.manager.step_time)
    if since is None or judged.look.told is None:
        return None
    length = STALL_STEPS * judged.look.told.values.get(StepValue.STEP_SECONDS, 0.0)
    return since + max(SHORTEST_STALL_S, length)


def _stamped(judged: Judged, said: Said, before: Condition | None) -> Condition:
    kept = before is not None and before.status == said.status
    return Condition(
        type=said.type,
        status=said.status,
        reason=said.reason,
        message=said.message[:MESSAGE_LENGTH],
        last_transition_time=before.last_transition_time if before is not None and kept else second(judged.look.now),
        observed_generation=judged.look.facts.generation,
    )


def _all(judged: Judged) -> Iterator[Said]:
    accepted: Verdict = "Unknown" if judged.accepted.accepted is None else _verdict(judged.accepted.accepted)
    yield Said("Accepted", accepted, judged.accepted.reason, judged.accepted.message)
    yield _trainer_ready(judged)
    yield _rollout_available(judged)
    yield _progressing(judged)
    yield _capacity_limited(judged)
    yield _scaling_active(judged)
    yield _scaling_limited(judged)
    yield _disrupting(judged)
    suspended = judged.life.stage is Stage.SUSPENDED
    word, said = ("Suspended", "spec.suspend is true") if suspended else ("NotSuspended", "spec.suspend is false")
    yield Said("Suspended", _verdict(suspended), word, said)
    if judged.life.stage is Stage.COMPLETE:
        yield Said("Complete", "True", "TrainerComplete", "the trainer is done")
    if judged.life.stage is Stage.FAILED:
        failure = judged.life.failure
        reason, said = (failure.reason, failure.message) if failure is not None else ("TrainerFailed", "it failed")
        yield Said("Failed", "True", reason, said)


def _verdict(holds: bool) -> Verdict:
    return "True" if holds else "False"


def _idle(judged: Judged) -> tuple[str, str] | None:
    """Why nothing is expected to run; None when it is."""
    if judged.life.ended:
        return "Finished", "the job has ended"
    if judged.life.stage is Stage.SUSPENDED:
        return "Suspended", "the job is suspended"
    return None


def _trainer_ready(judged: Judged) -> Said:
    job = judged.look.facts.trainer
    if (idle := _idle(judged)) is not None:
        return Said("TrainerReady", "False", *idle)
    if judged.trainer_ready:
        return Said("TrainerReady", "True", "Ready", "the trainer is ready")
    newest = judged.look.facts.of_role(Role.TRAINER)[-1:]
    gone = [(pod, notice) for pod, notice in judged.trainers_disrupted if pod in newest]
    if gone:
        pod, notice = gone[0]
        return Said("TrainerReady", "False", "Disrupted", f"{pod.name} is taken away: {notice.why}")
    if judged.unreachable:
        return Said("TrainerReady", "False", "ManagerUnreachable", "the manager does not answer")
    if job is not None and job.failed > 0 and job.ready == 0:
        said = f"the trainer failed {job.failed} times and starts again"
        return Said("TrainerReady", "False", "CrashLoop", said)
    return Said("TrainerReady", "False", "Starting", "the trainer starts")


def _rollout_available(judged: Judged) -> Said:
    wished, serving = judged.wish.wished, judged.serving
    if (idle := _idle(judged)) is not None:
        return Said("RolloutAvailable", "False", *idle)
    if wished == 0 and serving == 0:
        return Said("RolloutAvailable", "False", "NotWanted", "no rollouts are wished")
    need = max(1, judged.look.spec.rollout.min_replicas)
    if serving >= need:
        return Said("RolloutAvailable", "True", "Registered", f"at least {need} rollouts serve")
    failing = [view.status for view in judged.views if view.status.failed_starts >= FAILED_STARTS]
    if failing:
        said = f"the last {failing[0].failed_starts} rollouts on {failing[0].name} failed before they registered"
        return Said("RolloutAvailable", "False", "FailedStarts", f"{said}; another is tried now and then")
    if any(view.held for view in judged.views):
        return Said("RolloutAvailable", "False", "NoCapacity", "no machines are to be had; the trainer goes on alone")
    if judged.standing(Standing.TAKEN) and not judged.live:
        return Said("RolloutAvailable", "False", "AllPreempted", "every rollout was taken away")
    return Said("RolloutAvailable", "False", "BelowMinimum", f"fewer than {need} rollouts serve")


def _progressing(judged: Judged) -> Said:
    if (idle := _idle(judged)) is not None:
        return Said("Progressing", "False", *idle)
    told, due = judged.look.told, stall_due(judged)
    if told is None or due is None or not told.phase:
        return Said("Progressing", "Unknown", "NotStarted", "no step is under way yet")
    if told.step == judged.look.status.manager.step and judged.look.now >= due:
        return Said(
            "Progressing", "False", "Stalled", f"step {told.step} takes more than {STALL_STEPS:.0f} times as long"
        )
    return Said("Progressing", "True", "StepAdvanced", f"step {told.step} is under way")


def _capacity_limited(judged: Judged) -> Said:
    if (idle := _idle(judged)) is not None:
        return Said("CapacityLimited", "False", *idle)
    refusal = judged.look.memory.refusal
    if refusal is not None and len(judged.live) < judged.wish.wished:
        word = "QuotaExceeded" if "exceeded quota" in refusal.message else "Refused"
        return Said("CapacityLimited", "True", word, refusal.message[:REASON_LENGTH])
    held = [view.status for view in judged.views if view.held]
    if held:
        spot = held[0].name == "spot" and held[0].backoff_until is not None
        said = held[0].last_reason or "rollouts failed"
        return Said("CapacityLimited", "True", "SpotUnavailable" if spot else "BackingOff", f"{held[0].name}: {said}")
    waiting = [one for one in judged.standing(Standing.WAITING) if one.pod.unschedulable]
    if waiting:
        said = waiting[0].pod.unschedulable[:REASON_LENGTH]
        return Said("CapacityLimited", "True", "Unschedulable", f"{len(waiting)} rollouts wait for a node: {said}")
    return Said("CapacityLimited", "False", "Enough", "what is asked for is given")


def _scaling_active(judged: Judged) -> Said:
    if (idle := _idle(judged)) is not None:
        return Said("ScalingActive", "False", *idle)
    return Said("ScalingActive", _verdict(judged.wish.active), judged.wish.reason, judged.wish.message)


def _scaling_limited(judged: Judged) -> Said:
    spec, scaling = judged.look.spec, judged.wish.scaling
    asked = scaling.recommended_replicas if spec.scaling.mode is ScalingMode.GAP else spec.rollout.replicas
    measured = spec.scaling.mode is not ScalingMode.GAP or scaling.last_step_time is not None
    if measured and asked is not None and asked > spec.rollout.max_replicas:
        said = f"{asked} are asked for, maxReplicas is {spec.rollout.max_replicas}"
        return Said("ScalingLimited", "True", "TooManyReplicas", said)
    if measured and asked is not None and asked < spec.rollout.min_replicas:
        said = f"{asked} are asked for, minReplicas is {spec.rollout.min_replicas}"
        return Said("ScalingLimited", "True", "TooFewReplicas", said)
    return Said("ScalingLimited", "False", "WithinBounds", "the number is within minReplicas and maxReplicas")


def _disrupting(judged: Judged) -> Said:
    taken = [one for one in judged.standing(Standing.TAKEN) if not one.pod.ended]
    if not taken:
        return Said("Disrupting", "False", "Undisturbed", "no rollout is under a notice")
    notice = taken[-1].notice
    word = notice.kind.value if notice is not None else "Unknown"
    return Said("Disrupting", "True", word, f"{len(taken)} rollouts are being taken away")
