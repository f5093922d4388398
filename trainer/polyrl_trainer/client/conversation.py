"""What the client knows of its conversation with the manager: open requests, streams, and what to send again.

Requests are numbered, have a deadline each, and are sent again after every greeting. Turns and drops come unrequested;
the manager repeats them, and each is handed out once. A manager without its journal knows no group: the greeting
names the numbers that are taken, so that no verdict on an old sample is believed for a new one. Every group that was
open then counts as dropped for `journalLost`, and whoever submitted it submits its prompt anew.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Self, TypeAlias, TypeVar

from polyrl import wire
from polyrl.errors import DeadlineExceeded, ProtocolError, RunFailed
from polyrl.sample import DiscardReason, Group, Purpose
from polyrl.wire import Batch, FromTrainer, GroupDropped, TrainerWelcome
from polyrl.wire.ranges import Ranges, add_number, has_number

Answer: TypeAlias = wire.Accepted | wire.Declined | Batch | wire.Late

T = TypeVar("T")

_END: Final = object()

ACKNOWLEDGED_RANGES: Final = 1024
"""Runs of acknowledged batches that a greeting names: what is older, the manager has confirmed long ago."""


class RequestRefused(RunFailed):
    """The manager will not do it; the message is its sentence."""


def submissions(groups: Sequence[Group]) -> Iterator[tuple[Group, ...]]:
    """The same groups in order, in parts of at most `wire.SUBMIT_BYTES` of prompts and `wire.SUBMIT_SAMPLES` each.
    Raises RequestRefused for a prompt that would break the connection; the manager refuses what else cannot be."""
    for group in groups:
        tokens = len(group.prompt_ids) // 4
        if tokens > wire.MAX_SAMPLE_TOKENS:
            text = f"its prompt has {tokens} tokens; no message holds more than {wire.MAX_SAMPLE_TOKENS}"
            raise RequestRefused(f"group {group.id}: {text}")
    part: list[Group] = []
    size = samples = 0
    for group in groups:
        size, samples = size + len(group.prompt_ids), samples + group.n
        if part and (size > wire.SUBMIT_BYTES or samples > wire.SUBMIT_SAMPLES):
            yield tuple(part)
            part, size, samples = [], len(group.prompt_ids), group.n
        part.append(group)
    yield tuple(part)


class PendingRequests:
    """Requests without an answer yet."""

    def __init__(self, send: Callable[[FromTrainer], None]) -> None:
        self._send = send
        # A trainer that starts again must not reuse a number of the one before: the manager repeats old answers.
        self._next_number = secrets.randbits(48)
        self._open: dict[int, tuple[FromTrainer, asyncio.Future[Answer]]] = {}
        self._posted: dict[int, FromTrainer] = {}
        """Unanswered ones, which nobody awaits."""
        self._failure: Exception | None = None

    async def request(self, make: Callable[[int], FromTrainer], what: str, timeout_s: float) -> Answer:
        """The answer to `make(number)`. Raises RequestRefused, DeadlineExceeded, or what ended the connection."""
        if self._failure is not None:
            raise self._failure
        self._next_number += 1
        number = self._next_number
        message, awaited = make(number), asyncio.get_running_loop().create_future()
        _check_frame(message, what)
        self._open[number] = message, awaited
        self._send(message)
        try:
            async with asyncio.timeout(timeout_s):
                answer: Answer = await awaited
        except TimeoutError:
            self._withdraw(message)
            raise DeadlineExceeded(f"the answer to {what}", "the manager", timeout_s) from None
        except asyncio.CancelledError:
            self._withdraw(message)
            raise
        finally:
            del self._open[number]
        if isinstance(answer, wire.Declined):
            raise RequestRefused(f"{what} was refused: {answer.reason}")
        return answer

    def _withdraw(self, message: FromTrainer) -> None:
        """The batch that answers it, or has answered it unseen, is for another request."""
        if isinstance(message, wire.BatchRequest):
            self.post(lambda number: wire.Withdraw(number, message.request))

    def post(self, make: Callable[[int], FromTrainer]) -> None:
        """A request whose answer nobody awaits; it is sent again until it is answered."""
        self._next_number += 1
        message = self._posted[self._next_number] = make(self._next_number)
        self._send(message)

    def resolve(self, answer: Answer) -> bool:
        """Hands an answer to whoever awaits it; False for a second answer, and for one that nobody awaits any more."""
        self._posted.pop(answer.request, None)
        _, awaited = self._open.get(answer.request, (None, None))
        if awaited is None or awaited.done():
            return False
        awaited.set_result(answer)
        return True

    def send_again(self) -> None:
        """Sends everything unanswered, in the order of the requests."""
        unanswered = {number: message for number, (message, _) in self._open.items()} | self._posted
        for number in sorted(unanswered):
            self._send(unanswered[number])

    def fail(self, error: Exception) -> None:
        """Nothing will be answered any more."""
        self._failure = error
        for _, awaited in self._open.values():
            if not awaited.done():
                awaited.set_exception(error)


def _check_frame(message: FromTrainer, what: str) -> None:
    """Raises RequestRefused for what no manager could read: it would drop the frame, or the connection with all that is
    on it, and be sent the same again after each greeting."""
    try:
        wire.decode_from_trainer(wire.encode(message))
    except (ProtocolError, TypeError, OverflowError, ValueError) as error:
        raise RequestRefused(f"{what} was refused: it cannot be sent: {error}") from error


class EventStream(Generic[T]):
    """A queue that ends, in order or with an error; whoever iterates may be cancelled, and go on. The manager's own
    bounds (open samples) bound it."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[T | object] = asyncio.Queue()
        self._ended = False
        self._failure: Exception | None = None
        self._known: set[Hashable] = set()

    def put_once(self, key: Hashable, item: T) -> None:
        """Adds `item` for whoever iterates, unless its key is known: the manager repeats what it sends."""
        if key not in self._known:
            self._known.add(key)
            self._queue.put_nowait(item)

    def knows(self, key: Hashable) -> bool:
        """Whether an item of this key was put, and not forgotten since."""
        return key in self._known

    def known(self, wanted: Callable[[Any], bool]) -> list[Hashable]:
        """The keys that are."""
        return [key for key in self._known if wanted(key)]

    def forget(self, keys: Iterable[Hashable]) -> None:
        """Items of these keys are taken again when they come again."""
        self._known.difference_update(keys)

    def take_all(self) -> list[T]:
        """Everything that is there now."""
        taken: list[T] = []
        while not self._queue.empty():
            item = self._queue.get_nowait()
            if item is _END:
                self._queue.put_nowait(_END)
                break
            taken.append(item)  # type: ignore[arg-type]
        return taken

    def end(self, failure: Exception | None = None) -> None:
        """Iteration ends after what is queued; with `failure`, by raising it. What ended it first counts."""
        if not self._ended:
            self._ended, self._failure = True, failure
            self._queue.put_nowait(_END)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        # No generator: one whose reader was cancelled has ended, as if nothing more would come.
        item = await self._queue.get()
        if item is not _END:
            return item  # type: ignore[return-value]
        self._queue.put_nowait(_END)
        if self._failure is not None:
            raise self._failure
        raise StopAsyncIteration


