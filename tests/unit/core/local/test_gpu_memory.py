"""What a GPU holds: bounds that refuse, estimates that advise."""

from dataclasses import replace
from typing import Any

import pytest

from polyrl.local.devices import Gpu
from polyrl.local.gpu_assignment import GpuAssignment
from polyrl.local.gpu_memory import estimate_line, fit, gpu_fault, gpu_notes
from polyrl.local.memory import Machine, memory_fault
from polyrl.manifest.job import JobSpec
from polyrl.manifest.parts.algorithm import AlgorithmSpec
from polyrl.manifest.parts.critic import CriticSpec, CriticTrunk
from polyrl.manifest.recipe import Mode, RecipeSpec
from polyrl.manifest.spec import TrainerSpec
from polyrl.memory.known_models import known_config
from polyrl.memory.learner import (
    activation_bytes,
    adapter_parameters,
    kept_bytes,
    learner_bytes,
    learner_memory,
    moments_at_least,
)
from polyrl.memory.sizes import GIB, ModelSizes


def known(name: str) -> ModelSizes:
    sizes = ModelSizes.of(known_config(name))
    assert sizes is not None
    return sizes


HALF, SEVEN = known("Qwen/Qwen2.5-0.5B"), known("Qwen/Qwen2.5-7B")


def spec(
    fraction: float | None = None,
    kl: float = 0.0,
    tokens: int = 4096,
    each: int = 1,
    copies: int = 1,
    lora: dict[str, int] | None = None,
    entropy: float = 0.0,
) -> JobSpec:
    algorithm = {"klCoefficient": kl, "entropyCoefficient": entropy}
    recipe = {"model": {"path": "model", "lora": lora}, "algorithm": algorithm, "maxTokensPerMicroBatch": tokens}
    engine = {"type": "sglang", "tensorParallel": each, "dataParallel": copies, "memFraction": fraction}
    return JobSpec.model_validate({"recipe": recipe, "rollout": {"engine": engine}})


def gpu(gib: float | None, name: str = "0") -> tuple[Gpu, ...]:
    memory = None if gib is None else int(gib * GIB)
    return (Gpu(name=name, model="NVIDIA L4", uuid=f"GPU-{name}", memory_bytes=memory),)


def alone(gib: float | None, rollout_gib: float | None = 80) -> GpuAssignment:
    return GpuAssignment(trainer=gpu(gib), rollouts=(gpu(rollout_gib, "1"),))


def shared(gib: float) -> GpuAssignment:
    return GpuAssignment(trainer=gpu(gib), reserved=gpu(gib))


def small_second(gib: float) -> GpuAssignment:
    return GpuAssignment(trainer=gpu(140), rollouts=(gpu(80, "1"), gpu(gib, "2")))


def own(gib: float) -> GpuAssignment:
    """The reserved engine has two GPUs of its own."""
    return GpuAssignment(trainer=gpu(140), reserved=(*gpu(gib, "1"), *gpu(gib, "2")))


ROWS = [
    (HALF, spec(), alone(8), None),
    (HALF, spec(), alone(7), "recipe.model: the learner's weights, gradients and optimizer state are 7.4 GiB"),
    (HALF, spec(kl=0.1), alone(8), "are 9.2 GiB, and it learns on one GPU; 0 has 8.0 GiB"),
    (HALF, spec(), alone(None), None),
    (SEVEN, spec(), alone(140, 10), "recipe.model: an engine's weights are 14.2 GiB, and GPU 1 has 10.0 GiB"),
    (SEVEN, spec(), small_second(10), "an engine's weights are 14.2 GiB, and GPU 2 has 10.0 GiB"),
    (SEVEN, spec(each=2), own(7), "an engine's weights are 14.2 GiB, and GPU 1,2 has 14.0 GiB"),
    (SEVEN, spec(each=2), own(8), None),
    (SEVEN, spec(copies=2), own(10), "an engine's weights are 2 times 14.2 GiB, and GPU 1,2 has 20.0 GiB"),
    (SEVEN, spec(), alone(80), "are 113.5 GiB"),
    (HALF, spec(), shared(9), None),
    (HALF, spec(), shared(8), "trainer.reservedEngine: the learner's 7.4 GiB and 0.9 GiB of the reserved engine's"),
    (HALF, spec(0.5), shared(16), None),
    (
        HALF,
        spec(0.9),
        shared(16),
        "trainer.reservedMemFraction: 0.9 of the GPU that the reserved engine",
    ),
    (HALF, spec(0.95), shared(16), "at least 0.07 holds its weights, and at most 0.61 leaves room"),
    (HALF, spec(0.01), shared(16), "at least 0.07"),
    (HALF, spec(0.9), shared(80), None),
]


