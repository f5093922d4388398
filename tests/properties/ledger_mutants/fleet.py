"""Leases, drains, pauses, placement, moves."""

from __future__ import annotations

from math import inf
from typing import Any, Final

import msgspec
from ledger_mutants.mutant import Mutant, Patch, after

from polyrl.ledger import events as f, ledger
from polyrl.ledger.apply import engines, samples
from polyrl.ledger.causes import GoneCause
from polyrl.ledger.messages import agents, trainer
from polyrl.ledger.scheduling import cost, leases, placement, rebalance, recalls
from polyrl.ledger.transition import Transition
from polyrl.sample import Pool
from polyrl.wire import Announce, Cancel, StartDrain


def placed_on_any_version(patch: Patch) -> None:
    patch.setattr(placement, "may_generate", lambda transition, engine, low, high: True)


def short_contexts_overfilled(patch: Patch) -> None:
    """An engine may generate as much as the budget leaves, whatever its context holds."""
    honest = samples.tokens_left
    patch.setattr(samples, "tokens_left", lambda state, sample, context: honest(state, sample, 2**40))


def drains_kept_to_itself(patch: Patch) -> None:
    """An engine is never asked to drain."""
    patch.setattr(leases, "StartDrain", lambda deadline_s, reason: Announce(-1, "", public_key="", manifest_hash=b""))


def silence_unnoticed(patch: Patch) -> None:
    patch.setattr(leases, "_end_leases", lambda d: None)


def dead_idle_engine_kept(patch: Patch) -> None:
    """Only engines that run something are given up."""

    def end(d: Any) -> None:
        for engine in tuple(d.state.engines.values()):
            if engine.running and engine.heard_at + d.config.lease_s <= d.now:
                leases.lose_engine(d, engine.name, "silent")

    patch.setattr(leases, "_end_leases", end)


def impatient_leases(patch: Patch) -> None:
    def end(d: Any) -> None:
        for engine in tuple(d.state.engines.values()):
            if engine.heard_at + d.config.lease_s / 3 <= d.now:
                leases.lose_engine(d, engine.name, "silent")

    patch.setattr(leases, "_end_leases", end)


def silent_engine_gets_work(patch: Patch) -> None:
    """Its silence is noticed, and taken for a sign of life."""

    def silent(state: Any, event: f.EngineSilent) -> None:
        state.engines[event.engine].silent, state.engines[event.engine].heard_at = False, event.at

    after(patch, f.EngineSilent, silent)


def stalls_unnoticed(patch: Patch) -> None:
    patch.setattr(leases, "_find_stalled", lambda d: inf)


def one_sample_per_engine(patch: Patch) -> None:
    def has_slot(engine: Any, now: float) -> bool:
        return not engine.occupied and honest(engine, now)

    honest = cost.has_slot
    for module in (placement, recalls):
        patch.setattr(module, "has_slot", has_slot)


def drained_engine_gets_work(patch: Patch) -> None:
    for module in (placement, recalls):
        patch.setattr(module, "has_slot", lambda engine, now: len(engine.running) < engine.capacity.max_running)
    patch.setattr(cost, "serves", lambda engine, low, high: low <= engine.version <= high)


def credit_ignored(patch: Patch) -> None:
    for module in (placement, recalls):
        patch.setattr(module, "has_slot", lambda engine, now: engine.version >= 0 and not engine.draining)


def doubled_leases(patch: Patch) -> None:
    def end(transition: Any) -> None:
        for engine in tuple(transition.state.engines.values()):
            if engine.heard_at + 2 * transition.config.gone_s <= transition.now:
                leases.lose_engine(transition, engine.name, GoneCause.SILENT)

    patch.setattr(leases, "_end_leases", end)


def samples_stay_with_the_dead(patch: Patch) -> None:
    """An engine that is gone keeps what it ran."""

    def lose(transition: Any, name: str, cause: Any) -> None:
        transition.record(f.EngineGone(name, cause, at=transition.now))

    for module in (leases, agents):
        patch.setattr(module, "lose_engine", lose)


def prefix_awaited_for_ever(patch: Patch) -> None:
    """A later turn goes nowhere but to the engine that has its prefix, as long as that is there."""

    def waits(group: Any, name: str, request: cost.PlacementRequest, elsewhere: float) -> bool:
        holder = group._transition.state.engines.get(request.prefix)
        return holder is not None and holder.name not in group._offers

    patch.setattr(placement._Group, "_waits_for_prefix", waits)


def home_awaited_for_ever(patch: Patch) -> None:
    """A sample waits for the trainer's own engines, however long its turn is there."""
    patch.setattr(cost.Costs, "home", lambda costs, request: cost.HomeTurn(1.0, -inf, step_s=1.0, again_s=inf))


def absence_unnoticed(patch: Patch) -> None:
    """Where the manager was away, the time counts as its engines'."""
    patch.setattr(leases, "notice_absence", lambda transition: None)


def leases_renewed_always(patch: Patch) -> None:
    """Every tick takes itself for late."""

    def end(transition: Any) -> None:
        transition.record(f.LeasesRenewed(transition.now))
        honest(transition)

    honest = leases._end_leases
    patch.setattr(leases, "_end_leases", end)


