"""Stand-in for SGLang's native kernels on a CPU: the names that SGLang 0.5.23 imports with SGLANG_USE_CPU_ENGINE=1.

They serve speculative decoding and cache moves, which text generation on a CPU never calls; a call raises.
"""

from __future__ import annotations

from typing import NoReturn

__version__ = "0.0.0+cpu-stand-in"

_NAMES = (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
)


class _Missing:
    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{self.__name__} does not exist on a CPU")


globals().update({name: _Missing(name) for name in _NAMES})
