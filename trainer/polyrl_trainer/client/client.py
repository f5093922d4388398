"""`RolloutClient`: everything a trainer needs of the rollout side, in a dozen calls. No tensors, no torch.

Every call is one request with a deadline; a lost connection or a manager that started again is bridged inside, by
greeting anew and sending again what is unanswered, under the same request numbers. Streams have no deadline of their
own: they end with an error when the manager stays away for `max_manager_outage_s`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, Self, SupportsFloat

import numpy as np
import numpy.typing as npt

from polyrl import wire
from polyrl.control import parse_endpoints
from polyrl.errors import DeadlineExceeded, InvalidData, PolyRLError, ProtocolError, RunFailed
from polyrl.keys import TrainerKeys, read_keys
from polyrl.sample import DiscardReason, Group, Purpose
from polyrl.weights import WeightsRef
from polyrl.wire import Batch, EngineMeasure, GroupDropped, SampleTexts, TrainerWelcome, TurnDone, pack_ids
from polyrl.wire.ranges import Ranges
from polyrl_trainer.client.conversation import Cursor, EventStream, PendingRequests, RequestRefused, submissions
from polyrl_trainer.client.link import ManagerLink
from polyrl_trainer.rollouts import Rollouts

TOKEN_IDS: Final = 1 << 32
"""How many a message can tell apart."""
CONNECT_TIMEOUT_S: Final = 30.0
"""A manager starts in two seconds; the rest is for a machine that is busy starting everything else."""
MAX_MANAGER_OUTAGE_S: Final = 60.0
"""Longest absence of the manager that is bridged, unless the caller knows better: a process that is started anew and
replays its journal."""
ANSWER_S: Final = 10.0
"""Answers take milliseconds; the rest is for a busy machine. An absent manager's return comes on top."""
ENDPOINTS_POLL_S: Final = 0.05
"""Between reads of the endpoints file: nothing announces a file, and it comes once."""
LINGER_S: Final = 1.0
"""Time that the last frames get to leave."""