def drain_put_off(patch: Patch) -> None:
    """The later of two deadlines wins."""

    def drain(transition: Any, name: str, *, deadline_s: float, reason: str) -> None:
        if name in transition.state.engines:
            until = transition.now + max(0.0, deadline_s)
            transition.record(f.EngineDraining(name, until, reason=reason or "drained", at=transition.now))
            transition.send(name, StartDrain(deadline_s, reason))

    for module in (leases, agents, trainer):
        patch.setattr(module, "drain_engine", drain)


def pause_never_ends(patch: Patch) -> None:
    def quarantined(state: Any, event: f.EngineQuarantined) -> None:
        state.engines[event.engine].quarantined_until = inf

    after(patch, f.EngineQuarantined, quarantined)


def pauses_ignored(patch: Patch) -> None:
    """An engine that pauses gets work."""
    honest = cost.has_slot
    for module in (placement, recalls):
        patch.setattr(module, "has_slot", lambda engine, now: honest(engine, inf))


def cancels_forgotten(patch: Patch) -> None:
    """An engine from which a sample is taken goes on with it."""

    def send(transition: Any, engine: str, message: Any) -> None:
        if not isinstance(message, Cancel):
            honest(transition, engine, message)

    honest = Transition.send
    patch.setattr(Transition, "send", send)


def room_of_a_recall_kept(patch: Patch) -> None:
    """What was set aside for a move is never given free."""
    honest = samples.end_recall

    def end(state: Any, number: int) -> None:
        room = {name: dict(engine.reserved_kv) for name, engine in state.engines.items()}
        honest(state, number)
        for name, kept in room.items():
            state.engines[name].reserved_kv.update(kept)

    for module in (samples, engines):
        patch.setattr(module, "end_recall", end)


def no_rebalancing(patch: Patch) -> None:
    """What runs stays where it is: nothing is moved to a faster engine, nor early from one that drains."""
    patch.setattr(ledger, "rebalance", lambda transition, room: None)


def window_never_opens(patch: Patch) -> None:
    """Once the trainer has learned, its devices never generate again."""

    def follow(transition: Any) -> None:
        if transition.state.window_open:
            honest(transition)

    honest = ledger.follow_trainer
    patch.setattr(ledger, "follow_trainer", follow)


def reserved_engines_idle(patch: Patch) -> None:
    """The trainer's engines get nothing while any other engine is there, open window or not."""

    def may(transition: Any, engine: Any, low: int, high: int) -> bool:
        others = [one for one in transition.state.engines.values() if one.pool is not Pool.RESERVED]
        return honest(transition, engine, low, high) and (engine.pool is not Pool.RESERVED or not others)

    honest = cost.may_generate
    for module in (placement, rebalance, recalls):
        patch.setattr(module, "may_generate", may)


def held_assignments_restarted(patch: Patch) -> None:
    """What an engine holds when it greets again is taken from it."""

    def reconcile(transition: Any, engine: Any, hello: Any) -> None:
        honest(transition, engine, msgspec.structs.replace(hello, held=()))

    honest = agents._reconcile_held
    patch.setattr(agents, "_reconcile_held", reconcile)


def head_keeps_everything(patch: Patch) -> None:
    """What waits for KV room keeps every engine that serves it from all that waits behind it."""

    def leaves(room: Any, engine: Any, request: Any, costs: Any) -> bool:
        before = (one for one in room._in_vain if one.context <= engine.capacity.max_context)
        return not any(one.low <= engine.version <= one.high for one in before)

    patch.setattr(placement.Room, "_leaves", leaves)


MUTANTS: Final = (
    Mutant(short_contexts_overfilled, "I4", 5),
    Mutant(drains_kept_to_itself, "I8", 0),
    Mutant(placed_on_any_version, "I6", 31),
    Mutant(silence_unnoticed, "I8", 24),
    Mutant(dead_idle_engine_kept, "I8", 24),
    Mutant(impatient_leases, "I7", 8),
    Mutant(silent_engine_gets_work, "I7", 20),
    Mutant(stalls_unnoticed, "I5", 14),
    Mutant(one_sample_per_engine, "I5", 13),
    Mutant(drained_engine_gets_work, "I7", 3),
    Mutant(credit_ignored, "I7", 15),
    Mutant(doubled_leases, "I8", 24),
    Mutant(samples_stay_with_the_dead, "I7", 34),
    Mutant(prefix_awaited_for_ever, "I5", 79),
    Mutant(home_awaited_for_ever, "I5", 4),
    Mutant(absence_unnoticed, "I5", 67),
    Mutant(leases_renewed_always, "I8", 8),
    Mutant(drain_put_off, "I7", 5),
    Mutant(pause_never_ends, "I5", 14),
    Mutant(pauses_ignored, "I7", 0),
    Mutant(cancels_forgotten, "I7", 28),
    Mutant(room_of_a_recall_kept, "I5", 39),
    Mutant(no_rebalancing, "I5", 837),
    Mutant(window_never_opens, "I5", 1),
    Mutant(reserved_engines_idle, "I5", 26),
    Mutant(held_assignments_restarted, "I7", 14),
    Mutant(head_keeps_everything, "I5", 230),
)
