"""What each message of an agent leads to. The engine's lease is its word: only an engine that greeted is believed.

Refuses to hold: tokens (see `deltas`), where work goes (see `placement`). Read next: `leases`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any, Final

from polyrl.ledger.events import (
    EngineGreeted,
    EngineHeard,
    EngineLoad,
    EngineServing,
    NumbersTaken,
    WeightsAwaited,
)
from polyrl.ledger.messages.deltas import take_deltas
from polyrl.ledger.scheduling.leases import announce, drain_engine, lose_engine
from polyrl.ledger.scheduling.moves import half_open, move, quarantine
from polyrl.ledger.scheduling.recalls import complete_recall
from polyrl.ledger.state import LeasedEngine
from polyrl.ledger.transition import Transition
from polyrl.wire import (
    RETURN_REASONS,
    Cancel,
    Deltas,
    Deregister,
    Fenced,
    FromAgent,
    HandBack,
    Heartbeat,
    Hello,
    Leaving,
    Resend,
    StartDrain,
    WeightsFailed,
    WeightsLoaded,
    Welcome,
)

MAX_ASSIGNMENT: Final = 1 << 31
"""Half of what a row can name: a peer that claims to hold more must not use the numbers up."""


def handle_agent(transition: Transition, name: str, message: FromAgent) -> None:
    """Decides one message of the engine that the route names."""
    if isinstance(message, Hello):
        _greet(transition, name, message)
        return
    engine = transition.state.engines.get(name)
    if engine is None:
        transition.ignore("unknownEngine")
        transition.send(name, Fenced("no lease runs for this engine; greet first"))
    elif isinstance(message, Deltas):
        take_deltas(transition, engine, message)
    else:
        transition.record(EngineHeard(name, transition.now))
        _HANDLERS[type(message)](transition, engine, message)


def _greet(transition: Transition, name: str, hello: Hello) -> None:
    if hello.engine != name or hello.run_epoch != transition.config.run_epoch:
        transition.ignore("fencedHello")
        transition.send(name, Fenced(f"this is epoch {transition.config.run_epoch} and the connection of {name}"))
        return
    if min(hello.max_running, hello.kv_tokens, hello.max_context) < 1:
        transition.ignore("impossibleHello")
        transition.send(name, Fenced("max_running, kv_tokens and max_context must be at least 1"))
        return
    config = transition.config
    room = (hello.max_running, hello.kv_tokens, hello.max_context)
    returns = name not in transition.state.engines and name in transition.state.vanished
    transition.record(EngineGreeted(name, hello.pool, *room, hello.weight_version, transition.now))
    if returns:
        half_open(transition, name)
    engine = transition.state.engines[name]
    taken = max((held.assignment + 1 for held in hello.held if held.assignment < MAX_ASSIGNMENT), default=0)
    if taken > transition.state.next_assignment:
        transition.record(NumbersTaken(0, 0, taken, transition.now))
    _reconcile_held(transition, engine, hello)
    # Only now: it sends what it holds as soon as it is welcome, and would send again what it is asked for afterwards.
    transition.send(name, Welcome(config.run_epoch, config.lease_s, config.beat_s, config.delta_s))
    if engine.draining:
        transition.send(name, StartDrain(max(0.0, engine.drain_at - transition.now), engine.draining))
    elif transition.state.finished:
        drain_engine(transition, name, 0.0, "the run is over")
    elif engine.version != transition.state.version.version:
        announce(transition, name)


def _reconcile_held(transition: Transition, engine: LeasedEngine, hello: Hello) -> None:
    """What the engine still holds goes on where we are; what either side lost begins anew."""
    held = {h.assignment: h for h in hello.held}
    for number in tuple(engine.running):
        assignment, theirs = transition.state.assignments[number], held.pop(number, None)
        if theirs is None or theirs.length < assignment.length:
            # An agent that has fewer tokens than it once sent draws others after them; those would not fit.
            move(transition, number, "notHeld", cancel=theirs is not None)
        else:
            transition.send(engine.name, Resend(number, assignment.length))
    for number in held:
        transition.send(engine.name, Cancel(number))


def _beat(transition: Transition, engine: LeasedEngine, beat: Heartbeat) -> None:
    transition.record(EngineLoad(engine.name, beat.running, beat.queued, beat.kv_free_tokens))


def _serving(transition: Transition, engine: LeasedEngine, serving: WeightsLoaded) -> None:
    transition.record(EngineServing(engine.name, serving.version, transition.now))
    transition.record(WeightsAwaited(engine.name, inf))
    _move_misfits(transition, engine)


def _weights_failed(transition: Transition, engine: LeasedEngine, failed: WeightsFailed) -> None:
    transition.record(EngineServing(engine.name, failed.serving, transition.now))
    transition.record(WeightsAwaited(engine.name, transition.now + transition.config.weights_retry_s))
    _move_misfits(transition, engine)


def _move_misfits(transition: Transition, engine: LeasedEngine) -> None:
    """Samples that may not use the engine's new version go elsewhere."""
    for number in tuple(engine.running):
        assignment = transition.state.assignments[number]
        if not assignment.low <= engine.version <= assignment.high:
            move(transition, number, "versionChanged")


def _returned(transition: Transition, engine: LeasedEngine, returned: HandBack) -> None:
    assignment = transition.state.assignments.get(returned.assignment)
    if assignment is None or assignment.engine != engine.name:
        transition.ignore("returnedTooLate")
        return
    if returned.reason == "asked":
        complete_recall(transition, returned.assignment)
        return
    cause = returned.reason if returned.reason in RETURN_REASONS else "engineError"
    if cause == "versionChanged":
        if assignment.low <= engine.version <= assignment.high:
            # It is about to load another version: WeightsLoaded or WeightsFailed will say which.
            transition.record(EngineServing(engine.name, -1, transition.now))
    elif cause != "rejected" and not engine.draining:
        # Whatever it was, handing the same sample straight back would only repeat it.
        quarantine(transition, engine.name, cause)
    move(transition, returned.assignment, cause, cancel=False, detail=returned.detail)


def _leaving(transition: Transition, engine: LeasedEngine, leaving: Leaving) -> None:
    drain_engine(transition, engine.name, leaving.deadline_s, leaving.reason)


def _bye(transition: Transition, engine: LeasedEngine, _: Deregister) -> None:
    lose_engine(transition, engine.name, "bye")


_HANDLERS: Final[dict[type, Callable[[Transition, LeasedEngine, Any], None]]] = {
    Heartbeat: _beat,
    WeightsLoaded: _serving,
    WeightsFailed: _weights_failed,
    HandBack: _returned,
    Leaving: _leaving,
    Deregister: _bye,
}
