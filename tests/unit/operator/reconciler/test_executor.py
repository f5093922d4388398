"""What the API client and the executor do with answers of the API server: repeats, conflicts, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from polyrl.cluster.actions import (
    Annotate,
    Create,
    Delete,
    DryRun,
    FindTrainer,
    MakeEngineKeys,
    MakeKeys,
    RecordEvent,
    RenewCertificate,
)
from polyrl.cluster.reasons import EventReason
from polyrl.cluster.resources.owner import Owner
from polyrl.testing.fake_operator import SETTINGS
from polyrl_operator.api import client as client_module
from polyrl_operator.api.client import ATTEMPTS, ApiError, Client, NotLeader
from polyrl_operator.api.kinds import JOB, POD, SECRET, TRAINER
from polyrl_operator.informer.cache import Cache, JobKey
from polyrl_operator.reconciler.executor import Executor, NameTaken
from polyrl_operator.secret import keys_secret

KEY = JobKey("ns", "j")
OWNER = Owner("j", "ns", "job-uid", job=None, settings=SETTINGS)  # type: ignore[arg-type]


def pod(name: str, owner: str = "job-uid", version: int = 1) -> dict[str, Any]:
    metadata = {
        "name": name,
        "namespace": "ns",
        "uid": f"uid-{name}",
        "resourceVersion": str(version),
        "labels": {"polyrl.dev/job-name": "j", "polyrl.dev/role": "rollout"},
        "ownerReferences": [{"uid": owner, "controller": True}],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"serviceAccountName": "j"}}


class Answer:
    """One HTTP answer."""

    def __init__(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        self.status, self.headers, self._body = status, headers or {}, body

    async def read(self) -> bytes:
        return msgspec.json.encode(self._body)


class Transport:
    """Plays `ApiClient`: gives the prepared answers in turn; an exception is raised."""

    def __init__(self, *answers: Answer | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, str]] = []
        self.configuration = type("C", (), {"host": "http://api"})()
        self.rest_client = self

    async def update_params_for_auth(self, *_: object) -> None:
        return None

    async def request(self, method: str, url: str, **_: object) -> Answer:
        self.asked.append((method, url.removeprefix("http://api")))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses take no time, and are recorded."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(client_module.asyncio, "sleep", sleep)
    return slept


def client(*answers: Answer | Exception, may_write: Callable[[], bool] = lambda: True) -> tuple[Client, Transport]:
    transport = Transport(*answers)
    return Client(transport, may_write), transport  # type: ignore[arg-type]


BUSY = Answer(429, {"reason": "TooManyRequests", "message": "busy"}, {"Retry-After": "3"})
BROKEN = Answer(500, {"reason": "InternalError", "message": "etcd"})
TAKEN = Answer(409, {"reason": "AlreadyExists", "message": "taken"})
QUOTA_CONFLICT = Answer(409, {"reason": "Conflict", "message": 'cannot be fulfilled on resourcequotas "team"'})
"""Of a control plane with several API servers, two of which count at the same time."""
ABSENT = Answer(404, {"message": "not found"})
WEBHOOK_AWAY = Answer(
    500, {"reason": "InternalError", "message": 'failed calling webhook "pods.example.org": connection refused'}
)
"""Of a webhook whose failurePolicy is Fail."""
WEBHOOK_BUSY = Answer(409, {"message": 'admission webhook "pods.example.org" denied the request: try later'})
"""Webhooks choose their status."""
FULL = Answer(403, {"reason": "Forbidden", "message": "exceeded quota: pods=5"})


@pytest.mark.parametrize("trouble", [BUSY, BROKEN, TimeoutError(), OSError("reset")])
async def test_a_passing_trouble_is_outlasted(trouble: Any) -> None:
    api, transport = client(trouble, Answer(200, pod("p")))
    assert (await api.get(POD, "ns", "p") or {})["metadata"]["name"] == "p"
    assert len(transport.asked) == 2


async def test_a_retry_waits_as_the_server_says(at_once: list[float]) -> None:
    api, _ = client(BUSY, Answer(201, pod("p")))
    await api.create(pod("p"))
    assert at_once == [3.0]


async def test_a_server_that_asks_for_a_long_wait_is_left_to_the_queue(at_once: list[float]) -> None:
    api, transport = client(Answer(429, {"message": "busy"}, {"Retry-After": "600"}))
    with pytest.raises(ApiError, match="busy") as raised:
        await api.create(pod("p"))
    assert raised.value.transient
    assert len(transport.asked) == 1
    assert at_once == []


async def test_a_lasting_trouble_is_an_error_that_says_what_it_was() -> None:
    api, transport = client(*[BROKEN] * ATTEMPTS)
    with pytest.raises(ApiError, match="etcd"):
        await api.get(POD, "ns", "p")
    assert len(transport.asked) == ATTEMPTS


async def test_an_answer_without_words_says_what_was_asked() -> None:
    """`404 page not found` was all that the log had of a CRD that is not installed."""
    nothing = Answer(404, "")
    api, _ = client(nothing)
    with pytest.raises(ApiError, match=r"GET http://api/apis/polyrl.dev/v1alpha1/polyrljobs.* status 404"):
        [page async for page in api.pages(JOB, None)]


@pytest.mark.parametrize("status", [400, 403, 409, 422])
async def test_a_refusal_is_not_repeated(status: int) -> None:
    api, transport = client(Answer(status, {"message": "no"}))
    with pytest.raises(ApiError, match="no") as raised:
        await api.create(pod("p"))
    assert not raised.value.transient
    assert len(transport.asked) == 1


async def test_who_lost_the_lease_between_two_attempts_does_not_try_again() -> None:
    leads = iter((True, False))
    api, transport = client(BROKEN, may_write=lambda: next(leads))
    with pytest.raises(NotLeader):
        await api.create(pod("p"))
    assert len(transport.asked) == 1


@pytest.mark.parametrize("status", [404, 409])
async def test_what_is_gone_or_is_another_by_now_is_deleted(status: int) -> None:
    api, _ = client(Answer(status, {"message": "gone"}))
    assert await api.delete(POD, "ns", "p", "uid") is None


async def test_pages_are_read_to_the_end() -> None:
    first = Answer(200, {"metadata": {"continue": "more", "resourceVersion": "7"}, "items": [pod("a")]})
    last = Answer(200, {"metadata": {"resourceVersion": "7"}, "items": [pod("b")]})
    api, transport = client(first, last)
    names = [item["metadata"]["name"] async for items, _ in api.pages(POD, None) for item in items]
    assert names == ["a", "b"]
    assert "continue=more" in transport.asked[1][1]


class Recorder:
    """Plays events and the manager poller."""

    def __init__(self) -> None:
        self.recorded: list[RecordEvent] = []

    def record(self, job: object, event: RecordEvent) -> None:
        self.recorded.append(event)


def actor(*answers: Answer | Exception) -> tuple[Executor, Cache, Transport, Recorder]:
    api, transport = client(*answers)
    cache, recorder = Cache(lambda key: None), Recorder()
    cache.observe(JOB, {"metadata": {"name": "j", "namespace": "ns", "uid": "job-uid", "resourceVersion": "1"}})
    return Executor(api, cache, recorder, recorder), cache, transport, recorder  # type: ignore[arg-type]


async def test_what_was_made_is_known_at_once() -> None:
    act, cache, _, _ = actor(Answer(201, pod("j-r-1")))
    outcome = await act.execute(OWNER, [Create(pod("j-r-1"), "why")])
    assert outcome.created == 1
    assert [one.name for one in cache.pods(KEY, "job-uid")] == ["j-r-1"]


async def test_a_creation_that_meets_its_own_object_is_done() -> None:
    act, cache, _, _ = actor(TAKEN, Answer(200, pod("j-r-1")))
    outcome = await act.execute(OWNER, [Create(pod("j-r-1"), "why")])
    assert outcome.created == 0
    assert len(cache.pods(KEY, "job-uid")) == 1


async def test_a_creation_that_meets_a_namesakes_object_waits_for_it_to_go() -> None:
    act, cache, _, recorder = actor(TAKEN, Answer(200, pod("j-r-1", owner="former-uid")))
    with pytest.raises(NameTaken, match="Pod j-r-1 is there and is not of this PolyRLJob"):
        await act.execute(OWNER, [Create(pod("j-r-1"), "why")])
    assert cache.pods(KEY, "job-uid") == []
    [event] = recorder.recorded
    assert event.message == "Pod j-r-1 is there and is not of this PolyRLJob; it is to go", "else nothing says it"


async def test_a_conflict_beside_the_object_is_no_namesake_and_is_tried_again() -> None:
    """It was said to be there and of somebody else, in an Event as well, and it was not there."""
    act, _, transport, recorder = actor(QUOTA_CONFLICT)
    with pytest.raises(ApiError, match="resourcequotas"):
        await act.execute(OWNER, [Create(pod("j-r-1"), "why")])
    assert recorder.recorded == []
    assert [method for method, _ in transport.asked] == ["POST"]


async def test_a_namesakes_object_that_went_meanwhile_is_no_event() -> None:
    act, _, _, recorder = actor(TAKEN, ABSENT)
    with pytest.raises(ApiError, match="taken"):
        await act.execute(OWNER, [Create(pod("j-r-1"), "why")])
    assert recorder.recorded == []


@pytest.mark.parametrize("lacks", ["labels", "ownerReferences"], ids=["a stranger's", "left by cascade=orphan"])
async def test_a_creation_that_meets_what_stays_is_refused_and_no_pod_is_made(lacks: str) -> None:
    there = pod("j") | {"kind": "ServiceAccount"}
    there["metadata"] |= {"ownerReferences": [{"uid": "other-uid"}]} | {lacks: type(there["metadata"][lacks])()}
    act, _, transport, _ = actor(TAKEN, Answer(200, there))
    outcome = await act.execute(OWNER, [Create(there, "why"), Create(pod("j-r-1"), "why")])
    assert outcome.refusal.startswith("ServiceAccount j is there and is not of this PolyRLJob; delete it, or")
    assert [method for method, _ in transport.asked] == ["POST", "GET"]


async def test_a_refusal_for_good_is_an_answer_and_what_follows_is_done() -> None:
    act, _, _, recorder = actor(FULL)
    outcome = await act.execute(OWNER, [Create(pod("j-r-1"), "why"), RecordEvent(EventReason.RESUMED, "after it")])
    assert outcome.refusal == "Pod j-r-1: exceeded quota: pods=5"
    assert len(recorder.recorded) == 1


@pytest.mark.parametrize("answers", [[WEBHOOK_AWAY] * ATTEMPTS, [WEBHOOK_BUSY]], ids=["it is away", "it says 409"])
async def test_what_a_webhook_does_not_let_be_is_refused_whatever_the_status(answers: list[Answer]) -> None:
    """Without an answer the job had no status, or an old one, for as long as the webhook was away."""
    act, cache, _, recorder = actor(*answers, *answers, *answers)
    cache.observe(POD, pod("j-r-9"))
    made, after = Create(pod("j-r-1"), "why"), RecordEvent(EventReason.RESUMED, "after it")
    outcome = await act.execute(OWNER, [made, after])
    assert outcome.refusal.startswith("Pod j-r-1: ")
    assert 'webhook "pods.example.org"' in outcome.refusal
    assert recorder.recorded == [after]
    annotate = Annotate("j-r-9", "uid-j-r-9", annotations={"polyrl.dev/released": "why"}, why="it is released")
    outcome = await act.execute(OWNER, [annotate, Delete("Pod", "j-r-9", uid="uid-j-r-9", why="it is released"), after])
    assert outcome.denied
    assert [one.reason for one in recorder.recorded[1:]] == [EventReason.REFUSED] * 2 + [EventReason.RESUMED]
    assert cache.pods(KEY, "job-uid")[0].deletion_at is None, "it is there, and not being deleted"


async def test_what_comes_after_a_failure_is_not_begun() -> None:
    act, cache, transport, _ = actor(*[BROKEN] * ATTEMPTS)
    cache.observe(POD, pod("j-r-1"))
    annotate = Annotate("j-r-1", "uid-j-r-1", annotations={"polyrl.dev/counted": "preemption-1"}, why="counted")
    with pytest.raises(ApiError):
        await act.execute(OWNER, [annotate, Delete("Pod", "j-r-1", uid="uid-j-r-1", why="it is counted")])
    assert {method for method, _ in transport.asked} == {"PATCH"}


@pytest.mark.parametrize("status", [400, 403, 422])
async def test_what_may_not_be_changed_is_an_event_and_what_follows_is_done(status: int) -> None:
    """A job that is suspended gives its machines back, whatever a policy says of annotations."""
    no = Answer(status, {"message": "the policy forbids it"})
    act, cache, transport, recorder = actor(no, Answer(200, {"kind": "Status", "status": "Success"}))
    cache.observe(POD, pod("j-r-1"))
    annotate = Annotate("j-r-1", "uid-j-r-1", annotations={"polyrl.dev/released": "why"}, why="it is released")
    outcome = await act.execute(OWNER, [annotate, Delete("Pod", "j-r-1", uid="uid-j-r-1", why="why")])
    assert (outcome.denied, outcome.refusal) == (True, "")
    assert [method for method, _ in transport.asked] == ["PATCH", "DELETE"]
    assert [(one.reason, one.type) for one in recorder.recorded] == [(EventReason.REFUSED, "Warning")]
    assert "the policy forbids it" in recorder.recorded[0].message


async def test_a_pod_that_was_deleted_is_leaving_until_the_watch_says_that_it_is_gone() -> None:
    act, cache, _, _ = actor(Answer(200, {"kind": "Status", "status": "Success"}))
    cache.observe(POD, pod("j-r-1"))
    await act.execute(OWNER, [Delete("Pod", "j-r-1", uid="uid-j-r-1", why="why")])
    assert cache.pods(KEY, "job-uid")[0].deletion_at is not None


async def test_a_pod_that_was_gone_already_is_gone() -> None:
    act, cache, _, _ = actor(Answer(404, {"message": "not found"}))
    cache.observe(POD, pod("j-r-1"))
    await act.execute(OWNER, [Delete("Pod", "j-r-1", uid="uid-j-r-1", why="why")])
    assert cache.pods(KEY, "job-uid") == []


@pytest.mark.parametrize(
    ("stored", "known"),
    [(Answer(200, pod("j-trainer")), True), (Answer(200, pod("j-trainer", "other-uid")), False), (ABSENT, False)],
    ids=["it lost its label", "it is not this job's", "it is gone"],
)
async def test_a_trainer_s_job_that_lost_its_label_gets_it_back(stored: Answer, known: bool) -> None:
    """Watches report such a Job as deleted, and nobody saw how it went on."""
    labelled = Answer(200, pod("j-trainer", version=2))
    act, cache, transport, _ = actor(stored, *([labelled] if known else []))
    cache.observe(TRAINER, pod("j-trainer"))
    cache.observe(TRAINER, pod("j-trainer"), deleted=True)
    await act.execute(OWNER, [FindTrainer("j-trainer")])
    assert (cache.trainer(KEY, "job-uid") is not None) == known
    assert transport.answers == []


async def test_a_label_that_a_policy_refuses_is_an_event() -> None:
    act, _, _, recorder = actor(Answer(200, pod("j-trainer")), FULL)
    assert (await act.execute(OWNER, [FindTrainer("j-trainer")])).denied
    assert [event.reason for event in recorder.recorded] == [EventReason.REFUSED]


MAKE_KEYS = MakeKeys("j-keys", ("j-manager",), now=0.0)
COPIES = ("j-keys-manager", "j-keys-trainer", "j-keys-reserved")
KEYS = keys_secret(OWNER, MAKE_KEYS)["data"]


def secret(name: str, copied_from: str = "", owner: str = "job-uid") -> dict[str, Any]:
    stored = pod(name, owner) | {"kind": "Secret", "data": KEYS}
    stored["metadata"]["annotations"] = {"polyrl.dev/content-hash": copied_from}
    return stored


@pytest.mark.parametrize("there", [0, 1, 3], ids=["root only", "died after one copy", "all there"])
async def test_keys_are_drawn_once_and_what_is_missing_of_their_copies_is_made_from_what_is_stored(there: int) -> None:
    found = [Answer(200, secret(name, "uid-j-keys")) for name in COPIES[:there]]
    absent = [Answer(404, {"message": "not found"}) for _ in COPIES[there:]]
    made = [Answer(201, secret(name, "uid-j-keys")) for name in COPIES[there:]]
    act, cache, transport, _ = actor(TAKEN, Answer(200, secret("j-keys")), *found, *absent, *made)
    await act.execute(OWNER, [MAKE_KEYS])
    asked = [(method, path.partition("?")[0]) for method, path in transport.asked]
    root = [("POST", SECRET.path("ns")), ("GET", SECRET.path("ns", "j-keys"))]
    assert asked == [*root, *(("GET", SECRET.path("ns", name)) for name in COPIES), *[root[0]] * (3 - there)]
    assert {child.name for child in cache.children(KEY, "job-uid")} == {"j-keys", *COPIES}


async def test_no_key_is_copied_beside_a_copy_of_other_keys() -> None:
    """Somebody deleted the root and a copy, and an operator that starts draws a root anew."""
    others = [Answer(200, secret(name, "uid-before")) for name in COPIES[1:]]
    act, _, transport, _ = actor(Answer(201, secret("j-keys")), ABSENT, *others)
    result = await act.execute(OWNER, [MAKE_KEYS])
    assert result.refusal.startswith("suspend the job, delete the Secrets j-keys-trainer, j-keys-reserved, and let it")
    assert [method for method, _ in transport.asked] == ["POST", "GET", "GET", "GET"]


RENEW = RenewCertificate("j-keys-manager", "uid-j-keys-manager", "j-keys", hosts=("j-manager",), now=0.0)


async def test_a_renewed_certificate_is_known_at_once() -> None:
    stored = secret("j-keys-manager", "uid-j-keys")
    stored["metadata"]["annotations"]["polyrl.dev/certificate-expires-at"] = "1970-01-15T00:00:00Z"
    act, cache, transport, _ = actor(Answer(200, secret("j-keys")), Answer(200, stored))
    await act.execute(OWNER, [RENEW])
    assert [(method, path.partition("?")[0]) for method, path in transport.asked] == [
        ("GET", SECRET.path("ns", "j-keys")),
        ("PATCH", SECRET.path("ns", "j-keys-manager")),
    ]
    assert [child.expires_at for child in cache.children(KEY, "job-uid")] == [14 * 86_400.0]


@pytest.mark.parametrize(("refusal", "known"), [(FULL, 1), (TAKEN, 0)], ids=["no right to", "another by now"])
async def test_a_refused_renewal_ends_no_reconcile(refusal: Answer, known: int) -> None:
    act, cache, transport, _ = actor(Answer(200, secret("j-keys")), refusal, Answer(200, {"kind": "Status"}))
    cache.observe(SECRET, secret("j-keys-manager", "uid-j-keys"))
    await act.execute(OWNER, [RENEW, Delete("Pod", "j-r-1", uid="uid-j-r-1", why="why")])
    assert [method for method, _ in transport.asked] == ["GET", "PATCH", "DELETE"]
    assert len(cache.children(KEY, "job-uid")) == known, "of one that is gone another is made"


ENGINE_KEYS = MakeEngineKeys("j-keys", (("j-r-1", "uid-j-r-1"),))


@pytest.mark.parametrize("again", [False, True], ids=["the first time", "by an operator that starts"])
async def test_a_rollout_gets_keys_of_its_own_that_go_with_its_pod(again: bool) -> None:
    made = secret("j-r-1", owner="uid-j-r-1")
    act, cache, transport, _ = actor(
        Answer(200, secret("j-keys")), *((TAKEN, Answer(200, made)) if again else (Answer(201, made),))
    )
    await act.execute(OWNER, [ENGINE_KEYS])
    asked = [(method, path.partition("?")[0]) for method, path in transport.asked]
    assert asked[:2] == [("GET", SECRET.path("ns", "j-keys")), ("POST", SECRET.path("ns"))]
    assert cache.children(KEY, "job-uid") == [], "an operator of thousands of pods keeps no second list of them"


async def test_where_the_secret_of_all_keys_is_gone_that_is_known_from_then_on() -> None:
    """No watch and no list tells: reconciles of its job failed until the operator was started anew."""
    act, cache, _, _ = actor(ABSENT)
    cache.observe(SECRET, secret("j-keys"))
    cache.observe(SECRET, secret("j-keys-manager", "uid-j-keys"))
    with pytest.raises(ApiError, match="Secret j-keys is not there"):
        await act.execute(OWNER, [ENGINE_KEYS])
    assert [child.name for child in cache.children(KEY, "job-uid")] == ["j-keys-manager"]


async def test_a_secret_that_has_a_rollouts_name_and_is_not_its_own_is_no_key() -> None:
    theirs = secret("j-r-1", owner="somebody")
    act, _, _, _ = actor(Answer(200, secret("j-keys")), TAKEN, Answer(200, theirs))
    with pytest.raises(NameTaken):
        await act.execute(OWNER, [ENGINE_KEYS])


async def test_a_namesakes_copies_are_waited_out() -> None:
    act, _, _, _ = actor(Answer(201, secret("j-keys")), Answer(200, secret("j-keys-manager", "x", owner="old-uid")))
    with pytest.raises(NameTaken):
        await act.execute(OWNER, [MAKE_KEYS])


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (Answer(201, pod("x")), ""),
        (TAKEN, ""),
        (FULL, "Pod j-r-0: exceeded quota: pods=5"),
        (WEBHOOK_AWAY, 'Pod j-r-0: failed calling webhook "pods.example.org": connection refused'),
        (WEBHOOK_BUSY, 'Pod j-r-0: admission webhook "pods.example.org" denied the request: try later'),
    ],
    ids=["made", "taken", "quota is full", "a webhook is away", "a webhook says 409"],
)
async def test_a_dry_run_brings_the_servers_own_words(answer: Answer, expected: str) -> None:
    act, _, transport, _ = actor(*[answer] * ATTEMPTS)
    outcome = await act.execute(OWNER, [DryRun((pod("j-r-0"),), 1)])
    assert outcome.dry_run == expected
    assert "dryRun=All" in transport.asked[0][1]


async def test_a_namespace_that_is_a_moment_old_is_asked_again() -> None:
    young = Answer(403, {"message": 'error looking up service account ns/default: serviceaccount "default" not found'})
    act, _, _, _ = actor(young)
    with pytest.raises(ApiError):
        await act.execute(OWNER, [DryRun((pod("j-r-0"),), 1)])
