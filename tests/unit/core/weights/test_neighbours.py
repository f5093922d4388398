"""Which agents one dials: near ones first, few, those that fail after longer and longer, liars never."""

from __future__ import annotations

from polyrl.weights.neighbours import (
    FIRST_PAUSE_S,
    IDLE_PAUSE_S,
    LONGEST_PAUSE_S,
    UNREACHABLE,
    Neighbours,
)


def of(*names: str, own: str = "me") -> Neighbours:
    neighbours = Neighbours(own)
    for name in names:
        neighbours.add(name)
    return neighbours


def test_each_dials_in_an_order_of_its_own_and_nobody_twice_at_once() -> None:
    names = [f"e{number}" for number in range(20)]
    orders = []
    for own in ("one", "other"):
        neighbours, order = of(*names, own=own), []
        while (name := neighbours.choose(0.0, order)) is not None:
            order.append(name)
        assert sorted(order) == sorted(names)
        orders.append(order)
    assert orders[0] != orders[1]


def test_one_that_cannot_be_dialled_is_asked_on_what_it_offers_once() -> None:
    neighbours = of("a")
    neighbours.add("hidden", hidden=True)
    assert neighbours.choose(0.0, ("a",)) is None
    assert neighbours.offered("hidden")
    assert neighbours.choose(0.0, ("a",)) == "hidden"
    assert neighbours.take_offer("hidden")
    assert neighbours.choose(0.0, ("a",)) is None
    assert not neighbours.take_offer("hidden")
    assert not neighbours.take_offer("a")
    assert not neighbours.offered("a stranger")


def test_by_an_offer_dials_in_vain_are_forgiven_and_nothing_else() -> None:
    neighbours = of("slow")
    neighbours.failed("slow", 0.0)
    assert neighbours.offered("slow")
    assert neighbours.choose(0.0, ()) == "slow"
    neighbours.take_offer("slow")
    neighbours.reached("slow")
    neighbours.failed("slow", 1.0)
    assert neighbours.offered("slow")
    assert neighbours.choose(1.0, ()) is None
    assert neighbours.choose(1.0 + FIRST_PAUSE_S, ()) == "slow"
    neighbours.lied("slow")
    assert not neighbours.offered("slow")


def test_hidden_ones_fetch_the_same_where_somebody_lies_between() -> None:
    neighbours = of("a")
    for name in ("h1", "h2"):
        neighbours.add(name, hidden=True)
    assert neighbours.expected() == {"a", "h1", "h2"}
    neighbours.reached("a")
    neighbours.failed("a", 0.0)
    assert neighbours.expected() == set()
    neighbours.offered("h1")
    neighbours.reached("h1")
    assert neighbours.expected() == {"h1", "h2"}


def test_one_that_is_hidden_takes_whom_it_dialled_in_vain_for_another_such() -> None:
    neighbours = of("a", "vain", "broke")
    neighbours.failed("vain", 0.0)
    neighbours.reached("broke")
    neighbours.failed("broke", 0.0)
    assert neighbours.expected() == {"a"}
    neighbours.is_hidden = True
    assert neighbours.expected() == {"a", "vain"}
    neighbours.failed("a", 0.0)
    assert neighbours.expected() == set()


def test_those_on_its_own_machine_come_first() -> None:
    neighbours = of("a", "b", "c")
    neighbours.add("near", near=True)
    assert neighbours.choose(0.0, ()) == "near"


def test_one_that_cannot_be_reached_is_tried_again_after_pauses_that_double() -> None:
    neighbours, now = of("a"), 0.0
    for times in range(12):
        neighbours.failed("a", now)
        pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**times)
        assert neighbours.choose(now + pause - 0.1, ()) is None
        assert neighbours.choose(now + pause, ()) == "a"
        now += pause
    neighbours.reached("a")
    neighbours.failed("a", now)
    assert neighbours.choose(now + FIRST_PAUSE_S, ()) == "a"


def test_one_that_had_nothing_is_asked_again_soon_and_not_waited_for() -> None:
    neighbours = of("a", "b")
    neighbours.had_nothing("a", 0.0)
    assert neighbours.expected() == {"b"}
    assert neighbours.choose(IDLE_PAUSE_S - 0.1, ("b",)) is None
    assert neighbours.choose(IDLE_PAUSE_S, ("b",)) == "a"
    neighbours.reached("a")
    assert neighbours.expected() == {"a", "b"}


def test_one_that_lied_is_never_dialled_again_also_when_it_comes_back() -> None:
    neighbours = of("liar", "b")
    neighbours.lied("liar")
    neighbours.lied("liar")
    neighbours.remove("liar")
    neighbours.add("liar")
    assert neighbours.choose(1e9, ("b",)) is None
    assert neighbours.expected() == {"b"}
    assert neighbours.take_liars() == ("liar",)
    assert neighbours.take_liars() == ()


def test_who_reaches_nobody_waits_for_nobody() -> None:
    names = [f"e{number}" for number in range(2 * UNREACHABLE)]
    neighbours = of(*names)
    for name in names[: UNREACHABLE - 1]:
        neighbours.failed(name, 0.0)
    assert neighbours.expected() == set(names[UNREACHABLE - 1 :])
    neighbours.failed(names[UNREACHABLE - 1], 0.0)
    assert neighbours.expected() == set()
    neighbours.reached(names[-1])
    assert neighbours.expected() == set(names[UNREACHABLE:])


def test_one_that_is_gone_is_forgotten_and_fails_nobody() -> None:
    neighbours = of("a")
    neighbours.failed("a", 0.0)
    neighbours.remove("a")
    for late in (neighbours.failed, neighbours.had_nothing):
        late("a", 0.0)
    neighbours.reached("a")
    assert neighbours.choose(0.0, ()) is None
    neighbours.add("a")
    assert neighbours.choose(0.0, ()) == "a", "a process that begins anew is another one"
