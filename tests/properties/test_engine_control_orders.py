"""Random orders against a server that dies of a wrong one, as SGLang 0.5.23 was seen to: what the rules let through
never kills it, never generates without weights, and never blocks a probe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from polyrl.engines.control import (
    ALL_MEMORY,
    Continue,
    ControlOrder,
    ControlRefusal,
    ControlStep,
    LoadVersion,
    Memory,
    Pause,
    PauseMode,
    Probe,
    Serve,
    ServerState,
    Sleep,
    Wake,
    decide_control,
    flushes,
)

W, K, G = frozenset({Memory.WEIGHTS}), frozenset({Memory.KEYS_AND_VALUES}), frozenset({Memory.GRAPHS})
RETRACT, IN_PLACE = Pause(PauseMode.RETRACT), Pause(PauseMode.IN_PLACE)
FRESH = ServerState()
SERVES = ServerState(void=False)
BUSY = replace(SERVES, requests=True)
RETRACTED = replace(BUSY, paused=PauseMode.RETRACT)
HELD = replace(BUSY, paused=PauseMode.IN_PLACE)
ASLEEP = replace(SERVES, asleep=ALL_MEMORY, void=True)

TABLE = [
    pytest.param(FRESH, Serve(), "no weights", id="serves nothing before the first load"),
    pytest.param(SERVES, Serve(), None, id="serves"),
    pytest.param(ASLEEP, Serve(), "sleep", id="serves nothing in its sleep"),
    pytest.param(BUSY, Sleep(), "requests run", id="does not sleep under requests"),
    pytest.param(HELD, Sleep(), "requests run", id="nor under those that are paused in place"),
    pytest.param(RETRACTED, Sleep(), "/release_memory_occupation", id="sleeps under retracted ones"),
    pytest.param(SERVES, Sleep(K), "/release_memory_occupation", id="sleeps in part"),
    pytest.param(ASLEEP, Sleep(), None, id="sleeps already"),
    pytest.param(SERVES, Wake(), None, id="is awake"),
    pytest.param(ASLEEP, Wake(W), "/resume_memory_occupation", id="wakes in part"),
    pytest.param(ASLEEP, LoadVersion(), "weights sleep", id="loads nothing into sleeping weights"),
    pytest.param(replace(ASLEEP, asleep=K | G), LoadVersion(), None, id="loads while keys and values sleep"),
    pytest.param(BUSY, LoadVersion(), "requests run", id="loads nothing under requests"),
    pytest.param(HELD, LoadVersion(), None, id="loads under paused ones"),
    pytest.param(BUSY, IN_PLACE, "/pause_generation", id="pauses"),
    pytest.param(RETRACTED, IN_PLACE, "paused by retract", id="is paused in another way"),
    pytest.param(HELD, IN_PLACE, None, id="is paused so"),
    pytest.param(ASLEEP, RETRACT, "sleep", id="is paused before it sleeps, not after"),
    pytest.param(SERVES, Continue(), None, id="goes on anyway"),
    pytest.param(HELD, Continue(), "/continue_generation", id="goes on"),
    pytest.param(replace(RETRACTED, asleep=K), Continue(), "sleep", id="does not go on in its sleep"),
    pytest.param(replace(RETRACTED, void=True), Continue(), "without weights", id="nor without weights"),
    pytest.param(SERVES, Probe(), None, id="is probed"),
    pytest.param(HELD, Probe(), "paused", id="is not probed in a pause"),
    pytest.param(ASLEEP, Probe(), "sleep", id="nor in its sleep"),
]


@pytest.mark.parametrize(("state", "order", "word"), TABLE)
def test_each_order_in_each_state(state: ServerState, order: ControlOrder, word: str | None) -> None:
    """`word`: the call's path, or a part of the refusal; None: nothing to send."""
    match decide_control(state, order):
        case ControlRefusal(why):
            assert word is not None
            assert word in why
        case ControlStep(call, _):
            assert word == (None if call is None else call.path)


