"""The trainer's side, a process of its own with the trainer's flags: publishes one version, keeps groups in flight.

Its files:

    RUN/workload.json   what to submit           RUN/enough   once it is there, nothing new is submitted
    RUN/batches.jsonl   one line a batch         RUN/client.json   what was submitted and dropped, at the end
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from polyrl import parent_death_signal
from polyrl.sample import Group, Purpose, SamplingParams
from polyrl.wire import Batch, pack_ids, unpack_ids
from polyrl_trainer.backends.models.model_factory import load_model, serving_files
from polyrl_trainer.client import RolloutClient
from polyrl_trainer.weights.publisher import WeightPublisher

MAX_BATCH: Final = 10**6
"""Samples and tokens of a batch: everything that is there."""


class Workload:
    """Endless greedy groups over the same prompts, until enough."""

    def __init__(self, client: RolloutClient, run: Path) -> None:
        self._client, self._run = client, run
        self._plan: dict[str, Any] = msgspec.json.decode((run / "workload.json").read_bytes())
        self._numbers = itertools.count()
        self._open: set[int] = set()
        self._submitted: list[int] = []
        self._dropped: list[dict[str, Any]] = []

    async def publish(self, publisher: WeightPublisher) -> None:
        """Version 0."""
        model = load_model(self._plan["config"], self._plan["seed"], "float32")
        published = await asyncio.to_thread(publisher.publish, 0, model.state_dict().items(), serving_files(model))
        await self._client.publish(published)

    async def work(self) -> None:
        """Returns when it was enough and nothing is open."""
        with (self._run / "batches.jsonl").open("wb") as log:
            await self._top_up()
            while self._open:
                asked = time.monotonic()
                batch = await self._client.next(
                    0,
                    purpose=Purpose.TRAIN,
                    min_samples=1,
                    max_samples=MAX_BATCH,
                    max_tokens=MAX_BATCH,
                    deadline_s=self._plan["nextDeadlineSeconds"],
                )
                log.write(msgspec.json.encode(batch_record(batch, time.monotonic() - asked)) + b"\n")
                await self._client.acknowledge(batch.number)
                self._settle(batch)
                await self._top_up()
        client = {"groups": self._submitted, "dropped": self._dropped}
        client["nextDeadlineSeconds"] = self._plan["nextDeadlineSeconds"]
        (self._run / "client.json").write_bytes(msgspec.json.encode(client))

    async def judge(self) -> None:
        """Every finished turn is worth 1."""
        async for turn in self._client.turns():
            await self._client.score(turn.response.sample, turn.response.turn, 1.0)

    def _settle(self, batch: Batch) -> None:
        self._open -= {sample.group for sample in batch.samples}
        for notice in self._client.take_dropped():
            self._open.discard(notice.group)
            self._dropped.append({"group": notice.group, "reason": notice.reason, "detail": notice.detail})

    async def _top_up(self) -> None:
        if (self._run / "enough").exists():
            return
        missing = self._plan["groupsInFlight"] - len(self._open)
        numbers = list(itertools.islice(self._numbers, missing))
        await self._client.submit([self._group(number) for number in numbers])
        self._open.update(numbers)
        self._submitted += numbers

    def _group(self, number: int) -> Group:
        prompts = self._plan["prompts"]
        prompt = pack_ids(prompts[number % len(prompts)])
        sampling = SamplingParams(self._plan["tokens"], temperature=0.0)
        return Group(
            number,
            0,
            purpose=Purpose.TRAIN,
            prompt_ids=prompt,
            n=self._plan["samplesPerGroup"],
            sampling=sampling,
            min_version=0,
            max_version=0,
        )


def batch_record(batch: Batch, waited_s: float) -> dict[str, Any]:
    """A batch as `evidence` reads it."""
    samples = [
        {
            "sample": one.response.sample,
            "ids": unpack_ids(one.response.ids).tolist(),
            "logprobs": memoryview(one.response.logprobs).cast("f").tolist(),
            "spans": [[s.start, s.end, s.version, s.engine, s.attempt] for s in one.response.spans],
        }
        for one in batch.samples
    ]
    return {"batch": batch.number, "waitedSeconds": waited_s, "samples": samples}


async def main(run: Path, keys: Path, endpoints: Path, run_epoch: int) -> None:
    """Publishes, works, finishes."""
    publisher = WeightPublisher(keys, run_epoch=run_epoch)
    try:
        async with RolloutClient.connect(endpoints, keys, run_epoch) as client:
            workload = Workload(client, run)
            await workload.publish(publisher)
            judge = asyncio.create_task(workload.judge())
            await workload.work()
            await client.finish(True, "enough")
            await judge
    finally:
        publisher.close()


if __name__ == "__main__":
    parent_death_signal.hold()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for flag in ("--run", "--keys", "--manager-endpoints"):
        parser.add_argument(flag, type=Path, required=True)
    parser.add_argument("--epoch", type=int, required=True)
    options, _ = parser.parse_known_args()
    asyncio.run(main(options.run, options.keys, options.manager_endpoints, options.epoch))
