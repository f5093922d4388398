"""A learner of several pods, as process groups on loopback: it learns what one process learns, and what is lost of it
costs one start of all, counted once."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from polyrl.errors import GroupLeft, GroupLost
from polyrl.worker import HANDED_OVER_EXIT
from polyrl_cli.manifests.load import load_manifest
from polyrl_operator.secret import write_run_keys
from polyrl_trainer.backends.configs import CheckpointConfig, EngineConfig, OptimizerConfig
from polyrl_trainer.backends.fsdp import start
from polyrl_trainer.backends.fsdp.pods.other_pods import OtherPods
from polyrl_trainer.backends.fsdp.start import LearnerGroup
from polyrl_trainer.backends.learners import Learner
from polyrl_trainer.backends.single_process import create_torch_backend
from polyrl_trainer.losses import sft_loss
from polyrl_trainer.testing.backend_conformance import MODEL, draw_samples, exported
from polyrl_trainer.testing.pods import POLL_S, end_pod, pod_keys, pods_of_a_job, ranks_of, start_pod
from tests.integration.local.job_runs import polyrl, write_digits_job

WAIT_SECONDS = 120.0
ENGINE = EngineConfig(device="cpu", max_tokens_per_micro_batch=128, wait_seconds=WAIT_SECONDS)
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, total_steps=20, schedule="cosine", warmup_steps=3, weight_decay=0.1)
STEPS = 20
TOLERANCE = 1e-5
RUN_TOLERANCE = 1e-4
"""Of a whole run's weights at a rate of 1e-3, which a step too many or too few moves by as much. Adam divides small
gradients by themselves: on some CPUs another order of sums moved one of a key's biases by 1.1e-5."""
PODS, PROCESSES = 2, 2
BOUND_S = 40.0
"""From a loss to the group's end; seconds on idle cores."""
RUN_STEPS = 12
JOB = f"""\
apiVersion: polyrl.dev/v1alpha1
kind: PolyRLJob
metadata:
  name: pods
spec:
  recipe:
    mode: sft
    seed: 3
    model:
      config:
        {{model_type: qwen2, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2,
         num_key_value_heads: 2, initializer_range: 0.2}}
      tokenizer: {{type: characters, alphabet: "0123456789="}}
      dtype: float32
    data: {{sft: [{{path: sft.jsonl}}]}}
    sft: {{steps: {RUN_STEPS}, batchSize: 16, optimizer: {{learningRate: 1e-3}}}}
    checkpoint: {{everySteps: 2}}
  trainer: {{replicas: {PODS}, storage: {{accessMode: ReadWriteMany}}}}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    job = load_manifest(write_digits_job(tmp_path, JOB), [f"spec.trainer.processesPerPod={PROCESSES}"])
    (tmp_path / "job.json").write_text(job.model_dump_json(by_alias=True, exclude_none=True))
    (tmp_path / "run").mkdir()
    write_run_keys(tmp_path / "keys")
    return tmp_path


@contextmanager
def two_pods(folder: Path) -> Iterator[tuple[LearnerGroup, subprocess.Popen[bytes]]]:
    """The group, which this process leads, and its other pod; on the way out the run is done."""
    others = OtherPods(PODS - 1, 0, pod_keys(folder))
    second = start_pod(folder, 1, others.port)
    group = LearnerGroup(PROCESSES, "cpu", threads=1, wait_seconds=WAIT_SECONDS, others=others)
    try:
        asyncio.run(group.gather())
        yield group, second
    finally:
        group.close(done=True)
        with suppress(subprocess.TimeoutExpired):
            second.wait(BOUND_S)
        end_pod(second)


def trained(backend: Learner) -> list[float]:
    """Losses and gradient norms of all steps; some batches are smaller than the group."""
    seen = []
    for step in range(STEPS):
        sums = backend.forward_backward(draw_samples(step, 2 + step % 11), sft_loss).result(WAIT_SECONDS)
        taken = backend.optim_step(sums["tokens"]).result(WAIT_SECONDS)
        seen += [sums["loss"] / sums["tokens"], taken.grad_norm]
    return seen


def test_two_pods_learn_what_one_process_learns_until_one_loses_a_rank(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This process cannot end itself as a leader does.
    monkeypatch.setattr(start, "_leave_in", lambda seconds, code: None)
    alone = create_torch_backend(MODEL, ENGINE, OPTIMIZER, CheckpointConfig(fsync=False))
    with two_pods(folder) as (group, second):
        together = group.learner(MODEL, ENGINE, OPTIMIZER)
        np.testing.assert_allclose(trained(together), trained(alone), atol=TOLERANCE, rtol=0)
        assert_equal(exported(together), exported(alone))
        asked = threading.Event()
        before = signal.signal(signal.SIGTERM, lambda *_: asked.set())
        second.terminate()
        # In short waits: a signal that comes between the interpreter's last look at signals and its sleep is handled
        # only after that sleep. A trainer's own loop wakes by a file descriptor.
        until = time.monotonic() + BOUND_S
        while not asked.wait(POLL_S):
            assert time.monotonic() < until, "a pod that is asked to leave asks the first one to save"
        signal.signal(signal.SIGTERM, before)
        rank, began = ranks_of(second)[-1], time.monotonic()
        why = asyncio.run(why_lost(group, together, rank.kill))
        assert time.monotonic() - began < BOUND_S
    assert "of the learner's 4 was ended by SIGKILL" in str(why)
    assert not isinstance(why, GroupLeft), "this pod's exit counts it"
    assert second.returncode == HANDED_OVER_EXIT, "and that one's does not"


def test_a_first_pod_that_awaits_the_others_leaves_when_it_is_asked_to(folder: Path) -> None:
    """It heard nothing until they came, for up to 25 minutes: its grace ended it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    first = start_pod(folder, 0, port)
    try:
        until = time.monotonic() + WAIT_SECONDS
        while "trainer starts" not in (folder / "pod-0.log").read_text():
            assert time.monotonic() < until
            time.sleep(POLL_S)
        first.terminate()
        assert first.wait(BOUND_S) == HANDED_OVER_EXIT
    finally:
        end_pod(first)


