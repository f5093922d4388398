"""Who is asked for which chunk: rare ones first, few at once, nothing twice, and again what a source did not bring."""

from __future__ import annotations

from collections import Counter
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from polyrl.weights.fetch_plan import (
    ALLOWED_S,
    MAX_RANK,
    PEER_AHEAD,
    PUBLISHER,
    PUBLISHER_AHEAD,
    REACH_S,
    SHARED_AHEAD,
    SLOW_FACTOR,
    SLUGGISH_S,
    STALL_S,
    FetchPlan,
    Flags,
    Source,
)
from polyrl.weights.manifest import ChunkEntry, digest

CHUNKS = tuple(ChunkEntry(digest(bytes([number])), 1) for number in range(12))


def flags(*chunks: int, of: int = len(CHUNKS)) -> Flags:
    found = np.zeros(of, np.bool_)
    found[list(chunks)] = True
    return found


def plan_with(*peers: str, me: str = "me", expected: tuple[str, ...] | None = None) -> FetchPlan:
    plan = FetchPlan(CHUNKS, me)
    plan.expect(peers if expected is None else expected)
    for peer in peers:
        plan.join(peer)
    return plan


def has(plan: FetchPlan, peer: str, *held: int, coming: tuple[int, ...] = (), now: float = 0.0) -> None:
    plan.note(peer, flags(*held), flags(*coming), now, fetches=True)


def asked_of(plan: FetchPlan, source: Source, now: float = 0.0) -> list[int]:
    """All that it is asked for now."""
    return list(iter(lambda: plan.next(source, now), None))


def test_alone_it_asks_the_publisher_in_the_order_of_the_stream() -> None:
    plan = FetchPlan(CHUNKS)
    assert asked_of(plan, PUBLISHER) == list(range(PUBLISHER_AHEAD))
    plan.came(PUBLISHER, 0, 0.1)
    assert asked_of(plan, PUBLISHER) == [PUBLISHER_AHEAD]


def test_of_an_agent_the_rarest_are_asked_first_and_few_at_once() -> None:
    plan = plan_with("a", "b", "c")
    has(plan, "a", 0, 1, 2, 3, 4)
    has(plan, "b", 0, 1, 2)
    has(plan, "c", 0, 1, 2, 3)
    assert asked_of(plan, "a") == [4, 3]
    plan.came("a", 4, 0.1)
    assert len(asked_of(plan, "a")) == 1 == PEER_AHEAD - 1


def test_no_chunk_is_asked_for_twice_at_once() -> None:
    plan = plan_with("a", "b")
    has(plan, "a", 0)
    has(plan, "b", 0)
    assert asked_of(plan, "a") == [0]
    assert asked_of(plan, "b") == []
    assert 0 not in asked_of(plan, PUBLISHER)


def test_what_an_agent_has_the_publisher_is_not_asked_for() -> None:
    plan = plan_with("a", expected=())
    has(plan, "a", *range(11))
    assert asked_of(plan, PUBLISHER) == [11]


def test_receivers_share_out_the_publisher_without_a_word() -> None:
    names = ("a", "b", "c")
    plans = {me: plan_with(*(set(names) - {me}), me=me) for me in names}
    firsts: Counter[int] = Counter()
    for plan in plans.values():
        while (chunk := plan.next(PUBLISHER, 0.0)) is not None:
            firsts[chunk] += 1
            plan.came(PUBLISHER, chunk, 0.0)
    assert firsts == Counter(range(len(CHUNKS)))


def test_of_a_receiver_that_does_nothing_others_take_the_share_after_a_stall() -> None:
    plan, other = plan_with("a", "dead", me="me"), plan_with("me", "dead", me="a")
    own, theirs = ({chunk for chunk in _drain(each)} for each in (plan, other))
    lost = set(range(len(CHUNKS))) - own - theirs
    assert lost, "a share was the dead one's"
    has(plan, "a", *theirs)
    assert not lost & set(asked_of(plan, PUBLISHER, STALL_S / 2))
    late = STALL_S * MAX_RANK
    assert lost <= set(_drain(plan, late))


