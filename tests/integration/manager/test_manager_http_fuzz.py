"""10,000 malformed HTTP requests, with the run's token and without: each is refused with a sentence.

POLYRL_FUZZ=10 makes it ten times as many.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
import pytest
from yarl import URL

from polyrl.control import DrainRequest, Endpoints
from polyrl.errors import UNDECODABLE
from polyrl.keys import OperatorKeys, read_keys

TIMES = int(os.environ.get("POLYRL_FUZZ", "1"))
REQUESTS = 10_000 * TIMES
PARALLEL = 16
DEADLINE_S = 120.0 * TIMES
GROWTH_BYTES = 20 << 20
RIGHT = {"engine": "nobody", "deadlineSeconds": 1.5, "reason": "spot notice"}
ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    1e308,
    10**30,
    "",
    "x" * 3000,
    [],
    {},
    [[]],
    "nan",
    float("inf"),
    "\x00",
    "\ud800",
)
QUERIES = ("since=x", "waitSeconds=nan", "waitSeconds=-5", "since=1e999", "since=%ff", "since=-2", "waitSeconds=inf")


def body_of(dice: random.Random) -> bytes:
    """A drain request that was right before a field, or some bytes, were changed, doubled or left out."""
    fields: dict[str, Any] = dict(RIGHT)
    for _ in range(dice.randint(0, 2)):
        fields[dice.choice((*RIGHT, "deadline_seconds", "epoch"))] = dice.choice(ODD)
    if dice.random() < 0.2:
        fields.pop(dice.choice(list(fields)))
    text = bytearray(json.dumps(fields).encode())
    for _ in range(dice.choice((0, 1, 4))):
        text[dice.randrange(len(text))] = dice.randrange(256)
    return bytes(text[: dice.choice((None, dice.randrange(len(text))))])


def is_right(body: bytes) -> bool:
    """By the schema alone: some mutations change nothing that counts."""
    try:
        msgspec.json.decode(body, type=DrainRequest)
    except UNDECODABLE:
        return False
    return True


def authorization(dice: random.Random, token: str) -> tuple[bool, dict[str, str]]:
    """Whether it is right, and the header."""
    wrong = dice.choice(
        ("", "Bearer", "Bearer ", token, f"Basic {token}", f"Bearer {token[:-1]}", f"Bearer {token} "[1:])
    )
    right = dice.random() < 0.7
    return right, {"Authorization": f"Bearer {token}" if right else wrong}


async def ask(http: aiohttp.ClientSession, dice: random.Random, token: str) -> tuple[int, int]:
    """The status that is due, and the one that came."""
    right, headers = authorization(dice, token)
    if dice.random() < 0.2:
        url = URL(f"/v1/status?{dice.choice(QUERIES)}", encoded=True)
        async with http.get(url, headers=headers) as response:
            text = await response.text()
        due = 400
    else:
        body = body_of(dice)
        async with http.post("/v1/drain", data=body, headers=headers) as response:
            text = await response.text()
        due = 200 if is_right(body) else 400
    if response.status != 200:
        assert json.loads(text)["error"], "every refusal is a sentence"
        assert "Traceback" not in text
    return (due if right else 401), response.status


@pytest.mark.slow
async def test_malformed_requests_are_refused_with_a_sentence(running: tuple[Path, Endpoints], seed: int) -> None:
    folder, ends = running
    token = read_keys(OperatorKeys, folder / "keys/operator.key").http_token
    memory = psutil.Process(ends.pid).memory_info
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    seen: Counter[tuple[int, int]] = Counter()
    async with aiohttp.ClientSession(ends.http, timeout=timeout) as http:

        async def many(number: int, count: int) -> None:
            dice = random.Random(seed + number)
            for _ in range(count):
                seen[await ask(http, dice, token)] += 1

        await many(PARALLEL, 500)
        before = memory().rss
        await asyncio.gather(*(many(number, REQUESTS // PARALLEL) for number in range(PARALLEL)))
        async with http.get("/healthz") as response:
            assert response.status == 200
    grown = memory().rss - before
    print(f"{seen}, memory grew by {grown / 1e6:.1f} MB")
    assert all(due == came for due, came in seen), seen
    assert {due for due, _ in seen} == {200, 400, 401}
    assert grown < GROWTH_BYTES
