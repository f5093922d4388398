"""What a fork server is asked for, as values."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Final

import msgspec

NOT_READ_BY_IMPORTS: Final = (
    *("POLYRL_*", "PYTEST_*", "SGLANG_*", "GLOO_*", "NCCL_*", "WANDB_*", "MLFLOW_*", "*_API_KEY", "*_BASE_URL"),
    *("PATH", "*_PROXY", "*_proxy", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    # Read when something is connected to, or anew (`server`). A trainer has them of a user who has, its engines do not.
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "HF_TOKEN"),
    # Read, and set by torch itself, when something is compiled.
    "TORCHINDUCTOR_CACHE_DIR",
    # Read when a GPU is asked for; nothing is forked where there is one.
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"),
    # What was forked sets its number of threads anew; the server has the other two for all.
    *("OMP_NUM_THREADS", "PYTHONSAFEPATH", "PYTHONUNBUFFERED"),
)
"""Environment variables that may differ between a fork server and what it forks. Any other may have been read while a
library was loaded (`HF_HOME`, `TRANSFORMERS_OFFLINE`), and a fork would go by the server's value."""


class ForkRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A process to be made of the server's."""

    module: str
    """Run as by `python -m`."""
    arguments: tuple[bytes, ...]
    """These, variables and the folder as the kernel has them: not all are text."""
    environment: dict[bytes, bytes]
    folder: bytes
    """To work in."""
    parent: int
    """Process id of who asks."""
    descriptors: tuple[int, ...]
    """Under which numbers it finds the open files that are sent along; 1 and 2 among them."""
    own_session: bool
    starts_others: bool
    """Whether it gets a fork server of its own."""
    umask: int | None
    """None: the server's."""


def module_of(command: Sequence[str]) -> str | None:
    """Which module this command has this Python run; None: it does something else."""
    is_module = len(command) > 2 and command[0] == sys.executable and command[1] == "-m"
    return command[2] if is_module else None


def imports_alike(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Whether libraries that are loaded in these environments come out the same."""
    differ = {name for name, _ in one.items() ^ other.items()}
    return all(any(fnmatchcase(name, pattern) for pattern in NOT_READ_BY_IMPORTS) for name in differ)
