"""Stock SGLang over HTTP, started as a child on the loopback interface.

Traps handled here: a request id must never be reused (SGLang aborts whatever runs under the id of a finished stream two
seconds later) nor be another's prefix (aborts match by prefix); an abort that overtakes its request does nothing, so a
stream that is not wanted any more is aborted again when it shows itself; a load under requests that are aborted but not
yet forgotten leaves their keys and values in the cache, so it waits for an idle scheduler; budgets that do not fit are
truncated silently, so the context we promise is a little smaller than SGLang's; its loader fails half-way through
weights of another shape and takes the server with it, so headers are compared first, and the old weights serve on.

With `weightSwitch: keep` a load pauses the scheduler in place: requests go on with the new weights from the keys and
values that they have. Each request salts its part of the prefix cache with the version that it began with, so no later
prompt is matched with what older weights computed. While requests run SGLang stamps tokens with the version that it has
when it hands them on, so nothing may lie between drawing and handing on: no overlapped batch, no tokens gathered.

SGLang pins its own torch, so it usually lives in an environment of its own: POLYRL_SGLANG_PYTHON names that
environment's interpreter. But for ENVIRONMENT, what SGLang reads from the environment it inherits from the agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec
import structlog

from polyrl.engines.control import (
    Continue,
    ControlOrder,
    ControlRefusal,
    ControlStep,
    LoadVersion,
    Memory,
    Pause,
    PauseMode,
    Probe,
    Serve,
    ServerState,
    Sleep,
    Wake,
    decide_control,
    flushes,
)
from polyrl.manifest.rollout import EngineSpec, WeightSwitch
from polyrl.weights.engine_sums import EngineSum
from polyrl.wire import EngineCapacity
from polyrl_rollout.engines.child import ChildProcess, child_path
from polyrl_rollout.engines.port import (
    NO_VERSION,
    EngineFailed,
    EngineLost,
    GenerateRequest,
    LoadSeconds,
    ModelLimits,
    TokenChunk,
    check_request,
    read_limits,
)
from polyrl_rollout.engines.sglang.launch import (
    ENVIRONMENT,
    HEALTH_DEADLINE_S,
    HOST,
    MAX_SEED,
    SLEEP_ENVIRONMENT,
    await_ready,
    check_arguments,
    draw_key,
    free_port,
    server_command,
    sleep_arguments,
    write_config,
)
from polyrl_rollout.engines.sglang.shapes import Shapes, check_same, dtypes_of, read_shapes
from polyrl_rollout.engines.sglang.stream import Aborted, EventSplitter, StreamDecoder, error_of_status
from polyrl_rollout.engines.sglang.sums import CPUINFO, QUESTION, WHOLE, kind_of, sum_of, unrounded
from polyrl_rollout.engines.streams import SilenceDeadline

CONTEXT_SLACK: Final = 8
"""Tokens that SGLang keeps of its context and its cache for itself; measured 2, with room for a later release."""
CONTROL_DEADLINE_S: Final = 10.0
"""Aborts are answered at once; this bounds a server that hangs."""
QUIESCE_DEADLINE_S: Final = 5.0
"""An aborted request is gone after the current forward pass."""
FLUSH_AGAIN_S: Final = 0.02
"""A forward pass, in which an aborted request ends; SGLang tells nobody that it has."""
HALF_UPDATED: Final = "Weights were updated, but"
"""SGLang's answer when a load went through but its cache still holds the old weights' keys and values."""
MEMORY_DEADLINE_S: Final = 60.0
"""Unmapping and mapping the memory of a GPU takes a second or two."""
LOAD_DEADLINE_S: Final = 300.0
"""Reading a large checkpoint from local memory or disk takes up to minutes."""
LOAD_IN_PLACE_DEADLINE_S: Final = 240.0
"""A scheduler that is paused over running requests for 300 s is taken for hanging by SGLang's own watchdog."""
SUM_DEADLINE_S: Final = 50.0
"""A CPU hashes 60 GB meanwhile; with the load it stays below what SGLang's watchdog bears."""
REFUSALS: Final = (400, 404)
"""Not so, and no such call, as of another release."""

log = structlog.get_logger(__name__)


class _Refused(EngineFailed):
    """The server is well, and refused a control call."""


class ControlRefused(EngineFailed):
    """The order would have killed the server, and was not sent."""


