"""`python -m polyrl_rollout.agent`: reads its files, makes the engine that the job names, runs the agent.

Exit codes: 0 drained, 1 failed (the fleet replaces it), 2 a file or an argument is wrong,
75 its engine was killed or not ready in time. SIGTERM and SIGINT are a
preemption notice; a second one ends the process at once. On a cloud that the job names, its metadata is a notice too.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import structlog
import typer

from polyrl import parent_death_signal
from polyrl.control import parse_endpoints
from polyrl.errors import UserError
from polyrl.keys import AgentKeys, read_keys
from polyrl.manifest.environment import ENGINE_APART
from polyrl.manifest.job import read_job
from polyrl.manifest.rollout import EngineSpec, EngineType
from polyrl.manifest.spec import ReservedSleep
from polyrl.partition_signals import HEAL, PARTITION, PARTITION_IN, PARTITION_OUT
from polyrl.sample import Pool
from polyrl.weights import digest
from polyrl.wire import EngineCapacity
from polyrl.worker import EVERYWHERE
from polyrl_rollout.agent.app import Agent
from polyrl_rollout.agent.conversation import AgentSettings
from polyrl_rollout.engines.embedded.engine import EmbeddedEngine
from polyrl_rollout.engines.port import InferenceEngine
from polyrl_rollout.engines.sglang.engine import SGLangEngine
from polyrl_rollout.metadata import METADATA_URL, MetadataWatcher, TerminationNotice, asked_cloud
from polyrl_rollout.weights.peers.swarm import Swarm
from polyrl_rollout.weights.staging import Staging

EXIT_USER: Final = 2
EXIT_SECOND_SIGNAL: Final = 130
METADATA_ENV: Final = "POLYRL_METADATA_URL"
NOTICE_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)

log = structlog.get_logger(__name__)


def main(  # noqa: PLR0913 - one argument per flag
    job: Annotated[Path, typer.Option(help="The run's job.json.")],
    keys: Annotated[Path, typer.Option(help="The agent's key file, mode 0600.")],
    run_epoch: Annotated[int, typer.Option("--epoch", help="Run epoch; the manager refuses any other.")],
    engine_name: Annotated[str, typer.Option(help="Unique among all engines of the run, also over time.")],
    pool: Annotated[Pool, typer.Option(help="Kind of capacity this engine runs on.")],
    manager_endpoints: Annotated[Path | None, typer.Option(help="File with the manager's endpoints.")] = None,
    manager: Annotated[str | None, typer.Option(help="tcp://host:port of the manager, instead of the file.")] = None,
    exchange_bind: Annotated[str | None, typer.Option(help="Address to give chunks at; none: takes no part.")] = None,
    exchange_port: Annotated[int, typer.Option(help="Port for that; 0: the system chooses.")] = 0,
    exchange_least: Annotated[int, typer.Option(help="Bytes, summed over the fleet, from which it pays.")] = 0,
    metadata: Annotated[str, typer.Option(envvar=METADATA_ENV, help="Where the cloud's metadata is.")] = METADATA_URL,
) -> None:
    """Generate for one run with one engine, until the manager drains it or the machine goes."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    parent_death_signal.hold()
    try:
        agent_keys = read_keys(AgentKeys, keys)
        manifest = read_job(job)
        if (manager_endpoints is None) == (manager is None):
            raise UserError("give exactly one of --manager-endpoints and --manager")
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(EXIT_USER)

    engine_spec = manifest.spec.reserved_engine if pool is Pool.RESERVED else manifest.spec.rollout.engine
    settings = AgentSettings(
        lambda: manager if manager_endpoints is None else read_endpoint(manager_endpoints, run_epoch),
        agent_keys,
        run_epoch=run_epoch,
        engine=engine_name,
        pool=pool,
        drain_s=float(manifest.spec.rollout.drain_seconds),
        seed=manifest.spec.recipe.seed,
        rdma_devices=mooncake.rdma_devices if (mooncake := manifest.spec.rollout.mooncake) else None,
        tries_idle=pool is Pool.SPOT and engine_spec.type.is_server,
    )
    shares = pool is Pool.RESERVED and manifest.spec.trainer.reserved_sleep is not ReservedSleep.NEVER
    engine = choose_engine(engine_spec, sleeps=shares and not os.environ.get(ENGINE_APART))
    cloud = asked_cloud(manifest.spec.rollout.capacity, pool)
    watch = None if cloud is None else partial(MetadataWatcher, cloud, metadata)
    # Announced to the manager until the engine has started and measured its own.
    expected = EngineCapacity(engine_spec.max_running, engine_spec.kv_tokens, max_context=engine_spec.max_context)
    swarm = None if exchange_bind is None else join_swarm(engine_name, exchange_bind, exchange_port, exchange_least)
    # Agents of this machine share a folder, except where they are to exchange whatever there is. Two runs of one name
    # beside each other have keys of their own.
    alone = swarm is not None and not exchange_least
    staging = Staging(
        manifest.metadata.name, engine_name if alone else digest(agent_keys.trainer_public_key.encode()).hex()
    )
    sys.exit(asyncio.run(run_agent(settings, engine, expected, staging, watch, swarm)))


