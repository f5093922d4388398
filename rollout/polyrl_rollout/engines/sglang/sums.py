"""What an SGLang server adds its weights up to, and what else that depends on.

It hashes each tensor as it lies in the model, fused and cut as the model is, with another hash on a CPU than on a GPU:
nobody else can tell the sum beforehand, so engines are compared with each other (`polyrl.weights.engine_sums`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from polyrl.weights import digest

QUESTION: Final = {"action": "checksum", "selector": "target"}
"""Asks for the sum of the model itself: a draft model has no part in what is loaded."""
MAX_KIND: Final = 128
DIGEST: Final = 16
"""Hexadecimal digits that tell two kinds apart whose ends do not fit in."""
CPUINFO: Final = Path("/proc/cpuinfo")
UNROUNDED: Final = {
    "float32": frozenset({"F32", "BF16", "F16"}),
    "bfloat16": frozenset({"BF16"}),
    "float16": frozenset({"F16"}),
}
"""What an engine takes as it is, by SGLang's and safetensors' names."""
ALIASES: Final = {"half": "float16", "float": "float32"}
WHOLE: Final = {"I64", "I32", "I16", "I8", "U8", "BOOL"}
"""Numbers that no engine rounds."""
ROUNDERS: Final = ("quantization", "torchao_config")
NOT_CHOSEN: Final = (None, "", "auto")
"""Values of an option that leave it to the release, the device and the model, which are alike."""
SIZES: Final = ("tp", "dp", "pp", "ep")


def kind_of(info: dict[str, Any], accelerator: object, cpuinfo: str = "") -> str:
    """The kind of a server, by its /server_info and the name of its GPU, None on a CPU. Empty where no two are alike:
    experts that move by what is generated lie elsewhere in each. On CPUs with AMX SGLang lays weights out for that."""
    if info.get("enable_eplb"):
        return ""
    sizes = [f"{name}{info.get(f'{name}_size')}" for name in SIZES]
    chosen = {name: info.get(name) for name in (*ROUNDERS, "moe_runner_backend")}
    options = [f"{name}={value}" for name, value in chosen.items() if value not in NOT_CHOSEN]
    amx = ["amx"] if info.get("device") == "cpu" and "amx_tile" in cpuinfo.split() else []
    words = ("SGLang", info.get("version"), accelerator or info.get("device"), info.get("dtype"), *sizes)
    kind = " ".join(map(str, (*words, *options, *amx)))
    return kind if len(kind) <= MAX_KIND else kind[: MAX_KIND - DIGEST] + digest(kind.encode()).hex()[:DIGEST]


def unrounded(info: dict[str, Any], model_folder: Path) -> frozenset[str]:
    """dtypes of tensors, as safetensors names them, whose every bit the server holds. `auto` is the dtype that the
    config of `model_folder` names, and another one where that is float32."""
    if any(info.get(name) for name in ROUNDERS):
        return frozenset()
    dtype = info.get("dtype")
    if dtype == "auto":
        dtype = _config_dtype(model_folder)
        dtype = None if dtype in ("float32", "float") else dtype
    return UNROUNDED.get(ALIASES.get(str(dtype), str(dtype)), frozenset())


def _config_dtype(model_folder: Path) -> object:
    try:
        config = json.loads((model_folder / "config.json").read_text())
        text = config.get("text_config", config)
        return text.get("dtype") or text.get("torch_dtype")
    except (OSError, ValueError, AttributeError):
        return None


def sum_of(answer: dict[str, Any]) -> bytes | None:
    """The sums of all ranks as one, in whatever order they answered; None where a release answers otherwise."""
    try:
        ranks = sorted(str(rank["per_gpu_checksum"]) for rank in answer["ranks"])
    except (KeyError, TypeError):
        return None
    return digest(" ".join(ranks).encode()) if ranks else None
