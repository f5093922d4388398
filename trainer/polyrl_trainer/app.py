"""The trainer as a process: job and keys in, stages run, one result file out, whatever happens.

    prepare (user's data and code) ─> session (fresh or resumed) ─> connect, publish ─> stages ─> FinishRun, result

A process that starts in a folder with checkpoints of its own goes on from the newest: its predecessor was killed.
SIGTERM asks the stages to stop: they finish what they compute and save. Then the run is over, or, where machines are
taken away (`hand_over`), a successor goes on: the manager keeps the run open. A failure reaches the manager as
FinishRun(ok=False), and the user as one sentence.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import structlog
import torch

from polyrl.errors import PASSING, CannotGoOn, GroupLost, InvalidData, PolyRLError, RunFailed, Superseded
from polyrl.keys import TrainerKeys, read_keys
from polyrl.manifest.environment import ENGINE_APART, LEARNER_DEVICE
from polyrl.manifest.job import PolyRLJob, read_job
from polyrl.manifest.recipe import Mode
from polyrl.manifest.rollout import RolloutSpec, WeightDeltas
from polyrl.manifest.rules.resumption import checkpoint_faults, steps_of
from polyrl.manifest.spec import ReservedSleep
from polyrl.sample_record import SAMPLES
from polyrl.wire.sealing import LastingKeys
from polyrl.worker import EVERYWHERE, TRAINER_END_S
from polyrl_trainer.backend import OtherMachines
from polyrl_trainer.backends.configs import EngineConfig
from polyrl_trainer.backends.fsdp.pods.member import MemberPlace, PodMember
from polyrl_trainer.backends.fsdp.pods.other_pods import OtherPods
from polyrl_trainer.backends.fsdp.start import LearnerGroup
from polyrl_trainer.backends.learners import Learners
from polyrl_trainer.backends.policy import device_name
from polyrl_trainer.backends.single_process import SingleProcess
from polyrl_trainer.checkpoints import Checkpoints, latest, read_checkpoint
from polyrl_trainer.checkpoints.continuation import refuse_other_run, saved_stays
from polyrl_trainer.checkpoints.store import CheckpointStore
from polyrl_trainer.client import CONNECT_TIMEOUT_S, RolloutClient
from polyrl_trainer.data.model_files import ModelFiles
from polyrl_trainer.generation.runner import UserCodeRunner
from polyrl_trainer.generation.supply import AdoptedGroups, GroupSupply
from polyrl_trainer.loops.evaluation import Evaluator
from polyrl_trainer.loops.rl_loop import RolloutSide
from polyrl_trainer.loops.stages import Stages
from polyrl_trainer.metrics import METRICS, MetricsLogger, newest_moment, rewind_metrics
from polyrl_trainer.preparation import Prepared, prepare, stop_files
from polyrl_trainer.sample_log import log as sample_log
from polyrl_trainer.session import FAILED, Session, run_beside, was_done, write_result
from polyrl_trainer.sinks.chosen import deliveries
from polyrl_trainer.state import TrainerState, TrainingStage
from polyrl_trainer.user_code.episodes import Episodes
from polyrl_trainer.user_code.own_algorithm import load_own
from polyrl_trainer.user_code.pools import UserPools
from polyrl_trainer.user_code.rewards import CustomGroupFilter, Failures
from polyrl_trainer.weights.lender import Lender
from polyrl_trainer.weights.policy_versions import PolicyVersions
from polyrl_trainer.weights.publisher import WeightPublisher
from polyrl_trainer.weights.share import ShareServer

log = structlog.get_logger()

FINISH_DEADLINE_S: Final = TRAINER_END_S / 2
"""Longest wait for the manager to take the end of a failed run; it may be what failed. The result is written after."""
KEPT_VERSIONS: Final = 2
"""Weight versions served beside those that staleness needs: the newest, and the one that slow pullers are at."""
EVERY_BATCH: Final = (0, 1 << 62)
"""What the state of a run that is done contains."""
LOOPBACK: Final = "127.0.0.1"

STAGE_OF_MODE: Final = {
    Mode.SFT: TrainingStage.SFT,
    Mode.SFT_RL: TrainingStage.SFT,
    Mode.RL: TrainingStage.RL,
    Mode.OFFLINE_RL: TrainingStage.OFFLINE_RL,
    Mode.DPO: TrainingStage.DPO,
    Mode.REWARD_MODEL: TrainingStage.REWARD_MODEL,
}


@dataclass(frozen=True)
class Arguments:
    """The command line; each one is described in `__main__`."""

    job: Path
    manifest_dir: Path
    run: Path
    keys: Path
    run_epoch: int
    manager_endpoints: Path | None
    """None: a mode without engines; nothing is evaluated."""
    resume: Path | None
    weights_port: int
    advertise: str
    max_manager_outage_s: float
    grace_s: float
    """From being asked to stop to the end, saving included."""
    hand_over: bool
    """Whoever stops this process starts another one."""
    store: str
    """Where checkpoints are kept beside the run's folder; empty: nowhere."""
    pod: int
    """Which one of the trainer's pods this is."""
    pods_at: tuple[str, int] | None
    """Host and port by which the other pods find the first one; None: there are no others."""


