"""kopf's part: watches of jobs, their pods and trainers, nodes and NodeClaims, feeding the cache. Nothing else of kopf.

Only `on.event` handlers: so kopf writes nothing into anybody's object, no finalizer and no annotation, posts no events,
and keeps no lock. It lists in chunks, watches with a label selector, and begins again what breaks or falls silent.
Refuses to hold: what events mean (see `cache`), indexes (kopf's cost the square of the number of objects).
Read next: `cache`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import aiohttp
import kopf

from polyrl_operator.api.kinds import CLAIM, JOB, NODE, POD, TRAINER, ResourceKind
from polyrl_operator.informer.cache import Cache
from polyrl_operator.informer.kopf_storage import NoDiffs, NoProgress
from polyrl_operator.informer.resync import OURS

CHUNK: Final = 200
"""Objects per page of a first list: at 5,000 pods it keeps 150 MiB out of memory."""

SILENCE_S: Final = 70.0
"""A watch without events or bookmarks (one a minute) for so long is taken for dead, and begins again."""

REQUEST_S: Final = 30.0
"""Of kopf's lists."""

CONNECT_S: Final = 5.0

BACKOFFS: Final = (0.5, 1, 2, *(5,) * 60)
"""Between tries of a list or of the start of a watch: five minutes in all, then kopf gives up and the operator ends, to
be started anew."""

IDLE_S: Final = 1.0
"""How long kopf keeps a task per object after its last event."""

IDENTITY: Final = "polyrl-operator"
"""What kopf calls itself in its own log; no lock of kopf's is used."""

EXIT_S: Final = 10.0
"""For an end in order, below the pod's grace."""


class KopfWatches:
    """Made once; `run` is a task."""

    def __init__(
        self,
        cache: Cache,
        connect: Callable[[], tuple[aiohttp.ClientSession, str]],
        namespaces: Sequence[str] | None,
        kinds: Sequence[ResourceKind],
        silence_s: float = SILENCE_S,
    ) -> None:
        self._cache, self._connect, self._silence_s = cache, connect, silence_s
        self._namespaces = namespaces
        self._registry = kopf.OperatorRegistry()
        kopf.on.login(registry=self._registry)(self._login)
        for kind in kinds:
            self._register(kind)

    async def run(self) -> None:
        """Watches until cancelled, or until a signal says that it is time to end. Raises what kopf cannot mend."""
        await kopf.operator(
            registry=self._registry,
            settings=kopf_settings(self._silence_s),
            clusterwide=self._namespaces is None,
            namespaces=self._namespaces or (),
            standalone=True,
            # Else kopf asks for the user's name, and in a pod uid 10001 has none.
            identity=IDENTITY,  # type: ignore[arg-type]  # a NewType of text, which kopf does not export
        )

    async def _login(self, **_: Any) -> kopf.AiohttpSession:
        """Asynchronous, or kopf would call it in a thread, where no session can be made."""
        session, server = self._connect()
        return kopf.AiohttpSession(aiohttp_session=session, server=server)

    def _register(self, kind: ResourceKind) -> None:
        async def seen(event: kopf.RawEvent, **_: Any) -> None:
            self._cache.observe(kind, dict(event["object"]), gone=event["type"] == "DELETED")

        kopf.on.event(kind.group, kind.version, kind.plural, registry=self._registry, id=kind.plural)(seen)


def watched_kinds(*, nodes: bool, claims: bool) -> tuple[ResourceKind, ...]:
    """Kinds to watch: nodes where the operator may, NodeClaims where Karpenter is."""
    return (JOB, POD, TRAINER, *((NODE,) if nodes else ()), *((CLAIM,) if nodes and claims else ()))


def kopf_settings(silence_s: float) -> kopf.OperatorSettings:
    """kopf as a reader of streams."""
    settings = kopf.OperatorSettings()
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.persistence.diffbase_storage = NoDiffs()
    settings.persistence.progress_storage = NoProgress()
    settings.watching.chunk_size = CHUNK
    settings.watching.inactivity_timeout = silence_s
    settings.watching.connect_timeout = CONNECT_S
    settings.watching.label_selectors[POD.group, POD.version, POD.plural] = OURS
    settings.watching.label_selectors[TRAINER.group, TRAINER.version, TRAINER.plural] = OURS
    settings.networking.request_timeout = REQUEST_S
    settings.networking.connect_timeout = CONNECT_S
    settings.networking.error_backoffs = BACKOFFS
    settings.queueing.idle_timeout = IDLE_S
    settings.process.ultimate_exiting_timeout = EXIT_S
    return settings