class SGLangEngine:
    """See `polyrl_rollout.engines.port.InferenceEngine`."""

    def __init__(self, spec: EngineSpec, *, sleeps: bool = False) -> None:
        self.version = NO_VERSION
        self.keeps = spec.weight_switch is WeightSwitch.KEEP
        self.sleeps = sleeps
        self._spec = spec
        self._limits = ModelLimits(0, 0)
        self._max_context = 0
        self._child: ChildProcess | None = None
        self._session: aiohttp.ClientSession | None = None
        self._running: set[str] = set()
        self._unwanted: set[str] = set()
        self._idle = asyncio.Event()
        self._switching = asyncio.Lock()
        self._loaded: Shapes = {}
        self._kind, self._unrounded = "", frozenset[str]()
        """What its sums depend on, and dtypes of tensors that it holds as they are."""
        self._server_state = ServerState()

    @property
    def pid(self) -> int:
        """Process id of the launched server. Raises EngineFailed before `start`."""
        return self._server().pid

    async def start(self, model_folder: Path) -> EngineCapacity:
        self._limits = read_limits(model_folder)
        self._silence = SilenceDeadline(asyncio.get_running_loop().time)
        self._idle.set()
        context = min(self._spec.max_context + CONTEXT_SLACK, self._limits.max_positions)
        check_arguments(self._spec)
        port, key = free_port(), draw_key()
        config = write_config(key)
        command = server_command(self._spec, secrets.randbelow(MAX_SEED), model_folder, port, context, config)
        command += sleep_arguments(self._spec) if self.sleeps else []
        self._child = await ChildProcess.start(command, ENVIRONMENT | (SLEEP_ENVIRONMENT if self.sleeps else {}))
        # Streams end when the engine is silent, not when they are long; everything else has its own deadline.
        self._session = aiohttp.ClientSession(
            f"http://{HOST}:{port}",
            headers={"Authorization": f"Bearer {key}"},
            # A kept connection may be closed by the server just as it is used again, which looks like its death.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_read=None, sock_connect=CONTROL_DEADLINE_S),
        )
        try:
            await await_ready(self._child, self._session)
        finally:
            config.unlink(missing_ok=True)
        info = await self._control("GET", "/server_info", None, HEALTH_DEADLINE_S)
        kv_tokens = kv_tokens_of(info)
        with contextlib.suppress(_Refused):
            loads = await self._control("GET", "/v1/loads", None, HEALTH_DEADLINE_S)
            cpuinfo = CPUINFO.read_text() if CPUINFO.exists() else ""
            self._kind = kind_of(info, loads.get("accelerator"), cpuinfo)
            self._unrounded = unrounded(info, model_folder)
        self._max_context = min(context, kv_tokens) - CONTEXT_SLACK
        return EngineCapacity(self._spec.max_running, kv_tokens, max_context=self._max_context)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk]:
        self._server()
        check_request(request, self._limits.vocab_size, self._max_context)
        if self.version == NO_VERSION:
            raise EngineFailed("the engine has no weights yet")
        async with self._switching:
            self._server_state = self._decide(Serve()).after
            if not self._running:
                self._silence.reset()
            self._running.add(request.rid)
            self._idle.clear()
        finished = False
        try:
            async for chunk in self._stream(request):
                finished = chunk.finish is not None
                yield chunk
        except Aborted as aborted:
            finished = True
            if request.rid not in self._unwanted:
                raise EngineFailed(f"SGLang aborted {request.rid} without a request to") from aborted
        except (aiohttp.ClientError, ConnectionError) as error:
            raise EngineFailed(f"the connection to SGLang broke: {error!r}") from error
        finally:
            if not finished:
                # The consumer went away early, or the abort overtook the request.
                with contextlib.suppress(EngineFailed):
                    await self._post_abort({"rid": request.rid})
            self._running.discard(request.rid)
            self._unwanted.discard(request.rid)
            if not self._running:
                self._forgot_requests()
                self._idle.set()

    async def _stream(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk]:
        decoder, splitter = StreamDecoder(request), EventSplitter()
        async with self._http().post("/generate", json=request_body(request, self.version)) as response:
            if response.status != 200:
                text = (await response.text())[:500]
                raise error_of_status(response.status, text)
            while data := await self._silence.wait(response.content.readany, f"token of {request.rid}"):
                self._silence.reset()
                for payload in splitter.feed(data):
                    chunk = decoder.decode(payload)
                    if request.rid in self._unwanted:
                        return
                    yield chunk
                    if chunk.finish is not None:
                        return
        raise EngineFailed(f"SGLang ended the stream of {request.rid} without a finish")

    async def abort(self, rid: str) -> None:
        if rid in self._running:
            self._unwanted.add(rid)
            await self._post_abort({"rid": rid})

    async def load_weights(self, version: int, folder: Path) -> LoadSeconds:
        time = asyncio.get_running_loop().time
        begun = time()
        try:
            shapes = read_shapes(folder)
            check_same(shapes, self._loaded or shapes)
            verified = time()
            async with self._switching:
                taken = await (self._load_in_place if self.keeps else self._load_idle)(version, folder)
        except EngineFailed as error:
            kind = EngineLost if isinstance(error, EngineLost) else EngineFailed
            raise kind(f"cannot load version {version} from {folder}: {error}") from error
        self._loaded = shapes
        wait = time() - verified - taken.load - taken.verify
        return replace(taken, wait=wait, verify=taken.verify + verified - begun)

    async def _load_idle(self, version: int, folder: Path) -> LoadSeconds:
        await self._quiesce()
        taken = await self._update(version, folder, LOAD_DEADLINE_S)
        self.version = version
        return taken

    async def _load_in_place(self, version: int, folder: Path) -> LoadSeconds:
        await self._drive(Pause(PauseMode.IN_PLACE), CONTROL_DEADLINE_S)
        try:
            with self._silence.suspended():
                taken = await self._update(version, folder, LOAD_IN_PLACE_DEADLINE_S)
        except EngineFailed:
            with contextlib.suppress(EngineFailed):
                await self._continue()
            raise
        self.version = version
        await self._continue()
        return taken

    async def _continue(self) -> None:
        """Ends a pause, or the server: one that stays paused would keep its requests for ever."""
        try:
            await self._drive(Continue(), CONTROL_DEADLINE_S)
        except EngineFailed:
            await self._server().kill()
            raise

    async def _quiesce(self) -> None:
        """Ends all requests and waits until the scheduler has forgotten them and their keys and values."""
        self._unwanted |= self._running
        await self._post_abort({"abort_all": True})
        # A request that is still on its way would arrive behind the abort; a consumer that rests is not waited for.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(QUIESCE_DEADLINE_S):
                await self._idle.wait()
        await self._flush()
        self._forgot_requests()

    async def _flush(self) -> None:
        """Once the scheduler has forgotten all requests. It is asked again and again: asked to wait for that, it
        goes to sleep meanwhile (`--sleep-on-idle`), and notices a second later."""
        until = asyncio.get_running_loop().time() + QUIESCE_DEADLINE_S
        while True:
            try:
                await self._control("POST", "/flush_cache", None, CONTROL_DEADLINE_S)
            except _Refused:
                if asyncio.get_running_loop().time() >= until:
                    raise
                await asyncio.sleep(FLUSH_AGAIN_S)
            else:
                return

    async def sleep(self) -> None:
        async with self._switching:
            await self._quiesce()
            await self._drive_or_kill(Sleep())
            self.version = NO_VERSION

    async def wake(self, version: int, folder: Path) -> LoadSeconds:
        """In two stages: weights are loaded before keys and values take the rest of the memory."""
        time = asyncio.get_running_loop().time
        begun = time()
        async with self._switching:
            await self._drive_or_kill(Wake(frozenset({Memory.WEIGHTS})))
            taken = await self._update(version, folder, LOAD_DEADLINE_S)
            await self._drive_or_kill(Wake())
            self.version = version
        return replace(taken, wait=time() - begun - taken.load - taken.verify)

    async def _drive_or_kill(self, order: ControlOrder) -> None:
        try:
            await self._drive(order, MEMORY_DEADLINE_S)
        except ControlRefused:
            raise
        except EngineFailed:
            # Nobody knows what of its memory is there.
            await self._server().kill()
            raise

    async def _drive(self, order: ControlOrder, deadline_s: float) -> None:
        step = self._decide(order)
        if step.call is not None:
            await self._control("POST", step.call.path, step.call.body, deadline_s)
        self._server_state = step.after

    def _decide(self, order: ControlOrder) -> ControlStep:
        step = decide_control(self._server_state, order)
        if isinstance(step, ControlRefusal):
            raise ControlRefused(f"SGLang gets no order to {type(order).__name__.lower()}: {step.why}")
        return step

    def _forgot_requests(self) -> None:
        self._server_state = replace(self._server_state, requests=False)

    async def _update(self, version: int, folder: Path, deadline_s: float) -> LoadSeconds:
        """What it took by itself, and what is held then."""
        time = asyncio.get_running_loop().time
        begun = time()
        step = self._decide(LoadVersion())
        body = {
            "model_path": child_path(folder),
            "load_format": "auto",
            "weight_version": str(version),
            # A cache in use cannot be flushed, and SGLang answers the attempt as a failed load.
            "flush_cache": flushes(self._server_state),
        }
        try:
            await self._control("POST", "/update_weights_from_disk", body, deadline_s)
            loaded = time()
            held = await self._sum(folder)
        except EngineFailed as error:
            if not isinstance(error, _Refused) or HALF_UPDATED in str(error):
                # Nobody knows which weights it would serve, and under which version's name.
                await self._server().kill()
            raise
        self._server_state = step.after
        return LoadSeconds(wait=0.0, load=loaded - begun, verify=time() - loaded, sum=held)

    async def _sum(self, folder: Path) -> EngineSum | None:
        """What the server holds; None where it cannot say, and is believed."""
        if not self._kind:
            return None
        try:
            answer = await self._control("POST", "/weights_checker", QUESTION, SUM_DEADLINE_S)
        except _Refused as error:
            log.warning("this engine's weights cannot be compared with others'", error=str(error))
            return None
        found = sum_of(answer)
        exact = dtypes_of(folder) <= self._unrounded | WHOLE
        return None if found is None else EngineSum(self._kind, found, exact=exact)

    async def health(self) -> None:
        asked = decide_control(self._server_state, Probe())
        # One that is paused or asleep would be blocked by a generation, and count as unhealthy from then on.
        path = "/health" if isinstance(asked, ControlStep) else "/ping"
        await self._control("GET", path, None, HEALTH_DEADLINE_S)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
        if self._child is not None:
            # It holds nothing worth saving, and a killed launcher takes its children along in under a second.
            await self._child.kill()

    async def _post_abort(self, which: dict[str, Any]) -> None:
        await self._control("POST", "/abort_request", which, CONTROL_DEADLINE_S)

    async def _control(self, method: str, path: str, body: dict[str, Any] | None, deadline_s: float) -> dict[str, Any]:
        """One control call's JSON answer, {} for none. Raises EngineFailed, as _Refused for a reasoned 400, as
        EngineLost when the server was killed or too slow."""
        child, timeout = self._server(), aiohttp.ClientTimeout(total=deadline_s)
        try:
            async with self._http().request(method, path, json=body, timeout=timeout) as response:
                text = await response.text(errors="replace")
        except TimeoutError as error:
            raise EngineLost(f"SGLang did not answer {path} within {deadline_s:g} s") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            if await child.was_killed():
                raise EngineLost(f"SGLang did not answer {path}: it was killed") from error
            raise EngineFailed(f"SGLang did not answer {path}: {error!r}") from error
        if response.status != 200:
            kind = _Refused if response.status in REFUSALS else EngineFailed
            raise kind(f"SGLang answered {path} with {response.status}: {text[:500]}")
        try:
            answer: dict[str, Any] = msgspec.json.decode(text) if text.startswith("{") else {}
        except msgspec.DecodeError as error:
            raise EngineFailed(f"SGLang answered {path} with what is no JSON object: {text[:500]}") from error
        return answer

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            raise EngineFailed("the engine was not started, or was closed")
        return self._session

    def _server(self) -> ChildProcess:
        if self._child is None:
            raise EngineFailed("the engine was not started")
        if self._child.returncode is not None:
            kind = EngineLost if self._child.returncode < 0 else EngineFailed
            raise kind(f"SGLang has ended with status {self._child.returncode}")
        return self._child


