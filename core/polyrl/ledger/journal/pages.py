"""Tokens of live samples and prompts of live groups, each written once: a snapshot holds only what no page holds yet.

    page      what came to one sample since its last page, or a group's prompt; a round of them goes over all that lives
    snapshot  the state without what is in pages (`PageBook.rest`), taken at the end of a round, and their last number

So a snapshot costs what is new, not what lives: with 10,000 samples of a few thousand tokens it would otherwise write
hundreds of megabytes again and again. And a round is written a few pages at a time, between which everybody is served.
Pages after the snapshot's last number are of a round that did not end; they are no part of it. A page carries a
checksum, and a sample that does not reach its last token is damage.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable

from msgspec.structs import replace

from polyrl.errors import ProtocolError
from polyrl.ledger.state import GroupState, LedgerState, SampleState

PageRow = tuple[int, str, bytes, int]
"""number (counts up), sample or group, body, checksum; a sample's body is uint32[T] ids, then float32[T] logprobs."""


class PageBook:
    """Which pages there are, and how far they reach."""

    def __init__(self) -> None:
        self._numbers: dict[str, list[int]] = {}
        """Per sample and group."""
        self._reach: dict[str, int] = {}
        """Per sample: bytes of its ids that are in pages."""
        self.last = 0
        """Number of the newest page. After a restore the snapshot's: the pages with the highest may have ended."""
        self._round: deque[str] = deque()

    def begin_round(self, state: LedgerState) -> None:
        """Everything that lives gets a page with what no page holds of it."""
        self._round.extend(str(number) for number in state.groups)
        self._round.extend(state.samples)

    @property
    def under_way(self) -> bool:
        """Whether the round has pages left."""
        return bool(self._round)

    def write(self, state: LedgerState, limit: int) -> list[PageRow]:
        """The round's next pages, at most `limit`."""
        rows: list[PageRow] = []
        while self._round and len(rows) < limit:
            name = self._round.popleft()
            body = self._unwritten(state, name)
            if body:
                self.last += 1
                self._numbers.setdefault(name, []).append(self.last)
                rows.append((self.last, name, body, _checksum(self.last, body)))
        return rows

    def _unwritten(self, state: LedgerState, name: str) -> bytes:
        sample = state.samples.get(name)
        if sample is not None:
            reach, self._reach[name] = self._reach.get(name, 0), len(sample.ids)
            return bytes(sample.ids[reach:] + sample.logprobs[reach:])
        entry = _group_of(state, name)
        return b"" if entry is None or name in self._numbers else entry.group.prompt_ids

    def rest(self, state: LedgerState) -> LedgerState:
        """`state` without what is in pages; it shares the rest and is only good for being written."""
        groups = {number: self._bare_group(number, entry) for number, entry in state.groups.items()}
        samples = {name: self._bare_sample(name, sample) for name, sample in state.samples.items()}
        return replace(state, groups=groups, samples=samples)

    def _bare_group(self, number: int, entry: GroupState) -> GroupState:
        return replace(entry, group=replace(entry.group, prompt_ids=b"")) if str(number) in self._numbers else entry

    def _bare_sample(self, name: str, sample: SampleState) -> SampleState:
        reach = self._reach.get(name, 0)
        return replace(sample, ids=sample.ids[reach:], logprobs=sample.logprobs[reach:]) if reach else sample

    def forget_ended(self, state: LedgerState) -> list[int]:
        """Numbers of pages whose sample or group no longer lives; they count as deleted from now on."""
        ended = [name for name in self._numbers if name not in state.samples and _group_of(state, name) is None]
        for name in ended:
            self._reach.pop(name, None)
        return [number for name in ended for number in self._numbers.pop(name)]

    def restore(self, state: LedgerState, rows: Iterable[PageRow]) -> None:
        """Puts what is in pages back into a state without it, from all its pages in order. Raises ProtocolError for a
        page that is damaged, belongs to nothing, or is missing."""
        bodies: dict[str, list[bytes]] = {}
        for number, name, body, checksum in rows:
            if _checksum(number, body) != checksum:
                raise ProtocolError(f"the checksum of page {number} does not match")
            self._numbers.setdefault(name, []).append(number)
            bodies.setdefault(name, []).append(body)
        for name, pieces in bodies.items():
            if name in state.samples:
                self._reach[name] = _put_before(state.samples[name], pieces)
            else:
                _give_prompt(state, name, pieces[0])
        _check_whole(state)


def _put_before(sample: SampleState, bodies: list[bytes]) -> int:
    """Returns the bytes of ids that were put."""
    ids = bytearray().join(body[: len(body) // 2] for body in bodies)
    logprobs = bytearray().join(body[len(body) // 2 :] for body in bodies)
    reach = len(ids)
    sample.ids, sample.logprobs = ids + sample.ids, logprobs + sample.logprobs
    return reach


def _give_prompt(state: LedgerState, name: str, prompt: bytes) -> None:
    entry = _group_of(state, name)
    if entry is None:
        raise ProtocolError(f"a page belongs to {name[:64]!r}, which is neither a live sample nor a live group")
    entry.group = replace(entry.group, prompt_ids=prompt)


def _group_of(state: LedgerState, name: str) -> GroupState | None:
    return state.groups.get(int(name)) if name.isascii() and name.isdigit() else None


def _check_whole(state: LedgerState) -> None:
    for number, entry in state.groups.items():
        if not entry.group.prompt_ids:
            raise ProtocolError(f"the prompt of group {number} is missing")
    for name, sample in state.samples.items():
        length = sample.spans[-1].end if sample.spans else 0
        if not len(sample.ids) == len(sample.logprobs) == 4 * length:
            raise ProtocolError(f"sample {name} has {sample.length} of its {length} tokens")


def _checksum(number: int, body: bytes) -> int:
    return zlib.crc32(body, number & 0xFFFFFFFF)
