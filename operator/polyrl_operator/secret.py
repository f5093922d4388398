"""What is made once per run: each role's keys (three CURVE pairs, HTTP token, identity key; `polyrl.keys` says who gets
what), as files, or in a Secret that no pod names, with the manager's certificate. Each role's pods, and each rollout,
mount a Secret of their own, made from what is stored; nothing of it is kept here after these requests.

The certificate lives for days and is signed by an authority of the run's own that signs nothing else, whose key lies
with all the run's keys. The operator pins that authority, so no other certificate speaks for the manager, whatever the
cluster's DNS says, and a renewed one does at once.
"""

from __future__ import annotations

import base64
import os
import secrets
import ssl
import tempfile
import time
from collections.abc import Iterable, Mapping
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
from polyrl.cluster.actions import MakeKeys, Object, RenewCertificate
from polyrl.cluster.fleet.certificate import LIFE_S, SKEW_S, needs_renewal
from polyrl.cluster.resources.owner import Owner
from polyrl.cluster.timestamps import second
from polyrl.errors import InvalidData
from polyrl.keys import FILE_NAMES, AgentKeys, K, ManagerKeys, OperatorKeys, TrainerKeys, format_keys, parse_keys
from polyrl.wire.engine_identity import agent_keys_of, engine_keys
from polyrl.worker import Role

TOKEN_BYTES: Final = 32
"""Randomness of the HTTP token, and of the identity key; 256 bits, as many as the CURVE keys have."""

AUTHORITY: Final = "ca.crt"
AUTHORITY_KEY: Final = "ca.key"
CERTIFICATE: Final = "tls.crt"
PRIVATE_KEY: Final = "tls.key"

MAX_AUTHORITY: Final = 4096
"""Bytes; ours has some 700. Whoever edits Secrets may put a thousand certificates there, which TLS keeps as 6 MB."""

LOCAL_NAME: Final = "manager.polyrl.internal"
"""In the certificate of a manager on its runner's machine; nobody looks it up."""

AUTHORITY_LIFE: Final = timedelta(days=3650)
"""No run lasts so long: clients pin it for as long as the run has its keys, beside which the authority's own lies."""


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
    contents = {AUTHORITY: made.authority, AUTHORITY_KEY: made.authority_key}
    contents |= {CERTIFICATE: made.certificate, PRIVATE_KEY: made.key}
    for name, content in contents.items():
        _write_private(folder / name, content.decode())


def renew_run_certificate(folder: Path, now: float) -> bool:
    """Replaces the manager's certificate in a run's folder of keys when half its life is over; whether it did."""
    leaf = x509.load_pem_x509_certificate((folder / CERTIFICATE).read_bytes())
    if not needs_renewal(leaf.not_valid_after_utc.timestamp(), now):
        return False
    authority, authority_key = ((folder / name).read_bytes() for name in (AUTHORITY, AUTHORITY_KEY))
    for name, content in _leaf(authority, authority_key, [LOCAL_NAME], now).items():
        fresh = folder / f".{name}"
        fresh.unlink(missing_ok=True)
        _write_private(fresh, content.decode())
        # The manager takes the two only as a pair that fits, so it may read between the two.
        fresh.replace(folder / name)
    return True


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
    made = make_certificate(action.hosts, action.now)
    files |= {AUTHORITY: made.authority, AUTHORITY_KEY: made.authority_key}
    return _secret(owner.metadata(action.name), _encoded(files))


def role_secrets(owner: Owner, root: Object, action: MakeKeys) -> list[Object]:
    """A Secret for each role, copied from `root` as stored, whose uid stands in place of a hash of their content: so
    none of another generation is ever taken for one of this. The manager's can be changed, for its certificate is."""
    made = []
    fresh = renewed(root, action)
    data = root["data"] | _agent_file(root, names.reserved_engines(owner.name)) | fresh["data"]
    for role, files in names.KEY_FILES.items():
        metadata = owner.metadata(names.role_secret_name(owner.name, role), role)
        metadata["annotations"] = {names.ANNOTATION_CONTENT: root["metadata"]["uid"]}
        secret = _secret(metadata, {name: data[name] for name in files})
        if role is Role.MANAGER:
            metadata["annotations"] |= fresh["metadata"]["annotations"]
            secret["immutable"] = False
        made.append(secret)
    return made


