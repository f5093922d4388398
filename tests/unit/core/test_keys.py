"""Key files: each role gets what it needs, and a wrong file is refused with a sentence that holds no secret."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec
import pytest
import zmq

from polyrl.errors import InvalidData
from polyrl.keys import (
    FILE_NAMES,
    AgentKeys,
    ManagerKeys,
    OperatorKeys,
    TrainerKeys,
    format_keys,
    is_exposed,
    is_z85_key,
    parse_keys,
    read_keys,
)
from polyrl_operator.secret import make_run_keys, write_run_keys


def test_every_role_holds_its_pair_and_the_public_keys_of_its_peers() -> None:
    manager, trainer, agent, operator = make_run_keys()
    assert (manager.agent_public_key, manager.trainer_public_key) == (agent.public_key, trainer.public_key)
    assert (trainer.manager_public_key, trainer.agent_public_key) == (manager.public_key, agent.public_key)
    assert (agent.manager_public_key, agent.trainer_public_key) == (manager.public_key, trainer.public_key)
    assert operator.http_token == manager.http_token
    assert operator.identity_key == manager.identity_key
    assert (agent.engine, agent.proof) == ("", ""), "it is nobody's before an engine is named"
    for keys in (manager, trainer, agent):
        assert zmq.curve_public(keys.secret_key.encode()).decode() == keys.public_key


def test_no_role_holds_the_secret_of_another(tmp_path: Path) -> None:
    write_run_keys(tmp_path / "keys")
    secrets = {
        kind: read_keys(kind, tmp_path / "keys" / FILE_NAMES[kind]).secret_key
        for kind in (ManagerKeys, TrainerKeys, AgentKeys)
    }
    for kind, name in FILE_NAMES.items():
        text = (tmp_path / "keys" / name).read_text()
        assert [other for other, secret in secrets.items() if secret in text] == ([kind] if kind in secrets else [])


def test_files_are_private_and_never_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    write_run_keys(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}
    assert {file.name for file in folder.iterdir()} == {
        *FILE_NAMES.values(),
        *("ca.crt", "ca.key", "tls.crt", "tls.key"),
    }
    with pytest.raises(InvalidData, match=r"manager\.key: a key file is already there"):
        write_run_keys(folder)


@pytest.mark.parametrize("keys", make_run_keys(), ids=lambda keys: type(keys).__name__)
def test_what_is_formatted_is_parsed(keys: ManagerKeys | TrainerKeys | AgentKeys | OperatorKeys) -> None:
    assert parse_keys(type(keys), format_keys(keys), "k") == keys


def test_a_printed_key_holds_no_secret() -> None:
    for keys in make_run_keys():
        for value in filter(None, msgspec.structs.asdict(keys).values()):
            assert value not in repr(keys)
            assert value not in str(keys)


AGENT = make_run_keys()[2]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        pytest.param("", "a.key: not a key file of agent", id="empty"),
        pytest.param("{}", "publicKey", id="no field"),
        pytest.param("[]", "not a key file of agent", id="a list"),
        pytest.param(format_keys(AGENT)[:-20], "not a key file of agent", id="cut off"),
        pytest.param(format_keys(AGENT).replace("secretKey", "secret"), "secret", id="another field"),
        pytest.param(
            format_keys(msgspec.structs.replace(AGENT, secret_key="short")),
            "secretKey is not a CURVE key of 40",
            id="a short key",
        ),
        pytest.param(
            format_keys(msgspec.structs.replace(AGENT, manager_public_key="~" * 40)),
            "managerPublicKey is not a CURVE",
            id="a key with a wrong letter",
        ),
    ],
)
def test_a_malformed_file_is_refused_with_its_place_and_without_its_secret(text: str, sentence: str) -> None:
    with pytest.raises(InvalidData) as refused:
        parse_keys(AgentKeys, text, "a.key")
    assert sentence in str(refused.value)
    assert str(refused.value).startswith("a.key: ")
    assert AGENT.secret_key not in str(refused.value)
    assert refused.value.__cause__ is None


def test_a_weak_token_is_refused() -> None:
    with pytest.raises(InvalidData, match="httpToken is not 32 or more"):
        parse_keys(OperatorKeys, '{"httpToken": "secret", "identityKey": "secret"}', "operator.key")


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "agent.key"
    path.write_text(format_keys(AGENT))
    path.chmod(0o640)
    with pytest.raises(InvalidData, match=r"agent\.key: other users may read this key file \(mode 0640\)"):
        read_keys(AgentKeys, path)


US, OUR_GROUP = 10001, 10001


@pytest.mark.parametrize(
    ("mode", "owner", "group", "exposed"),
    [
        pytest.param(0o600, US, OUR_GROUP, False, id="ours alone"),
        pytest.param(0o400, US, 7, False, id="ours, to be read only, whatever the group"),
        pytest.param(0o440, US, OUR_GROUP, True, id="our group may read ours"),
        pytest.param(0o604, US, OUR_GROUP, True, id="everybody may read ours"),
        pytest.param(0o440, 0, OUR_GROUP, False, id="root's, lent to our group"),
        pytest.param(0o640, 0, OUR_GROUP, False, id="root's, which may write it"),
        pytest.param(0o440, 0, 7, True, id="root's, lent to another group"),
        pytest.param(0o440, 7, OUR_GROUP, True, id="another user's"),
        pytest.param(0o444, 0, OUR_GROUP, True, id="root's, everybody reads it"),
        pytest.param(0o460, 0, OUR_GROUP, True, id="root's, our group may write it"),
        pytest.param(0o450, 0, OUR_GROUP, True, id="root's, our group may run it"),
    ],
)
def test_only_root_may_lend_a_key_file_and_only_to_our_group(mode: int, owner: int, group: int, exposed: bool) -> None:
    status = os.stat_result((stat.S_IFREG | mode, 0, 0, 1, owner, group, 0, 0, 0, 0))
    assert is_exposed(status, US, {OUR_GROUP, 20000}) is exposed


def test_for_root_its_own_files_are_as_anybodys() -> None:
    assert is_exposed(os.stat_result((stat.S_IFREG | 0o440, 0, 0, 1, 0, 0, 0, 0, 0, 0)), 0, {0})


def test_an_absent_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match=r"agent\.key: cannot read the key file: No such file"):
        read_keys(AgentKeys, tmp_path / "agent.key")


def test_z85() -> None:
    assert is_z85_key("rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7")
    assert not is_z85_key("rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf")
    assert not is_z85_key("rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7\n")
