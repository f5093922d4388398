"""Executes what was decided: the one place that changes anything in a cluster.

Actions are taken in order; neighbours of one type on one kind go side by side, as a hundred new pods should. Each may
be repeated: a creation that meets its own object is done, one that meets a namesake's waits for it to go; deletions and
annotations name a uid. What the API server refuses for good (quota, Pod Security, a webhook that says no or is away, a
stranger's name) is an answer, no error, and what comes after is done; but no pod is let start while it refuses what
pods cannot do without.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import structlog

from polyrl.cluster import actions, names
from polyrl.cluster.actions import Action, Object
from polyrl.cluster.reasons import EventReason
from polyrl.cluster.resources.owner import Owner
from polyrl.errors import InvalidData
from polyrl_operator.api.client import ApiError, Client
from polyrl_operator.api.kinds import JOB, KINDS, POD, SECRET, TRAINER, ResourceKind
from polyrl_operator.informer.cache import WATCHED, Cache, JobKey
from polyrl_operator.managers.poller import ManagerPoller
from polyrl_operator.reconciler.events import Events
from polyrl_operator.secret import engine_secret, generation_of, keys_secret, renewed, role_secrets

log = structlog.get_logger(__name__)

CONCURRENCY: Final = 32
"""Requests of all jobs at a time: half the connections, so that status, Lease and events never queue behind pods."""

JOB_CONCURRENCY: Final = 16
"""Requests of one reconcile at a time: a job of hundreds of pods leaves room for others."""

REFUSED: Final = frozenset({400, 403, 404, 413, 422})
"""Statuses that mean no: quota, Pod Security, a webhook, a namespace that ends, an object that is too large."""

DENIED: Final = REFUSED - {404}
"""Statuses that mean no where something is changed; what is not there is another matter."""

CHANGES: Final = (
    actions.Annotate,
    actions.Apply,
    actions.Delete,
    actions.FindTrainer,
    actions.SuspendTrainer,
    actions.LimitRestarts,
)
"""Actions that change what is there already."""

ABOUT_NEW_PODS: Final = (EventReason.ROLLOUT_CREATED, EventReason.FALLBACK_ON_DEMAND)

ALREADY_EXISTS: Final = "AlreadyExists"
"""The reason of 409 for a name that is taken; another one is a conflict with a quota that was counted meanwhile."""

NO_ACCOUNT: Final = 'serviceaccount "default" not found'
"""In the API server's words, when a namespace has no default account."""

OTHER_GENERATION: Final = (
    "suspend the job, delete the Secrets {names}, and let it go on: their keys are not of Secret {root}, which was"
    " deleted and made anew, and all workers are to start with the new ones"
)


class NameTaken(ApiError):
    """The name belongs to an object that is not this job's: mostly a namesake's, which the garbage collector takes."""

    def __init__(self, kind: ResourceKind, name: str, stored: Object) -> None:
        metadata = stored["metadata"]
        of_namesake = metadata.get("ownerReferences") and names.LABEL_JOB in metadata.get("labels", {})
        self.kind, self.stays = kind, not (of_namesake or "deletionTimestamp" in metadata)
        advice = "; delete it, or give the job another name" if self.stays else ""
        super().__init__(409, ALREADY_EXISTS, f"{kind.name} {name} is there and is not of this PolyRLJob{advice}")


@dataclass
class ExecutionResult:
    """What came of the actions."""

    created: int = 0
    refusal: str = ""
    """The API server's message, when it refused a creation."""
    incomplete: bool = False
    """It refused something that pods cannot do without; that refusal is the one above."""
    denied: bool = False
    """It refused to let something be changed or deleted."""
    dry_run: str | None = None
    """Answer to a DryRun: its refusal, or empty."""

    def refuse(self, kind: ResourceKind, message: str) -> None:
        """Notes what the API server said."""
        if not self.incomplete:
            self.refusal, self.incomplete = message, kind is not POD