async def run_trainer(arguments: Arguments) -> bool:
    """Runs to the end (True), or until SIGTERM (False). Raises UserError for the user's input, Superseded when another
    trainer has come, another PolyRLError for the rest."""
    with saved_stays(arguments.run, arguments.store):
        job = read_job(arguments.job)
    if arguments.hand_over and was_done(arguments.run):
        await _report_done(arguments)
        return True
    done, learners = False, _learners(job, arguments)
    try:
        with closing(UserPools.start(job.spec.recipe, arguments.manifest_dir)) as pools:
            # Other ranks start, and workers import the user's code, while the data is read here.
            with saved_stays(arguments.run, arguments.store):
                prepared = prepare(job.spec, arguments.manifest_dir)
                await pools.ready()
            done = await _run_prepared(arguments, job, prepared, pools, learners)
            return done
    finally:
        learners.close(done=done)


async def run_other_pod(arguments: Arguments) -> int:
    """Runs any pod but the first: it computes what that one says. Returns the exit code."""
    job = read_job(arguments.job)
    assert arguments.pods_at is not None, "or this pod is the only one"
    trainer, engine = job.spec.trainer, _engine(job, arguments)
    place = MemberPlace(
        arguments.pod,
        trainer.replicas,
        processes=trainer.processes_per_pod,
        leader=arguments.pods_at,
        kind=torch.device(device_name(engine.device)).type,
        threads=engine.threads,
    )
    with ExitStack() as stack:
        share = None
        if arguments.manager_endpoints is not None:
            lender = _lender(arguments, job.spec.rollout)
            share = ShareServer(arguments.keys, _bind(arguments), arguments.advertise, lender)
            stack.callback(share.close)
        return await PodMember(place, _pod_keys(arguments), lambda: was_done(arguments.run), share=share).run()


async def _run_prepared(
    arguments: Arguments, job: PolyRLJob, prepared: Prepared, pools: UserPools, learners: Learners
) -> bool:
    with saved_stays(arguments.run, arguments.store):
        own = load_own(job.spec.recipe.algorithm, arguments.manifest_dir / job.spec.recipe.code.path)
        session, resumed_from = _open_session(
            arguments,
            job,
            ModelFiles(job, prepared.tokenizer, chat=prepared.chat, system_prompt=prepared.system_prompt),
        )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, session.ask_to_stop)
    log.info("trainer starts", seed=session.state.seed, stage=session.state.stage.value, step=session.state.step)
    stages = Stages(
        job.spec.recipe,
        arguments.manifest_dir,
        prepared=prepared,
        session=session,
        engine=_engine(job, arguments),
        max_context=job.spec.rollout.engine.max_context,
        learners=learners,
        resumed_from=resumed_from,
        own=own,
        sleep=_sleep(job),
    )
    outcome = FAILED
    try:
        done = await _run_stages(arguments, job, prepared, pools, session=session, stages=stages)
        outcome = "done" if done else "stopped"
        return done
    except (Superseded, GroupLost):
        outcome = ""  # the successor writes the result
        raise
    finally:
        await session.close_saves()
        session.end(arguments.run, outcome)


