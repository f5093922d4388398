"""How a submission is cut into messages."""

from __future__ import annotations

import pytest

from polyrl import wire
from polyrl.sample import Group, Purpose, SamplingParams
from polyrl_trainer.client.conversation import RequestRefused, submissions

SAMPLING = SamplingParams(8)


def groups(*prompt_bytes: int, n: int = 1) -> list[Group]:
    versions = {"min_version": 0, "max_version": 0}
    return [
        Group(number, 0, purpose=Purpose.TRAIN, prompt_ids=bytes(size), n=n, sampling=SAMPLING, **versions)
        for number, size in enumerate(prompt_bytes)
    ]


@pytest.mark.parametrize(
    ("prompt_bytes", "parts"),
    [
        pytest.param([], [[]], id="nothing"),
        pytest.param([40, 40], [[0, 1]], id="short ones together"),
        pytest.param([wire.SUBMIT_BYTES - 40, 40], [[0, 1]], id="exactly full"),
        pytest.param([wire.SUBMIT_BYTES - 40, 44, 40], [[0], [1, 2]], id="one too many"),
        pytest.param([40, wire.SUBMIT_BYTES + 4, 40], [[0], [1], [2]], id="a long one goes alone"),
        pytest.param([4 * 32_768] * 520, [[*range(part, min(part + 64, 520))] for part in range(0, 520, 64)], id="520"),
    ],
)
def test_the_parts_of_a_submission(prompt_bytes: list[int], parts: list[list[int]]) -> None:
    assert [[group.id for group in part] for part in submissions(groups(*prompt_bytes))] == parts
    assert all(
        len(wire.encode(wire.Submit(1, part))) < wire.MAX_FRAME_BYTES // 2
        for part in submissions(groups(*prompt_bytes))
    )


@pytest.mark.parametrize(
    ("n", "count", "sizes"),
    [
        pytest.param(8, 2048, [128] * 16, id="16,384 samples"),
        pytest.param(1, wire.SUBMIT_SAMPLES + 1, [wire.SUBMIT_SAMPLES, 1], id="one too many"),
        pytest.param(3, 600, [341, 259], id="groups stay whole"),
        pytest.param(wire.SUBMIT_SAMPLES + 1, 2, [1, 1], id="a large group goes alone"),
    ],
)
def test_a_part_has_so_many_samples_that_the_manager_takes_it_at_once(n: int, count: int, sizes: list[int]) -> None:
    assert [len(part) for part in submissions(groups(*[40] * count, n=n))] == sizes


def test_a_prompt_that_no_message_holds_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(RequestRefused, match=r"group 1: its prompt has 4194305 tokens; no message holds more than"):
        next(submissions(groups(40, 4 * wire.MAX_SAMPLE_TOKENS + 4)))
