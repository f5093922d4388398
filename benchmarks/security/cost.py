"""What security costs: with it and without it in turns, by CPU seconds. One command for all of it.

    .venv/bin/python benchmarks/security/cost.py --rounds 150

Turns are shorter than what neighbours of a shared core come and go by, so both meet the same neighbours, and each comes
first as often as the other. What is left out in a turn is replaced here; no program has such a switch. Prints as the
last line one JSON object of ratios, with / without, each the median of the rounds with the quartiles beside it:

    tokens      CPU of a whole manager under load (`running_manager`), where the checks are not left out but timed: ids
                and logprobs that no model can have sampled, and messages without an end, are looked for
    manager, agent, operator      the CPU of a start (`start_ups`)
    frame       of the first its part alone: a frame of 160 tokens, decoded, decided and applied by session and ledger,
                without socket and journal
    handshake   a connection with CURVE on both sides, its greeting and its answer: the proof of the engine's name
    receipt     a tensor of 16 MiB cut into chunks and hashed, as a publisher does: the receipt that shows a pull
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from unittest import mock

import zmq
import zmq.asyncio

ROOT: Final = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(Path(__file__).parent)]

from ledger_rows import fleet, place  # noqa: E402
from running_manager import cpu_ratios  # noqa: E402
from start_ups import ROLES, start  # noqa: E402

from polyrl import weights  # noqa: E402
from polyrl.keys import AgentKeys  # noqa: E402
from polyrl.ledger import Ledger  # noqa: E402
from polyrl.ledger.messages import deltas  # noqa: E402
from polyrl.sample import Pool  # noqa: E402
from polyrl.wire import Assign, Deltas, Fenced, Hello, decode_from_agent, decode_to_agent, encode, pack_rows  # noqa: E402
from polyrl.wire.engine_identity import agent_keys_of, identity_of  # noqa: E402
from polyrl.wire.unfinished import UnfinishedMessages  # noqa: E402
from polyrl_operator.secret import make_run_keys  # noqa: E402
from polyrl_rollout.manager.journal import RevokedNames  # noqa: E402
from polyrl_rollout.manager.peers import router, sessions  # noqa: E402
from polyrl_rollout.manager.peers.connections import AgentConnections  # noqa: E402

ENGINES: Final = 8
SAMPLES: Final = 128
ROW: Final = 10
"""Tokens of a sample in a frame."""
BUDGET: Final = 4_000_000
"""Tokens of a sample; no benchmark gets so far."""
FRAMES: Final = 256
"""In one turn."""
HANDSHAKES: Final = 4
"""In one turn."""
DEADLINE_S: Final = 10.0
CHECKS: Final = ((deltas, "can_be_sampled"), (AgentConnections, "check"), (UnfinishedMessages, "handed_over"))
"""Of what agents send; their names are proven as they connect."""
TENSOR: Final = os.urandom(16 << 20)


class Tokens:
    """Frames of running samples, one after the other, through a ledger of its own."""

    def __init__(self) -> None:
        self._ledger: Ledger = fleet(ENGINES, SAMPLES)
        outcomes, _ = place(self._ledger, SAMPLES, BUDGET)
        self._numbers: dict[str, list[int]] = {}
        for engine, message in (sent for outcome in outcomes for sent in outcome.to_agents):
            if isinstance(message, Assign):
                self._numbers.setdefault(engine, []).append(message.assignment)
        self._position = 0

    def frames(self) -> list[tuple[str, bytes]]:
        made = []
        while len(made) < FRAMES:
            for engine, mine in self._numbers.items():
                rows = pack_rows([(number, self._position, ROW, 0) for number in mine])
                column = bytes(4 * ROW * len(mine))
                made.append((engine, encode(Deltas(1, 0, rows=rows, ids=column, logprobs=column))))
            self._position += ROW
        return made

    def turn(self) -> float:
        frames, at = self.frames(), self._position / 1000
        began = time.process_time()
        for engine, frame in frames:
            self._ledger.from_agent(engine, decode_from_agent(frame), at)
        return time.process_time() - began


def believe_tokens(_ids: bytes, _logprobs: bytes, _vocabulary: int) -> bool:
    return True


def believe_name(identity: bytes, _key: str) -> str:
    return identity.partition(b"/")[0].decode()


def no_receipt(_stream: weights.Buffer) -> bytes:
    return b""


@contextmanager
def without_checks_of_tokens() -> Iterator[None]:
    with mock.patch.object(deltas, "can_be_sampled", believe_tokens):
        yield


@contextmanager
def without_proofs() -> Iterator[None]:
    with mock.patch.object(sessions, "proven_engine", believe_name):
        yield


@contextmanager
def without_receipts() -> Iterator[None]:
    with mock.patch.object(weights, "receipt_of", no_receipt):
        yield


class Door:
    """A manager's agents' socket with its sessions; each greeting is answered, and no ledger stands behind."""

    def __init__(self) -> None:
        manager, _, self._agent, _ = make_run_keys()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        keys = {"agents": manager.agent_public_key}
        self._authenticator = router.Authenticator(self._context, keys)
        self._authenticator.start()
        self._router = router.Router(self._context, manager, "agents", address="127.0.0.1", port=0, frame_bytes=4 << 20)
        self._identity_key = manager.identity_key
        self._sessions = sessions.AgentSessions(
            self._router, self._answer, manager.identity_key, lease_s=3.0, revoked=RevokedNames()
        )
        self._router.start(self._sessions.on_frame, lambda: None)
        self._dialer: zmq.asyncio.Context = zmq.asyncio.Context()
        self._made = 0

    def _answer(self, engine: str, message: Any) -> None:
        self._sessions.send(engine, Fenced("a benchmark"))

    async def turn(self) -> float:
        prepared = [self._prepared() for _ in range(HANDSHAKES)]
        began = time.process_time()
        for identity, frame in prepared:
            await self._shake_hands(identity, frame)
        return time.process_time() - began

    def _prepared(self) -> tuple[bytes, bytes]:
        self._made += 1
        name = f"job-r-{self._made}"
        own: AgentKeys = agent_keys_of(self._agent, self._identity_key, name)
        hello = Hello(1, name, pool=Pool.SPOT, max_running=8, kv_tokens=10**5, max_context=4096, weight_version=-1)
        return identity_of(name, own, "p"), encode(hello)

    async def _shake_hands(self, identity: bytes, frame: bytes) -> None:
        with self._dialer.socket(zmq.DEALER) as socket:
            socket.curve_publickey, socket.curve_secretkey = (
                self._agent.public_key.encode(),
                self._agent.secret_key.encode(),
            )
            socket.curve_serverkey = self._agent.manager_public_key.encode()
            socket.setsockopt(zmq.IDENTITY, identity)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(self._router.endpoint)
            async with asyncio.timeout(DEADLINE_S):
                await socket.send(frame)
                decode_to_agent(await socket.recv())

    def close(self) -> None:
        self._router.close(0.0)
        self._authenticator.stop()
        self._dialer.destroy(linger=0)
        self._context.destroy(linger=0)


def publish() -> float:
    began = time.process_time()
    weights.tensor_entry("t", "U8", (len(TENSOR),), 0, TENSOR)
    weights.cut_chunks(TENSOR)
    weights.receipt_of(TENSOR)
    return time.process_time() - began


async def ratios(
    rounds: int, turn: Callable[[], Awaitable[float]], without: Callable[[], Any]
) -> dict[str, float | int]:
    """With and without in turns, each first as often as the other."""
    found, seconds = [], 0.0
    for number in range(rounds):
        spent = {True: 0.0, False: 0.0}
        first = bool(number % 2)
        for secure in (first, not first, not first, first):
            if secure:
                spent[True] += await turn()
            else:
                with without():
                    spent[False] += await turn()
        found.append(spent[True] / spent[False])
        seconds += spent[True]
    return summary(found) | {"millisecondsOfATurn": round(1000 * seconds / rounds / 2, 4)}


def start_ratios(role: str, rounds: int) -> list[float]:
    found = []
    for number in range(rounds):
        first = bool(number % 2)
        spent = {secure: start(role, secure=secure) for secure in (first, not first)}
        found.append(spent[True] / spent[False])
    return found


def summary(found: list[float]) -> dict[str, float | int]:
    low, middle, high = statistics.quantiles(found, n=4)
    return {"ratio": round(middle, 4), "low": round(low, 4), "high": round(high, 4), "rounds": len(found)}


async def measure(rounds: int) -> dict[str, Any]:
    tokens, door = Tokens(), Door()

    async def of_tokens() -> float:
        return tokens.turn()

    async def of_publishing() -> float:
        return publish()

    try:
        return {
            "tokens": summary(await cpu_ratios(rounds, CHECKS)),
            "frame": await ratios(rounds, of_tokens, without_checks_of_tokens),
            "handshake": await ratios(rounds, door.turn, without_proofs),
            "receipt": await ratios(max(2, rounds // 15), of_publishing, without_receipts),
            **{role: summary(start_ratios(role, max(2, rounds // 10))) for role in ROLES},
        }
    finally:
        door.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=150, help="of four turns each")
    print(json.dumps(asyncio.run(measure(parser.parse_args().rounds))))


if __name__ == "__main__":
    main()
