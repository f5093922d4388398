"""What crosses a plain stream between two sides that know each other's keys: authenticated, encrypted, in order. So a
receiver of weights speaks with who serves them, and a trainer's pods with each other.

    receiver -> server   GREETING, then the public half of an X25519 key made for this connection
    server -> receiver   the same half of its own
    both                 X25519 (RFC 7748) of both made keys, of each made key with the other's lasting one, of both
                         lasting ones; HKDF-SHA256 (RFC 5869) over the four, salted by all four public halves
    then                 AES-128-GCM with a key per direction; the nonce counts frames

The lasting keys are those of the key files, which CURVE uses too. Each side shows its own by the first frame that the
other can open: the order of secrets, and what they give, is that of the Noise pattern KK with one round trip less to
write down. A frame that is repeated, left out, changed or of another connection does not open, and ends its connection.

Among agents, whose lasting keys are one pair per process, the receiver shows which it is at once, since who serves must
know with whose key to go on: PEER_GREETING, the made half, and the lasting one. A key that is not on the manager's list
is answered by nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from polyrl.errors import ProtocolError
from polyrl.keys import key_bytes
from polyrl.weights import Buffer

GREETING: Final = b"polyrl weights 1"
"""First bytes of a receiver; another version of this protocol has others."""
PUBLIC_BYTES: Final = 32
PEER_GREETING: Final = b"polyrl peers 1"
"""First bytes of an agent to another one."""
KEY_BYTES: Final = 16
"""AES-128: as safe for a connection's life as AES-256, and 15 % faster."""
NONCE_BYTES: Final = 12
TAG_BYTES: Final = 16
LINE_BYTES: Final = 64
"""Bytes of a line of a processor's cache. The system copies what is sent and received a fifth slower where bytes lie at
another place within a line than those they are copied to, so all that is sent between chunks fills whole lines."""
FRAME_BYTES: Final = (1 << 20) - TAG_BYTES
"""Bytes of content in a sealed frame: AES-GCM is at its full speed, and the frame is still in the processor's cache
when it is sent, hashed or written."""
LAST_BYTES: Final = 512
"""Bytes that a last frame may have more: the tags of a chunk of `weights.MAX_CHUNK_BYTES`, which make no frame of their
own."""


@dataclass(frozen=True)
class LastingKeys:
    """One side's own pair, and the public half of whom it speaks with."""

    secret: X25519PrivateKey
    public: bytes
    peer: bytes

    @classmethod
    def of(cls, secret_key: str, public_key: str, peer_public_key: str) -> LastingKeys:
        """From Z85, as key files have them."""
        secret = X25519PrivateKey.from_private_bytes(key_bytes(secret_key))
        return cls(secret, key_bytes(public_key), peer=key_bytes(peer_public_key))


@dataclass(frozen=True)
class PeerKeys:
    """An agent's own pair towards other agents: drawn by its process, and kept nowhere."""

    secret: X25519PrivateKey
    public: bytes

    @classmethod
    def draw(cls) -> PeerKeys:
        secret = X25519PrivateKey.generate()
        return cls(secret, secret.public_key().public_bytes_raw())

    def towards(self, peer: bytes) -> LastingKeys:
        """For a connection with the agent of that public half."""
        return LastingKeys(self.secret, self.public, peer=peer)


