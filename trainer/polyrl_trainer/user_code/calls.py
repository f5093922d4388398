"""Calls user code, sync or async, so that nothing it does can hang the loop, its neighbours or the process's end.

    caller ──semaphore──> sync function:  a daemon thread of its own per call
                      └─> async function: one event loop in a daemon thread, replaced when a call blocks it

At most `max_concurrency` calls run. A call that outlives its deadline is abandoned: Python cannot end a thread, so
the thread is *lost* until its function returns. Too many lost threads fail the run, because then they starve the
learner.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
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
        self.lost_threads = 0
        """Threads that hang in user code now."""
        self._event_loop: asyncio.AbstractEventLoop | None = None

    async def call(self, function: Callable[..., Any], *arguments: Any, timeout: float) -> Any:
        """The function's result, or what it raised. The deadline runs from the call's own start, not while it queues.

        Raises CallTimedOut; RunFailed when too many earlier calls still hang.
        """
        async with self._slots:
            if self.lost_threads >= MAX_LOST_THREADS:
                raise RunFailed(f"{self.lost_threads} calls of user code hang and cannot be ended; see rewardTimedOut")
            if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
                return await self._call_async(_contained(function(*arguments)), timeout)
            return await self._call_sync(function, arguments, timeout)

    async def _call_sync(self, function: Callable[..., Any], arguments: tuple[Any, ...], timeout: float) -> Any:
        call = _start_thread(function, arguments)
        outcome = asyncio.wrap_future(call)
        try:
            return await asyncio.wait_for(outcome, timeout)
        except TimeoutError:
            if not outcome.cancelled():
                raise  # The function's own TimeoutError.
            self.lost_threads += 1
            call.add_done_callback(partial(self._thread_returned, asyncio.get_running_loop()))
            raise CallTimedOut from None

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
                self.lost_threads += 1
                self.close()

    def _thread_returned(self, loop: asyncio.AbstractEventLoop, _: Future[Any]) -> None:
        with suppress(RuntimeError):  # The trainer's loop is closed: nobody counts any more.
            loop.call_soon_threadsafe(self._found)

    def _found(self) -> None:
        self.lost_threads -= 1

    def close(self) -> None:
        """Stops the user's event loop; hanging threads are daemons and end with the process."""
        if self._event_loop is not None:
            self._event_loop.call_soon_threadsafe(self._event_loop.stop)
            self._event_loop = None


def _start_thread(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Future[Any]:
    """Calls in a daemon thread of its own: a pool's threads would hold up the end of the process."""
    call: Future[Any] = Future()
    call.set_running_or_notify_cancel()  # From here on no cancellation of a waiter reaches it.

    def run() -> None:
        try:
            result = function(*arguments)
        except BaseException as error:  # noqa: BLE001 - handed to the caller, whatever it is
            call.set_exception(_bearable(error))
        else:
            call.set_result(result)

    threading.Thread(target=run, name="user-code", daemon=True).start()
    return call


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


def _bearable(error: BaseException) -> Exception:
    """SystemExit and its like must not end the trainer, and a future cannot carry StopIteration."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration | CancelledError):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__)
