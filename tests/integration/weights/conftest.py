"""A publisher and a staging folder with one run's keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import zmq

from polyrl.keys import AgentKeys, TrainerKeys, format_keys
from polyrl_rollout.weights.staging import Staging
from polyrl_trainer.weights.publisher import WeightPublisher

CHUNK = 64 << 10
FILES = {"config.json": b'{"model_type": "tiny"}'}


@dataclass(frozen=True)
class Keys:
    agent: AgentKeys
    trainer: TrainerKeys
    trainer_file: Path


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    pairs = {role: tuple(part.decode() for part in zmq.curve_keypair()) for role in ("manager", "trainer", "agent")}
    trainer = TrainerKeys(*pairs["trainer"], pairs["manager"][0], pairs["agent"][0])
    agent = AgentKeys(*pairs["agent"], pairs["manager"][0], pairs["trainer"][0])
    file = tmp_path / "trainer.key"
    file.touch(mode=0o600)
    file.write_text(format_keys(trainer))
    return Keys(agent, trainer, trainer_file=file)


@pytest.fixture
def staging(tmp_path: Path) -> Iterator[Staging]:
    staging = Staging("run", "engine", tmp_path)
    yield staging
    staging.close()
    assert not list(tmp_path.glob("polyrl-*"))


@pytest.fixture
def publishers(keys: Keys) -> Iterator[Callable[..., WeightPublisher]]:
    made: list[WeightPublisher] = []

    def make(bind: str = "tcp://127.0.0.1:*", chunk_bytes: int = CHUNK, **limits: Any) -> WeightPublisher:
        made.append(WeightPublisher(keys.trainer_file, bind, chunk_bytes=chunk_bytes, **limits))
        return made[-1]

    yield make
    for publisher in made:
        publisher.close()
