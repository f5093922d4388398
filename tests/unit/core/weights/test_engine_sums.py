"""What follows from the sums that engines give of their weights, in the order in which they give them."""

from __future__ import annotations

import pytest

from polyrl.weights.engine_sums import LONE, MAX_COMPARED, OTHER_WEIGHTS, SAME_WEIGHTS, EngineSum, SumVerdict, WeightSums

CPU, GPU = "SGLang 0.5.23 cpu float32 tp1", "SGLang 0.5.23 cuda bfloat16 tp2 NVIDIA H100"


def judge(
    sums: WeightSums, engine: str, version: int, given: EngineSum, content: bytes = b"", receipt: bytes = b""
) -> SumVerdict:
    named = b"content %d" % version
    return sums.judge(engine, version, content or named, given=given, receipt=receipt or content or named)


def refused_by(
    sums: WeightSums, engine: str, text: str, version: int = 1, kind: str = CPU, exact: bool = True
) -> set[str]:
    """Who is refused by it."""
    given = EngineSum(kind, text.encode(), exact=exact)
    return set(judge(sums, engine, version, given).refused)


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        pytest.param("a=A", "", id="the first one serves"),
        pytest.param("a=A b=A c=A", "; ;", id="equal ones serve"),
        pytest.param("a=A b=B", ";b", id="one that differs from the first one is refused"),
        pytest.param("a=A b=B b2=A", ";b;", id="and serves when it was started anew and differs no more"),
        pytest.param("a=A b=A c=B c2=B c3=B", ";;c;c2;c3", id="nobody has his way against two that agree"),
        pytest.param("a=A b=B c=B", ";b;a", id="two that agree have theirs against the first one"),
        pytest.param("a=A b=B b2=B", ";b;a", id="a second start counts as another engine"),
        pytest.param("a=A b=B b2=B a2=A a3=A", ";b;a;a2;a3", id="and what stands is not taken back"),
        pytest.param("a=A b=B c=B a2=B", ";b;a;", id="the first one serves with what stands when it was started anew"),
        pytest.param("a=A a=A b=B", ";;b", id="what one says again counts once"),
        pytest.param("a=A b=B b=B b=B", ";b;b;b", id="also what one that was refused says again"),
        pytest.param("a=A a=B b=B", ";a;b", id="one that contradicts itself is refused, and heard once"),
        pytest.param("a=A b=B c=C d=D e=E", ";b;c;;", id="sums of which no two agree tell nothing"),
    ],
)
def test_who_is_refused(given: str, refused: str) -> None:
    sums = WeightSums()
    found = [refused_by(sums, *one.split("=")) for one in given.split()]
    assert found == [set(one.split()) for one in refused.split(";")]


def test_a_refusal_has_a_reason_for_the_agent_and_a_sentence_for_people() -> None:
    sums = WeightSums()
    refused_by(sums, "a", "A")
    verdict = judge(sums, "b", 1, EngineSum(CPU, b"B", exact=True))
    assert verdict.reason == OTHER_WEIGHTS
    assert verdict.note == f"it has loaded version 1, and adds it up to 42, not to 41 as others of its kind ({CPU})"


def test_engines_of_two_kinds_and_weights_under_two_contents_are_not_compared() -> None:
    sums = WeightSums()
    assert not refused_by(sums, "a", "A")
    assert not refused_by(sums, "b", "B", kind=GPU)
    assert not judge(sums, "c", 1, EngineSum(CPU, b"C", exact=True), b"another trainer's").refused
    assert not refused_by(sums, "a", "A2", version=2)
    assert judge(sums, "d", 1, EngineSum(CPU, b"A", exact=True)).outcome == "equal"


def test_an_engine_is_of_one_kind_until_it_is_started_anew() -> None:
    sums = WeightSums()
    refused_by(sums, "a", "A")
    assert refused_by(sums, "a", "A2", version=2, kind=GPU) == {"a"}
    sums.gone("a")
    assert refused_by(sums, "a", "A2", version=2, kind=GPU) == set()


