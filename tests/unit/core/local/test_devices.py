"""Which GPUs a run may use: what nvidia-smi prints, and what CUDA_VISIBLE_DEVICES leaves of it."""

import pytest

from polyrl.errors import UserError
from polyrl.local.devices import MIB, hidden_all, listed_gpus, visible_gpus

LISTING = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)
  MIG 1g.5gb      Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)
  MIG 2g.10gb     Device  1: (UUID: MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-6f3a1b52-1111-2222-3333-444444444444)
GPU 2: NVIDIA A100-SXM4-40GB (UUID: GPU-6f3a1b52-5555-2222-3333-444444444444)
"""
MEMORY = """\
GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77, 40960
GPU-6f3a1b52-1111-2222-3333-444444444444, 40960
GPU-6f3a1b52-5555-2222-3333-444444444444, [N/A]
"""
FIRST, SECOND = "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f", "MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb"
MIXED = """\
GPU 0: NVIDIA GeForce RTX 3060 (UUID: GPU-00000000-0000-0000-0000-000000000000)
GPU 1: NVIDIA GeForce RTX 4090 (UUID: GPU-11111111-0000-0000-0000-000000000000)
"""


def visible(listing: str = LISTING, **environ: str) -> list[str]:
    return [gpu.name for gpu in visible_gpus(listed_gpus(listing, MEMORY), environ)]


def test_gpus_their_instances_and_their_memory_are_read() -> None:
    divided, whole, odd = listed_gpus(LISTING, MEMORY)
    assert (divided.name, divided.model, divided.memory_bytes) == ("0", "NVIDIA A100-SXM4-40GB", 40960 * MIB)
    assert [(one.name, one.model, one.memory_bytes) for one in divided.instances] == [
        (FIRST, "NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        (SECOND, "NVIDIA A100-SXM4-40GB MIG 2g.10gb", None),
    ]
    assert (whole.instances, whole.memory_bytes, odd.memory_bytes) == ((), 40960 * MIB, None)


@pytest.mark.parametrize("text", ["", "No devices were found\n", "Failed to initialize NVML: Driver/library mismatch"])
def test_other_words_list_none(text: str) -> None:
    assert listed_gpus(text, text) == []


@pytest.mark.parametrize(
    ("allowed", "names"),
    [
        ("1", ["1"]),
        (" 2, 1", ["2", "1"]),
        ("GPU-6f3a1b52-1111", ["1"]),
        ("GPU-6f3a1b52-1111-2222-3333-444444444444,2", ["1", "2"]),
        (SECOND, [SECOND]),
        ("MIG-cba6", [SECOND]),
        ("0", [FIRST]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
    ],
    ids=[
        *("a number", "two, turned round", "the beginning of a UUID", "a UUID and a number", "an instance"),
        *("the beginning of its name", "a divided one: its first", "empty", "minus one", "the word for none"),
    ],
)
def test_cuda_visible_devices_chooses_and_orders(allowed: str, names: list[str]) -> None:
    assert visible(CUDA_VISIBLE_DEVICES=allowed) == names
    assert hidden_all({"CUDA_VISIBLE_DEVICES": allowed}) is (not names)


def test_without_it_all_are_visible_a_divided_one_by_its_instances() -> None:
    assert visible() == [FIRST, SECOND, "1", "2"]
    assert not hidden_all({})


@pytest.mark.parametrize(
    ("allowed", "words"),
    [
        ("7", "CUDA_VISIBLE_DEVICES=7: 7 is no GPU of this machine, which has 0, 1, 2"),
        ("1,,2", "nothing is no GPU"),
        ("GPU-6f3a1b52", "GPU-6f3a1b52 is no GPU"),
        ("GPU-", "GPU- is no GPU"),
        ("1,GPU-6f3a1b52-1111", "names a GPU twice"),
    ],
    ids=["no such number", "an empty name", "two begin so", "all begin so", "twice"],
)
def test_a_name_that_none_has_is_refused(allowed: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        visible(CUDA_VISIBLE_DEVICES=allowed)


def test_numbers_are_refused_where_cuda_would_count_otherwise() -> None:
    with pytest.raises(UserError, match="name them by UUID"):
        visible(MIXED, CUDA_VISIBLE_DEVICES="1")
    assert visible(MIXED, CUDA_VISIBLE_DEVICES="1", CUDA_DEVICE_ORDER="PCI_BUS_ID") == ["1"]
    assert visible(MIXED, CUDA_VISIBLE_DEVICES="GPU-11111111") == ["1"]
    assert visible(MIXED) == ["0", "1"]
