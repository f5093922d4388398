"""A learner of two machines, each of which keeps, hashes and serves its share of every version: what is published is to
the byte what one process publishes, each machine sends what is its own, and who reaches the first alone has all."""

from __future__ import annotations

import asyncio
import selectors
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from polyrl.errors import GroupLost
from polyrl.keys import AgentKeys, read_keys
from polyrl.weights import WeightsRef
from polyrl.weights.shares import chunk_machines
from polyrl_cli.manifests.load import load_manifest
from polyrl_operator.secret import write_run_keys
from polyrl_rollout.weights.puller import Pulled, Puller
from polyrl_rollout.weights.staging import Staging
from polyrl_trainer.backends.configs import CheckpointConfig, EngineConfig, OptimizerConfig
from polyrl_trainer.backends.fsdp import start
from polyrl_trainer.backends.fsdp.pods.other_pods import OtherPods
from polyrl_trainer.backends.fsdp.start import LearnerGroup
from polyrl_trainer.backends.learners import Learner
from polyrl_trainer.backends.single_process import create_torch_backend
from polyrl_trainer.testing.backend_conformance import MODEL, draw_samples, take_step
from polyrl_trainer.testing.pods import end_pod, pod_keys, start_pod
from polyrl_trainer.weights.forms import VersionForm
from polyrl_trainer.weights.publisher import WeightPublisher
from tests.integration.local.job_runs import write_digits_job
from tests.integration.trainer.test_pods import BOUND_S, JOB

WAIT_SECONDS = 120.0
ENGINE = EngineConfig(device="cpu", max_tokens_per_micro_batch=128, wait_seconds=WAIT_SECONDS)
SLOWLY = OptimizerConfig(learning_rate=1e-5, total_steps=20)
HIDDEN = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 9, "vocab_size": 5003}
LARGE = replace(MODEL, source={**MODEL.source, **HIDDEN}, dtype="bfloat16")  # type: ignore[dict-item]
"""17 MB as it is served, so that several chunks, and parts of deltas, are whole; its rows are cut unevenly."""
KINDS = ["anchor", "delta", "anchor", "delta"]
FILES = {"config.json": b"{}"}


@dataclass
class Machines:
    """The first one is this process's, the second another pod's."""

    group: LearnerGroup
    second: Any
    folder: Path
    stagings: list[Staging] = field(default_factory=list)


