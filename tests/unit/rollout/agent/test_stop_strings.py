"""A stop string of several tokens ends generation at the engine, with the tokens that the learner's own cut keeps."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import pytest

from polyrl.manifest.recipe import RecipeSpec
from polyrl.sample import Finish, SamplingParams
from polyrl.stop_strings import end_of_stop
from polyrl.weights import TOKENIZER_FILE
from polyrl.wire import Assign, HandBackReason, Welcome, pack_ids
from polyrl_rollout.agent.generating import Generation
from polyrl_rollout.agent.protocol import AgentProtocol, Stream
from polyrl_rollout.agent.stop_strings import Decode, StopStrings, read_tokenizer
from polyrl_rollout.engines.port import EngineFailed, GenerateRequest, TokenChunk
from polyrl_trainer.data.tokenizers import CharacterTokenizer
from polyrl_trainer.preparation import spelled_stops, stop_files

TOKENIZER = CharacterTokenizer("abc. \n</>é")
PROMPT = TOKENIZER.encode_text("..a")
VERSION = 3


@pytest.fixture
def decode(tmp_path: Path) -> Decode:
    TOKENIZER.save(tmp_path)
    found = read_tokenizer(tmp_path)
    assert found is not None
    return found


class WritingEngine:
    """Writes one text, some tokens at a time, and on and on."""

    def __init__(self, text: str, chunk: int = 1, *, finish: Finish | None = None) -> None:
        self.ids, self.chunk, self.finish = TOKENIZER.encode_text(text), chunk, finish
        self.version = VERSION
        self.given = 0
        self.closed = False

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk]:
        try:
            for begin in range(0, len(self.ids), self.chunk):
                new = self.ids[begin : begin + self.chunk]
                self.given += len(new)
                is_last = begin + self.chunk >= len(self.ids)
                finish = self.finish if is_last else None
                yield TokenChunk(new, [-1.0 - i for i in range(len(new))], version=VERSION, finish=finish)
        finally:
            self.closed = True


class Handler:
    def __init__(self) -> None:
        self.handed_back: list[tuple[HandBackReason, str]] = []

    def on_tokens(self) -> None:
        pass

    def hand_back(self, assignment: int, reason: HandBackReason, detail: str) -> None:
        self.handed_back.append((reason, detail))

    def engine_failed(self, error: EngineFailed) -> None:
        raise error


async def generated(
    engine: WritingEngine, stop: Sequence[str], decode: Decode | None, held: str = "", turn_start: int = 0
) -> tuple[Stream, Handler]:
    protocol, handler = AgentProtocol(), Handler()
    protocol.receive(Welcome(run_epoch=1, lease_s=3.0, beat_s=1.0, delta_s=0.03), 0.0)
    generation = Generation(engine, protocol.book, handler, seed=0)  # type: ignore[arg-type]
    generation.decode = decode
    generation.update_room()
    ids = TOKENIZER.encode_text(held)
    sampling = SamplingParams(64, stop=tuple(stop))
    versions = {"min_version": VERSION, "max_version": VERSION, "turn_start": turn_start}
    assign = Assign(1, "1.0", 1, pack_ids([*PROMPT, *ids]), len(ids), 64, sampling, **versions)
    stream = protocol.accept(assign, VERSION)
    assert isinstance(stream, Stream)
    generation.start(stream)
    await asyncio.gather(*(run.task for run in generation._running.values()))
    assert not len(generation)
    assert engine.closed or not engine.given, "at once, not when the loop ends"
    return stream, handler


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("text", "stop", "kept"),
    [
        ("abc</a>bbbbb", ["</a>"], "abc</a>"),
        ("a.\n\nbb", ["\n\n", "c"], "a.\n\n"),
        ("aébéé cc", ["éé"], "aébéé"),
        ("aab.aabab", ["abab", "b.a"], "aab.a"),
    ],
)
def test_it_ends_with_the_token_that_completes_the_first(
    decode: Decode, text: str, stop: list[str], kept: str, chunk: int
) -> None:
    engine = WritingEngine(text, chunk)
    stream, handler = asyncio.run(generated(engine, stop, decode))
    assert TOKENIZER.decode(stream.ids) == kept
    assert len(stream.logprobs) == len(stream.ids)
    assert stream.finish == 1, "by stop"
    assert engine.given < len(kept) + chunk, "the engine did not go on"
    assert not handler.handed_back


@pytest.mark.parametrize("finish", [Finish.STOP, Finish.LENGTH])
def test_what_the_engine_ended_stays(decode: Decode, finish: Finish) -> None:
    stream, _ = asyncio.run(generated(WritingEngine("a</b>", 2, finish=finish), ["</a>"], decode))
    assert TOKENIZER.decode(stream.ids) == "a</b>"
    assert stream.finish == (1 if finish is Finish.STOP else 2)


def test_a_string_completed_by_the_last_token_of_the_budget_is_a_stop(decode: Decode) -> None:
    stream, _ = asyncio.run(generated(WritingEngine("a</a>", 2, finish=Finish.LENGTH), ["</a>"], decode))
    assert (TOKENIZER.decode(stream.ids), stream.finish) == ("a</a>", 1)


def test_one_that_began_on_another_engine_is_completed(decode: Decode) -> None:
    stream, _ = asyncio.run(generated(WritingEngine("a>bbb"), ["</a>"], decode, held="b</"))
    assert TOKENIZER.decode(stream.ids) == "a>"


def test_one_whose_end_was_lost_with_its_engine_generates_nothing(decode: Decode) -> None:
    engine = WritingEngine("bbb")
    stream, _ = asyncio.run(generated(engine, ["</a>"], decode, held="b</a>"))
    assert (list(stream.ids), stream.finish, engine.given) == ([], 1, 0)


def test_earlier_turns_do_not_count(decode: Decode) -> None:
    turns = "b</a>.</"
    stream, _ = asyncio.run(generated(WritingEngine("a>b</a>b"), ["</a>"], decode, held=turns, turn_start=len(turns)))
    assert TOKENIZER.decode(stream.ids) == "a>b</a>"
    moved, _ = asyncio.run(generated(WritingEngine("/a>b"), ["</a>"], decode, held=f"{turns}b<", turn_start=len(turns)))
    assert TOKENIZER.decode(moved.ids) == "/a>"


def test_the_prompt_does_not_count(decode: Decode) -> None:
    stream, _ = asyncio.run(generated(WritingEngine("aa.", finish=Finish.STOP), ["..a"], decode))
    assert TOKENIZER.decode(stream.ids) == "aa."


def test_without_a_tokenizer_the_sample_is_refused_in_a_sentence() -> None:
    _, handler = asyncio.run(generated(WritingEngine("aa"), ["..a"], None))
    reason, detail = handler.handed_back[0]
    assert reason is HandBackReason.REJECTED
    assert detail == f"it is to end at '..a', and no {TOKENIZER_FILE} came with the weights"


def test_a_missing_package_and_a_broken_file_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_tokenizer(tmp_path) is None
    (tmp_path / TOKENIZER_FILE).write_text("{}")
    with pytest.raises(EngineFailed, match="is no tokenizer"):
        read_tokenizer(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(EngineFailed, match=r"recipe\.sampling\.stop .* package tokenizers"):
        read_tokenizer(tmp_path)


def test_whatever_is_written_the_cut_is_the_learners(decode: Decode) -> None:
    """Long texts, so that windows move; special tokens, which write nothing, between the others."""
    dice = random.Random(0)
    for _ in range(300):
        stop = ["".join(dice.choices("ab.é", k=dice.randint(2, 9))) for _ in range(dice.randint(1, 3))]
        ids = [dice.choice([*TOKENIZER.encode_text("ab.é"), 0]) for _ in range(600)]
        watched, kept, ended = StopStrings(stop, decode, []), [], False
        while len(kept) < len(ids) and not ended:
            new = ids[len(kept) : len(kept) + dice.randint(1, 4)]
            chunk = watched.cut(TokenChunk(new, [0.0] * len(new), version=0, finish=None))
            kept += chunk.ids
            ended = chunk.finish is Finish.STOP
        end = end_of_stop(ids, stop, TOKENIZER.decode)
        assert (len(kept), ended) == ((len(ids), False) if end is None else (end, True))


def test_a_response_of_special_tokens_is_read_in_bounded_windows(decode: Decode) -> None:
    read = 0

    def counted(ids: Sequence[int]) -> str:
        nonlocal read
        read += len(ids)
        return decode(ids)

    watched = StopStrings(["ab"], counted, [])
    for _ in range(200):
        watched.cut(TokenChunk([0] * 100, [0.0] * 100, version=0, finish=None))
    assert read < 200 * 6000


def test_a_tokenizer_travels_only_where_several_tokens_may_spell_a_string() -> None:
    def recipe(*stop: str) -> RecipeSpec:
        fields = {"model": {"config": {"model_type": "qwen2"}}, "sampling": {"stop": list(stop)}}
        return RecipeSpec.model_validate(fields)

    assert stop_files(recipe("."), TOKENIZER) == {}
    assert spelled_stops(recipe(".", "ab", "é")) == ("ab", "é")
    assert list(stop_files(recipe("ab"), TOKENIZER)) == [TOKENIZER_FILE]
