"""Streams what SGLang's /generate streams, with made-up tokens: an engine that costs its agent what SGLang does.

Started by the real engine adapter in the place of `python -m sglang.launch_server`, with its arguments. Of its own it
knows `--pace` (tokens per second of each stream) and `--cumulative` (each event repeats all tokens so far, SGLang's
default; the adapter asks for increments). `--stream-interval` is SGLang's: tokens per event.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any, Final

import msgspec
from aiohttp import web

KV_TOKENS: Final = 10_000_000
TOKEN: Final = 12345
"""A token of usual length in JSON."""
LOGPROB: Final = -0.6931471824645996
"""As SGLang prints them: a float32 in full."""


class Server:
    """One fake server."""

    def __init__(self, interval: int, pace: float, cumulative: bool) -> None:
        self._interval, self._pace, self._cumulative = interval, pace, cumulative
        self._version = "default"

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events until the budget is used up."""
        body = await request.json()
        budget, rid = int(body["sampling_params"]["max_new_tokens"]), body["rid"]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        began, made = time.monotonic(), 0
        while made < budget:
            start, made = made, min(made + self._interval, budget)
            await asyncio.sleep(began + made / self._pace - time.monotonic())
            await response.write(self._event(rid, start, made, budget, len(body["input_ids"])))
        await response.write(b"data: [DONE]\n\n")
        return response

    def _event(self, rid: str, start: int, end: int, budget: int, prompt: int) -> bytes:
        count = end if self._cumulative else end - start
        meta: dict[str, Any] = {
            "id": rid,
            "finish_reason": {"type": "length", "length": budget} if end == budget else None,
            "prompt_tokens": prompt,
            "weight_version": self._version,
            "total_retractions": 0,
            "output_token_logprobs": [[LOGPROB, TOKEN, None]] * count,
            "completion_tokens": end,
            "cached_tokens": 0,
        }
        return b"data: " + msgspec.json.encode({"output_ids": [TOKEN] * count, "meta_info": meta}) + b"\n\n"

    async def load(self, request: web.Request) -> web.Response:
        """Takes the version's name."""
        self._version = (await request.json())["weight_version"]
        return web.json_response({"success": True})


async def agree(request: web.Request) -> web.Response:
    """Everything is well."""
    return web.json_response({"max_total_num_tokens": KV_TOKENS})


def main() -> None:
    """Serves until it is ended."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--stream-interval", type=int, default=1)
    parser.add_argument("--pace", type=float, required=True)
    parser.add_argument("--cumulative", action="store_true")
    arguments, _ = parser.parse_known_args()
    server = Server(arguments.stream_interval, arguments.pace, arguments.cumulative)
    app = web.Application()
    app.router.add_post("/generate", server.generate)
    app.router.add_post("/update_weights_from_disk", server.load)
    app.router.add_get("/health", agree)
    app.router.add_get("/server_info", agree)
    app.router.add_post("/abort_request", agree)
    app.router.add_post("/flush_cache", agree)
    web.run_app(app, host="127.0.0.1", port=arguments.port, print=None, access_log=None, handle_signals=True)


if __name__ == "__main__":
    main()