def _open_session(arguments: Arguments, job: PolyRLJob, files: ModelFiles) -> tuple[Session, Path | None]:
    recipe = job.spec.recipe
    store = CheckpointStore(arguments.store) if arguments.store else None
    checkpoints = Checkpoints(arguments.run, recipe.checkpoint.keep, files.write, store=store)
    checkpoints.start()
    state = TrainerState(seed=recipe.seed, stage=STAGE_OF_MODE[recipe.mode])
    torch.manual_seed(recipe.seed)  # of what an own loss draws; a checkpoint holds how far it got
    resume = arguments.resume or arguments.run
    resumed_from = checkpoints.newest() if resume == arguments.run else latest(resume)
    if resumed_from is not None:
        state = _resumed_state(resumed_from, job)
        checkpoints.adopt_finals(resumed_from)
    if arguments.hand_over:
        refuse_other_run(arguments.run, arguments.job, stage=None if resumed_from is None else state.stage)
    behind = state.copy()
    behind.stage_done = state.stage_done and state.step >= steps_of(recipe, state.stage)[1]
    rewind_metrics(arguments.run / METRICS, behind)
    evaluated = newest_moment(arguments.run / METRICS) != (state.stage.value, state.step)
    sample_log.go_back_to(arguments.run / SAMPLES, behind, evaluated=evaluated)
    session = Session(
        state,
        checkpoints,
        metrics=MetricsLogger(arguments.run, deliveries(job, arguments.run)),
        checkpoint_every_steps=recipe.checkpoint.every_steps,
        saves_beside_steps=recipe.checkpoint.beside_steps,
        samples=sample_log.SampleLog(arguments.run, recipe.logging.samples, recipe.seed),
        max_manager_outage_s=arguments.max_manager_outage_s,
        grace_s=arguments.grace_s,
    )
    return session, resumed_from


def _resumed_state(checkpoint: Path, job: PolyRLJob) -> TrainerState:
    state = read_checkpoint(checkpoint)
    recipe = job.spec.recipe
    possible = {STAGE_OF_MODE[recipe.mode]} | ({TrainingStage.RL} if recipe.mode is Mode.SFT_RL else set())
    if state.stage not in possible:
        stage, mode = state.stage.value, recipe.mode.value
        raise InvalidData(f"{checkpoint}: is of stage {stage}, which mode {mode} does not have")
    if state.seed != recipe.seed:
        raise InvalidData(f"{checkpoint}: was made with seed {state.seed}, the manifest says {recipe.seed}")
    for field, fault in checkpoint_faults(recipe, state.stage, state.step, state.trained_groups):
        raise InvalidData(f"{field}: {fault}")  # before anything is awaited
    return state


async def _run_stages(
    arguments: Arguments, job: PolyRLJob, prepared: Prepared, pools: UserPools, *, session: Session, stages: Stages
) -> bool:
    if arguments.manager_endpoints is None:
        return await _until_left(arguments, stages, stages.run(None))
    async with AsyncExitStack() as stack:
        client = await session.unless_stopped(stack.enter_async_context(_client(arguments, session.state.acknowledged)))
        if client is None:
            return False
        try:
            machines = stages.learners.machines
            async with _rollout_side(
                arguments, job, prepared, pools, session=session, client=client, machines=machines
            ) as side:
                services = side.runner.run(), side.supply.run(), side.versions.run()
                done = await _until_left(arguments, stages, stages.run(side), *services)
        except Exception as error:
            if not isinstance(error, GroupLost) and not (arguments.hand_over and _is_temporary(error)):
                await _report_failed(client, error)
            raise
        if arguments.hand_over and not done:
            return False
        # Whoever kills this process from now on takes nothing away: the run has ended well.
        write_result(arguments.run, session.state, "done" if done else "stopped")
        finish = client.finish(True, "done" if done else f"stopped on request: {session.what_is_saved()}")
        # In a pod it is done, and a successor would have to say so.
        await (finish if arguments.hand_over else session.answered(finish))
        return done


