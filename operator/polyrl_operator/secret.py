"""What is made once per run: each role's keys (three CURVE pairs, HTTP token, identity key; `polyrl.keys` says who gets
what), as files, or in a Secret that no pod names, with the manager's certificate. Each role's pods, and each rollout,
mount a Secret of their own, made from what is stored; nothing of it is kept here after these requests.

The certificate is signed by an authority of the run's own that signs nothing else, and whose key is thrown away. The
operator pins that authority, so no other certificate speaks for the manager, whatever the cluster's DNS says.
"""

from __future__ import annotations

import base64
import os
import secrets
import ssl
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import zmq
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from polyrl.cluster import names
from polyrl.cluster.actions import MakeKeys, Object
from polyrl.cluster.resources.owner import Owner
from polyrl.errors import InvalidData
from polyrl.keys import FILE_NAMES, AgentKeys, K, ManagerKeys, OperatorKeys, TrainerKeys, format_keys, parse_keys
from polyrl.wire.engine_identity import agent_keys_of, engine_keys
from polyrl.worker import Role

TOKEN_BYTES: Final = 32
"""Randomness of the HTTP token, and of the identity key; 256 bits, as many as the CURVE keys have."""

AUTHORITY: Final = "ca.crt"
CERTIFICATE: Final = "tls.crt"
PRIVATE_KEY: Final = "tls.key"

LOCAL_NAME: Final = "manager.polyrl.internal"
"""In the certificate of a manager on its runner's machine; nobody looks it up."""

VALIDITY: Final = timedelta(days=3650)
"""No run lasts so long, and none should end because of a date."""

SKEW: Final = timedelta(days=1)
"""How far behind ours a node's clock may be."""


def write_run_keys(folder: Path) -> None:
    """Writes one file per role, and the manager's certificate with authority and key (mode 0600), into `folder`, made
    (mode 0700) when absent.

    Raises InvalidData when a key file is already there: running processes hold it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    for keys in make_run_keys():
        _write_private(folder / FILE_NAMES[type(keys)], format_keys(keys))
    made = make_certificate([LOCAL_NAME])
    for name, content in ((AUTHORITY, made.authority), (CERTIFICATE, made.certificate), (PRIVATE_KEY, made.key)):
        _write_private(folder / name, content.decode())


def write_engine_keys(folder: Path, engine: str) -> Path:
    """Writes the key file of one engine's agent (mode 0600) beside those of its run, and gives its path. Raises
    InvalidData."""
    path = folder / f"{engine}.key"
    _write_private(path, format_keys(engine_keys(folder, engine)))
    return path


def make_run_keys() -> tuple[ManagerKeys, TrainerKeys, AgentKeys, OperatorKeys]:
    """Fresh keys for every role of one run."""
    (manager, manager_secret), (trainer, trainer_secret), (agent, agent_secret) = (_pair() for _ in range(3))
    token, identity_key = (secrets.token_urlsafe(TOKEN_BYTES) for _ in range(2))
    return (
        ManagerKeys(
            manager,
            manager_secret,
            agent_public_key=agent,
            trainer_public_key=trainer,
            http_token=token,
            identity_key=identity_key,
        ),
        TrainerKeys(trainer, trainer_secret, manager_public_key=manager, agent_public_key=agent),
        AgentKeys(agent, agent_secret, manager_public_key=manager, trainer_public_key=trainer),
        OperatorKeys(token, identity_key),
    )


def _pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def _write_private(path: Path, text: str) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise InvalidData(f"{path}: a key file is already there; a run's keys are made once") from None
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


@dataclass(frozen=True)
class ManagerCredentials:
    """What the operator needs to speak with a manager."""

    token: str = field(repr=False)
    authority: str
    """PEM of the certificate authority that signed the manager's certificate."""


