"""What the hashed job trains, computed without any process: what its undisturbed run must equal in its turn.

Refuses to hold: processes. Read next: `outcome`.
"""

from __future__ import annotations

from hash_engine import VOCABULARY, hashed, salt_of_data
from hash_publisher import version_of
from hash_trainer import group_of, reward_of
from jobs import HASHED_PROMPTS, HASHED_SAMPLES, HASHED_STEPS
from outcome import Outcome, TrainedSample

from polyrl.sample import Group
from polyrl.wire import unpack_ids


def hashed_outcome() -> Outcome:
    """Every sample of every step."""
    outcome = Outcome()
    for step in range(1, HASHED_STEPS + 1):
        first = (step - 1) * HASHED_PROMPTS
        samples = [one for prompt in range(first, first + HASHED_PROMPTS) for one in _samples(step, prompt)]
        outcome.steps[step] = {sample.key: sample for sample in samples}
    return outcome


def _samples(step: int, prompt: int) -> list[TrainedSample]:
    version = step - 1
    ids = _continuation(group_of(prompt, step, version), version)
    indices = range(HASHED_SAMPLES)
    return [
        TrainedSample(step, str(prompt), index=index, ids=ids, versions=(version,), reward=reward_of(ids))
        for index in indices
    ]


def _continuation(group: Group, version: int) -> tuple[int, ...]:
    _, weights = version_of(version)
    state = hashed(salt_of_data(weights), unpack_ids(group.prompt_ids).tolist())
    ids: list[int] = []
    while len(ids) < group.sampling.max_new_tokens:
        ids.append(state % VOCABULARY)
        state = hashed(state, ids[-1:])
    return tuple(ids)