Watch: TypeAlias = Callable[[Callable[[TerminationNotice], None]], MetadataWatcher]
"""Makes the watcher of the machine's metadata from what is called with its notice."""


async def run_agent(
    settings: AgentSettings,
    engine: InferenceEngine,
    capacity: EngineCapacity,
    staging: Staging,
    watch: Watch | None = None,
    swarm: Swarm | None = None,
) -> int:
    """Runs an agent in this process until it ends, and closes `staging` then; returns its exit code."""
    try:
        agent = Agent(settings, engine, capacity, staging, swarm)
        if watch is not None:
            agent.spawn(watch(lambda notice: agent.notice(notice.seconds, notice.reason)).run())
        loop = asyncio.get_running_loop()
        for number in NOTICE_SIGNALS:
            loop.add_signal_handler(number, _on_notice, agent)
        loop.add_signal_handler(PARTITION, agent.manager.partition)
        loop.add_signal_handler(PARTITION_IN, agent.manager.partition, True, False)
        loop.add_signal_handler(PARTITION_OUT, agent.manager.partition, False, True)
        loop.add_signal_handler(HEAL, agent.manager.heal)
        return await agent.run()
    finally:
        if swarm is not None:
            swarm.close()
        staging.close()


def join_swarm(engine: str, host: str, port: int, least_bytes: int) -> Swarm:
    """Gives chunks there; where that cannot be, to those that it dials alone, and generates all the same."""
    try:
        return Swarm(engine, port, "" if host == EVERYWHERE else host, least_bytes)
    except OSError as error:
        log.warning(
            "others cannot dial this agent for chunks", bind=host, port=port, error=error.strerror or str(error)
        )
        return Swarm(engine, least_bytes=least_bytes)


def choose_engine(spec: EngineSpec, *, sleeps: bool = False) -> InferenceEngine:
    """The engine of `spec.type`, not yet started. `sleeps`: where it can, it gives memory back at times."""
    match spec.type:
        case EngineType.EMBEDDED:
            return EmbeddedEngine(spec)
        case EngineType.SGLANG:
            return SGLangEngine(spec, sleeps=sleeps)


def read_endpoint(path: Path, run_epoch: int) -> str | None:
    """Where this epoch's manager listens; None until the file says so. Only the key file's key counts."""
    try:
        endpoints = parse_endpoints(path.read_bytes(), str(path))
    except (OSError, ValueError):
        return None
    return endpoints.agents if endpoints.run_epoch == run_epoch else None


def _on_notice(agent: Agent) -> None:
    for number in NOTICE_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, os._exit, EXIT_SECOND_SIGNAL)
    agent.notice()


if __name__ == "__main__":
    typer.run(main)
