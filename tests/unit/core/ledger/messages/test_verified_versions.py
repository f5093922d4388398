"""An engine's word for a weight version counts once it shows that it has pulled all of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from polyrl.ledger import Effects, LedgerConfig, events
from polyrl.sample import Pool
from polyrl.weights import WeightsRef
from polyrl.wire import (
    Accepted,
    Announce,
    Assign,
    Declined,
    GroupDropped,
    HandBack,
    HandBackReason,
    Hello,
    PublishVersion,
    VersionServed,
    WeightsFailed,
    WeightsLoaded,
)
from polyrl_rollout.testing.stage import Stage, sent

HELLO = Hello(1, "a", pool=Pool.SPOT, max_running=8, kv_tokens=100_000, max_context=4096, weight_version=-1)


def published(*versions: int, config: LedgerConfig | None = None) -> Stage:
    """A stage whose trainer gives receipts."""
    stage = Stage(config)
    for version in versions:
        publish(stage, version)
    return stage


def publish(stage: Stage, version: int) -> Effects:
    digest, receipt = b"%d" % version, b"r%d" % version
    where = WeightsRef(version, "tcp://p", public_key="key", manifest_hash=digest, receipt=receipt)
    return stage.trainer(PublishVersion.of(stage.request(), where))


def loaded(version: int, receipt: bytes = b"") -> WeightsLoaded:
    return WeightsLoaded(version, 0.1, load_seconds=0.1, bytes_pulled=100, receipt=receipt)


@pytest.mark.parametrize(
    ("message", "version"),
    [
        pytest.param(loaded(2, b"r2"), 2, id="it pulled it"),
        pytest.param(loaded(2), -1, id="no receipt"),
        pytest.param(loaded(2, b"r1"), -1, id="another version's receipt"),
        pytest.param(loaded(1, b"r1"), 1, id="an older one that it pulled"),
        pytest.param(loaded(3, b"r3"), -1, id="one that nobody published"),
        pytest.param(loaded(0, b""), -1, id="one of which no receipt is known"),
        pytest.param(WeightsFailed(2, 1, reason="x"), -1, id="serving one that it never showed"),
        pytest.param(WeightsFailed(2, -1, reason="x"), -1, id="serving nothing"),
    ],
)
def test_what_it_loaded_counts_with_its_receipt(message: Any, version: int) -> None:
    stage = published(1, 2)
    stage.agent("a", HELLO)
    stage.agent("a", message)
    assert stage.ledger.state.engines["a"].version == version
    assert bool(stage.ledger.state.counters.ignored.get("unverifiedVersion")) is (
        version < 0 and getattr(message, "serving", 0) >= 0
    )


def test_the_newest_is_announced_again_to_whoever_is_not_believed() -> None:
    stage = published(1)
    stage.agent("a", HELLO)
    stage.agent("a", loaded(2, b"r2"))  # of a manager that a power cut took back by one version
    stage.pass_time_heard(4)
    assert [one.version for one in sent(stage.pass_time(1.1), Announce)] == [1]
    stage.agent("a", WeightsFailed(1, 2, reason="newer"))
    assert [one.version for one in sent(publish(stage, 2), Announce)] == [2]
    stage.agent("a", loaded(2, b"r2"))
    assert stage.ledger.state.engines["a"].version == 2


@pytest.mark.parametrize(
    ("claims", "version", "served"),
    [
        pytest.param({"weight_version": 2, "receipts": {2: b"r2"}}, 2, [2], id="shown"),
        pytest.param({"weight_version": 2}, -1, [], id="not shown"),
        pytest.param(
            {"weight_version": 2, "versions": (1,), "receipts": {2: b"r2"}}, 2, [2], id="an old one not shown"
        ),
        pytest.param(
            {"weight_version": 2, "versions": (1,), "receipts": {1: b"r1", 2: b"r2"}}, 2, [1, 2], id="both shown"
        ),
    ],
)
def test_a_greeting_brings_the_versions_that_it_shows(claims: dict[str, Any], version: int, served: list[int]) -> None:
    stage = published(1, 2)
    stage.agent("a", msgspec.structs.replace(HELLO, **claims))
    engine = stage.ledger.state.engines["a"]
    assert (engine.version, engine.served) == (version, served)


def test_nobody_serves_before_anything_was_published() -> None:
    """Else an engine that comes first would have served all versions to come."""
    stage = Stage()
    stage.ledger.state.weights = WeightsRef()
    stage.agent("a", msgspec.structs.replace(HELLO, weight_version=2, versions=(1, 2)))
    assert stage.ledger.state.engines["a"].served == []


def test_what_it_served_here_needs_no_receipt_again() -> None:
    stage = published(1)
    stage.agent("a", HELLO)
    stage.agent("a", loaded(1, b"r1"))
    stage.agent("a", msgspec.structs.replace(HELLO, weight_version=1))
    assert stage.ledger.state.engines["a"].version == 1


def test_engines_do_not_learn_the_receipt() -> None:
    stage = published(1)
    (announced,) = sent(stage.agent("a", HELLO), Announce)
    assert b"r1" not in msgspec.msgpack.encode(announced)


def test_tokens_are_of_the_version_that_it_served_when_it_got_the_sample_or_of_a_newer_one() -> None:
    """An engine that calls its tokens an older version's leaves the cohort in which it would be found out."""
    stage = published(1, 2)
    stage.agent("a", HELLO)
    stage.agent("a", loaded(1, b"r1"))
    stage.agent("a", loaded(2, b"r2"))
    (assign,) = sent(stage.submit(min_version=1, max_version=3), Assign)
    stage.tokens("a", assign.assignment, [5], version=1)
    assert stage.ledger.state.samples["0.0"].length == 0
    assert stage.ledger.state.engines["a"].failures == 1


