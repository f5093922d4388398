"""What follows from the sums that engines give of their weights, in the order in which they give them."""

from __future__ import annotations

import itertools
from random import Random

import pytest

from polyrl.weights.engine_sums import (
    LONE,
    MAX_COMPARED,
    MAX_KINDS,
    MAX_STARTS,
    OTHER_WEIGHTS,
    SAME_WEIGHTS,
    EngineSum,
    SumVerdict,
    WeightSums,
)

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
        pytest.param("a=A b=A c=B d=B e=B f=B", ";;c;d;a b;", id="until more were there together"),
        pytest.param("a=A b=B c=B", ";b;a", id="two that agree have theirs against the first one"),
        pytest.param("a=A b=B b2=B b3=B a=A", ";b;b2;b3;", id="one after the other is one machine's"),
        pytest.param("a=A b=B c=B a2=A a3=A", ";b;a;a2;a3", id="and starting again takes nothing back"),
        pytest.param("a=A b=B c=B a2=B", ";b;a;", id="the first one serves with what stands when it was started anew"),
        pytest.param("a=A a=A b=B", ";;b", id="what one says again counts once"),
        pytest.param("a=A b=B b=B b=B", ";b;b;b", id="also what one that was refused says again"),
        pytest.param("a=A a=B b=B", ";a;b", id="one that contradicts itself is refused, and heard once"),
        pytest.param("a=A b=B c=C d=D e=E", ";b;c;;", id="sums of which no two agree tell nothing"),
    ],
)
def test_who_is_refused(given: str, refused: str) -> None:
    """Those with one letter are there from the beginning, others come when those before have spoken."""
    sums = WeightSums()
    for engine in "abcdef":
        sums.begins(engine)
    found = [refused_by(sums, *one.split("=")) for one in given.split()]
    assert found == [set(one.split()) for one in refused.split(";")]


def test_one_bad_machine_does_not_refuse_a_fleet() -> None:
    """The first one to load, whose follower on the same machine has another name."""
    sums = WeightSums()
    for engine in ("bad", "bad2"):
        sums.begins(engine)
        assert not refused_by(sums, engine, "BAD")
        sums.gone(engine) if engine == "bad" else None
    for number in range(7):
        sums.begins(f"good{number}")
    refused = [refused_by(sums, f"good{number}", "GOOD") for number in range(7)]
    assert refused == [{"good0"}, {"bad2"}, *[set()] * 5]
    for again in range(9):
        assert refused_by(sums, f"bad{again}", "BAD") == {f"bad{again}"}


MACHINES, STEPS, ORDERS = 7, 600, 40


class Orders:
    """A fleet whose machines start, load and end in a random order; those below `bad` err alike. Each is down for as
    long as it is there, and comes back under its name or another."""

    def __init__(self, seed: int, bad: int) -> None:
        self._dice, self._sums, self._count = Random(f"{seed} {bad}"), WeightSums(), itertools.count()
        self._bad = bad
        self._names: dict[int, str] = {}
        """Of machines that are not down."""
        self._served: set[str] = set()
        self.refused = [0] * MACHINES

    def act(self) -> None:
        machine = self._dice.randrange(MACHINES)
        name = self._names.get(machine)
        if name is None:
            name = self._names[machine] = self._dice.choice((f"{machine}", f"new{next(self._count)}"))
            self._sums.begins(name)
        elif name not in self._served:
            self._served.add(name)
            self._end(refused_by(self._sums, name, "BAD" if machine < self._bad else "GOOD"), refusals=1)
        elif self._dice.random() < 0.1:
            self._end({name}, refusals=0)

    def _end(self, engines: set[str], refusals: int) -> None:
        for machine in [one for one, name in self._names.items() if name in engines]:
            self.refused[machine] += refusals
            self._served.discard(self._names[machine])
            self._sums.gone(self._names.pop(machine))

    def serving(self) -> set[int]:
        return {machine for machine, name in self._names.items() if name in self._served}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bad", "most"),
    [
        pytest.param(0, 0, id="all are good"),
        pytest.param(1, 2, id="one of seven errs"),
        pytest.param(2, 4, id="two of seven err alike"),
        pytest.param(3, 12, id="three of seven err alike"),
    ],
)
def test_in_whatever_order_they_come_the_good_ones_serve_in_the_end(bad: int, most: int) -> None:
    for seed in range(ORDERS):
        orders, served = Orders(seed, bad), set[int]()
        for _ in range(STEPS):
            orders.act()
        settled = orders.refused[bad:]
        for _ in range(STEPS):
            orders.act()
            served |= orders.serving()
        assert served == set(range(bad, MACHINES))
        assert orders.refused[bad:] == settled, "nobody is refused back and forth"
        assert max(settled) <= most


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
    for engine in "bc":
        sums.begins(engine)
    refused_by(sums, "a", "A")
    refused_by(sums, "a", "A2", version=2)
    refused_by(sums, "b", "B")
    assert refused_by(sums, "c", "B") == set()
    refused_by(sums, "gone", "X", version=3)
    sums.gone("gone")
    sums.begins("c")
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


def test_an_engine_that_was_forgotten_is_not_refused_by_what_stands() -> None:
    sums = WeightSums()
    for engine in "bc":
        sums.begins(engine)
    refused_by(sums, "a", "A")
    for number in range(MAX_STARTS):
        refused_by(sums, f"n{number}", f"{number}", version=2, kind=GPU)
    assert [refused_by(sums, engine, "B") for engine in "bc"] == [{"b"}, set()]


def test_old_versions_are_forgotten_of_each_kind_by_itself() -> None:
    sums = WeightSums()
    for version in range(MAX_COMPARED + 1):
        refused_by(sums, "a", f"A{version}", version=version)
        refused_by(sums, "g", f"G{version}", version=version, kind=GPU)
    sums.gone("a")
    assert not refused_by(sums, "b", "B", version=0)
    assert refused_by(sums, "b2", "B", version=2) == {"b2"}
    assert refused_by(sums, "g2", "B", version=1, kind=GPU) == {"g2"}
    for number in range(MAX_KINDS):
        refused_by(sums, f"k{number}", "K", kind=f"K{number}")
    assert len(sums._compared) == MAX_KINDS
