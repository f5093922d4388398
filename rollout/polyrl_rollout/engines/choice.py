"""Which engine a manifest asks for.

Refuses to hold: what an engine is (see `polyrl_rollout.engines.port`). Read next: `embedded`, then `sglang`.
"""

from __future__ import annotations

from polyrl.manifest.rollout import EngineSpec, EngineType
from polyrl_rollout.engines.embedded.engine import EmbeddedEngine
from polyrl_rollout.engines.port import Engine
from polyrl_rollout.engines.sglang.engine import SGLangEngine


def choose_engine(spec: EngineSpec, seed: int) -> Engine:
    """The engine of `spec.type`, not yet started; `seed` seeds the draws of requests without a seed of their own."""
    if spec.type is EngineType.EMBEDDED:
        return EmbeddedEngine(spec, seed)
    return SGLangEngine(spec, seed)
