"""What the manager's agents' sessions let in, and what they send of what the ledger said."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from structlog.testing import capture_logs

from polyrl.sample import Pool
from polyrl.wire import (
    Cancel,
    Deregister,
    Fenced,
    FromAgent,
    Heartbeat,
    Hello,
    Resend,
    ToAgent,
    TokensKept,
    WeightsLoaded,
    decode_to_agent,
    encode,
)
from polyrl.wire.engine_identity import IN_USE, NOT_RESERVED, REVOKED, UNPROVEN, agent_keys_of, identity_of
from polyrl_operator.secret import make_run_keys
from polyrl_rollout.manager.journal import RevokedNames
from polyrl_rollout.manager.peers.router import Router, Sent
from polyrl_rollout.manager.peers.sessions import GREETINGS_AT_ONCE, GREETINGS_PER_S, AgentSessions

MANAGER, _, AGENT, _ = make_run_keys()
HEARTBEAT = Heartbeat(0, 0, kv_free_tokens=0)
AS_VICTIM = encode(Hello(1, "victim", pool=Pool.SPOT, max_running=1, kv_tokens=9, max_context=9, weight_version=0))


class Outgoing:
    """A router that only remembers."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, ToAgent]] = []
        self.to: list[bytes] = []
        self.traffic = SimpleNamespace(dropped=Counter[str]())

    def send(self, identity: bytes, frame: bytes) -> Sent:
        self.to.append(identity)
        self.sent.append((identity.decode().partition("/")[0], decode_to_agent(frame)))
        return Sent.QUEUED

    def sender_host(self) -> str:
        return "10.0.0.7"


def identity(claimed: str, proof_of: str, process: str = "p") -> bytes:
    return identity_of(claimed, agent_keys_of(AGENT, MANAGER.identity_key, proof_of), process)


LEASE_S = 3.0


def sessions(
    outgoing: Outgoing, now: Callable[[], float] = lambda: 0.0, revoked: RevokedNames | None = None
) -> tuple[AgentSessions, list[tuple[str, FromAgent]]]:
    received: list[tuple[str, FromAgent]] = []

    def receive(name: str, message: FromAgent) -> None:
        received.append((name, message))

    own = AgentSessions(
        cast(Router, outgoing),
        receive,
        MANAGER.identity_key,
        lease_s=LEASE_S,
        revoked=RevokedNames() if revoked is None else revoked,
        now=now,
    )
    return own, received


def test_of_the_answers_to_one_engines_tokens_the_last_is_sent_and_all_else_in_order() -> None:
    outgoing = Outgoing()
    own, _ = sessions(outgoing)
    one, two = "one", "two"
    for name in (one, two):
        own.on_frame(identity(name, proof_of=name), encode(HEARTBEAT))
    own.send_all(
        [(one, TokensKept(1)), (two, TokensKept(9)), (one, Cancel(4)), (one, TokensKept(2)), (two, Resend(7, 0))]
    )
    assert outgoing.sent == [(two, TokensKept(9)), (one, Cancel(4)), (one, TokensKept(2)), (two, Resend(7, 0))]


def test_who_claims_another_engines_name_is_fenced_and_nothing_that_it_sends_counts() -> None:
    outgoing = Outgoing()
    own, received = sessions(outgoing)
    own.on_frame(identity("victim", proof_of="victim"), encode(HEARTBEAT))
    for frame in (AS_VICTIM, encode(HEARTBEAT)):
        own.on_frame(identity("victim", proof_of="thief"), frame)
    assert received == [("victim", HEARTBEAT)]
    assert outgoing.sent == [("victim", Fenced(UNPROVEN))] * 2
    assert outgoing.traffic.dropped == {"identity": 2}


def test_a_second_process_with_the_same_proof_waits_until_the_first_is_silent_for_its_lease() -> None:
    """Frames come each second; the second process tries beside each, and reads nothing meanwhile."""
    outgoing, clock = Outgoing(), [0.0]
    own, received = sessions(outgoing, lambda: clock[0])
    first, second = (identity("victim", "victim", process) for process in "12")
    for at in range(4):
        clock[0] = float(at)
        own.on_frame(first, encode(HEARTBEAT))
        own.on_frame(second, AS_VICTIM)
    own.send("victim", Cancel(1))
    assert outgoing.sent == [*[("victim", Fenced(IN_USE, lease_over=True))] * 4, ("victim", Cancel(1))]
    assert outgoing.to[-1] == first
    assert received == [("victim", HEARTBEAT)] * 4
    assert outgoing.traffic.dropped == {"double": 4}
    clock[0] += LEASE_S
    own.on_frame(second, encode(HEARTBEAT))
    own.on_frame(first, encode(HEARTBEAT))
    assert received == [("victim", HEARTBEAT)] * 5, "there is one at a time, whoever it is"
    assert outgoing.to[-1] == first


def test_a_second_process_with_the_same_proof_is_named_while_it_tries() -> None:
    clock = [100.0]
    own, _ = sessions(Outgoing(), lambda: clock[0])
    first, second = (identity("victim", "victim", process) for process in "12")
    own.on_frame(first, encode(HEARTBEAT))
    assert own.waits() == []
    for clock[0] in (100.0, 102.0, 104.0):
        own.on_frame(first, encode(HEARTBEAT))
        own.on_frame(second, AS_VICTIM)
    assert own.waits() == [("victim", 4.0)]
    clock[0] += 10.0
    assert own.waits() == [], "it has given up"
    own.on_frame(first, encode(HEARTBEAT))
    own.on_frame(second, AS_VICTIM)
    assert own.waits() == [("victim", 0.0)]


