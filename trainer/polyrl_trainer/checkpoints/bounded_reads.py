"""What a store may send and how slowly, whatever it lists or says: a stranger's store is read as well.

A listing may go on for ever, by its pages or within one, and a file may come byte by byte, each in time for the
deadline of a read. fsspec collects a whole listing before anybody sees a name of it. So bytes are counted where they
arrive: the filesystems that speak HTTP (S3, GCS, Azure) run on an event loop of ours, whose connections are counted.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, TypeVar

import fsspec

H = TypeVar("H", bound=asyncio.BaseProtocol)
R = TypeVar("R")

LISTED_BYTES: Final = 64 << 20
"""Bytes of a listing and the seals that it names: some 150,000 objects, of which a model has 2,048 and a checkpoint
hundreds. Of an S3 store they took 0.4 GB of memory."""
PACE_S: Final = 60.0
LEAST_BYTES: Final = 1 << 20
"""In each PACE_S of one read, as `polyrl get` asks of a cluster: a thousandth of what a poor store delivers."""


class CountingLoop(asyncio.SelectorEventLoop):
    """Counts what its connections receive, and ends the work of a read that is over its bounds."""

    def __init__(self) -> None:
        super().__init__()
        self._received = 0
        self._most: int | None = None
        self._refusal = ""
        self._watch: asyncio.TimerHandle | None = None

    async def create_connection(
        self, protocol_factory: Callable[[], H], *args: Any, **options: Any
    ) -> tuple[asyncio.Transport, H]:
        transport, protocol = await super().create_connection(protocol_factory, *args, **options)
        _count(protocol, self._arrived)
        return transport, protocol

    def begin(self, most: int | None) -> None:
        """A read of so many bytes at most, until `end`."""
        self._most = None if most is None else self._received + most
        self._refusal = ""
        self._watch = self.call_later(PACE_S, self._check_pace, self._received)

    def end(self) -> str:
        """Why the read was ended; empty when it was not."""
        assert self._watch is not None
        self._watch.cancel()
        self._most = None
        return self._refusal

    def _check_pace(self, before: int) -> None:
        if (came := self._received - before) < LEAST_BYTES:
            self._stop(f"{came} bytes came in {PACE_S:g} s, and {LEAST_BYTES} are the least")
        self._watch = self.call_later(PACE_S, self._check_pace, self._received)

    def _arrived(self, count: int) -> None:
        self._received += count
        if self._most is not None and self._received > self._most:
            self._stop("more bytes came than a listing and its seals have")

    def _stop(self, refusal: str) -> None:
        """Libraries try what failed again; what is cancelled is not tried again."""
        self._refusal = self._refusal or refusal
        for task in asyncio.all_tasks(self):
            task.cancel()


class BoundedReads:
    """A place in a store, and the bounds of what is read there. One read at a time."""

    def __init__(self, uri: str) -> None:
        """Raises ImportError where the scheme's library is missing, ValueError for a scheme that nobody knows."""
        scheme = fsspec.core.split_protocol(uri)[0] or "file"
        self._loop: CountingLoop | None = None
        if not fsspec.get_filesystem_class(scheme).async_impl:
            self.files, self.root = fsspec.core.url_to_fs(uri)
            return
        self._loop = CountingLoop()
        threading.Thread(target=self._loop.run_forever, name="reads of a store", daemon=True).start()
        self.files, self.root = fsspec.core.url_to_fs(uri, loop=self._loop, skip_instance_cache=True)

    @contextmanager
    def bounded(self, most: int | None) -> Iterator[None]:
        """Bounds what is read within, to `most` bytes. Raises OSError, whatever the library made of its end."""
        if self._loop is None:
            yield
            return
        self._in_loop(partial(self._loop.begin, most))
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
            raise
        finally:
            if refusal := self._in_loop(self._loop.end):
                raise OSError(refusal) from failure

    def _in_loop(self, work: Callable[[], R]) -> R:
        """By no task, since a read that is ended ends all tasks."""
        assert self._loop is not None
        done = Future[R]()
        self._loop.call_soon_threadsafe(lambda: done.set_result(work()))
        return done.result()


def _count(protocol: asyncio.BaseProtocol, arrived: Callable[[int], None]) -> None:
    receive = protocol.data_received  # type: ignore[attr-defined]

    def counted(data: bytes) -> None:
        arrived(len(data))
        receive(data)

    protocol.data_received = counted  # type: ignore[attr-defined]
