"""The least that moving bytes over loopback costs: threads of two processes, a socket each, warm mapped buffers.

Sealed by AES-GCM in frames, or as they are. No requests, no hashes, no checks: the bound that `run` compares with.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import Final

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

TAG: Final = 16
KEY: Final = bytes(range(16))
DEADLINE: Final = struct.pack("ll", 60, 0)


FRAMES: Final = tuple(sealed - TAG for sealed in (256 << 10, 1 << 20, 4 << 20))
"""Contents of sealed frames that are tried; one fills whole lines of the processor's cache, as those of a pull do."""


def _buffer(frame: int) -> memoryview:
    """For a sealed frame, from the beginning of a page."""
    return memoryview(mmap.mmap(-1, frame + TAG, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


@dataclass(frozen=True)
class Flow:
    speed: float
    """Bytes per second."""
    cpu_per_gigabyte: float
    """CPU seconds, of both sides."""


def socket_flow(size: int, streams: int, frame: int | None) -> Flow:
    """`size` bytes over that many connections; `frame`: of what is sealed, None: nothing is."""
    share = size // streams // (4 << 20) * (4 << 20)
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(60)
    numbers = (listener.getsockname()[1], streams, share, frame or 0)
    argv = [sys.executable, __file__, *map(str, numbers)]
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    target = mmap.mmap(-1, share * streams, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
    connections = [listener.accept()[0] for _ in range(streams)]
    view = memoryview(target)
    threads = [
        threading.Thread(target=_take, args=(connected, view[n * share : (n + 1) * share], frame))
        for n, connected in enumerate(connections)
    ]
    begun, cpu = time.monotonic(), time.process_time()
    for thread in threads:
        thread.start()
    for connected in connections:
        connected.sendall(b"1")
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - begun
    cpu = time.process_time() - cpu
    cpu += float(child.communicate(timeout=60)[0])
    for connected in connections:
        connected.close()
    listener.close()
    return Flow(share * streams / seconds, cpu / share / streams * 1e9)


def _take(connected: socket.socket, target: memoryview, frame: int | None) -> None:
    connected.settimeout(None)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, DEADLINE)
    if frame is None:
        while len(target):
            target = target[connected.recv_into(target, min(len(target), 4 << 20), socket.MSG_WAITALL) :]
        return
    cipher, buffer = AESGCM(KEY), _buffer(frame)
    for number, begin in enumerate(range(0, len(target), frame)):
        part = target[begin : begin + frame]
        sealed = buffer[: len(part) + TAG]
        if connected.recv_into(sealed, 0, socket.MSG_WAITALL) != len(sealed):
            raise ConnectionResetError
        cipher.decrypt_into(number.to_bytes(12, "big"), sealed, b"", part)


def _give(port: int, source: memoryview, frame: int) -> None:
    connected = socket.create_connection(("127.0.0.1", port))
    connected.recv(1)
    if not frame:
        connected.sendall(source)
        return
    cipher, buffer = AESGCM(KEY), _buffer(frame)
    for number, begin in enumerate(range(0, len(source), frame)):
        part = source[begin : begin + frame]
        cipher.encrypt_into(number.to_bytes(12, "big"), part, b"", buffer[: len(part) + TAG])
        connected.sendall(buffer[: len(part) + TAG])


if __name__ == "__main__":
    _port, _streams, _share, _frame = map(int, sys.argv[1:])
    _buffer = memoryview(mmap.mmap(-1, _share * _streams))
    for _begin in range(0, len(_buffer), 1 << 20):
        _buffer[_begin : _begin + (1 << 20)] = os.urandom(min(1 << 20, len(_buffer) - _begin))
    _threads = [
        threading.Thread(target=_give, args=(_port, _buffer[n * _share : (n + 1) * _share], _frame))
        for n in range(_streams)
    ]
    _cpu = time.process_time()
    for _thread in _threads:
        _thread.start()
    for _thread in _threads:
        _thread.join()
    print(time.process_time() - _cpu)
