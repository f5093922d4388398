"""The embedded engine's process: `python -m polyrl_rollout.engines.embedded.process FD`, FD a socket to its parent.

The main thread reads the parent's messages; transformers' generation thread writes tokens. The process ends when the
socket does, and by its parent death signal.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from pathlib import Path

from polyrl_rollout.engines.embedded import messages
from polyrl_rollout.engines.embedded.continuous_batching import Batcher
from polyrl_rollout.engines.port import NO_VERSION


class _Process:
    """Serves one parent over one socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._incoming = sock.makefile("rb")
        self._send_lock = threading.Lock()
        self._version = NO_VERSION

    def run(self) -> None:
        """Serves until the parent closes its end."""
        start = self._receive()
        if not isinstance(start, messages.StartEngine):
            return
        try:
            batcher = Batcher(start, self._emit)
        except (OSError, ValueError, RuntimeError, KeyError, AttributeError) as error:
            self._send(messages.Failed(f"cannot build the model of {start.folder}: {error}"))
            return
        self._send(messages.Started(batcher.kv_tokens, batcher.max_context))
        while (message := self._receive()) is not None:
            if not batcher.alive:
                self._send(messages.Failed("the generation loop has ended; the reason is in this engine's log"))
                return
            self._handle(message, batcher)

    def _handle(self, message: messages.ToProcess, batcher: Batcher) -> None:
        match message:
            case messages.Generate():
                batcher.add(message)
            case messages.Abort(rid):
                batcher.abort(rid)
            case messages.Load():
                self._send(self._load(message, batcher))
            case messages.Ping():
                self._send(messages.Pong())

    def _load(self, message: messages.Load, batcher: Batcher) -> messages.Loaded | messages.LoadFailed:
        def switched() -> None:
            self._version = message.version

        try:
            batcher.load(Path(message.folder), switched)
        # safetensors' own error class derives from Exception only; whatever fails here leaves the old weights in place.
        except Exception as error:  # noqa: BLE001
            return messages.LoadFailed(message.version, f"{type(error).__name__}: {error}")
        return messages.Loaded(message.version)

    def _emit(self, rows: list[messages.Row]) -> None:
        self._send(messages.Tokens(self._version, rows))

    def _send(self, message: messages.ToParent) -> None:
        with self._send_lock:
            self._sock.sendall(messages.frame(message))

    def _receive(self) -> messages.ToProcess | None:
        header = self._incoming.read(messages.LENGTH.size)
        if len(header) < messages.LENGTH.size:
            return None
        (length,) = messages.LENGTH.unpack(header)
        message: messages.ToProcess = messages.decode_to_process(self._incoming.read(length))
        return message


def main() -> None:
    """Runs until the parent closes the socket or is gone."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        _Process(sock).run()
    # Nothing is left to save, and joining the generation thread and unloading torch would take two seconds.
    os._exit(0)


if __name__ == "__main__":
    main()
