"""One DEALER to the manager: greets, sends heartbeats, notices silence, dials again.

Pattern: DEALER; the manager binds, we dial. CURVE client with the trainer's pair; the manager's key is pinned.

    direction   high-water mark   when full
    send        none              what waits is what callers still await, so they bound it
    receive     RECEIVE_HWM       libzmq stops reading; the manager's own queue for us fills

All runs on the caller's loop, so a caller that computes must do so in another thread. When the connection breaks, or
after silence of a lease, or when the manager sends Fenced, a fresh socket dials the endpoint that the endpoints file
names by then, and greets again; the owner then sends what is unanswered. Only a greeting that fails for
`max_manager_outage_s` ends the link.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from typing import Final

import zmq

from polyrl import wire
from polyrl.control import may_be_ipv6
from polyrl.errors import DeadlineExceeded, PolyRLError, ProtocolError, RunFailed, Superseded
from polyrl.keys import TrainerKeys
from polyrl.wire import Fenced, FromTrainer, ToTrainer, TrainerHello, TrainerWelcome
from polyrl_trainer.dropped_messages import DroppedMessages

RECEIVE_HWM: Final = 1_000
"""Frames that wait here; a frame is a finished turn or a batch, so this is minutes of work."""
GREETING_S: Final = 1.0
"""Pause between greetings."""
REDIAL_S: Final = 3.0
"""A dial without a welcome is given up after this long: the manager may have come back at another port."""
REFUSED_PAUSE_S: Final = 0.2
"""Pause after a dial that nobody took: the manager is on its way back, and will write where it listens."""
FENCED_AGAIN_S: Final = 3.0
"""A manager that fences fresh greetings for so long means them, not the frames that were under way before."""
FRAMES_PER_READ: Final = 256
"""Frames handled before other callbacks of the loop get their turn."""

_BROKEN: Final = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
"""Events after which a connection is of no use: libzmq would dial the same endpoint again, where nobody may be."""


def error_of_fence(fenced: Fenced, absent_s: float) -> PolyRLError:
    """What a trainer makes of being fenced for good, or for long by a manager that is of another version."""
    if fenced.lease_over:
        return DeadlineExceeded("a welcome", f"the manager ({fenced.reason})", absent_s)
    sentence = f"the manager refuses this trainer: {fenced.reason}"
    return Superseded(sentence) if fenced.reason == wire.SUPERSEDED else RunFailed(sentence)


class ManagerLink:
    """Speaks with one manager, over as many connections as it takes."""

    def __init__(
        self,
        locate: Callable[[], Awaitable[str]],
        keys: TrainerKeys,
        hello: Callable[[], TrainerHello],
        max_manager_outage_s: float,
    ) -> None:
        """`locate` gives the manager's endpoint; `hello` the greeting of the moment."""
        self._locate = locate
        self._keys = keys
        self._hello = hello
        self._max_manager_outage_s = max_manager_outage_s
        self._identity = f"trainer-{secrets.token_hex(8)}".encode()
        self._loop = asyncio.get_running_loop()
        self._descriptors: tuple[int, ...] = ()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._broken = False
        self._read_planned = False
        self._welcome: TrainerWelcome | None = None
        self._fenced: Fenced | None = None
        self._changed = asyncio.Event()
        self._received_at = 0.0
        self._absent_since = 0.0
        self._known = False
        self.undecodable = DroppedMessages("frames of the manager that could not be decoded")

    async def run(self, on_message: Callable[[ToTrainer], None], on_welcome: Callable[[TrainerWelcome], None]) -> None:
        """Holds the connection until cancelled. Raises DeadlineExceeded or RunFailed when it cannot be had."""
        self._on_message = on_message
        self._absent_since = self._loop.time()
        while True:
            self._dial(await self._locate())
            try:
                welcome = await self._greet()
                if welcome is not None:
                    self._known = True
                    on_welcome(welcome)
                    await self._stay(welcome)
                    self._absent_since = self._loop.time()
            finally:
                self._hang_up()
            await asyncio.sleep(REFUSED_PAUSE_S if self._broken else 0)

    def send(self, message: FromTrainer) -> None:
        """Queues a message; between connections it is dropped, for the owner sends again what is unanswered."""
        if self._welcome is not None:
            self._put(message)

    async def close(self, linger_s: float) -> None:
        """Gives queued frames `linger_s` to leave."""
        if self._socket is not None:
            self._hang_up(linger_s)
        await asyncio.to_thread(self._context.term)

    async def _greet(self) -> TrainerWelcome | None:
        """The manager's welcome; None when this dial brought none."""
        dialed = self._loop.time()
        while self._welcome is None and not self._broken and self._loop.time() - dialed < REDIAL_S:
            self._put(self._hello())
            await self._changed_within(GREETING_S)
            absent = self._loop.time() - self._absent_since
            bears_s = self._max_manager_outage_s if self._fenced and self._fenced.lease_over else FENCED_AGAIN_S
            if self._welcome is None and self._fenced is not None and (not self._known or absent > bears_s):
                raise error_of_fence(self._fenced, absent)
            if self._welcome is None and absent > self._max_manager_outage_s:
                raise DeadlineExceeded("a welcome", "the manager", absent)
        self._fenced = None
        return self._welcome

    async def _stay(self, welcome: TrainerWelcome) -> None:
        """Returns when this connection is of no use any more."""
        while self._fenced is None and not self._broken:
            await self._changed_within(welcome.beat_s)
            self._read()
            if self._loop.time() - self._received_at > welcome.lease_s:
                return
            self.send(wire.TrainerHeartbeat())

    def _put(self, message: FromTrainer) -> None:
        if self._socket is not None:
            self._socket.send(wire.encode(message), zmq.DONTWAIT)
            self._plan_read()

    async def _changed_within(self, timeout_s: float) -> None:
        """Waits for Welcome, Fenced or the connection's end, at most `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
                self._changed.clear()
        except TimeoutError:
            return

    def _dial(self, endpoint: str) -> None:
        socket = self._context.socket(zmq.DEALER)
        socket.curve_publickey = self._keys.public_key.encode()
        socket.curve_secretkey = self._keys.secret_key.encode()
        socket.curve_serverkey = self._keys.manager_public_key.encode()
        socket.setsockopt(zmq.IDENTITY, self._identity)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, RECEIVE_HWM)
        socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_FRAME_BYTES)
        socket.setsockopt(zmq.LINGER, 0)
        monitor = socket.get_monitor_socket(_BROKEN)
        self._socket, self._monitor, self._welcome, self._fenced, self._broken = socket, monitor, None, None, False
        try:
            socket.ipv6 = may_be_ipv6(endpoint)
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise RunFailed(f"cannot dial the manager at {endpoint!r}: {error}") from error
        self._descriptors = (int(socket.getsockopt(zmq.FD)), int(monitor.getsockopt(zmq.FD)))
        for descriptor, read in zip(self._descriptors, (self._read, self._watch), strict=True):
            self._loop.add_reader(descriptor, read)
            # The descriptor signals what comes after a read that found nothing, so there has to be a first one.
            self._loop.call_soon(read)

    def _hang_up(self, linger_s: float = 0.0) -> None:
        if self._socket is not None and self._monitor is not None:
            for descriptor in self._descriptors:
                self._loop.remove_reader(descriptor)
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=int(linger_s * 1000))
        self._socket, self._monitor, self._welcome = None, None, None

    def _watch(self) -> None:
        while self._monitor is not None:
            try:
                self._monitor.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            self._broken = True
            self._changed.set()

    def _plan_read(self) -> None:
        """libzmq's descriptor is edge-triggered, and a send may swallow its signal: so read once more after each."""
        if not self._read_planned:
            self._read_planned = True
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        self._read_planned = False
        for _ in range(FRAMES_PER_READ):
            if self._socket is None:
                return
            try:
                frame = self._socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                return
            self._received_at = self._loop.time()
            self._handle(frame)
        self._plan_read()

    def _handle(self, frame: bytes) -> None:
        try:
            message = wire.decode_to_trainer(frame)
        except ProtocolError as error:
            self.undecodable.add(error)
            return
        if isinstance(message, TrainerWelcome):
            self._welcome = message
            self._changed.set()
        elif isinstance(message, Fenced):
            self._fenced = message
            if not message.lease_over or self._welcome is not None:  # else at a greeting's pace
                self._changed.set()
        else:
            self._on_message(message)
