"""Everything random about a simulated run, drawn once from its seed: sizes, speeds, and which fault comes when."""

from __future__ import annotations

from random import Random
from typing import Final

import msgspec

ENGINE_FAULTS: Final = (
    "kill",
    "preempt",
    "freeze",
    "stall",
    "break",
    "flap",
    "loseFrame",
    "repeatFrame",
    "lieVersion",
    "lieForeign",
    "lieBudget",
    "lieTokens",
    "lieLength",
    "failWeights",
    "engineError",
    "reject",
    "drain",
    "quit",
)
"""What can happen to an engine: it vanishes; gets a notice; is stopped and goes on; gives no tokens but signs of life;
loses its connection, once for a while or repeatedly; loses or doubles a frame; lies about its version, about
assignments that are not its own, about its budget, about tokens sent before, about having ended; cannot load weights;
hands back; calls a sample impossible; is drained by the operator; sends Deregister."""

SLOWNESS: Final = 30
"""Times slower that a `slow` engine is: above what makes a straggler, whatever it is compared with."""

SLOW_SHARE: Final = 0.05
"""Share of the schedules with `slow` engines; each takes many times longer than another. They are drawn apart, so all
other seeds keep the course they had before there were any."""

SHORT_CONTEXT_SHARE: Final = 0.2
"""Share of the schedules whose engines hold less than a prompt and a whole budget; drawn apart for the same reason."""

REJECTER_SHARE: Final = 0.1
LONG_PROMPT_SHARE: Final = 0.1
OLD_CHECKPOINT_SHARE: Final = 0.15
LOST_JOURNAL_SHARE: Final = 0.1
AHEAD_SHARE: Final = 0.2
CARRIED_SHARE: Final = 0.7
ALONE_SHARE: Final = 0.25
LEARNER_SHARE: Final = 0.15
FLOOD_SHARE: Final = 0.1
SCARCE_SHARE: Final = 0.05
"""Shares of the schedules with these; drawn apart as well."""

OTHER_FAULTS: Final = (
    "trainerBreak",
    "trainerKill",
    "loseBatch",
    "loseAnswer",
    "managerAway",
    "managerKill",
    "managerKillMidway",
    "managerPowerLoss",
    "managerPowerLossMidway",
)
"""What can happen to the others: the trainer loses its connection, at any moment, or with a batch or an answer under
way, or is killed and followed by another process; the manager's process is stopped, or killed at any moment, or killed
between a commit and the messages that wait for it; its machine loses power, at any moment or while it syncs, and with
it goes some or all of what was not synced."""

HORIZON_S: Final = 25.0
"""Faults happen within the first so many seconds; after them the run must end."""


class SimulatedFault(msgspec.Struct, frozen=True):
    """One fault at one moment."""

    at: float
    kind: str
    target: int
    """Which of the live preemptible engines, modulo their number."""
    seconds: float
    """How long it lasts, where it lasts."""


class EnginePlan(msgspec.Struct, frozen=True):
    """One engine of the initial fleet."""

    reserved: bool
    max_running: int
    kv_tokens: int
    step_s: float
    """Seconds per token and sample."""
    load_s: float
    """Seconds to load a weight version."""
    max_context: int = 10_000
    rejects: bool = False
    """Whether it refuses whatever it gets."""
    sleep_s: float = 0.0
    """Seconds to give its memory back, and again to take it; 0: it cannot."""