NAMES = [
    *("room", "too small for the learner", "too small with a reference", "memory unknown", "too small for an engine"),
    *("too small for the second engine", "too small for the reserved one", "enough for it", "two copies"),
    *(
        "7B on 80 GiB",
        "shared",
        "too small for both",
        "a fair share",
        "too large a share",
        "the bounds",
    ),
    *("too small a share", "much is free"),
]


@pytest.mark.parametrize(("sizes", "job", "assignment", "words"), ROWS, ids=NAMES)
def test_what_surely_does_not_fit_is_refused_with_its_sizes(
    sizes: ModelSizes, job: JobSpec, assignment: GpuAssignment, words: str | None
) -> None:
    found = gpu_fault(job, sizes.parameters, assignment)
    assert (found is None) if words is None else (found is not None and words in f"{found.field}: {found.sentence}")


@pytest.mark.parametrize(
    ("job", "assignment", "words"),
    [
        (spec(), alone(80), []),
        (spec(tokens=16384), alone(24), ["passes of 16,384 tokens may not fit into GPU 0; about 9,"]),
        (spec(tokens=16384, kl=0.1), alone(24), ["passes of 16,384 tokens may not fit into GPU 0; about 7,"]),
        (spec(0.1), shared(24), []),
        (spec(), shared(24), ["without it SGLang takes most of the GPU"]),
        (spec(), alone(None), []),
    ],
    ids=["room enough", "passes too long", "with a reference", "a small share", "no share given", "memory unknown"],
)
def test_what_may_run_out_is_noted(job: JobSpec, assignment: GpuAssignment, words: list[str]) -> None:
    notes = gpu_notes(job, HALF, assignment)
    assert len(notes) == len(words)
    assert all(one in note for one, note in zip(words, notes, strict=True))
    assert gpu_notes(job, None, assignment) == []


@pytest.mark.parametrize("gib", [16, 24, 48, 80])
def test_what_is_computed_to_fit_is_refused_by_no_bound(gib: int) -> None:
    found = fit(HALF, gib * GIB, spec().recipe)
    assert found.alone > found.shared
    assert gpu_fault(spec(), HALF.parameters, alone(gib)) is None
    if found.shared:
        assert gpu_fault(spec(found.fraction), HALF.parameters, shared(gib)) is None


def test_a_model_that_does_not_fit_has_no_tokens() -> None:
    found = fit(SEVEN, 80 * GIB, spec().recipe)
    assert (found.alone, found.shared) == (0, 0)


def test_a_model_of_some_size_has_a_line() -> None:
    line = estimate_line(spec(), HALF)
    assert "about 7.4 GiB at rest" in line
    assert "0.9 GiB of weights and 12 KiB per token" in line
    tiny = replace(HALF, parameters=1_000_000)
    assert (estimate_line(spec(), tiny), estimate_line(spec(), None)) == ("", "")


def test_float32_keeps_more() -> None:
    assert kept_bytes(HALF, "float32") > 1.5 * kept_bytes(HALF, "bfloat16")
    assert learner_bytes(spec(kl=0.1).recipe) == 20


def test_a_critic_is_the_learner_once_more() -> None:
    critic = {"name": "ppo", "oldLogProbs": "recompute", "klCoefficient": 0.1}
    recipe = spec().recipe.model_copy(update={"algorithm": AlgorithmSpec.model_validate(critic)})
    assert learner_bytes(recipe) == 16 + 16 + 4
    on_one_trunk = recipe.algorithm.model_copy(update={"critic": CriticSpec(trunk=CriticTrunk.SHARED)})
    assert learner_bytes(recipe.model_copy(update={"algorithm": on_one_trunk})) == 16 + 4
    adapted = recipe.model_copy(update={"model": spec(lora={"rank": 16}).recipe.model})
    assert learner_bytes(adapted) == 4
    assert learner_memory(SEVEN, adapted, tokens=1).optimizer == 2 * 8 * 40_370_176


@pytest.mark.parametrize(
    ("mode", "kl", "reference"),
    [
        ("dpo", 0.0, 4),
        ("rl", 0.1, 4),
        ("offline-rl", 0.1, 4),
        ("rl", 0.0, 0),
        ("sft", 0.1, 0),
        ("reward-model", 0.1, 0),
    ],
    ids=["pairs", "a penalty", "a penalty on finished samples", "no penalty", "a stage without one", "rewards"],
)
def test_the_reference_is_counted_where_one_is_held(mode: str, kl: float, reference: int) -> None:
    recipe = spec(kl=kl).recipe.model_copy(update={"mode": Mode(mode)})
    assert learner_memory(HALF, recipe, tokens=1).reference == reference * HALF.parameters
    assert learner_bytes(recipe) == 16 + reference
    adapted = recipe.model_copy(update={"model": spec(lora={}).recipe.model})
    assert (learner_memory(HALF, adapted, tokens=1).reference, learner_bytes(adapted)) == (0, 2)


