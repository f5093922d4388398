"""Pages: whenever a journal is cut off, snapshot + pages + events give the state back, to the byte."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest

from polyrl.errors import ProtocolError
from polyrl.ledger import Effects, Event, Ledger, LedgerConfig, journal as form
from polyrl.ledger.apply import apply
from polyrl.ledger.events import GroupSubmitted
from polyrl.ledger.journal import PageBook, PageRow, decode_state, encode_state
from polyrl.ledger.state import LedgerState
from polyrl.sample import Group, Pool, Purpose, SamplingParams
from polyrl.wire import (
    Acknowledge,
    Batch,
    BatchRequest,
    Deltas,
    EndStep,
    Hello,
    PublishVersion,
    Score,
    Submit,
    TrainerHello,
    WeightsLoaded,
    pack_ids,
    pack_rows,
)

ENGINES = ("one", "two")
BUDGET = 12
STEPS = 120


class Run:
    """A ledger at work, and beside it what a journal would hold of it: snapshot, pages, events after the snapshot."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.ledger = Ledger(LedgerConfig(run_epoch=1))
        self.book = PageBook()
        self.pages: dict[int, PageRow] = {}
        self.snapshot = encode_state(self.ledger.state)
        self.last_page = 0
        self.tail: list[Event] = []
        self.requests = iter(range(1, 10_000))
        self.groups = iter(range(1, 10_000))
        self.now = 0.0
        self._trainer(TrainerHello(1, -1))
        self._trainer(
            PublishVersion(next(self.requests), 0, endpoint="tcp://publisher", public_key="key", manifest_hash=b"hash")
        )
        for name in ENGINES:
            self._agent(
                name,
                Hello(1, name, pool=Pool.SPOT, max_running=8, kv_tokens=10_000, max_context=10_000, weight_version=-1),
            )
            self._agent(name, WeightsLoaded(0, 1.0, load_seconds=1.0, bytes_pulled=1))

    def step(self) -> None:
        """One random thing happens."""
        self.now += 0.01
        act: Callable[[], None] = self.random.choice(
            (self.submit, self.tokens, self.tokens, self.tokens, self.score, self.take, self.end_step, self.write_pages)
        )
        act()

    def submit(self) -> None:
        number = next(self.groups)
        group = Group(
            number,
            0,
            purpose=Purpose.TRAIN,
            prompt_ids=pack_ids([number, 2]),
            n=2,
            sampling=SamplingParams(BUDGET),
            min_version=0,
            max_version=0,
        )
        self._trainer(Submit(next(self.requests), (group,)))

    def tokens(self) -> None:
        engine = self.ledger.state.engines[self.random.choice(ENGINES)]
        rows = []
        for number in engine.running:
            assignment = self.ledger.state.assignments[number]
            if self.random.random() < 0.7:
                rows.append((number, assignment.length, min(3, assignment.limit - assignment.length), 0))
        count = sum(row[2] for row in rows)
        ids = pack_ids([self.random.randrange(1000) for _ in range(count)])
        if rows:
            self._agent(
                engine.name, Deltas(1, 0, rows=pack_rows(rows), ids=ids, logprobs=self.random.randbytes(4 * count))
            )

    def score(self) -> None:
        for name in tuple(self.ledger.state.awaiting_verdict):
            self._trainer(Score(next(self.requests), name, turn=0, reward=self.random.random(), metrics={}))

    def take(self) -> None:
        outcome = self._trainer(
            BatchRequest(
                next(self.requests),
                0,
                purpose=Purpose.TRAIN,
                min_samples=1,
                max_samples=4,
                max_tokens=10_000,
                deadline_s=0.0,
            )
        )
        for answer in outcome.to_trainer:
            if isinstance(answer, Batch) and self.random.random() < 0.7:
                self._trainer(Acknowledge(next(self.requests), answer.number))

    def end_step(self) -> None:
        if self.random.random() < 0.1:
            self._trainer(EndStep(next(self.requests), 0, purpose=Purpose.TRAIN))

    def write_pages(self) -> None:
        """A few pages of the round; a snapshot when it is over."""
        if not self.book.under_way:
            self.book.begin_round(self.ledger.state)
        for row in self.book.write(self.ledger.state, self.random.randrange(1, 5)):
            self.pages[row[0]] = row
        if not self.book.under_way:
            self.snapshot = encode_state(self.book.rest(self.ledger.state))
            for number in self.book.forget_ended(self.ledger.state):
                del self.pages[number]
            self.last_page = self.book.last
            self.tail.clear()

    def kept_pages(self) -> list[PageRow]:
        """What a reader takes: not those of a round that did not end."""
        return [row for number, row in sorted(self.pages.items()) if number <= self.last_page]

    def restored(self) -> tuple[LedgerState, PageBook]:
        """What a restart makes of it."""
        state, book = decode_state(self.snapshot), PageBook()
        book.restore(state, self.kept_pages())
        for event in self.tail:
            apply(state, event)
        return state, book

    def restart(self) -> None:
        """The process ends and another takes over."""
        state, self.book = self.restored()
        self.book.last = self.last_page
        self.ledger = Ledger(state.config, state)
        self.pages = {row[0]: row for row in self.kept_pages()}

    def _trainer(self, message: object) -> Effects:
        return self._keep(self.ledger.from_trainer(message, self.now))

    def _agent(self, name: str, message: object) -> Effects:
        return self._keep(self.ledger.from_agent(name, message, self.now))

    def _keep(self, outcome: Effects) -> Effects:
        self.tail.extend(outcome.events)
        return outcome


