"""Calls user code, sync or async, so that nothing it does can hang the loop, its neighbours or the process's end.

    caller ──semaphore──> sync function:  a daemon thread of its own per call
                      └─> async function: one event loop in a daemon thread, replaced when a call blocks it

At most `max_concurrency` calls run. A call that outlives its deadline is abandoned: Python cannot end a thread, so
the thread is *lost* until its function returns. Too many lost threads fail the run, because then they starve the
learner.

Refuses to hold: what a result means (see `rewards`, `loop_host`). Read next: `rewards`.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final

from polyrl.errors import RunFailed

MAX_LOST_THREADS: Final = 64
"""Threads hanging in user code at once; each holds a stack and may hold the interpreter lock. A gut feeling."""

WEDGED_SECONDS: Final = 1.0
"""Time in which the user's event loop must take a callback after a timeout; beyond it a call has blocked the loop."""


class CallTimedOut(Exception):
    """The call outlived its deadline and was abandoned."""


class UserCalls:
    """Runs functions of the user's with a bound on concurrency and a deadline each."""

    def __init__(self, max_concurrency: int) -> None:
        self._slots = asyncio.Semaphore(max_concurrency)
        self._lost = 0
        self._event_loop: asyncio.AbstractEventLoop | None = None

    @property
    def lost_threads(self) -> int:
        """Threads that hang in user code now."""
        return self._lost

    async def call(self, function: Callable[..., Any], *arguments: Any, timeout: float) -> Any:
        """The function's result, or what it raised. The deadline runs from the call's own start, not while it queues.

        Raises CallTimedOut; RunFailed when too many earlier calls still hang.
        """
        async with self._slots:
            if self._lost >= MAX_LOST_THREADS:
                raise RunFailed(f"{self._lost} calls of user code hang and cannot be ended; see rewardTimedOut")
            if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
                return await self._call_async(_contained(function(*arguments)), timeout)
            return await self._call_sync(function, arguments, timeout)

    async def _call_sync(self, function: Callable[..., Any], arguments: tuple[Any, ...], timeout: float) -> Any:
        outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        call = _ThreadCall(function, arguments, outcome, self._thread_returned)
        call.start()
        try:
            return await asyncio.wait_for(outcome, timeout)
        except TimeoutError:
            if outcome.cancelled():
                self._lost += call.abandon()
                raise CallTimedOut from None
            raise  # The function's own TimeoutError.

    async def _call_async(self, coroutine: Coroutine[Any, Any, Any], timeout: float) -> Any:
        event_loop = self._user_loop()
        outcome = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, event_loop))
        try:
            return await asyncio.wait_for(outcome, timeout)
        except TimeoutError:
            if outcome.cancelled():
                await self._replace_if_wedged(event_loop)
                raise CallTimedOut from None
            raise

    def _user_loop(self) -> asyncio.AbstractEventLoop:
        if self._event_loop is None:
            self._event_loop = asyncio.new_event_loop()
            threading.Thread(target=_serve, args=(self._event_loop,), name="user-code-loop", daemon=True).start()
        return self._event_loop

    async def _replace_if_wedged(self, event_loop: asyncio.AbstractEventLoop) -> None:
        alive = asyncio.Event()
        own_loop = asyncio.get_running_loop()
        event_loop.call_soon_threadsafe(lambda: own_loop.call_soon_threadsafe(alive.set))
        try:
            await asyncio.wait_for(alive.wait(), WEDGED_SECONDS)
        except TimeoutError:
            if self._event_loop is event_loop:
                self._lost += 1
                self.close()

    def _thread_returned(self) -> None:
        self._lost -= 1

    def close(self) -> None:
        """Stops the user's event loop; hanging threads are daemons and end with the process."""
        if self._event_loop is not None:
            self._event_loop.call_soon_threadsafe(self._event_loop.stop)
            self._event_loop = None


class _ThreadCall:
    """One sync call in its own daemon thread."""

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        outcome: asyncio.Future[Any],
        returned_late: Callable[[], None],
    ) -> None:
        self._function = function
        self._arguments = arguments
        self._outcome = outcome
        self._returned_late = returned_late
        self._loop = outcome.get_loop()
        self._done = False
        self._abandoned = False

    def start(self) -> None:
        threading.Thread(target=self._run, name="user-code", daemon=True).start()

    def abandon(self) -> int:
        """1 when the thread still runs, and will be reported when it returns; 0 when it has just ended."""
        self._abandoned = not self._done
        return int(self._abandoned)

    def _run(self) -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = self._function(*self._arguments)
        except BaseException as raised:  # noqa: BLE001 - handed to the caller, whatever it is
            error = raised
        try:
            self._loop.call_soon_threadsafe(self._deliver, result, error)
        except RuntimeError:
            return  # The trainer's loop is closed: nobody waits any more.

    def _deliver(self, result: Any, error: BaseException | None) -> None:
        self._done = True
        if self._abandoned:
            self._returned_late()
        elif not self._outcome.done():
            _resolve(self._outcome, result, error)


def _serve(event_loop: asyncio.AbstractEventLoop) -> None:
    """Runs until stopped, then cancels what is left."""
    event_loop.run_forever()
    event_loop.run_until_complete(_cancel_others())
    event_loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def _contained(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """A CancelledError that user code lets escape must not look like a cancellation of the trainer's own task."""
    try:
        return await coroutine
    except (asyncio.CancelledError, SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def _resolve(outcome: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if error is None:
        outcome.set_result(result)
    elif isinstance(error, Exception) and not isinstance(error, StopIteration):
        outcome.set_exception(error)
    else:  # SystemExit and its like must not end the trainer, and a future cannot carry StopIteration.
        outcome.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
