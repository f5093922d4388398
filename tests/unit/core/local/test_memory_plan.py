"""What each GPU holds of a job, and the changes with which it fits: each is planned again here, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from polyrl.local.gpu_assignment import GpuRefusal
from polyrl.local.memory_advice import GpuOffer, JobPlan, edited, plan_job
from polyrl.local.memory_plan import pass_tokens
from polyrl.manifest.job import JobSpec
from polyrl.memory.engine import engine_memory
from polyrl.memory.gpus import gpu_bytes
from polyrl.memory.known_models import known_config
from polyrl.memory.learner import learner_memory
from polyrl.memory.sizes import GIB, ModelSizes


def sizes_of(name: str) -> ModelSizes:
    sizes = ModelSizes.of(known_config(f"Qwen/Qwen2.5-{name}"))
    assert sizes is not None
    return sizes


def job(
    tokens: int = 4096, reserved: bool = True, each: int = 1, fraction: float | None = None, **rollout: Any
) -> JobSpec:
    recipe = {"model": {"path": "model"}, "maxTokensPerMicroBatch": tokens}
    engine = {"type": "sglang", "tensorParallel": each, "memFraction": fraction, **rollout.pop("engine", {})}
    given = {"replicas": 2, "maxReplicas": 2, "engine": engine, **rollout}
    return JobSpec.model_validate({"recipe": recipe, "trainer": {"reservedEngine": reserved}, "rollout": given})


def on(gpu: str, rollout: str | None = None, count: int | None = None) -> GpuOffer:
    return GpuOffer(memory=gpu_bytes(gpu), rollout_memory=gpu_bytes(rollout or gpu), count=count)


def planned(spec: JobSpec, name: str, offer: GpuOffer) -> JobPlan:
    plan = plan_job(spec, sizes_of(name), offer)
    assert isinstance(plan, JobPlan)
    return plan


def test_every_part_of_every_gpu_is_there() -> None:
    plan = planned(job(fraction=0.5), "0.5B", on("H100", "L4"))
    shared, rollouts = plan.memory.gpus
    assert (shared.use, shared.gpus, rollouts.use, rollouts.gpus) == ("learner and reserved engine", 1, "rollout", 2)
    half = 494_032_768
    assert shared.parts["weights"] == shared.parts["gradients"] == 4 * half
    assert (shared.parts["optimizer"], shared.parts["gathered"], shared.parts["engine's weights"]) == (
        8 * half,
        2 * half,
        2 * half,
    )
    free = gpu_bytes("H100") - 4 * half - 2 * GIB
    assert shared.parts["engine's weights"] + shared.parts["keys and values"] == pytest.approx(free / 2, abs=1)
    assert shared.total + shared.left == shared.memory == gpu_bytes("H100")
    assert rollouts.memory == gpu_bytes("L4")
    assert rollouts.tokens == (int(0.5 * (gpu_bytes("L4") - GIB)) - 2 * half) // (2 * 24 * 128 * 2)
    assert plan.memory.fits
    assert plan.changes == ()


def test_a_learner_alone_has_no_engine() -> None:
    plan = planned(job(reserved=False), "1.5B", on("H100"))
    assert [one.use for one in plan.memory.gpus] == ["learner", "rollout"]
    assert "engine's weights" not in plan.memory.gpus[0].parts
    assert plan.memory.gpus[0].tokens is None


def test_an_engine_over_two_gpus_has_them_for_itself() -> None:
    plan = planned(job(each=2), "7B", on("B200"))
    assert [(one.use, one.gpus) for one in plan.memory.gpus] == [("learner", 1), ("reserved engine", 2), ("rollout", 4)]
    assert plan.memory.gpus[1].parts["engine's weights"] == 7_615_616_512


CHANGES = [
    # job, model, GPUs, the changes that are proposed
    (
        job(),
        "0.5B",
        on("H100"),
        [
            "trainer.reservedMemFraction to 0.05",
            "trainer.reservedEngine to false",
            "set recipe.activationCheckpointing to selective",
            "processesPerPod to 2",
            "trainer.fsdp.cpuOffload to all",
            "lora",
            "H200",
        ],
    ),
    (
        job(16384),
        "1.5B",
        on("H100"),
        [
            "reservedMemFraction to 0.1, and recipe.maxTokensPerMicroBatch to 13312",
            "trainer.reservedEngine to false",
            "processesPerPod to 4, and recipe.activationCheckpointing to selective, and recipe.maxTokens",
            "processesPerPod to 4, and recipe.activationCheckpointing to full",
            "set trainer.fsdp.cpuOffload to all, and recipe.activationCheckpointing to selective, and recipe.max",
            "set trainer.fsdp.cpuOffload to all, and recipe.activationCheckpointing to full",
            "set recipe.model.lora to {}, and recipe.activationCheckpointing to selective, and recipe.maxTokens",
            "set recipe.model.lora to {}, and recipe.activationCheckpointing to full",
        ],
    ),
    (
        job(16384, reserved=False),
        "1.5B",
        on("A100-40GB"),
        [
            "set recipe.activationCheckpointing to selective, and recipe.maxTokens",
            "set recipe.activationCheckpointing to full",
            "processesPerPod to 2, and recipe.maxTokens",
            "trainer.fsdp.cpuOffload to optimizer, and recipe.maxTokens",
            "set recipe.model.lora",
            "at least H100-80GB",
        ],
    ),
    (
        job(reserved=False),
        "7B",
        on("H100"),
        [
            "processesPerPod to 2, and recipe.activationCheckpointing to selective",
            "processesPerPod to 4",
            "trainer.fsdp.cpuOffload to optimizer, and recipe.activationCheckpointing to full",
            "trainer.fsdp.cpuOffload to all",
            "set recipe.model.lora to {}",
            "GPUs of at least B200-180GB",
        ],
    ),
    (
        job(reserved=False),
        "32B",
        on("B200"),
        [
            "processesPerPod to 4, and recipe.activation",
            "processesPerPod to 8",
            "fsdp.cpuOffload to all",
            "set recipe.model.lora to {}",
        ],
    ),
    (
        job(reserved=False),
        "72B",
        on("H100"),
        [
            "trainer.fsdp.cpuOffload to all, and recipe.activationCheckpointing to selective",
            "rollout: set rollout.engine.tensorParallel to 4",
            "at least B200",
        ],
    ),
    (job(reserved=False), "7B", on("B200", "L4"), []),
    (
        job(reserved=False, fraction=0.01),
        "7B",
        on("B200", "H100"),
        ["rollout: set rollout.engine.memFraction to 0.85"],
    ),
    (
        job(reserved=False, fraction=0.3),
        "14B",
        on("B200", "L4"),
        [
            "learner: set trainer.processesPerPod to 2",
            "learner: set trainer.fsdp.cpuOffload to optimizer, and",
            "learner: set trainer.fsdp.cpuOffload to all",
            "learner: set recipe.model.lora to {}",
            "rollout: set rollout.engine.memFraction to 0.85, and rollout.engine.tensorParallel to 2",
            "rollout: set rollout.engine.tensorParallel to 8",
            "at least H20-96GB",
        ],
    ),
    (
        edited(job(each=2), {"trainer.reservedMemFraction": 0.01}),
        "7B",
        on("B200"),
        ["reserved engine: set trainer.reservedMemFraction to 0.85"],
    ),
    (
        edited(job(each=2, fraction=0.01), {"trainer.reservedMemFraction": 0.01}),
        "7B",
        on("B200"),
        ["set trainer.reservedMemFraction to 0.85, and rollout.engine.memFraction to 0.85"],
    ),
    (
        job(reserved=False, engine={"maxContext": 200_000}),
        "7B",
        on("B200", "L4"),
        [
            "processesPerPod to 2, and",
            "cpuOffload to all, and",
            "lora to {}, and",
            "rollout: set rollout.engine.tensorParallel to 2",
            "at least A100-40GB",
        ],
    ),
]

CASES = [
    *("half a billion, shared", "long passes, shared", "long passes, alone", "7B alone", "32B alone", "72B on both"),
    *("small GPUs of rollouts", "a small share", "a small share of small GPUs", "a small share of the reserved engine"),
    *("small shares of both", "long sequences there"),
]


@pytest.mark.parametrize(("spec", "name", "offer", "words"), CHANGES, ids=CASES)
def test_what_does_not_fit_comes_with_what_to_change(
    spec: JobSpec, name: str, offer: GpuOffer, words: list[str]
) -> None:
    plan = planned(spec, name, offer)
    assert plan.memory.fits is (not words)
    assert len(plan.changes) == len(words)
    assert all(one in sentence for one, sentence in zip(words, plan.changes, strict=True))


def test_what_is_proposed_fits_and_a_step_more_does_not() -> None:
    spec, sizes, offer = job(16384), sizes_of("1.5B"), on("H100")
    proposed = {"trainer.reservedMemFraction": 0.1, "recipe.maxTokensPerMicroBatch": 13312}
    longer = {**proposed, "recipe.maxTokensPerMicroBatch": 13312 + 512}
    fits = [planned(edited(spec, edits), "1.5B", offer).memory.gpus[0].fits for edits in (proposed, longer)]
    assert fits == [True, False]
    assert isinstance(plan_job(spec, sizes, on("H100", count=2)), GpuRefusal), "of three GPUs"


def test_the_reserved_engine_has_a_share_of_its_own_and_rollouts_keep_theirs() -> None:
    spec = edited(job(), {"trainer.reservedMemFraction": 0.1, "rollout.engine.memFraction": 0.8})
    shared, rollouts = planned(spec, "0.5B", on("H100")).memory.gpus
    assert (shared.use, rollouts.use) == ("learner and reserved engine", "rollout")
    assert shared.parts["keys and values"] < rollouts.parts["keys and values"] / 6


def test_one_of_the_learners_gpus_has_the_reserved_engine_too() -> None:
    spec = edited(job(fraction=0.2), {"trainer.processesPerPod": 4})
    shared, others, rollouts = planned(spec, "7B", on("H200")).memory.gpus
    assert (shared.gpus, others.use, others.gpus, rollouts.gpus) == (1, "learner", 3, 2)
    assert shared.parts["weights"] == others.parts["weights"] == 7_615_616_512
    assert shared.total > others.total


def test_slices_of_a_pass_have_a_share_of_its_activations() -> None:
    whole = edited(job(reserved=False), {"trainer.processesPerPod": 4})
    sliced = edited(whole, {"trainer.contextParallel": 4})
    before, after = (planned(spec, "7B", on("H100")).memory.gpus[0].parts for spec in (whole, sliced))
    assert after["activations"] == before["activations"] / 4
    assert all(after[name] == size for name, size in before.items() if name not in ("activations", "logits"))


@pytest.mark.parametrize(
    ("longest", "slices"),
    [
        pytest.param(65_536, "2", id="two"),
        pytest.param(131_072, "4", id="four"),
        pytest.param(1_048_576, None, id="eight, which 28 heads are not shared out among"),
    ],
)
def test_samples_too_long_for_a_gpu_are_cut_into_slices(longest: int, slices: str | None) -> None:
    spec = edited(job(reserved=False, engine={"maxContext": longest}), {"trainer.processesPerPod": 8})
    spec = edited(spec, {"recipe.activationCheckpointing": "full"})
    changes = planned(spec, "7B", on("A100-40GB")).changes
    proposed = [one for one in changes if "contextParallel" in one]
    assert proposed == ([f"learner: set trainer.contextParallel to {slices}"] if slices else [])


def test_changes_are_proposed_once_for_all_gpus_of_the_learner() -> None:
    spec = edited(job(16384), {"trainer.processesPerPod": 2})
    changes = planned(spec, "32B", on("H100")).changes
    assert len(changes) == len(set(changes))
    assert all(one.startswith("learner and reserved engine: ") for one in changes)


def test_a_longer_sample_has_a_pass_of_its_own() -> None:
    assert pass_tokens(job(1000)) == 4096
    assert pass_tokens(job(8192)) == 8192


def test_keys_of_few_heads_are_held_by_several_gpus() -> None:
    sizes = sizes_of("0.5B")  # two heads of keys
    found = [engine_memory(sizes, job(each=tp).rollout.engine, "bfloat16") for tp in (1, 2, 7)]
    assert [one.per_token for one in found] == [12288, 6144, 6144]
    # The weights of keys and values are 24 * 2 * 896 * 128 parameters, of which 7 GPUs hold a half each.
    of_keys = 24 * 2 * 896 * 128
    whole = [494_032_768, 494_032_768, 494_032_768 - of_keys + 7 * of_keys // 2]
    assert [one.weights for one in found] == [2 * one // tp for one, tp in zip(whole, (1, 2, 7), strict=True)]
    shared = job(each=4, engine={"args": ["--enable-dp-attention"], "dataParallel": 4}).rollout.engine
    assert engine_memory(sizes, shared, "bfloat16").per_token == 12288, "each GPU has sequences of its own"


@pytest.mark.parametrize(
    ("model", "edits", "field", "sentence"),
    [
        (
            "7B", {"rollout.engine.tensorParallel": 8}, "rollout.engine.tensorParallel",
            "the model's 28 attention heads and 4 heads of keys and values are not spread evenly over 8 GPUs;"
            " set one of 1, 2, 4, 28",
        ),
        (
            "7B", {"rollout.engine.tensorParallel": 14}, "rollout.engine.tensorParallel",
            "the model's 28 attention heads and 4 heads of keys and values are not spread evenly over 14 GPUs;"
            " set one of 1, 2, 4, 28",
        ),
        (
            "7B", {"trainer.processesPerPod": 8, "trainer.contextParallel": 8}, "trainer.contextParallel",
            "8 does not divide the model's 28 attention heads; set one of 1, 2, 4, 7, 14, 28",
        ),
    ],
    ids=["heads", "heads of keys", "slices"],
)  # fmt: skip
def test_what_the_models_heads_do_not_allow_is_refused(
    model: str, edits: dict[str, Any], field: str, sentence: str
) -> None:
    spec = edited(job(reserved=False), edits)
    assert plan_job(spec, sizes_of(model), on("H100")) == GpuRefusal(field, sentence)


def test_no_engine_is_proposed_that_the_models_heads_do_not_allow() -> None:
    sizes = replace(sizes_of("72B"), heads=12, key_heads=4)
    plan = plan_job(job(reserved=False), sizes, on("A100-40GB"))
    assert isinstance(plan, JobPlan)
    assert not any("tensorParallel to 8" in one for one in plan.changes)


def test_ranks_share_what_is_held_and_no_activations() -> None:
    sizes, recipe = sizes_of("7B"), job().recipe
    one, eight, more = (learner_memory(sizes, recipe, tokens=4096, ranks=ranks) for ranks in (1, 8, 128))
    assert one.held == 16 * 7_615_616_512
    assert eight.held == pytest.approx(one.held / 8, rel=1e-6)
    assert eight.activations == more.activations
    assert eight.gathered == more.gathered < one.gathered
    # torchtitan, Llama 3.1 8B, FSDP over 8 and 128 H100, one batch each: 82.4 and 67.0 GiB, compiled 77.0 and 62.0.
    llama = ModelSizes.of(known_config("meta-llama/Llama-3.1-8B"))
    assert llama is not None
    few, many = (learner_memory(llama, recipe, tokens=16384, ranks=ranks).total for ranks in (8, 128))
    assert (few - many) / GIB == pytest.approx(15.0, rel=0.1)


def test_what_the_host_holds_is_not_on_the_gpus() -> None:
    spec = edited(job(reserved=False), {"trainer.fsdp.cpuOffload": "all", "trainer.processesPerPod": 2})
    plan = planned(spec, "7B", on("H100")).memory
    assert (plan.host, plan.on_host) == (16 * 7_615_616_512, ("weights", "gradients", "optimizer"))
    learner = plan.gpus[0]
    assert not {"weights", "gradients", "optimizer"} & learner.parts.keys()
    whole = planned(edited(spec, {"trainer.fsdp.cpuOffload": "none"}), "7B", on("H100")).memory
    assert (whole.host, whole.gpus[0].total - learner.total) == (0, 8 * 7_615_616_512)


def test_moments_alone_are_the_hosts() -> None:
    spec = edited(job(reserved=False), {"trainer.processesPerPod": 2})
    there, away = (
        planned(edited(spec, {"trainer.fsdp.cpuOffload": one}), "7B", on("H100")).memory
        for one in ("none", "optimizer")
    )
    assert (away.host, away.on_host) == (8 * 7_615_616_512, ("optimizer",))
    parts = dict(there.gpus[0].parts)
    assert parts.pop("optimizer") == 4 * 7_615_616_512
    assert away.gpus[0].parts == parts


def test_copies_hold_as_much_as_one_model_over_their_part_of_the_gpus() -> None:
    spec = edited(job(reserved=False), {"trainer.processesPerPod": 8, "trainer.fsdp.dpReplicate": 2})
    four = planned(edited(job(reserved=False), {"trainer.processesPerPod": 4}), "32B", on("H100"))
    eight = planned(spec, "32B", on("H100"))
    assert eight.memory.gpus[0].parts == four.memory.gpus[0].parts
    assert eight.changes[0].startswith("learner: set trainer.fsdp.dpReplicate to 1")
    odd = edited(job(reserved=False), {"trainer.replicas": 3, "trainer.fsdp.dpReplicate": 3})
    assert not any("processesPerPod to 0" in one for one in planned(odd, "32B", on("H100")).changes)


def in_pods(gpus: int, each: int = 1, **trainer: Any) -> JobSpec:
    container = {"name": "trainer", "resources": {"limits": {"nvidia.com/gpu": gpus}}}
    spec = job(each=each, fraction=0.2)
    given = {"template": {"spec": {"containers": [container]}}, **trainer}
    return JobSpec.model_validate({**spec.model_dump(by_alias=True, mode="json"), "trainer": given})


SHARED, LEARNER, RESERVED = "learner and reserved engine", "learner", "reserved engine"


@pytest.mark.parametrize(
    ("spec", "layout"),
    [
        (in_pods(4), [(SHARED, 4), ("rollout", 2)]),
        (in_pods(4, 2), [(SHARED, 4), ("rollout", 4)]),
        (in_pods(3, 2), [(SHARED, 2), (LEARNER, 1), ("rollout", 4)]),
        (in_pods(4, processesPerPod=1), [(SHARED, 1), (RESERVED, 3), ("rollout", 2)]),
        (in_pods(4, processesPerPod=8), [(SHARED, 8), ("rollout", 2)]),
        (in_pods(4, reservedEngine=False), [(LEARNER, 4), ("rollout", 2)]),
        (
            in_pods(2, replicas=3, storage={"accessMode": "ReadWriteMany"}),
            [(SHARED, 6), ("rollout", 2)],
        ),
    ],
    ids=[
        *("an engine on each GPU", "engines over two", "a GPU that is left over", "fewer that learn"),
        *("more that learn than it asks for", "no engine", "three pods"),
    ],
)
def test_engines_of_a_trainers_pod_lie_on_all_of_its_gpus(spec: JobSpec, layout: list[tuple[str, int]]) -> None:
    plan = planned(spec, "7B", on("B200"))
    assert [(one.use, one.gpus) for one in plan.memory.gpus] == layout


def test_what_does_not_fit_beside_an_engine_over_two_gpus_of_a_pod_is_said() -> None:
    spec = edited(in_pods(4, 2), {"rollout.engine.memFraction": 0.8})
    shared, rollouts = planned(spec, "7B", on("H100")).memory.gpus
    assert (shared.fits, rollouts.fits) == (False, True)
    assert shared.parts["engine's weights"] == 7_615_616_512
    assert any("trainer.reservedMemFraction" in one for one in planned(spec, "7B", on("H100")).changes)


@pytest.mark.parametrize(
    ("count", "field"), [(3, "trainer.template"), (5, "rollout.replicas"), (6, None)], ids=["a pod", "a rollout", "all"]
)
def test_too_few_gpus_for_pods_are_refused(count: int, field: str | None) -> None:
    found = plan_job(in_pods(4), sizes_of("7B"), on("B200", count=count))
    assert (found.field if isinstance(found, GpuRefusal) else None) == field