@pytest.mark.parametrize("seed", range(25))
def test_a_journal_cut_off_anywhere_gives_the_state_back(seed: int) -> None:
    run = Run(seed)
    for _ in range(STEPS):
        run.step()
        if run.random.random() < 0.3:
            assert encode_state(run.restored()[0]) == encode_state(run.ledger.state)
        if run.random.random() < 0.05:
            run.restart()


def grown(seed: int = 3) -> Run:
    """A run with live samples, some of their tokens in pages of a finished round."""
    run = Run(seed)
    for _ in range(4):
        run.submit()
    for _ in range(2):
        run.tokens()
    run.write_pages()
    while run.book.under_way:
        run.write_pages()
    assert len(run.kept_pages()) > 4, "prompts and tokens"
    return run


def test_what_is_in_pages_is_not_in_the_snapshot() -> None:
    run = grown()
    bare = decode_state(run.snapshot)
    assert all(not sample.ids and not sample.logprobs for sample in bare.samples.values())
    assert all(not entry.group.prompt_ids for entry in bare.groups.values())


def test_a_round_without_news_writes_nothing() -> None:
    run = grown()
    run.book.begin_round(run.ledger.state)
    assert run.book.write(run.ledger.state, 1000) == []


def test_a_damaged_page_is_refused() -> None:
    run = grown()
    number, name, body, checksum = run.kept_pages()[-1]
    run.pages[number] = (number, name, bytes([body[0] ^ 1]) + body[1:], checksum)
    with pytest.raises(ProtocolError, match=f"the checksum of page {number} does not match"):
        run.restored()


def test_more_live_samples_than_a_run_has_are_not_made() -> None:
    """An event of a hundred bytes claimed as many as its reader's memory could not hold."""
    run = grown()
    state = encode_state(run.ledger.state)
    group = msgspec.structs.replace(
        next(iter(run.ledger.state.groups.values())).group, id=9_999, n=form.MAX_LIVE_SAMPLES
    )
    events = form.encode_events([GroupSubmitted(group, 0.0)])
    with pytest.raises(ProtocolError, match="more than 1,000,000 samples live at once"):
        form.replay(form.row(7, 1.0, state), [form.row(8, 1.0, events)])


def test_any_missing_page_is_noticed() -> None:
    run = grown()
    for number in [row[0] for row in run.kept_pages()]:
        row = run.pages.pop(number)
        with pytest.raises(ProtocolError, match=r"is missing|of its"):
            run.restored()
        run.pages[number] = row


def test_a_page_of_nothing_is_refused() -> None:
    run = grown()
    for row in run.kept_pages():
        run.ledger.state.groups.clear()
        run.ledger.state.samples.clear()
        book = PageBook()
        with pytest.raises(ProtocolError, match="neither a live sample nor a live group"):
            book.restore(run.ledger.state, [row])


def test_a_snapshot_that_holds_everything_needs_no_pages() -> None:
    run = grown()
    replayed = form.replay(form.row(7, 1.0, encode_state(run.ledger.state)), [])
    assert replayed is not None
    assert encode_state(replayed.state) == encode_state(run.ledger.state)
