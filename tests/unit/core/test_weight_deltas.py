"""Deltas: every byte comes back, whatever changed; what is no delta is refused and nothing else."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from polyrl.errors import ProtocolError
from polyrl.weights import deltas
from polyrl.weights.deltas import apply_delta, encode_delta, encode_part, num_changed

PART = 200_000
"""A block and a half; so streams of a test have several."""


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltas, "PART_BYTES", PART)


def changed(old: bytes, seed: int, density: float, by: int) -> bytes:
    draw = np.random.default_rng(seed)
    words = np.frombuffer(old, np.uint16, len(old) // 2).copy()
    places = draw.random(len(words)) < density
    words[places] += draw.integers(-by, by + 1, int(places.sum())).astype(np.uint16)
    tail = old[len(old) - len(old) % 2 :]
    return words.tobytes() + (bytes([tail[0] ^ 0x55]) if tail and density else tail)


def applied(old: bytes, delta: bytes) -> bytes:
    stream = bytearray(old)
    apply_delta(delta, memoryview(stream))
    return bytes(stream)


@settings(max_examples=60, deadline=None)
@given(
    size=st.one_of(st.integers(0, 9), st.integers(0, 3 * PART + 9)),
    seed=st.integers(0, 2**20),
    density=st.sampled_from([0.0, 0.0001, 0.01, 0.3, 1.0]),
    by=st.sampled_from([1, 40, 32767]),
)
def test_every_byte_comes_back(size: int, seed: int, density: float, by: int) -> None:
    old = random.Random(seed).randbytes(size)
    new = changed(old, seed, density, by)
    assert applied(old, b"".join(encode_delta(old, new))) == new


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**20))
def test_a_chain_of_fifty_versions_ends_equal_to_the_byte(seed: int) -> None:
    dice = random.Random(seed)
    first = newest = dice.randbytes(2 * PART + dice.randrange(PART))
    chain = []
    for number in range(50):
        following = changed(newest, seed + number, dice.choice([0.0, 0.001, 0.02, 0.5]), by=dice.choice([1, 1, 900]))
        chain.append(b"".join(encode_delta(newest, following)))
        newest = following
    stream = bytearray(first)
    for delta in chain:
        apply_delta(delta, memoryview(stream))
    assert bytes(stream) == newest


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**20))
def test_what_is_no_delta_is_refused(seed: int) -> None:
    dice = random.Random(seed)
    old = dice.randbytes(2 * PART + dice.randrange(3))
    delta = bytearray(b"".join(encode_delta(old, changed(old, seed, 0.01, 3))))
    for _ in range(dice.choice([1, 1, 4])):
        if delta and dice.random() < 0.3:
            delta = delta[: dice.randrange(len(delta))]
        elif delta:
            delta[dice.randrange(len(delta))] ^= 1 << dice.randrange(8)
    try:
        stream = applied(old, bytes(delta))
    except ProtocolError:
        return
    assert len(stream) == len(old)


def part_of(counts: list[int], steps: list[int], tail: bytes = b"") -> bytes:
    """A part as somebody may write it who means harm; each difference is 1."""
    planes = b"".join(bytes(step >> shift & 0xFF for step in steps) for shift in (0, 8))
    body = np.array(counts, "<u4").tobytes() + planes + bytes([2] * len(steps)) + bytes(len(steps)) + tail
    packed = deltas.zstandard.ZstdCompressor().compress(body)
    return len(packed).to_bytes(4, "little") + packed


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        pytest.param(part_of([1], [50]), "does not have", id="beyond the end"),
        pytest.param(part_of([2], [3, 0]), "does not have", id="one word twice"),
        pytest.param(part_of([2], [3]), "another length", id="more counted than there are"),
        pytest.param(part_of([0], [3]), "another length", id="fewer counted than there are"),
        pytest.param(part_of([], []), "too short", id="no counts"),
        pytest.param(part_of([1], [3]) * 2, "2 parts", id="too many parts"),
        pytest.param(part_of([1], [3])[:-3], "ends within", id="cut off"),
        pytest.param(b"\x04\0\0\0abcd", "cannot be read", id="not compressed"),
        pytest.param(part_of([0] * 10**6, []), "would be", id="more than fits"),
    ],
)
def test_a_harmful_part_is_refused(part: bytes, sentence: str) -> None:
    with pytest.raises(ProtocolError, match=sentence):
        applied(bytes(100), part)


def test_changes_are_counted_and_small() -> None:
    old = np.random.default_rng(0).integers(0, 2**16, PART // 2).astype(np.uint16)
    new = old.copy()
    new[::100] += 1
    part = encode_part(old.tobytes(), new.tobytes())
    assert num_changed(part, PART) == 1000
    assert len(part) < PART / 500, "regular, so the least that it can be"
    assert num_changed(encode_part(old.tobytes(), old.tobytes()), PART) == 0


def test_streams_of_two_lengths_have_no_delta() -> None:
    with pytest.raises(ValueError, match="one length"):
        encode_delta(b"1234", b"123456")