class Schedule(msgspec.Struct, frozen=True):
    """A run and its faults."""

    seed: int
    engines: tuple[EnginePlan, ...]
    faults: tuple[SimulatedFault, ...]
    steps: int
    groups: int
    """Groups that a step consumes."""
    mini_batches: int
    """Optimizer steps per step."""
    n: int
    over_sampling: int
    """Further groups submitted per step."""
    staleness: int
    max_new_tokens: int
    mean_turn: int
    """Mean tokens until a stop token."""
    max_turns: int
    group_filter: str
    reject_share: float
    """Share of verdicts that are Reject."""
    poison_share: float
    """Share of samples that every engine calls impossible."""
    evaluate: bool
    max_tokens: int
    longest_prompt: int = 6
    ahead: int = 0
    """Steps whose groups the trainer submits before the step before them has ended."""
    carries: bool = False
    """Whether what an over-sampled step leaves over trains in the next one."""
    covers: bool = False
    """Whether a trainer that is followed by another one may have written no checkpoint for a step."""
    alone_share: float = 0.0
    """Share of the requests for batches that are learned where there is no room beside engines."""
    learn_s: float = 0.0
    """Seconds to learn a batch, before more is asked for."""
    next_s: float = 5.0
    """Seconds that a request for a batch gives."""


OWN_FAULTS: Final = ("ownKill", "ownFreeze", "ownFreeze", "ownBreak", "ownSleepless")
"""What can happen to one on the trainer's devices that sleeps there: as to others; and it does not fall asleep."""


def draw_schedule(seed: int) -> Schedule:
    """The schedule of a seed."""
    rng = Random(seed)
    staleness = rng.choice((0, 0, 0, 1, 2))
    engines = tuple(_draw_engine(rng, reserved=index == 0) for index in range(rng.randint(1, 4)))
    faults = sorted((_draw_fault(rng) for _ in range(rng.choice((0, 2, 5, 10, 20)))), key=lambda fault: fault.at)
    mini_batches = rng.choice((1, 1, 2))
    schedule = Schedule(
        seed=seed,
        engines=engines,
        faults=tuple(faults),
        steps=rng.randint(1, 3),
        groups=mini_batches * rng.randint(1, 3),
        mini_batches=mini_batches,
        n=rng.randint(1, 4),
        over_sampling=rng.choice((0, 0, 1, 2)),
        staleness=staleness,
        max_new_tokens=rng.randint(4, 50),
        mean_turn=rng.choice((6, 15, 40)),
        max_turns=rng.choice((1, 1, 2, 3)),
        group_filter=rng.choice(("none", "none", "anySuccess", "nonzeroSpread", "custom")),
        reject_share=rng.choice((0.0, 0.0, 0.05)),
        poison_share=rng.choice((0.0, 0.0, 0.03)),
        evaluate=rng.random() < 0.3,
        max_tokens=rng.choice((40, 200, 10_000)),
    )
    worse = _with_old_checkpoints(_with_rejecters(_with_long_prompts(_with_usual(schedule))))
    usual = _with_sleepers(_with_carried(_with_ahead(_with_lost_journals(worse))))
    return _with_scarce_room(_with_floods(_with_slow_learners(usual)))


def _with_usual(schedule: Schedule) -> Schedule:
    return _with_short_contexts(_with_slow_engines(schedule))


def _with_rejecters(schedule: Schedule) -> Schedule:
    """The same with an engine more that refuses everything."""
    rng = Random(f"rejects/{schedule.seed}")
    if rng.random() >= REJECTER_SHARE:
        return schedule
    rejecter = msgspec.structs.replace(_draw_engine(rng, reserved=False), rejects=True)
    return msgspec.structs.replace(schedule, engines=(*schedule.engines, rejecter))


def _with_long_prompts(schedule: Schedule) -> Schedule:
    """The same with prompts that are longer than all that is generated."""
    rng = Random(f"prompt/{schedule.seed}")
    if rng.random() >= LONG_PROMPT_SHARE or any(plan.max_context < 10_000 for plan in schedule.engines):
        return schedule
    return msgspec.structs.replace(schedule, longest_prompt=rng.choice((200, 700, 2000)))


