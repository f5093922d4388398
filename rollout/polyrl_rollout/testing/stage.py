"""A ledger driven by hand, one event per call: for table tests and for trying things out in a Python prompt.

stage = Stage()
stage.engine("a")
stage.submit(n=2)
stage.tokens("a", 1, [5, 6], finish="stop")
print(stage.ledger.status(stage.now))
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from polyrl.ledger import Effects, Event, Ledger, LedgerConfig
from polyrl.ledger.apply import apply
from polyrl.ledger.fleet import Fleet
from polyrl.ledger.state import LedgerState
from polyrl.sample import DiscardReason, Group, Pool, Purpose, SamplingParams
from polyrl.weights import WeightsRef
from polyrl.wire import (
    FINISH_CODES,
    Acknowledge,
    BatchRequest,
    Deltas,
    Extend,
    FromAgent,
    FromTrainer,
    GroupDropped,
    HandBack,
    HandBackReason,
    Hello,
    NoticesTaken,
    PublishVersion,
    Reject,
    Score,
    Submit,
    TrainerHello,
    WeightsLoaded,
    pack_ids,
    pack_rows,
)
from polyrl_rollout.testing.simulation.model import logprobs_of

M = TypeVar("M")


class Stage:
    """Greets as the trainer and publishes version 0 at once."""

    def __init__(self, config: LedgerConfig | None = None) -> None:
        self.ledger = Ledger(config or LedgerConfig(run_epoch=1))
        self.now = 0.0
        self.events: list[Event] = []
        self.takes_notices = True
        """The trainer says at once that it knows of what was dropped, as a client does."""
        self._request = 0
        self._group = 0
        self._seq: dict[str, int] = {}
        self.trainer(TrainerHello(1, -1))
        self.publish(0)

    def agent(self, engine: str, message: FromAgent) -> Effects:
        """One message of an agent."""
        return self._keep(self._current().from_agent(engine, message, self.now))

    def trainer(self, message: FromTrainer) -> Effects:
        """One message of the trainer."""
        return self._keep(self._current().from_trainer(message, self.now))

    def _current(self) -> Ledger:
        """The ledger, for a state that may have been changed by hand."""
        self.ledger.fleet = Fleet(self.ledger.state)
        return self.ledger

    def pass_time(self, seconds: float) -> Effects:
        """Time passes, then the ledger looks through its deadlines."""
        self.now += seconds
        return self._keep(self._current().tick(self.now))

    def pass_time_heard(self, seconds: float) -> None:
        """Time passes second by second, and every engine is heard."""
        for _ in range(round(seconds)):
            self.now += 1.0
            for name in tuple(self.ledger.state.engines):
                self.tokens(name, 0, [])
            self._keep(self._current().tick(self.now))

    def give_back(self) -> None:
        """Engines give back what they were asked for."""
        for number, assignment in tuple(self.ledger.state.assignments.items()):
            if assignment.recall_cause:
                self.agent(assignment.engine, HandBack(number, HandBackReason.RECALLED))

    def drain(self, engine: str, seconds: float) -> Effects:
        """The operator's drain."""
        return self._keep(self._current().drain(engine, seconds, "drained by a test", self.now))

    def engine(
        self,
        name: str,
        pool: Pool = Pool.SPOT,
        version: int = 0,
        *,
        max_running: int = 8,
        kv_tokens: int = 100_000,
        max_context: int = 4096,
        sleeps: bool = False,
        asleep: bool = False,
    ) -> Effects:
        """An engine greets and serves `version`; -1: it only greets."""
        outcome = self.agent(
            name,
            Hello(
                1,
                name,
                pool=pool,
                max_running=max_running,
                kv_tokens=kv_tokens,
                max_context=max_context,
                weight_version=-1,
                sleeps=sleeps,
                asleep=asleep,
            ),
        )
        if version < 0:
            return outcome
        return self.agent(name, WeightsLoaded(version, 0.1, load_seconds=0.1, bytes_pulled=100))

    def publish(self, version: int, vocabulary: int = 0, positions: int = 0) -> Effects:
        """The trainer publishes weights."""
        where = WeightsRef(
            version,
            "tcp://publisher",
            public_key="key",
            manifest_hash=b"hash",
            vocabulary=vocabulary,
            positions=positions,
        )
        return self.trainer(PublishVersion.of(self.request(), where))

    def submit(self, count: int = 1, n: int = 1, **fields: Any) -> Effects:
        """The trainer submits `count` groups; `fields` are those of Group, and max_new_tokens, stop_token_ids."""
        sampling = SamplingParams(fields.pop("max_new_tokens", 100), stop_token_ids=fields.pop("stop_token_ids", (2,)))
        default: dict[str, Any] = {
            "step": 0,
            "purpose": Purpose.TRAIN,
            "prompt_ids": pack_ids([9] * 10),
            "n": n,
            "sampling": sampling,
        }
        default |= {"min_version": 0, "max_version": 0} | fields
        groups = tuple(Group(**({"id": self._group + index} | default)) for index in range(count))
        self._group += count
        return self.trainer(Submit(self.request(), groups))

    def tokens(
        self, engine: str, assignment: int, ids: Sequence[int], finish: str | None = None, **claims: int
    ) -> Effects:
        """One row of tokens; `claims`: offset (default: where the ledger is), version (default 0)."""
        live = self.ledger.state.assignments.get(assignment)
        offset = claims.get("offset", live.length if live else 0)
        column = np.array(ids, dtype="<u4")
        rows = [(assignment, offset, len(ids), FINISH_CODES.index(finish))] if assignment else []
        self._seq[engine] = self._seq.get(engine, 0) + 1
        message = Deltas(
            self._seq[engine],
            claims.get("version", 0),
            rows=pack_rows(rows),
            ids=column.tobytes(),
            logprobs=logprobs_of(column),
        )
        return self.agent(engine, message)

    def score(self, sample: str, reward: float = 1.0, turn: int = 0) -> Effects:
        """The trainer's verdict."""
        return self.trainer(Score(self.request(), sample, turn=turn, reward=reward))

    def extend(self, sample: str, ids: Sequence[int], turn: int = 0) -> Effects:
        """An environment's tokens."""
        return self.trainer(Extend(self.request(), sample, turn=turn, ids=pack_ids(ids)))

    def reject(self, sample: str, reason: DiscardReason = DiscardReason.REWARD_RAISED) -> Effects:
        """The trainer's rejection."""
        return self.trainer(Reject(self.request(), sample, reason=reason, detail="said so"))

    def ask(self, least: int = 1, most: int = 64, **fields: Any) -> Effects:
        """The trainer asks for a batch; `fields` are those of BatchRequest."""
        default: dict[str, Any] = {"step": 0, "purpose": Purpose.TRAIN, "max_tokens": 10**6, "deadline_s": 60.0}
        default |= {"request": self.request()} | fields
        return self.trainer(BatchRequest(min_samples=least, max_samples=most, **default))

    def acknowledge(self, batch: int) -> Effects:
        """The trainer's acknowledgement."""
        return self.trainer(Acknowledge(self.request(), batch))

    def request(self) -> int:
        """A fresh request number."""
        self._request += 1
        return self._request

    def finish_all(self) -> None:
        """Every assigned sample stops, and is scored 1."""
        for number, assignment in tuple(self.ledger.state.assignments.items()):
            self.tokens(assignment.engine, number, [5, 2], "stop")
            self.score(assignment.sample)

    def placed(self) -> dict[str, list[str]]:
        """Samples by engine."""
        found: dict[str, list[str]] = {name: [] for name in self.ledger.state.engines}
        for assignment in self.ledger.state.assignments.values():
            found[assignment.engine].append(assignment.sample)
        return found

    def number(self, sample: str) -> int:
        """The live assignment of a sample, 0 for none."""
        return self.ledger.state.samples[sample].assignment

    def _keep(self, outcome: Effects) -> Effects:
        self.events += outcome.events
        dropped = tuple(one.group for one in outcome.to_trainer if isinstance(one, GroupDropped))
        if dropped and self.takes_notices:
            after = self._keep(self.ledger.from_trainer(NoticesTaken(dropped), self.now))
            outcome.to_agents += after.to_agents
            outcome.to_trainer += after.to_trainer
        return outcome


def sent(outcome: Effects, kind: type[M] | tuple[type[M], ...]) -> list[M]:
    """The messages of one kind or of several, to whomever."""
    messages = [*(message for _, message in outcome.to_agents), *outcome.to_trainer]
    return [message for message in messages if isinstance(message, kind)]


def snapshot(ledger: Ledger) -> bytes:
    """The whole state, comparable."""
    return msgspec.msgpack.encode(ledger.state)


def replay(config: LedgerConfig, history: Iterable[Event]) -> LedgerState:
    """The state after `history`."""
    state = LedgerState(config)
    for event in history:
        apply(state, event)
    return state
