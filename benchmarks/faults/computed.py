"""What the hashed job trains, computed without any process: what its undisturbed run must equal in its turn."""

from __future__ import annotations

from hash_engine import VOCABULARY, hashed, salt_of_data
from hash_publisher import version_of
from hash_trainer import group_of, reward_of
from jobs import HASHED_PROMPTS, HASHED_SAMPLES, HASHED_STEPS
from outcome import Outcome, TrainedSample

from polyrl.sample import Group
from polyrl.wire import unpack_ids


def hashed_outcome(ahead: int = 0, got: Outcome | None = None) -> Outcome:
    """Every sample of every step. With `ahead` steps generated while one trains, each token by the version that `got`
    says, where that one may have made it: a step's own or up to `ahead` before it, and none older than the token's
    before."""
    outcome = Outcome()
    for step in range(1, HASHED_STEPS + 1):
        first = (step - 1) * HASHED_PROMPTS
        known = {} if got is None else got.steps.get(step, {})
        keys = [(str(first + prompt), index) for prompt in range(HASHED_PROMPTS) for index in range(HASHED_SAMPLES)]
        outcome.steps[step] = {key: _sample(step, ahead, known.get(key), key) for key in keys}
    return outcome


def _sample(step: int, ahead: int, got: TrainedSample | None, key: tuple[str, int]) -> TrainedSample:
    group = group_of(int(key[0]), step, ahead)
    versions = (step - 1,) * group.sampling.max_new_tokens
    if got is not None and _may_be(got.versions, group):
        versions = got.versions
    ids = _continuation(group, versions)
    return TrainedSample(step, key[0], index=key[1], ids=ids, versions=versions, reward=reward_of(ids))


def _may_be(versions: tuple[int, ...], group: Group) -> bool:
    bounds = [group.min_version, *versions, group.max_version]
    return len(versions) == group.sampling.max_new_tokens and bounds == sorted(bounds)


def _continuation(group: Group, versions: tuple[int, ...]) -> tuple[int, ...]:
    prompt = unpack_ids(group.prompt_ids).tolist()
    ids: list[int] = []
    for version in versions:
        _, weights = version_of(version)
        ids.append(hashed(salt_of_data(weights), prompt + ids) % VOCABULARY)
    return tuple(ids)
