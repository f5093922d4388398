"""One job reconciled against a small API server: what is asked for before what, and how often a status is written."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec
import pytest
from prometheus_client import generate_latest

import polyrl_operator.api.client as client_module
from polyrl.cluster.actions import RecordEvent
from polyrl.cluster.reasons import EventReason
from polyrl.cluster.resources.owner import Settings
from polyrl_operator.api.client import ApiError, Client
from polyrl_operator.api.kinds import JOB, KINDS, POD
from polyrl_operator.informer.cache import Cache, JobKey
from polyrl_operator.metrics import Metrics, RequestCounter
from polyrl_operator.reconciler import work_queue
from polyrl_operator.reconciler.executor import JOB_CONCURRENCY, Executor
from polyrl_operator.reconciler.reconciler import Reconciler
from polyrl_operator.reconciler.work_queue import WorkQueue

KEY = JobKey("ns", "j")
REFUSED_S = 2.0
MOST_ASKED = 4
"""Reconciles in that time, at pauses of one second, two, and half a one where there is news."""


class Answer:
    """One HTTP answer."""

    def __init__(self, status: int, body: Any) -> None:
        self.status, self.headers, self._body = status, dict[str, str](), body

    async def read(self) -> bytes:
        return msgspec.json.encode(self._body)


class Server:
    """Plays `ApiClient` and an API server that stores what is posted; `asked` tells in order what it was asked for."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.configuration = type("C", (), {"host": "http://api"})()
        self.rest_client = self
        self.job = job
        self.asked: list[str] = []
        self.dry_runs = Answer(201, {})
        self.broken: set[str] = set()
        """Kinds that cannot be stored, and `status`."""
        self.pods: dict[str, dict[str, Any]] = {}
        """As they were made, by name."""
        self.watch: Callable[[dict[str, Any]], object] = lambda pod: None
        """Gets the pod that the trainer's Job makes."""
        self.hangs = False
        """Nothing is answered any more."""
        self.ends_late_s = 0.0
        """A request that is given up takes so long to end."""
        self.forbidden: set[str] = set()
        self.at_once = self.most_at_once = 0
        self._version = 1

    async def update_params_for_auth(self, *_: object) -> None:
        return None

    async def request(self, method: str, url: str, body: Any = None, **_: object) -> Answer:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(3600 if self.hangs else 0)
        finally:
            await asyncio.sleep(self.ends_late_s)
        self.at_once -= 1
        return self._answer(method, url, body)

    def _answer(self, method: str, url: str, body: Any) -> Answer:
        if method == "PATCH" and url.partition("?")[0].endswith("/status"):
            self.asked.append("status")
            if "status" in self.broken:
                return Answer(500, {"message": "etcd"})
            status = merged(self.job.get("status", {}), body["status"])
            self.job |= {"status": status, "metadata": self._stamped(self.job)}
            return Answer(200, self.job)
        if method == "GET":
            return Answer(404, {"message": "no copy of a key is there yet"})
        if method in ("PATCH", "DELETE"):
            return self._change(method, url.partition("?")[0].rpartition("/")[2], body)
        assert method == "POST"
        if "dryRun" in parse_qs(urlsplit(url).query):
            self.asked.append("dry run")
            return self.dry_runs
        self.asked.append(body["kind"])
        if body["kind"] in self.broken:
            return Answer(500, {"message": "etcd"})
        if body["kind"] in self.forbidden:
            return Answer(403, {"message": "the namespace is being terminated"})
        stored = body | {"metadata": self._stamped(body)}
        if body["kind"] == "Pod":
            self.pods[body["metadata"]["name"]] = stored
        if body["kind"] == "Job":
            self.watch(self._trainer_pod(stored))
        return Answer(201, stored)

    def _trainer_pod(self, job: dict[str, Any]) -> dict[str, Any]:
        """As the Job controller makes it."""
        template, of_job = job["spec"]["template"], job["metadata"]
        metadata = template["metadata"] | {"name": f"{of_job['name']}-0-abcde", "namespace": of_job["namespace"]}
        metadata |= {"ownerReferences": [{"uid": of_job["uid"], "controller": True}]}
        return {"metadata": self._stamped({"metadata": metadata}), "spec": template["spec"]}

    def _change(self, method: str, pod: str, body: Any) -> Answer:
        self.asked.append(f"{method} {pod}")
        if method in self.broken:
            return Answer(500, {"message": "it was done, and the answer is lost"})
        changed = self.running(pod) if method == "DELETE" else merged(self.running(pod), body)
        self.pods[pod] = changed
        return Answer(200, changed)

    def running(self, pod: str) -> dict[str, Any]:
        """The pod once it has a node."""
        made = self.pods[pod]
        spec = made["spec"] | {"nodeName": "node"}
        return made | {"spec": spec, "status": {"phase": "Running"}, "metadata": self._stamped(made)}

    def replace_status(self, **status: Any) -> dict[str, Any]:
        """Another replica has led, and wrote this."""
        self.job |= {"status": status, "metadata": self._stamped(self.job)}
        return self.job

    def _stamped(self, item: dict[str, Any]) -> dict[str, Any]:
        self._version += 1
        metadata: dict[str, Any] = item["metadata"]
        return {"uid": f"uid-{metadata['name']}"} | metadata | {"resourceVersion": str(self._version)}


