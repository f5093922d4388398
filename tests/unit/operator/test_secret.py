"""A run's Secret and the certificate of its manager."""

from __future__ import annotations

import asyncio
import base64
import ssl
from typing import Any

import pytest

from polyrl.cluster.actions import MakeKeys
from polyrl.errors import InvalidData, ProtocolError
from polyrl.keys import FILE_NAMES, AgentKeys, ManagerKeys, OperatorKeys, TrainerKeys, parse_keys
from polyrl_operator.managers.client import _pinned
from polyrl_operator.secret import keys_secret, make_certificate, manager_credentials


class Owner:
    def metadata(self, name: str) -> dict[str, Any]:
        return {"name": name, "namespace": "ns"}


def test_the_secret_holds_every_roles_file_and_the_operator_reads_its_own() -> None:
    action = MakeKeys("j-keys", ("j-manager", "j-manager.ns.svc"), now=0.0)
    secret = keys_secret(Owner(), action)  # type: ignore[arg-type]
    files = {name: base64.b64decode(text) for name, text in secret["data"].items()}
    for kind in (ManagerKeys, TrainerKeys, AgentKeys, OperatorKeys):
        parse_keys(kind, files[FILE_NAMES[kind]], "test")
    read = manager_credentials(secret)
    assert read.token == parse_keys(ManagerKeys, files["manager.key"], "test").http_token
    assert read.token not in repr(read)
    assert set(files) == {*FILE_NAMES.values(), "ca.crt", "ca.key"}


@pytest.mark.parametrize(
    ("name", "accepted"), [("j-manager", True), ("j-manager.ns.svc", True), ("other-manager", False)]
)
async def test_a_managers_certificate_speaks_for_its_own_names_only(name: str, accepted: bool, tmp_path: Any) -> None:
    made = make_certificate(["j-manager", "j-manager.ns.svc"])
    (tmp_path / "crt").write_bytes(made.certificate)
    (tmp_path / "key").write_bytes(made.key)
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(tmp_path / "crt", tmp_path / "key")

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    def trust(authority: bytes) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cadata=authority.decode())
        return context

    server = await asyncio.start_server(greet, "127.0.0.1", 0, ssl=serving)
    async with server:
        port = server.sockets[0].getsockname()[1]

        async def connect(authority: bytes) -> bytes:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, ssl=trust(authority), server_hostname=name
            )
            received = await reader.read()
            writer.close()
            await writer.wait_closed()
            return received

        if accepted:
            assert await connect(made.authority) == b"hello"
        else:
            with pytest.raises(ssl.SSLCertVerificationError):
                await connect(made.authority)
        with pytest.raises(ssl.SSLCertVerificationError):
            await connect(make_certificate(["j-manager", "j-manager.ns.svc"]).authority)


@pytest.mark.parametrize(
    ("authority", "why"),
    [
        pytest.param(b"-" * 5000, "5,000 bytes", id="long"),
        pytest.param(b"\xff\xfe", "no certificate", id="no text"),
        pytest.param(b"mine", "no certificate", id="no certificate"),
    ],
)
def test_what_whoever_edits_a_secret_puts_in_its_authoritys_place_is_not_kept(authority: bytes, why: str) -> None:
    """A megabyte of certificates cost 6.5 MB a job, for as long as it was pinned; others ended the job's polls."""
    secret = keys_secret(Owner(), MakeKeys("j-keys", ("j-manager",), now=0.0))  # type: ignore[arg-type]
    secret["metadata"]["name"] = "j-keys"
    secret["data"]["ca.crt"] = base64.b64encode(authority).decode()
    with pytest.raises(InvalidData, match=rf"^Secret j-keys: ca\.crt: {why}"):
        manager_credentials(secret)


@pytest.mark.parametrize(
    "authority", ["", "no certificate", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----", "\u00e9"]
)
def test_what_is_no_authority_is_pinned_by_nobody(authority: str) -> None:
    with pytest.raises(ProtocolError, match="the authority of its certificate cannot be pinned"):
        _pinned(authority)
