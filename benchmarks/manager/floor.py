"""What no manager in Python over ZeroMQ can go below: `python benchmarks/manager/floor.py`, one JSON line per row.

A bare ROUTER with CURVE takes the frames of the load 8x16x4000 (160 tokens each) and answers each with a frame of the
size of TokensKept. It decodes nothing and knows nothing. `journal`: what it gets also goes into SQLite as the manager
writes it, a transaction per batch of frames. CPU seconds are its process's, user + system.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sqlite3
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import zmq

from polyrl.ledger.journal import INSERT_EVENTS, create_script, row
from polyrl.wire import ROW_DTYPE, TokensKept, encode

AGENTS: Final = 8
STREAMS: Final = 16
CHUNK: Final = 10
IN_FLIGHT: Final = 8
"""As the fake agents keep it."""
TOKENS: Final = 2_000_000
FRAME_TOKENS: Final = STREAMS * CHUNK
FRAME: Final = bytes(24 + STREAMS * ROW_DTYPE.itemsize + FRAME_TOKENS * 8)
ANSWER: Final = encode(TokensKept(1000))
BATCH: Final = 256


def serve(pipe: Connection, server: tuple[bytes, bytes], journal: Path | None) -> None:
    """Answers frames until asked how many they were; returns its CPU seconds."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.curve_server, (socket.curve_publickey, socket.curve_secretkey) = True, server
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind("tcp://127.0.0.1:*")
    pipe.send(socket.get_string(zmq.LAST_ENDPOINT))
    db = None
    if journal is not None:
        db = sqlite3.connect(journal, isolation_level=None)
        db.executescript(create_script(1) + "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;")
    began, seen = time.process_time(), 0
    while seen < TOKENS // FRAME_TOKENS:
        socket.poll()
        batch = _all_there(socket)
        seen += len(batch)
        if db is not None:
            db.execute("BEGIN IMMEDIATE")
            db.execute(INSERT_EVENTS, row(seen, 0.0, b"".join(frame for _, frame in batch)))
            db.execute("COMMIT")
        for identity, _ in batch:
            socket.send_multipart((identity, ANSWER))
    pipe.send(time.process_time() - began)
    context.destroy()


def _all_there(socket: zmq.Socket[bytes]) -> list[list[bytes]]:
    batch: list[list[bytes]] = []
    try:
        while len(batch) < BATCH:
            batch.append(socket.recv_multipart(zmq.DONTWAIT))
    except zmq.Again:
        pass
    return batch


def measure(journal: Path | None) -> float:
    """CPU seconds per 1M tokens."""
    server = zmq.curve_keypair()
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, server, journal))
    process.start()
    endpoint, context = ours.recv(), zmq.Context()
    dealers = [context.socket(zmq.DEALER) for _ in range(AGENTS)]
    for dealer in dealers:
        dealer.curve_serverkey, (dealer.curve_publickey, dealer.curve_secretkey) = server[0], zmq.curve_keypair()
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(endpoint)
        for _ in range(IN_FLIGHT):
            dealer.send(FRAME)
    poller = zmq.Poller()
    for dealer in dealers:
        poller.register(dealer, zmq.POLLIN)
    while not ours.poll():
        for dealer, _ in poller.poll(100):
            dealer.recv()
            dealer.send(FRAME)
    spent = float(ours.recv())
    process.join()
    context.destroy()
    return spent / TOKENS * 1e6


def main() -> None:
    """Both rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=1)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as folder:
        for name in ("sockets", "sockets and journal"):
            files = [None if name == "sockets" else Path(folder) / f"{n}.sqlite" for n in range(repeats)]
            seconds = sorted(measure(file) for file in files)
            figures = [round(seconds[0], 3), round(seconds[repeats // 2], 3)]
            print(json.dumps({"row": name, "repeats": repeats, "cpuSecondsPerMillionTokens": figures}), flush=True)


if __name__ == "__main__":
    main()
