"""Serves weight versions to agents, from memory, on a thread of its own: a slow puller costs the learner no time.

    socket   ROUTER, CURVE server with the trainer's pair; only the agents' key gets in (ZAP, RFC 27), and as many
             connections as may be open at once
    send     bounded in all and shared out in turns (`sending`); SEND_HWM frames per peer, then dropped: the puller asks
             again at its own deadline
    receive  RECEIVE_HWM frames per peer, then libzmq stops reading that peer; who sends a message of parts without
             end is cut off (`connections`)

The newest `keep` versions stay in memory, as content-hashed chunks, and share those that they have in common. A chunk
is kept as the frame that it is sent in, so what waits for ten pullers is one copy.
"""

from __future__ import annotations

import asyncio
import json
import resource
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import structlog
import torch
import zmq
from zmq.auth.thread import ThreadAuthenticator

from polyrl import weights
from polyrl.control import bracketed, may_be_ipv6
from polyrl.errors import ProtocolError
from polyrl.keys import TrainerKeys, read_keys
from polyrl.weights import CHUNK_BYTES, VersionManifest, WeightsRef
from polyrl.wire import ChunkReply, FromPuller, GetManifest, ManifestReply, decode_from_puller, encode
from polyrl_trainer.backend import TrainingBackend
from polyrl_trainer.dropped_messages import DroppedMessages
from polyrl_trainer.rollouts import Rollouts
from polyrl_trainer.session import Session
from polyrl_trainer.weights.connections import Connections
from polyrl_trainer.weights.sending import MAX_BYTES, Sending

SEND_HWM: Final = 8
"""Frames that wait for one puller, 32 MiB of chunks; twice what a puller has outstanding."""
RECEIVE_HWM: Final = 64
"""Requests of one puller that wait here."""
HANDSHAKE_MS: Final = 5_000
"""A connection that has not proved its key by then is closed."""
MAX_CONNECTIONS: Final = 1280
"""Open at once: 1,024 rollouts, as many as a manifest allows, and those that are being replaced; but half of the files
that this process may open are the trainer's own. One that reads nothing costs a frame."""
ROOM_MS: Final = 3
"""Between looks for room while somebody waits for it: a chunk takes as long on a link of 10 Gbit/s."""
MAX_REQUEST_BYTES: Final = 4096
"""Requests are tens of bytes; anything longer ends its connection."""
MAX_UNFINISHED_BYTES: Final = 16 << 20
"""Of requests of all receivers together that are here and not read; honest ones ask for less than 1 MB at once."""
HEARTBEAT_MS: Final = 5_000
"""Silence after which a peer is asked whether it is there; three times that and its queue is freed."""
STOP_SECONDS: Final = 5.0
"""Longest wait for the serving thread to notice that it should end."""
_ZAP_DOMAIN: Final = "publisher"

