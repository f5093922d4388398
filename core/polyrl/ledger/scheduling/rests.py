"""When engines on the trainer's devices sleep and wake: where the learner needs the memory that they hold.

Whether it does, the trainer says with each request for a batch (`BatchRequest.alone`), by what it has measured. Where
it does not, nobody sleeps. Where it does

    a batch could be delivered, and the window would close
        engines are ordered to sleep, and give back what they run; the batch follows when all sleep
    one of them does not, by GIVE_UP_S
        it is given up like one that is gone, and the batch follows: its agent has ended it by then
    one of them is silent
        what it runs moves as from any other, but it counts as awake until GIVE_UP_S: who says nothing for seconds may
        be frozen or cut off, and still hold its memory. One that is started again answers at once
    the window opens, and there is something to generate
        they are ordered to wake, unless others are done sooner than they would be awake and asleep again,
        and may take all that is left

The deadline is the first order's: an engine that greets before it has followed an order is given it again, for what is
left of it, and its answer alone settles it. Orders to sleep are numbered, so that the second answer to one that was
given twice is none to the next. A greeting takes an order to wake back: one that lay unread in a frozen agent's socket
would wake it beside the learner.

Seconds to sleep and to wake, weights included, are measured. Nothing is placed on an engine from the order to sleep
until it serves weights again.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import Final

from polyrl.ledger.causes import MoveCause, RestPhase
from polyrl.ledger.events import EngineRests, WakingPutOff
from polyrl.ledger.measures.rests import GIVE_UP_S, Rest
from polyrl.ledger.scheduling.moves import move
from polyrl.ledger.scheduling.window import REPLAN_S, waking_pays
from polyrl.ledger.state import LeasedEngine, LedgerState
from polyrl.ledger.transition import Transition
from polyrl.sample import Pool, Purpose
from polyrl.wire import BatchRequest, GoToSleep, Hello, WakeUp

SLEEP_DEADLINE_S: Final = 75.0
"""Requests get 15 s to end and memory 60 s to be unmapped; then an agent ends its engine."""

NO_ORDER: Final = 0
"""`Asleep.order` of an agent that knows of no numbers."""

WAKE_DEADLINE_S: Final = 900.0
"""How long an engine that was ordered to wake is counted on: a first start may capture CUDA graphs for minutes. Then it
is asked to greet anew."""


def awaits_sleep(transition: Transition, wanted: BatchRequest) -> bool:
    """Whether a batch that answers `wanted` waits until engines sleep; it tells them to."""
    if not wanted.alone:
        return False
    holding = [engine for engine in _sharing(transition) if engine.rest.phase is not RestPhase.ASLEEP]
    for engine in holding:
        _order_sleep(transition, engine)
    return bool(holding)


def fell_asleep(transition: Transition, engine: LeasedEngine, order: int) -> None:
    """It says so, to the order of this number; what it ran came before. It may have greeted meanwhile, and a manager
    that was restarted may not know that it was ordered to."""
    if not engine.rest.able or engine.rest.phase not in (RestPhase.AWAKE, RestPhase.FALLING):
        transition.ignore("asleepUnasked")
        return
    if engine.rest.phase is RestPhase.FALLING and order not in (NO_ORDER, engine.rest.order):
        transition.ignore("asleepByEarlierOrder")  # it was ordered to wake since, and may do so before it reads this
        return
    for number in tuple(engine.running):
        move(transition, number, MoveCause.WINDOW)
    transition.record(EngineRests(engine.name, RestPhase.ASLEEP, due=inf, at=transition.now))


def order_under_way(known: LeasedEngine | None, hello: Hello) -> Rest | None:
    """What an engine that greets was ordered to do and has not said that it did; None: nothing. That it is asleep is no
    answer: it may have greeted before it read an order to wake, which it follows first."""
    if known is None or not (known.pool is hello.pool is Pool.RESERVED and hello.sleeps):
        return None
    ordered = known.rest.phase is RestPhase.FALLING or (known.rest.phase is RestPhase.WAKING and hello.asleep)
    return known.rest if ordered else None


def order_again(transition: Transition, engine: LeasedEngine, before: Rest) -> None:
    """It greeted before it had done what it was ordered to, and may never have heard of it: by when stays."""
    if engine.rest.phase is not before.phase:
        transition.record(EngineRests(engine.name, before.phase, due=before.due, at=transition.now))
    if before.phase is RestPhase.WAKING:
        transition.send(engine.name, WakeUp())
        return
    left_s = before.due - (GIVE_UP_S - SLEEP_DEADLINE_S) - transition.now
    transition.send(engine.name, GoToSleep(max(0.0, left_s), engine.rest.order))


def follow_window(transition: Transition) -> None:
    """Wakes who may generate, and lets sleep who came while the learner needs the devices."""
    state = transition.state
    for engine in list(_sharing(transition)):
        if not state.window_open and state.learner.alone and engine.rest.phase is RestPhase.AWAKE:
            _order_sleep(transition, engine)
    asleep = [engine for engine in _sharing(transition) if engine.rest.phase is RestPhase.ASLEEP]
    asleep = [engine for engine in asleep if not (engine.silent or engine.draining)]
    if not (asleep and state.window_open and _has_work(state) and _wakes(transition, asleep)):
        return
    for engine in asleep:
        due = transition.now + WAKE_DEADLINE_S
        transition.record(EngineRests(engine.name, RestPhase.WAKING, due=due, at=transition.now))
        transition.send(engine.name, WakeUp())


def overdue(transition: Transition) -> tuple[LeasedEngine, ...]:
    """Engines that were ordered to sleep or to wake and did not in time."""
    return tuple(engine for engine in _sharing(transition) if engine.rest.due <= transition.now)


def held_until(engine: LeasedEngine) -> float:
    """How long one that is silent may hold memory that the learner needs: it counts until then."""
    if engine.pool is not Pool.RESERVED or not engine.rest.able or engine.rest.phase is RestPhase.ASLEEP:
        return -inf
    return engine.rest.due if engine.rest.phase is RestPhase.FALLING else engine.heard_at + GIVE_UP_S


def _sharing(transition: Transition) -> Iterator[LeasedEngine]:
    """Engines on the trainer's devices that can sleep; of another pool none can, whatever it says."""
    return (engine for engine in transition.fleet.reserved() if engine.rest.able)


def _order_sleep(transition: Transition, engine: LeasedEngine) -> None:
    if engine.rest.phase is RestPhase.FALLING:
        return
    due = transition.now + GIVE_UP_S
    transition.record(EngineRests(engine.name, RestPhase.FALLING, due=due, at=transition.now))
    transition.send(engine.name, GoToSleep(SLEEP_DEADLINE_S, engine.rest.order))


def _has_work(state: LedgerState) -> bool:
    """Whether something may be generated with the newest weights; before anything was submitted engines start."""
    newest = state.weights.version
    begun = state.assignments or state.awaiting_verdict or not state.seen
    return newest >= 0 and bool(begun or any(state.groups[n].group.min_version <= newest for *_, n in state.queue))


def _wakes(transition: Transition, asleep: list[LeasedEngine]) -> bool:
    state, now = transition.state, transition.now
    asked = [pending.request for pending in state.pending.values()]
    training = [wanted for wanted in asked if wanted.purpose is Purpose.TRAIN]
    if not training or len(training) < len(asked) or any(waking_pays(transition, one, asleep) for one in training):
        return True
    if state.learner.rests.next_try_at <= now:
        transition.record(WakingPutOff(now + REPLAN_S))
    return False
