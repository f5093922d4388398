"""A trainer without a model, over the public client: publishes, submits, scores, takes batches, keeps a checkpoint.

It does what any trainer must to survive its own kill: its state changes when a step is whole, it goes on from the
newest checkpoint, takes what the manager still holds of its step, and gives up the rest. Each batch is written down
before it is acknowledged, as `recording_trainer` does.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
from hash_publisher import HashPublisher, publishing
from jobs import AHEAD, HASHED_PROMPTS, HASHED_SAMPLES, HASHED_STEPS, HASHED_TOKENS
from outcome import TRAINED, TrainedSample

from polyrl import parent_death_signal
from polyrl.sample import DiscardReason, Group, Purpose, SamplingParams, Scored, sample_id
from polyrl.wire import Batch, pack_ids, unpack_ids
from polyrl_trainer.client import RolloutClient
from polyrl_trainer.generation.supply import AdoptedGroups

PROMPT_TOKENS: Final = 8
MIN_SAMPLES: Final = 4
"""Of a micro-batch."""
MAX_TOKENS: Final = 10**6
NEXT_DEADLINE_S: Final = 90.0
REPLACED_S: Final = 0.05
"""Between two checks for the news of a dropped group, once the manager has announced that nothing more will come."""
DROPPED: Final = "dropped.jsonl"


class Checkpoint(msgspec.Struct):
    """What survives this process."""

    step: int = 0
    """Whole steps."""
    next_group: int = 0


class HashTrainer:
    """One process's life."""

    def __init__(self, run: Path, client: RolloutClient, publisher: HashPublisher, ahead: int) -> None:
        """`ahead`: steps whose prompts are submitted while one trains."""
        self._run, self._client, self._publisher, self._ahead = run, client, publisher, ahead
        self._file = run / "hash-checkpoint.json"
        self._state = Checkpoint()
        if self._file.exists():
            self._state = msgspec.json.decode(self._file.read_bytes(), type=Checkpoint)
        self._state.next_group = max(self._state.next_group, client.welcome.next_group)
        self._held = AdoptedGroups(client.welcome.held)
        self._live: dict[int, dict[int, int]] = {}
        """By step that has not ended: group to prompt."""

    async def train(self) -> None:
        """Returns when all steps are whole."""
        while self._state.step < HASHED_STEPS:
            version = self._state.step
            publisher = self._publisher
            await self._client.publish(publisher.ref_of(version))
            await self._begin(self._state.step + 1)
            await self._step(self._state.step + 1)
            self._state.step += 1
            fresh = self._file.with_suffix(".fresh")
            fresh.write_bytes(msgspec.json.encode(self._state))
            fresh.replace(self._file)

    async def judge(self) -> None:
        """Every finished turn, as long as there are any."""
        async for turn in self._client.turns():
            reward = reward_of(unpack_ids(turn.response.ids).tolist())
            await self._client.score(turn.response.sample, turn.response.turn, reward)

    async def _begin(self, step: int) -> None:
        for number in range(step, min(step + self._ahead, HASHED_STEPS) + 1):
            if number not in self._live:
                self._live[number] = {}
                first = (number - 1) * HASHED_PROMPTS
                await self._submit(range(first, first + HASHED_PROMPTS), number)
        await self._give_up_held(max(self._live))

    async def _step(self, step: int) -> None:
        missing = HASHED_PROMPTS * HASHED_SAMPLES
        while missing:
            batch = await self._client.next(
                step,
                purpose=Purpose.TRAIN,
                min_samples=min(MIN_SAMPLES, missing),
                max_samples=missing,
                max_tokens=MAX_TOKENS,
                deadline_s=NEXT_DEADLINE_S,
            )
            if batch.samples:
                self._learn(batch)
                missing -= len(batch.samples)
                await self._client.acknowledge(batch.number)
            else:
                await asyncio.sleep(REPLACED_S)
            await self._replace_dropped()
        await self._client.end_step(step, Purpose.TRAIN)
        del self._live[step]

    async def _submit(self, prompts: range | list[int], step: int) -> None:
        groups = [group_of(prompt, step, self._ahead) for prompt in prompts]
        numbered = [msgspec.structs.replace(group, id=self._number(group)) for group in groups]
        self._live[step].update({group.id: prompt for group, prompt in zip(numbered, prompts, strict=True)})
        await self._client.submit(numbered)

    def _number(self, group: Group) -> int:
        held = self._held.take(group)
        if held is not None:
            return held
        self._state.next_group += 1
        return self._state.next_group - 1

    async def _give_up_held(self, step: int) -> None:
        for number in self._held.give_up(step, Purpose.TRAIN):
            await self._client.reject(sample_id(number, 0), DiscardReason.STALE, "of another step")

    async def _replace_dropped(self) -> None:
        for notice in self._client.take_dropped():
            self._held.forget(notice.group)
            if notice.group in self._live.get(notice.step, ()):
                with (self._run / DROPPED).open("ab") as file:
                    file.write(msgspec.json.encode(notice) + b"\n")
                await self._submit([self._live[notice.step].pop(notice.group)], notice.step)

    def _learn(self, batch: Batch) -> None:
        samples = [self._trained(scored, batch.step) for scored in batch.samples]
        with (self._run / TRAINED).open("ab") as file:
            file.write(msgspec.json.encode(samples) + b"\n")

    def _trained(self, scored: Scored, step: int) -> TrainedSample:
        ids = tuple(unpack_ids(scored.response.ids).tolist())
        versions = tuple(span.version for span in scored.response.spans for _ in range(span.start, span.end))
        prompt = str(self._live[step][scored.group])
        return TrainedSample(step, prompt, index=scored.index, ids=ids, versions=versions, reward=scored.reward)


def group_of(prompt: int, step: int, ahead: int) -> Group:
    """Still without its number. Prompt and length of the response follow from the prompt's number alone, the versions
    that may generate it from its step and from how many steps are submitted ahead."""
    dice = random.Random(prompt)
    ids = [dice.randrange(1, 1000) for _ in range(PROMPT_TOKENS)]
    sampling = SamplingParams(dice.randint(*HASHED_TOKENS), temperature=0.0)
    return Group(
        0,
        step,
        purpose=Purpose.TRAIN,
        prompt_ids=pack_ids(ids),
        n=HASHED_SAMPLES,
        sampling=sampling,
        min_version=max(0, step - 1 - ahead),
        max_version=step - 1,
    )


def reward_of(ids: Sequence[int]) -> float:
    """Of the tokens alone."""
    return float(sum(ids) % 7)


async def main(run: Path, keys: Path, endpoints: Path, run_epoch: int) -> None:
    """The whole life."""
    async with publishing(keys) as publisher, RolloutClient.connect(endpoints, keys, run_epoch) as client:
        trainer = HashTrainer(run, client, publisher, int(os.environ[AHEAD]))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(trainer.judge())
            await trainer.train()
            await client.finish(True, "done")


if __name__ == "__main__":
    parent_death_signal.hold()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for flag in ("--run", "--keys", "--manager-endpoints"):
        parser.add_argument(flag, type=Path, required=True)
    parser.add_argument("--epoch", type=int, required=True)
    options, _ = parser.parse_known_args()
    asyncio.run(main(options.run, options.keys, options.manager_endpoints, options.epoch))