async def _until_left(
    arguments: Arguments, stages: Stages, main: Coroutine[Any, Any, bool], *services: Coroutine[Any, Any, None]
) -> bool:
    """True when `main` has run to its end, False when the run was asked to stop.

    Where a successor goes on, nothing that fails after that counts: it goes on from the newest checkpoint, which is
    whole."""
    session = stages.session
    try:
        with saved_stays(arguments.run, arguments.store, lambda: session.state.results.tokens_trained):
            beside = stages.learners.watch(), session.saves.watch(), _stop_in_time(session)
            return await run_beside(main, *services, *beside)
    except PolyRLError as error:
        if not (arguments.hand_over and session.stop.is_set()):
            raise
        log.warning("left without a last checkpoint", reason=str(error), saved=session.what_is_saved())
        return False


def _client(
    arguments: Arguments, acknowledged: Sequence[tuple[int, int]]
) -> AbstractAsyncContextManager[RolloutClient]:
    assert arguments.manager_endpoints is not None
    return RolloutClient.connect(
        arguments.manager_endpoints,
        arguments.keys,
        arguments.run_epoch,
        acknowledged,
        connect_timeout_s=arguments.max_manager_outage_s if arguments.hand_over else CONNECT_TIMEOUT_S,
        max_manager_outage_s=arguments.max_manager_outage_s,
        covers=True,
    )


async def _report_done(arguments: Arguments) -> None:
    """For a predecessor that was killed after it had finished, but before its end was seen."""
    if arguments.manager_endpoints is not None:
        async with _client(arguments, (EVERY_BATCH,)) as client:
            await client.finish(True, "done")


def _publisher(
    arguments: Arguments, keep: int, rollout: RolloutSpec, machines: OtherMachines | None
) -> WeightPublisher:
    chosen = None if rollout.weight_deltas is WeightDeltas.AUTO else rollout.weight_deltas is WeightDeltas.ALWAYS
    return WeightPublisher(
        arguments.keys,
        _bind(arguments),
        keep,
        advertise=arguments.advertise,
        deltas=chosen,
        lender=_lender(arguments, rollout),
        run_epoch=arguments.run_epoch,
        others=machines,
    )


def _bind(arguments: Arguments) -> str:
    return f"tcp://{EVERYWHERE if arguments.advertise else LOOPBACK}:{arguments.weights_port or '*'}"


def _lender(arguments: Arguments, rollout: RolloutSpec) -> Lender | None:
    return Lender(arguments.advertise or LOOPBACK, rollout.mooncake.rdma_devices) if rollout.mooncake else None


@asynccontextmanager
async def _rollout_side(
    arguments: Arguments,
    job: PolyRLJob,
    prepared: Prepared,
    pools: UserPools,
    *,
    session: Session,
    client: RolloutClient,
    machines: OtherMachines | None,
) -> AsyncIterator[RolloutSide]:
    recipe = job.spec.recipe
    if pools.reward is None or recipe.reward is None:
        raise InvalidData("recipe.reward: needed by every mode that generates")
    async with AsyncExitStack() as stack:
        session.rollouts, known = client, client.welcome
        session.state.next_group = max(session.state.next_group, known.next_group)
        results = session.state.results
        failures = Failures(results.user_code_failures, results.first_failures)
        timeout_s = float(recipe.reward.timeout_seconds)
        reward = pools.reward_function(recipe.reward, failures)
        episodes, group_filter = None, None
        if pools.environment is not None and recipe.environment is not None:
            episodes = Episodes(pools.environment, recipe.environment.max_turns, tokenizer=prepared.tokenizer)
        if pools.group_filter is not None:
            size = recipe.sampling.samples_per_prompt
            group_filter = CustomGroupFilter(pools.group_filter, timeout_s=timeout_s, samples_per_group=size)
        adopted = AdoptedGroups(known.held, whole_groups=group_filter is not None or pools.scores_groups)
        runner = UserCodeRunner(
            client,
            prepared.tokenizer,
            reward=reward,
            judges=pools.judge_functions(recipe.evaluation, failures),
            episodes=episodes,
            group_filter=group_filter,
            adopted=adopted,
            stop=recipe.sampling.stop,
            keeps_turn_rewards=recipe.algorithm.learns_from_turns,
        )
        supply = GroupSupply(client, runner, session=session, adopted=adopted)
        publisher = _publisher(arguments, KEPT_VERSIONS + recipe.algorithm.max_staleness, job.spec.rollout, machines)
        stack.callback(publisher.close)
        evaluator = None
        if prepared.evaluation:
            evaluator = Evaluator(
                prepared.evaluation,
                recipe,
                tokenizer=prepared.tokenizer,
                rollouts=client,
                supply=supply,
                session=session,
            )
        versions = PolicyVersions(
            publisher,
            client,
            session=session,
            newest=(known.version, known.content),
            files=stop_files(recipe, prepared.tokenizer),
        )
        yield RolloutSide(rollouts=client, runner=runner, supply=supply, versions=versions, evaluator=evaluator)


