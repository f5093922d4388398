"""The workers of one run: one pool for each piece of the user's code that the manifest names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from polyrl.manifest.data import EvaluationSpec
from polyrl.manifest.parts.algorithm import GroupFilter
from polyrl.manifest.parts.user_code import EnvironmentSpec, RewardSpec
from polyrl.manifest.recipe import RecipeSpec
from polyrl_trainer.user_code.rewards import Failures, RewardFunction
from polyrl_trainer.user_code.together import Alone, Batches, Groups, Judge, Together
from polyrl_trainer.user_code.workers.environments import EnvironmentPool
from polyrl_trainer.user_code.workers.messages import Serves, Setup
from polyrl_trainer.user_code.workers.pool import WorkerPool
from polyrl_trainer.user_code.workers.worker_set import WorkerSet, default_workers

MIB = 2**20


@dataclass(frozen=True)
class UserPools:
    """None for what the manifest does not name."""

    reward: WorkerPool | None
    judges: Mapping[str, WorkerPool]
    """Rewards of evaluation sets, by set."""
    group_filter: WorkerPool | None
    environment: EnvironmentPool | None

    @classmethod
    def start(cls, recipe: RecipeSpec, manifest_dir: Path) -> UserPools:
        """Spawns; call `ready` before anything relies on the user's code."""
        code_path = manifest_dir / recipe.code.path
        reward, environment = recipe.reward, recipe.environment
        wanted = recipe.algorithm.filter_function if recipe.algorithm.group_filter is GroupFilter.CUSTOM else None
        made = cls(
            reward=reward_pool(reward, code_path) if reward else None,
            judges={one.name: reward_pool(one.reward, code_path) for one in recipe.evaluation.sets if one.reward},
            group_filter=_calls(reward, wanted, code_path, serves=Serves.FILTER) if reward and wanted else None,
            environment=_conversations(environment, code_path) if environment else None,
        )
        for pool in made._all():
            pool.start()
        return made

    @property
    def scores_groups(self) -> bool:
        """Rewards come by whole groups, if only those of an evaluation's set."""
        return any(one is not None and one.setup.serves is Serves.GROUP for one in (self.reward, *self.judges.values()))

    def reward_function(self, spec: RewardSpec, failures: Failures) -> RewardFunction:
        """Once they are ready."""
        assert self.reward is not None, "the manifest names a reward"
        return _function(self.reward, spec, failures)

    def judge_functions(self, evaluation: EvaluationSpec, failures: Failures) -> dict[str, RewardFunction]:
        """Likewise, by set."""
        sets = {one.name: one.reward for one in evaluation.sets if one.reward}
        return {name: _function(self.judges[name], spec, failures) for name, spec in sets.items()}

    async def ready(self) -> None:
        """When all code is imported. Raises InvalidCode."""
        for pool in self._all():
            await pool.ready()

    def close(self) -> None:
        """Ends all workers."""
        for pool in self._all():
            pool.close()

    def _all(self) -> list[WorkerSet]:
        pools = (self.reward, self.group_filter, self.environment, *self.judges.values())
        return [pool for pool in pools if pool is not None]


def _function(pool: WorkerPool, spec: RewardSpec, failures: Failures) -> RewardFunction:
    together: Callable[[Judge], Together] = Alone
    if pool.setup.serves is Serves.BATCH:
        together = partial(Batches, most=spec.max_batch, at_once=pool.at_once)
    elif pool.setup.serves is Serves.GROUP:
        together = Groups
    return RewardFunction(pool, float(spec.timeout_seconds), failures=failures, together=together)


def reward_pool(spec: RewardSpec, code_path: Path) -> WorkerPool:
    """Not yet started."""
    return _calls(spec, spec.function, code_path, serves=Serves.of(spec.function))


def _calls(spec: RewardSpec, function: str, code_path: Path, *, serves: Serves) -> WorkerPool:
    workers = 1 if serves is Serves.FILTER else spec.workers or default_workers()
    setup = Setup(function, str(code_path), serves=serves, memory_bytes=spec.memory_mib * MIB)
    return WorkerPool(setup, workers, concurrency=spec.max_concurrency)


def _conversations(spec: EnvironmentSpec, code_path: Path) -> EnvironmentPool:
    memory, timeout_s = spec.memory_mib * MIB, float(spec.timeout_seconds)
    setup = Setup(spec.class_path, str(code_path), serves=Serves.ENVIRONMENT, memory_bytes=memory, timeout_s=timeout_s)
    return EnvironmentPool(setup, spec.workers or default_workers())