def _drain(plan: FetchPlan, now: float = 0.0) -> list[int]:
    """All that the publisher may be asked for at that time, which comes at once."""
    found = []
    while (chunk := plan.next(PUBLISHER, now)) is not None:
        found.append(chunk)
        plan.came(PUBLISHER, chunk, now)
    return found


def test_what_a_neighbour_awaits_is_left_to_it_but_not_for_ever() -> None:
    plan = plan_with("a")
    theirs = set(range(len(CHUNKS))) - set(_drain(plan))
    has(plan, "a", coming=tuple(theirs), now=STALL_S * MAX_RANK)
    assert _drain(plan, STALL_S * MAX_RANK) == []
    # It takes its claims back and makes them again, as one would that wants to hold others up.
    has(plan, "a", now=STALL_S * MAX_RANK + ALLOWED_S / 2)
    again = STALL_S * MAX_RANK + ALLOWED_S
    has(plan, "a", coming=tuple(theirs), now=again)
    assert set(_drain(plan, again)) == theirs


def test_while_there_is_news_nobody_takes_anothers_share() -> None:
    plan = plan_with("a")
    theirs = sorted(set(range(len(CHUNKS))) - set(_drain(plan)))
    has(plan, "a", theirs[0], now=STALL_S / 2)
    assert _drain(plan, STALL_S) == []
    assert set(_drain(plan, STALL_S * 1.5)) == set(theirs[1:])


def test_a_share_of_one_that_is_expected_no_more_is_taken_at_once() -> None:
    plan = plan_with("a", "b")
    mine = _drain(plan)
    plan.expect(("b",))
    more = _drain(plan)
    assert more
    plan.expect(())
    assert sorted(mine + more + _drain(plan)) == list(range(len(CHUNKS)))


def test_what_an_agent_says_again_and_again_is_no_news() -> None:
    plan = plan_with("a")
    mine = _drain(plan)
    theirs = set(range(len(CHUNKS))) - set(mine)
    late = STALL_S * MAX_RANK
    one = next(iter(theirs))
    # Something new, then the same again, and what is here already.
    for now, held in ((0.5, (one,)), (0.9, ()), (late, (one, mine[0]))):
        has(plan, "a", *held, now=now)
    assert set(_drain(plan, 0.5 + late)) == theirs - {one}


def test_while_others_fetch_too_few_are_asked_of_the_publisher_at_once() -> None:
    plan = plan_with("a", expected=())
    assert len(asked_of(plan, PUBLISHER)) == PUBLISHER_AHEAD
    plan = plan_with("a", expected=())
    has(plan, "a")
    assert len(asked_of(plan, PUBLISHER)) == SHARED_AHEAD


def test_what_a_source_that_is_left_was_asked_for_is_to_be_had_again() -> None:
    plan = plan_with("a", "b")
    has(plan, "a", 0, 1)
    has(plan, "b", 0)
    assert asked_of(plan, "a") == [1, 0]
    plan.leave("a")
    assert asked_of(plan, "b") == [0]
    assert 1 in _drain(plan, STALL_S * MAX_RANK), "nobody has it any more"


def test_what_a_connection_of_the_publisher_did_not_bring_is_to_be_had_again() -> None:
    plan = FetchPlan(CHUNKS)
    assert asked_of(plan, PUBLISHER)[:2] == [0, 1]
    plan.give_back(PUBLISHER, [0])
    assert plan.next(PUBLISHER, 1.0) == 0


def test_what_an_agent_lacks_is_asked_of_others() -> None:
    plan = plan_with("liar", expected=())
    has(plan, "liar", 0)
    assert asked_of(plan, "liar") == [0]
    assert 0 not in asked_of(plan, PUBLISHER)
    plan.lacks("liar", 0)
    assert asked_of(plan, "liar") == []
    plan.give_back(PUBLISHER, [1])
    assert asked_of(plan, PUBLISHER) == [0]


