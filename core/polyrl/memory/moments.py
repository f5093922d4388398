"""What AdamW's two moments take: in float32, or in 8 bits where a parameter's rows can be cut into blocks of values.

Which parameters can hangs on their whole shapes, never on a rank's part, so that any number of ranks goes on from what
any other number saved. The trainer asks here too (`polyrl_trainer.backends.optimizers.blocks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Final

from polyrl.manifest.parts.optimizer import OptimizerName

FLOAT32_BYTES: Final = 4
NUM_MOMENTS: Final = 2
BLOCK: Final = 256
"""Values with a scale of their own, as in bitsandbytes and torchao: one outlier spoils no more than these."""
LEAST_VALUES: Final = 4096
"""Fewest values of a parameter whose moments are held in 8 bits, as there: smaller ones would save nothing."""
LEAST_MOMENT_BYTES: Final = {OptimizerName.ADAMW: NUM_MOMENTS * FLOAT32_BYTES, OptimizerName.ADAMW_8BIT: NUM_MOMENTS}
"""Bytes of one value's moments at least, whatever the parameter's shape."""


def in_blocks(shape: Sequence[int]) -> bool:
    """Whether `adamw_8bit` holds the moments of a parameter of this whole shape in 8 bits. A block never leaves its
    row: ranks have whole rows."""
    return len(shape) > 1 and prod(shape) >= LEAST_VALUES and shape[-1] % BLOCK == 0


def moment_bytes(name: OptimizerName, parameters: int, fitting: int) -> int:
    """Bytes of the moments of so many parameters, `fitting` of which are `in_blocks`."""
    blocks = min(fitting, parameters) if name is OptimizerName.ADAMW_8BIT else 0
    scales = FLOAT32_BYTES * blocks // BLOCK
    return NUM_MOMENTS * (FLOAT32_BYTES * (parameters - blocks) + blocks + scales)
