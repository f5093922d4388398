"""Small values of the shell: URLs and permissions, merge patches, the aggregation of Events, a run's certificate."""

from __future__ import annotations

import asyncio
import base64
import ssl
from typing import Any

import pytest
from hypothesis import given, strategies as st

from polyrl.cluster.actions import MakeKeys
from polyrl.keys import FILE_NAMES, AgentKeys, ManagerKeys, OperatorKeys, TrainerKeys, parse_keys
from polyrl_operator.api.kinds import CLAIM, JOB, POD
from polyrl_operator.api.permissions import Permission, permission_for
from polyrl_operator.reconciler.events import RECOUNT_S, REMEMBERED, WINDOW_S, EventAggregator
from polyrl_operator.reconciler.status_writer import merge_patch
from polyrl_operator.secret import keys_secret, make_certificate, manager_credentials


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (POD.path("ns", "p"), "/api/v1/namespaces/ns/pods/p"),
        (POD.path(), "/api/v1/pods"),
        (JOB.path("ns", "j", "status"), "/apis/polyrl.dev/v1alpha1/namespaces/ns/polyrljobs/j/status"),
        (CLAIM.path("ignored", "c"), "/apis/karpenter.sh/v1/nodeclaims/c"),
    ],
)
def test_paths(path: str, expected: str) -> None:
    assert path == expected


@pytest.mark.parametrize(
    ("method", "path", "watch", "expected"),
    [
        ("GET", "/api/v1/namespaces/ns/pods", False, Permission("list", "", "pods")),
        ("GET", "/api/v1/pods", True, Permission("watch", "", "pods")),
        ("GET", "/api/v1/namespaces/ns/pods/p", False, Permission("get", "", "pods")),
        ("POST", "/api/v1/namespaces/ns/pods", False, Permission("create", "", "pods")),
        ("PATCH", "/apis/polyrl.dev/v1alpha1/namespaces/ns/polyrljobs/j/status", False,
         Permission("patch", "polyrl.dev", "polyrljobs/status")),
        ("DELETE", "/apis/batch/v1/namespaces/ns/jobs/j", False, Permission("delete", "batch", "jobs")),
        ("PUT", "/apis/coordination.k8s.io/v1/namespaces/ns/leases/l", False,
         Permission("update", "coordination.k8s.io", "leases")),
        ("GET", "/api/v1/nodes/n", False, Permission("get", "", "nodes")),
        ("GET", "/apis/karpenter.sh/v1", False, Permission("get", "", "/apis/karpenter.sh/v1")),
    ],
)  # fmt: skip
def test_the_permission_that_a_request_needs(method: str, path: str, watch: bool, expected: Permission) -> None:
    assert permission_for(method, path, watch) == expected


values = st.recursive(
    st.integers() | st.text(max_size=3) | st.booleans(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(st.sampled_from("abc"), values, max_size=3)


def patched(old: Any, patch: Any) -> Any:
    """RFC 7386, section 2."""
    if not isinstance(patch, dict):
        return patch
    new = dict(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if value is None:
            new.pop(key, None)
        else:
            new[key] = patched(new.get(key), value)
    return new


@pytest.mark.slow
@given(objects, objects)
def test_a_patch_makes_the_one_into_the_other_and_is_empty_only_for_the_same(
    old: dict[str, Any], new: dict[str, Any]
) -> None:
    patch = merge_patch(old, new)
    assert patched(old, patch) == new
    assert bool(patch) == (old != new)


def test_a_sentence_is_told_once_and_then_counted() -> None:
    aggregator = EventAggregator()
    assert aggregator.count("a", 0.0) == 1
    assert aggregator.count("a", 1.0) is None
    assert aggregator.count("b", 1.0) == 1
    assert aggregator.count("a", RECOUNT_S) == 3
    assert aggregator.count("a", RECOUNT_S + 1) is None
    assert aggregator.count("a", WINDOW_S + 1) == 1, "after a while it is news again"


def test_what_is_remembered_of_events_is_bounded() -> None:
    aggregator = EventAggregator()
    for number in range(3 * REMEMBERED):
        assert aggregator.count(str(number), 0.0) == 1
    assert len(aggregator._series) == REMEMBERED


class Owner:
    def metadata(self, name: str) -> dict[str, Any]:
        return {"name": name, "namespace": "ns"}


def test_the_secret_holds_every_roles_file_and_the_operator_reads_its_own() -> None:
    action = MakeKeys("j-keys", ("j-manager", "j-manager.ns.svc"))
    secret = keys_secret(Owner(), action)  # type: ignore[arg-type]
    files = {name: base64.b64decode(text) for name, text in secret["data"].items()}
    for kind in (ManagerKeys, TrainerKeys, AgentKeys, OperatorKeys):
        parse_keys(kind, files[FILE_NAMES[kind]], "test")
    read = manager_credentials(secret)
    assert read.token == parse_keys(ManagerKeys, files["manager.key"], "test").http_token
    assert read.token not in repr(read)
    assert set(files) == {*FILE_NAMES.values(), "ca.crt", "tls.crt", "tls.key"}


@pytest.mark.parametrize(
    ("name", "trusted"), [("j-manager", True), ("j-manager.ns.svc", True), ("other-manager", False)]
)
async def test_a_managers_certificate_speaks_for_its_own_names_only(name: str, trusted: bool, tmp_path: Any) -> None:
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

        async def hear(authority: bytes) -> bytes:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, ssl=trust(authority), server_hostname=name
            )
            heard = await reader.read()
            writer.close()
            await writer.wait_closed()
            return heard

        if trusted:
            assert await hear(made.authority) == b"hello"
        else:
            with pytest.raises(ssl.SSLCertVerificationError):
                await hear(made.authority)
        with pytest.raises(ssl.SSLCertVerificationError):
            await hear(make_certificate(["j-manager", "j-manager.ns.svc"]).authority)