def merged(old: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """RFC 7386."""
    new = {key: merged(old.get(key) or {}, value) if isinstance(value, dict) else value for key, value in patch.items()}
    return {key: value for key, value in (old | new).items() if value is not None}


class Mute:
    """Plays events, and the poller of a manager that is not there."""

    def __init__(self) -> None:
        self.recorded: list[RecordEvent] = []

    def record(self, _: object, event: RecordEvent) -> None:
        self.recorded.append(event)

    def follow(self, *_: object, **__: object) -> None:
        return None

    def facts(self, _: JobKey) -> None:
        return None


def manifest(replicas: int) -> dict[str, Any]:
    recipe = {
        "mode": "rl",
        "model": {"path": "/model"},
        "data": {"rl": [{"path": "rl.jsonl"}]},
        "reward": {"function": "reward:score"},
        "algorithm": {"steps": 10},
    }
    metadata = {"name": "j", "namespace": "ns", "uid": "job-uid", "generation": 1, "resourceVersion": "1"}
    fleet = {"minReplicas": 0, "maxReplicas": replicas, "replicas": replicas}
    spec = {"recipe": recipe, "rollout": fleet}
    return {"apiVersion": JOB.api_version, "kind": JOB.name, "metadata": metadata, "spec": spec}


def operator(replicas: int = 3) -> tuple[Reconciler, Server, Cache]:
    server, mute, queue = Server(manifest(replicas)), Mute(), WorkQueue()
    api, cache = Client(server), Cache(queue.add)  # type: ignore[arg-type]
    cache.observe(JOB, server.job)
    server.watch = partial(cache.observe, POD)
    actor = Executor(api, cache, mute, mute)  # type: ignore[arg-type]
    settings, metrics = Settings("m", "t", rollout_image="r"), Metrics(RequestCounter())
    reconciler = Reconciler(cache, api, actor, mute, queue, metrics, settings, sees_nodes=False)  # type: ignore[arg-type]
    return reconciler, server, cache


async def begin(reconciler: Reconciler) -> None:
    """A job's first two reconciles: rollouts wait until the trainer's pod is there."""
    for _ in range(2):
        await reconciler.reconcile(KEY)


def accepted(server: Server) -> tuple[str, str]:
    found = next(one for one in server.job["status"]["conditions"] if one["type"] == "Accepted")
    return found["status"], found["reason"]


async def test_a_new_job_is_dry_run_then_made_then_reported_once() -> None:
    reconciler, server, _ = operator()
    await reconciler.reconcile(KEY)
    made = [what for what in server.asked if what in KINDS]
    assert Counter(made)["Pod"] == 1, "the manager"
    last_dry_run = len(server.asked) - 1 - server.asked[::-1].index("dry run")
    assert last_dry_run < server.asked.index(made[0]), "asked for an opinion before anything is made"
    assert server.asked.count("status") == 1
    assert server.asked[-1] == "status"
    assert accepted(server) == ("True", "Valid")
    assert server.job["status"]["rollout"]["desiredReplicas"] == 3
    await reconciler.reconcile(KEY)
    assert Counter(server.asked)["Pod"] == 4, "rollouts wait until the trainer has its pod"


async def test_a_job_that_is_not_understood_is_an_event_as_well() -> None:
    reconciler, server, cache = operator()
    server.job["spec"]["recipe"]["mode"] = "nonsense"
    cache.observe(JOB, server.job | {"metadata": server.job["metadata"] | {"resourceVersion": "2"}})
    for _ in range(2):
        await reconciler.reconcile(KEY)
    assert accepted(server) == ("False", "Invalid")
    [event] = reconciler._executor._events.recorded  # type: ignore[attr-defined]
    assert (event.reason, event.type) == (EventReason.REFUSED, "Warning")
    assert "spec.recipe.mode" in event.message


async def test_a_job_whose_pods_are_refused_gets_one_event_and_nothing_is_made() -> None:
    reconciler, server, _ = operator()
    server.dry_runs = Answer(403, {"message": "violates PodSecurity"})
    await reconciler.reconcile(KEY)
    assert [what for what in server.asked if what in KINDS] == []
    assert server.asked.count("status") == 1
    assert accepted(server) == ("False", "InvalidPodTemplate")


async def test_what_failed_after_the_answer_is_done_later_without_asking_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "RETRY_S", 0.0)
    reconciler, server, cache = operator()
    server.broken = {"Pod"}
    with pytest.raises(ApiError):
        await reconciler.reconcile(KEY)
    assert cache.pods(KEY, "job-uid") == []
    asked = server.asked.count("dry run")
    server.broken = set()
    await begin(reconciler)
    assert server.asked.count("dry run") == asked
    assert accepted(server) == ("True", "Valid")
    assert len(cache.pods(KEY, "job-uid")) == 5