_DTYPES: Final = {
    torch.float64: "F64", torch.int64: "I64", torch.float32: "F32", torch.int32: "I32", torch.bfloat16: "BF16",
    torch.float16: "F16", torch.int16: "I16", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip

log = structlog.get_logger(__name__)


class WeightPublisher:
    """Publishes until `close`. `publish` may be called from any one thread."""

    def __init__(
        self,
        key_file: Path,
        bind: str = "tcp://127.0.0.1:*",
        keep: int = 2,
        chunk_bytes: int = CHUNK_BYTES,
        advertise: str = "",
        max_connections: int = MAX_CONNECTIONS,
        max_bytes: int = MAX_BYTES,
        max_request_bytes: int = MAX_UNFINISHED_BYTES,
    ) -> None:
        """Binds and serves; `advertise`, if given, is the host that agents reach it by, in place of the one bound.
        `max_bytes` may be on their way to all together, and `max_request_bytes` of requests wait or be unfinished.

        Raises InvalidData for a bad key file, zmq.ZMQError when `bind` is taken."""
        keys = read_keys(TrainerKeys, key_file)
        self._public_key, self._keep, self._chunk_bytes = keys.public_key, keep, chunk_bytes
        self._manifests: dict[int, bytes] = {}
        self._versions: dict[int, VersionManifest] = {}
        self._chunks: dict[bytes, bytes] = {}
        """Encoded replies."""
        self._sending = Sending(max_bytes)
        self.dropped_frames = DroppedMessages("requests of weight receivers that could not be read")
        self.dropped_replies = DroppedMessages("weights for receivers that take none, or are gone")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # Strangers' connections count until their handshake's deadline: the more there may be, the dearer it is to use
        # all of them up.
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        most = min(max_connections, hard // 2)
        self._admission = _admit(self._context, keys.agent_public_key, is_room=lambda: len(self._connections) <= most)
        self._socket = _configured(self._context, keys, bind)
        self._connections = Connections(self._socket, max_request_bytes)
        self._socket.bind(bind)
        self.endpoint = _endpoint(self._socket, advertise)
        self._stop = self._context.socket(zmq.PAIR)
        self._stop.bind("inproc://publisher-stop")
        self._thread = threading.Thread(target=self._serve, name="weight-publisher", daemon=True)
        self._thread.start()

    def publish(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]], files: dict[str, bytes]) -> WeightsRef:
        """Makes `version` ready to be pulled; a snapshot, so the tensors may change afterwards.

        Raises ProtocolError when `version` was published before with other content, or a tensor's dtype has no name.
        """
        begun = time.monotonic()
        cutting, receipt, cut = _Cutting(tensors), weights.Receipt(), list[tuple[weights.ChunkEntry, bytes]]()
        for chunk, data in weights.cut_chunks(cutting.stream(), self._chunk_bytes):
            receipt.add(data)
            cut.append((chunk, encode(ChunkReply(chunk.hash, data))))
        extras = tuple(weights.file_entry(name, content) for name, content in sorted(files.items()))
        chunks = tuple(chunk for chunk, _ in cut)
        manifest = VersionManifest(
            version, None, kind="full", tensors=tuple(cutting.entries), chunks=chunks, files=extras
        )
        body = weights.encode_manifest(manifest)
        self._hold(manifest, body, cut)
        seconds = round(time.monotonic() - begun, 3)
        log.info("weights published", version=version, bytes=manifest.total_bytes, seconds=seconds)
        digest = weights.manifest_hash(body)
        return WeightsRef(
            version,
            endpoint=self.endpoint,
            public_key=self._public_key,
            manifest_hash=digest,
            content=weights.weights_hash(manifest),
            vocabulary=_vocabulary(files),
            receipt=receipt.value,
        )

    def close(self) -> None:
        """Ends the thread and the socket; idempotent."""
        if self._stop.closed:
            return
        self._stop.send(b"")
        self._thread.join(STOP_SECONDS)
        self._stop.close(linger=0)
        self._admission.stop()
        self._context.destroy(linger=0)

    def _hold(self, manifest: VersionManifest, body: bytes, cut: list[tuple[weights.ChunkEntry, bytes]]) -> None:
        """Swaps in new dicts whole: the serving thread reads them without a lock."""
        if self._manifests.get(manifest.version, body) != body:
            raise ProtocolError(f"weight version {manifest.version} was published before with other content")
        versions = {**self._versions, manifest.version: manifest}
        versions = {number: versions[number] for number in sorted(versions)[-self._keep :]}
        chunks = {chunk.hash: data for chunk, data in cut} | self._chunks
        wanted = {chunk.hash for kept in versions.values() for chunk in kept.chunks}
        self._chunks = {hash_: data for hash_, data in chunks.items() if hash_ in wanted}
        self._manifests = {number: self._manifests.get(number, body) for number in versions}
        self._versions = versions

    def _serve(self) -> None:
        stop = self._context.socket(zmq.PAIR)
        stop.connect("inproc://publisher-stop")
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(stop, zmq.POLLIN)
        connections = self._connections
        poller.register(connections.monitor, zmq.POLLIN)
        while stop not in (ready := dict(poller.poll(ROOM_MS if self._sending.waits else connections.wait_ms))):
            if connections.monitor in ready:
                connections.take_event()
            if self._socket in ready:
                self._take_request()
            while (turn := self._sending.next()) is not None:
                self._answer(*turn)
            connections.check(time.monotonic(), drained=self._socket not in ready)
        connections.close()
        for socket in (stop, self._socket):
            socket.close(linger=0)

    def _take_request(self) -> None:
        identity, frame = self._socket.recv(), self._socket.recv(copy=False)
        self._connections.handed_over(frame)
        parts = 1
        while frame.more:
            parts, frame = parts + 1, self._socket.recv(copy=False)
        try:
            request = decode_from_puller(frame.bytes if parts == 1 else b"")
        except ProtocolError as error:
            self.dropped_frames.add(error)
            return
        if not self._sending.ask(identity, request):
            self.dropped_replies.add(ProtocolError("a receiver asks for more than it takes"))

    def _answer(self, identity: bytes, request: FromPuller) -> None:
        reply = self._reply(request)
        try:
            tracker = self._socket.send_multipart((identity, reply), zmq.DONTWAIT, copy=False, track=True)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self.dropped_replies.add(error)
        else:
            assert tracker is not None
            self._sending.sent(identity, tracker, len(reply))

    def _reply(self, request: FromPuller) -> bytes:
        if isinstance(request, GetManifest):
            return encode(ManifestReply(request.version, self._manifests.get(request.version, b"")))
        return self._chunks.get(request.hash) or encode(ChunkReply(request.hash, b""))


