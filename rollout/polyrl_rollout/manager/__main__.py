"""`python -m polyrl_rollout.manager`: reads the job and the keys, binds, writes its endpoints, serves, ends.

Logs are JSON lines on stderr. Ends with 0 after the trainer's Finish (with --stay, for pods, which would be started
again, it shows the final status instead) or SIGTERM, 1 when the run cannot go on, 2 on wrong input.
"""

from __future__ import annotations

import asyncio
import os
import resource
import secrets
import signal
import sys
from pathlib import Path
from typing import Annotated, Final

import msgspec
import structlog
import typer

from polyrl import parent_death_signal
from polyrl.control import Endpoints
from polyrl.errors import PolyRLError, UserError
from polyrl.keys import ManagerKeys, read_keys
from polyrl.ledger import Ledger, LedgerConfig
from polyrl.manifest.job import read_job
from polyrl_rollout.manager.api import follow_certificate, https_of
from polyrl_rollout.manager.journal import Journal
from polyrl_rollout.manager.server import Listen, Manager

JOURNAL_NAME_BYTES: Final = 8
"""Enough never to be drawn twice in a run."""

log = structlog.get_logger(__name__)


def main(  # noqa: PLR0913 - one argument per flag
    job: Annotated[Path, typer.Option(help="The job, as JSON.")],
    keys: Annotated[Path, typer.Option(help="The manager's key file.")],
    journal: Annotated[Path, typer.Option(help="Kept here; an existing one of this epoch is gone on with.")],
    run_epoch: Annotated[int, typer.Option("--epoch", help="Peers of another epoch are fenced.")],
    endpoints: Annotated[Path | None, typer.Option(help="Written once everything is bound.")] = None,
    bind: Annotated[str, typer.Option(help="Address to listen on; * for all.")] = "127.0.0.1",
    agents_port: Annotated[int, typer.Option(help="0: the system chooses.")] = 0,
    trainer_port: Annotated[int, typer.Option(help="0: the system chooses.")] = 0,
    http_port: Annotated[int, typer.Option(help="0: the system chooses.")] = 0,
    metrics_port: Annotated[int | None, typer.Option(help="Plain port with /metrics alone; default: none.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate of the HTTP API, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key, PEM.")] = None,
    stay: Annotated[bool, typer.Option("--stay", help="Show the final status until SIGTERM.")] = False,
) -> None:
    """Run one manager until its job is over."""
    parent_death_signal.hold()
    _log_json()
    _allow_many_connections()
    try:
        run = read_job(job)
        group_filter = run.spec.recipe.algorithm.group_filter.value
        config = LedgerConfig(
            run_epoch=run_epoch,
            journal=secrets.token_hex(JOURNAL_NAME_BYTES),
            lease_s=run.spec.rollout.lease_seconds,
            lost_s=run.spec.rollout.lost_after_seconds,
            group_filter=group_filter,
            max_running=run.spec.rollout.engine.max_running,
            max_context=run.spec.rollout.engine.max_context,
        )
        kept = Journal(journal, run_epoch)
        state, clock_s = kept.restore()
        tls = https_of(bind, tls_cert, tls_key)
        listen = Listen(
            bind, agents_port, trainer_port=trainer_port, http_port=http_port, tls=tls, metrics_port=metrics_port
        )
        own = read_keys(ManagerKeys, keys)
        manager = Manager(
            Ledger(config, state),
            own,
            run_epoch=run_epoch,
            listen=listen,
            journal=kept,
            clock_s=clock_s,
            stays=stay,
            job=run,
        )
        asyncio.run(_serve(manager, endpoints, (tls_cert, tls_key)))
    except PolyRLError as error:
        log.error("manager failed", error=str(error))
        print(error, file=sys.stderr, flush=True)  # last words, as any worker's
        raise typer.Exit(2 if isinstance(error, UserError) else 1) from None


async def _serve(manager: Manager, endpoints: Path | None, tls: tuple[Path | None, Path | None]) -> None:
    async with manager:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, manager.stop)
        if endpoints is not None:
            write_endpoints(manager.endpoints, endpoints)
        certificate, key = tls
        if certificate is None or key is None:
            await manager.run()
            return
        follows = asyncio.create_task(follow_certificate(certificate, key, manager.serve_with))
        try:
            await manager.run()
        finally:
            follows.cancel()


def write_endpoints(endpoints: Endpoints, path: Path) -> None:
    """Replaces the file at `path` as a whole, so that a reader, also one after a power cut, sees the old one or the new
    one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{endpoints.pid}")
    with fresh.open("wb") as file:
        file.write(msgspec.json.encode(endpoints))
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def _log_json() -> None:
    steps = structlog.processors
    structlog.configure(
        [steps.add_log_level, steps.TimeStamper(fmt="iso", utc=True), steps.format_exc_info, steps.JSONRenderer()],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def _allow_many_connections() -> None:
    """A connection is a file descriptor; the soft limit of 1,024 would refuse a large fleet."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    typer.run(main)
