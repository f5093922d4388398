"""apply(state, event): the only way a ledger's state changes. Live run, replay and audit are the same lines.

    samples       what happens to samples, groups and batches
    tokens        what comes of them
    engines       what happens to engines, to time and to the run
    work          what engines did, counted before that changes

An event has been decided; nothing here judges it again, and nothing here fails on an event that a ledger recorded.
Imported by `transition` and `journal`, which need `apply` alone; imports speed, state and events.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, Final, get_type_hints

from polyrl.ledger.apply import engines, samples, tokens
from polyrl.ledger.events import EVENT_TYPES, Event
from polyrl.ledger.state import LedgerState


def apply(state: LedgerState, event: Event) -> None:
    """Applies one event in place."""
    _APPLY[type(event)](state, event)


def _appliers(*modules: ModuleType) -> dict[type, Callable[[LedgerState, Any], None]]:
    """The function `apply_*` of `modules` for each type of event, as its parameter `event` is annotated."""
    functions = [item for module in modules for name, item in vars(module).items() if name.startswith("apply_")]
    return {get_type_hints(function)["event"]: function for function in functions}


_APPLY: Final = _appliers(samples, tokens, engines)
assert _APPLY.keys() == set(EVENT_TYPES), "each event changes the state in one place"
