"""What `polyrl explain` prints of an engine whose tokens were not the policy's."""

from __future__ import annotations

from polyrl.ledger import events as f
from polyrl.ledger.audit.history import HistoryEntry, engine_subject, subjects_of
from polyrl.sample import Group, Purpose, SamplingParams
from polyrl_cli.inspection.explain import _Life


def departed(step: int, until: float) -> HistoryEntry:
    return HistoryEntry(9.0, f.EngineDeparted("spot-1", step, text="drift 2.5 nats", until=until, at=9.0))


def test_a_samples_life_names_the_engine_that_departed_in_its_step() -> None:
    life = _Life("3.0")
    group = Group(
        3, 4, purpose=Purpose.TRAIN, prompt_ids=b"", n=1, sampling=SamplingParams(8), min_version=0, max_version=0
    )
    life.lines(HistoryEntry(1.0, f.GroupSubmitted(group, 1.0)))
    assert life.lines(departed(step=4, until=69.0)) == [
        "spot-1's tokens in step 4 are not the policy's: drift 2.5 nats; it pauses for 60 s"
    ]
    assert life.lines(departed(step=4, until=9.0))[0].endswith("drift 2.5 nats")
    assert life.lines(departed(step=5, until=69.0)) == []
    assert subjects_of(departed(4, 69.0)) == [engine_subject("spot-1")]
