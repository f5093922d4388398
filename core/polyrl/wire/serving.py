"""One receiver's connection to who serves weights, without its socket: bytes that came go in, bytes to send come out.

    request   sealed: 2 bytes, its length; sealed: a GetManifest, a GetChunk or a GetLent
    answer    sealed: SIZE_BYTES, the content's length, 0 when it is not kept; sealed: the content in `sealed_frames`
              With LENT in the length the content is a `weights.lending.Loan`: where a chunk may be read

Answers come in the order of requests, and each frame belongs to the request that it answers. A receiver may ask
MAX_ASKED ahead; one that asks for more, or speaks otherwise, is at fault, and its connection ends.

An agent that cannot be dialled has roles turned: its first request is a wire.ServeOffer, and then the same goes on with
the same keys the other way round (`hand_over`).
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, Generic, TypeAlias, TypeVar

from polyrl.errors import ProtocolError
from polyrl.wire import Frame
from polyrl.wire.sealing import FRAME_BYTES, LAST_BYTES, LINE_BYTES, Handshake, Opener, Sealer, sealed_frames

MAX_ASKED: Final = 8
"""Requests of one connection that wait for their turn; more than twice what a receiver of ours has under way."""
MAX_REQUEST_BYTES: Final = 256
"""A request is a version and a hash."""
LENGTH_BYTES: Final = 2
SIZE_BYTES: Final = LINE_BYTES - Sealer.overhead
LENT: Final = 1 << 63
ABOUT_REQUESTS: Final = b"request"
BUFFER_BYTES: Final = FRAME_BYTES + LAST_BYTES + Sealer.overhead
"""The largest sealed frame."""


@dataclass(frozen=True)
class Content:
    """What answers a request."""

    data: memoryview
    reading: Callable[[], AbstractContextManager[object]]
    """Entered around every read of `data`; it raises ProtocolError once they are other bytes."""
    is_loan: bool = False
    """`data` says where what was asked for lies."""


Found: TypeAlias = "Content | Future[Content | None] | None"
"""What answers a request, or what will; None when it is not kept."""
R = TypeVar("R")


def new_buffer() -> memoryview:
    """BUFFER_BYTES, from the beginning of a page."""
    return memoryview(mmap.mmap(-1, BUFFER_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


class ServedConnection(Generic[R]):
    """Says what to send next; whoever has the socket sends it, all of it, before he asks again."""

    def __init__(
        self,
        handshake: Handshake,
        find: Callable[[R], Found],
        decode: Callable[[Frame], R],
        keys: tuple[Sealer, Opener] | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """`find` gives what answers a request. `decode` knows those that may be asked. `keys`: of a connection that was
        dialled from here, and offered. `wake` is called, by any thread, when what was waited for has been found."""
        self._handshake, self._find, self._decode = handshake, find, decode
        self._inbox = bytearray()
        self._keys, self._is_own = keys, keys is not None
        self._greeting = b""
        self._length = 0
        """Bytes of the request that comes next; 0: not known."""
        self._asked: deque[tuple[R, bytes]] = deque()
        self._wake = wake
        self._finding: Future[Content | None] | None = None
        """Finds what answers the first request of `_asked`."""
        self._content: Content | None = None
        self._about = b""
        self._frames: deque[tuple[int, int]] = deque()
        self.requests = 0
        """Asked so far, each whole: the first shows that whoever dialled has the receivers' key."""

    def receive(self, data: bytes) -> None:
        """What came, cut anywhere. Raises ProtocolError."""
        self._inbox += data
        while self._parse():
            pass

    @property
    def is_authentic(self) -> bool:
        """Whoever dialled has shown the receivers' key, or it was dialled from here."""
        return self._is_own or self.requests > 0

    def hand_over(self, offer: type[R]) -> tuple[Sealer, Opener] | None:
        """The keys, where the one request so far is an `offer`: all further bytes are for who asks with them."""
        if not (self.requests == len(self._asked) == 1 and isinstance(self._asked[0][0], offer)):
            return None
        if self._inbox:
            raise ProtocolError("an agent that may be asked speaks first")
        return self._keys

    @property
    def is_waiting(self) -> bool:
        """True when there is nothing to send before more has come, or is found."""
        is_found = self._finding is None or self._finding.done()
        return not (self._greeting or self._frames or (self._asked and is_found))

    def next(self, buffer: memoryview) -> memoryview:
        """The next bytes to send, which may lie in `buffer` of BUFFER_BYTES; none where an answer is yet to be found.
        Not while it `is_waiting`. Raises ProtocolError when the rest of an answer is not kept any more."""
        if self._greeting:
            greeting, self._greeting = self._greeting, b""
            return memoryview(greeting)
        assert self._keys is not None
        sealer = self._keys[0]
        if not self._frames:
            if not self._is_found(self._asked[0][0]):
                return memoryview(b"")
            _, self._about = self._asked.popleft()
            size = len(self._content.data) if self._content else 0
            self._frames.extend(sealed_frames(size))
            header = size | (LENT if self._content and self._content.is_loan else 0)
            return sealer.seal(header.to_bytes(SIZE_BYTES, "big"), self._about, buffer)
        assert self._content is not None
        begin, end = self._frames.popleft()
        with self._content.reading():
            return sealer.seal(self._content.data[begin:end], self._about, buffer)

    def _is_found(self, request: R) -> bool:
        """What answers it is `_content` then."""
        if self._finding is None:
            found = self._find(request)
            if not isinstance(found, Future):
                self._content = found
                return True
            self._finding = found
            if not found.done():
                found.add_done_callback(lambda _: self._wake())
                return False
        self._content, self._finding = self._finding.result(), None
        return True

    def _parse(self) -> bool:
        """Takes one thing of what came; False when it has not come whole."""
        if self._keys is None:
            greeting = self._take(self._handshake.greeting_bytes)
            if greeting is not None:
                self._greet(greeting)
            return greeting is not None
        opener = self._keys[1]
        size = self._length or LENGTH_BYTES
        sealed = self._take(size + opener.overhead)
        if sealed is None:
            return False
        content = bytearray(size)
        opener.open(sealed, ABOUT_REQUESTS, memoryview(content))
        if self._length:
            self._ask(bytes(content))
        else:
            self._length = int.from_bytes(content, "big")
            if not 0 < self._length <= MAX_REQUEST_BYTES:
                raise ProtocolError(f"a request of {self._length} bytes is none")
        return True

    def _greet(self, greeting: bytes) -> None:
        self._keys = self._handshake.answer(greeting)
        self._greeting = self._handshake.public

    def _ask(self, body: bytes) -> None:
        self._length, self.requests = 0, self.requests + 1
        if len(self._asked) >= MAX_ASKED:
            raise ProtocolError(f"more than {MAX_ASKED} requests at once")
        self._asked.append((self._decode(body), body))

    def _take(self, size: int) -> bytes | None:
        if len(self._inbox) < size:
            return None
        taken = bytes(self._inbox[:size])
        del self._inbox[:size]
        return taken