def test_only_what_sleeps_is_woken_and_what_wakes_is_void() -> None:
    step = decide_control(replace(SERVES, asleep=W | K), Wake())
    assert isinstance(step, ControlStep)
    assert step.call is not None
    assert step.call.body == {"tags": ["kv_cache", "weights"]}
    assert not step.after.asleep
    slept = decide_control(SERVES, Sleep(W))
    assert isinstance(slept, ControlStep)
    assert slept.after.void
    kept = decide_control(SERVES, Sleep(K))
    assert isinstance(kept, ControlStep)
    assert not kept.after.void
    assert (flushes(SERVES), flushes(RETRACTED), flushes(HELD)) == (True, True, False)


class Died(Exception):
    """The server's process has ended, or does what nobody may read."""


class SeenServer:
    """What SGLang 0.5.23 was seen to do, written from what was measured and not from the rules."""

    def __init__(self) -> None:
        self.asleep: set[str] = set()
        self.running = self.paused = 0
        self.mode = ""
        self.good = False

    def post(self, path: str, body: dict[str, Any]) -> None:
        tags = set(body.get("tags", ()))
        if path == "/release_memory_occupation":
            if self.running and not (self.paused and self.mode == "retract"):
                raise Died("assertion in the scheduler: not idle")
            self.asleep |= tags
            self.good = self.good and "weights" not in tags
        elif path == "/resume_memory_occupation":
            if not tags or tags - self.asleep:
                raise Died("KeyError")
            self.asleep -= tags
        elif path == "/pause_generation":
            self.paused, self.mode = 1, body["mode"]
        elif path == "/continue_generation":
            self.paused = 0
            self._generates()

    def load(self) -> None:
        if "weights" in self.asleep:
            raise Died("unmapped memory is written")
        if self.running and not self.paused:
            raise Died("waits for all requests")
        self.good = True

    def request(self) -> None:
        self.running += 1
        self._generates()

    def probe(self) -> None:
        if self.paused or self.asleep:
            raise Died("blocked, then unhealthy")

    def _generates(self) -> None:
        if self.running and not self.paused and (self.asleep or not self.good):
            raise Died("generates with what lies there")


MEMORY = st.frozensets(st.sampled_from(list(Memory)), min_size=1)
ORDERS = st.one_of(
    st.sampled_from([Serve(), LoadVersion(), Continue(), Probe(), RETRACT, IN_PLACE]),
    st.builds(Sleep, MEMORY), st.builds(Wake, MEMORY), st.just("all requests end"),
)  # fmt: skip


@settings(max_examples=1500, deadline=None)
@given(st.lists(ORDERS, max_size=25))
def test_what_is_let_through_never_kills_the_server(orders: Sequence[ControlOrder | str]) -> None:
    server, state = SeenServer(), FRESH
    for order in orders:
        if isinstance(order, str):
            if not server.paused:
                server.running, state = 0, replace(state, requests=False)
            continue
        step = decide_control(state, order)
        if isinstance(step, ControlRefusal):
            continue
        if step.call is not None:
            server.post(step.call.path, step.call.body)
        elif isinstance(order, LoadVersion):
            server.load()
        elif isinstance(order, Serve):
            server.request()
        elif isinstance(order, Probe):
            server.probe()
        state = step.after
        assert state.asleep == server.asleep
        assert state.void is not server.good


@given(st.lists(ORDERS, max_size=12))
def test_from_everywhere_there_is_a_way_back_to_serving(orders: Sequence[ControlOrder | str]) -> None:
    state = FRESH
    for order in orders:
        if not isinstance(order, str) and isinstance(step := decide_control(state, order), ControlStep):
            state = step.after
    first = RETRACT if state.requests and not state.asleep and not state.paused else Probe()
    for order in (first, Wake(), LoadVersion()):
        step = decide_control(state, order)
        state = step.after if isinstance(step, ControlStep) else state
    for order in (Continue(), Serve(), Probe()):
        step = decide_control(state, order)
        assert isinstance(step, ControlStep), step
        state = step.after
