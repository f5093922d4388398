"""The status to store after a look: whole numbers, bounded lists, counters that only grow.

Refuses to hold: when it is written (the shell writes it if it changed, at most every few seconds), conditions (see
`conditions`), money (see `cost`).
"""

from __future__ import annotations

from typing import Final

from polyrl.cluster import names
from polyrl.cluster.fleet.plan import rollouts_made
from polyrl.cluster.fleet.singletons import managers_made
from polyrl.cluster.lifecycle import Stage, active_s
from polyrl.cluster.observation.context import Look
from polyrl.cluster.observation.exactly_once import Tally, total
from polyrl.cluster.observation.rollouts import Standing, of_pool
from polyrl.cluster.reporting.assessment import Judged
from polyrl.cluster.reporting.conditions import FAILED_STARTS, conditions
from polyrl.cluster.reporting.cost import cost
from polyrl.cluster.reporting.disruption_log import is_loss, recent
from polyrl.cluster.timestamps import millisecond, second, unix
from polyrl.manifest.status import Condition, JobStatus, ManagerSummary, RolloutStatus, RunState, TrainerStatus
from polyrl.sample import Pool
from polyrl.worker import Role

CONTACT_EVERY_S: Final = 60.0
"""lastContactTime is moved no more often: hearing nothing new from the manager is no reason to write."""


def status_of(judged: Judged) -> JobStatus:
    """Everything anew from this look, on top of what only the stored status knows."""
    look = judged.look
    ended_before = look.status.completion_time is not None
    closing = judged.life.ended and not ended_before
    status = JobStatus(
        observed_generation=look.facts.generation,
        state=_state(judged),
        conditions=conditions(judged),
        completion_time=second(judged.life.ended_at)
        if closing and judged.life.ended_at
        else look.status.completion_time,
        run_id=look.facts.uid,
        manager=_manager(look),
        trainer=_trainer(judged),
        rollout=_rollout(judged),
        scaling=judged.wish.scaling,
        cost=look.status.cost if ended_before else cost(look, closing=closing),
        recent_disruptions=recent(judged),
        failure=judged.life.failure,
    )
    return status.model_copy(update=_times(judged))


def refused(stored: JobStatus, generation: int, sentence: str, now: float) -> JobStatus:
    """Of an object that is no job this version understands; what was known of it stays."""
    before = next((known for known in stored.conditions if known.type == "Accepted"), None)
    stands = before is not None and before.status == "False"
    accepted = Condition(
        type="Accepted",
        status="False",
        reason="Invalid",
        message=sentence,
        last_transition_time=before.last_transition_time if before is not None and stands else second(now),
        observed_generation=generation,
    )
    rest = [known for known in stored.conditions if known.type != "Accepted"]
    return stored.model_copy(update={"observed_generation": generation, "conditions": [accepted, *rest]})


def _state(judged: Judged) -> RunState:
    """Zero rollouts is a normal state; a trainer that was ready and is not, or rollouts that cannot start, is not."""
    ended = {Stage.COMPLETE: RunState.COMPLETE, Stage.FAILED: RunState.FAILED, Stage.SUSPENDED: RunState.SUSPENDED}
    if judged.life.stage in ended:
        return ended[judged.life.stage]
    began = judged.look.status.state in (RunState.RUNNING, RunState.DEGRADED)
    if not judged.trainer_ready:
        return RunState.DEGRADED if began else RunState.PENDING
    failing = any(view.status.failed_starts >= FAILED_STARTS for view in judged.views)
    return RunState.DEGRADED if failing else RunState.RUNNING


def _times(judged: Judged) -> dict[str, str | int | None]:
    """Start, last suspension, last resumption, and the running time before that."""
    look, stored = judged.look, judged.look.status
    times: dict[str, str | int | None] = {
        "start_time": stored.start_time,
        "last_suspend_time": stored.last_suspend_time,
        "last_resume_time": stored.last_resume_time,
        "active_millis": stored.active_millis,
    }
    runs = judged.life.stage is Stage.RUNS
    if runs and stored.last_resume_time is None and (judged.accepted.accepted or stored.start_time is not None):
        times["start_time"] = stored.start_time or second(look.now)
        times["last_resume_time"] = millisecond(look.now)
    if not runs and stored.last_resume_time is not None:
        times["active_millis"] = round(active_s(look) * 1000)
        times["last_resume_time"] = None
    if judged.life.stage is Stage.SUSPENDED and stored.state is not RunState.SUSPENDED:
        times["last_suspend_time"] = second(look.now)
    return times


def _manager(look: Look) -> ManagerSummary:
    stored, heard = look.status.manager, look.facts.manager
    update: dict[str, object] = {"created": managers_made(look)}
    if look.wants_manager:
        host = f"{names.manager_service(look.facts.name)}.{look.facts.namespace}"
        update["endpoint"] = f"https://{host}:{look.spec.manager.port}"
    if heard is not None:
        step, before = heard.status.step, unix(stored.last_contact_time)
        if before is None or heard.heard_at - before >= CONTACT_EVERY_S:
            update["last_contact_time"] = second(heard.heard_at)
        if stored.step_time is None or step != stored.step:
            update |= {"step": step, "step_time": millisecond(look.now)}
        update["weight_version"] = heard.status.weight_version
    return stored.model_copy(update=update)


def _trainer(judged: Judged) -> TrainerStatus:
    look, job, stored = judged.look, judged.look.facts.trainer, judged.look.status.trainer
    pods = look.facts.of_role(Role.TRAINER)
    return TrainerStatus(
        name=names.trainer_name(look.facts.name),
        replicas=look.spec.trainer.replicas,
        ready=job.ready if job is not None else 0,
        active=job.active if job is not None else 0,
        failed=job.failed if job is not None else 0,
        restarts=max(stored.restarts, job.failed if job is not None else 0),
        disruptions=total(pods, Tally.DISRUPTION, stored.disruptions, judged.trainers_vanished),
    )


def _rollout(judged: Judged) -> RolloutStatus:
    look, stored = judged.look, judged.look.status.rollout
    pods = [one.pod for one in judged.fleet]
    newest = look.written.templates[Role.ROLLOUT]
    lost = bool(judged.taken or any(is_loss(pod) for pod in judged.vanished))
    return RolloutStatus(
        replicas=len(judged.live),
        ready_replicas=sum(one.pod.ready for one in judged.live),
        registered_replicas=judged.serving,
        desired_replicas=judged.wish.wished,
        pending_replicas=len(judged.standing(Standing.WAITING)),
        draining_replicas=sum(not one.pod.ended for one in judged.standing(Standing.TAKEN)),
        spot_replicas=len(of_pool(judged.fleet, Pool.SPOT)),
        on_demand_replicas=len(of_pool(judged.fleet, Pool.ON_DEMAND)),
        updated_replicas=sum(one.pod.template_hash == newest for one in judged.live),
        selector=names.selector(look.facts.name, Role.ROLLOUT),
        preemptions=total(pods, Tally.PREEMPTION, stored.preemptions, judged.vanished),
        failures=total(pods, Tally.FAILURE, stored.failures, judged.vanished),
        created=rollouts_made(look),
        last_preemption_time=second(look.now) if lost else stored.last_preemption_time,
        pools=[view.status for view in judged.views] if look.wants_rollouts else [],
    )
