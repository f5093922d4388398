"""How often engines are lost, from what was seen, and what it makes of a decision."""

from __future__ import annotations

import pytest

from polyrl.ledger import LedgerConfig
from polyrl.ledger.measures.losses import HALVED_AT, PRIOR_LOSSES, PRIOR_S, Losses
from polyrl.sample import Pool
from polyrl_rollout.testing.stage import Stage

LEASE_S = LedgerConfig(run_epoch=1).lease_s


def test_nothing_seen_is_the_prior() -> None:
    assert Losses().rate(100.0) == PRIOR_LOSSES / PRIOR_S


def test_a_few_losses_outweigh_it_and_a_long_life_too() -> None:
    short, long = Losses(), Losses()
    for number in range(8):
        short.change(1, 10.0 * number)
        short.lose(3.0, 10.0 * number + 8.0)
    long.change(8, 0.0)
    assert 1 / short.rate(80.0) == pytest.approx((60 + 8 * 5) / 8, rel=0.01), "each lived for 5 s"
    assert 1 / long.rate(3600.0) > 1_000_000


def test_what_was_seen_long_ago_is_forgotten_by_halves() -> None:
    seen = Losses()
    for number in range(1000):
        seen.change(1, number * 10.0)
        seen.lose(0.0, number * 10.0 + 10.0)
    assert HALVED_AT / 2 <= seen.losses <= HALVED_AT
    seen.change(100, 10_000.0)
    assert 1 / seen.rate(10_100.0) > 300, "after so long it lives longer"


def rate(stage: Stage, pool: Pool = Pool.SPOT) -> float:
    return stage.ledger.state.usage.losses[pool].rate(stage.now)


def test_silence_is_a_loss_until_the_engine_is_back() -> None:
    stage = Stage()
    stage.engine("a")
    sound = rate(stage)
    stage.pass_time(LEASE_S + 0.1)
    assert rate(stage) > 10 * sound
    stage.tokens("a", 0, [])
    assert rate(stage) < sound
    assert stage.ledger.state.usage.losses[Pool.SPOT].engines == 1


def test_a_drain_is_no_loss_and_neither_are_reserved_engines() -> None:
    stage = Stage()
    stage.engine("a")
    stage.engine("r", Pool.RESERVED)
    stage.drain("a", 60.0)
    for _ in range(20):
        stage.pass_time(1.0)
    assert stage.ledger.state.engines == {}
    (losses,) = stage.ledger.state.usage.losses.values()
    assert (losses.losses, losses.engines) == (0.0, 0)


def test_where_engines_live_shorter_than_samples_take_work_stays_with_the_reserved_ones() -> None:
    """The reserved engine is slower by half; after a few losses its samples are expected to end sooner all the same."""
    stage = Stage()
    stage.engine("r", Pool.RESERVED, max_running=64)
    stage.ledger.state.engines["r"].step_scale = 0.03

    def joins(name: str) -> int:
        stage.engine(name, max_running=64)
        stage.ledger.state.engines[name].step_scale = 0.02
        stage.submit(1, max_new_tokens=1000)
        return len(stage.placed()[name])

    assert joins("s0") == 1
    for number in range(1, 9):
        stage.now += 5.0
        stage.tokens("r", 0, [])
        stage.pass_time(LEASE_S + 0.1)
        stage.tokens("r", 0, [])
        placed = joins(f"s{number}")
    assert placed == 0