def test_who_greets_without_end_is_heard_once_a_second() -> None:
    """A hundred times a second, for ten; each greeting that is taken may stay in the journal for good."""
    clock, outgoing = [0.0], Outgoing()
    own, received = sessions(outgoing, lambda: clock[0])
    for tick in range(1000):
        clock[0] = tick / 100
        own.on_frame(identity("victim", "victim"), AS_VICTIM)
        own.on_frame(identity("other", "other"), encode(HEARTBEAT))
    greetings = [message for name, message in received if name == "victim"]
    assert len(greetings) == GREETINGS_AT_ONCE + 9
    assert outgoing.traffic.dropped == {"greetings": 1000 - len(greetings)}
    assert len(received) - len(greetings) == 1000, "others are heard as before"
    clock[0] += GREETINGS_AT_ONCE / GREETINGS_PER_S
    for _ in range(GREETINGS_AT_ONCE + 5):
        own.on_frame(identity("victim", "victim"), AS_VICTIM)
    assert len([name for name, _ in received if name == "victim"]) == len(greetings) + GREETINGS_AT_ONCE


def test_an_agent_that_took_its_leave_is_followed_by_another_at_once() -> None:
    own, received = sessions(Outgoing())
    own.on_frame(identity("one", "one", "1"), encode(Deregister("it ends")))
    own.on_frame(identity("one", "one", "2"), encode(HEARTBEAT))
    assert received == [("one", Deregister("it ends")), ("one", HEARTBEAT)]


def test_an_engine_whose_pod_is_gone_is_refused_from_then_on_also_after_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "revoked"
    own, received = sessions(outgoing := Outgoing(), revoked=RevokedNames(file))
    own.on_frame(identity("j-r-12", "j-r-12"), encode(HEARTBEAT))
    own.revoke("j-r-12")
    own.on_frame(identity("j-r-12", "j-r-12"), encode(HEARTBEAT))
    assert received == [("j-r-12", HEARTBEAT), ("j-r-12", Deregister(REVOKED))], "what it ran moves at once"
    own.send("j-r-12", Cancel(1))
    file.write_text(file.read_text() + "j-r-3")  # the machine went down while it wrote j-r-34
    again, received = sessions(outgoing, revoked=RevokedNames(file))
    again.revoke("j-r-34")
    again, received = sessions(outgoing, revoked=RevokedNames(file))
    for name in ("j-r-12", "j-r-34", "j-r-1", "j-r-3"):
        again.on_frame(identity(name, name), encode(HEARTBEAT))
    assert [name for name, _ in received] == ["j-r-1", "j-r-3"]
    assert outgoing.sent == [("j-r-12", Fenced(REVOKED))] * 2 + [("j-r-34", Fenced(REVOKED))]


def test_a_greeting_under_another_name_than_the_proven_one_is_dropped() -> None:
    outgoing = Outgoing()
    own, received = sessions(outgoing)
    own.on_frame(identity("thief", proof_of="thief"), AS_VICTIM)
    assert not received
    assert not outgoing.sent
    assert outgoing.traffic.dropped == {"identity": 1}


def test_who_never_spoke_is_sent_nothing() -> None:
    outgoing = Outgoing()
    own, _ = sessions(outgoing)
    own.send("silent", Cancel(1))
    assert not outgoing.sent


@pytest.mark.parametrize(
    ("name", "proof_of", "taken"),
    [
        pytest.param("job-trainer-0-x7k2p", "job-trainer-*", True, id="the trainer's pod"),
        pytest.param("reserved", "reserved", True, id="beside a trainer that is a process"),
        pytest.param("job-r-1", "job-r-1", False, id="a rollout"),
        pytest.param("rollout-0", "rollout-0", False, id="a rollout that is a process"),
    ],
)
def test_only_the_trainers_proof_makes_an_engine_reserved(name: str, proof_of: str, taken: bool) -> None:
    outgoing = Outgoing()
    agents, received = sessions(outgoing)
    hello = Hello(1, name, pool=Pool.RESERVED, max_running=1, kv_tokens=9, max_context=9, weight_version=0)
    agents.on_frame(identity(name, proof_of), encode(hello))
    assert received == ([(name, hello)] if taken else [])
    assert outgoing.sent == ([] if taken else [(name, Fenced(NOT_RESERVED))])


def test_what_an_engine_says_of_others_does_not_fill_the_log() -> None:
    """A frame of 131 kB was as much of the log, as often as it came: 16 MB a second from one engine."""
    own, _ = sessions(Outgoing())
    liars = tuple(f"{number:04}" + "x" * 120 for number in range(1024))
    frame = encode(WeightsLoaded(-1, 0.0, load_seconds=0.0, bytes_pulled=0, liars=liars))
    with capture_logs() as logged:
        for _ in range(100):
            own.on_frame(identity("a", "a"), frame)
    assert [line["times"] for line in logged] == [1, 2, 4, 8, 16, 32, 64]
    assert len(str(logged)) < 10_000
    assert own.weights.false_chunks == 102_400


def test_a_name_that_the_disk_did_not_take_is_refused_and_kept_when_it_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counted as kept, so that the operator's second try was answered well and the next manager took the engine."""

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    names = RevokedNames(file := tmp_path / "revoked")
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", fail)
        for _ in range(2):
            with pytest.raises(OSError, match="Input/output"):
                names.add("engine-1")
    assert "engine-1" in names
    assert "engine-1" not in RevokedNames(file)
    names.add("engine-1")
    names.add("engine-2")
    assert file.read_text() == "engine-1\nengine-2\n"
