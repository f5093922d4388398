"""Agents and a trainer small enough to be explored whole: values that can be copied, compared and hashed.

They keep the protocol. What may go wrong between them and the ledger is `explore`'s choice, one message at a time. The
agent is not the real one's `TokenBook`, which counts frames, keeps times and every token: two states that no further
message can tell apart would differ in it, and the states to visit would have no end.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
import numpy as np

from polyrl.sample import Group, Pool, Purpose, SamplingParams
from polyrl.wire import (
    Accepted,
    Acknowledge,
    Announce,
    Assign,
    Batch,
    BatchRequest,
    Cancel,
    Declined,
    Deltas,
    Deregister,
    Fenced,
    Fetch,
    GroupDropped,
    HandBack,
    HandBackReason,
    HeldAssignment,
    Hello,
    Late,
    NoticesTaken,
    PublishVersion,
    Recall,
    Resend,
    Score,
    StartDrain,
    Submit,
    TokensKept,
    TrainerHello,
    TurnDone,
    TurnsAwaited,
    WeightsLoaded,
    Welcome,
    encode,
    pack_ids,
    pack_rows,
)
from polyrl_rollout.testing.simulation.invariants import Violation
from polyrl_rollout.testing.simulation.model import logprobs_of

EPOCH: Final = 1
STOP: Final = 2
LENGTH: Final = 2
"""Tokens of a response: one to be cut at, one to end with."""
PROMPT: Final = pack_ids([9])


def text(sample: str) -> bytes:
    """The response of a sample. Those of even index end with a stop token, the others use up their budget."""
    group, index = (int(part) for part in sample.split("."))
    first = 100 + 10 * group + index
    return pack_ids([first, STOP if index % 2 == 0 else first + 1])


class Run(msgspec.Struct):
    """One assignment as its agent sees it."""

    sample: str
    attempt: int
    offset: int
    position: int
    sent: int
    finish_seq: int = 0
    """The frame that carried its end; 0: none yet."""


class SmallAgent(msgspec.Struct):
    """An agent with its engine; `name` is another one for each process."""

    name: str
    dialling: bool = False
    """Its greeting has not arrived."""
    welcomed: bool = False
    frozen: bool = False
    leaving: bool = False
    seq: int = 0
    runs: dict[int, Run] = msgspec.field(default_factory=dict)
    inbox: list[bytes] = msgspec.field(default_factory=list)
    outbox: list[bytes] = msgspec.field(default_factory=list)

    def connect(self) -> None:
        """Dials anew: what was under way is lost."""
        self.inbox.clear()
        self.outbox.clear()
        self.greet()

    def greet(self) -> None:
        """Says what it holds."""
        self.dialling, self.welcomed, self.seq = True, False, 0
        held = tuple(
            HeldAssignment(number, run.sample, attempt=run.attempt, length=run.position)
            for number, run in self.runs.items()
        )
        self.send(
            Hello(
                EPOCH,
                self.name,
                pool=Pool.SPOT,
                max_running=2,
                kv_tokens=1000,
                max_context=100,
                weight_version=0,
                held=held,
                seq=self.seq,
            )
        )

    def send(self, message: Any) -> None:
        """Queues a message."""
        self.outbox.append(encode(message))

    def receive(self, message: Any) -> None:
        """One message of the manager."""
        if isinstance(message, Welcome):
            self.welcomed = True
        elif isinstance(message, Fenced):
            self._begin_anew(message)
        elif isinstance(message, Announce):
            self.send(WeightsLoaded(message.version, 0.0, load_seconds=0.0, bytes_pulled=0))
        elif isinstance(message, Assign):
            self._take(message)
        elif isinstance(message, Cancel):
            self.runs.pop(message.assignment, None)
        elif isinstance(message, Recall):
            self._give_back(message.assignment)
        elif isinstance(message, TokensKept):
            self.runs = {n: r for n, r in self.runs.items() if not 0 < r.finish_seq <= message.seq}
        elif isinstance(message, Resend):
            self._resend(message)
        elif isinstance(message, StartDrain) and not self.leaving:
            self._hand_back()

    def has_work(self) -> bool:
        """Whether `step` would send something."""
        return (
            self.welcomed and not self.frozen and not self.leaving and any(not r.finish_seq for r in self.runs.values())
        )

    def step(self) -> None:
        """One more token for each run, and a frame with all that was not sent."""
        self.seq += 1
        rows, ids = [], b""
        for number, run in self.runs.items():
            if run.finish_seq:
                continue
            run.position = min(run.position + 1, LENGTH)
            tokens = text(run.sample)[4 * run.sent : 4 * run.position]
            finish = 0
            if run.position == LENGTH:
                finish, run.finish_seq = (1 if tokens.endswith(pack_ids([STOP])) else 2), self.seq
            rows.append((number, run.sent, len(tokens) // 4, finish))
            ids += tokens
            run.sent = run.position
        self.send(
            Deltas(self.seq, 0, rows=pack_rows(rows), ids=ids, logprobs=logprobs_of(np.frombuffer(ids, dtype="<u4")))
        )

    def _begin_anew(self, fenced: Fenced) -> None:
        # One Fenced for each message that was under way; the greeting is, after the first.
        if self.welcomed:
            if not fenced.lease_over:
                self.runs.clear()
            self.greet()

    def _take(self, assign: Assign) -> None:
        number, offset = assign.assignment, assign.offset
        if self.leaving:
            self.send(HandBack(number, HandBackReason.DRAINING))
        else:
            self.runs[number] = Run(assign.sample, assign.attempt, offset=offset, position=offset, sent=offset)

    def _resend(self, resend: Resend) -> None:
        run = self.runs.get(resend.assignment)
        if run is None:
            return
        if resend.offset < run.offset:
            raise Violation(0.0, "I10", f"{self.name} is asked for position {resend.offset}, which it was given")
        if resend.offset < run.sent or resend.offset < LENGTH:
            run.sent, run.finish_seq = min(run.sent, resend.offset), 0

    def _give_back(self, number: int) -> None:
        run = self.runs.get(number)
        if run is not None and not run.finish_seq:
            del self.runs[number]
            self.send(HandBack(number, HandBackReason.RECALLED))

    def _hand_back(self) -> None:
        self.leaving = True
        for number in self.runs:
            self.send(HandBack(number, HandBackReason.DRAINING))
        self.runs.clear()
        self.send(Deregister("leaving"))


class SmallTrainer(msgspec.Struct):
    """Submits, scores everything 1, takes batches and acknowledges them, until all is trained."""

    groups: int
    n: int
    request: int = 0
    unanswered: dict[int, bytes] = msgspec.field(default_factory=dict)
    acknowledging: list[int] = msgspec.field(default_factory=list)
    """Requests of acknowledgements under way."""
    scored: list[str] = msgspec.field(default_factory=list)
    trained: list[str] = msgspec.field(default_factory=list)
    batches: list[int] = msgspec.field(default_factory=list)
    inbox: list[bytes] = msgspec.field(default_factory=list)
    outbox: list[bytes] = msgspec.field(default_factory=list)

    def begin(self) -> None:
        """Everything it has to say unasked."""
        self.connect()
        sampling = SamplingParams(LENGTH, stop_token_ids=(STOP,))
        groups = tuple(
            Group(
                g,
                0,
                purpose=Purpose.TRAIN,
                prompt_ids=PROMPT,
                n=self.n,
                sampling=sampling,
                min_version=0,
                max_version=0,
            )
            for g in range(self.groups)
        )
        self.ask(
            PublishVersion(self.request + 1, 0, endpoint="tcp://publisher", public_key="key", manifest_hash=b"hash")
        )
        self.ask(Submit(self.request + 1, groups))
        self.ask_batch()

    @property
    def done(self) -> bool:
        """All trained, and the manager knows."""
        return len(self.trained) == self.groups * self.n and not self.acknowledging

    def connect(self) -> None:
        """Dials anew: what was under way is lost, what is unanswered is said again."""
        self.inbox.clear()
        self.outbox.clear()
        self.outbox.append(encode(TrainerHello(EPOCH, max(self.batches, default=-1))))
        self.outbox.extend(self.unanswered.values())

    def ask(self, message: Any) -> None:
        """Says it until it is answered; its request number is the next one."""
        self.request = message.request
        self.unanswered[message.request] = encode(message)
        self.outbox.append(self.unanswered[message.request])

    def ask_batch(self) -> None:
        """For one group at least."""
        most = self.groups * self.n - len(self.trained)
        self.ask(
            BatchRequest(
                self.request + 1,
                0,
                purpose=Purpose.TRAIN,
                min_samples=1,
                max_samples=most,
                max_tokens=1000,
                deadline_s=6.0,
            )
        )

    def receive(self, message: Any) -> None:
        """One message of the manager."""
        if isinstance(message, Fenced):
            self.connect()
        elif isinstance(message, TurnDone):
            if message.response.sample not in self.scored:
                self.scored.append(message.response.sample)
                self.ask(Score(self.request + 1, message.response.sample, turn=0, reward=1.0))
        elif isinstance(message, TurnsAwaited):
            for sample, _ in message.turns:
                if sample not in self.scored:
                    self.outbox.append(encode(Fetch(0, (sample,))))
        elif isinstance(message, GroupDropped):
            self.outbox.append(encode(NoticesTaken((message.group,))))
        elif isinstance(message, Declined):
            raise Violation(0.0, "refused", message.reason)
        elif isinstance(message, Accepted | Batch | Late) and message.request in self.unanswered:
            del self.unanswered[message.request]
            self._take(message)

    def _take(self, answer: Accepted | Batch | Late) -> None:
        if isinstance(answer, Accepted):
            self.acknowledging = [number for number in self.acknowledging if number != answer.request]
            return
        if isinstance(answer, Batch) and answer.samples:
            self.trained += [scored.response.sample for scored in answer.samples]
            self.batches.append(answer.number)
            self.ask(Acknowledge(self.request + 1, answer.number))
            self.acknowledging.append(self.request)
        if len(self.trained) < self.groups * self.n:
            self.ask_batch()