class Handshake:
    """One side of one connection, before its keys are known."""

    greeting_bytes = len(GREETING) + PUBLIC_BYTES

    def __init__(self, keys: LastingKeys, protocol: bytes = GREETING) -> None:
        """`protocol` is what is spoken on the connection: keys of one are none of another."""
        self._keys, self._made, self._protocol = keys, X25519PrivateKey.generate(), protocol
        self.public = self._made.public_key().public_bytes_raw()

    @property
    def peer(self) -> bytes:
        """Whom it speaks with: where it was dialled, by the greeting; the first request that opens shows that it is."""
        return self._keys.peer

    @property
    def greeting(self) -> bytes:
        """What the dialling side sends first."""
        return self._protocol + self.public

    def answer(self, greeting: bytes) -> tuple[Sealer, Opener]:
        """`finish` for the side that was dialled. Raises ProtocolError also for a greeting of something else."""
        if not greeting.startswith(self._protocol):
            raise ProtocolError("not a receiver of weights, or one of another version")
        return self.finish(greeting[len(self._protocol) :], dialled=False)

    def finish(self, theirs: bytes, *, dialled: bool) -> tuple[Sealer, Opener]:
        """What seals our frames, and what opens theirs. Raises ProtocolError for a key that nobody makes."""
        keys, made = self._keys, self._made
        try:
            peer, peer_made = X25519PublicKey.from_public_bytes(keys.peer), X25519PublicKey.from_public_bytes(theirs)
            mine, other = made.exchange(peer), keys.secret.exchange(peer_made)
            # The dialling side's made key comes first, whoever computes.
            crossed = mine + other if dialled else other + mine
            secret = made.exchange(peer_made) + crossed + keys.secret.exchange(peer)
        except ValueError:
            raise ProtocolError("the other side's key is none") from None
        halves = (keys.public, self.public, keys.peer, theirs)
        if not dialled:
            halves = (*halves[2:], *halves[:2])
        salt = hashlib.sha256(self._protocol + b"".join(halves)).digest()
        derived = HKDF(SHA256(), 2 * KEY_BYTES, salt, self._protocol).derive(secret)
        ours, other_way = derived[:KEY_BYTES], derived[KEY_BYTES:]
        return (Sealer(ours), Opener(other_way)) if dialled else (Sealer(other_way), Opener(ours))


class PeerHandshake(Handshake):
    """The same between two agents, on the dialling side."""

    def __init__(self, keys: LastingKeys) -> None:
        super().__init__(keys, PEER_GREETING)

    @property
    def greeting(self) -> bytes:
        return super().greeting + self._keys.public


class PeerReception(Handshake):
    """The same on the side that was dialled: by whom, it learns from the greeting."""

    greeting_bytes = len(PEER_GREETING) + 2 * PUBLIC_BYTES

    def __init__(self, keys: PeerKeys, admits: Callable[[bytes], bool]) -> None:
        """`admits` knows the public halves of the run's agents."""
        super().__init__(keys.towards(b""), PEER_GREETING)
        self._own, self._admits = keys, admits

    def answer(self, greeting: bytes) -> tuple[Sealer, Opener]:
        made, lasting = greeting[-2 * PUBLIC_BYTES : -PUBLIC_BYTES], greeting[-PUBLIC_BYTES:]
        if not greeting.startswith(PEER_GREETING) or not self._admits(lasting):
            raise ProtocolError("not an agent on the manager's list")
        self._keys = self._own.towards(lasting)
        return self.finish(made, dialled=False)


class Sealer:
    """Seals the frames of one direction, in order."""

    overhead: Final = TAG_BYTES
    """Bytes that a frame has beside its content."""

    def __init__(self, key: bytes) -> None:
        self._cipher, self._count = AESGCM(key), 0

    def seal(self, content: Buffer, about: bytes, buffer: memoryview) -> memoryview:
        """The part of `buffer` that is to be sent; `about` is what the frame belongs to, and is not sent."""
        sealed = buffer[: memoryview(content).nbytes + TAG_BYTES]
        self._cipher.encrypt_into(self._count.to_bytes(NONCE_BYTES, "big"), content, about, sealed)
        self._count += 1
        return sealed


class Opener:
    """Opens the frames of the other direction, in order."""

    overhead: Final = TAG_BYTES

    def __init__(self, key: bytes) -> None:
        self._cipher, self._count = AESGCM(key), 0

    def place(self, content: memoryview, buffer: memoryview) -> memoryview:
        """Where a frame is to be received whose content goes to `content`."""
        return buffer[: len(content) + TAG_BYTES]

    def open(self, sealed: Buffer, about: bytes, content: memoryview) -> None:
        """Writes the frame's content. Raises ProtocolError, and has then written nothing of use, when it is false."""
        try:
            self._cipher.decrypt_into(self._count.to_bytes(NONCE_BYTES, "big"), sealed, about, content)
        except InvalidTag:
            raise ProtocolError("a frame was not sealed by who it should be from, or not for here") from None
        self._count += 1


def sealed_frames(size: int) -> list[tuple[int, int]]:
    """Where content of `size` bytes is cut into frames: begin and end of each."""
    return list(pairwise((*range(0, max(size - LAST_BYTES, min(size, 1)), FRAME_BYTES), size)))