def renewed(root: Object, action: MakeKeys | RenewCertificate) -> Object:
    """What makes a manager's Secret hold a fresh certificate, as a merge patch."""
    authority, key = (base64.b64decode(root["data"][name]) for name in (AUTHORITY, AUTHORITY_KEY))
    expires = {names.ANNOTATION_EXPIRES: second(action.now + LIFE_S)}
    return {"metadata": {"annotations": expires}, "data": _encoded(_leaf(authority, key, action.hosts, action.now))}


def _encoded(files: Mapping[str, bytes]) -> dict[str, str]:
    return {name: base64.b64encode(content).decode() for name, content in files.items()}


def engine_secret(owner: Owner, root: Object, pod: str, uid: str) -> Object:
    """The Secret of one rollout, owned by its pod, by which its agent speaks for that pod's engine alone."""
    reference = {"apiVersion": "v1", "kind": "Pod", "name": pod, "uid": uid}
    return _secret(owner.metadata(pod, Role.ROLLOUT) | {"ownerReferences": [reference]}, _agent_file(root, pod))


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
    authority, source = base64.b64decode(secret["data"][AUTHORITY]), f"Secret {secret['metadata']['name']}: {AUTHORITY}"
    if len(authority) > MAX_AUTHORITY:
        raise InvalidData(f"{source}: {len(authority):,} bytes; at most {MAX_AUTHORITY:,} are read")
    try:
        x509.load_pem_x509_certificates(authority)
        text = authority.decode()
    except ValueError as error:
        raise InvalidData(f"{source}: no certificate: {error}") from None
    return ManagerCredentials(_part(secret, OperatorKeys).http_token, text)


@dataclass(frozen=True)
class Certificate:
    """PEM texts."""

    authority: bytes
    authority_key: bytes = field(repr=False)
    certificate: bytes
    key: bytes = field(repr=False)


def make_certificate(hosts: Iterable[str], now: float | None = None) -> Certificate:
    """A server certificate for these DNS names from `now` (None: this moment) on, its key, and an authority with its
    key, made for it (keys: PKCS 8, not encrypted)."""
    names, now = list(hosts), time.time() if now is None else now
    private = ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"polyrl {names[0]}"[:64])])
    made = (
        _builder(issuer, issuer, private.public_key(), now, AUTHORITY_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(private.public_key()), critical=False)
        .sign(private, hashes.SHA256())
    )
    authority, authority_key = made.public_bytes(serialization.Encoding.PEM), _pem(private)
    leaf = _leaf(authority, authority_key, names, now)
    return Certificate(authority, authority_key, certificate=leaf[CERTIFICATE], key=leaf[PRIVATE_KEY])


def _leaf(authority: bytes, authority_key: bytes, hosts: Iterable[str], now: float) -> dict[str, bytes]:
    """A fresh key and a server certificate of LIFE_S for these DNS names, by this authority (PEM), by file name; the
    key first."""
    signer = serialization.load_pem_private_key(authority_key, password=None)
    if not isinstance(signer, ec.EllipticCurvePrivateKey):
        raise InvalidData(f"{AUTHORITY_KEY}: is no elliptic-curve key, so it is not one of ours")
    key, issuer = ec.generate_private_key(ec.SECP256R1()), x509.load_pem_x509_certificate(authority).subject
    own = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    leaf = (
        _builder(x509.Name([]), issuer, key.public_key(), now, timedelta(seconds=LIFE_S))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in hosts]), critical=True)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(own, critical=False)
        .sign(signer, hashes.SHA256())
    )
    return {PRIVATE_KEY: _pem(key), CERTIFICATE: leaf.public_bytes(serialization.Encoding.PEM)}


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def server_tls(made: Certificate) -> ssl.SSLContext:
    """For a server of this process."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    load(context, made)
    return context


def load(context: ssl.SSLContext, made: Certificate) -> None:
    """New connections get this one; those that are open keep theirs."""
    # Python's ssl reads files only; this one is readable by this account alone, and gone at once.
    with tempfile.NamedTemporaryFile() as file:
        file.write(made.certificate + made.key)
        file.flush()
        context.load_cert_chain(file.name)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: float, life: timedelta
) -> x509.CertificateBuilder:
    begin = datetime.fromtimestamp(now, UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin - timedelta(seconds=SKEW_S))
        .not_valid_after(begin + life)
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
