"""What SGLang's /generate streams, as the port's chunks.

The network may merge or split server-sent events anywhere, and SGLang merges the tokens of several steps into one event
when its client is slow. Token lists are incremental or cumulative depending on a server argument; the running
total beside them makes both readable alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from polyrl.sample import Finish
from polyrl_rollout.engines.port import EngineFailed, GenerateRequest, RequestRejected, TokenChunk

_EVENT_END: Final = b"\n\n"
_DATA: Final = b"data:"
_DONE: Final = b"[DONE]"
_ABOUT_THE_REQUEST: Final = (400, 413)
"""Bad request and too large. Others speak of the server, 4xx too: a wrong key (401), no such route (404), an API that
it does not know (422), an overload (429)."""


class EventSplitter:
    """Splits a byte stream into the payloads of its server-sent events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Payloads completed by `data`, in order, without the closing [DONE]."""
        *events, self._rest = (self._rest + data).split(_EVENT_END)
        for event in events:
            payload = event.strip().removeprefix(_DATA).strip()
            if payload and payload != _DONE:
                yield payload


class Aborted(Exception):
    """The server ended the request because of an abort; nobody wants its last tokens."""


class StreamDecoder:
    """Turns the events of one request into chunks."""

    def __init__(self, request: GenerateRequest) -> None:
        self._request = request
        self._sent = 0

    def decode(self, payload: bytes) -> TokenChunk:
        """One event. Raises RequestRejected, EngineFailed, or Aborted."""
        try:
            event: dict[str, Any] = msgspec.json.decode(payload)
            if "error" in event:
                raise error_of_status(int(event["error"].get("code") or 0), str(event["error"].get("message")))
            return self._chunk(event["output_ids"], event["meta_info"])
        except (msgspec.DecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise EngineFailed(f"SGLang streamed something else than tokens: {payload[:200]!r}") from error

    def _chunk(self, output_ids: list[int], meta: dict[str, Any]) -> TokenChunk:
        reason = meta.get("finish_reason") or {}
        aborted = reason.get("type") == "abort"
        if aborted and reason.get("status_code") is not None:
            raise error_of_status(int(reason["status_code"]), str(reason.get("message")))
        new = int(meta["completion_tokens"]) - self._sent
        logprobs = meta.get("output_token_logprobs") or []
        if min(len(output_ids), len(logprobs)) < new:
            raise EngineFailed(f"{new} new tokens of {self._request.rid} came with {len(output_ids)} ids")
        if aborted:
            raise Aborted
        self._sent += new
        return TokenChunk(
            ids=list(output_ids[len(output_ids) - new :]),
            logprobs=[float(entry[0]) for entry in logprobs[len(logprobs) - new :]],
            version=_version(meta),
            finish=self._finish(reason),
        )

    def _finish(self, reason: dict[str, Any]) -> Finish | None:
        if not reason:
            return None
        if reason["type"] == "stop":
            # It is asked for end tokens alone. By a text it ends what it drew outside the vocabulary, as where logits
            # are NaN: it puts an end token there.
            if isinstance(matched := reason.get("matched"), str):
                raise EngineFailed(f"SGLang ended {self._request.rid} by {matched!r:.80}: its last token was not drawn")
            return Finish.STOP
        # SGLang shortens a budget that does not fit its context or cache, and calls the result finished.
        if self._sent < self._request.max_new_tokens:
            raise EngineFailed(
                f"SGLang truncated {self._request.rid} after {self._sent} of {self._request.max_new_tokens} tokens"
            )
        return Finish.LENGTH


def _version(meta: dict[str, Any]) -> int:
    """SGLang repeats the weight_version it was given with the last load; before that it is a word."""
    try:
        return int(meta["weight_version"])
    except ValueError:
        raise EngineFailed(f"SGLang serves weights {meta['weight_version']!r}, not a loaded version") from None


def error_of_status(status: int, message: str) -> RequestRejected | EngineFailed:
    """What a status other than 200 speaks of."""
    if status in _ABOUT_THE_REQUEST:
        return RequestRejected(f"SGLang refused the request: {message}")
    return EngineFailed(f"SGLang failed: {status} {message}")