class Executor:
    """Acts for all jobs."""

    def __init__(self, client: Client, cache: Cache, events: Events, managers: ManagerPoller) -> None:
        self._client, self._cache, self._events, self._managers = client, cache, events, managers
        self._slots = asyncio.Semaphore(CONCURRENCY)

    async def execute(self, owner: Owner, decided: Iterable[Action]) -> ExecutionResult:
        """Raises ApiError or NotLeader at the first action that failed; those after it were not begun."""
        result, own_slots = ExecutionResult(), asyncio.Semaphore(JOB_CONCURRENCY)
        for _, group in groupby(decided, key=_type_and_kind):
            batch = [action for action in group if not _is_withheld(action, result)]
            for action in batch:
                log.info("action", job=f"{owner.namespace}/{owner.name}", action=str(action))
            done = await asyncio.gather(
                *(self._one(owner, action, result, own_slots) for action in batch), return_exceptions=True
            )
            for action, error in zip(batch, done, strict=True):
                if isinstance(error, NameTaken) and error.stays:
                    result.refuse(error.kind, str(error))
                elif isinstance(action, CHANGES) and isinstance(error, ApiError) and _is_refusal(error, DENIED):
                    self._denied(owner, action, error, result)
                elif isinstance(error, BaseException):
                    if isinstance(error, NameTaken):
                        # A pod on a node that does not answer may be there for long, and nothing else of this job be.
                        self._events.record(owner, actions.RecordEvent(EventReason.REFUSED, f"{error}; it is to go"))
                    raise error
        return result

    def _denied(self, owner: Owner, action: Action, error: ApiError, result: ExecutionResult) -> None:
        """What else is to be done is done: a policy that came later would hold up the release of machines."""
        result.denied = True
        self._events.record(owner, actions.RecordEvent(EventReason.REFUSED, f"{action}: {error}", type="Warning"))

    async def _one(self, owner: Owner, action: Action, result: ExecutionResult, own_slots: asyncio.Semaphore) -> None:
        match action:
            case actions.RecordEvent():
                self._events.record(owner, action)
                return
            case actions.DrainEngine():
                key = JobKey(owner.namespace, owner.name)
                self._managers.drain(key, action, self._cache.changed_at(key, action.pod))
                return
            case actions.MakeEngineKeys():
                await self._make_engine_keys(owner, action, result, own_slots)
                return
        async with own_slots, self._slots:
            match action:
                case actions.Create():
                    await self._create(owner, action.object, result)
                case actions.MakeKeys() | actions.RenewCertificate():
                    await self._keep_keys(owner, action, result)
                case actions.Apply():
                    self._cache.observe(KINDS[action.object["kind"]], await self._client.apply(action.object))
                case actions.Delete():
                    await self._delete(owner, action)
                case actions.Annotate():
                    await self._annotate(owner, action)
                case actions.SuspendTrainer() | actions.LimitRestarts() | actions.FindTrainer():
                    await self._change_trainer(owner, action)
                case actions.DryRun():
                    result.dry_run = await self._dry_run(owner, action)

    async def _keep_keys(
        self, owner: Owner, action: actions.MakeKeys | actions.RenewCertificate, result: ExecutionResult
    ) -> None:
        if isinstance(action, actions.MakeKeys):
            await self._make_keys(owner, action, result)
        else:
            await self._renew_certificate(owner, action)

    async def _make_keys(self, owner: Owner, action: actions.MakeKeys, result: ExecutionResult) -> None:
        """All keys first, then what is missing of their copies, from those that are stored: after a crash in between,
        and beside another operator, too. Nothing is copied while a copy of others is there: half of two generations
        would look like a run, and none of its workers would reach another."""
        root = await self._create(owner, keys_secret(owner, action), result)
        if root is None:
            return
        absent, others = [], []
        for copy in role_secrets(owner, root, action):
            name = copy["metadata"]["name"]
            stored = await self._client.get(SECRET, owner.namespace, name)
            if stored is None:
                absent.append(copy)
            elif generation_of(_checked(owner.uid, SECRET, name, stored)) == root["metadata"]["uid"]:
                self._cache.observe(SECRET, stored)
            else:
                others.append(name)
        if others:
            result.refuse(SECRET, OTHER_GENERATION.format(names=", ".join(others), root=action.name))
            return
        for copy in absent:
            await self._create(owner, copy, result)

    async def _renew_certificate(self, owner: Owner, action: actions.RenewCertificate) -> None:
        """A refusal ends nothing: days are left, and the next attempt comes within the hour."""
        try:
            root = await self._client.get(SECRET, owner.namespace, action.root)
            if root is None:
                raise ApiError(404, "NotFound", f"Secret {action.root} is not there")
            change = renewed(root, action)
            change["metadata"]["uid"] = action.uid
            self._cache.observe(SECRET, await self._client.patch(SECRET, owner.namespace, action.name, change))
        except (ApiError, InvalidData, KeyError, ValueError) as error:
            log.warning("certificate not renewed", job=f"{owner.namespace}/{owner.name}", error=repr(error))
            if isinstance(error, ApiError) and error.status in (404, 409):
                # Of a Secret that is gone the next reconcile makes another.
                self._cache.drop(SECRET, JobKey(owner.namespace, owner.name), action.name, action.uid)

    async def _make_engine_keys(
        self, owner: Owner, action: actions.MakeEngineKeys, result: ExecutionResult, own_slots: asyncio.Semaphore
    ) -> None:
        root = await self._client.get(SECRET, owner.namespace, action.root)
        if root is None:
            self._forget_secret(owner, action.root)
            raise ApiError(404, "NotFound", f"Secret {action.root} is not there, so no engine's keys can be made")

        async def make(pod: str, uid: str) -> None:
            async with own_slots, self._slots:
                await self._stored(owner, uid, engine_secret(owner, root, pod, uid), result)

        await asyncio.gather(*(make(pod, uid) for pod, uid in action.pods))

    def _forget_secret(self, owner: Owner, name: str) -> None:
        """It was thought to be there, and is not: the next reconcile makes another."""
        key = JobKey(owner.namespace, owner.name)
        for child in self._cache.children(key, owner.uid):
            if (child.kind, child.name) == (SECRET.name, name):
                self._cache.drop(SECRET, key, name, child.uid)

    async def _create(self, owner: Owner, item: Object, result: ExecutionResult) -> Object | None:
        """The object as stored; None: it was refused."""
        stored = await self._stored(owner, owner.uid, item, result)
        if stored is not None:
            self._cache.observe(KINDS[item["kind"]], stored)
        return stored

    async def _stored(self, owner: Owner, uid: str, item: Object, result: ExecutionResult) -> Object | None:
        """Made, or there already and owned by `uid`; None: it was refused."""
        kind, name = KINDS[item["kind"]], item["metadata"]["name"]
        try:
            stored = await self._client.create(item)
        except ApiError as error:
            if _is_refusal(error, REFUSED):
                result.refuse(kind, f"{kind.name} {name}: {error}")
                return None
            if error.reason != ALREADY_EXISTS:
                raise
            there = await self._client.get(kind, owner.namespace, name)
            if there is None:
                raise
            return _checked(uid, kind, name, there)
        result.created += 1
        return stored

    async def _delete(self, owner: Owner, action: actions.Delete) -> None:
        kind, key = KINDS[action.kind], JobKey(owner.namespace, owner.name)
        answer = await self._client.delete(kind, owner.namespace, action.name, action.uid, action.grace_s)
        if kind is JOB:
            return
        if answer is not None and answer.get("kind") == kind.name and answer["metadata"].get("deletionTimestamp"):
            self._cache.observe(kind, answer)
        if answer is None or kind.name not in WATCHED:
            self._cache.drop(kind, key, action.name, action.uid)
        else:
            self._cache.expect_deletion(action.uid)

    async def _change_trainer(
        self, owner: Owner, action: actions.SuspendTrainer | actions.LimitRestarts | actions.FindTrainer
    ) -> None:
        if isinstance(action, actions.FindTrainer):
            stored = await self._client.get(TRAINER, owner.namespace, action.name)
            if stored is None or owner.uid not in _owners(stored):
                return
            change: Object = {"metadata": {"uid": stored["metadata"]["uid"], "labels": {names.LABEL_JOB: owner.name}}}
        else:
            change = {"spec": action.spec}
        self._cache.observe(TRAINER, await self._client.patch(TRAINER, owner.namespace, action.name, change))

    async def _annotate(self, owner: Owner, action: actions.Annotate) -> None:
        change = {"metadata": {"uid": action.uid, "annotations": dict(action.annotations)}}
        try:
            self._cache.observe(POD, await self._client.patch(POD, owner.namespace, action.pod, change))
        except ApiError as error:
            if error.status not in (404, 409) or error.of_webhook:
                raise

    async def _dry_run(self, owner: Owner, action: actions.DryRun) -> str:
        for item in action.objects:
            try:
                await self._client.create(_with_default_account(owner, item), dry_run=True)
            except ApiError as error:
                if NO_ACCOUNT in str(error):
                    # A namespace that is a moment old has none yet.
                    raise
                if _is_refusal(error, REFUSED):
                    return f"{item['kind']} {item['metadata']['name']}: {error}"
                if error.status != 409:
                    raise
        return ""


