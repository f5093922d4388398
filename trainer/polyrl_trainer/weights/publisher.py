"""Numbers of versions, and their bytes, ready for receivers: a snapshot in memory, and what of it travels (`forms`).

The newest `keep` versions stay, with all that they rest on, as far as that is no more than so many and one whole ones;
`server` sends from them. A publication copies the tensors once (`snapshot`, after which they may change); it waits for
no receiver.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TypeAlias

import structlog
import torch
from msgspec.structs import replace

from polyrl import weights
from polyrl.errors import ProtocolError
from polyrl.keys import TrainerKeys, read_keys
from polyrl.weights import CHUNK_BYTES, FIRST_EPOCH, TensorEntry, WeightsRef
from polyrl.weights.planning import USUAL_BANDWIDTH, versions_kept
from polyrl.weights.shares import machine_of, share_stream
from polyrl.wire import FromPuller, GetManifest
from polyrl.wire.sealing import Handshake, LastingKeys
from polyrl.wire.serving import Content, Found
from polyrl_trainer.backend import BufferOf, BufferPlace, OtherMachines, WeightsBuffer
from polyrl_trainer.backends.weight_stream import write_stream
from polyrl_trainer.weights.forms import FormMaker, Taken, VersionForm, WeightsCopy, file_entries
from polyrl_trainer.weights.lender import Lender, lent
from polyrl_trainer.weights.machines import Machines
from polyrl_trainer.weights.server import MAX_BYTES, MAX_CONNECTIONS, STALL_S, WeightServer, dialled_endpoint
from polyrl_trainer.weights.share import WeightShare
from polyrl_trainer.weights.share_commands import CheckCopy, KeepDelta, KeepVersions, PrepareCopy

Export: TypeAlias = Callable[[BufferOf], list[TensorEntry]]
"""Copies weights into a buffer for them; see `TrainingBackend.export_weights`."""

log = structlog.get_logger(__name__)


class WeightPublisher:
    """Publishes until `close`, one version at a time; `snapshot` and `drop` may be called meanwhile."""

    def __init__(  # noqa: PLR0913 - a limit and a choice each
        self,
        key_file: Path,
        bind: str = "tcp://127.0.0.1:*",
        keep: int = 2,
        chunk_bytes: int = CHUNK_BYTES,
        advertise: str = "",
        max_connections: int = MAX_CONNECTIONS,
        max_bytes: int = MAX_BYTES,
        stall_s: float = STALL_S,
        deltas: bool | None = None,
        lender: Lender | None = None,
        run_epoch: int = FIRST_EPOCH,
        others: OtherMachines | None = None,
    ) -> None:
        """Binds and serves; `advertise`, if given, is the host that agents reach it by, in place of the one bound.
        `max_bytes` may be on their way to all together, and who reads none of it for `stall_s` makes room.
        `deltas`: whether they are made whatever is quicker. `lender`: lends chunks to those who ask for loans.
        `run_epoch`: the start of the run; engines of another one refuse what is published here. `others`: machines that
        keep and serve a share each.

        Raises InvalidData for a bad key file, OSError when `bind` is taken."""
        keys = read_keys(TrainerKeys, key_file)
        self._public_key, self._keep, self._lender = keys.public_key, keep, lender
        self._kept: dict[int, VersionForm] = {}
        self._copies, self._needed, self._counts = itertools.count(), set[int](), threading.Lock()
        """Numbers of copies, those that may still be published or rest under others, and who changes these."""
        self._taken, self._counting = Taken(), threading.Lock()
        self._machines = Machines(WeightShare(), others)
        self.forms = FormMaker(self._machines, chunk_bytes, deltas, run_epoch)
        lasting = LastingKeys.of(keys.secret_key, keys.public_key, keys.agent_public_key)
        self.server = WeightServer(
            bind,
            lambda: Handshake(lasting),
            self._find,
            max_connections=max_connections,
            max_bytes=max_bytes,
            stall_s=stall_s,
        )
        self.endpoint = dialled_endpoint(self.server, advertise)

    def snapshot(self, export: Export, files: dict[str, bytes]) -> WeightsCopy:
        """A copy: the weights may change afterwards. Raises what `export` does; its memory is then used no more, since
        a rank may still write."""
        with self._counts:
            copy = next(self._copies)
            self._needed.add(copy)
            needed = sorted(self._needed)

        def buffer(places: Sequence[TensorEntry]) -> WeightsBuffer:
            shares = share_stream(places, self._machines.number)
            tensors: list[list[TensorEntry]] = [[] for _ in shares]
            for place in places:
                tensors[machine_of(place.offset, shares)].append(place)
            commands = [
                PrepareCopy(copy, needed, share=share, tensors=own) for share, own in zip(shares, tensors, strict=True)
            ]
            buffers = [
                BufferPlace(answer.path, answer.name, begin=share.begin, end=share.held)
                for share, answer in zip(shares, self._machines.each(commands), strict=True)
            ]
            return WeightsBuffer(self._machines.own.image_of(copy), tuple(buffers))

        return WeightsCopy(copy, export(buffer), files=files)

    def drop(self, snapshot: WeightsCopy) -> None:
        """It is not published after all; its memory is the next one's."""
        with self._counts:
            self._needed.discard(snapshot.number)

    def content(self, snapshot: WeightsCopy) -> bytes:
        """`weights.weights_hash` of what it will be."""
        if not snapshot.receipt:
            checked = self._machines.all(CheckCopy(snapshot.number))
            sums = [one for of_share in checked for one in of_share.checksums]
            pairs = zip(snapshot.tensors, sums, strict=True)
            snapshot.tensors = [replace(place, checksum=checksum) for place, checksum in pairs]
            snapshot.receipt = weights.receipt_of_sample(b"".join(one.sample for one in checked))
        return weights.weights_hash(snapshot.tensors, file_entries(snapshot.files))

    @property
    def measures(self) -> Mapping[str, float]:
        """Measures of the version that was published last, under the metrics' names."""
        return self._kept[max(self._kept)].measures if self._kept else {}

    def publish(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]], files: dict[str, bytes]) -> WeightsRef:
        """`snapshot` of whole tensors, and `publish_snapshot`. Raises ProtocolError when a dtype has no name."""
        return self.publish_snapshot(version, self.snapshot(partial(write_stream, dict(tensors)), files))

    def publish_snapshot(self, version: int, snapshot: WeightsCopy) -> WeightsRef:
        """Makes it ready to be pulled as `version`. Raises ProtocolError when that was published before with other
        content."""
        begun, content = time.monotonic(), self.content(snapshot)
        form = self._kept.get(version)
        if form is not None:
            self.drop(snapshot)
            if weights.weights_hash(form.manifest.tensors, file_entries(form.copy.files)) != content:
                raise ProtocolError(f"weight version {version} was published before with other content")
            return self._ref(form, content)
        taken, self._taken = self._taken, Taken()
        if not self.server.is_sending and self._lender is None:  # of what is lent nobody knows whether it has come
            self.forms.note_copies(self._kept, taken)
        bandwidth = (self.server.bandwidth or USUAL_BANDWIDTH) * self._machines.number
        form = self.forms.make(version, snapshot, self._kept, taken.manifests, bandwidth)
        self._hold(form)
        seconds = round(time.monotonic() - begun, 3)
        size = form.manifest.total_bytes
        log.info("weights published", version=version, bytes=size, seconds=seconds, form=form.plan.reason)
        return self._ref(form, content)

    def _ref(self, form: VersionForm, content: bytes) -> WeightsRef:
        return WeightsRef(
            form.manifest.version,
            endpoint=self.endpoint,
            public_key=self._public_key,
            manifest_hash=weights.manifest_hash(form.body),
            content=content,
            vocabulary=_of_config(form.copy.files, "vocab_size"),
            receipt=form.copy.receipt,
            positions=_of_config(form.copy.files, "max_position_embeddings"),
            others=self._machines.endpoints(),
        )

    def close(self) -> None:
        """Ends threads and connections; idempotent."""
        self.server.close()
        self._machines.close()

    def _hold(self, made: VersionForm) -> None:
        """Swaps in a new dict whole: the serving threads read it without a lock."""
        held = {**self._kept, made.manifest.version: made}
        bases = {number: form.manifest.base for number, form in held.items()}
        sizes = {number: form.manifest.total_bytes for number, form in held.items()}
        stay = versions_kept(bases, sizes, self._keep, (self._keep + 1) * made.manifest.stream_bytes)
        if made.chunks:
            self._machines.each(self._of_delta(made))
        before, self._kept = self._kept, {number: held[number] for number in sorted(stay)}
        # The next delta rests on the newest, which need not be the one that was made now.
        newest = max(self._kept)
        rests = {
            form.copy.number for number, form in self._kept.items() if form.manifest.base is None or number == newest
        }
        with self._counts:
            self._needed -= {form.copy.number for form in before.values()} - rests
            needed = sorted(self._needed)
        anchors = {number: form.copy.number for number, form in self._kept.items() if form.manifest.base is None}
        self._machines.all(KeepVersions(anchors, [*(self._kept.keys() - anchors.keys())], needed=needed))

    def _of_delta(self, made: VersionForm) -> list[KeepDelta]:
        """All of it this machine keeps, which is asked for what others cannot be reached for."""
        hashes = [chunk.hash for chunk in made.manifest.chunks]
        dealt: list[dict[bytes, bytes]] = [dict(zip(hashes, made.chunks, strict=True))]
        for machine in range(1, self._machines.number):
            dealt.append({one: content for one, content in dealt[0].items() if made.machines[one] == machine})
        return [KeepDelta(made.manifest.version, chunks) for chunks in dealt]

    def _find(self, request: FromPuller) -> Found:
        """Called by serving threads."""
        return lent(self._lender, request, self._content_of(request))

    def _content_of(self, request: FromPuller) -> Found:
        kept = self._kept.get(request.version)
        if kept is None:
            return None
        if isinstance(request, GetManifest):
            with self._counting:
                self._taken.manifests[request.version] += 1
            return Content(memoryview(kept.body), nullcontext)
        own, machine = self._machines.own.find(request.version, request.hash), kept.machines.get(request.hash)
        if own is None:
            return self._machines.relay(machine, request.version, request.hash) if machine else None
        with self._counting:
            self._taken.bytes[request.version] += 0 if machine else len(own.data)
        return own


def _of_config(files: dict[str, bytes], name: str) -> int:
    """A size of the model by its config.json; 0 where that does not say it."""
    size = json.loads(files.get("config.json", b"{}")).get(name, 0)
    return size if isinstance(size, int) else 0
