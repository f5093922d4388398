"""A publisher and a staging folder with one run's keys.

With POLYRL_WEIGHTS_BY=mooncake (make test-mooncake) publishers lend, and all that pull read what is lent: the suite is
the same for both transports, but for relays that change what the sealed one carries.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from polyrl.keys import FILE_NAMES, AgentKeys, TrainerKeys, read_keys
from polyrl_operator.secret import write_run_keys
from polyrl_rollout.weights import puller
from polyrl_rollout.weights.lent import LentStream, LoanReader
from polyrl_rollout.weights.staging import PARTIAL, Staging
from polyrl_trainer.weights.lender import Lender
from polyrl_trainer.weights.publisher import WeightPublisher
from tests.integration.weights.peer_fleet import Fleet

CHUNK = 64 << 10
BY_MOONCAKE = os.environ.get("POLYRL_WEIGHTS_BY") == "mooncake"
REST_S = 5.0
"""Longer than the rest of a pull."""
FILES = {"config.json": b'{"model_type": "tiny"}'}


def complete(staging: Staging) -> list[int]:
    """Versions that lie there whole, the pages of the next one among them."""
    return sorted(int(folder.name[1:7]) for folder in staging.root.glob("v*") if folder.suffix != PARTIAL)


@dataclass(frozen=True)
class Keys:
    agent: AgentKeys
    trainer: TrainerKeys
    trainer_file: Path


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    write_run_keys(tmp_path / "keys")
    agent, file = (tmp_path / "keys" / FILE_NAMES[kind] for kind in (AgentKeys, TrainerKeys))
    return Keys(read_keys(AgentKeys, agent), read_keys(TrainerKeys, file), trainer_file=file)


@pytest.fixture
def staging(tmp_path: Path) -> Iterator[Staging]:
    staging = Staging("run", "engine", tmp_path)
    yield staging
    staging.close()
    assert not list(tmp_path.glob("polyrl-*"))


SEALED_ONLY = pytest.mark.skipif(BY_MOONCAKE, reason="a relay that changes what the sealed connection carries")


@dataclass(frozen=True)
class Mooncake:
    """Of this process: an engine cannot be stopped."""

    lender: Lender
    reader: LoanReader


@pytest.fixture(scope="session")
def engines() -> Mooncake | None:
    if not BY_MOONCAKE:
        return None
    return Mooncake(Lender("127.0.0.1"), LoanReader(rest_s=REST_S))


@pytest.fixture(autouse=True)
def mooncake(
    request: pytest.FixtureRequest, engines: Mooncake | None, monkeypatch: pytest.MonkeyPatch
) -> Mooncake | None:
    if engines is None:
        if request.node.get_closest_marker("mooncake"):
            pytest.skip("needs make test-mooncake")
        return None
    engines.reader._rests_until = 0.0
    monkeypatch.setattr(puller, "WeightStream", lambda *dialled: LentStream(*dialled, engines.reader))
    return engines


@pytest.fixture
def publishers(keys: Keys, mooncake: Mooncake | None) -> Iterator[Callable[..., WeightPublisher]]:
    made: list[WeightPublisher] = []
    lender = mooncake and mooncake.lender

    def make(bind: str = "tcp://127.0.0.1:*", chunk_bytes: int = CHUNK, **limits: Any) -> WeightPublisher:
        made.append(WeightPublisher(keys.trainer_file, bind, chunk_bytes=chunk_bytes, **{"lender": lender, **limits}))
        return made[-1]

    yield make
    for publisher in made:
        publisher.close()


@pytest.fixture
def fleet(keys: Keys, tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(keys, tmp_path)
    yield fleet
    fleet.close()


@pytest.fixture
def publisher(publishers: Callable[..., WeightPublisher], monkeypatch: pytest.MonkeyPatch) -> WeightPublisher:
    # So that a delta of some kilobytes pays.
    monkeypatch.setattr("polyrl_trainer.weights.server.WeightServer.bandwidth", 1e5)
    publisher = publishers()
    publisher.forms.smallest = 0
    return publisher
