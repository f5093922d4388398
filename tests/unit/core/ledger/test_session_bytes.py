"""Bytes of all messages on all links, per token of the responses, through ledger, agent's protocol and trainer's texts.

A token that an engine makes takes 8 bytes, id and logprob, on each of its two ways; one that an environment writes 4 on
each of its two. So a session of tools stays below GOAL_BYTES however long it is, and greetings do not change it.
"""

from __future__ import annotations

from random import Random
from typing import Final

import pytest

from polyrl import wire
from polyrl.ledger import Effects
from polyrl.sample import Finish, Pool, sample_id
from polyrl_rollout.agent.protocol import AgentProtocol, Stream
from polyrl_rollout.engines.port import TokenChunk
from polyrl_rollout.testing.flow import Flow, Speed
from polyrl_rollout.testing.stage import Stage

GOAL_BYTES: Final = 16
GENERATED: Final = 40
WRITTEN: Final = 40
FRAME_TOKENS: Final = 10
"""That an engine makes of each sample between two frames: 0.03 s at 300 tokens/s."""
N: Final = 4
STOP: Final = 2


class Session(Stage):
    """One group on one engine: every turn is generated and extended; every message is counted in bytes."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}
        self.protocol = AgentProtocol()
        self.turns: dict[str, wire.TurnDone] = {}
        self.batches: list[wire.Batch] = []
        self._open: set[tuple[str, int]] = set()
        self.texts = wire.SampleTexts(self.trainer, lambda sample, turn: (sample, turn) in self._open)
        super().__init__()
        self.greet_agent()
        self.engine_serves()

    def engine_serves(self) -> None:
        self.agent("a", wire.WeightsLoaded(0, 0.1, load_seconds=0.1, bytes_pulled=1))

    def greet_agent(self) -> None:
        self.protocol.disconnect()
        version = 0 if self.bytes.get("WeightsLoaded") else -1
        limits = {"max_running": 64, "kv_tokens": 1 << 20, "max_context": 1 << 20, "weight_version": version}
        self.agent("a", wire.Hello(1, "a", pool=Pool.SPOT, held=self.protocol.book.held(), **limits))

    def greet_trainer(self) -> None:
        self.texts.reconnect()
        self.trainer(wire.TrainerHello(1, -1))

    def agent(self, engine: str, message: wire.FromAgent) -> Effects:
        self._count(message)
        return super().agent(engine, message)

    def trainer(self, message: wire.FromTrainer) -> Effects:
        self._count(message)
        return super().trainer(message)

    def _count(self, message: wire.FromAgent | wire.ToAgent | wire.FromTrainer | wire.ToTrainer) -> None:
        kind = type(message).__name__
        self.bytes[kind] = self.bytes.get(kind, 0) + len(wire.encode(message))

    def _keep(self, outcome: Effects) -> Effects:
        for name, message in outcome.to_agents:
            self._count(message)
            self.protocol.receive(message, self.now)
            if isinstance(message, wire.Assign):
                answer = self.protocol.accept(message, 0)
                if isinstance(answer, wire.PrefixUnknown):
                    self.agent(name, answer)
        for answer in outcome.to_trainer:
            self._count(answer)
            for whole in self.texts.receive(answer):
                self._take(whole)
        return super()._keep(outcome)

    def _take(self, message: wire.ToTrainer) -> None:
        if isinstance(message, wire.TurnDone):
            self.turns[message.response.sample] = message
            self._open.add((message.response.sample, message.response.turn))
        elif isinstance(message, wire.Batch):
            self.batches.append(message)

    def generate_turn(self) -> None:
        for begin in range(0, GENERATED, FRAME_TOKENS):
            self.now += 0.03
            for stream in self.protocol.book.unfinished():
                self._generate(stream, last=begin + FRAME_TOKENS == GENERATED)
            for frame in self.protocol.book.pack(self.now, 0.03):
                self.agent("a", frame)

    def _generate(self, stream: Stream, *, last: bool) -> None:
        count = FRAME_TOKENS
        ids = [stream.length + index + 100 for index in range(count)]
        finish = Finish.STOP if last else None
        chunk = TokenChunk([*ids[:-1], STOP] if last else ids, [-0.5] * count, version=0, finish=finish)
        self.protocol.book.add(stream.assign.assignment, chunk, self.now)

    def answer_all(self, *, extend: bool) -> None:
        for sample, turn in tuple(self.turns.items()):
            del self.turns[sample]
            self._open.discard((sample, turn.response.turn))
            if extend:
                self.texts.extend(sample, turn.response.turn, wire.pack_ids([7] * WRITTEN))
                self.extend(sample, [7] * WRITTEN, turn.response.turn)
            else:
                self.score(sample, turn=turn.response.turn)

    def play(self, turns: int, greet_every: int) -> Session:
        self.submit(1, n=N, max_new_tokens=GENERATED * turns)
        for turn in range(turns):
            self.generate_turn()
            if turn % greet_every == greet_every - 1:
                self.greet_agent()
                self.greet_trainer()
            self.answer_all(extend=turn + 1 < turns)
        self.ask()
        return self

    def whole_text(self, sample: str) -> bytes:
        return bytes(self.ledger.state.samples[sample].ids)


@pytest.mark.parametrize("greet_every", [1, 1000], ids=["greetings in every turn", "none"])
@pytest.mark.parametrize("turns", [10, 100])
def test_bytes_are_linear_in_tokens(turns: int, greet_every: int) -> None:
    session = Session().play(turns, greet_every)
    tokens = N * (GENERATED * turns + WRITTEN * (turns - 1))
    per_token = sum(session.bytes.values()) / tokens
    shown = {kind: round(size / tokens, 2) for kind, size in sorted(session.bytes.items(), key=lambda item: -item[1])}
    assert per_token <= GOAL_BYTES, shown


def test_what_is_handed_out_is_whole() -> None:
    session = Session().play(5, 2)
    (batch,) = session.batches
    for index, scored in enumerate(batch.samples):
        response = scored.response
        assert response.ids == session.whole_text(sample_id(0, index))
        assert (len(response.loss_mask), len(response.logprobs)) == (len(response.ids) // 4, len(response.ids))
        assert sum(response.loss_mask) == 5 * GENERATED
        assert [(span.start, span.end) for span in response.spans] == [
            (begin + part, begin + part + 40) for begin in range(0, 400, 80) for part in (0, 40)
        ][:-1]


def test_a_greeting_costs_a_name_and_not_a_text() -> None:
    session = Session()
    session.submit(1, n=N, max_new_tokens=4 * GENERATED)
    session.generate_turn()
    before = dict(session.bytes)
    for _ in range(10):
        session.greet_trainer()
    assert session.bytes["TurnDone"] == before["TurnDone"]
    assert session.bytes["TurnsAwaited"] < 10 * N * 16


class Competing(Flow):
    """More sessions than slots, on engines of differing speed: turns go wherever there is room."""

    def __init__(self, turns: int) -> None:
        self.assigned = 0
        engines = {name: Speed(0.01 * (1 + place), max_running=2) for place, name in enumerate("abcd")}
        verdicts = Random(1)
        super().__init__(
            engines, lambda sample, turn: 40, turns=turns, environment=40, verdict_s=lambda s, t: verdicts.uniform(0, 1)
        )
        self.submit(4, n=4, max_new_tokens=40 * turns)
        self.run()

    def _keep(self, outcome: Effects) -> Effects:
        self.assigned += sum(len(wire.encode(one)) for _, one in outcome.to_agents if isinstance(one, wire.Assign))
        return super()._keep(outcome)


def test_an_engine_gets_a_text_once_however_often_a_session_comes_back() -> None:
    """Only the engine of the last turn was counted on to have it: 34 bytes per token at 100 turns, and growing."""
    few, many = (Competing(turns).assigned / turns for turns in (12, 36))
    assert many < 1.25 * few