class _Cutting:
    """Tensors as one byte stream, widest dtypes first so that each starts at a multiple of its width."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._tensors = sorted(tensors, key=lambda item: (-item[1].element_size(), item[0]))
        self.entries: list[weights.TensorEntry] = []

    def stream(self) -> Iterator[weights.Buffer]:
        """Bytes of each tensor; its entry is appended to `entries` on the way."""
        offset = 0
        for name, tensor in self._tensors:
            if tensor.dtype not in _DTYPES:
                raise ProtocolError(f"tensor {name} has dtype {tensor.dtype}, which safetensors cannot name")
            # uint8[size], row-major; a view where the tensor is contiguous and on the CPU already.
            data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            self.entries.append(weights.tensor_entry(name, _DTYPES[tensor.dtype], tuple(tensor.shape), offset, data))
            offset += len(data)
            yield data


def _admit(
    context: zmq.Context[zmq.Socket[bytes]], public_key: str, is_room: Callable[[], bool]
) -> ThreadAuthenticator:
    """Lets in whoever has the agents' key, while there is room; pyzmq calls `callback` with domain and key, Z85."""
    admission = ThreadAuthenticator(context)
    admission.start()
    admits = SimpleNamespace(callback=lambda _domain, key: key == public_key.encode() and is_room())
    admission.configure_curve_callback(_ZAP_DOMAIN, admits)
    return admission


def _configured(context: zmq.Context[zmq.Socket[bytes]], keys: TrainerKeys, bind: str) -> zmq.Socket[bytes]:
    """The socket, not bound yet."""
    socket = context.socket(zmq.ROUTER)
    socket.curve_server = True
    socket.curve_publickey = keys.public_key.encode()
    socket.curve_secretkey = keys.secret_key.encode()
    socket.setsockopt_string(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
    for option, value in (
        (zmq.ROUTER_MANDATORY, 1),
        (zmq.SNDHWM, SEND_HWM),
        (zmq.RCVHWM, RECEIVE_HWM),
        (zmq.MAXMSGSIZE, MAX_REQUEST_BYTES),
        (zmq.HANDSHAKE_IVL, HANDSHAKE_MS),
        (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
        (zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS),
        (zmq.LINGER, 0),
    ):
        socket.setsockopt(option, value)
    socket.ipv6 = may_be_ipv6(bind)
    return socket


def _vocabulary(files: dict[str, bytes]) -> int:
    """The model's number of tokens by its config.json; 0 where that does not say it."""
    size = json.loads(files.get("config.json", b"{}")).get("vocab_size", 0)
    return size if isinstance(size, int) else 0


def _endpoint(socket: zmq.Socket[bytes], advertise: str) -> str:
    bound = socket.get_string(zmq.LAST_ENDPOINT)
    return f"tcp://{bracketed(advertise)}:{bound.rpartition(':')[2]}" if advertise else bound


@dataclass(eq=False)
class PolicyVersions:
    """Gives each changed state of the policy a version number and makes it available to rollouts.

    Version 0 is the initial policy; each publication adds one. Unchanged weights keep their number, also when a trainer
    that has started again from a checkpoint finds them at the manager; other weights never get a number that was given
    out before.
    """

    publisher: WeightPublisher
    rollouts: Rollouts
    session: Session
    newest: tuple[int, bytes] = (-1, b"")
    """The version, and its manifest's hash, that the manager knew when this trainer came."""
    _served_here: bool = False

    async def ensure_published(self, backend: TrainingBackend) -> float:
        """Publishes the backend's weights if they are not the newest version already; gives the seconds it took.

        A resumed run publishes again in any case: its publisher and its manager know no versions yet.
        """
        state = self.session.state
        if self._served_here and not state.weights_changed:
            return 0.0
        started = time.monotonic()
        ref = await asyncio.to_thread(self._publish_next, state.version, backend)
        await self.rollouts.publish(ref)
        if ref.version > state.version + 1:
            state.oldest_version = ref.version
        state.version, state.weights_changed, self._served_here = ref.version, False, True
        self.session.weights_content = ref.content
        return time.monotonic() - started

    def _publish_next(self, last: int, backend: TrainingBackend) -> WeightsRef:
        newest, known = self.newest
        self.newest = (-1, b"")
        if newest >= 0:
            ref = self._publish(newest, backend)
            if ref.manifest_hash == known:
                return ref
        return self._publish(max(last, newest) + 1, backend)

    def _publish(self, version: int, backend: TrainingBackend) -> WeightsRef:
        return self.publisher.publish(version, backend.export_weights(), backend.serving_files())
