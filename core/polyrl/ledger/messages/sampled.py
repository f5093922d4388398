"""What an engine may say that it sampled. Engines break, and run on machines that others may have taken over: one id
that the model does not have ends a learner with an index error; a logprob that is none spoils its weights in silence.
"""

from __future__ import annotations

from math import inf
from typing import Final

import numpy as np

LOGPROB_SLACK: Final = 1e-3
"""How far above 0 a logprob may be: a softmax in bfloat16 is rounded."""


def can_be_sampled(ids: bytes, logprobs: bytes, vocabulary: int) -> bool:
    """Whether ids (uint32[n]) are below `vocabulary`, if that is not 0, and logprobs (float32[n]) are finite and at
    most 0."""
    if not ids:
        return True
    if vocabulary and int(np.frombuffer(ids, np.uint32).max()) >= vocabulary:
        return False
    values = np.frombuffer(logprobs, np.float32)
    # A NaN compares as false, whichever it is compared with.
    return bool(values.max() <= LOGPROB_SLACK and values.min() > -inf)
