"""A manager of its job's author's own making: what it answers neither fills the operator nor sends it elsewhere."""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from aiohttp import web
from kubernetes.aio.client.configuration import Configuration

from polyrl.errors import ProtocolError
from polyrl.sample import Pool
from polyrl.status import (
    MAX_COUNT,
    MAX_ENGINES,
    MAX_MESSAGE,
    MAX_NAME,
    MAX_NUMBERS,
    EngineState,
    EngineStatus,
    ManagerStatus,
)
from polyrl_operator.api.connect import stream_session
from polyrl_operator.managers.client import MAX_ANSWER, Address, ManagerClient, ManagerUnreachable, manager_session
from polyrl_operator.secret import ManagerCredentials

CREDENTIALS = ManagerCredentials("t" * 32, "")
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[int]:
    """A server on loopback that answers everything so; its port."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()


async def ask(answer: Answer) -> Any:
    async with serving(answer) as port, manager_session() as session:
        return await ManagerClient(session).status(Address("127.0.0.1", port), CREDENTIALS, -1, 1.0)


async def test_an_endless_answer_is_left_at_one_megabyte() -> None:
    sent = 0

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse()
        await response.prepare(request)
        with suppress(ConnectionError):
            while sent < 64 * MAX_ANSWER:
                await response.write(b" " * (1 << 20))
                sent += 1 << 20
        return response

    with pytest.raises(ProtocolError, match="longer than"):
        await ask(endless)
    assert sent < 8 * MAX_ANSWER, "what lies in sockets' buffers comes on top"


ENGINE = {"pool": "spot", "state": "serving", "weightVersion": 0, "running": 0, "maxRunning": 1, "tokens": 0}
MEASURES = ("rollout", "train", "step", "busyEngine", "sharedEngine", "evaluationEngine", "nextEngineSaves")
STEP = {"step": 1, "engines": 1.0, "steady": True} | {f"{name}Seconds": 1.0 for name in MEASURES}
TOO_MUCH: dict[str, dict[str, Any]] = {
    "numbers": {"values": {str(number): 1.0 for number in range(MAX_NUMBERS + 1)}},
    "reasons": {"samples": {"discarded": {str(number): 1 for number in range(MAX_NUMBERS + 1)}}},
    "engines": {"engines": [{**ENGINE, "engine": str(number)} for number in range(MAX_ENGINES + 1)]},
    "a-long-name": {"engines": [{**ENGINE, "engine": "x" * (MAX_NAME + 1)}]},
    "a-long-phase": {"phase": "x" * (MAX_NAME + 1)},
    "a-long-name-of-a-number": {"values": {"x" * (MAX_NAME + 1): 1.0}},
    "a-long-message": {"message": "x" * (MAX_MESSAGE + 1)},
    "a-step-beyond-counting": {"step": MAX_COUNT + 1},
    "a-step-before-the-first": {"finishedSteps": [{**STEP, "step": -1}]},
    "seconds-beyond-a-life": {"finishedSteps": [{**STEP, "stepSeconds": 1e308}]},
}
"""Each would be kept for every job, so that a few managers of one author ended the operator for all; or cannot be
reckoned with, or not be stored as status."""


@pytest.mark.parametrize("what", TOO_MUCH)
async def test_more_than_a_manager_has_to_say_is_not_kept(what: str) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response({"seq": 1, "epoch": 1, **TOO_MUCH[what]})

    with pytest.raises(ProtocolError, match="no ManagerStatus"):
        await ask(answer)


async def test_nothing_is_inflated() -> None:
    bomb = zlib.compress(b" " * (64 << 20))

    async def compressed(request: web.Request) -> web.StreamResponse:
        assert request.headers["Accept-Encoding"] == "identity"
        return web.Response(body=bomb, headers={"Content-Encoding": "deflate"})

    with pytest.raises(ProtocolError, match="is no ManagerStatus"):
        await ask(compressed)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_no_redirect_is_followed(status: int) -> None:
    reached: list[str] = []

    async def elsewhere(request: web.Request) -> web.StreamResponse:
        reached.append(request.path)
        return web.Response(text="{}")

    async with serving(elsewhere) as port:

        async def redirect(_: web.Request) -> web.StreamResponse:
            return web.Response(status=status, headers={"Location": f"http://127.0.0.1:{port}/inside"})

        with pytest.raises(ProtocolError, match=f"answered {status}"):
            await ask(redirect)
    assert reached == []


async def test_the_operators_token_is_for_the_api_server_alone() -> None:
    seen: list[str | None] = []

    async def elsewhere(request: web.Request) -> web.StreamResponse:
        seen.append(request.headers.get("Authorization"))
        return web.Response(text="{}")

    async with serving(elsewhere) as port:

        async def redirect(request: web.Request) -> web.StreamResponse:
            assert request.headers["Authorization"] == "Bearer operators"
            return web.Response(status=307, headers={"Location": f"http://127.0.0.1:{port}/"})

        async with (
            serving(redirect) as api,
            stream_session(configuration(api)) as session,
            session.get(f"http://127.0.0.1:{api}/api/v1/pods") as answer,
        ):
            assert answer.status == 200
    assert seen == [None]


def configuration(port: int) -> Configuration:
    async def token(_: str) -> str:
        return "Bearer operators"

    given = {"ssl_ca_cert": None, "ca_cert_data": None, "cert_file": None, "verify_ssl": True}
    return cast(Configuration, SimpleNamespace(host=f"http://127.0.0.1:{port}", get_api_key_with_prefix=token, **given))


VALID = msgspec.json.encode(
    ManagerStatus(
        seq=3,
        run_epoch=1,
        phase="rl",
        values={"reward": 0.5},
        engines=(
            EngineStatus(
                name="e",
                pool=Pool.SPOT,
                state=EngineState.SERVING,
                weight_version=1,
                running=1,
                max_running=2,
                tokens=9,
            ),
        ),
    )
)
DRAWN = 300 * int(os.environ.get("POLYRL_FUZZ", "1"))
ODD = (b"[" * 5000, b"9" * 400, b'"\\ud800"', b"\xff\xfe", b"null", b"1e999", b'{"a":' * 3000, b"-", b"")


def drawn_answer(dice: random.Random) -> web.Response:
    """A status with bytes changed, cut, or put in; or whatever else HTTP allows."""
    body = bytearray(VALID)
    for _ in range(dice.randint(0, 3)):
        at = dice.randrange(len(body) + 1)
        body[at : at + dice.randrange(6)] = dice.choice((dice.choice(ODD), dice.randbytes(dice.randrange(6))))
    headers = dice.choice(
        ({}, {"Content-Encoding": "gzip"}, {"Content-Type": "text/html; charset=x"}, {"Location": "http://x/"})
    )
    return web.Response(body=bytes(body), status=dice.choice((200, 200, 200, 204, 302, 401, 418, 500)), headers=headers)


async def test_what_is_wrong_with_an_answer_is_said_in_few_words() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=VALID.replace(b'"spot"', b'"' + b"9" * 100_000 + b'"'))

    async with serving(answer) as port, manager_session() as session:
        with pytest.raises(ProtocolError, match="no ManagerStatus: Invalid enum value '9999") as found:
            await ManagerClient(session).status(Address("127.0.0.1", port), CREDENTIALS, -1, 1.0)
    assert len(str(found.value)) < 300


async def test_whatever_is_answered_is_a_status_or_a_typed_error(seed: int) -> None:
    dice, taken, longest = random.Random(seed), 0, 0

    async def answer(request: web.Request) -> web.Response:
        return drawn_answer(dice)

    async with serving(answer) as port, manager_session() as session:
        client = ManagerClient(session)
        for _ in range(DRAWN):
            try:
                taken += isinstance(
                    await client.status(Address("127.0.0.1", port), CREDENTIALS, -1, 1.0), ManagerStatus
                )
            except (ProtocolError, ManagerUnreachable) as error:
                longest = max(longest, len(str(error)))
    assert longest < 1000
    assert taken, "nothing was valid: the rest shows nothing"
