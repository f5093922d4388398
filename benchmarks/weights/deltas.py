"""Deltas of a model that trains: how much changes, what travels, what it costs, and that nothing is lost.

    python benchmarks/weights/deltas.py --steps 20

A Qwen2 of 52 million parameters, made from a config, learns by AdamW on the project's own backend (masters in float32,
published in bfloat16) at each of three learning rates. Every step is published and pulled over sockets, by a publisher
that plans as for `--engines` behind a link of `--gigabits`, in bytes whose receipt the publisher gave; at the end the
received file is compared with the learner's tensors byte by byte. Beside it, on the same bytes: the codec alone, and
XOR of words with zstandard. The last line is one JSON object.

`pre-warmed` steps are not published: an optimizer's first steps move every weight by the whole learning rate.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np
import structlog
import torch
import zstandard
from safetensors.torch import load_file

from polyrl.keys import FILE_NAMES, AgentKeys, TrainerKeys, read_keys
from polyrl.weights.deltas import PART_BYTES, apply_delta, encode_delta
from polyrl.weights.manifest import pieces
from polyrl_operator.secret import write_run_keys
from polyrl_rollout.weights.puller import Puller
from polyrl_rollout.weights.staging import Staged, Staging
from polyrl_trainer.backends.configs import CheckpointConfig, EngineConfig, ModelConfig, OptimizerConfig
from polyrl_trainer.backends.single_process import TorchBackend, create_torch_backend
from polyrl_trainer.losses import sft_loss
from polyrl_trainer.sample import Sample
from polyrl_trainer.testing.backend_conformance import exported
from polyrl_trainer.weights.publisher import WeightPublisher
from polyrl_trainer.weights.server import WeightServer

CONFIG: Final = {
    "model_type": "qwen2",
    "vocab_size": 32_000,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 9,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}
LEARNING_RATES: Final = (1e-6, 1e-5, 1e-3)
"""The last one is what no RL would take: there a delta loses."""
DEADLINE_S: Final = 1800.0


def backend_of(learning_rate: float, steps: int) -> TorchBackend:
    optimizer = OptimizerConfig(learning_rate=learning_rate, total_steps=steps)
    return create_torch_backend(ModelConfig(CONFIG, seed=1), EngineConfig("cpu"), optimizer, CheckpointConfig())


def samples(number: int, tokens: int) -> list[Sample]:
    """Sequences that count, by steps of their own: there is something to learn."""
    draw = np.random.default_rng(number)
    rows = [(draw.integers(1000) + draw.integers(1, 9) * np.arange(tokens)) % 32_000 for _ in range(2)]
    mask = np.r_[0, np.ones(tokens - 1)].astype(np.float32)
    return [Sample(row.astype(np.int64), mask, prompt_length=1) for row in rows]


def learn(backend: TorchBackend, number: int, tokens: int) -> float:
    sums = backend.forward_backward(samples(number, tokens), sft_loss).result(timeout=600)
    backend.optim_step(sums["tokens"]).result(timeout=600)
    return float(sums["loss"] / sums["tokens"])


def seconds(work: Callable[[], Any]) -> tuple[Any, float]:
    begun = time.perf_counter()
    found = work()
    return found, time.perf_counter() - begun


def codecs(old: bytes, new: bytes, threads: ThreadPoolExecutor) -> dict[str, float]:
    """Both on the same bytes, on all cores."""

    def xor_part(one: memoryview, other: memoryview) -> bytes:
        words = [np.frombuffer(part, "<u2") for part in (one, other)]
        return zstandard.ZstdCompressor(1).compress(np.bitwise_xor(*words).tobytes())

    def unxor_part(packed: bytes, part: memoryview) -> None:
        words = np.frombuffer(part, "<u2")
        np.bitwise_xor(words, np.frombuffer(zstandard.ZstdDecompressor().decompress(packed), "<u2"), out=words)

    delta, encode = seconds(lambda: b"".join(encode_delta(old, new, threads.map)))
    stream = bytearray(old)
    _, apply = seconds(lambda: apply_delta(delta, memoryview(stream), threads.map))
    assert stream == new
    xored, xor = seconds(lambda: list(threads.map(xor_part, pieces(old, PART_BYTES), pieces(new, PART_BYTES))))
    stream = bytearray(old)
    _, unxor = seconds(lambda: list(threads.map(unxor_part, xored, pieces(stream, PART_BYTES))))
    assert stream == new
    found = {"bytes": len(delta), "encodeSeconds": encode, "applySeconds": apply}
    return found | {"xorBytes": sum(map(len, xored)), "xorEncodeSeconds": xor, "xorApplySeconds": unxor}


class Run:
    """A publisher, a receiver, and what each step took."""

    def __init__(self, folder: Path) -> None:
        write_run_keys(folder / "keys")
        agent = read_keys(AgentKeys, folder / "keys" / FILE_NAMES[AgentKeys])
        self._staging = Staging("benchmark", "deltas")
        self._publisher = WeightPublisher(folder / "keys" / FILE_NAMES[TrainerKeys])
        self._puller = Puller(agent, self._staging)
        self._served: Staged | None = None
        self._threads = ThreadPoolExecutor(os.cpu_count())
        self._before: bytes = b""

    async def step(self, version: int, backend: TorchBackend) -> dict[str, Any]:
        publisher, files = self._publisher, backend.serving_files()
        copied, copying = seconds(lambda: publisher.snapshot(backend.export_weights, files))
        ref, publishing = seconds(lambda: publisher.publish_snapshot(version, copied))
        pulled = await self._puller.pull(ref, self._served)
        assert pulled.staged.receipt == ref.receipt
        self._served = pulled.staged
        self._staging.keep_only(version)
        row: dict[str, Any] = {"snapshotSeconds": copying, "publishSeconds": publishing, "pullSeconds": pulled.seconds}
        row |= {"wholeBytes": pulled.staged.manifest.stream_bytes, "travelled": pulled.bytes_pulled}
        row |= {"density": publisher.measures["weights/changed_share"], "kind": pulled.staged.manifest.kind}
        now = bytes(pulled.staged.file.stream(pulled.staged.manifest))
        if self._before:
            row |= codecs(self._before, now, self._threads)
        self._before = now
        return row

    def assert_equal(self, backend: TorchBackend) -> None:
        """Every byte of what was received."""
        assert self._served is not None
        loaded = load_file(self._served.folder / "model.safetensors")
        wanted = exported(backend)
        assert loaded.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert raw(loaded[name]) == raw(tensor), name

    def close(self) -> None:
        self._publisher.close()
        self._staging.close()
        self._threads.shutdown()


def raw(tensor: torch.Tensor) -> bytes:
    found: bytes = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return found


async def train(learning_rate: float, steps: int, warm: int, tokens: int) -> dict[str, Any]:
    with closing(backend_of(learning_rate, steps + warm)) as backend, tempfile.TemporaryDirectory() as folder:
        run, rows, losses = Run(Path(folder)), [], []
        try:
            for number in range(warm):
                learn(backend, number, tokens)
            await run.step(0, backend)
            for number in range(steps):
                losses.append(learn(backend, warm + number, tokens))
                rows.append(await run.step(number + 1, backend))
                print(learning_rate, number, json.dumps(rows[-1]), flush=True)
            run.assert_equal(backend)
        finally:
            run.close()
    return summary(rows, losses)


def summary(rows: list[dict[str, Any]], losses: list[float]) -> dict[str, Any]:
    def middle(name: str, digits: int = 4) -> float:
        return round(statistics.median(row[name] for row in rows), digits)

    return {
        "loss": [round(losses[0], 3), round(losses[-1], 3)],
        "wholeBytes": rows[0]["wholeBytes"],
        "densityFirst": round(rows[0]["density"], 5),
        "densityMedian": middle("density", 5),
        "densityLast": round(rows[-1]["density"], 5),
        "deltas": sum(row["kind"] == "delta" for row in rows),
        "anchors": sum(row["kind"] == "anchor" for row in rows),
        "deltaRatio": round(statistics.median(row["bytes"] / row["wholeBytes"] for row in rows), 5),
        "xorRatio": round(statistics.median(row["xorBytes"] / row["wholeBytes"] for row in rows), 5),
        "travelledRatio": round(sum(row["travelled"] for row in rows) / sum(row["wholeBytes"] for row in rows), 5),
        **{name: middle(name) for name in ("encodeSeconds", "applySeconds", "xorEncodeSeconds", "xorApplySeconds")},
        **{name: middle(name) for name in ("snapshotSeconds", "publishSeconds", "pullSeconds")},
        "equalToTheByte": True,
    }


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="published, at the first two learning rates")
    parser.add_argument("--warm", type=int, default=3, help="steps before, which are not")
    parser.add_argument("--tokens", type=int, default=64, help="of each of two sequences a step")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--gigabits", type=float, default=10.0, help="of the link that engines share")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    share = arguments.gigabits * 1e9 / 8 / arguments.engines
    found: dict[str, Any] = {}
    async with asyncio.timeout(DEADLINE_S):
        with mock.patch.object(WeightServer, "bandwidth", share):
            for rate in LEARNING_RATES:
                steps = arguments.steps if rate <= 1e-5 else min(3, arguments.steps)
                found[f"{rate:g}"] = await train(rate, steps, arguments.warm, arguments.tokens)
    print(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main())
