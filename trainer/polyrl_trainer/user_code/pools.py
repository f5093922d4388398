"""The workers of one run: one pool for each function of the user's that the manifest names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from polyrl.manifest.recipe import GroupFilter, RecipeSpec
from polyrl_trainer.user_code.messages import Setup
from polyrl_trainer.user_code.pool import WorkerPool, default_workers

MIB = 2**20


@dataclass(frozen=True)
class UserPools:
    """None for what the manifest does not name."""

    reward: WorkerPool | None
    group_filter: WorkerPool | None

    @classmethod
    def start(cls, recipe: RecipeSpec, manifest_dir: Path) -> UserPools:
        """Spawns; call `ready` before anything relies on the user's code."""
        spec, filtering = recipe.reward, recipe.algorithm.group_filter is GroupFilter.CUSTOM
        if spec is None:
            return cls(None, None)
        code_path = manifest_dir / recipe.code.path

        def pool(function: str, *, workers: int, whole_groups: bool) -> WorkerPool:
            setup = Setup(function, str(code_path), whole_groups=whole_groups, memory_bytes=spec.memory_mib * MIB)
            made = WorkerPool(setup, workers, concurrency=spec.max_concurrency)
            made.start()
            return made

        filter_function = recipe.algorithm.filter_function if filtering else None
        return cls(
            reward=pool(spec.function, workers=spec.workers or default_workers(), whole_groups=False),
            group_filter=pool(filter_function, workers=1, whole_groups=True) if filter_function else None,
        )

    async def ready(self) -> None:
        """When all code is imported. Raises InvalidCode."""
        for pool in (self.reward, self.group_filter):
            if pool is not None:
                await pool.ready()

    def close(self) -> None:
        """Ends all workers."""
        for pool in (self.reward, self.group_filter):
            if pool is not None:
                pool.close()
