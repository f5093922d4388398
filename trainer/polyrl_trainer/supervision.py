"""Runs the main story beside the services it needs: when a service fails, the story ends with that failure, at once.

Refuses to hold: restarting; a service that failed had a reason that the user must see. Read next: `app`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from polyrl.errors import RunFailed

Result = TypeVar("Result")


async def run_beside(story: Coroutine[Any, Any, Result], *services: Coroutine[Any, Any, None]) -> Result:
    """The story's result. Raises the story's error, or that of the first service that ended before the story."""
    telling = asyncio.ensure_future(story)
    serving = [asyncio.ensure_future(service) for service in services]
    try:
        await asyncio.wait({telling, *serving}, return_when=asyncio.FIRST_COMPLETED)
        if not telling.done():
            _raise_end(next(service for service in serving if service.done()))
        return await telling
    finally:
        await _end([telling, *serving])


def _raise_end(service: asyncio.Future[None]) -> None:
    error = service.exception()
    if error is None:
        raise RunFailed("the manager ended its conversation with the trainer before the run was over")
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    raise error


async def _end(tasks: list[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