def test_one_that_loads_while_it_generates_sends_tokens_of_both() -> None:
    stage = published(1)
    stage.agent("a", HELLO)
    stage.agent("a", loaded(1, b"r1"))
    (assign,) = sent(stage.submit(min_version=1, max_version=3), Assign)
    publish(stage, 2)
    stage.agent("a", loaded(2, b"r2"))
    stage.tokens("a", assign.assignment, [5], version=1)
    stage.tokens("a", assign.assignment, [6], version=2)
    assert [span.version for span in stage.ledger.state.samples["0.0"].spans] == [1, 2]


def test_an_engine_that_wavers_makes_the_history_no_longer() -> None:
    stage = Stage()
    stage.engine("a")
    stage.submit()
    stage.agent("a", HandBack(stage.number("0.0"), HandBackReason.VERSION_CHANGED))
    stage.events.clear()
    for _ in range(1000):
        stage.agent("a", WeightsFailed(0, -1, reason="no"))
        stage.agent("a", loaded(0))
        stage.pass_time(0.05)
    durable = [event for event in stage.events if event.durable and not isinstance(event, events.Assigned)]
    assert 0 < len(durable) < 40
    stage.pass_time_heard(61)
    stage.agent("a", loaded(0))
    assert stage.ledger.state.engines["a"].version == 0, "it is believed once its pause is over"


def test_repeats_write_nothing() -> None:
    stage = published(1)
    stage.agent("a", HELLO)
    stage.agent("a", loaded(1, b"r1"))
    stage.events.clear()
    for _ in range(100):
        stage.agent("a", loaded(1, b"r1"))
        stage.agent("a", msgspec.structs.replace(HELLO, weight_version=1))
    assert {type(event).__name__ for event in stage.events if event.durable} == {"EngineGreetedAgain"}


def test_no_context_counts_for_more_than_the_manifest_allows() -> None:
    stage = Stage(LedgerConfig(run_epoch=1, max_context=64))
    stage.engine("a", max_context=1_000_000)
    assert stage.ledger.state.engines["a"].capacity.max_context == 64
    stage.engine("b", max_context=32)
    assert stage.ledger.state.engines["b"].capacity.max_context == 32


def test_who_claims_a_short_context_ends_no_prompt_that_fits_another_one_that_is_still_loading() -> None:
    stage = published(0)
    stage.agent("honest", msgspec.structs.replace(HELLO, engine="honest"))
    stage.agent("liar", msgspec.structs.replace(HELLO, engine="liar", max_context=2))
    stage.agent("liar", loaded(0, b"r0"))
    assert stage.ledger.state.engines["liar"].version == 0
    assert not sent(stage.submit(), GroupDropped)
    stage.agent("honest", loaded(0, b"r0"))
    assert stage.placed() == {"honest": ["0.0"], "liar": []}


def test_the_same_weights_may_be_published_again_in_another_form_under_their_number_and_no_others() -> None:
    stage = Stage()

    def publish_again(digest: bytes, content: bytes) -> Any:
        where = WeightsRef(1, "tcp://p", public_key="key", manifest_hash=digest, content=content)
        return sent(stage.trainer(PublishVersion.of(stage.request(), where)), Accepted | Declined)[0]

    assert isinstance(publish_again(b"one", b""), Accepted)
    assert isinstance(publish_again(b"other", b""), Declined)
    stage = Stage()
    assert isinstance(publish_again(b"delta", b"these"), Accepted)
    assert isinstance(publish_again(b"anchor", b"these"), Accepted)
    assert stage.ledger.state.weights.manifest_hash == b"anchor"
    assert isinstance(publish_again(b"other", b"others"), Declined)
    assert isinstance(publish_again(b"other", b""), Declined)
    assert isinstance(publish_again(b"anchor", b""), Accepted)


def test_the_trainer_hears_when_the_first_engine_has_the_newest_version() -> None:
    stage = published(1, 2)
    for name in ("a", "b"):
        stage.agent(name, msgspec.structs.replace(HELLO, engine=name))
    heard = [
        sent(stage.agent(name, loaded(version, b"r%d" % version)), VersionServed)
        for name, version in (("a", 1), ("a", 2), ("b", 2))
    ]
    assert heard == [[], [VersionServed(2)], []]
