"""Deltas over sockets: chains, joiners, receivers that are behind, bases that are false, publishers that restart."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from polyrl.weights import decode_manifest, encode_manifest, manifest_hash, receipt_of
from polyrl.wire import GetChunk, GetLent
from polyrl_rollout.weights.puller import Puller
from polyrl_rollout.weights.staging import Staged, Staging
from polyrl_rollout.weights.transfer import PullFailed
from polyrl_trainer.weights.publisher import WeightPublisher
from tests.integration.weights.conftest import FILES, Keys, complete
from tests.integration.weights.test_weight_plane_faults import Liar, body_of, held

Tensors = dict[str, torch.Tensor]
Publishers = Callable[..., WeightPublisher]


def first_tensors() -> Tensors:
    draw = torch.Generator().manual_seed(0)
    return {
        "embed": torch.randn(700, 517, generator=draw).to(torch.bfloat16),
        "norm": torch.randn(517, generator=draw),
        "odd": torch.arange(7, dtype=torch.uint8),
    }


def step(tensors: Tensors, seed: int, density: float = 0.01) -> Tensors:
    """Some words of the large one move by one, and a little of all else."""
    draw = torch.Generator().manual_seed(seed)
    words = tensors["embed"].view(torch.int16)
    moved = (torch.rand(words.shape, generator=draw) < density).to(torch.int16)
    odd = tensors["odd"] + (torch.arange(7) == seed % 7).to(torch.uint8)
    return {"embed": (words + moved).view(torch.bfloat16), "norm": tensors["norm"] * 1.001, "odd": odd}


def delta_publisher(publishers: Publishers, **limits: int) -> WeightPublisher:
    publisher = publishers(**limits)
    publisher.forms.smallest = 0
    return publisher


@pytest.fixture(autouse=True)
def slow_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a delta of some kilobytes pays."""
    monkeypatch.setattr("polyrl_trainer.weights.server.WeightServer.bandwidth", 1e5)


def is_delta(publisher: WeightPublisher, version: int) -> bool:
    return publisher._kept[version].manifest.kind == "delta"


