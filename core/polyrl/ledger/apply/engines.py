"""Fold of what happens to engines, to time, and to what the trainer says of the run. Part of `fold`.

Refuses to hold: decisions. Read next: `decision`.
"""

from __future__ import annotations

from math import inf
from typing import Final

from polyrl.ledger import events as f
from polyrl.ledger import speed
from polyrl.ledger.apply.counting import count, wake
from polyrl.ledger.apply.samples import unask
from polyrl.ledger.state import Engine, State, Version, step_key

ANSWERED_MEMORY: Final = 1024
"""Requests remembered by digest: far more than a trainer can have unanswered."""

REPLACED_MEMORY: Final = 64
"""Replaced trainers remembered: each restart of a trainer makes one."""

VANISHED_MEMORY: Final = 1024
"""Engines remembered that went silent: more than a fleet has at once."""

FLAP_MEMORY_S: Final = 600.0
"""An engine that stays for this long begins anew: ten of its longest pauses."""

SERVED_MEMORY: Final = 128
"""Verified versions remembered per engine: twice the largest allowed staleness."""


def step_ended(state: State, fact: f.StepEnded) -> None:
    step = state.steps.get(step_key(fact.step, fact.purpose))
    if step is not None:
        step.notices.clear()


def version_published(state: State, fact: f.VersionPublished) -> None:
    state.version = Version(fact.version, fact.endpoint, fact.public_key, fact.manifest_hash)


def window_set(state: State, fact: f.WindowSet) -> None:
    state.window_open = fact.open


def reported(state: State, fact: f.Reported) -> None:
    state.phase, state.step, state.values = fact.phase, fact.step, fact.values


def request_done(state: State, fact: f.RequestDone) -> None:
    state.answered[fact.request] = fact.digest
    if len(state.answered) > ANSWERED_MEMORY:
        del state.answered[next(iter(state.answered))]


def trainer_heard(state: State, fact: f.TrainerHeard) -> None:
    state.trainer_at = fact.at


def trainer_greeted(state: State, fact: f.TrainerGreeted) -> None:
    if state.trainer and fact.trainer != state.trainer:
        state.replaced.append(state.trainer)
        del state.replaced[:-REPLACED_MEMORY]
    state.trainer, state.trainer_since = fact.trainer, fact.at


def run_finished(state: State, fact: f.RunFinished) -> None:
    state.finished, state.ok, state.message = True, fact.ok, fact.message


def engine_greeted(state: State, fact: f.EngineGreeted) -> None:
    engine = state.engines.get(fact.engine)
    if engine is None:
        engine = Engine(
            fact.engine, fact.pool, fact.max_running, fact.kv_tokens, fact.max_context, -1, fact.at, fact.at, []
        )
        state.engines[fact.engine] = engine
    engine.pool, engine.max_running = fact.pool, fact.max_running
    engine.kv_tokens, engine.max_context = fact.kv_tokens, fact.max_context
    engine.heard_at = engine.greeted_at = fact.at
    for number in engine.running:
        unask(state, number)  # it may never have heard
    # What it has gathered while nobody listened, or while our clock stood still, says nothing of its speed.
    speed.begin_window(engine, fact.at)
    _serve(engine, fact.version)
    wake(state, fact.at + state.config.lease_s)


def _serve(engine: Engine, version: int) -> None:
    engine.version = version
    if version < 0:
        return
    if version in engine.served:
        engine.served.remove(version)
    engine.served.append(version)
    del engine.served[:-SERVED_MEMORY]


def engine_heard(state: State, fact: f.EngineHeard) -> None:
    state.engines[fact.engine].heard_at = fact.at


def engine_load(state: State, fact: f.EngineLoad) -> None:
    state.engines[fact.engine].load = (fact.running, fact.queued, fact.kv_free_tokens)


def engine_serving(state: State, fact: f.EngineServing) -> None:
    _serve(state.engines[fact.engine], fact.version)


def weights_awaited(state: State, fact: f.WeightsAwaited) -> None:
    state.engines[fact.engine].weights_at = fact.retry_at
    wake(state, fact.retry_at)


def engine_struck(state: State, fact: f.EngineStruck) -> None:
    engine = state.engines[fact.engine]
    engine.strikes += 1
    engine.trusted_at = fact.trusted_at
    if fact.cause == f.STRAGGLER:
        engine.straggler, engine.windows = True, []
    wake(state, fact.trusted_at)


def engine_trusted(state: State, fact: f.EngineTrusted) -> None:
    engine = state.engines[fact.engine]
    engine.straggler, engine.strikes, engine.trusted_at = False, 0, fact.at


def engine_draining(state: State, fact: f.EngineDraining) -> None:
    engine = state.engines[fact.engine]
    engine.draining, engine.drain_at = fact.reason, fact.drain_at
    wake(state, fact.drain_at)


def drain_expired(state: State, fact: f.DrainExpired) -> None:
    state.engines[fact.engine].drain_at = -inf


def engine_gone(state: State, fact: f.EngineGone) -> None:
    del state.engines[fact.engine]
    if fact.cause == "bye":
        state.vanished.pop(fact.engine, None)
        return
    state.counters.losses += 1
    times, at = state.vanished.pop(fact.engine, (0, -inf))
    state.vanished[fact.engine] = (times + 1 if fact.at - at < FLAP_MEMORY_S else 1, fact.at)
    if len(state.vanished) > VANISHED_MEMORY:
        del state.vanished[next(iter(state.vanished))]


def gap_seen(state: State, fact: f.GapSeen) -> None:
    state.engines[state.assignments[fact.assignment].engine].gaps[fact.assignment] = fact.at


def leases_renewed(state: State, fact: f.LeasesRenewed) -> None:
    for engine in state.engines.values():
        engine.heard_at = max(engine.heard_at, fact.at)
    for assignment in state.assignments.values():
        assignment.progress_at = max(assignment.progress_at, fact.at)


def ticked(state: State, fact: f.Ticked) -> None:
    state.due = fact.due


def ignored(state: State, fact: f.Ignored) -> None:
    count(state.counters.ignored, fact.kind)
