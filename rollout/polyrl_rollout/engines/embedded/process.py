"""The embedded engine's process: `python -m polyrl_rollout.engines.embedded.process FD`, FD a socket to its parent.

The main thread reads the parent's messages; transformers' generation thread writes tokens. The process ends when the
socket does, and by its parent death signal.

Generates by transformers' continuous batching with our draws and our output. Its manager is given one logits processor,
`_Drawer`, that draws the tokens itself (the manager knows only one kind of sampling for all requests and reports
logprobs after truncation), and one output router that hands each forward pass's new tokens on in one call. Blocks are
not shared between requests: their keys and values would outlive a weight change.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from polyrl import interpreter

with interpreter.loading():
    import torch
    import transformers
    import xxhash
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig
    from transformers.generation.continuous_batching.cb_logits_processors import (
        ContinuousBatchingLogitsProcessor,
        ContinuousBatchingLogitsProcessorList,
    )
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager, OutputRouter
    from transformers.generation.continuous_batching.requests import (
        FutureRequestState,
        GenerationOutput,
        RequestState,
        RequestStatus,
    )
    from transformers.generation.logits_process import LogitsProcessorList
    from transformers.utils.logging import disable_progress_bar

    from polyrl.sample import Finish
    from polyrl.weights.engine_sums import EngineSum
    from polyrl.wire import EngineCapacity
    from polyrl_rollout.engines.embedded import messages
    from polyrl_rollout.engines.embedded.messages import Row, StartEngine
    from polyrl_rollout.engines.embedded.token_draw import Draw, draw_tokens
    from polyrl_rollout.engines.port import NO_VERSION, GenerateRequest, LoadSeconds

PAGE_TOKENS: Final = 32
"""Tokens per cache block: small, because tiny models have short sequences and a block belongs to one of them."""
FORWARD_SEQUENCES: Final = 32
"""Sequences per forward pass. The CPU's attention mask is dense over all of them, so its cost grows with the
square: 32 and 48 measured best, 256 at half their speed. The others wait their turn inside the manager."""
FORWARD_TOKENS: Final = 512
"""Tokens per forward pass; bounds the same square when prompts are read."""
KIND: Final = f"embedded float32, transformers {transformers.__version__}"
"""Kind of this engine's sums: names of tensors are transformers'."""
ATTENTION: Final = "sdpa"
"""Named at each load: a config may name kernels of a hub, which are code."""


@dataclass
class _Live:
    """A request whose tokens are still wanted."""

    stops: frozenset[int]
    sent: int = 0


class _Drawer(ContinuousBatchingLogitsProcessor):
    """Draws, and leaves the manager's argmax nothing but the drawn token to find."""

    supported_kwargs: dict[str, type] = {"draw": Draw}  # noqa: RUF012 - the base class declares it so
    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.logprobs: dict[str, float] = {}
        """Results of the last forward pass, by request."""
        self._states: list[RequestState] = []

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[FutureRequestState]) -> torch.Tensor:
        self._states = [request.state for request in requests_with_new_token]
        return torch.zeros(len(self._states), dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        # Requests whose prompt is only partly read have rows too, after those that draw.
        count = len(self._states)
        draws = [state.logit_processor_kwargs["draw"] for state in self._states]
        positions = [len(state.initial_tokens) + state.generated_len() for state in self._states]
        tokens, logprobs = draw_tokens(scores[:count].numpy(), draws, positions)
        self.logprobs = {state.request_id: value for state, value in zip(self._states, logprobs.tolist(), strict=True)}
        chosen = torch.full_like(scores, -torch.inf)
        chosen[torch.arange(count), torch.from_numpy(tokens)] = 0.0
        return chosen


class _Router(OutputRouter):
    """Turns the manager's cumulative outputs into rows of new tokens."""

    def __init__(self, drawer: _Drawer, live: dict[str, _Live], emit: Callable[[list[Row]], None]) -> None:
        super().__init__()
        self._drawer, self._live, self._emit = drawer, live, emit

    def deliver(self, output: GenerationOutput) -> None:
        """Only failures come one by one: the generation loop is broken, which `Batcher.alive` shows."""

    def deliver_batch(self, outputs: list[GenerationOutput]) -> None:
        rows = [row for output in outputs if (row := self._row(output)) is not None]
        if rows:
            self._emit(rows)

    def _row(self, output: GenerationOutput) -> Row | None:
        live = self._live.get(output.request_id)
        if live is None:
            return None
        ids = output.generated_tokens[live.sent :]
        live.sent += len(ids)
        finish = None
        if output.status == RequestStatus.FINISHED:
            finish = Finish.STOP if ids[-1] in live.stops else Finish.LENGTH
            self._live.pop(output.request_id, None)
        logprobs = [self._drawer.logprobs[output.request_id]]
        return Row(output.request_id, ids, logprobs=logprobs, finish=finish)


class Batcher:
    """A model and its continuous batching manager.

    `emit` is called on the generation thread with the rows of each forward pass.
    """

    def __init__(self, start: StartEngine, emit: Callable[[list[Row]], None]) -> None:
        torch.set_num_threads(start.threads)
        disable_progress_bar()  # type: ignore[no-untyped-call]
        config = AutoConfig.from_pretrained(start.folder, local_files_only=True, trust_remote_code=False)
        self._model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=torch.float32, attn_implementation=ATTENTION
        )
        self._model.requires_grad_(False).eval()
        self._eos = _eos_ids(self._model.generation_config.eos_token_id, config.get_text_config().eos_token_id)
        wanted = start.capacity
        self._blocks = max(1, wanted.kv_tokens // PAGE_TOKENS)
        self._live: dict[str, _Live] = {}
        self._manager = self._start_manager(wanted.max_running, emit)
        kv_tokens = self._blocks * PAGE_TOKENS
        context = min(wanted.max_context, config.get_text_config().max_position_embeddings, kv_tokens)
        self.capacity = EngineCapacity(wanted.max_running, kv_tokens, max_context=context)

    def _start_manager(self, max_running: int, emit: Callable[[list[Row]], None]) -> ContinuousBatchingManager:
        greedy = GenerationConfig(do_sample=False, eos_token_id=-1)  # type: ignore[no-untyped-call]
        manager: ContinuousBatchingManager = self._model.init_continuous_batching(
            generation_config=greedy,
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE_TOKENS,
                num_blocks=self._blocks,
                max_batch_tokens=FORWARD_TOKENS,
                max_requests_per_batch=min(max_running, FORWARD_SEQUENCES),
                allow_block_sharing=False,
                use_async_batching=False,
                auto_switch_to_flash=False,
            ),
        )
        drawer = _Drawer()
        manager.logit_processor = ContinuousBatchingLogitsProcessorList(LogitsProcessorList([drawer]))
        manager.logit_processor.tensors_required = 1
        manager.output_router = _Router(drawer, self._live, emit)
        manager.start()
        return manager

    @property
    def alive(self) -> bool:
        return self._manager.is_running() and self._manager.background_thread_status.fatal_error is None

    def add(self, request: GenerateRequest) -> None:
        """Queues a request; its rows go to `emit`."""
        sampling = request.sampling
        stops = self._eos | frozenset(sampling.stop_token_ids)
        self._live[request.rid] = _Live(stops)
        self._manager.add_request(
            request.input_ids,
            request_id=request.rid,
            max_new_tokens=request.max_new_tokens,
            streaming=True,
            eos_token_id=sorted(stops),
            draw=Draw(sampling.temperature, sampling.top_p, top_k=sampling.top_k, stream=request.seed),
        )

    def abort(self, rid: str) -> None:
        """Drops a request; an unknown one is fine."""
        if self._live.pop(rid, None) is not None:
            self._manager.cancel_request(rid)

    def load(self, folder: Path, switched: Callable[[], None], *, keep: bool) -> LoadSeconds:
        """Takes the weights of `folder`; calls `switched` before anything is generated by them. `keep`: requests go on
        from their keys and values, otherwise they are dropped.

        Raises OSError, ValueError or RuntimeError when they do not fit the model exactly; then no weight has changed.
        """
        begun = time.monotonic()
        fresh, report = _read_model(folder, self._model)
        read = time.monotonic()
        weights = _check_fits(fresh, report, self._model, folder)
        verified = time.monotonic()
        if not keep:
            for rid in list(self._live):
                self.abort(rid)
        with self._manager.pause():
            stands = time.monotonic()
            self._model.load_state_dict(weights, strict=True)
            taken = time.monotonic()
            held = _sum(self._model)
            switched()
            summed = time.monotonic()
        wait, checks = stands - verified + time.monotonic() - summed, verified - read + summed - taken
        return LoadSeconds(wait, load=read - begun + taken - stands, verify=checks, sum=held)


