"""What the client remembers of verdicts and acknowledgements that did not arrive."""

from __future__ import annotations

import asyncio

import pytest

from polyrl.keys import TrainerKeys
from polyrl.sample import DiscardReason
from polyrl_trainer.client.client import RolloutClient
from polyrl_trainer.client.conversation import Cursor, RequestRefused

KEYS = TrainerKeys("p" * 40, "s" * 40, manager_public_key="m" * 40, agent_public_key="a" * 40)


@pytest.mark.parametrize("verdict", ["score", "extend", "reject"])
def test_a_turn_whose_verdict_was_cancelled_is_handed_out_again(verdict: str) -> None:
    async def cancel() -> bool:
        client = RolloutClient("tcp://127.0.0.1:1", KEYS, 1, [], max_manager_outage_s=60.0)
        client._turns.put_once(("0.0", 0), None)  # type: ignore[arg-type]
        given = {
            "score": lambda: client.score("0.0", 0, 1.0),
            "extend": lambda: client.extend("0.0", 0, [1]),
            "reject": lambda: client.reject("0.0", DiscardReason.REWARD_RAISED, "why"),
        }[verdict]()
        task = asyncio.create_task(given)
        await asyncio.sleep(0)
        assert client._turns.knows(("0.0", 0)), "while it may still arrive"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client._link.close(0)
        return client._turns.knows(("0.0", 0))

    assert not asyncio.run(cancel())


def test_a_batch_that_was_never_received_is_not_acknowledged() -> None:
    cursor = Cursor(next_batch=2)
    cursor.acknowledge(1)
    with pytest.raises(RequestRefused, match="batch -1 was never received"):
        cursor.acknowledge(-1)
    with pytest.raises(RequestRefused, match="batch 2 was never received"):
        cursor.acknowledge(2)
    assert cursor.acknowledged == [(1, 2)]


def test_metrics_that_are_not_carried_never_reach_the_connection() -> None:
    async def score() -> None:
        client = RolloutClient("tcp://127.0.0.1:1", KEYS, 1, [], max_manager_outage_s=60.0)
        try:
            await client.score("0.0", 0, 1.0, {"m" * 9000: 1.0})
        finally:
            await client._link.close(0)

    with pytest.raises(
        RequestRefused, match=r"the score of 0\.0 was refused: its metrics take 9016 bytes .* at most 8192"
    ):
        asyncio.run(score())
