"""Who is a straggler, what becomes of what it runs, and how it comes back."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from polyrl.ledger import ledger
from polyrl.ledger.events import EngineQuarantined, EngineRestored
from polyrl.ledger.scheduling import stragglers
from polyrl.ledger.state import LeasedEngine
from polyrl.sample import Pool
from polyrl.wire import Deregister, ReservedWindow, pack_ids
from polyrl_rollout.testing.flow import Flow, Speed
from polyrl_rollout.testing.stage import Stage

STEP_S = 0.05
SLOW = (1.0, 0.6, 6)
"""(running, seconds per step, tokens) of a window twelve times slower than its peers'."""
FINE = (1.0, 0.3, 6)


@dataclass(frozen=True)
class Case:
    name: str
    windows: list[tuple[float, float, int]]
    found: bool
    peers: int = 3
    peers_step_s: float = STEP_S
    version: int = 0


CASES = [
    Case("slow for long", [SLOW] * 3, found=True),
    Case("slower than others, but not far", [FINE] * 8, found=False),
    Case("too few windows", [SLOW] * 2, found=False),
    Case("too few tokens", [(1.0, 0.6, 2)] * 7, found=False),
    Case("few tokens in many windows", [(1.0, 0.6, 1)] * 16, found=True),
    Case("slow once more after it was not", [SLOW, FINE, SLOW, SLOW], found=False),
    Case("slow since", [FINE, SLOW, SLOW, SLOW], found=True),
    Case("with many samples everybody is slower", [(64.0, 0.8, 100)] * 3, found=False),
    Case("two peers tell", [SLOW] * 3, found=True, peers=2),
    Case("one peer does not", [SLOW] * 3, found=False, peers=1),
    Case("alone", [SLOW] * 3, found=False, peers=0),
    Case("others are as slow", [SLOW] * 3, found=False, peers_step_s=0.6),
    Case("nobody else serves its version", [SLOW] * 3, found=False, version=1),
    Case("nothing is measured", [], found=False),
]


def fleet(case: Case) -> Stage:
    """The engine in question, `e`, runs two samples; its peers greet after them."""
    stage = Stage()
    stage.engine("e", version=case.version)
    stage.submit(2, max_version=1)
    for index in range(case.peers):
        stage.engine(f"p{index}")
        measure(stage.ledger.state.engines[f"p{index}"], case.peers_step_s)
    engine = stage.ledger.state.engines["e"]
    measure(engine, case.peers_step_s)  # what rebalancing goes by says nothing against it
    engine.windows = list(case.windows)
    return stage


def measure(engine: LeasedEngine, step_s: float) -> None:
    engine.step_scale = step_s


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_who_is_a_straggler(case: Case) -> None:
    stage = fleet(case)
    stage.pass_time(0.5)
    assert stage.ledger.state.engines["e"].straggler is case.found
    assert (len(stage.placed()["e"]) == 0) is case.found
    assert stage.ledger.state.counters.migrations == ({"straggler": 2} if case.found else {})


def with_straggler() -> Stage:
    stage = fleet(CASES[0])
    stage.tokens("e", stage.number("0.0"), [7, 8])
    stage.pass_time(0.5)
    return stage


def test_what_it_ran_goes_on_elsewhere_with_all_its_tokens() -> None:
    stage = with_straggler()
    assignment = stage.ledger.state.assignments[stage.number("0.0")]
    assert assignment.engine != "e"
    assert assignment.length == 2
    (event,) = [event for event in stage.events if isinstance(event, EngineQuarantined)]
    assert (event.engine, event.cause, event.quarantined_until) == ("e", "straggler", stage.now + stragglers.PAUSE_S)


def test_it_is_suspect_and_pauses_then_is_tried_with_one_fresh_sample() -> None:
    stage = with_straggler()
    states = {view.name: view.state for view in stage.ledger.status(stage.now).engines}
    assert states["e"] == "suspect"
    stage.submit(3)
    assert not stage.placed()["e"]
    stage.finish_all()
    stage.pass_time_heard(stragglers.PAUSE_S)
    stage.submit(9)
    assert len(stage.placed()["e"]) == 1


