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
from polyrl.manifest.job import read_job
from polyrl.manifest.rollout import EngineSpec, EngineType
from polyrl.partition_signals import HEAL, PARTITION, PARTITION_IN, PARTITION_OUT
from polyrl.sample import Pool
from polyrl.wire import EngineCapacity
from polyrl_rollout.agent.app import Agent
from polyrl_rollout.agent.conversation import AgentSettings
from polyrl_rollout.engines.embedded.engine import EmbeddedEngine
from polyrl_rollout.engines.port import InferenceEngine
from polyrl_rollout.engines.sglang.engine import SGLangEngine
from polyrl_rollout.metadata import METADATA_URL, MetadataWatcher, TerminationNotice, asked_cloud
from polyrl_rollout.weights.staging import Staging

EXIT_USER: Final = 2
EXIT_SECOND_SIGNAL: Final = 130
METADATA_ENV: Final = "POLYRL_METADATA_URL"
NOTICE_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def main(
    job: Annotated[Path, typer.Option(help="The run's job.json.")],
    keys: Annotated[Path, typer.Option(help="The agent's key file, mode 0600.")],
    run_epoch: Annotated[int, typer.Option("--epoch", help="Run epoch; the manager refuses any other.")],
    engine_name: Annotated[str, typer.Option(help="Unique among all engines of the run, also over time.")],
    pool: Annotated[Pool, typer.Option(help="Kind of capacity this engine runs on.")],
    manager_endpoints: Annotated[Path | None, typer.Option(help="File with the manager's endpoints.")] = None,
    manager: Annotated[str | None, typer.Option(help="tcp://host:port of the manager, instead of the file.")] = None,
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

    settings = AgentSettings(
        lambda: manager if manager_endpoints is None else read_endpoint(manager_endpoints, run_epoch),
        agent_keys,
        run_epoch=run_epoch,
        engine=engine_name,
        pool=pool,
        drain_s=float(manifest.spec.rollout.drain_seconds),
        seed=manifest.spec.recipe.seed,
    )
    engine_spec = manifest.spec.reserved_engine if pool is Pool.RESERVED else manifest.spec.rollout.engine
    engine = choose_engine(engine_spec)
    cloud = asked_cloud(manifest.spec.rollout.capacity, pool)
    watch = None if cloud is None else partial(MetadataWatcher, cloud, metadata)
    # Announced to the manager until the engine has started and measured its own.
    expected = EngineCapacity(engine_spec.max_running, engine_spec.kv_tokens, max_context=engine_spec.max_context)
    sys.exit(asyncio.run(run_agent(settings, engine, expected, manifest.metadata.name, watch)))


Watch: TypeAlias = Callable[[Callable[[TerminationNotice], None]], MetadataWatcher]
"""Makes the watcher of the machine's metadata from what is called with its notice."""


async def run_agent(
    settings: AgentSettings, engine: InferenceEngine, capacity: EngineCapacity, run: str, watch: Watch | None = None
) -> int:
    """Runs an agent in this process until it ends; returns its exit code."""
    staging = Staging(run, settings.engine)
    try:
        agent = Agent(settings, engine, capacity, staging)
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
        staging.close()


def choose_engine(spec: EngineSpec) -> InferenceEngine:
    """The engine of `spec.type`, not yet started."""
    return EmbeddedEngine(spec) if spec.type is EngineType.EMBEDDED else SGLangEngine(spec)


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
