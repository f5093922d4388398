"""Which variables of the user's environment reach a process of a run: few, and by name, so that what a run depends on
can be read here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Final

VISIBLE_GPUS: Final = "CUDA_VISIBLE_DEVICES"
"""Which GPUs CUDA finds, by number or name."""
GPU_ORDER: Final = "CUDA_DEVICE_ORDER"
AS_NVIDIA_SMI: Final = "PCI_BUS_ID"
"""Value of CUDA_DEVICE_ORDER with which CUDA counts as nvidia-smi does, and not the fastest first."""

LEARNER_DEVICE: Final = "POLYRL_LEARNER_DEVICE"
"""Torch device of a learner that was given a GPU; without it the learner takes one if it finds one."""

ENGINE_APART: Final = "POLYRL_ENGINE_APART"
"""Set where the reserved engine has GPUs of its own, so that neither it nor the learner needs the other's memory."""
FETCHED: Final = "POLYRL_FETCHED"
"""Folder into which model and rows were fetched before the trainer began; then nothing else is asked for them."""
MODEL_CLAIM: Final = "POLYRL_MODEL_CLAIM"
"""Where the claim of `recipe.model.path: pvc://...` is mounted."""

EVERY_WORKER: Final = (
    *("PATH", "HOME", "TMPDIR", "XDG_CACHE_HOME", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", VISIBLE_GPUS, GPU_ORDER),
    *("HF_HOME", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "POLYRL_SGLANG_PYTHON", "SGLANG_USE_CPU_ENGINE"),
)
"""What a worker inherits: where programs, libraries, caches and devices are, how people here write text, where SGLang
is, and that it finds no GPU or no network here."""

USER_CODE: Final = (
    *("HF_*", "WANDB_*", "MLFLOW_*", "*_API_KEY", "*_BASE_URL"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
)
"""What the trainer inherits besides, for the user's code that runs in it: accounts, services, proxies, certificates.
`*` stands for any text. Anything else is named in `recipe.env`."""


def inherited(environ: Mapping[str, str], patterns: Iterable[str]) -> dict[str, str]:
    """The variables whose names match one of the patterns."""
    wanted = tuple(patterns)
    return {name: text for name, text in environ.items() if any(fnmatchcase(name, pattern) for pattern in wanted)}
