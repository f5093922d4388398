"""Numbers of versions, and their bytes, ready for receivers: a snapshot in memory, and what of it travels (`forms`).

The newest `keep` versions stay, with all that they rest on, as far as that is no more than so many and one whole ones;
`server` sends from them. A publication copies the tensors once (`snapshot`, after which they may change); it waits for
no receiver.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
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
from polyrl.wire import FromPuller, GetLent, GetManifest
from polyrl.wire.sealing import Handshake, LastingKeys
from polyrl.wire.serving import Content
from polyrl_trainer.backend import RoomOfSize
from polyrl_trainer.backends.weight_stream import write_stream
from polyrl_trainer.weights.forms import FormMaker, Taken, VersionForm, WeightsCopy, file_entries
from polyrl_trainer.weights.images import Image, Images
from polyrl_trainer.weights.lender import Lender
from polyrl_trainer.weights.server import MAX_BYTES, MAX_CONNECTIONS, STALL_S, WeightServer, dialled_endpoint

Export: TypeAlias = Callable[[RoomOfSize], list[TensorEntry]]
"""Copies weights into a room of their size; see `TrainingBackend.export_weights`."""

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
    ) -> None:
        """Binds and serves; `advertise`, if given, is the host that agents reach it by, in place of the one bound.
        `max_bytes` may be on their way to all together, and who reads none of it for `stall_s` makes room.
        `deltas`: whether they are made whatever is quicker. `lender`: lends chunks to those who ask for loans.
        `run_epoch`: the start of the run; engines of another one refuse what is published here.

        Raises InvalidData for a bad key file, OSError when `bind` is taken."""
        keys = read_keys(TrainerKeys, key_file)
        self._public_key, self._keep, self._lender = keys.public_key, keep, lender
        self._images = Images()
        self._kept: dict[int, VersionForm] = {}
        self._in_use: list[Image] = []
        self._taken, self._counting = Taken(), threading.Lock()
        self._hashing = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="weight-hash")
        self.forms = FormMaker(self._hashing.map, chunk_bytes, deltas, run_epoch)
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
        """A copy: the weights may change afterwards. Raises what `export` does; its image is then used no more, since
        a rank may still write."""
        taken: list[Image] = []

        def room(size: int) -> Image:
            taken.append(self._images.take(size))
            return taken[-1]

        places = export(room)
        return WeightsCopy(taken[-1], places, files=files)

    def drop(self, snapshot: WeightsCopy) -> None:
        """It is not published after all."""
        self._images.give_back(snapshot.image)

    def content(self, snapshot: WeightsCopy) -> bytes:
        """`weights.weights_hash` of what it will be."""
        self._check(snapshot)
        return weights.weights_hash(snapshot.tensors, file_entries(snapshot.files))

    @property
    def measures(self) -> Mapping[str, float]:
        """Of the version that was published last, under the metrics' names."""
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
            if weights.weights_hash(form.manifest.tensors, file_entries(form.files)) != content:
                raise ProtocolError(f"weight version {version} was published before with other content")
            return self._ref(form, content)
        taken, self._taken = self._taken, Taken()
        if not self.server.is_sending and self._lender is None:  # of what is lent nobody knows whether it has come
            self.forms.note_copies(self._kept, taken)
        bandwidth = self.server.bandwidth or USUAL_BANDWIDTH
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
            vocabulary=_of_config(form.files, "vocab_size"),
            receipt=weights.receipt_of(form.image.data),
            positions=_of_config(form.files, "max_position_embeddings"),
        )

    def close(self) -> None:
        """Ends threads and connections; idempotent."""
        self.server.close()
        self._hashing.shutdown()

    def _check(self, snapshot: WeightsCopy) -> None:
        def checked(place: TensorEntry) -> TensorEntry:
            data = snapshot.image.data[place.offset : place.offset + place.size]
            return place if place.checksum else replace(place, checksum=weights.tensor_checksum(data))

        snapshot.tensors = list(self._hashing.map(checked, snapshot.tensors))

    def _hold(self, made: VersionForm) -> None:
        """Swaps in a new dict whole: the serving threads read it without a lock."""
        held = {**self._kept, made.manifest.version: made}
        bases = {number: form.manifest.base for number, form in held.items()}
        sizes = {number: form.manifest.total_bytes for number, form in held.items()}
        stay = versions_kept(bases, sizes, self._keep, (self._keep + 1) * made.manifest.stream_bytes)
        self._kept = {number: held[number] for number in sorted(stay)}
        needed = [form.image for form in self._kept.values() if form.manifest.base is None or form is made]
        for image in [*self._in_use, made.image]:
            if image not in needed:
                self._images.give_back(image)
        self._in_use = needed

    def _find(self, request: FromPuller) -> Content | None:
        """Called by serving threads."""
        found = self._content_of(request)
        if self._lender is None or not isinstance(request, GetLent):
            return found
        self._lender.take_back(request.returned)
        return None if found is None else self._lender.lend(found)

    def _content_of(self, request: FromPuller) -> Content | None:
        kept = self._kept.get(request.version)
        if kept is None:
            return None
        if isinstance(request, GetManifest):
            with self._counting:
                self._taken.manifests[request.version] += 1
            return Content(memoryview(kept.body), nullcontext)
        reading, data = kept.image.reading(), kept.chunks.get(request.hash)
        # In this order: an image that was given back before is not read.
        if data is None or self._kept.get(request.version) is not kept:
            return None
        with self._counting:
            self._taken.bytes[request.version] += len(data)
        return Content(data, reading if kept.manifest.base is None else nullcontext)


def _of_config(files: dict[str, bytes], name: str) -> int:
    """A size of the model by its config.json; 0 where that does not say it."""
    size = json.loads(files.get("config.json", b"{}")).get(name, 0)
    return size if isinstance(size, int) else 0
