"""An image is the same memory in the process that made it and in one that maps it, and of no other machine."""

from __future__ import annotations

import gc
import os

import pytest

from polyrl_trainer.backend import BufferPlace
from polyrl_trainer.backends.fsdp.images.mapped import MAX_MAPPED, MappedImages
from polyrl_trainer.weights.images import Image

SIZE = 3 * 4096 + 5


def place_of(image: Image, path: str = "", name: str = "") -> BufferPlace:
    return BufferPlace(path or image.path, name or image.name, begin=7, end=7 + SIZE)


def test_what_is_written_by_one_map_is_read_by_the_other() -> None:
    image, mapped = Image(SIZE), MappedImages()
    found = mapped.find(place_of(image))
    found[-3:] = b"new"
    assert image.data[-3:] == b"new"
    assert mapped.find(place_of(image)) is found


@pytest.mark.parametrize("path", ["/proc/1/fd/0", "/proc/0/fd/0", "/nowhere", "/proc/self/fd/0"])
def test_a_path_of_another_machine_is_not_opened(path: str) -> None:
    image = Image(SIZE)
    for place in (place_of(image, path=path), place_of(image, name="polyrl-weights-another")):
        with pytest.raises(OSError, match=r"No such file|not the image|denied"):
            MappedImages().find(place)


def test_an_image_that_its_maker_forgot_holds_no_memory_by_another_map() -> None:
    image, mapped = Image(SIZE), MappedImages()
    mapped.find(place_of(image))
    image.data[:] = b"x" * SIZE
    descriptor = os.open(image.path, os.O_RDONLY)
    assert os.fstat(descriptor).st_blocks > 0
    del image
    gc.collect()
    assert os.fstat(descriptor).st_blocks == 0
    os.close(descriptor)


def test_maps_are_bounded() -> None:
    mapped, images = MappedImages(), [Image(SIZE) for _ in range(MAX_MAPPED + 2)]
    first = mapped.find(place_of(images[0]))
    for image in images:
        mapped.find(place_of(image))
    assert mapped.find(place_of(images[0])) is not first