def test_a_slow_agent_is_given_up_by_what_others_take() -> None:
    plan = plan_with("fast", "slow", expected=())
    has(plan, "fast", *range(6))
    has(plan, "slow", *range(6, 12))
    usual = 2.0
    now = 0.0
    for _ in range(4):
        chunk = plan.next("fast", now)
        assert chunk is not None
        now += usual
        plan.came("fast", chunk, now)
    begun = now
    chunk = plan.next("slow", begun)
    assert chunk is not None
    assert not plan.is_slow("slow", chunk, begun + SLOW_FACTOR * usual)
    assert plan.is_slow("slow", chunk, begun + SLOW_FACTOR * usual + 0.1)


def test_nobody_is_slow_within_what_each_is_allowed() -> None:
    plan = plan_with("a", expected=())
    has(plan, "a", 0)
    assert asked_of(plan, "a") == [0]
    assert not plan.is_slow("a", 0, ALLOWED_S)
    assert plan.is_slow("a", 0, ALLOWED_S + 0.1)


def test_the_publisher_is_slow_only_where_another_has_the_chunk() -> None:
    plan = plan_with("a", expected=())
    assert 0 in asked_of(plan, PUBLISHER)
    assert not plan.is_slow(PUBLISHER, 0, 100.0)
    has(plan, "a", 0)
    assert plan.is_slow(PUBLISHER, 0, 100.0)


def test_the_publisher_helps_where_all_who_have_a_chunk_are_busy() -> None:
    plan = plan_with("a", expected=())
    has(plan, "a", *range(len(CHUNKS)))
    assert len(asked_of(plan, "a")) == PEER_AHEAD
    assert asked_of(plan, PUBLISHER, SLUGGISH_S) == []
    assert asked_of(plan, PUBLISHER, SLUGGISH_S + 0.1) != []


@pytest.mark.parametrize("held", [(), (0, 1)], ids=["nothing", "what is here"])
def test_an_agent_with_nothing_that_lacks_here_is_of_no_use(held: tuple[int, ...]) -> None:
    plan = plan_with("a", expected=())
    for chunk in (0, 1):
        assert plan.next(PUBLISHER, 0.0) == chunk
        plan.came(PUBLISHER, chunk, 0.0)
    has(plan, "a", *held)
    assert not plan.wants_of("a")
    has(plan, "a", *held, 2)
    assert plan.wants_of("a")