EIGHT = {"optimizer": {"name": "adamw_8bit"}}
CRITIC = {"name": "ppo", "oldLogProbs": "recompute"}
MOMENTS_IN_8_BITS = [
    # mode, stages, bytes of a parameter's moments at least
    pytest.param("rl", {"algorithm": EIGHT}, 2, id="the policy's"),
    pytest.param("sft", {"algorithm": EIGHT}, 8, id="of another mode"),
    pytest.param("sft", {"sft": EIGHT}, 2, id="of examples"),
    pytest.param("sft+rl", {"sft": EIGHT}, 8, id="of one of two stages"),
    pytest.param("sft+rl", {"sft": EIGHT, "algorithm": EIGHT}, 2, id="of both stages"),
    pytest.param("dpo", {"dpo": EIGHT}, 2, id="of pairs"),
    pytest.param("reward-model", {"rewardModel": EIGHT}, 2, id="of a reward model"),
    pytest.param("rl", {"algorithm": {**CRITIC, **EIGHT}}, 2 + 8, id="not the critic's"),
    pytest.param("rl", {"algorithm": {**CRITIC, **EIGHT, "critic": EIGHT}}, 2 + 2, id="the critic's too"),
]


@pytest.mark.parametrize(("mode", "stages", "least"), MOMENTS_IN_8_BITS)
def test_moments_in_8_bits_are_those_of_each_stage(mode: str, stages: dict[str, Any], least: int) -> None:
    recipe = RecipeSpec.model_validate({"model": {"path": "model"}, "mode": mode, **stages})
    models = 2 if "critic" in stages.get("algorithm", {}) or least == 10 else 1
    reference = 4 if mode == "dpo" else 0
    assert (moments_at_least(recipe), learner_bytes(recipe)) == (least, 8 * models + least + reference)
    tied = known("Qwen/Qwen2.5-3B")
    planned = learner_memory(tied, recipe, tokens=1).optimizer
    # With scales, and with biases and norms in float32.
    assert planned / tied.parameters == pytest.approx(least, rel=0.02)
    assert planned > least * tied.parameters or least == 8


@pytest.mark.parametrize(
    ("name", "own_head"), [("Qwen/Qwen2.5-7B", 152_064 * 3_584), ("Qwen/Qwen2.5-3B", 0)], ids=["own head", "tied"]
)
def test_who_gives_values_has_no_head_over_the_vocabulary(name: str, own_head: int) -> None:
    """A reward model of 7 billion parameters was planned 8 GiB too large."""
    sizes = known(name)
    rewards = RecipeSpec.model_validate({"model": {"path": "model"}, "mode": "reward-model"})
    assert learner_memory(sizes, rewards, tokens=1).held == 16 * (sizes.parameters - own_head)
    critic = RecipeSpec.model_validate({"model": {"path": "model"}, "algorithm": CRITIC})
    assert learner_memory(sizes, critic, tokens=1).held == 16 * (2 * sizes.parameters - own_head)
    assert sizes.head == own_head
    for recipe in (rewards, critic):
        bound = learner_bytes(recipe, sizes.parameters, sizes.head)
        assert bound == learner_memory(sizes, recipe, tokens=1).held


@pytest.mark.parametrize("offload", ["none", "optimizer", "all"])
def test_no_bound_refuses_a_reward_model_for_the_head_that_it_does_not_have(offload: str) -> None:
    """7B are 105 GiB without it, and 113 GiB with it."""
    rewards = {
        "recipe": {"model": {"path": "model"}, "mode": "reward-model"},
        "trainer": {"fsdp": {"cpuOffload": offload}},
    }
    job, enough = JobSpec.model_validate(rewards), {"none": 107, "optimizer": 54, "all": 1}[offload]
    assert gpu_fault(job, SEVEN.parameters, alone(enough), SEVEN.head) is None
    hosts = Machine(memory_bytes={"none": 27, "optimizer": 54, "all": 107}[offload] * GIB, has_gpu=True)
    assert memory_fault(job, SEVEN.parameters, hosts, SEVEN.head) is None
    assert (gpu_fault(job, SEVEN.parameters, alone(enough)) is None) == (offload == "all")
    assert memory_fault(job, SEVEN.parameters, hosts) is not None


@pytest.mark.parametrize(
    ("name", "least"),
    [("Qwen/Qwen2.5-0.5B", 6.74), ("Qwen/Qwen2.5-1.5B", 2.03), ("Qwen/Qwen2.5-32B", 2.03)],
    ids=["half a billion", "one and a half", "thirty-two"],
)
def test_rows_that_blocks_do_not_fill_stay_in_float32(name: str, least: float) -> None:
    """Of the smallest one, hidden 896, only the rows of the MLP's last matrix do."""
    recipe = RecipeSpec.model_validate({"model": {"path": "model"}, "algorithm": EIGHT})
    sizes = known(name)
    assert learner_memory(sizes, recipe, tokens=1).optimizer / sizes.parameters == pytest.approx(least, rel=0.01)


