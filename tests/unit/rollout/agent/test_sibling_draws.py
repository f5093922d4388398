"""Siblings draw independently, on whichever engines they are; a sample that moves repeats its draws."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
import pytest

from polyrl.sample import Finish, SamplingParams, sample_id, sample_seed
from polyrl.wire import Assign, HandBackReason, Welcome
from polyrl_rollout.agent.generating import Generation
from polyrl_rollout.agent.protocol import AgentProtocol, Stream
from polyrl_rollout.engines.embedded.token_draw import Draw, draw_tokens
from polyrl_rollout.engines.port import EngineFailed, GenerateRequest, TokenChunk

P = np.array([0.5, 0.3, 0.2])
AGREE = float((P**2).sum())
"""Probability that two independent draws agree: 0.38."""
GROUPS = 400
PROMPT_TOKENS = 2


class DrawingEngine:
    """Each answer is one token of `P`, drawn as the embedded engine draws."""

    def __init__(self) -> None:
        self.seeds: list[int] = []

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk]:
        self.seeds.append(request.seed)
        draw = Draw(1.0, 1.0, top_k=-1, stream=request.seed)
        tokens, logprobs = draw_tokens(np.log(P, dtype=np.float32)[None], [draw], [len(request.input_ids)])
        yield TokenChunk([int(tokens[0])], [float(logprobs[0])], version=0, finish=Finish.STOP)


class Handler:
    def on_tokens(self) -> None:
        pass

    def hand_back(self, assignment: int, reason: HandBackReason, detail: str) -> None:
        raise AssertionError(detail)

    def engine_failed(self, error: EngineFailed) -> None:
        raise error


async def answers(samples: list[str], seed: int = 0) -> list[int]:
    """The first token of each, by one agent that has just started."""
    protocol, engine = AgentProtocol(), DrawingEngine()
    protocol.receive(Welcome(run_epoch=1, lease_s=3.0, beat_s=1.0, delta_s=0.03), 0.0)
    generation = Generation(engine, protocol.book, Handler(), seed=seed)  # type: ignore[arg-type]
    generation.update_room()
    streams: list[Any] = []
    for number, sample in enumerate(samples, start=1):
        versions = {"min_version": 0, "max_version": 0}
        assign = Assign(number, sample, 1, bytes(4 * PROMPT_TOKENS), 0, 1, SamplingParams(1), **versions)
        streams.append(protocol.accept(assign, 0))
        assert isinstance(streams[-1], Stream)
        generation.start(streams[-1])
    await asyncio.gather(*(run.task for run in generation._running.values()))
    return [stream.ids[0] for stream in streams]


def agreement(one: list[int], other: list[int]) -> float:
    return float(np.mean(np.array(one) == np.array(other)))


def test_siblings_on_two_engines_that_start_together_agree_as_independent_draws_do() -> None:
    first = asyncio.run(answers([sample_id(group, 0) for group in range(GROUPS)]))
    second = asyncio.run(answers([sample_id(group, 1) for group in range(GROUPS)]))
    # Four standard deviations; copies agree always.
    assert agreement(first, second) == pytest.approx(AGREE, abs=4 * (AGREE * (1 - AGREE) / GROUPS) ** 0.5)
    assert np.bincount(first, minlength=3) / GROUPS == pytest.approx(P, abs=4 * 0.5 / GROUPS**0.5)


def test_groups_and_runs_of_other_seeds_draw_independently() -> None:
    bound = 4 * (AGREE * (1 - AGREE) / GROUPS) ** 0.5
    samples = [sample_id(group, 0) for group in range(GROUPS)]
    first, second = asyncio.run(answers(samples)), asyncio.run(answers(samples, seed=1))
    assert agreement(first, second) == pytest.approx(AGREE, abs=bound)
    assert agreement(first[1:], first[:-1]) == pytest.approx(AGREE, abs=bound)


def test_a_sample_draws_the_same_on_another_engine_and_after_another_start() -> None:
    samples = [sample_id(group, index) for group in range(20) for index in range(2)]
    assert asyncio.run(answers(samples)) == asyncio.run(answers(samples[::-1]))[::-1]


def test_a_groups_own_seed_repeats_its_draws_under_another_number_but_not_among_its_samples() -> None:
    seeds = [[sample_seed(run, sample_id(group, index), 7) for index in range(8)] for run, group in ((0, 1), (3, 2))]
    assert seeds[0] == seeds[1]
    assert len({*seeds[0], *(sample_seed(0, sample_id(1, index)) for index in range(8))}) == 16
    assert all(0 <= seed < 2**63 for seed in seeds[0])
