"""What an engine may say that it sampled. Engines break, and run on machines that others may have taken over: one id
that the model does not have ends a learner with an index error; a logprob that is none spoils its weights in silence.
"""

from __future__ import annotations

from math import inf
from typing import Final

import numpy as np

LOGPROB_SLACK: Final = 1e-3
"""How far above 0 a logprob may be: a softmax in bfloat16 is rounded."""

_ID: Final = np.dtype("<u4")
_LOGPROB: Final = np.dtype("<f4")
_MINUS_INF: Final = np.array(-inf, _LOGPROB).tobytes()
_largest: Final = np.maximum.reduce
_smallest: Final = np.minimum.reduce


def can_be_sampled(ids: bytes, logprobs: bytes, vocabulary: int) -> bool:
    """Whether ids (uint32[n]) are below `vocabulary`, if that is not 0, and logprobs (float32[n]) are finite and at
    most 0."""
    if not ids:
        return True
    if vocabulary and int(_largest(np.frombuffer(ids, _ID))) >= vocabulary:
        return False
    values = np.frombuffer(logprobs, _LOGPROB)
    # A NaN is the largest of all, and compares as false. Bytes are searched faster than numbers are compared.
    return bool(_largest(values) <= LOGPROB_SLACK) and (_MINUS_INF not in logprobs or bool(_smallest(values) > -inf))
