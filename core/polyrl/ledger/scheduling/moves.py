"""How an assignment ends: its sample moves with all its tokens, or its turn is over.

A sample that moves keeps its identity, its tokens and what is left of its budget; the next engine gets prompt + tokens
so far. If nothing is left to generate (the budget is used up, or the last token is a stop token whose finish was lost
with the engine), the turn ends here: an engine that is fed an end-of-sequence token would write past it.

Contexts: an engine goes on with a sample that leaves room for one more token in its context, for as long as both that
and the budget last. What fills one context moves to an engine with a longer one; where there is none it ends by length,
and is never discarded for what it or an environment wrote. Only a prompt that leaves no room anywhere is too long.
What the model and the manifest allow is room, whatever engines claim: a sample that fits it waits for an engine that
holds it.
"""

from __future__ import annotations

from collections.abc import Sequence

from polyrl.ledger.batching import discard_group
from polyrl.ledger.causes import MoveCause, QuarantineCause
from polyrl.ledger.events import EngineDeparted, EngineQuarantined, Moved, TurnEnded
from polyrl.ledger.fleet import may_ever_serve
from polyrl.ledger.measures.departures import Departure, pause_of
from polyrl.ledger.scheduling.cost import serves
from polyrl.ledger.state import REJECTIONS_TO_PAUSE, GroupState, LedgerState, SampleState, context_used, turn_done
from polyrl.ledger.transition import Transition
from polyrl.sample import DiscardReason, Finish, Pool, sample_id
from polyrl.wire import Cancel


def move(transition: Transition, number: int, cause: MoveCause, *, cancel: bool = True, detail: str = "") -> None:
    """Ends a live assignment unfinished; `cancel`: its engine gets a Cancel."""
    assignment = transition.state.assignments[number]
    if cancel:
        transition.send(assignment.engine, Cancel(number))
    transition.record(Moved(number, cause, at=transition.now))
    sample = transition.state.samples[assignment.sample]
    transition.requeued.append(sample.group)
    if cause is MoveCause.REJECTED and _is_refused(transition, sample):
        names = ", ".join(sample.rejected_by)
        text = f"engines refused it {sample.rejections} times ({names}): {detail or 'no reason given'}"
        reason, name = DiscardReason.ENGINE_REJECTED, assignment.sample
        discard_group(transition, sample.group, reason, culprit=name, detail=text)
        return
    finish = already_over(transition, sample)
    if finish is not None:
        end_turn(transition, assignment.sample, finish)


def _is_refused(transition: Transition, sample: SampleState) -> bool:
    """Whether refusals are believed: of so many engines, or in the end of all that may ever serve it."""
    state, config = transition.state, transition.config
    if len(sample.rejected_by) >= config.max_rejections and not _has_better_judge(state, sample):
        return True
    if transition.now < sample.refused_at + config.refusal_deadline_s and not _is_shown(transition, sample):
        return False
    newest, least = state.groups[sample.group].group.max_version, context_used(state, sample) + 1
    return not may_ever_serve(state.engines.values(), newest, least, sample.rejected_by)


def _has_better_judge(state: LedgerState, sample: SampleState) -> bool:
    """Whether nobody who refused it has given a token to anyone, and another engine, which has, may take it: a pool of
    engines that are all broken alike decides nothing beside one that works."""
    engines = state.engines
    if any(engines[name].tokens for name in sample.rejected_by if name in engines):
        return False
    group = state.groups[sample.group].group
    return any(
        engine.tokens
        and engine.name not in sample.rejected_by
        and serves(engine, group.min_version, group.max_version)
        and engine.capacity.max_context > context_used(state, sample)
        for engine in engines.values()
    )


def _is_shown(transition: Transition, sample: SampleState) -> bool:
    """Whether refusals speak of the sample before their deadline: as many came as believed of several engines, all that
    gave them have given tokens to others since the first, so they work, and nothing else is left to generate: only
    then does waiting for another engine keep anybody."""
    state = transition.state
    here = [state.engines[name] for name in sample.rejected_by if name in state.engines]
    if sample.rejections < transition.config.max_rejections or not here:
        return False
    work = all(engine.token_at > sample.refused_at for engine in here)
    return work and all(state.samples[other.sample].rejections for other in state.assignments.values())


def already_over(transition: Transition, sample: SampleState) -> Finish | None:
    """How the turn has ended although no engine said so; None while there is something to generate."""
    sampling = transition.state.groups[sample.group].group.sampling
    if sample.length > sample.turn_start and sampling.stop_token_ids:
        last = int.from_bytes(sample.ids[-4:], "little")
        if last in sampling.stop_token_ids:
            return Finish.STOP
    used_up = sample.generated >= sampling.max_new_tokens
    return Finish.LENGTH if used_up or (sample.length and _has_outgrown(transition, sample)) else None


def _has_outgrown(transition: Transition, sample: SampleState) -> bool:
    """Whether no engine that may serve it has room for another token."""
    state = transition.state
    group = state.groups[sample.group].group
    context = longest_context(transition, group.min_version, group.max_version)
    return 0 < context <= context_used(state, sample)


def longest_context(transition: Transition, low: int, high: int) -> int:
    """What is allowed, or that of the engines that serve these versions or will, when they have loaded; 0 while none
    serves them yet: an engine that starts may not know its context, and nothing may end by a guess."""
    kinds = [(version, context) for version, context in transition.fleet.kinds() if version <= high]
    if all(version < low for version, _ in kinds):
        return 0
    allowed = transition.config.allowed_context(transition.state.weights.positions)
    return max(allowed, *(context for _, context in kinds))