def test_a_reward_model_has_no_logits() -> None:
    pairs, rewards = (spec().recipe.model_copy(update={"mode": Mode(mode)}) for mode in ("dpo", "reward-model"))
    assert learner_memory(HALF, pairs, tokens=9999).logits == 4 * 256 * 2**20
    assert learner_memory(HALF, rewards, tokens=9999).logits == 0


def test_an_entropy_bonus_takes_two_more_chunks_of_logits() -> None:
    plain, bonus = spec().recipe, spec(entropy=0.01).recipe
    assert (
        learner_memory(HALF, bonus, tokens=9999).logits - learner_memory(HALF, plain, tokens=9999).logits
        == 2 * 256 * 2**20
    )


def test_adapters_learn_on_weights_as_they_are_served() -> None:
    adapted = spec(kl=0.1, lora={"rank": 16})
    assert learner_bytes(adapted.recipe) == 2, "and the reference costs nothing"
    # Qwen2.5-7B, rank 16: 40.4 million parameters of adapters, as peft counts them.
    assert adapter_parameters(SEVEN, adapted.recipe) == 40_370_176
    assert adapter_parameters(SEVEN, spec().recipe) == 0
    # Qwen3-0.6B, whose queries are twice as wide as the model, counted alike.
    assert adapter_parameters(known("Qwen/Qwen3-0.6B"), adapted.recipe) == 10_092_544
    assert gpu_fault(adapted, SEVEN.parameters, alone(24)) is None
    assert gpu_fault(adapted, SEVEN.parameters, alone(14)) is not None
    assert fit(SEVEN, 24 * GIB, adapted.recipe).alone > 800
    assert "about 15.8 GiB at rest" in estimate_line(adapted, SEVEN)


def test_several_gpus_share_what_the_learner_holds() -> None:
    two = GpuAssignment(trainer=(*gpu(60), *gpu(60, "1")), rollouts=(gpu(80, "2"),))
    assert gpu_fault(spec(), SEVEN.parameters, two) is None
    smaller = replace(two, trainer=(*gpu(60), *gpu(40, "1")))
    fault = gpu_fault(spec(), SEVEN.parameters, smaller)
    assert fault is not None
    assert "are 56.7 GiB, on each of its 2 GPUs; 0,1 has 40.0 GiB" in fault.sentence
    beside = replace(two, reserved=gpu(60))
    fault = gpu_fault(spec(), SEVEN.parameters, beside)
    assert fault is not None
    assert "the learner's 56.7 GiB and 14.2 GiB of the reserved engine's weights" in fault.sentence


def test_layers_that_are_computed_twice_keep_their_inputs_and_one_layer_whole() -> None:
    recipe = RecipeSpec.model_validate({"activationCheckpointing": "full", "model": {"dtype": "bfloat16"}})
    one_layer = kept_bytes(HALF, "bfloat16") // HALF.layers
    assert activation_bytes(HALF, recipe) == HALF.layers * 4 * HALF.hidden + one_layer
    assert activation_bytes(HALF, recipe) < kept_bytes(HALF, "bfloat16") / 4


def test_what_the_host_holds_is_asked_of_the_host() -> None:
    machine = Machine(memory_bytes=64 * GIB, has_gpu=True)
    offloaded = spec().model_copy(update={"trainer": TrainerSpec.model_validate({"fsdp": {"cpuOffload": "all"}})})
    assert memory_fault(spec(), SEVEN.parameters, machine) is None
    fault = memory_fault(offloaded, SEVEN.parameters, machine)
    assert fault is not None
    assert "learner 113.5" in fault[1]
    assert gpu_fault(spec(), SEVEN.parameters, alone(80)) is not None
    assert gpu_fault(offloaded, SEVEN.parameters, alone(80)) is None


def test_moments_of_the_host_are_asked_of_the_host_and_the_rest_of_the_gpu() -> None:
    offloaded = spec().model_copy(update={"trainer": TrainerSpec.model_validate({"fsdp": {"cpuOffload": "optimizer"}})})
    fault = memory_fault(offloaded, SEVEN.parameters, Machine(memory_bytes=48 * GIB, has_gpu=True))
    assert fault is not None
    assert "learner 56.7" in fault[1]
    assert memory_fault(offloaded, SEVEN.parameters, Machine(memory_bytes=64 * GIB, has_gpu=True)) is None
    refused = gpu_fault(offloaded, SEVEN.parameters, alone(40))
    assert refused is not None
    assert "weights and gradients are 56.7 GiB" in refused.sentence
    assert gpu_fault(offloaded, SEVEN.parameters, alone(80)) is None
