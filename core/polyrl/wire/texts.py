"""The trainer's side of what samples say: a text travels once, and messages after that only refer to it.

    TurnDone        what engines made since the last turn that the trainer gave its verdict on
    TurnsAwaited    names of samples whose verdict is awaited: after a greeting, and when one stays away
    Batch           names, rewards and checksums of samples whose every turn the trainer has had
    Fetch           asks for what is not here: a text that another process had, or that did not fit

`SampleTexts` makes whole messages of those: no sockets, no clock. What it misses it fetches, one bounded portion after
the other. Logprobs travel for generated tokens only, and the loss mask not at all: spans tell both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from msgspec.structs import replace

from polyrl.sample import ENVIRONMENT_VERSION, Response, Span, split_sample_id
from polyrl.wire.agent import checksum_of
from polyrl.wire.trainer import Batch, Fetch, Fetched, FetchedText, TurnDone, TurnsAwaited

MAX_HELD_BYTES: Final = 1 << 30
"""Texts kept for their batch: twice what a manager lets wait for a trainer. The oldest go, and are fetched when they
are needed."""

FETCH_AT_ONCE: Final = 4096
"""Samples named in one Fetch."""


def part_of(response: Response, start: int) -> Response:
    """The positions from `start` on, as they travel; `start` is where a span begins, or the end."""
    spans = tuple(span for span in response.spans if span.end > start)
    logprobs = b"".join(response.logprobs[4 * s.start : 4 * s.end] for s in spans if s.version != ENVIRONMENT_VERSION)
    return replace(response, ids=response.ids[4 * start :], logprobs=logprobs, loss_mask=b"", spans=spans)


def whole_of(part: Response, before: Response | None) -> Response:
    """Inverse of `part_of`; `before` ends where `part` starts."""
    mask, logprobs, taken = bytearray(), bytearray(), 0
    for span in part.spans:
        size = span.end - span.start
        generated = span.version != ENVIRONMENT_VERSION
        mask += (b"\x01" if generated else b"\x00") * size
        logprobs += part.logprobs[taken : taken + 4 * size] if generated else bytes(4 * size)
        taken += 4 * size * generated
    if before is None:
        return replace(part, logprobs=bytes(logprobs), loss_mask=bytes(mask))
    return replace(
        part,
        ids=before.ids + part.ids,
        logprobs=before.logprobs + bytes(logprobs),
        loss_mask=before.loss_mask + bytes(mask),
        spans=before.spans + part.spans,
    )


class _Incomplete:
    """A batch, and the texts of it that are here."""

    def __init__(self, batch: Batch, held: Mapping[str, Response]) -> None:
        self._batch = batch
        self._texts: dict[str, Response] = {}
        self.missing: dict[str, None] = {}
        """Samples, in order."""
        for scored, check in zip(batch.samples, batch.checks, strict=True):
            name = scored.response.sample
            text = held.get(name)
            if text is not None and checksum_of(text.ids) == check:
                self._texts[name] = text
            else:
                self.missing[name] = None

    def add(self, response: Response) -> None:
        """A text has come."""
        if response.sample in self.missing:
            del self.missing[response.sample]
            self._texts[response.sample] = response

    def whole(self) -> Batch:
        """The batch with its texts; nothing may be missing."""
        samples = (replace(scored, response=self._texts[scored.response.sample]) for scored in self._batch.samples)
        return replace(self._batch, samples=tuple(samples), checks=())


class SampleTexts:
    """What one trainer process holds of the samples' responses, and the messages that wait for more of them."""

    def __init__(self, send: Callable[[Fetch], None], is_known: Callable[[str, int], bool]) -> None:
        """`is_known`: whether this turn of a sample was handed out, and has no verdict yet."""
        self._send, self._is_known = send, is_known
        self._held: dict[str, Response] = {}
        """Whole ones, oldest first."""
        self._names: dict[int, set[str]] = {}
        """Samples of those, by group."""
        self._bytes = 0
        self._wanted: dict[str, None] = {}
        """Samples to be fetched, in order; the first `_asked` of them are asked for."""
        self._asked = self._request = 0
        self._incomplete: dict[int, _Incomplete] = {}
        """Batches that wait for texts, by request."""

    def receive(self, message: Any) -> Iterator[Any]:
        """The messages that are whole now; mostly the same one."""
        match message:
            case TurnDone():
                yield from self._turn(message)
            case TurnsAwaited(turns):
                self._want(sample for sample, turn in turns if not self._is_known(sample, turn))
            case FetchedText(response):
                self._hold(whole_of(response, None))
            case Batch() if message.checks:
                self._await(message)
            case Fetched(request, count):
                self._fetched(request, count)
            case _:
                yield message
        yield from self._completed()

    def extend(self, sample: str, turn: int, ids: bytes) -> None:
        """What an environment wrote after this turn; it is not sent back. Should the manager not take it, the next
        checksum tells."""
        held = self._held.get(sample)
        if held is None or held.turn != turn:
            return
        start, size = len(held.ids) // 4, len(ids) // 4
        attempt = held.spans[-1].attempt if held.spans else 0
        written = Span(start, start + size, version=ENVIRONMENT_VERSION, engine="", attempt=attempt)
        part = replace(held, ids=ids, logprobs=b"", loss_mask=b"", spans=(written,), turn=turn + 1)
        self._hold(whole_of(part, held))

    def reconnect(self) -> None:
        """What was under way is lost; the manager says again what it awaits, and is asked again for batches."""
        self._wanted.clear()
        self._incomplete.clear()
        self._asked = 0

    def forget(self, groups: Iterable[int]) -> None:
        """Drops the texts of these groups: nothing will be asked about them any more."""
        for number in groups:
            for sample in tuple(self._names.get(number, ())):
                self._drop(sample)

    def _turn(self, message: TurnDone) -> Iterator[TurnDone]:
        name, before = message.response.sample, None
        if message.start:
            held = self._held.get(name)
            before = None if held is None else _first_positions(held, message.start)
            if before is None or checksum_of(before.ids) != message.check:
                self._want([name])
                return
        response = whole_of(message.response, before)
        self._hold(response)
        yield replace(message, response=response, start=0, check=0)

    def _await(self, batch: Batch) -> None:
        incomplete = self._incomplete[batch.request] = _Incomplete(batch, self._held)
        self._want(incomplete.missing)

    def _completed(self) -> Iterator[Batch]:
        for request, incomplete in tuple(self._incomplete.items()):
            if not incomplete.missing:
                del self._incomplete[request]
                yield incomplete.whole()

    def _hold(self, response: Response) -> None:
        for incomplete in self._incomplete.values():
            incomplete.add(response)
        self._drop(response.sample)
        self._held[response.sample] = response
        self._names.setdefault(split_sample_id(response.sample)[0], set()).add(response.sample)
        self._bytes += _size(response)
        while self._bytes > MAX_HELD_BYTES:
            self._drop(next(iter(self._held)))

    def _drop(self, sample: str) -> None:
        response = self._held.pop(sample, None)
        if response is not None:
            self._bytes -= _size(response)
            number, _ = split_sample_id(sample)
            self._names[number].discard(sample)
            if not self._names[number]:
                del self._names[number]

    def _want(self, samples: Iterable[str]) -> None:
        self._wanted.update(dict.fromkeys(samples))
        self._fetch()

    def _fetch(self) -> None:
        if self._wanted and not self._asked:
            names = tuple(self._wanted)[:FETCH_AT_ONCE]
            self._asked = len(names)
            self._request += 1
            self._send(Fetch(self._request, names))

    def _fetched(self, request: int, count: int) -> None:
        """The first `count` of those asked for have come, or will never."""
        if request != self._request or not self._asked:
            return
        for name in tuple(self._wanted)[:count]:
            del self._wanted[name]
        self._asked = 0
        self._fetch()


def _first_positions(response: Response, end: int) -> Response | None:
    """The first `end` positions; None when there are fewer, or when a span goes on beyond."""
    if len(response.ids) == 4 * end:
        return response
    spans = tuple(span for span in response.spans if span.end <= end)
    if not spans or spans[-1].end != end:
        return None
    ids, logprobs, mask = response.ids[: 4 * end], response.logprobs[: 4 * end], response.loss_mask[:end]
    return replace(response, ids=ids, logprobs=logprobs, loss_mask=mask, spans=spans)


def _size(response: Response) -> int:
    return len(response.ids) + len(response.logprobs) + len(response.loss_mask)
