"""Empty stand-in: lets SGLang import its image code without torchvision; using any of it raises."""

from __future__ import annotations

from typing import NoReturn

__version__ = "0.28.0"


class _Missing:
    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"{self._name}: torchvision is not installed")

    def __getattr__(self, attribute: str) -> _Missing:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return _Missing(f"{self._name}.{attribute}")


def __getattr__(attribute: str) -> _Missing:
    if attribute.startswith("__"):
        raise AttributeError(attribute)
    return _Missing(f"{__name__}.{attribute}")