@pytest.fixture(params=[1, 2], ids=["of a rank each", "of two ranks each"])
def machines(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    # This process cannot end itself as a leader does.
    monkeypatch.setattr(start, "_leave_in", lambda seconds, code: None)
    job = load_manifest(write_digits_job(tmp_path, JOB), [f"spec.trainer.processesPerPod={request.param}"])
    (tmp_path / "job.json").write_text(job.model_dump_json(by_alias=True, exclude_none=True))
    (tmp_path / "run").mkdir()
    write_run_keys(tmp_path / "keys")
    others = OtherPods(1, 0, pod_keys(tmp_path))
    second = start_pod(tmp_path, 1, others.port, "--manager-endpoints", "of no use to it")
    group = LearnerGroup(request.param, "cpu", threads=1, wait_seconds=WAIT_SECONDS, others=others)
    try:
        asyncio.run(group.gather())
        made = Machines(group, second, tmp_path)
        yield made
        for staging in made.stagings:
            staging.close()
    finally:
        group.close(done=True)
        with suppress(Exception):
            second.wait(BOUND_S)
        end_pod(second)


def publisher_of(machines: Machines, *, alone: bool = False) -> closing[WeightPublisher]:
    made = WeightPublisher(
        machines.folder / "keys/trainer.key", deltas=True, others=None if alone else machines.group.machines
    )
    made.forms.smallest = 0
    return closing(made)


def content_of(publisher: WeightPublisher, form: VersionForm) -> bytes:
    """Of a publisher that has all of it."""
    return bytes(publisher._machines.own.image_of(form.copy.number))


@contextmanager
def counted(endpoint: str) -> Iterator[tuple[str, list[int]]]:
    """An endpoint that leads there, and how many bytes came from there."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    came = [0]

    def carry(near: socket.socket) -> None:
        with near, socket.create_connection((host, int(port))) as far, selectors.DefaultSelector() as selector:
            for source, target in ((near, far), (far, near)):
                selector.register(source, selectors.EVENT_READ, target)
            with suppress(OSError):
                while True:
                    for key, _ in selector.select():
                        data = key.fileobj.recv(1 << 18)  # type: ignore[union-attr]
                        if not data:
                            return
                        came[0] += len(data) if key.fileobj is far else 0
                        key.data.sendall(data)

    def accept(listener: socket.socket) -> None:
        with suppress(OSError), ThreadPoolExecutor(64) as carried:
            while True:
                carried.submit(carry, listener.accept()[0])

    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepting = threading.Thread(target=accept, args=(listener,))
        accepting.start()
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}", came
        listener.shutdown(socket.SHUT_RDWR)
        accepting.join(WAIT_SECONDS)


def pulled(machines: Machines, ref: WeightsRef, name: str, served: Pulled | None = None) -> Pulled:
    staging = Staging(name, name, machines.folder)
    machines.stagings.append(staging)
    puller = Puller(read_keys(AgentKeys, machines.folder / "keys/agent.key"), staging, silence_s=3.0, progress_s=30.0)
    return asyncio.run(puller.pull(ref, served.staged if served else None))


def tensors_in(one: Pulled, size: int) -> bytes:
    return (one.staged.folder / "model.safetensors").read_bytes()[-size:]


def step(several: Learner, one: Learner, machines: Machines, version: int) -> dict[str, bytes]:
    """Both have the same weights then; the version's files."""
    take_step(several, [draw_samples(version, 9)])
    (folder := machines.folder / str(version)).mkdir()
    several.save(folder).result(WAIT_SECONDS)
    one.load(folder)
    return FILES if version < 2 else {**FILES, "generation_config.json": b"{}"}


def test_two_machines_publish_and_serve_what_one_process_publishes_until_one_is_lost(machines: Machines) -> None:
    several = machines.group.learner(LARGE, ENGINE, SLOWLY)
    one = create_torch_backend(LARGE, ENGINE, SLOWLY, CheckpointConfig(fsync=False))
    with publisher_of(machines) as of_several, publisher_of(machines, alone=True) as of_one:
        for version, kind in enumerate(KINDS):
            files = step(several, one, machines, version)
            ref = of_several.publish_snapshot(version, of_several.snapshot(several.export_weights, files))
            wanted = of_one.publish_snapshot(version, of_one.snapshot(one.export_weights, files))
            form, alone = of_several._kept[version], of_one._kept[version]
            assert form.manifest.kind == kind
            assert form.body == alone.body, "manifests are equal to the byte"
            assert structs.replace(ref, endpoint=wanted.endpoint, others=()) == wanted
            assert len(ref.others) == 1
            if version in (0, 3):
                assert_each_sends_its_share(machines, ref, form, content_of(of_one, alone))
        copied = of_several.snapshot(several.export_weights, FILES)
        end_pod(machines.second)
        with pytest.raises(GroupLost, match="pod 1 of the trainer is gone"):
            of_several.publish_snapshot(len(KINDS), copied)


def assert_each_sends_its_share(machines: Machines, ref: WeightsRef, form: VersionForm, content: bytes) -> None:
    with ExitStack() as stack:
        (first, of_first), (second, of_second) = (
            stack.enter_context(counted(endpoint)) for endpoint in (ref.endpoint, *ref.others)
        )
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        dead = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        both = pulled(machines, structs.replace(ref, endpoint=first, others=(second,)), f"both{ref.version}")
        assert tensors_in(both, len(content)) == content
        assert both.staged.receipt == ref.receipt
        if form.manifest.kind == "anchor":
            owners = chunk_machines(form.manifest, 2)
            own = sum(chunk.size for chunk, owner in zip(form.manifest.chunks, owners, strict=True) if owner)
            assert len(content) / 5 < own < len(content) * 4 / 5
            assert own <= of_second[0] < own + (64 << 10), "what is its own, and nothing else"
            assert of_first[0] < len(content) - own + len(form.body) + (64 << 10)
        for number, others in enumerate((("tcp://127.0.0.1:1",), (dead,))):
            before = of_first[0], of_second[0]
            alone = structs.replace(ref, endpoint=first, others=others)
            got = pulled(machines, alone, f"first{ref.version}.{number}")
            assert tensors_in(got, len(content)) == content
            assert of_second[0] == before[1]
            assert of_first[0] - before[0] > got.bytes_pulled