@pytest.mark.slow
async def test_what_is_refused_is_asked_for_after_longer_and_longer_pauses() -> None:
    reconciler, server, _ = operator(replicas=0)
    server.forbidden = {"Pod"}
    try:
        async with asyncio.timeout(REFUSED_S), asyncio.TaskGroup() as workers:
            workers.create_task(reconciler.work(lambda: asyncio.sleep(0)))
    except TimeoutError:
        pass
    assert Counter(server.asked)["Service"] >= 1, "it is at work"
    assert Counter(server.asked)["Pod"] <= MOST_ASKED


async def test_a_large_job_leaves_room_for_others() -> None:
    reconciler, server, cache = operator(replicas=40)
    await begin(reconciler)
    assert len(cache.pods(KEY, "job-uid")) == 42
    assert server.most_at_once == JOB_CONCURRENCY


async def test_nothing_is_kept_of_jobs_that_were_made_and_deleted() -> None:
    reconciler, server, cache = operator(replicas=1)
    cache.observe(JOB, server.job | {"metadata": server.job["metadata"] | {"resourceVersion": "9"}}, deleted=True)
    for number in range(20):
        key, job = JobKey("ns", f"j-{number}"), manifest(1)
        job["metadata"] |= {"name": key.name, "uid": f"uid-{number}"}
        server.job = job
        cache.observe(JOB, job)
        await reconciler.reconcile(key)
        cache.observe(
            JOB, server.job | {"metadata": server.job["metadata"] | {"resourceVersion": "9999"}}, deleted=True
        )
        for place, held in list(cache._objects.items()):
            metadata = {"name": place.name, "namespace": place.namespace, "uid": held.uid, "resourceVersion": "9999"}
            cache.observe(KINDS[place.kind], {"metadata": metadata, "spec": {}}, deleted=True)
        await reconciler.reconcile(key)
    parts = (cache, reconciler, reconciler._metrics)
    kept = {
        name: len(value) for part in parts for name, value in vars(part).items() if isinstance(value, dict | set | list)
    }
    assert not any(kept.values()), kept
    assert b"j-19" not in generate_latest(reconciler._metrics.registry)


