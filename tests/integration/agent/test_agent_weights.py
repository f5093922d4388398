"""The agent at a switch of weights and in its engine's sleep: what goes on, what is returned, and what it serves."""

from __future__ import annotations

import asyncio
import errno
import os
import time

import pytest
import torch
from safetensors.torch import load_file

from polyrl.weights.engine_sums import REFUSALS
from polyrl.wire import (
    Announce,
    Asleep,
    Deltas,
    Deregister,
    EngineCapacity,
    Fenced,
    GoToSleep,
    HandBack,
    HandBackReason,
    Heartbeat,
    Hello,
    Recall,
    WakeUp,
    WeightsFailed,
    WeightsLoaded,
)
from polyrl.worker import TEMPORARY_EXIT
from polyrl_rollout.agent.app import EXIT_FAILED, Agent
from polyrl_rollout.weights.versions import MAX_WEIGHTS_FAILURES
from polyrl_trainer.weights.server import WeightServer
from tests.integration.agent.played_manager import (
    Rig,
    undisturbed,
)


async def test_work_for_another_version_is_returned(rig: Rig) -> None:
    await rig.manager.receive(Hello)
    await rig.assign(1)
    returned = await rig.manager.receive(HandBack)
    assert (returned.assignment, returned.reason) == (1, "versionChanged")


async def test_at_a_switch_fitting_sequences_go_on_and_others_are_returned_with_their_tokens(rig: Rig) -> None:
    rig.engine.tokens_per_second = 10  # until the switch, so that it comes in the middle
    await rig.serve(0)
    await rig.assign(1, budget=100, newest=1)
    await rig.assign(2, budget=100, newest=0)
    await rig.manager.until(lambda: set(rig.manager.tokens) == {1, 2}, "tokens of both")
    await rig.serve(1)
    rig.engine.tokens_per_second = 200
    assert rig.engine.version == 1
    returned = await rig.manager.receive(HandBack)
    assert (returned.assignment, returned.reason) == (2, "versionChanged")
    assert rig.manager.tokens[2] == undisturbed(2, 100)[: len(rig.manager.tokens[2])]
    await rig.finished(range(1, 2))
    assert rig.manager.tokens[1] == undisturbed(1, 100)
    assert sorted(set(rig.manager.versions[1])) == [0, 1]
    assert rig.manager.versions[1] == sorted(rig.manager.versions[1])
    loaded = rig.manager.all_of(WeightsLoaded)[-1]
    assert (loaded.load_seconds, loaded.verify_seconds) == (0.5, 0.125), "as the engine says"
    assert loaded.wait_seconds > 0.25, "stopping what ran comes on top"


async def test_an_engine_is_tried_once_before_it_is_said_to_serve(rig: Rig) -> None:
    """By what it shows the manager begins; nobody waits for samples on a slow engine until then."""
    rig.model_config = b'{"vocab_size": 1000, "max_position_embeddings": 1024}'
    await rig.serve(0)
    await rig.serve(1)
    await rig.manager.send(rig.announcement(1))
    await rig.manager.receive(WeightsLoaded, 3)
    trials = [(one.step_seconds, one.read_seconds) for one in rig.manager.all_of(WeightsLoaded)]
    assert rig.engine.begun == 2, "no sample was assigned"
    assert min(trials[0]) > 0
    assert len(set(trials)) == 1, "also where it only says again what it serves"


async def test_while_an_engine_is_tried_nothing_says_that_it_serves(rig: Rig) -> None:
    """Not a greeting, for a capacity that is another than announced, nor an answer to what is announced again."""
    rig.model_config = b'{"vocab_size": 1000, "max_position_embeddings": 1024}'
    rig.engine.tokens_per_second = 20.0
    await rig.manager.receive(Hello)
    announcement = rig.announcement(0)
    await rig.manager.send(announcement)
    greeting = await rig.manager.receive(Hello, 2)
    assert (greeting.kv_tokens, greeting.weight_version) == (rig.engine.capacity.kv_tokens, -1)
    await rig.manager.send(announcement)
    loaded = await rig.manager.receive(WeightsLoaded)
    assert loaded.step_seconds > 0


