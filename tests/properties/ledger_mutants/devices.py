"""What the trainer's devices do, and how long its batches wait for that."""

from __future__ import annotations

from math import inf
from typing import Any, Final

from ledger_mutants.mutant import Mutant, Patch

from polyrl.ledger import ledger
from polyrl.ledger.apply import samples
from polyrl.ledger.messages import agents
from polyrl.ledger.scheduling import leases, window
from polyrl.sample import Purpose


def held_past_its_request(patch: Patch) -> None:
    """A batch is held as long as that pays, whatever time its request gave."""
    patch.setattr(window, "DEADLINE_SHARE", 2.0)


def plan_rarely_made_anew(patch: Patch) -> None:
    patch.setattr(window, "REPLAN_S", 10.0)


def held_for_idle_devices(patch: Patch) -> None:
    """A batch waits for devices that generate nothing."""

    def holds(transition: Any, wanted: Any) -> bool:
        reserved = any(True for _ in transition.fleet.reserved())
        return wanted.purpose is Purpose.TRAIN and transition.state.window_open and reserved

    patch.setattr(ledger, "holds_back", holds)


def sleepless_engine_awaited(patch: Patch) -> None:
    """An engine that does not fall asleep is waited for."""
    patch.setattr(leases, "overdue", lambda transition: ())


def greeting_gives_time_anew(patch: Patch) -> None:
    """An engine that greets while it falls asleep is taken for awake, and ordered for the first time."""
    patch.setattr(agents, "order_under_way", lambda known, hello: None)


def learning_time_forgotten(patch: Patch) -> None:
    """What learning takes is never measured."""

    def end(state: Any, at: float) -> None:
        state.learner.busy_since, state.learner.tokens, state.learner.alone = inf, 0, False

    patch.setattr(samples, "end_learning", end)


def sleeps_through_what_others_cannot(patch: Patch) -> None:
    """Others are counted on for samples that none of them may take."""
    patch.setattr(window, "_needs", lambda state, wanted, these, others: False)


MUTANTS: Final = (
    Mutant(held_past_its_request, "I9", 25),
    Mutant(plan_rarely_made_anew, "I9", 25),
    Mutant(held_for_idle_devices, "I9", 25),
    Mutant(sleepless_engine_awaited, "I9", 180),
    Mutant(greeting_gives_time_anew, "I9", 2699),
    Mutant(learning_time_forgotten, "I9", 35),
    Mutant(sleeps_through_what_others_cannot, "I5", 6473),
)