class RolloutClient(Rollouts):
    """One connection to the rollout side of one run; made by `connect`, used on one event loop.

    Any trainer can use it: submit groups, score finished turns, take batches, acknowledge them, publish weights. Each
    call is described at `Rollouts`, the port that it fits; docs/reference/client.md shows a whole program. One step,
    here against `testing.FakeRollouts`, which needs no manager:

    >>> import asyncio
    >>> from polyrl.sample import Group, Purpose, SamplingParams
    >>> from polyrl.weights import WeightsRef
    >>> from polyrl.wire import pack_ids, unpack_ids
    >>> from polyrl_trainer.testing.fake_rollouts import FakeRollouts
    >>> async def train(client):
    ...     await client.publish(WeightsRef(0, "tcp://127.0.0.1:5555"))
    ...     sampling, prompt = SamplingParams(max_new_tokens=8), pack_ids([1, 2, 3])
    ...     await client.submit([Group(0, 0, Purpose.TRAIN, prompt, 1, sampling, min_version=0, max_version=0)])
    ...     turn = await anext(client.turns())
    ...     await client.score(turn.response.sample, 0, float(len(unpack_ids(turn.response.ids))), {})
    ...     limits = {"min_samples": 1, "max_samples": 1, "max_tokens": 1000, "deadline_s": 60}
    ...     batch = await client.next(0, purpose=Purpose.TRAIN, **limits)
    ...     await client.acknowledge(batch.number)
    ...     return [scored.reward for scored in batch.samples]
    >>> asyncio.run(train(FakeRollouts(lambda group, index, response: [7, 7])))
    [2.0]
    """

    def __init__(
        self,
        manager: str,
        keys: TrainerKeys,
        run_epoch: int,
        acknowledged: Ranges,
        max_manager_outage_s: float,
        *,
        covers: bool = False,
    ) -> None:
        self._manager = manager
        self._max_manager_outage_s = max_manager_outage_s
        self._run_epoch = run_epoch
        self._name = secrets.token_hex(8)
        # Batches that a manager without its journal packs must not have the numbers of those.
        self._cursor = Cursor(list(acknowledged), next_batch=acknowledged[-1][1] if acknowledged else 0)
        self._covers = covers
        self._turns = EventStream[TurnDone]()
        self._dropped = EventStream[GroupDropped]()
        self._link = ManagerLink(self._locate, keys, self._hello, max_manager_outage_s)
        self._requests = PendingRequests(self._link.send)
        self._texts = SampleTexts(self._link.send, lambda sample, turn: self._turns.knows((sample, turn)))
        self._served = (-1, 0.0)
        """The newest version that an engine had, and since when."""
        self._first_welcome: asyncio.Future[TrainerWelcome] = asyncio.get_running_loop().create_future()

    @classmethod
    @asynccontextmanager
    async def connect(
        cls,
        manager: str | Path,
        key_file: str | Path,
        run_epoch: int,
        acknowledged: Iterable[tuple[int, int]] = (),
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        max_manager_outage_s: float = MAX_MANAGER_OUTAGE_S,
        *,
        covers: bool = False,
    ) -> AsyncIterator[Self]:
        """A connected client, for as long as the context lasts.

        `manager` is the manager's endpoints file, which may not be there yet, or its `tcp://host:port`. `acknowledged`
        says which batches the trainer's state contains, as half-open ranges of numbers, ascending: what the property
        of that name was when the state was saved; `covers` promises to call `cover` after each checkpoint;
        `max_manager_outage_s` is the longest absence of the manager that is bridged later on. Raises DeadlineExceeded
        when no manager welcomes it in time, InvalidData for a wrong key file, RunFailed when the manager refuses it
        (another run epoch), Superseded when another trainer has come. When the context ends, calls that are still
        awaited and streams that are still iterated end with RunFailed.
        """
        client = cls(
            str(manager),
            read_keys(TrainerKeys, Path(key_file)),
            run_epoch,
            list(acknowledged),
            max_manager_outage_s,
            covers=covers,
        )
        link = asyncio.create_task(client._hold_link())
        try:
            await client._wait_for_welcome(link, connect_timeout_s)
            yield client
        finally:
            link.cancel()
            await asyncio.gather(link, return_exceptions=True)
            await client._link.close(LINGER_S)

    @property
    def acknowledged(self) -> Ranges:
        """The batches that the trainer's state contains, as half-open ranges of their numbers."""
        return list(self._cursor.acknowledged)

    @property
    def welcome(self) -> TrainerWelcome:
        """What the manager knew when it first welcomed this trainer: numbers taken, newest version, groups held."""
        return self._first_welcome.result()

    async def publish(self, weights: WeightsRef) -> None:
        await self._request(lambda n: self._announce(wire.PublishVersion.of(n, weights)), f"version {weights.version}")

    def served_at(self, version: int) -> float | None:
        known, at = self._served
        return at if known == version else None

    async def submit(self, groups: Sequence[Group]) -> None:
        for part in submissions(groups):
            noted = self._cursor.submit(part)
            try:
                await self._request(partial(_submission, part), f"a submission of {len(part)} groups")
            except RequestRefused:
                self._cursor.refused(noted)
                raise
            self._cursor.accept(part)

    def turns(self) -> AsyncIterator[TurnDone]:
        """Finished turns, each once; answer each with `score`, `extend` or `reject`."""
        return aiter(self._turns)

    async def score(self, sample: str, turn: int, reward: float, metrics: Mapping[str, float] | None = None) -> None:
        # Rewards are often numbers of numpy or torch, which no frame carries.
        named = {name: _number(of) for name, of in (metrics or {}).items()}
        excess = wire.excess_of_metrics(named)
        if excess:  # before it is sent: a frame beyond every limit would only end the connection
            raise RequestRefused(f"the score of {sample} was refused: its metrics {excess}")
        with self._verdict_on(sample, turn):
            await self._request(
                lambda n: wire.Score(n, sample, turn=turn, reward=_number(reward), metrics=named),
                f"the score of {sample}",
            )

    async def extend(self, sample: str, turn: int, ids: npt.ArrayLike) -> None:
        given = np.asarray(ids)
        # numpy would make other tokens of them without a word.
        if given.size and not (given.dtype.kind in "iu" and given.min() >= 0 and given.max() < TOKEN_IDS):
            raise RequestRefused(f"the extension of {sample} was refused: token ids are whole, 0 to {TOKEN_IDS - 1}")
        packed = pack_ids(given)
        self._texts.extend(sample, turn, packed)
        with self._verdict_on(sample, turn):
            await self._request(lambda n: wire.Extend(n, sample, turn=turn, ids=packed), f"the extension of {sample}")

    async def reject(self, sample: str, reason: DiscardReason, detail: str) -> None:
        with self._verdict_on(sample):
            await self._request(
                lambda n: wire.Reject(n, sample, reason=reason, detail=detail), f"the rejection of {sample}"
            )

    async def next(
        self,
        step: int,
        *,
        purpose: Purpose,
        min_samples: int,
        max_samples: int,
        max_tokens: int,
        deadline_s: float,
        alone: bool = False,
    ) -> Batch:
        what = f"a batch of step {step} ({purpose})"
        answer = await self._requests.request(
            lambda n: wire.BatchRequest(
                n,
                step,
                purpose=purpose,
                min_samples=min_samples,
                max_samples=max_samples,
                max_tokens=max_tokens,
                deadline_s=deadline_s,
                alone=alone,
            ),
            what,
            deadline_s + self._max_manager_outage_s + ANSWER_S,
        )
        if isinstance(answer, Batch):
            self._cursor.receive(answer)
            return answer
        if isinstance(answer, wire.Late):
            raise DeadlineExceeded(what, f"the rollouts ({answer.waiting_for})", deadline_s)
        raise ProtocolError(f"the manager answered {type(answer).__name__} to BatchRequest")

    async def acknowledge(self, batch: int) -> None:
        self._cursor.acknowledge(batch)
        await self._request(lambda n: wire.Acknowledge(n, batch), f"the acknowledgement of batch {batch}")

    def cover(self, batches: Iterable[tuple[int, int]]) -> None:
        ranges = tuple(batches)
        self._requests.post(lambda n: wire.Covered(n, ranges))

    async def end_step(self, step: int, purpose: Purpose) -> None:
        await self._request(lambda n: wire.EndStep(n, step, purpose=purpose), f"the end of step {step}")
        self._texts.forget(self._cursor.end_step(step, purpose))

    def _announce(self, message: wire.PublishVersion) -> wire.FromTrainer:
        self._cursor.announce(message)
        return message

    def dropped(self) -> AsyncIterator[GroupDropped]:
        return aiter(self._dropped)

    def take_dropped(self) -> list[GroupDropped]:
        """The dropped groups known now; for loops that poll rather than iterate."""
        return self._dropped.take_all()

    async def report(
        self,
        phase: str,
        step: int,
        values: Mapping[str, float],
        samples: Sequence[bytes] = (),
        engines: Sequence[EngineMeasure] = (),
    ) -> None:
        await self._request(
            lambda n: wire.TrainerReport(
                n,
                phase,
                step=step,
                values={name: _number(of) for name, of in values.items()},
                samples=tuple(samples),
                engines=tuple(engines),
            ),
            "a report",
        )

    async def finish(self, ok: bool, message: str) -> None:
        """The job is over: what is left is cancelled, agents are drained, the manager ends. Streams end, too."""
        await self._request(lambda n: wire.FinishRun(n, ok, message=message), "the end of the run")
        self._turns.end()
        self._dropped.end()

    @contextmanager
    def _verdict_on(self, sample: str, turn: int | None = None) -> Iterator[None]:
        """Afterwards the turn (None: the sample's, whichever) is taken again when it comes again: where the verdict did
        not arrive, because its caller was cancelled or waited too long, the manager asks for it, and somebody must hear
        of it."""
        try:
            yield
        finally:
            # All that are open are read for a rejection only: there may be as many as samples, and each has a verdict.
            all_its = [(sample, turn)] if turn is not None else self._turns.known(lambda key: key[0] == sample)
            self._turns.forget(all_its)

    async def _request(self, make: Callable[[int], wire.FromTrainer], what: str) -> None:
        await self._requests.request(make, what, self._max_manager_outage_s + ANSWER_S)

    async def _hold_link(self) -> None:
        """Whatever ends it, whoever waits for an answer or iterates a stream hears of it: nothing more will come."""
        ended: Exception = RunFailed("the connection to the manager was closed")
        try:
            await self._link.run(self._handle, self._on_welcome)
        except PolyRLError as error:
            ended = error
            raise
        except Exception as error:
            ended = RunFailed(f"the connection to the manager broke: {error!r}")
            raise ended from error
        finally:
            self._requests.fail(ended)
            self._turns.end(ended)
            self._dropped.end(ended)

    async def _wait_for_welcome(self, link: asyncio.Task[None], timeout_s: float) -> None:
        either: set[asyncio.Future[Any]] = {link, self._first_welcome}
        done, _ = await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if link in done:
            link.result()
        if not done:
            raise DeadlineExceeded("a welcome", f"the manager at {self._manager}", timeout_s)

    def _on_welcome(self, welcome: TrainerWelcome) -> None:
        if not self._first_welcome.done():
            self._first_welcome.set_result(welcome)
        lost, again = self._cursor.reconcile(welcome)
        for dropped in lost:
            self._dropped.put_once(dropped.group, dropped)
        for message in again:
            self._link.send(message)
        self._requests.send_again()

    def _handle(self, message: wire.ToTrainer) -> None:
        for whole in self._texts.receive(message):
            self._handle_whole(whole)

    def _handle_whole(self, message: wire.ToTrainer) -> None:
        if isinstance(message, TurnDone):
            self._cursor.turn_ended(message.group)
            self._turns.put_once((message.response.sample, message.response.turn), message)
        elif isinstance(message, GroupDropped):
            self._link.send(wire.NoticesTaken((message.group,)))
            self._cursor.drop(message)
            self._texts.forget([message.group])
            self._dropped.put_once(message.group, message)
        elif isinstance(message, wire.VersionServed):
            if message.version != self._served[0]:
                self._served = message.version, time.monotonic()
        elif isinstance(message, wire.Accepted | wire.Declined | Batch | wire.Late):
            if isinstance(message, Batch):
                self._cursor.see(message)
            if self._requests.resolve(message) and isinstance(message, Batch):
                # Not of a batch that was withdrawn: another request gets it, and needs its texts.
                self._texts.forget({scored.group for scored in message.samples})

    def _hello(self) -> wire.TrainerHello:
        cursor, fresh = self._cursor, not self._first_welcome.done()
        # Here, not at the welcome: what follows that on the wire may be read before anyone is woken by it.
        self._texts.reconnect()
        return wire.TrainerHello(
            self._run_epoch,
            acknowledged=-1,
            trainer=self._name,
            next_group=cursor.next_group,
            next_batch=cursor.next_batch,
            fresh=fresh,
            acknowledged_above=tuple(cursor.acknowledged),
            covers=self._covers,
        )

    async def _locate(self) -> str:
        """The manager's endpoint; waits for the file of this run epoch's manager, as long as its absence is borne."""
        if "://" in self._manager:
            return self._manager
        try:
            async with asyncio.timeout(self._max_manager_outage_s):
                path = Path(self._manager)
                while (endpoint := _read_endpoint(path, self._run_epoch)) is None:  # noqa: ASYNC110 - files have no event
                    await asyncio.sleep(ENDPOINTS_POLL_S)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the endpoints file {self._manager}", "the manager", self._max_manager_outage_s
            ) from None
        return endpoint


def _number(value: SupportsFloat) -> float:
    """A float of Python's; a text is none, though it may look like one, and is refused as such when it is sent."""
    return float(value) if isinstance(value, SupportsFloat) else value


def _submission(groups: tuple[Group, ...], request: int) -> wire.Submit:
    return wire.Submit(request, groups)


def _read_endpoint(path: Path, run_epoch: int) -> str | None:
    """The trainer's endpoint in the file at `path`; None while there is none, or one of another run epoch."""
    try:
        endpoints = parse_endpoints(path.read_bytes(), str(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidData(f"{path}: the endpoints file cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InvalidData(str(error)) from None
    return endpoints.trainer if endpoints.run_epoch == run_epoch else None