@pytest.mark.parametrize(("exact", "refused"), [(True, {"a"}), (False, set())], ids=["exact", "rounded"])
def test_a_load_that_changed_nothing_is_refused_without_a_reference(exact: bool, refused: set[str]) -> None:
    sums = WeightSums()
    refused_by(sums, "a", "A", version=1, exact=exact)
    assert refused_by(sums, "a", "A", version=2, exact=exact) == refused
    assert refused_by(sums, "a", "A", version=2, exact=exact) == refused, "when it says so again, too"
    verdict = judge(sums, "a", 3, EngineSum(CPU, b"A", exact=exact))
    assert verdict.reason == (SAME_WEIGHTS if exact else "")


def test_the_same_weights_under_the_next_number_may_have_the_same_sum() -> None:
    sums = WeightSums()
    for version in (1, 2):
        assert not judge(sums, "a", version, EngineSum(CPU, b"A", exact=True), b"one content").refused


def test_other_files_with_the_same_tensors_may_have_the_same_sum() -> None:
    sums, given = WeightSums(), EngineSum(CPU, b"A", exact=True)
    for content in (b"with a file", b"with another"):
        assert not judge(sums, "a", len(content), given, content, receipt=b"of the tensors").refused


def test_what_an_engine_held_says_nothing_of_the_one_that_comes_under_its_name() -> None:
    sums = WeightSums()
    refused_by(sums, "a", "A", version=1)
    sums.gone("a")
    assert refused_by(sums, "a", "A", version=2) == {"a"}, "it was not heard for a while, and held all the same"
    sums.begins("a")
    assert not refused_by(sums, "a", "A", version=2)


def test_who_serves_another_version_meanwhile_is_not_refused_for_the_one_before() -> None:
    sums = WeightSums()
    refused_by(sums, "a", "A")
    refused_by(sums, "a", "A2", version=2)
    refused_by(sums, "b", "B")
    assert refused_by(sums, "c", "B") == set()
    refused_by(sums, "gone", "X", version=3)
    sums.gone("gone")
    refused_by(sums, "b", "Y", version=3)
    assert refused_by(sums, "c", "Y", version=3) == set()


def test_a_kind_that_has_agreed_is_compared_for_good() -> None:
    sums = WeightSums()
    refused_by(sums, "a", "A")
    refused_by(sums, "b", "A")
    refused = [refused_by(sums, f"n{number}", f"N{number}", version=2) for number in range(LONE + 2)]
    assert refused == [set(), *({f"n{number}"} for number in range(1, LONE + 2))]


def test_what_tells_nothing_is_said_once_and_counted() -> None:
    sums = WeightSums()
    found = [judge(sums, str(n), 1, EngineSum(CPU, b"%d" % n, exact=True)) for n in range(LONE + 2)]
    assert found[LONE - 1].note.startswith(f"4 engines of a kind ({CPU}) add version 1 up to as many sums")
    assert [verdict.note for verdict in found[LONE:]] == ["", ""]
    assert [verdict.outcome for verdict in found] == ["first", "", "", *["incomparable"] * 3]


def test_what_is_said_again_counts_once() -> None:
    sums = WeightSums()
    given = EngineSum(CPU, b"A", exact=True)
    assert [judge(sums, "a", 1, given).outcome for _ in range(2)] == ["first", ""]
    sums.gone("a")
    assert judge(sums, "a", 1, given).outcome == "equal"


def test_old_versions_are_forgotten() -> None:
    sums = WeightSums()
    for version in range(MAX_COMPARED + 1):
        refused_by(sums, "a", f"A{version}", version=version)
    assert len(sums._compared) == MAX_COMPARED
    sums.gone("a")
    assert not refused_by(sums, "b", "B", version=0)
    assert refused_by(sums, "b2", "B", version=2) == {"b2"}