class Swarm:
    """Receivers of one version in rounds of 0.1 s: in each the publisher gives so many chunks, an agent two each."""

    ROUND_S = 0.1

    def __init__(self, names: list[str], chunks: int, per_round: int) -> None:
        self.chunks = tuple(ChunkEntry(digest(number.to_bytes(2, "big")), 1) for number in range(chunks))
        self.per_round, self.sent, self.now = per_round, 0, 0.0
        self.queue: list[tuple[str, int]] = []
        self.here = {name: flags(of=chunks) for name in names}
        self.plans = {name: self.join(name) for name in names}

    def join(self, name: str) -> FetchPlan:
        plan = FetchPlan(self.chunks, name, self.now)
        for other in self.here:
            if other != name:
                plan.join(other)
        plan.expect(set(self.here) - {name})
        return plan

    def die(self, name: str) -> None:
        """Its last inventory stays with the others, who dial in vain and learn nothing of it."""
        del self.plans[name]
        self.queue = [(whose, chunk) for whose, chunk in self.queue if whose != name]
        for plan in self.plans.values():
            plan.leave(name)

    def round(self) -> None:
        self.now += self.ROUND_S
        for name, plan in self.plans.items():
            for other in self.plans.keys() - {name}:
                coming = flags(*(chunk for whose, chunk in self.queue if whose == other), of=len(self.chunks))
                plan.note(other, self.here[other], coming, self.now, fetches=not self.plans[other].is_done)
                while (chunk := plan.next(other, self.now)) is not None:
                    plan.came(other, chunk, self.now)
                    self.here[name][chunk] = True
            while (chunk := plan.next(PUBLISHER, self.now)) is not None:
                self.queue.append((name, chunk))
        for name, chunk in self.queue[: self.per_round]:
            self.sent += 1
            self.plans[name].came(PUBLISHER, chunk, self.now)
            self.here[name][chunk] = True
        del self.queue[: self.per_round]

    def run(self, most: int) -> bool:
        """Whether all have all within so many rounds."""
        for _ in range(most):
            self.round()
            if all(plan.is_done for plan in self.plans.values()):
                return True
        return False


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 8), st.integers(1, 60), st.integers(1, 6), st.randoms(use_true_random=False), st.data())
def test_whoever_dies_the_others_get_all_and_the_publisher_sends_little_more_than_once(
    receivers: int, chunks: int, per_round: int, draw: object, data: st.DataObject
) -> None:
    swarm = Swarm([f"e{number}" for number in range(receivers)], chunks, per_round)
    dying = data.draw(st.lists(st.sampled_from(sorted(swarm.plans)), max_size=receivers - 1, unique=True))
    for name in dying:
        for _ in range(data.draw(st.integers(0, 2 * chunks // per_round))):
            swarm.round()
        swarm.die(name)
    # One round for each chunk, and the stalls after which the shares of the dead are taken over.
    stalls = int((1 + len(dying)) * MAX_RANK * STALL_S / Swarm.ROUND_S)
    assert swarm.run(chunks + receivers + stalls)
    assert swarm.sent <= (1 + len(dying)) * chunks + SHARED_AHEAD * receivers


# --- a publisher of two machines --------------------------------------------------------------------------------------

OF_TWO = (0, 1) * 6
SECOND = 1
ODD = list(range(1, 12, 2))


def two_machines() -> FetchPlan:
    plan = FetchPlan(CHUNKS, machines=OF_TWO)
    plan.reach(SECOND)
    return plan


def test_each_machine_is_asked_for_its_own_chunks() -> None:
    plan = two_machines()
    assert asked_of(plan, PUBLISHER, 100.0) == [0, 2, 4, 6, 8, 10]
    assert asked_of(plan, SECOND, 100.0) == ODD
    plan.came(SECOND, 1, 100.1)
    assert not plan.is_slow(SECOND, 3, 100.1 + ALLOWED_S), "nobody else has it"


def test_one_that_is_not_reached_is_asked_for_by_the_first_after_a_while() -> None:
    plan = FetchPlan(CHUNKS, machines=OF_TWO)
    assert asked_of(plan, PUBLISHER, REACH_S) == [0, 2, 4, 6, 8, 10]
    for chunk in range(0, 12, 2):
        plan.came(PUBLISHER, chunk, REACH_S)
    assert asked_of(plan, PUBLISHER, REACH_S + 0.1) == ODD


def test_one_whose_last_connection_has_ended_is_left_and_asked_again_when_it_is_back() -> None:
    plan = two_machines()
    plan.reach(SECOND)
    for chunk in asked_of(plan, PUBLISHER):
        plan.came(PUBLISHER, chunk, 0.1)
    taken = asked_of(plan, SECOND)
    plan.lose(SECOND, 1.0)
    plan.came(SECOND, taken.pop(), 1.5)
    assert asked_of(plan, PUBLISHER, 1.5 + ALLOWED_S) == [], "the other one brings something"
    plan.give_back(SECOND, taken)
    plan.lose(SECOND, 5.0)
    assert asked_of(plan, PUBLISHER, 5.0 + REACH_S) == []
    assert plan.next(PUBLISHER, 5.1 + REACH_S) == 1
    plan.reach(SECOND)
    plan.came(SECOND, asked_of(plan, SECOND, 30.0)[0], 30.0)
    assert asked_of(plan, PUBLISHER, 30.0 + ALLOWED_S) == []


def test_one_whose_connections_end_before_anything_comes_is_as_good_as_not_reached() -> None:
    plan = FetchPlan(CHUNKS, machines=OF_TWO)
    for chunk in asked_of(plan, PUBLISHER):
        plan.came(PUBLISHER, chunk, 0.0)
    for again in range(4):
        plan.reach(SECOND)
        plan.give_back(SECOND, asked_of(plan, SECOND, again / 4))
        plan.lose(SECOND, again / 4)
    plan.reach(SECOND)
    assert asked_of(plan, PUBLISHER, 0.9) == []
    assert asked_of(plan, PUBLISHER, 1.1) == ODD


def test_one_that_does_not_keep_the_version_is_asked_no_more() -> None:
    plan = two_machines()
    plan.refuse(SECOND)
    assert asked_of(plan, SECOND) == []
    assert asked_of(plan, PUBLISHER) == list(range(PUBLISHER_AHEAD))


@pytest.mark.parametrize(
    ("first_s", "second_s", "seconds", "left"),
    [
        (0.1, 0.1, 20.0, False),
        (0.1, 1.0, 20.0, False),
        (0.1, ALLOWED_S + 0.5, ALLOWED_S + 0.2, True),
        (0.1, inf, ALLOWED_S + 0.2, True),
        (0.02, 0.5, ALLOWED_S + 0.2, True),
        (0.02, 0.5, ALLOWED_S - 0.2, False),
        (2.0, ALLOWED_S * 2, 20.0, False),
        (inf, inf, 20.0, False),
        (ALLOWED_S + 1, ALLOWED_S + 2, 20.0, False),
    ],
    ids=[
        "as fast",
        "a tenth",
        "a chunk that takes too long",
        "nothing at all",
        "far slower on the average",
        "not for long enough",
        "a slow network",
        "nobody gives anything",
        "a network slower than is allowed",
    ],
)
def test_a_machine_far_slower_than_the_first_is_left(
    first_s: float, second_s: float, seconds: float, *, left: bool
) -> None:
    """Each takes so long for a chunk, one after the other."""
    number = 2 * int(seconds / 0.02)
    chunks = [ChunkEntry(digest(b"%d" % place), 1) for place in range(2 * number)]
    plan = FetchPlan(chunks, machines=(0, 1) * number)
    plan.reach(SECOND)
    paces, asked, since = {PUBLISHER: first_s, SECOND: second_s}, dict[int, int](), dict[int, float]()
    for step in range(int(seconds * 100)):
        now = step / 100
        for machine, pace in paces.items():
            if machine in asked and now - since[machine] >= pace:
                plan.came(machine, asked.pop(machine), now)
            if machine not in asked and (chunk := plan.next(machine, now)) is not None:
                asked[machine], since[machine] = chunk, now
    assert plan.left(now) == [SECOND] * left
    assert SECOND not in asked or plan.is_slow(SECOND, asked[SECOND], now) == left


def test_what_a_machine_that_is_left_was_asked_for_is_the_firsts() -> None:
    plan = two_machines()
    taken = asked_of(plan, SECOND)
    for chunk in asked_of(plan, PUBLISHER):
        plan.came(PUBLISHER, chunk, 0.1)
    assert asked_of(plan, PUBLISHER, ALLOWED_S) == []
    assert not plan.is_slow(SECOND, 1, ALLOWED_S)
    assert asked_of(plan, PUBLISHER, ALLOWED_S + 0.1) == []
    assert all(plan.is_slow(SECOND, chunk, ALLOWED_S + 0.1) for chunk in taken)
    plan.give_back(SECOND, taken)
    plan.lose(SECOND, ALLOWED_S + 0.2)
    plan.reach(SECOND)
    assert asked_of(plan, SECOND, ALLOWED_S + 0.3) == []
    assert asked_of(plan, PUBLISHER, ALLOWED_S + 0.3) == ODD