def _is_refusal(error: ApiError, statuses: frozenset[int]) -> bool:
    return error.status in statuses or error.of_webhook


def _checked(uid: str, kind: ResourceKind, name: str, stored: Object) -> Object:
    """The object that has the name already, when the job, or the pod, of this uid owns it."""
    if uid not in _owners(stored):
        raise NameTaken(kind, name, stored)
    return stored


def _owners(stored: Object) -> set[str]:
    return {one["uid"] for one in stored["metadata"].get("ownerReferences") or ()}


def _with_default_account(owner: Owner, item: Object) -> Object:
    """A pod under the namespace's default account: our own does not exist before the job is accepted."""
    spec = item.get("spec") or {}
    if item["kind"] != POD.name or spec.get("serviceAccountName") != owner.name:
        return item
    return item | {"spec": {key: value for key, value in spec.items() if key != "serviceAccountName"}}


def _is_withheld(action: Action, result: ExecutionResult) -> bool:
    """Without its network rules a pod is not isolated, without claims and keys it waits and costs; and no event reports
    pods that were refused."""
    match action:
        case actions.Create():
            return result.incomplete and action.object["kind"] in WATCHED
        case actions.SuspendTrainer():
            return result.incomplete and not action.suspend
        case actions.RecordEvent():
            return bool(result.refusal) and action.reason in ABOUT_NEW_PODS
    return result.incomplete and isinstance(action, actions.MakeEngineKeys)


def _type_and_kind(action: Action) -> tuple[type[Action], str]:
    match action:
        case actions.Create() | actions.Apply():
            return type(action), action.object["kind"]
        case actions.Delete():
            return type(action), action.kind
    return type(action), ""
