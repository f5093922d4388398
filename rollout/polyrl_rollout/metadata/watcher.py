"""Asks one cloud's metadata until it says that the machine will be taken away, and tells the agent once.

    answered        look again after the cloud's pause
    no answer       pods often cannot reach it: said once, tried again after AWAY_S; other signs of the end must do
    nonsense        the same
    advice          said once in the log

Refuses to hold: what an answer means (see `aws`, `gcp`, `azure`), what follows from a notice (see the agent).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

import aiohttp
import structlog

from polyrl.errors import ProtocolError
from polyrl_rollout.metadata.asking import Answer, Cloud, Finding, Notice, Question
from polyrl_rollout.metadata.aws import Aws
from polyrl_rollout.metadata.azure import Azure
from polyrl_rollout.metadata.gcp import Gcp

ANSWER_S: Final = 3.0
"""Metadata is on the machine itself, and answers in milliseconds."""
AWAY_S: Final = 30.0
"""Between looks while nobody answers: such a service is rarely away, and a way to it rarely comes up later."""

CLOUDS: Final[dict[str, Callable[[], Cloud]]] = {
    "Karpenter": Aws,
    "EKSManaged": Aws,
    "GKE": Gcp,
    "AKS": Azure,
}
"""By `rollout.capacity.preset`; None says nothing of a cloud."""

log = structlog.get_logger(__name__)


class MetadataWatcher:
    """`run` once; `tell` is called at most once."""

    def __init__(self, cloud: Cloud, url: str, tell: Callable[[Notice], None], away_s: float = AWAY_S) -> None:
        self._cloud, self._url, self._tell, self._away_s = cloud, url, tell, away_s
        self._said = ""

    async def run(self) -> None:
        """Until there is a notice."""
        async with aiohttp.ClientSession() as session:
            while (finding := await self._look(session)) is None or finding.notice is None:
                if finding is not None and finding.advice:
                    self._say(finding.advice)
                await asyncio.sleep(self._cloud.pause_s if finding is not None else self._away_s)
        self._tell(finding.notice)

    async def _look(self, session: aiohttp.ClientSession) -> Finding | None:
        """None when there was no answer, or one that makes no sense."""
        look = self._cloud.look(time.time())
        try:
            question = next(look)
            while True:
                question = look.send(await self._ask(session, question))
        except StopIteration as told:
            finding: Finding = told.value
            return finding
        except (aiohttp.ClientError, TimeoutError) as error:
            self._say(f"no answer: {type(error).__name__}")
        except ProtocolError as error:
            self._say(str(error))
        return None

    async def _ask(self, session: aiohttp.ClientSession, question: Question) -> Answer:
        timeout = aiohttp.ClientTimeout(total=question.wait_s + ANSWER_S)
        url = self._url + question.path
        async with session.request(question.method, url, headers=question.headers, timeout=timeout) as response:
            return Answer(response.status, await response.read(), response.headers.get("ETag", ""))

    def _say(self, sentence: str) -> None:
        """Once, until something else is to be said."""
        if sentence != self._said:
            log.info("metadata", said=sentence)
            self._said = sentence
