"""What each message of an agent leads to. The engine's lease is its word: only an engine that greeted is believed.

Refuses to hold: tokens (see `deltas`), where work goes (see `placement`). Read next: `leases`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any, Final

from polyrl.ledger.decision import Decision
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
from polyrl.ledger.scheduling.moves import move, put_on_probation, strike
from polyrl.ledger.scheduling.returns import take_back
from polyrl.ledger.state import Engine
from polyrl.wire import (
    RETURN_REASONS,
    Beat,
    Bye,
    Cancel,
    Deltas,
    Drain,
    Fenced,
    FromAgent,
    Hello,
    Leaving,
    Resend,
    Returned,
    Serving,
    WeightsFailed,
    Welcome,
)

MAX_ASSIGNMENT: Final = 1 << 31
"""Half of what a row can name: a peer that claims to hold more must not use the numbers up."""


def hear_agent(d: Decision, name: str, message: FromAgent) -> None:
    """Decides one message of the engine that the route names."""
    if isinstance(message, Hello):
        _greet(d, name, message)
        return
    engine = d.state.engines.get(name)
    if engine is None:
        d.ignore("unknownEngine")
        d.tell(name, Fenced("no lease runs for this engine; greet first"))
    elif isinstance(message, Deltas):
        take_deltas(d, engine, message)
    else:
        d.record(EngineHeard(name, d.now))
        _HANDLERS[type(message)](d, engine, message)


def _greet(d: Decision, name: str, hello: Hello) -> None:
    if hello.engine != name or hello.epoch != d.config.epoch:
        d.ignore("fencedHello")
        d.tell(name, Fenced(f"this is epoch {d.config.epoch} and the connection of {name}"))
        return
    if min(hello.max_running, hello.kv_tokens, hello.max_context) < 1:
        d.ignore("impossibleHello")
        d.tell(name, Fenced("max_running, kv_tokens and max_context must be at least 1"))
        return
    config = d.config
    room = (hello.max_running, hello.kv_tokens, hello.max_context)
    returns = name not in d.state.engines and name in d.state.vanished
    d.record(EngineGreeted(name, hello.pool, *room, hello.weight_version, d.now))
    if returns:
        put_on_probation(d, name)
    engine = d.state.engines[name]
    taken = max((held.assignment + 1 for held in hello.held if held.assignment < MAX_ASSIGNMENT), default=0)
    if taken > d.state.next_assignment:
        d.record(NumbersTaken(0, 0, taken, d.now))
    _reconcile_held(d, engine, hello)
    # Only now: it sends what it holds as soon as it is welcome, and would send again what it is asked for afterwards.
    d.tell(name, Welcome(config.epoch, config.lease_s, config.beat_s, config.delta_s))
    if engine.draining:
        d.tell(name, Drain(max(0.0, engine.drain_at - d.now), engine.draining))
    elif d.state.finished:
        drain_engine(d, name, 0.0, "the run is over")
    elif engine.version != d.state.version.version:
        announce(d, name)


def _reconcile_held(d: Decision, engine: Engine, hello: Hello) -> None:
    """What the engine still holds goes on where we are; what either side lost begins anew."""
    held = {h.assignment: h for h in hello.held}
    for number in tuple(engine.running):
        assignment, theirs = d.state.assignments[number], held.pop(number, None)
        if theirs is None or theirs.length < assignment.length:
            # An agent that has fewer tokens than it once sent draws others after them; those would not fit.
            move(d, number, "notHeld", cancel=theirs is not None)
        else:
            d.tell(engine.name, Resend(number, assignment.length))
    for number in held:
        d.tell(engine.name, Cancel(number))


def _beat(d: Decision, engine: Engine, beat: Beat) -> None:
    d.record(EngineLoad(engine.name, beat.running, beat.queued, beat.kv_free_tokens))


def _serving(d: Decision, engine: Engine, serving: Serving) -> None:
    d.record(EngineServing(engine.name, serving.version, d.now))
    d.record(WeightsAwaited(engine.name, inf))
    _move_misfits(d, engine)


def _weights_failed(d: Decision, engine: Engine, failed: WeightsFailed) -> None:
    d.record(EngineServing(engine.name, failed.serving, d.now))
    d.record(WeightsAwaited(engine.name, d.now + d.config.weights_retry_s))
    _move_misfits(d, engine)


def _move_misfits(d: Decision, engine: Engine) -> None:
    """Samples that may not use the engine's new version go elsewhere."""
    for number in tuple(engine.running):
        assignment = d.state.assignments[number]
        if not assignment.low <= engine.version <= assignment.high:
            move(d, number, "versionChanged")


def _returned(d: Decision, engine: Engine, returned: Returned) -> None:
    assignment = d.state.assignments.get(returned.assignment)
    if assignment is None or assignment.engine != engine.name:
        d.ignore("returnedTooLate")
        return
    if returned.reason == "asked":
        take_back(d, returned.assignment)
        return
    cause = returned.reason if returned.reason in RETURN_REASONS else "engineError"
    if cause == "versionChanged":
        if assignment.low <= engine.version <= assignment.high:
            # It is about to load another version: Serving or WeightsFailed will say which.
            d.record(EngineServing(engine.name, -1, d.now))
    elif cause != "rejected" and not engine.draining:
        # Whatever it was, handing the same sample straight back would only repeat it.
        strike(d, engine.name, cause)
    move(d, returned.assignment, cause, cancel=False, detail=returned.detail)


def _leaving(d: Decision, engine: Engine, leaving: Leaving) -> None:
    drain_engine(d, engine.name, leaving.deadline_s, leaving.reason)


def _bye(d: Decision, engine: Engine, _: Bye) -> None:
    lose_engine(d, engine.name, "bye")


_HANDLERS: Final[dict[type, Callable[[Decision, Engine, Any], None]]] = {
    Beat: _beat,
    Serving: _serving,
    WeightsFailed: _weights_failed,
    Returned: _returned,
    Leaving: _leaving,
    Bye: _bye,
}