def keys_secret(owner: Owner, action: MakeKeys) -> Object:
    """The Secret that a run's keys come from, with fresh ones."""
    files = {FILE_NAMES[type(keys)]: format_keys(keys).encode() for keys in make_run_keys()}
    made = make_certificate(action.hosts)
    files |= {AUTHORITY: made.authority, CERTIFICATE: made.certificate, PRIVATE_KEY: made.key}
    return _secret(owner.metadata(action.name), {name: base64.b64encode(files[name]).decode() for name in files})


def role_secrets(owner: Owner, root: Object) -> list[Object]:
    """A Secret for each role, copied from `root` as stored, whose uid stands in place of a hash of their content: so
    none of another generation is ever taken for one of this."""
    made = []
    data = root["data"] | _agent_file(root, names.reserved_engines(owner.name))
    for role, files in names.KEY_FILES.items():
        metadata = owner.metadata(names.role_secret_name(owner.name, role), role)
        metadata["annotations"] = {names.ANNOTATION_CONTENT: root["metadata"]["uid"]}
        made.append(_secret(metadata, {name: data[name] for name in files}))
    return made


def engine_secret(owner: Owner, root: Object, pod: str, uid: str) -> Object:
    """The Secret of one rollout, owned by its pod, by which its agent speaks for that pod's engine alone."""
    reference = {"apiVersion": "v1", "kind": "Pod", "name": pod, "uid": uid}
    metadata = owner.metadata(pod, Role.ROLLOUT) | {"ownerReferences": [reference]}
    return _secret(metadata, _agent_file(root, pod))


def _agent_file(root: Object, engine: str) -> dict[str, str]:
    """agent.key of an engine, or of engines with this beginning of their names, as a Secret's data."""
    text = format_keys(agent_keys_of(_part(root, AgentKeys), _part(root, OperatorKeys).identity_key, engine))
    return {FILE_NAMES[AgentKeys]: base64.b64encode(text.encode()).decode()}


def _part(secret: Object, kind: type[K]) -> K:
    """Keys of one role from the Secret of them all. Raises InvalidData or KeyError when it is not one of ours."""
    name = FILE_NAMES[kind]
    return parse_keys(kind, base64.b64decode(secret["data"][name]), f"Secret {secret['metadata']['name']}")


def generation_of(secret: Object) -> str:
    """uid of the Secret that this one was copied from; empty: none."""
    return str((secret["metadata"].get("annotations") or {}).get(names.ANNOTATION_CONTENT, ""))


def _secret(metadata: Object, data: dict[str, str]) -> Object:
    kind = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata}
    return {**kind, "type": "Opaque", "immutable": True, "data": data}


def manager_credentials(secret: Object) -> ManagerCredentials:
    """The operator's part of a Secret as stored. Raises InvalidData or KeyError when it is not one of ours."""
    authority = base64.b64decode(secret["data"][AUTHORITY]).decode()
    return ManagerCredentials(_part(secret, OperatorKeys).http_token, authority)


@dataclass(frozen=True)
class Certificate:
    """PEM texts."""

    authority: bytes
    certificate: bytes
    key: bytes = field(repr=False)


def make_certificate(hosts: Iterable[str]) -> Certificate:
    """A server certificate for these DNS names, its authority, and its key (PKCS 8, not encrypted)."""
    names = list(hosts)
    authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"polyrl {names[0]}"[:64])])
    authority = (
        _builder(issuer, issuer, authority_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    own = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    leaf = (
        _builder(x509.Name([]), issuer, key.public_key())
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=True)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(own, critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return Certificate(authority.public_bytes(pem), leaf.public_bytes(pem), key=private)


def server_tls(made: Certificate) -> ssl.SSLContext:
    """For a server of this process."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Python's ssl reads files only; this one is readable by this account alone, and gone at once.
    with tempfile.NamedTemporaryFile() as file:
        file.write(made.certificate + made.key)
        file.flush()
        context.load_cert_chain(file.name)
    return context


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + VALIDITY)
    )


def _key_usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
