"""Stop strings: a turn ends with the token that completes the first of them.

Engines end there: at a token that holds such a string by itself (`preparation.stop_token_ids`), and where several
tokens make it up by the agent beside them, which reads the text (`SamplingParams.stop`). What an engine went on to
generate all the same is neither scored nor learned.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from polyrl.sample import ENVIRONMENT_VERSION, Finish, Response, SamplingParams
from polyrl.stop_strings import end_of_stop
from polyrl.wire import unpack_ids
from polyrl_trainer.data.tokenizers import Tokenizer
from polyrl_trainer.generation.from_wire import WORD
from polyrl_trainer.sample import Sample


def up_to_stop(response: Response, stop: Sequence[str], tokenizer: Tokenizer) -> Response:
    """The response up to the first stop string of its last turn, ended by it; the same where that holds none."""
    if not stop:
        return response
    start = next((span.end for span in reversed(response.spans) if span.version == ENVIRONMENT_VERSION), 0)
    length = end_of_stop(unpack_ids(response.ids).tolist()[start:], stop, tokenizer.decode)
    if length is None:
        return response
    end = start + length
    return replace(
        response,
        ids=response.ids[: WORD * end],
        logprobs=response.logprobs[: WORD * end],
        loss_mask=response.loss_mask[:end],
        spans=tuple(replace(one, end=min(one.end, end)) for one in response.spans if one.start < end),
        finish=Finish.STOP,
    )


def unexplained_stops(samples: Sequence[Sample], sampling: SamplingParams) -> float:
    """Share of samples that an engine calls ended although neither a stop token nor a stop string ends them."""
    return sum(_is_unexplained(one, sampling) for one in samples) / max(1, len(samples))


def _is_unexplained(sample: Sample, sampling: SamplingParams) -> bool:
    if sample.finish_reason != Finish.STOP or int(sample.tokens[-1]) in sampling.stop_token_ids:
        return False
    return not any(text in sample.response for text in sampling.stop)
