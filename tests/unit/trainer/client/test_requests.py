"""Requests that cannot be sent are refused where they are made; whoever waits for an answer hears of the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from polyrl import wire
from polyrl.keys import TrainerKeys
from polyrl_trainer.client import RequestRefused, RolloutClient

KEYS = TrainerKeys("p" * 40, "s" * 40, manager_public_key="m" * 40, agent_public_key="a" * 40)


@asynccontextmanager
async def unconnected() -> AsyncIterator[RolloutClient]:
    """One whose manager never answers."""
    client = RolloutClient("tcp://127.0.0.1:1", KEYS, 1, [], max_manager_outage_s=60.0)
    try:
        yield client
    finally:
        await client._link.close(0)


@pytest.mark.parametrize(
    ("request_of", "sentence"),
    [
        pytest.param(lambda c: c.score("0.0", 0, "high"), r"the score of 0\.0 was refused: .*`float`", id="text"),
        pytest.param(lambda c: c.score("0.0", 0, {}), r"the score of 0\.0 was refused: .*`float`", id="object"),
        pytest.param(
            lambda c: c.extend("0.0", 0, np.zeros(17 << 20, "<u4")), r"extension of 0\.0 .*over the limit", id="size"
        ),
        pytest.param(lambda c: c.extend("0.0", 0, [-1]), r"extension of 0\.0 .*0 to 4294967295", id="token below 0"),
        pytest.param(lambda c: c.extend("0.0", 0, np.array([-1])), "ids are whole", id="token that numpy would wrap"),
        pytest.param(lambda c: c.extend("0.0", 0, np.array([1 << 32])), "ids are whole", id="token too large"),
        pytest.param(lambda c: c.extend("0.0", 0, [1.5]), "ids are whole", id="no whole token"),
        pytest.param(lambda c: c.end_step(1 << 70, "train"), "the end of step .*serialize ints", id="huge number"),
        pytest.param(lambda c: c.end_step(np.int64(1), "train"), "the end of step 1 .*numpy", id="foreign number"),
    ],
)
async def test_what_no_manager_could_read_is_refused_and_never_sent_again(request_of: Any, sentence: str) -> None:
    async with unconnected() as client:
        with pytest.raises(RequestRefused, match=sentence):
            await asyncio.wait_for(request_of(client), 10.0)
        client._requests.send_again()
        assert not client._requests._open


@pytest.mark.parametrize(
    "number", [np.float32(0.5), np.float64(0.5), np.array(0.5), 0.5], ids=lambda one: str(type(one))
)
async def test_rewards_may_be_numbers_of_numpy(number: Any) -> None:
    async with unconnected() as client:
        scoring = asyncio.create_task(client.score("0.0", 0, number, {"length": number}))
        await asyncio.sleep(0)
        ((message, _),) = client._requests._open.values()
        scoring.cancel()
        await asyncio.gather(scoring, return_exceptions=True)
    message = wire.decode_from_trainer(wire.encode(message))
    assert isinstance(message, wire.Score)
    assert (message.reward, message.metrics) == (0.5, {"length": 0.5})