async def test_what_another_replica_released_is_no_loss_when_this_one_leads_again() -> None:
    reconciler, server, cache = operator()
    await begin(reconciler)
    for pod in list(server.pods):
        cache.observe(POD, server.running(pod))
    await reconciler.reconcile(KEY)
    reconciler.stand_by()
    assert b'job="j"' not in generate_latest(reconciler._metrics.registry), "another replica shows it now"
    cache.observe(POD, server.running("j-r-3"), deleted=True)
    reconciler.take_over()
    await reconciler.reconcile(KEY)
    assert server.job["status"]["rollout"].get("preemptions", 0) == 0
    assert server.job["status"]["rollout"]["desiredReplicas"] == 3


async def test_what_was_released_is_no_loss_though_its_answer_never_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a replica that lost the lead amid it, and leads again before anybody else did."""
    monkeypatch.setattr(client_module, "RETRY_S", 0.0)
    reconciler, server, cache = operator()
    server.job["spec"]["scaling"] = {"mode": "Manual"}
    server.job["metadata"]["resourceVersion"] = "2"
    cache.observe(JOB, server.job)
    await begin(reconciler)
    for pod in list(server.pods):
        cache.observe(POD, server.running(pod))
    await reconciler.reconcile(KEY)
    server.job["spec"]["rollout"]["replicas"] = 2
    server.job["metadata"] |= {"generation": 2, "resourceVersion": "1000"}
    cache.observe(JOB, server.job)
    server.broken = {"DELETE"}
    with pytest.raises(ApiError):
        await reconciler.reconcile(KEY)
    released = next(what for what in server.asked if what.startswith("DELETE")).partition(" ")[2]
    server.broken = set()
    gone = server.running(released)
    gone["metadata"]["resourceVersion"] = "2000"
    cache.observe(POD, gone, deleted=True)
    await reconciler.reconcile(KEY)
    assert server.job["status"]["rollout"].get("preemptions", 0) == 0


async def test_a_status_that_was_decided_before_another_replica_led_is_not_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "RETRY_S", 0.0)
    reconciler, server, cache = operator()
    server.broken = {"status"}
    with pytest.raises(ApiError):
        await reconciler.reconcile(KEY)
    reconciler.stand_by()
    server.broken = set()
    cache.observe(JOB, server.replace_status(rollout={"created": 40, "preemptions": 37, "desiredReplicas": 3}))
    reconciler.take_over()
    await reconciler.reconcile(KEY)
    assert server.job["status"]["rollout"]["preemptions"] == 37
    assert server.job["status"]["rollout"]["created"] >= 40, "no name of a pod is used twice"


async def test_a_reconcile_that_hangs_ends_with_the_lead() -> None:
    reconciler, server, _ = operator()
    server.hangs = True
    work = asyncio.create_task(reconciler.work(lambda: asyncio.sleep(0)))
    await asyncio.wait({work}, timeout=0.2)
    assert reconciler.longest() > 0
    reconciler.stand_by()
    await asyncio.wait({work}, timeout=0.2)
    assert reconciler.longest() == 0
    assert not work.done()
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)


async def test_a_lead_that_is_lost_while_a_reconcile_ends_late_is_no_fault() -> None:
    """It ended the operator."""
    reconciler, server, _ = operator()
    server.hangs, server.ends_late_s = True, 0.2
    work = asyncio.create_task(reconciler.work(lambda: asyncio.sleep(0)))
    await asyncio.wait({work}, timeout=0.2)
    reconciler.stand_by()
    await asyncio.sleep(0.05)
    assert reconciler.longest() > 0
    reconciler.stand_by()
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)


async def fails(reconciler: Reconciler, times: int, error: Exception | None = None) -> float:
    """The pause after the last of so many failures in a row."""
    began = time.monotonic()
    for _ in range(times):
        reconciler._queue.add(KEY)
        assert await reconciler._queue.take() == KEY
        reconciler._queue._wake_of.pop(KEY, None)
        reconciler._failed(KEY, error)
    return reconciler._queue._wake_of[KEY] - began


async def test_a_job_that_is_made_again_waits_for_no_pause_of_its_namesake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first creations meet what the garbage collector has not taken yet, whose end no watch reports."""
    monkeypatch.setattr(work_queue, "MIN_PAUSE_S", 0.0)
    reconciler, server, cache = operator()
    await reconciler.reconcile(KEY)
    await fails(reconciler, 9)
    again = manifest(3)
    again["metadata"] |= {"uid": "another", "resourceVersion": "5000"}
    server.job = again
    cache.observe(JOB, again)
    with suppress(ApiError):
        await reconciler.reconcile(KEY)
    assert await fails(reconciler, 1) < 2
    with suppress(ApiError):
        await reconciler.reconcile(KEY)
    assert await fails(reconciler, 8) > 30, "its own failures are remembered"