def assert_equal(found: Mapping[str, Any], wanted: Mapping[str, Any], tolerance: float = TOLERANCE) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        np.testing.assert_allclose(found[name], tensor, atol=tolerance, rtol=0, err_msg=name)


async def why_lost(group: LearnerGroup, backend: Learner, lose: Callable[[], None]) -> GroupLost:
    """In the middle of a pass that the other pod will never join."""
    watching = asyncio.ensure_future(group.watch())
    await asyncio.sleep(0)
    lose()
    passing = asyncio.wrap_future(backend.forward_backward(draw_samples(0, 8), sft_loss))
    with pytest.raises(GroupLost) as raised:
        await asyncio.wait_for(watching, BOUND_S)
    with pytest.raises(GroupLost):
        await asyncio.wait_for(passing, BOUND_S)
    return raised.value


def steps_done(run: Path) -> int:
    rows = run / "metrics.jsonl"
    return max((json.loads(line)["step"] for line in rows.read_text().splitlines()), default=0) if rows.exists() else 0


def weights_of(run: Path) -> dict[str, np.ndarray]:
    return load_file(run / "checkpoints" / f"sft-step-{RUN_STEPS:06d}" / "model" / "model.safetensors")


@pytest.mark.timeout(900)
def test_the_loss_of_either_pod_counts_once_and_changes_nothing(folder: Path) -> None:
    """Of one process each, since all are started three times."""
    run, job = folder / "run", load_manifest(folder / "job.yaml")
    (folder / "job.json").write_text(job.model_dump_json(by_alias=True, exclude_none=True))
    with pods_of_a_job(folder, PODS) as pods:
        pods.until(lambda: steps_done(run) >= 3, WAIT_SECONDS)
        end_pod(pods.running[1])
        pods.until(lambda: len(pods.ends) == 2, BOUND_S)
        assert sorted(pods.ends) == [(0, HANDED_OVER_EXIT), (1, -signal.SIGKILL)]
        pods.until(lambda: steps_done(run) >= 6, WAIT_SECONDS)
        end_pod(pods.running[0])
        pods.until(lambda: len(pods.ends) == 4, BOUND_S)
        assert sorted(pods.ends[2:]) == [(0, -signal.SIGKILL), (1, HANDED_OVER_EXIT)]
        pods.until(lambda: False, WAIT_SECONDS)
        assert sorted(pods.ends[4:]) == [(0, 0), (1, 0)]
    alone = polyrl("run", folder / "job.yaml", "--out", folder / "alone", "--set", "spec.trainer.replicas=1")
    assert alone.returncode == 0, alone.stdout + alone.stderr
    assert_equal(weights_of(run), weights_of(folder / "alone"), RUN_TOLERANCE)