@pytest.mark.parametrize(
    ("step_s", "proven"),
    [
        pytest.param(STEP_S, True, id="as fast as the others"),
        pytest.param(0.3, True, id="slower than the others"),
        pytest.param(0.6, False, id="as slow as before"),
    ],
)
def test_a_window_proves_it_and_a_token_does_not(step_s: float, proven: bool) -> None:
    stage = with_straggler()
    stage.finish_all()
    stage.pass_time_heard(stragglers.PAUSE_S)
    stage.submit()
    (name,) = stage.placed()["e"]
    stage.tokens("e", stage.number(name), [5])
    stage.pass_time(0.1)
    assert stage.ledger.state.engines["e"].straggler
    for _ in range(16):
        stage.now += 2 * step_s
        stage.tokens("e", stage.number(name), [5, 5])
    stage.pass_time(0.0)
    causes = [event.cause for event in stage.events if isinstance(event, EngineRestored)]
    assert causes == (["proven"] if proven else [])
    assert stage.ledger.state.engines["e"].straggler is not proven


def leave(stage: Stage) -> None:
    for name in ("p0", "p1"):
        stage.agent(name, Deregister("done"))


def drain(stage: Stage) -> None:
    for name in ("p0", "p1"):
        stage.drain(name, 5.0)


@pytest.mark.parametrize("go", [leave, drain])
def test_it_is_needed_when_too_few_others_are_left(go: object) -> None:
    stage = with_straggler()
    assert callable(go)
    go(stage)
    stage.pass_time(0.1)
    (event,) = [event for event in stage.events if isinstance(event, EngineRestored)]
    assert (event.engine, event.cause) == ("e", "needed")
    stage.submit(12)
    assert len(stage.placed()["e"]) > 1


def test_reserved_engines_are_no_peers_outside_the_window() -> None:
    stage = fleet(Case("", [SLOW] * 3, found=True, peers=1))
    for name in ("r0", "r1"):
        stage.engine(name, Pool.RESERVED)
        measure(stage.ledger.state.engines[name], STEP_S)
    stage.trainer(ReservedWindow(stage.request(), False))
    stage.pass_time(0.5)
    assert not stage.ledger.state.engines["e"].straggler
    stage.trainer(ReservedWindow(stage.request(), True))
    stage.pass_time(0.5)
    assert stage.ledger.state.engines["e"].straggler


def test_what_no_peer_can_hold_stays() -> None:
    stage = Stage()
    stage.engine("e", max_context=100_000)
    stage.submit(1, prompt_ids=pack_ids([9] * 5000))
    stage.submit()
    for index in range(3):
        stage.engine(f"p{index}")
        measure(stage.ledger.state.engines[f"p{index}"], STEP_S)
    engine = stage.ledger.state.engines["e"]
    measure(engine, STEP_S)
    engine.windows = [SLOW] * 3
    stage.pass_time(0.5)
    assert stage.placed()["e"] == ["0.0"]


@pytest.mark.parametrize("seed", range(2))
def test_in_a_full_fleet_it_is_found_drained_and_comes_back_when_it_has_recovered(
    seed: int,
) -> None:
    """Nobody has room, so nothing can be rebalanced; the engine recovers after twenty seconds."""
    engines = {"e": Speed(0.5), "p": Speed(0.02), "q": Speed(0.02), "r": Speed(0.02)}
    flow = Flow(engines, lambda sample, turn: 300 + 37 * (int(sample.split(".")[0]) * 7 + seed) % 400)
    flow.submit(120, n=4, max_new_tokens=1000)

    def recover(flow: Flow) -> None:
        if flow.now >= 20.0:
            flow.engines["e"].speed = Speed(0.02)

    end = flow.run(each=recover)
    events = [(type(f).__name__, f.cause) for f in flow.events if isinstance(f, EngineQuarantined | EngineRestored)]
    assert events == [("EngineQuarantined", "straggler"), ("EngineRestored", "proven")]
    assert flow.ledger.state.counters.migrations["straggler"] == 16
    tokens = {name: engine.tokens for name, engine in flow.ledger.state.engines.items()}
    print(f"{end:.0f} s, {tokens}")
    assert tokens["e"] > 0.4 * tokens["p"]


def test_one_slow_engine_alone_finishes_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "rebalance", lambda d: None)
    flow = Flow({"e": Speed(0.5)}, lambda sample, turn: 60)
    flow.submit(2, n=2, max_new_tokens=100)
    assert flow.run(200.0) < 200.0
    assert not [event for event in flow.events if isinstance(event, EngineQuarantined)]


def test_it_takes_its_windows_and_not_a_moment() -> None:
    """An engine that pauses for two seconds now and then is none."""
    flow = Flow({name: Speed(0.02) for name in "epqr"}, lambda sample, turn: 900)
    flow.submit(40, n=4, max_new_tokens=1000)

    def pause(flow: Flow) -> None:
        flow.engines["e"].stuck = flow.now % 10 < 2

    flow.run(60.0, pause)
    assert not [event for event in flow.events if isinstance(event, EngineQuarantined)]
