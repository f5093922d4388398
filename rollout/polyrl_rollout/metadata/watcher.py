"""Polls one cloud's metadata until it says that the machine will be taken away, and gives the agent one notice.

answered                  polled again after the cloud's own interval
no answer, or nonsense    pods often cannot reach it: logged once, tried again after AWAY_S; other signs must do
advice                    logged once
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

import aiohttp
import structlog

from polyrl.errors import ProtocolError
from polyrl_rollout.metadata.clouds import (
    Aws,
    Azure,
    CloudMetadata,
    Gcp,
    MetadataRequest,
    MetadataResponse,
    PollResult,
    TerminationNotice,
)

ANSWER_S: Final = 3.0
"""Metadata is on the machine itself, and answers in milliseconds."""
AWAY_S: Final = 30.0
"""Between polls while nobody answers: such a service is rarely away, and a way to it rarely comes up later."""
CLOUDS: Final[dict[str, Callable[[], CloudMetadata]]] = {
    "Karpenter": Aws,
    "EKSManaged": Aws,
    "GKE": Gcp,
    "AKS": Azure,
}
"""By `rollout.capacity.preset`; None says nothing of a cloud."""

log = structlog.get_logger(__name__)


class MetadataWatcher:
    """`run` once; `on_notice` is called at most once."""

    def __init__(
        self, cloud: CloudMetadata, url: str, on_notice: Callable[[TerminationNotice], None], away_s: float = AWAY_S
    ) -> None:
        self._cloud, self._url, self._on_notice, self._away_s = cloud, url, on_notice, away_s
        self._logged = ""

    async def run(self) -> None:
        """Until there is a notice."""
        async with aiohttp.ClientSession() as session:
            while (result := await self._poll(session)) is None or result.notice is None:
                if result is not None and result.advice:
                    self._log_once(result.advice)
                await asyncio.sleep(self._cloud.poll_interval_s if result is not None else self._away_s)
        self._on_notice(result.notice)

    async def _poll(self, session: aiohttp.ClientSession) -> PollResult | None:
        """None when there was no answer, or one that makes no sense."""

        async def ask(request: MetadataRequest) -> MetadataResponse:
            timeout = aiohttp.ClientTimeout(total=request.wait_s + ANSWER_S)
            url = self._url + request.path
            async with session.request(request.method, url, headers=request.headers, timeout=timeout) as response:
                return MetadataResponse(response.status, await response.read(), response.headers.get("ETag", ""))

        try:
            return await self._cloud.poll(ask, time.time())
        except (aiohttp.ClientError, TimeoutError) as error:
            self._log_once(f"no answer: {type(error).__name__}")
        except ProtocolError as error:
            self._log_once(str(error))
        return None

    def _log_once(self, message: str) -> None:
        """Until there is something else to log."""
        if message != self._logged:
            log.info("metadata", message=message)
            self._logged = message
