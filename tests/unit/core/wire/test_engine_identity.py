"""A peer speaks for the engine whose name it proves, and for no other."""

from __future__ import annotations

import pytest

from polyrl.wire.engine_identity import agent_keys_of, identity_of, is_reserved, proven_engine
from polyrl_operator.secret import make_run_keys

MANAGER, _, AGENT, OPERATOR = make_run_keys()
KEY = MANAGER.identity_key
PROVES_NOTHING = [b"", b"/", b"j-r-1", b"j-r-1/", b"j-r-1/\xff", b"\xff\xfe/x", b"j-r-1/" + b"A" * 43]


@pytest.mark.parametrize(
    ("given", "claimed", "proven"),
    [
        pytest.param("j-r-1", "j-r-1", True, id="its own name"),
        pytest.param("j-r-1", "j-r-2", False, id="another's"),
        pytest.param("j-r-1", "j-r-11", False, id="a longer one"),
        pytest.param("j-trainer-*", "j-trainer-0-x7k2p", True, id="a pod of the trainer's Job"),
        pytest.param("j-trainer-*", "j-r-1", False, id="a rollout, by the trainer's pod"),
        pytest.param("j-trainer-*", "j-trainer-0", False, id="no pod of the trainer's Job"),
        pytest.param("a name", "a name", False, id="no engine's name"),
    ],
)
def test_a_proof_is_of_one_name(given: str, claimed: str, proven: bool) -> None:
    keys = agent_keys_of(AGENT, OPERATOR.identity_key, given)
    assert proven_engine(identity_of(claimed, keys), KEY) == (claimed if proven else None)


@pytest.mark.parametrize(
    ("given", "claimed", "reserved"),
    [
        pytest.param("reserved", "reserved", True, id="of a laptop's first"),
        pytest.param("reserved-1", "reserved-1", True, id="of its successor"),
        pytest.param("reserved-12", "reserved-12", True, id="of a late successor"),
        pytest.param("rollout-1", "reserved-1", False, id="by a rollout's proof"),
        pytest.param("rollout-1", "rollout-1", False, id="a laptop's rollout"),
        pytest.param("reserved-r-1", "reserved-r-1", False, id="a rollout of a job called reserved"),
        pytest.param("j-trainer-*", "j-trainer-0-x7k2p", True, id="a pod of the trainer's Job"),
        pytest.param("j-rollout-1", "j-rollout-1", False, id="a rollout's pod"),
    ],
)
def test_only_the_trainers_proof_is_for_a_reserved_engine(given: str, claimed: str, reserved: bool) -> None:
    keys = agent_keys_of(AGENT, OPERATOR.identity_key, given)
    assert is_reserved(identity_of(claimed, keys), KEY) is reserved


@pytest.mark.parametrize("identity", PROVES_NOTHING)
def test_what_proves_nothing(identity: bytes) -> None:
    assert proven_engine(identity, KEY) is None


def test_the_proof_of_another_run_counts_for_nothing() -> None:
    other = agent_keys_of(AGENT, make_run_keys()[3].identity_key, "j-r-1")
    assert proven_engine(identity_of("j-r-1", other), KEY) is None


def test_an_identity_fits_zeromq() -> None:
    assert len(identity_of("e" * 128, agent_keys_of(AGENT, KEY, "e" * 128))) <= 255
