"""Reading SGLang's streams: however the bytes are cut, merged or accumulated, the same tokens come out once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from polyrl.sample import Finish, SamplingParams
from polyrl_rollout.engines.port import EngineFailed, GenerateRequest, RequestRejected, TokenChunk
from polyrl_rollout.engines.sglang.engine import request_body
from polyrl_rollout.engines.sglang.stream import Aborted, EventSplitter, StreamDecoder

IDS = list(range(100, 112))
REQUEST = GenerateRequest("00000001", [1, 2], max_new_tokens=len(IDS), sampling=SamplingParams(len(IDS)), seed=0)


def event(ids: list[int], total: int, reason: dict[str, Any] | None = None, version: str = "3") -> bytes:
    meta = {
        "completion_tokens": total,
        "finish_reason": reason,
        "weight_version": version,
        "output_token_logprobs": [[-float(i), i, None] for i in ids],
    }
    return b"data: " + json.dumps({"output_ids": ids, "meta_info": meta}).encode() + b"\n\n"


def stream(cuts: list[int], cumulative: bool) -> bytes:
    """IDS in events that end at `cuts`."""
    body, start = b"", 0
    for end in [*cuts, len(IDS)]:
        reason = {"type": "length", "length": len(IDS)} if end == len(IDS) else None
        body += event(IDS[0 if cumulative else start : end], end, reason)
        start = end
    return body + b"data: [DONE]\n\n"


def read(body: bytes, packet: int) -> list[TokenChunk]:
    splitter, decoder = EventSplitter(), StreamDecoder(REQUEST)
    packets = [body[i : i + packet] for i in range(0, len(body), packet)]
    return [decoder.decode(payload) for data in packets for payload in splitter.feed(data)]


@given(st.sets(st.integers(1, len(IDS) - 1)), st.booleans(), st.integers(1, 500))
def test_tokens_come_out_once_however_the_bytes_arrive(cuts: set[int], cumulative: bool, packet: int) -> None:
    chunks = read(stream(sorted(cuts), cumulative), packet)
    assert [i for chunk in chunks for i in chunk.ids] == IDS
    assert [value for chunk in chunks for value in chunk.logprobs] == [-float(i) for i in IDS]
    assert [chunk.finish for chunk in chunks] == [None] * (len(chunks) - 1) + [Finish.LENGTH]
    assert {chunk.version for chunk in chunks} == {3}


def decode(payload: bytes) -> TokenChunk:
    return StreamDecoder(REQUEST).decode(payload.removeprefix(b"data: ").strip())


def test_a_stop_token_is_a_stop() -> None:
    assert decode(event([5], 1, {"type": "stop", "matched": 5})).finish is Finish.STOP


def test_an_abort_is_neither_a_finish_nor_a_failure() -> None:
    with pytest.raises(Aborted):
        decode(event([5, 6], 2, {"type": "abort", "message": "Aborted", "status_code": None}))


ABOUT_THE_SERVER = (401, 403, 404, 422, 429)


@pytest.mark.parametrize(
    ("payload", "error"),
    [
        (b'{"error": {"message": "too long", "code": 400}}', RequestRejected),
        (b'{"error": {"message": "out of memory", "code": 500}}', EngineFailed),
        (b'{"error": {"message": "nothing known"}}', EngineFailed),
        (event([], 0, {"type": "abort", "status_code": 400, "message": "bad"}), RequestRejected),
        (event([], 0, {"type": "abort", "status_code": 503, "message": "busy"}), EngineFailed),
        *((f'{{"error": {{"message": "no", "code": {code}}}}}'.encode(), EngineFailed) for code in ABOUT_THE_SERVER),
        (b'{"error": {"message": "too large", "code": 413}}', RequestRejected),
        (event([5], 1, {"type": "length", "length": 1}), EngineFailed),
        (event([5], 3), EngineFailed),
        (event([5, 2], 2, {"type": "stop", "matched": "NaN happened"}), EngineFailed),
        (event([5], 1).replace(b"-5.0", b"null"), EngineFailed),
        (event([5], 1).replace(b"-5.0", b"NaN"), EngineFailed),
        (event([5], 1, version="default"), EngineFailed),
        (b"{}", EngineFailed),
        (b"not json", EngineFailed),
        (b"[1]", EngineFailed),
        (b'{"error": 5}', EngineFailed),
    ],
    ids=[
        "refused",
        "failed",
        "error without code",
        "aborted with 400",
        "aborted with 503",
        *(f"the server answers {code}" for code in ABOUT_THE_SERVER),
        "too large",
        "truncated budget",
        "fewer ids than tokens",
        "a token in place of one outside the vocabulary",
        "a logprob that is none",
        "a logprob that is no number",
        "no loaded version",
        "empty object",
        "no JSON",
        "a list",
        "error without fields",
    ],
)
def test_what_is_not_tokens_is_distinguished(payload: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        decode(payload)


def test_a_request_sets_all_that_shapes_a_draw_and_the_samples_own_seed() -> None:
    request = GenerateRequest("00000002", [1], max_new_tokens=4, sampling=SamplingParams(9, seed=5), seed=77)
    assert request_body(request, 3)["sampling_params"] == {
        "max_new_tokens": 4,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "stop_token_ids": [],
        "sampling_seed": 77,
    }