@dataclass
class Cursor:
    """One trainer's view of one run."""

    acknowledged: Ranges = field(default_factory=list)
    """Batches that the trainer's state contains."""
    next_group: int = 0
    """Groups below it were accepted."""
    next_batch: int = 0
    """Batches below it were received."""
    journal: str = ""
    """The manager's; empty before the first welcome."""
    _announced: dict[type, FromTrainer] = field(default_factory=dict)
    """The newest version."""
    _open: dict[int, tuple[int, Purpose]] = field(default_factory=dict)
    """Step and purpose of each group that was submitted and neither came in a batch, nor was dropped, nor cancelled."""

    def announce(self, message: wire.PublishVersion) -> None:
        """The newest of its kind counts until the next one."""
        self._announced[type(message)] = message

    def submit(self, groups: Sequence[Group]) -> list[int]:
        """Their submission is on its way. Returns the numbers that are new: under one that is taken the manager holds
        the group that has it, whatever becomes of this one."""
        new = {group.id: (group.step, group.purpose) for group in groups if group.id not in self._open}
        self._open.update(new)
        return list(new)

    def refused(self, numbers: Iterable[int]) -> None:
        """Nothing will come of what was submitted under them."""
        for number in numbers:
            self._open.pop(number, None)

    def accept(self, groups: Sequence[Group]) -> None:
        """The manager has them."""
        self.next_group = max(self.next_group, *(group.id + 1 for group in groups), 0)

    def turn_ended(self, group: int) -> None:
        """A turn of this group ended, so the manager has it, though the answer to its submission may be lost: should
        the journal be lost as well, its verdicts must not meet another sample of the same name."""
        self.next_group = max(self.next_group, group + 1)

    def see(self, batch: Batch) -> None:
        """Its number is taken, whether anybody takes its groups or not."""
        self.next_batch = max(self.next_batch, batch.number + 1)

    def acknowledge(self, batch: int) -> None:
        """The batch is part of the trainer's state. Raises RequestRefused for a number that no batch had yet: in a
        greeting or a checkpoint it would stand for one that comes later, which nobody has learned."""
        if not 0 <= batch < self.next_batch:
            raise RequestRefused(f"batch {batch} was never received; batches below {self.next_batch} were")
        if not has_number(self.acknowledged, batch):
            add_number(self.acknowledged, batch)
            del self.acknowledged[:-ACKNOWLEDGED_RANGES]

    def receive(self, batch: Batch) -> None:
        """Its groups are the trainer's now."""
        for scored in batch.samples:
            self._open.pop(scored.group, None)

    def drop(self, dropped: GroupDropped) -> None:
        """The group will not be delivered."""
        self._open.pop(dropped.group, None)

    def end_step(self, step: int, purpose: Purpose) -> list[int]:
        """What is left of the step will not be delivered: its groups."""
        ended = [number for number, of in self._open.items() if of == (step, purpose)]
        for number in ended:
            del self._open[number]
        return ended

    def reconcile(self, welcome: TrainerWelcome) -> tuple[list[GroupDropped], list[FromTrainer]]:
        """The groups that are lost, and what to send the manager again; nothing as long as the journal is the same.

        Groups beyond `next_group` were not accepted yet: their submission is repeated like any request."""
        known, self.journal = self.journal, welcome.journal
        if known in ("", welcome.journal):
            return [], []
        lost = sorted((number, of) for number, of in self._open.items() if number < self.next_group)
        for number, _ in lost:
            del self._open[number]
        drops = [
            GroupDropped(
                number, step, purpose=purpose, reason=DiscardReason.JOURNAL_LOST, detail="the manager lost its journal"
            )
            for number, (step, purpose) in lost
        ]
        return drops, list(self._announced.values())
