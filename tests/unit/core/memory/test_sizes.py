"""What a config says of a model's size: the published numbers of parameters, exactly."""

import pytest

from polyrl.errors import UserError
from polyrl.memory.gpus import gpu_bytes
from polyrl.memory.known_models import KNOWN_MODELS, known_config
from polyrl.memory.sizes import ModelSizes, parameters_of

SEVEN = known_config("Qwen/Qwen2.5-7B")

PUBLISHED = {
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
}
"""As the models' cards and safetensors files say."""


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_a_usual_model_has_its_published_parameters(name: str) -> None:
    assert parameters_of(known_config(name)) == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B"),
        ("qwen/qwen2.5-math-1.5b-instruct", "Qwen/Qwen2.5-1.5B"),
        ("Qwen/Qwen2.5-Coder-32B", "Qwen/Qwen2.5-32B"),
        ("Qwen/Qwen2.5-7", None),
        ("someone/Qwen2.5-7B", None),
    ],
    ids=["instruct", "math, in small letters", "coder", "a part of a name", "somebody else's"],
)
def test_a_variant_has_the_shape_of_its_base(name: str, base: str | None) -> None:
    assert known_config(name) == (known_config(base) if base else {})


@pytest.mark.parametrize(
    ("config", "least", "most"),
    [
        ({**SEVEN, "model_type": "other"}, 4.4e9, 7.6e9),
        ({}, 0, 0),
        ({**SEVEN, "model_type": "other", "vocab_size": None}, 4.0e9, 7.6e9),
        ({"hidden_size": "x"}, 0, 0),
    ],
    ids=["all sizes", "no size", "no vocabulary", "a size that is none"],
)
def test_parameters_of_other_models_are_a_lower_bound(config: dict, least: float, most: float) -> None:
    assert least <= parameters_of(config) <= most


def test_sizes_are_those_of_the_config() -> None:
    found = ModelSizes.of(SEVEN)
    assert found == ModelSizes(
        **{"parameters": 7_615_616_512, "layers": 28, "hidden": 3584, "inner": 18944, "heads": 28},
        **{"queries": 3584, "keys": 512, "key_heads": 4},
        **{"vocabulary": 152_064, "outside": 2 * 152_064 * 3584},
    )
    assert not found.norms_heads
    normed = ModelSizes.of(known_config("Qwen/Qwen3-0.6B"))
    assert normed is not None
    assert (normed.norms_heads, normed.queries) == (True, 2048)
    assert found.layer == (7_615_616_512 - 2 * 152_064 * 3584) // 28
    wide = ModelSizes.of({**SEVEN, "head_dim": 256}, 1)
    assert wide is not None
    assert (wide.queries, wide.keys, wide.parameters, wide.layer) == (7168, 1024, 1, 0)
    assert ModelSizes.of({**SEVEN, "hidden_size": "x"}) is None
    odd = ModelSizes.of({**SEVEN, "num_key_value_heads": [2, 4], "head_dim": "64"}, 1)
    assert odd is not None
    assert (odd.keys, odd.key_heads) == (3584, 28), "as many keys as heads, where it does not say"
    assert ModelSizes.of({}) is None


@pytest.mark.parametrize(
    ("text", "mebibytes"),
    [
        ("H100-80GB", 81_559),
        ("h100", 81_559),
        ("A100-40gb", 40_960),
        ("80Gi", 81_920),
        ("80GiB", 81_920),
        ("1024Mi", 1024),
    ],
    ids=["its name", "a part, in small letters", "the smaller of two", "Gi", "GiB", "Mi"],
)
def test_a_gpu_has_a_name_or_bytes(text: str, mebibytes: int) -> None:
    assert gpu_bytes(text) == mebibytes << 20


def test_bytes_may_be_decimal() -> None:
    found = [gpu_bytes(text) for text in ("24GB", "24G", "1.5t", "77000000000")]
    assert found == [24 * 10**9, 24 * 10**9, 1_500 * 10**9, 77 * 10**9]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A100", "is one of A100-40GB and A100-80GB; name one"),
        ("V100", "is none of L4-24GB"),
        ("H", "is none of"),
        ("", "none"),
    ],
    ids=["two of that name", "another", "a letter", "nothing"],
)
def test_another_gpu_is_refused(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        gpu_bytes(text)


def test_a_size_that_no_model_has_is_none() -> None:
    """A number of hundreds of digits, from somebody's folder, ended `polyrl plan` by a traceback."""
    assert ModelSizes.of({**SEVEN, "hidden_size": 10**400}) is None
