"""Stop strings: a response ends with the token that completes the first of them.

Engines know tokens only. They stop at a token that holds such a string by itself (`preparation.stop_token_ids`); one
that several tokens make up ends the response here, and what the engine generated after it is neither scored nor
learned.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from msgspec.structs import replace

from polyrl.sample import Finish, Response
from polyrl.wire import unpack_ids
from polyrl_trainer.data.tokenizers import Tokenizer
from polyrl_trainer.generation.from_wire import WORD


def up_to_stop(response: Response, stop: Sequence[str], tokenizer: Tokenizer) -> Response:
    """The response up to its first stop string, ended by it; the same where it holds none."""
    if not stop:
        return response
    ids = unpack_ids(response.ids).tolist()

    def holds(count: int) -> bool:
        text = tokenizer.decode(ids[:count])
        return any(one in text for one in stop)

    if not holds(len(ids)):
        return response
    end = bisect_left(range(len(ids)), True, key=holds)
    return replace(
        response,
        ids=response.ids[: WORD * end],
        logprobs=response.logprobs[: WORD * end],
        loss_mask=response.loss_mask[:end],
        spans=tuple(replace(one, end=min(one.end, end)) for one in response.spans if one.start < end),
        finish=Finish.STOP,
    )