async def test_what_an_engine_keeps_runs_on_through_a_switch(rig: Rig) -> None:
    rig.engine.keeps, rig.engine.tokens_per_second = True, 10
    await rig.serve(0)
    await rig.assign(1, budget=100, newest=1)
    await rig.assign(2, budget=100, newest=0)
    await rig.manager.until(lambda: set(rig.manager.tokens) == {1, 2}, "tokens of both")
    await rig.serve(1)
    rig.engine.tokens_per_second = 200
    returned = await rig.manager.receive(HandBack)
    assert (returned.assignment, returned.reason) == (2, "versionChanged")
    await rig.finished(range(1, 2))
    assert (rig.engine.begun, len(rig.engine.aborted)) == (2, 1), "nothing is read again"
    assert rig.manager.tokens[1] == undisturbed(1, 100)
    assert (rig.manager.versions[1], set(rig.manager.versions[1])) == (sorted(rig.manager.versions[1]), {0, 1})


async def test_what_has_not_begun_begins_with_the_new_weights_also_where_requests_are_kept(rig: Rig) -> None:
    rig.engine.keeps = True
    await rig.serve(0)
    rig.engine.hang.set()
    await rig.assign(1, newest=1)
    await rig.manager.until(lambda: rig.engine.begun == 1, "a request")
    await rig.serve(1)
    rig.engine.hang.clear()
    await rig.finished(range(1, 2))
    assert (rig.engine.begun, set(rig.manager.versions[1])) == (2, {1})


async def test_weights_that_do_not_load_leave_the_old_version_serving(rig: Rig) -> None:
    await rig.serve(0)
    rig.engine.refuse_weights = True
    await rig.manager.send(rig.announcement(1))
    failed = await rig.manager.receive(WeightsFailed)
    assert (failed.version, failed.serving) == (1, 0)
    await rig.assign(1)
    await rig.finished(range(1, 2))
    rig.engine.refuse_weights = False
    await rig.serve(1)
    assert len(list(rig.staging.root.glob("v*"))) == 2, "what is served, and the pages of the next one"


@pytest.mark.parametrize("reason", REFUSALS)
async def test_one_that_is_refused_for_what_its_engine_holds_ends_and_greets_no_more(rig: Rig, reason: str) -> None:
    await rig.serve(0)
    greeted = len(rig.manager.all_of(Hello))
    await rig.manager.send(Fenced(reason))
    assert await rig.exit_code() == EXIT_FAILED
    assert len(rig.manager.all_of(Hello)) == greeted


async def begin_asleep(rig: Rig) -> None:
    """As an engine on the trainer's devices begins: it can sleep, and does."""
    rig.engine.sleeps = True
    rig.agent = Agent(rig.settings, rig.engine, EngineCapacity(32, 1 << 16, max_context=512), rig.staging)
    await rig.close_agent()
    rig.task = asyncio.create_task(rig.agent.run())
    await rig.manager.until(lambda: any(hello.sleeps for hello in rig.manager.all_of(Hello)), "greeting")


async def test_one_that_shares_a_device_starts_when_it_is_woken(rig: Rig) -> None:
    await begin_asleep(rig)
    first = rig.manager.all_of(Hello)[-1]
    assert (first.sleeps, first.asleep) == (True, True)
    await rig.manager.send(rig.announcement(0))
    await rig.manager.send(GoToSleep(5.0))
    await rig.manager.receive(Asleep)
    await rig.agent._versions.settled()
    assert (rig.engine.folder, rig.manager.all_of(WeightsLoaded)) == (None, [])
    await rig.manager.send(WakeUp())
    assert (await rig.manager.receive(WeightsLoaded)).version == 0
    await rig.assign(1)
    await rig.finished(range(1, 2))