def _with_old_checkpoints(schedule: Schedule) -> Schedule:
    """The same with trainers that are followed by others which begin a step again."""
    rng = Random(f"checkpoint/{schedule.seed}")
    if rng.random() >= OLD_CHECKPOINT_SHARE:
        return schedule
    kills = [
        SimulatedFault(rng.uniform(0.0, HORIZON_S) * rng.choice((0.2, 1.0)), "trainerRollback", target=0, seconds=0.0)
        for _ in range(rng.randint(1, 3))
    ]
    twin = SimulatedFault(rng.uniform(0.0, HORIZON_S), "trainerTwin", target=0, seconds=0.0)
    faults = tuple(sorted([*schedule.faults, *kills, twin], key=lambda fault: fault.at))
    return msgspec.structs.replace(schedule, faults=faults, covers=True)


def _with_lost_journals(schedule: Schedule) -> Schedule:
    """The same with managers whose machine takes the journal along."""
    rng = Random(f"journal/{schedule.seed}")
    if rng.random() >= LOST_JOURNAL_SHARE:
        return schedule
    lost = [
        SimulatedFault(
            rng.uniform(0.0, HORIZON_S) * rng.choice((0.2, 1.0)), "journalLoss", target=0, seconds=rng.uniform(0.1, 5.0)
        )
        for _ in range(rng.randint(1, 2))
    ]
    faults = tuple(sorted([*schedule.faults, *lost], key=lambda fault: fault.at))
    return msgspec.structs.replace(schedule, faults=faults)


def _with_ahead(schedule: Schedule) -> Schedule:
    """The same with several steps open at once."""
    rng = Random(f"ahead/{schedule.seed}")
    return msgspec.structs.replace(schedule, ahead=rng.choice((1, 1, 3)) if rng.random() < AHEAD_SHARE else 0)


def _with_carried(schedule: Schedule) -> Schedule:
    """The same with surplus that goes on, where it may be a version older."""
    may = schedule.staleness > 0 and schedule.over_sampling > 0
    return msgspec.structs.replace(
        schedule, carries=may and Random(f"carried/{schedule.seed}").random() < CARRIED_SHARE
    )


def _with_sleepers(schedule: Schedule) -> Schedule:
    """The same with a learner that needs its devices alone, and engines there that break as they sleep and wake."""
    rng = Random(f"alone/{schedule.seed}")
    if rng.random() >= ALONE_SHARE:
        return schedule
    engines = tuple(
        msgspec.structs.replace(plan, sleep_s=rng.choice((0.05, 0.5, 3.0))) if plan.reserved else plan
        for plan in schedule.engines
    )
    faults = [
        SimulatedFault(
            rng.uniform(0.0, HORIZON_S) * rng.choice((0.2, 1.0)),
            rng.choice(OWN_FAULTS),
            target=0,
            seconds=rng.choice((0.2, 2.0, 8.0, 30.0)),
        )
        for _ in range(rng.choice((0, 1, 3, 6)))
    ]
    return msgspec.structs.replace(
        schedule,
        engines=engines,
        faults=tuple(sorted([*schedule.faults, *faults], key=lambda fault: fault.at)),
        alone_share=rng.choice((0.5, 1.0)),
    )


def _with_slow_learners(schedule: Schedule) -> Schedule:
    """The same with a learner that takes its time, and leaves the manager time for its plans, which half of the fleets
    are measured well enough for."""
    rng = Random(f"learns/{schedule.seed}")
    if rng.random() >= LEARNER_SHARE:
        return schedule
    slow = msgspec.structs.replace(schedule, learn_s=rng.choice((0.5, 3.0, 8.0)), next_s=rng.choice((30.0, 300.0)))
    if rng.random() < 0.5:
        return slow
    own = EnginePlan(True, rng.choice((2, 4)), kv_tokens=10_000, step_s=0.05, load_s=0.2)
    return msgspec.structs.replace(
        slow,
        engines=(own, *[msgspec.structs.replace(own, reserved=False)] * rng.randint(1, 3)),
        steps=rng.randint(2, 3),
        groups=schedule.mini_batches * rng.randint(3, 5),
        max_new_tokens=rng.randint(100, 250),
        mean_turn=150,
        max_tokens=10_000,
    )