def _read_model(folder: Path, model: torch.nn.Module) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A model like `model` of `folder`'s checkpoint, and transformers' report of what did not fit."""
    fresh: torch.nn.Module
    report: dict[str, Any]
    fresh, report = type(model).from_pretrained(  # type: ignore[attr-defined]
        folder,
        dtype=torch.float32,
        attn_implementation=ATTENTION,
        local_files_only=True,
        use_safetensors=True,
        output_loading_info=True,
    )
    return fresh, report


def _check_fits(
    fresh: torch.nn.Module, report: dict[str, Any], model: torch.nn.Module, folder: Path
) -> dict[str, torch.Tensor]:
    """The state dict of `fresh`. Raises ValueError naming what is missing, surplus or misshapen."""
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report.get(kind):
            raise ValueError(f"{folder}: {kind.replace('_', ' ')} {sorted(map(str, report[kind]))[:3]}")
    weights: dict[str, torch.Tensor] = fresh.state_dict()
    for name, tensor in model.state_dict().items():
        if name not in weights or weights[name].shape != tensor.shape:
            raise ValueError(f"{folder}: tensor {name} is not of shape {tuple(tensor.shape)}")
    return weights


def _sum(model: torch.nn.Module) -> EngineSum:
    """The sum of what lies in the model itself, whatever was read."""
    found = xxhash.xxh3_128()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode())
        found.update(tensor.contiguous().numpy())
    return EngineSum(KIND, found.digest(), exact=True)


def _eos_ids(*sources: int | list[int] | None) -> frozenset[int]:
    """The union of what the generation config and the model config call end of sequence."""
    ids: set[int] = set()
    for source in sources:
        ids.update([source] if isinstance(source, int) else source or [])
    return frozenset(ids)


class _Process:
    """Serves one parent over one socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._incoming = sock.makefile("rb")
        self._send_lock = threading.Lock()
        self._version = NO_VERSION

    def run(self) -> None:
        """Serves until the parent closes its end."""
        start = self._receive()
        if not isinstance(start, messages.StartEngine):
            return
        try:
            batcher = Batcher(start, self._emit)
        except (OSError, ValueError, RuntimeError, KeyError, AttributeError) as error:
            self._send(messages.Failed(f"cannot build the model of {start.folder}: {error}"))
            return
        self._send(messages.Started(batcher.capacity))
        while (message := self._receive()) is not None:
            if not batcher.alive:
                self._send(messages.Failed("the generation loop has ended; the reason is in this engine's log"))
                return
            self._handle(message, batcher)

    def _handle(self, message: messages.ToProcess, batcher: Batcher) -> None:
        match message:
            case messages.Generate(request):
                batcher.add(request)
            case messages.Abort(rid):
                batcher.abort(rid)
            case messages.Load():
                self._send(self._load(message, batcher))
            case messages.Ping():
                self._send(messages.Pong())

    def _load(self, message: messages.Load, batcher: Batcher) -> messages.Loaded | messages.LoadFailed:
        def switched() -> None:
            self._version = message.version

        try:
            seconds = batcher.load(Path(message.folder), switched, keep=message.keep)
        # safetensors' own error class derives from Exception only; whatever fails here leaves the old weights in place.
        except Exception as error:  # noqa: BLE001
            return messages.LoadFailed(message.version, f"{type(error).__name__}: {error}")
        return messages.Loaded(message.version, seconds)

    def _emit(self, rows: list[messages.Row]) -> None:
        self._send(messages.Tokens(self._version, rows))

    def _send(self, message: messages.ToParent) -> None:
        with self._send_lock:
            self._sock.sendall(messages.frame(message))

    def _receive(self) -> messages.ToProcess | None:
        header = self._incoming.read(messages.LENGTH.size)
        if len(header) < messages.LENGTH.size:
            return None
        (length,) = messages.LENGTH.unpack(header)
        message: messages.ToProcess = messages.decode_to_process(self._incoming.read(length))
        return message


def main() -> None:
    """Runs until the parent closes the socket or is gone."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        _Process(sock).run()
    # Nothing is left to save, and joining the generation thread and unloading torch would take two seconds.
    os._exit(0)


if __name__ == "__main__":
    main()