def end_unservable(transition: Transition) -> None:
    """Ends waiting samples that no engine can ever take. Too old for every version: their group is discarded. Longer
    than every context: a turn that has begun ends by length; only a prompt that fits nowhere discards its group.

    What waits is looked through when other versions or contexts are there than the last time, else only what is new."""
    fleet = transition.fleet
    offered = (transition.state.weights.version, frozenset(fleet.kinds()), fleet.may_load_older())
    if offered != fleet.last_offer:
        fleet.last_offer = offered
        _end_those(transition, [number for *_, number in transition.state.queue])
    elif transition.requeued:
        _end_those(transition, transition.requeued)


def _end_those(transition: Transition, groups: Sequence[int]) -> None:
    contexts: dict[tuple[int, int], int] = {}
    for number in groups:
        entry = transition.state.groups.get(number)
        if entry is None or not entry.waiting:
            continue
        versions = (entry.group.min_version, entry.group.max_version)
        if versions not in contexts:
            contexts[versions] = longest_context(transition, *versions)
        if contexts[versions]:
            _end_outgrown(transition, entry, contexts[versions])
        elif _is_stale(transition, entry.group.max_version):
            newest = transition.state.weights.version
            text = f"weights are at version {newest}, it may use at most {entry.group.max_version}"
            discard_group(transition, number, DiscardReason.STALE, detail=text)


def _is_stale(transition: Transition, high: int) -> bool:
    """Versions only grow, and all are past the newest that may generate, or will be when they have loaded."""
    newest, fleet = transition.state.weights.version, transition.fleet
    past = all(version < 0 or version > high for version, _ in fleet.kinds())
    return newest > high and past and not fleet.may_load_older()


def _end_outgrown(transition: Transition, entry: GroupState, context: int) -> None:
    state = transition.state
    waiting = {name: state.samples[name] for name in (sample_id(entry.group.id, index) for index in entry.waiting)}
    outgrown = {name: sample for name, sample in waiting.items() if context_used(state, sample) >= context}
    if all(sample.length for sample in outgrown.values()):
        for name in outgrown:
            end_turn(transition, name, Finish.LENGTH)
        return
    prompt = len(entry.group.prompt_ids) // 4
    text = f"the prompt has {prompt} tokens; engines hold {context}, a response's first token included"
    discard_group(transition, entry.group.id, DiscardReason.PROMPT_TOO_LONG, detail=text)


def end_turn(transition: Transition, name: str, finish: Finish) -> None:
    """Ends a sample's turn and asks the trainer for its verdict."""
    ask_due = transition.now + transition.config.turn_resend_s
    transition.record(TurnEnded(name, finish, ask_due=ask_due, at=transition.now))
    transition.answer(turn_done(transition.state, name))


def quarantine(transition: Transition, name: str, cause: MoveCause, first_pause_s: float | None = None) -> None:
    """An engine failed: no work for a pause that doubles with each failure until it gives tokens again."""
    failures = transition.state.engines[name].failures
    _pause(
        transition,
        name,
        QuarantineCause(cause),
        (first_pause_s or transition.config.suspect_s) * 2.0 ** min(failures, 16),
    )


def suspect_refusals(transition: Transition, name: str) -> None:
    """An engine that refused all that it got last pauses: it speaks of itself, not of the samples."""
    engine = transition.state.engines[name]
    beyond = engine.rejections - REJECTIONS_TO_PAUSE
    if beyond >= 0 and engine.quarantined_until <= transition.now:  # what it had got before comes back meanwhile
        _pause(transition, name, QuarantineCause.REJECTED, transition.config.suspect_s * 2.0 ** min(beyond, 16))


def half_open(transition: Transition, name: str) -> None:
    """An engine that had gone silent is back: one sample until it gives tokens, and from the second time on a pause
    that doubles, so one that flaps costs ever fewer moves."""
    times, _ = transition.state.vanished.get(name, (1, transition.now))  # of a huge fleet not all are remembered
    pause_s = transition.config.suspect_s * 2.0 ** min(times - 2, 16) if times > 1 else 0.0
    _pause(transition, name, QuarantineCause.RETURNED, pause_s)


def pause_departed(transition: Transition, departure: Departure, step: int) -> None:
    """An engine whose tokens are not the policy's pauses, longer each time; what it runs, it ends. The trainer's own
    never pauses, and none while no other takes work."""
    state, now, name = transition.state, transition.now, departure.engine
    engine, before = state.engines.get(name), state.usage.departed.get(name)
    until = now
    if engine is not None and engine.pool is not Pool.RESERVED and _another_serves(transition, name):
        until += pause_of(1 if before is None else before.times + 1)
    transition.record(EngineDeparted(name, step, text=departure.text, until=until, at=now))
    resume_pause(transition, name)


def resume_pause(transition: Transition, name: str) -> None:
    """An engine that departed pauses to the end, whether it has greeted anew meanwhile or not; one that pauses as long
    already does so, however often it greets."""
    departed, engine = transition.state.usage.departed.get(name), transition.state.engines.get(name)
    if departed is None or engine is None or departed.until <= transition.now:
        return
    if engine.quarantined_until < departed.until:
        event = EngineQuarantined(name, departed.until, cause=QuarantineCause.DEPARTED, at=transition.now)
        transition.record(event)


def _another_serves(transition: Transition, name: str) -> bool:
    return any(
        engine.name != name and serves(engine, 0, engine.version) and engine.quarantined_until <= transition.now
        for engine in transition.state.engines.values()
    )


def _pause(transition: Transition, name: str, cause: QuarantineCause, seconds: float) -> None:
    until = transition.now + min(seconds, transition.config.suspect_max_s)
    until = max(until, transition.state.engines[name].quarantined_until)  # one that departed pauses to the end
    transition.record(EngineQuarantined(name, until, cause=cause, at=transition.now))