def _with_floods(schedule: Schedule) -> Schedule:
    """The same with agents that greet, send frames again and ask for texts, without a pause."""
    rng = Random(f"flood/{schedule.seed}")
    if rng.random() >= FLOOD_SHARE:
        return schedule
    floods = [
        SimulatedFault(rng.uniform(0.0, 5.0), "flood", target=rng.randrange(8), seconds=rng.choice((1.0, 4.0)))
        for _ in range(rng.randint(1, 2))
    ]
    faults = tuple(sorted([*schedule.faults, *floods], key=lambda fault: fault.at))
    return msgspec.structs.replace(schedule, faults=faults)


def _with_scarce_room(schedule: Schedule) -> Schedule:
    """The same with engines alike that have KV room for one long prompt and a few short ones."""
    rng = Random(f"scarce/{schedule.seed}")
    if rng.random() >= SCARCE_SHARE:
        return schedule
    alike = EnginePlan(False, 4, kv_tokens=1200, step_s=rng.choice((0.2, 0.4)), load_s=0.2)
    return msgspec.structs.replace(
        schedule,
        engines=(schedule.engines[0], *[alike] * rng.randint(2, 4)),
        groups=schedule.mini_batches * rng.randint(6, 12),
        n=1,
        max_new_tokens=rng.randint(100, 150),
        mean_turn=100,
        max_turns=1,
        max_tokens=10_000,
        longest_prompt=800,
    )


def _with_short_contexts(schedule: Schedule) -> Schedule:
    """The same with contexts that samples outgrow."""
    rng = Random(f"context/{schedule.seed}")
    if rng.random() >= SHORT_CONTEXT_SHARE:
        return schedule
    contexts = [rng.choice((8, 15, 30, 10_000)) for _ in schedule.engines]
    plans = zip(schedule.engines, contexts, strict=True)
    engines = tuple(msgspec.structs.replace(plan, max_context=context) for plan, context in plans)
    return msgspec.structs.replace(schedule, engines=engines)


def _with_slow_engines(schedule: Schedule) -> Schedule:
    """The same with a fleet that is measured well enough to tell who is slow, and with work enough to matter."""
    rng = Random(f"slow/{schedule.seed}")
    if rng.random() >= SLOW_SHARE:
        return schedule
    alike = EnginePlan(False, rng.choice((2, 4)), kv_tokens=10_000, step_s=rng.choice((0.02, 0.05)), load_s=0.2)
    slow = [
        SimulatedFault(rng.uniform(0.5, 10.0), "slow", target=rng.randrange(8), seconds=rng.uniform(5.0, HORIZON_S))
        for _ in range(2)
    ]
    return msgspec.structs.replace(
        schedule,
        engines=(schedule.engines[0], *[alike] * rng.randint(3, 5)),
        faults=tuple(sorted([*schedule.faults, *slow], key=lambda fault: fault.at)),
        groups=schedule.mini_batches * rng.randint(3, 5),
        max_new_tokens=rng.randint(100, 250),
        mean_turn=100,
    )


def _draw_engine(rng: Random, *, reserved: bool) -> EnginePlan:
    return EnginePlan(
        reserved=reserved,
        max_running=rng.choice((1, 2, 4, 16)),
        kv_tokens=rng.choice((120, 400, 10_000)),
        step_s=rng.choice((0.005, 0.02, 0.05, 0.2, 0.4)),
        load_s=rng.choice((0.01, 0.2, 1.5)),
    )


def _draw_fault(rng: Random) -> SimulatedFault:
    kind = rng.choice(ENGINE_FAULTS) if rng.random() < 0.75 else rng.choice(OTHER_FAULTS)
    return SimulatedFault(
        rng.uniform(0.0, HORIZON_S) * rng.choice((0.05, 0.2, 1.0)),
        kind,
        target=rng.randrange(8),
        seconds=rng.uniform(0.1, 12.0) * rng.choice((0.1, 1.0)),
    )