async def _stop_in_time(session: Session) -> None:
    """Fails the run when it was asked to stop and cannot."""
    await session.stop.wait()
    await asyncio.sleep(session.grace_s)
    raise RunFailed(f"asked to stop, and did not within {session.grace_s:g} s; {session.what_is_saved()}")


def _is_temporary(error: Exception) -> bool:
    """True when another process may succeed: others were awaited in vain or are at work, a disk or a store refused, or
    this one broke, or needs other input."""
    return isinstance(error, (*PASSING, Superseded, CannotGoOn)) or not isinstance(error, PolyRLError)


async def _report_failed(client: RolloutClient, error: Exception) -> None:
    try:
        async with asyncio.timeout(FINISH_DEADLINE_S):
            await client.finish(False, str(error) or type(error).__name__)
    except (PolyRLError, TimeoutError) as undelivered:
        log.warning("the manager was not reached to report that the run failed", reason=str(undelivered))


def _engine(job: PolyRLJob, arguments: Arguments) -> EngineConfig:
    """The worker's environment says whether it was given a GPU."""
    return EngineConfig(
        device=os.environ.get(LEARNER_DEVICE, "auto"),
        threads=_threads(job, arguments),
        max_tokens_per_micro_batch=job.spec.recipe.max_tokens_per_micro_batch,
        activation_checkpointing=job.spec.recipe.activation_checkpointing,
        context_parallel=job.spec.trainer.context_parallel,
        shares_device=_sleep(job) is not ReservedSleep.NEVER,
        compile_by="inductor" if job.spec.recipe.compile else "",
        **job.spec.trainer.fsdp.model_dump(),
    )


def _sleep(job: PolyRLJob) -> ReservedSleep:
    """When an engine on this process's devices sleeps."""
    spec = job.spec
    may = spec.trainer.reserved_engine and spec.rollout.engine.type.is_server
    return spec.trainer.reserved_sleep if may and not os.environ.get(ENGINE_APART) else ReservedSleep.NEVER


def _threads(job: PolyRLJob, arguments: Arguments) -> int:
    """Threads of each rank: its share of those that rollouts leave to the learner, by the worker's environment."""
    return max(1, int(os.environ.get("OMP_NUM_THREADS", "1")) // _processes_here(job, arguments))


def _processes_here(job: PolyRLJob, arguments: Arguments) -> int:
    """Ranks of this pod; without pods all of them are on this machine."""
    trainer = job.spec.trainer
    return trainer.learner_processes if arguments.pods_at is None else trainer.processes_per_pod


def _learners(job: PolyRLJob, arguments: Arguments) -> Learners:
    if not job.spec.trainer.learner_is_group:
        return SingleProcess()
    engine, others = _engine(job, arguments), None
    if arguments.pods_at is not None:
        others = OtherPods(job.spec.trainer.replicas - 1, arguments.pods_at[1], _pod_keys(arguments))
    return LearnerGroup(
        _processes_here(job, arguments),
        torch.device(device_name(engine.device)).type,
        threads=engine.threads,
        wait_seconds=engine.wait_seconds,
        others=others,
    )


def _pod_keys(arguments: Arguments) -> LastingKeys:
    """All pods of a trainer have its pair."""
    keys = read_keys(TrainerKeys, arguments.keys)
    return LastingKeys.of(keys.secret_key, keys.public_key, keys.public_key)