def kv_tokens_of(info: dict[str, Any]) -> int:
    """What the server says its cache holds. Raises EngineFailed."""
    kv_tokens = info.get("max_total_num_tokens")
    if not isinstance(kv_tokens, int) or kv_tokens < 1:
        should = "it should be the number of tokens that its cache holds"
        raise EngineFailed(f"SGLang's /server_info: max_total_num_tokens is {kv_tokens!r}; {should}")
    return kv_tokens


def request_body(request: GenerateRequest, version: int) -> dict[str, Any]:
    """What /generate is sent; `version`: of the weights that the request begins with."""
    sampling = request.sampling
    params: dict[str, Any] = {
        "max_new_tokens": request.max_new_tokens,
        "temperature": sampling.temperature,
        # All that shapes a draw: what is left out a server may take from the model's own generation config, and then
        # the learner's logprobs are of another distribution.
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "stop_token_ids": list(sampling.stop_token_ids),
        # Heeded only by a server with --enable-deterministic-inference, which gives requests without one the seed 42:
        # siblings would be copies.
        "sampling_seed": request.seed,
    }
    return {
        "rid": request.rid,
        "input_ids": request.input_ids,
        "sampling_params": params,
        "return_logprob": True,
        "stream": True,
        "extra_key": str(version),
    }