async def test_a_pause_that_the_api_server_asks_for_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    reconciler, _, _ = operator()
    busy = ApiError(429, "TooManyRequests", "slow down")
    busy.retry_after_s = 20.0
    assert 20 <= await fails(reconciler, 1, busy) < 21
    busy.retry_after_s = 1e9
    monkeypatch.setattr(work_queue, "MIN_PAUSE_S", 0.0)
    reconciler, _, _ = operator()
    assert await fails(reconciler, 1, busy) < work_queue.MAX_BACKOFF_S + 1, "a proxy may ask for anything"


NEEDED = ("NetworkPolicy", "PersistentVolumeClaim", "Secret", "Service", "ConfigMap", "ServiceAccount", "Job")


@pytest.mark.parametrize("kind", NEEDED)
async def test_no_pod_starts_without_what_the_api_server_refuses_and_the_status_says_so(kind: str) -> None:
    reconciler, server, cache = operator()
    server.forbidden = {kind}
    for _ in range(2):
        await reconciler.reconcile(KEY)
    made = {pod.role.value for pod in cache.pods(KEY, "job-uid")}
    assert made <= ({"manager"} if kind == "Job" else set()), "an open network, or machines that wait in vain"
    conditions = {one["type"]: one for one in server.job["status"]["conditions"]}
    for type_ in ("TrainerReady", "RolloutAvailable"):
        assert (conditions[type_]["status"], conditions[type_]["reason"]) == ("False", "Refused")
        assert kind in conditions[type_]["message"]
        assert "is being terminated" in conditions[type_]["message"]
    server.forbidden = set()
    await begin(reconciler)
    assert len(cache.pods(KEY, "job-uid")) == 5
    trainer = next(one for one in server.job["status"]["conditions"] if one["type"] == "TrainerReady")
    assert trainer["reason"] == "Starting"


@pytest.mark.parametrize("replicas", [0, 3])
async def test_what_is_refused_and_wanted_no_longer_holds_up_no_pod(replicas: int) -> None:
    reconciler, server, cache = operator(replicas)
    server.forbidden = {"NetworkPolicy"}
    for _ in range(3):
        await reconciler.reconcile(KEY)
    assert cache.pods(KEY, "job-uid") == []
    server.job["spec"]["networkPolicy"] = {"mode": "None"}
    server.job["metadata"] |= {"generation": 2, "resourceVersion": "1000"}
    cache.observe(JOB, server.job)
    for _ in range(2):
        await reconciler.reconcile(KEY)
    assert len(cache.pods(KEY, "job-uid")) == 2 + replicas
    conditions = {one["type"]: one["reason"] for one in server.job["status"]["conditions"]}
    assert conditions["TrainerReady"] == "Starting"