def assert_is(staged: Staged, tensors: Tensors) -> None:
    loaded = load_file(staged.folder / "model.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert (staged.folder / "config.json").read_bytes() == FILES["config.json"]


async def test_fifty_versions_behind_each_other_and_a_joiner_at_any_time(
    keys: Keys, staging: Staging, publishers: Publishers, tmp_path
) -> None:
    publisher, puller, dice = delta_publisher(publishers), Puller(keys.agent, staging), random.Random(1)
    tensors, served, kinds, skipped = first_tensors(), None, [], 0
    for version in range(50):
        ref = publisher.publish(version, tensors.items(), FILES)
        kinds.append(is_delta(publisher, version))
        if version and dice.random() < 0.3:
            skipped += 1  # it is several versions behind at the next one
        else:
            pulled = await puller.pull(ref, served)
            assert_is(pulled.staged, tensors)
            assert pulled.staged.receipt == ref.receipt
            served = pulled.staged
            staging.keep_only(version)
        if version % 10 == 7:
            with_own = Staging("run", f"joiner-{version}", tmp_path)
            joined = await Puller(keys.agent, with_own).pull(ref, None)
            assert_is(joined.staged, tensors)
            with_own.close()
        tensors = step(tensors, version, density=dice.choice([0.0, 0.001, 0.02]))
    assert skipped
    assert not kinds[0]
    assert [kinds[number : number + 16].count(False) for number in (1, 17, 33)] == [1, 1, 1], "anchors in between"


async def test_who_has_the_base_takes_the_delta_alone_and_keeps_the_base_until_it_serves(
    keys: Keys, staging: Staging, publishers: Publishers
) -> None:
    publisher, puller, tensors = delta_publisher(publishers), Puller(keys.agent, staging), first_tensors()
    first = await puller.pull(publisher.publish(0, tensors.items(), FILES), None)
    second = await puller.pull(publisher.publish(1, (newer := step(tensors, 1)).items(), FILES), first.staged)
    assert is_delta(publisher, 1)
    assert second.bytes_pulled == publisher._kept[1].manifest.total_bytes < first.bytes_pulled / 10
    assert_is(first.staged, tensors)
    assert_is(second.staged, newer)
    assert publisher.measures["weights/bytes_share"] < 0.1
    assert publisher.measures["weights/deltas_since_anchor"] == 1
    assert 0.005 < publisher.measures["weights/changed_share"] < 0.02


@pytest.mark.parametrize("fault", ["a bit of the base turned", "the served version is another one"])
async def test_a_result_that_is_false_is_pulled_again_from_the_anchor_on(
    keys: Keys, staging: Staging, publishers: Publishers, fault: str
) -> None:
    publisher, puller, tensors = delta_publisher(publishers), Puller(keys.agent, staging), first_tensors()
    first = (await puller.pull(publisher.publish(0, tensors.items(), FILES), None)).staged
    if fault.startswith("a bit"):
        first.file.stream(first.manifest)[12345] ^= 4
    else:
        other = msgspec.structs.replace(first.manifest, files=())
        first = replace(first, manifest=other)
    ref = publisher.publish(1, (newer := step(tensors, 1)).items(), FILES)
    assert is_delta(publisher, 1)
    assert_is((await puller.pull(ref, first)).staged, newer)


async def test_a_false_delta_is_dropped_and_the_served_version_stays(
    keys: Keys, staging: Staging, publishers: Publishers
) -> None:
    publisher, puller, tensors = delta_publisher(publishers), Puller(keys.agent, staging), first_tensors()
    served = (await puller.pull(publisher.publish(0, tensors.items(), FILES), None)).staged
    publisher.publish(1, step(tensors, 1).items(), FILES)
    bodies, chunks = {number: body_of(publisher, number) for number in (0, 1)}, held(publisher)

    def lie(body: bytes, turned: Callable[[bytes], bytes]) -> Liar:
        liar = Liar(keys.trainer, body, lambda hash_: turned(chunks[hash_]))
        liar.bodies = {**bodies, 1: body}
        return liar

    manifest = decode_manifest(bodies[1], manifest_hash(bodies[1]), run_epoch=1)
    false_base = msgspec.structs.replace(manifest, base_hash=b"x" * 16)
    false_sum = msgspec.structs.replace(
        manifest, tensors=(msgspec.structs.replace(manifest.tensors[0], checksum=b"x" * 16), *manifest.tensors[1:])
    )
    for body, turned, why in (
        (bodies[1], lambda data: bytes(len(data)), "not what its hash says"),
        (encode_manifest(false_base), bytes, "its hash differs"),
        (encode_manifest(false_sum), bytes, "fails its checksum"),
    ):
        with lie(body, turned) as liar, pytest.raises(PullFailed, match=why):
            await puller.pull(liar.announce(1), served)
        assert_is(served, tensors)
        assert complete(staging) == [0]


async def test_what_came_of_a_delta_is_not_pulled_again(
    keys: Keys, staging: Staging, publishers: Publishers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base is gone as the last chunk has come; with it there again, only it is missing."""
    publisher, tensors = delta_publisher(publishers, chunk_bytes=512), first_tensors()
    publisher.publish(0, tensors.items(), FILES)
    ref = publisher.publish(1, (newer := step(tensors, 1)).items(), FILES)
    assert is_delta(publisher, 1)
    find, asked = publisher.server.find, []

    def gone(request):
        asked.append(request)
        return None if isinstance(request, GetChunk | GetLent) and request.version == 0 else find(request)

    publisher.server.find = gone
    puller = Puller(keys.agent, staging)
    with pytest.raises(PullFailed, match="version 0, which version 1 rests on, is no longer kept"):
        await puller.pull(ref, None)
    publisher.server.find = find
    pulled = await puller.pull(ref, None)
    assert_is(pulled.staged, newer)
    assert pulled.bytes_pulled == publisher._kept[0].manifest.total_bytes
    assert not puller._deltas, "their memory is free again"


async def test_deltas_of_chains_that_were_superseded_take_no_memory(
    keys: Keys, staging: Staging, publishers: Publishers
) -> None:
    """A receiver whose anchor takes longer than some steps of the trainer began chain after chain, and kept all."""
    puller = Puller(keys.agent, staging)
    for first in (0, 10, 20):
        publisher, tensors = delta_publisher(publishers, chunk_bytes=512), first_tensors()
        publisher.publish(first, tensors.items(), FILES)
        ref = publisher.publish(first + 1, step(tensors, first + 1).items(), FILES)
        assert is_delta(publisher, first + 1)
        find = publisher.server.find

        def gone(request, find=find, first=first):
            return None if isinstance(request, GetChunk | GetLent) and request.version == first else find(request)

        publisher.server.find = gone
        with pytest.raises(PullFailed, match="is no longer kept"):
            await puller.pull(ref, None)
        assert len(puller._deltas) == 1, "of the newest chain"


async def test_a_publisher_that_restarts_publishes_an_anchor_of_the_same_content(
    keys: Keys, staging: Staging, publishers: Publishers
) -> None:
    before, puller, tensors = delta_publisher(publishers), Puller(keys.agent, staging), first_tensors()
    served = (await puller.pull(before.publish(3, tensors.items(), FILES), None)).staged
    old = before.publish(4, (newer := step(tensors, 1)).items(), FILES)
    after = delta_publisher(publishers)
    new = after.publish(4, newer.items(), FILES)
    assert old.manifest_hash != new.manifest_hash
    assert (old.content, old.receipt) == (new.content, new.receipt)
    assert_is((await puller.pull(new, served)).staged, newer)
    again = after.publish(5, (newest := step(newer, 2)).items(), FILES)
    other = (await puller.pull(old, served)).staged
    assert_is((await puller.pull(again, other)).staged, newest), "its own version 4 is another form's"


async def test_memory_is_bounded_and_images_are_used_again(
    keys: Keys, staging: Staging, publishers: Publishers
) -> None:
    publisher, tensors = delta_publisher(publishers, keep=2), first_tensors()
    images = set()
    for version in range(60):
        publisher.publish(version, tensors.items(), FILES)
        size = publisher._kept[version].manifest.stream_bytes
        assert sum(form.manifest.total_bytes for form in publisher._kept.values()) <= 3 * size
        copies = publisher._machines.own._copies
        assert len(copies) <= 3
        images |= {id(copy.image) for copy in copies.values()}
        tensors = step(tensors, version)
    assert len(images) <= 5


async def test_other_tensors_or_files_make_an_anchor(publishers: Publishers) -> None:
    publisher, tensors = delta_publisher(publishers), first_tensors()
    more, other, found = {**tensors, "more": torch.ones(3)}, {"config.json": b"{}"}, []
    for version, (named, files) in enumerate([(tensors, FILES), (tensors, other), (more, other), (more, other)]):
        publisher.publish(version, named.items(), files)
        found.append(is_delta(publisher, version))
    assert found == [False, False, False, True]


async def test_a_version_that_comes_late_leaves_the_newest_to_rest_on(publishers: Publishers) -> None:
    publisher, tensors = delta_publisher(publishers, keep=4), first_tensors()
    for number, version in enumerate((10, 12, 11, 13)):
        publisher.publish(version, step(tensors, number).items(), FILES)
    assert [is_delta(publisher, version) for version in (10, 11, 12, 13)] == [False, False, True, True]


async def test_a_version_without_a_byte_has_a_form(publishers: Publishers) -> None:
    """The share of nothing that has changed was divided by nothing."""
    publisher = publishers(deltas=True)
    for version in range(2):
        publisher.publish(version, [("empty", torch.zeros(0, 4))], FILES)
    assert not is_delta(publisher, 1)


async def test_a_version_that_was_announced_as_another_one_is_refused(
    keys: Keys, staging: Staging, publishers: Publishers
) -> None:
    publisher, tensors = publishers(), first_tensors()
    refs = [publisher.publish(version, tensors.items(), FILES) for version in range(2)]
    find = publisher.server.find
    publisher.server.find = lambda request: find(msgspec.structs.replace(request, version=0))
    mixed = msgspec.structs.replace(refs[1], manifest_hash=refs[0].manifest_hash)
    with pytest.raises(PullFailed, match="version 1 calls itself 0"):
        await Puller(keys.agent, staging).pull(mixed, None)


@pytest.mark.parametrize("seed", range(3))
async def test_given_up_at_any_moment_the_served_version_stays_and_the_next_one_comes(
    keys: Keys, staging: Staging, publishers: Publishers, seed: int
) -> None:
    """Superseded, or cut off by the publisher, somewhere between the first manifest and the last checksum."""
    publisher, puller, dice = (
        delta_publisher(publishers, chunk_bytes=4096),
        Puller(keys.agent, staging),
        random.Random(seed),
    )
    tensors, served, gave_up = first_tensors(), None, 0
    for version in range(40):
        ref = publisher.publish(version, tensors.items(), FILES)
        pulling = asyncio.create_task(puller.pull(ref, served))
        if version and dice.random() < 0.6:
            await asyncio.wait({pulling}, timeout=dice.uniform(0.0, 0.02))
            for thread in publisher.server._threads:
                for peer in tuple(thread._peers):
                    with contextlib.suppress(OSError):
                        peer.socket.shutdown(socket.SHUT_RDWR)
            if dice.random() < 0.7:
                pulling.cancel()
        try:
            pulled = await asyncio.wait_for(pulling, 20.0)
        except asyncio.CancelledError:
            gave_up += 1
        else:
            assert_is(pulled.staged, tensors)
            served = pulled.staged
            staging.keep_only(version)
        assert served is not None
        assert receipt_of(served.file.stream(served.manifest)) == served.receipt
        tensors = step(tensors, version, density=0.01)
    assert gave_up
