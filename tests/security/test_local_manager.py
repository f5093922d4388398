"""The run's token goes to its manager alone, not to whoever has bound the port of one that is dead."""

import asyncio
import ssl
from pathlib import Path

import msgspec
import pytest

from polyrl.control import Endpoints
from polyrl.worker import RunLocation
from polyrl_cli.local.manager import LocalManager
from polyrl_operator.secret import AUTHORITY, CERTIFICATE, LOCAL_NAME, PRIVATE_KEY, make_certificate, write_run_keys

DEADLINE_S = 20.0


async def bytes_read_by_a_stranger(run: Path, own: Path) -> bytes:
    """What a server with the certificate in `own` reads when the runner asks the manager of `run`."""
    read = bytearray()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        read.extend(await reader.read(4096))
        writer.close()

    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(own / CERTIFICATE, own / PRIVATE_KEY)
    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls) as server, asyncio.timeout(DEADLINE_S):
        port = server.sockets[0].getsockname()[1]
        ends = Endpoints(
            agents="tcp://127.0.0.1:1",
            trainer="tcp://127.0.0.1:1",
            http=f"https://127.0.0.1:{port}",
            pid=1,
            run_epoch=1,
            public_key="k" * 40,
        )
        (run / "manager.json").write_bytes(msgspec.json.encode(ends))
        async with LocalManager(run / "manager.json", run / "keys" / "operator.key", 1) as manager:
            await manager.find()
            assert await manager.waits() is None
    return bytes(read)


@pytest.mark.parametrize("imposter", [True, False])
async def test_a_stranger_on_the_managers_port_gets_no_token(tmp_path: Path, imposter: bool) -> None:
    write_run_keys(tmp_path / "keys")
    made, own = make_certificate([LOCAL_NAME]), tmp_path / "own"
    own.mkdir()
    (own / CERTIFICATE).write_bytes(made.certificate)
    (own / PRIVATE_KEY).write_bytes(made.key)
    read = await bytes_read_by_a_stranger(tmp_path, own if imposter else tmp_path / "keys")
    assert (b"Authorization: Bearer" in read) is not imposter
    assert (tmp_path / "keys" / AUTHORITY).is_file()


def test_a_manager_on_this_machine_is_started_with_the_certificate() -> None:
    from polyrl.manifest.job import PolyRLJob
    from polyrl.testing.job_values import raw_job
    from polyrl.worker import workers_of

    place = RunLocation(run="/run", manifest_dir="/", python="python", run_epoch=1, cpus=2, resume=None)
    manager = workers_of(PolyRLJob.model_validate(raw_job()).spec, place).manager
    assert manager is not None
    assert "--tls-cert" in manager.argv