async def test_asleep_it_has_given_everything_back_and_wakes_with_the_newest_weights(rig: Rig) -> None:
    await begin_asleep(rig)
    await rig.manager.send(WakeUp())
    await rig.serve(0)
    rig.engine.tokens_per_second = 100
    await rig.assign(1, budget=400, newest=9)
    await rig.manager.until(lambda: len(rig.manager.tokens.get(1, [])) > 4, "tokens")
    await rig.manager.send(GoToSleep(5.0))
    await rig.manager.receive(Asleep)
    (given,) = rig.manager.all_of(HandBack)
    assert (given.assignment, given.reason) == (1, HandBackReason.RECALLED)
    assert rig.manager.tokens[1] == undisturbed(1, len(rig.manager.tokens[1])), "they came before"
    assert (rig.engine.asleep, rig.engine.version) == (True, -1)
    await rig.manager.send(rig.announcement(1))
    await rig.manager.send(rig.announcement(2))
    await rig.manager.send(WakeUp())
    assert (await rig.manager.receive(WeightsLoaded, 2)).version == 2
    assert not rig.engine.asleep
    assert rig.engine.folder is not None
    assert rig.engine.folder.name.startswith("v000002-")
    await rig.assign(2, newest=9)
    await rig.finished(range(2, 3))
    assert set(rig.manager.versions[2]) == {2}


async def test_one_that_was_woken_and_has_no_weights_yet_falls_asleep_again(rig: Rig) -> None:
    """The first may be on their way for minutes, and others may be done with the batch: its agent gave it up."""
    await begin_asleep(rig)
    await rig.manager.send(WakeUp())
    await rig.manager.until(lambda: not rig.agent._rest.asleep, "waking")
    await rig.manager.send(GoToSleep(5.0))
    await rig.manager.receive(Asleep)
    await rig.manager.send(rig.announcement(0))
    await rig.agent._versions.settled()
    assert (rig.engine.folder, rig.manager.all_of(WeightsLoaded)) == (None, [])
    await rig.manager.send(WakeUp())
    assert (await rig.manager.receive(WeightsLoaded)).version == 0


async def test_woken_without_newer_weights_it_serves_what_it_served(rig: Rig) -> None:
    await begin_asleep(rig)
    await rig.manager.send(WakeUp())
    announced = rig.announcement(0)
    await rig.manager.send(announced)
    await rig.manager.receive(WeightsLoaded)
    await rig.manager.send(GoToSleep(5.0))
    await rig.manager.receive(Asleep)
    await rig.manager.send(announced)  # as after a greeting
    await rig.manager.send(WakeUp())
    assert (await rig.manager.receive(WeightsLoaded, 2)).version == 0


async def test_one_that_is_awake_says_what_it_serves_when_it_is_woken_again(rig: Rig) -> None:
    """A manager that took it for asleep had no answer, and waited for it without end."""
    await begin_asleep(rig)
    await rig.manager.send(WakeUp())
    await rig.serve(0)
    await rig.manager.send(WakeUp())
    again = await rig.manager.receive(WeightsLoaded, 2)
    assert (again.version, again.receipt) == (0, rig.manager.all_of(WeightsLoaded)[0].receipt)


async def test_one_that_was_frozen_follows_no_order_that_it_finds_then(rig: Rig) -> None:
    """Its lease may be over, and the learner on its device."""
    rig.manager.lease_s = 0.5
    await begin_asleep(rig)
    await rig.manager.send(rig.announcement(0))
    await rig.manager.send(GoToSleep(5.0, 1))
    assert (await rig.manager.receive(Asleep)).order == 1
    await rig.agent._versions.settled()
    greetings = len(rig.manager.all_of(Hello))
    await rig.manager.send(WakeUp())
    time.sleep(1.0)  # noqa: ASYNC251 - the whole process stands still, as by SIGSTOP; its socket takes the order
    await rig.manager.receive(Hello, greetings + 1)
    await rig.manager.receive(Heartbeat, len(rig.manager.all_of(Heartbeat)) + 3)
    assert rig.engine.folder is None
    await rig.manager.send(WakeUp())
    assert (await rig.manager.receive(WeightsLoaded)).version == 0


@pytest.mark.parametrize("how", ["hangs", "breaks"])
async def test_one_that_does_not_fall_asleep_is_ended_before_the_manager_hears_of_it(rig: Rig, how: str) -> None:
    await begin_asleep(rig)
    await rig.manager.send(WakeUp())
    await rig.serve(0)
    closed: list[bool] = []
    rig.engine.on_close = lambda: closed.append(not rig.manager.all_of(Deregister))
    if how == "hangs":
        rig.engine.falls_asleep.clear()
    else:
        rig.engine.broken = True
    await rig.manager.send(GoToSleep(0.3))
    left = await rig.manager.receive(Deregister)
    assert ("did not sleep within 0.3 s" if how == "hangs" else "is broken") in left.reason
    assert await rig.exit_code() == (TEMPORARY_EXIT if how == "hangs" else EXIT_FAILED)
    assert closed[0]


