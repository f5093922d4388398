"""What the learner waits for at each version: its weights copied into an image, by one process and by several ranks.

    .venv/bin/python benchmarks/weights/snapshot.py --ranks 2

A Qwen2 of 52 million parameters, kept in float32 and served in bfloat16. After the first version, whose pages are new,
the fastest of `--rounds` turns of each counts, which follow each other. The last line is JSON, with `ratio`: seconds of
the ranks over those of one process, which has as many threads as they have together. The bytes are compared.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence

from polyrl.weights import TensorEntry
from polyrl_trainer.backend import BufferPlace, TrainingBackend, WeightsBuffer
from polyrl_trainer.backends.configs import CheckpointConfig, EngineConfig, ModelConfig, OptimizerConfig
from polyrl_trainer.backends.single_process import create_torch_backend
from polyrl_trainer.backends.weight_stream import stream_bytes
from polyrl_trainer.testing.fsdp_group import group
from polyrl_trainer.weights.images import Images

MODEL = ModelConfig(
    source={
        "model_type": "qwen2", "vocab_size": 32_000, "hidden_size": 512, "intermediate_size": 1408,
        "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    seed=1,
    dtype="bfloat16",
)  # fmt: skip
OPTIMIZER = OptimizerConfig(learning_rate=1e-5, total_steps=1)


class Snapshots:
    """One learner's, each in the pages of the one before."""

    def __init__(self, backend: TrainingBackend) -> None:
        self._backend, self._images = backend, Images()
        self._image = self._images.take(0)
        self.seconds: list[float] = []

    def take(self) -> bytes:
        """The version's bytes."""
        begun = time.monotonic()
        self._backend.export_weights(self._buffer)
        self.seconds.append(time.monotonic() - begun)
        content = bytes(self._image.data)
        self._images.give_back(self._image)
        return content

    def _buffer(self, places: Sequence[TensorEntry]) -> WeightsBuffer:
        self._image = self._images.take(stream_bytes(places))
        place = BufferPlace(self._image.path, self._image.name, begin=0, end=len(self._image.data))
        return WeightsBuffer(self._image.data, (place,))


def main() -> None:
    """Prints JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    asked = parser.parse_args()
    with group(asked.ranks) as ranks:
        several = Snapshots(ranks.learner(MODEL, EngineConfig("cpu", threads=1), OPTIMIZER))
        engine = EngineConfig("cpu", threads=asked.ranks)
        one = Snapshots(create_torch_backend(MODEL, engine, OPTIMIZER, CheckpointConfig(fsync=False)))
        for _ in range(1 + asked.rounds):
            content = one.take()
            assert several.take() == content, "other bytes than one process copies"
    alone, together = min(one.seconds[1:]), min(several.seconds[1:])
    found = {"bytes": len(content), "ranks": asked.ranks, "oneSeconds": alone, "ranksSeconds": together}
    print(json.dumps({**found, "ratio": together / alone}))


if __name__ == "__main__":
    main()