async def test_ordered_to_sleep_while_it_wakes_it_does_so_afterwards(rig: Rig) -> None:
    await begin_asleep(rig)
    rig.engine.loading.clear()
    await rig.manager.send(rig.announcement(0))
    await rig.manager.send(WakeUp())
    await rig.manager.until(lambda: rig.engine.folder is not None, "start")
    await rig.manager.send(GoToSleep(5.0))
    await rig.manager.receive(Heartbeat, 3)
    assert not rig.manager.all_of(Asleep)
    rig.engine.loading.set()
    await rig.manager.receive(Asleep)
    assert rig.engine.asleep


async def test_what_changed_is_pulled_onto_what_is_served(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WeightServer, "bandwidth", 1e3)  # so slow that a delta of kilobytes pays
    rig.publisher.forms.smallest = 0
    await rig.manager.receive(Hello)
    weights = torch.zeros(5000)
    for version in range(3):
        weights[version] = 1.0
        published = rig.publisher.publish(version, {"w": weights}.items(), {"config.json": b"{}"})
        await rig.manager.send(Announce.of(published))
        loaded = await rig.manager.receive(WeightsLoaded, version + 1)
        assert (loaded.version, loaded.receipt) == (version, published.receipt)
        assert (loaded.bytes_pulled < 200) == (version > 0)
    (folder,) = rig.staging.root.glob("v000002-*")
    assert torch.equal(load_file(folder / "model.safetensors")["w"], weights)


async def reason_of_its_end(rig: Rig) -> str:
    """Of an engine that gets no version of those that are announced."""
    announced = rig.announcement(1)
    for count in range(1, MAX_WEIGHTS_FAILURES + 1):
        await rig.manager.send(announced)
        await rig.manager.receive(WeightsFailed, count)
    assert await rig.exit_code() == EXIT_FAILED
    return (await rig.manager.receive(Deregister)).reason


async def test_an_engine_that_never_loads_a_version_ends_with_the_reason(rig: Rig) -> None:
    await rig.serve(0)
    rig.engine.refuse_weights = True
    assert "does not fit the model" in await reason_of_its_end(rig)


async def test_an_engine_whose_machine_has_no_room_for_any_version_ends_with_the_reason(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stayed for ever, paid for, and served what nobody uses any more. Another machine may have room."""
    await rig.serve(0)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name in ("open", "copy_of"):
        monkeypatch.setattr(rig.staging, name, full)
    assert "No space left on device" in await reason_of_its_end(rig)


async def test_what_is_recalled_during_a_switch_does_not_start_again(rig: Rig) -> None:
    rig.engine.tokens_per_second = 10
    await rig.serve(0)
    await rig.assign(1, budget=100, newest=1)
    await rig.manager.receive(Deltas)
    rig.engine.loading.clear()
    await rig.manager.send(rig.announcement(1))
    await rig.manager.until(lambda: bool(rig.engine.aborted), "a switch")
    begun = rig.engine.begun
    rig.agent._protocol.receive(Recall(1), 0.0)
    rig.agent.handle(Recall(1))
    rig.agent._continue()  # the switch ends before what was recalled has been handed back
    rig.engine.loading.set()
    await rig.manager.receive(WeightsLoaded, 2)
    await rig.manager.receive(HandBack)
    assert rig.engine.begun == begun


async def test_a_newer_announcement_supersedes_a_pull_that_hangs(rig: Rig) -> None:
    await rig.manager.receive(Hello)
    good = rig.announcement(1)
    await rig.manager.send(Announce(0, "tcp://127.0.0.1:1", public_key=good.public_key, manifest_hash=b"x" * 16))
    await rig.manager.send(good)
    assert (await rig.manager.receive(WeightsLoaded)).version == 1
    assert not rig.manager.all_of(WeightsFailed)
