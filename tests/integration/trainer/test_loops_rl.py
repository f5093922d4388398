"""The RL loop over an in-memory rollout side: exact mini-batches, no short step, no silent zero, exact resume."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import threading
from dataclasses import replace
from math import ceil

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from polyrl.errors import DeadlineExceeded, InvalidData, RunFailed
from polyrl.manifest.data import EvaluationSpec
from polyrl.manifest.parts.user_code import EnvironmentSpec
from polyrl.manifest.spec import ReservedSleep
from polyrl.sample import DiscardReason
from polyrl_cli.model.sealed import find_checkpoint
from polyrl_trainer.checkpoints import latest, read_checkpoint
from polyrl_trainer.data.tokenizers import EOS_ID
from polyrl_trainer.generation.shared_devices import SharedDevices
from polyrl_trainer.losses.own import OwnAlgorithm
from polyrl_trainer.testing.fake_rollouts import FakeRollouts
from polyrl_trainer.user_code.rewards import CallTimedOut
from tests.integration.trainer.loop_run import (
    QUICK_OR_NOT,
    TOKENIZER,
    CountingBackend,
    Run,
    done,
    echo,
    recipe,
)


@settings(max_examples=60, deadline=None, suppress_health_check=QUICK_OR_NOT, print_blob=True)
@given(
    seed=st.integers(0, 2**20),
    mini_batches=st.integers(1, 4),
    groups_per_mini_batch=st.integers(1, 3),
    minimum=st.integers(1, 40),
    over_sampling=st.sampled_from([1.0, 1.5, 2.0]),
    loss_rate=st.sampled_from([0.0, 0.2]),
    old=st.sampled_from(["bypass", "recompute"]),
    epochs=st.sampled_from([1, 1, 3]),
)
def test_mini_batches_are_exact_whatever_arrives_when(
    tmp_path_factory, seed, mini_batches, groups_per_mini_batch, minimum, over_sampling, loss_rate, old, epochs
):
    """I1, I2, I3: every optimizer step has its exact samples, every group ends once, no step is short; each epoch has
    every sample once; old logprobs are those of the step's start."""
    spec = recipe(
        prompts_per_step=mini_batches * groups_per_mini_batch, mini_batch_prompts=groups_per_mini_batch,
        min_micro_batch_samples=minimum, over_sampling_factor=over_sampling, max_replaced_groups_per_step=1000,
        old_log_probs=old, update_epochs=epochs,
    )  # fmt: skip
    dice = random.Random(seed)
    rollouts = FakeRollouts(
        echo, seed=seed, lose=lambda group: DiscardReason.ENGINE_REJECTED if dice.random() < loss_rate else None
    )
    run = Run.make(tmp_path_factory.mktemp("run"), rollouts, spec)
    run.backend.mini_batches = mini_batches * epochs
    assert asyncio.run(run.train(spec))
    assert run.backend.steps == [groups_per_mini_batch * 3] * (mini_batches * 3 * epochs)
    in_order = [sample for micro_batch in run.backend.micro_batches for sample in micro_batch]
    size = 3 * mini_batches * groups_per_mini_batch
    passes = [in_order[start : start + size] for start in range(0, len(in_order), size)]
    trained = [sample for number in range(0, len(passes), epochs) for sample in passes[number]]
    assert len(set(trained)) == len(trained) == size * 3
    assert [sorted(one) for one in passes] == [sorted(passes[n // epochs * epochs]) for n in range(3 * epochs)]
    groups = {int(sample.split(".")[0]) for sample in trained}
    assert sorted(rollouts.groups_acknowledged) == sorted(groups), "acknowledged are exactly those that were trained"
    assert {group.id for group in rollouts.submitted} == groups | set(rollouts.discarded)
    assert not groups & set(rollouts.discarded)


@pytest.mark.parametrize("sleep", [ReservedSleep.ALWAYS, ReservedSleep.NEVER])
async def test_batches_to_learn_come_when_engines_sleep_where_there_is_no_room_for_both(tmp_path, sleep):
    spec, rollouts = recipe(), FakeRollouts(echo)
    run = Run.make(tmp_path, rollouts, spec)
    run.parts = replace(run.parts, devices=SharedDevices(sleep, lambda: None))
    assert await run.train(spec)
    assert set(rollouts.alone) == {sleep is ReservedSleep.ALWAYS}


async def test_versions_follow_the_steps(tmp_path):
    spec, rollouts = recipe(), FakeRollouts(echo)
    run = Run.make(tmp_path, rollouts, spec)
    assert await run.train(spec)
    assert rollouts.published == [0, 1, 2]
    assert [(group.min_version, group.max_version) for group in rollouts.submitted] == [
        (step, step) for step in range(3) for _ in range(4)
    ]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["phase"], line["step"]) for line in lines] == [("rl", 1), ("rl", 2), ("rl", 3)]
    for name in ("reward/mean", "actor/pg_loss", "actor/grad_norm", "response_length/mean", "timing_s/gen",
                 "timing_s/update_weights", "perf/throughput", "rollout/zero_std", "perf/step_ratio"):  # fmt: skip
        assert name in lines[0]


async def test_status_carries_what_scaling_reads(tmp_path):
    spec = recipe(steps=5).model_copy(update={"evaluation": EvaluationSpec(every_steps=2)})
    run = Run.make(tmp_path, rollouts := FakeRollouts(echo), spec)
    assert await run.train(spec)
    steps = {step: values for phase, step, values in rollouts.reports if phase == "rl"}
    assert sorted(steps) == [1, 2, 3, 4, 5]
    for values in steps.values():
        assert 0 < values["rolloutSeconds"] <= values["stepSeconds"]
        assert 0 < values["reservedSeconds"] <= values["rolloutSeconds"]
        assert 0 < values["trainSeconds"] <= values["stepSeconds"]
        assert values["reward"] == values["reward/mean"]
    polluted = [step for step, values in steps.items() if values["pollutedStep"]]
    assert polluted == [1], "engines start; a validation is no part of the step after it"
    evaluated = {step: values for phase, step, values in rollouts.reports if phase == "eval"}
    assert sorted(evaluated) == [2, 4]
    for step, values in evaluated.items():
        assert values["exactMatch"] == values["eval/exact_match"] == steps[step + 1]["exactMatch"]
        assert values["rolloutSeconds"] == steps[step]["rolloutSeconds"], "still the last step's"
    assert "rolloutSeconds" not in (tmp_path / "metrics.jsonl").read_text()


@pytest.mark.parametrize("old", ["bypass", "recompute"])
async def test_all_scores_are_of_the_temperature_that_samples_are_drawn_at(tmp_path, old):
    class Noted(CountingBackend):
        def forward_backward(self, batch, loss, temperature=1.0, **more):
            temperatures.add(("learn", temperature))
            return super().forward_backward(batch, loss, temperature, **more)

        def log_probs(self, batch, temperature=1.0):
            temperatures.add(("score", temperature))
            return super().log_probs(batch, temperature)

    class Reference:
        def log_probs(self, batch, temperature=1.0):
            temperatures.add(("reference", temperature))
            return done([np.zeros(one.length, dtype=np.float32) for one in batch])

    temperatures = set()
    spec = recipe(steps=1, old_log_probs=old, kl_coefficient=0.1)
    spec = spec.model_copy(update={"sampling": spec.sampling.model_copy(update={"temperature": 0.7})})
    run = Run.make(tmp_path, rollouts := FakeRollouts(echo), spec)
    run.parts = replace(run.parts, backend=Noted(), reference=Reference())
    assert await run.train(spec)
    assert {group.sampling.temperature for group in rollouts.submitted} == {0.7}
    wanted = {"learn", "reference"} | ({"score"} if old == "recompute" else set())
    assert temperatures == {(what, 0.7) for what in wanted}


async def test_each_step_and_each_pass_over_it_divides_the_samples_anew(tmp_path):
    spec = recipe(steps=3, old_log_probs="recompute", update_epochs=2, mini_batch_prompts=2)
    run = Run.make(tmp_path, FakeRollouts(echo), spec)
    run.backend.mini_batches = 4
    assert await run.train(spec)
    passes = [run.backend.micro_batches[first : first + 2] for first in range(0, 12, 2)]
    assert all(len({*one, *other}) == 12 for one, other in passes), "each sample once in a pass"
    divisions = set()
    for one, other in passes:
        groups = sorted({int(name.split(".")[0]) for name in [*one, *other]})
        places = {name: (groups.index(int(name.split(".")[0])), name.split(".")[1]) for name in one}
        divisions.add(frozenset(places.values()))
    assert len(divisions) == 6


async def test_surplus_prompts_are_not_lost(tmp_path):
    spec, rollouts = recipe(steps=2, over_sampling_factor=1.5), FakeRollouts(echo)
    run = Run.make(tmp_path, rollouts, spec)
    await run.train(spec)
    surplus = [number for number, reason in rollouts.discarded.items() if reason is DiscardReason.SURPLUS]
    prompts = dict(run.prompts())
    first_step = [number for number in surplus if number < 6]
    assert [prompts[number] for number in first_step] == [prompts[6 + place] for place in range(len(first_step))]


@pytest.mark.parametrize("kind", ["raises", "hangs", "nan"])
async def test_failing_rewards_are_replaced_and_reported(tmp_path, kind):
    def reward(sample):
        if sample.metadata["number"] % 5 == 0:
            if kind == "raises":
                raise KeyError("answer")
            if kind == "hangs":
                raise CallTimedOut
            return float("nan")
        return 1.0

    spec, rollouts = recipe(max_replaced_groups_per_step=4), FakeRollouts(echo)
    run = Run.make(tmp_path, rollouts, spec, reward)
    assert await run.train(spec)
    reason = {"raises": "rewardRaised", "hangs": "rewardTimedOut", "nan": "rewardInvalid"}[kind]
    assert set(run.session.state.results.user_code_failures) == {reason}
    assert run.session.state.results.dropped_groups[reason] >= 1
    assert run.backend.steps == [12, 12, 12]
    failed = {group for group, prompt in run.prompts() if int(prompt[:-1]) % 5 == 0}
    assert failed == set(rollouts.discarded), "every group of a failing prompt is discarded, none is trained"


async def test_too_many_failures_end_the_run_with_their_reasons(tmp_path):
    def reward(sample):
        raise KeyError("answer")

    spec = recipe(max_replaced_groups_per_step=3)
    run = Run.make(tmp_path, FakeRollouts(echo), spec, reward)
    with pytest.raises(RunFailed, match=r"more than 3 prompts had to be replaced .* rewardRaised 4 \(first: KeyError"):
        await run.train(spec)


async def test_resumed_run_sees_the_same_prompts(tmp_path):
    for spec in (recipe(steps=5), recipe(steps=5, mini_batch_prompts=2)):
        whole = Run.make(tmp_path / f"whole{spec.algorithm.mini_batch_prompts}", FakeRollouts(echo, seed=1), spec)
        await whole.train(spec)
        folder = tmp_path / f"cut{spec.algorithm.mini_batch_prompts}"
        cut = Run.make(folder, FakeRollouts(echo, seed=1), recipe(steps=2, mini_batch_prompts=None))
        await cut.train(recipe(steps=2))
        resumed = Run.make(folder, FakeRollouts(echo, seed=2), spec, resume=latest(folder))
        await resumed.train(spec)
        assert cut.prompts() + resumed.prompts() == whole.prompts()
        assert cut.rollouts.published + resumed.rollouts.published == whole.rollouts.published


async def test_a_stop_in_mid_step_leaves_the_state_of_the_steps_start(tmp_path):
    spec = recipe(steps=5)
    whole = Run.make(tmp_path / "whole", FakeRollouts(echo), spec)
    await whole.train(spec)
    folder = tmp_path / "stopped"
    rollouts = FakeRollouts(echo)

    def stopping(sample):
        if run.session.state.step == 2 and len(run.backend.micro_batches) > 2:
            run.session.stop.set()
        return 1.0

    run = Run.make(folder, rollouts, spec, stopping)
    assert not await run.train(spec)
    assert run.session.state.step == 2
    resumed = Run.make(folder, FakeRollouts(echo), spec, resume=latest(folder))
    await resumed.train(spec)
    assert run.prompts()[:8] + resumed.prompts() == whole.prompts()
    assert len(resumed.backend.steps) == 5


def prompts_trained(run):
    """Prompt of every sample that an optimizer step has learned, in order."""
    prompt_of = dict(run.prompts())
    size = sum(run.backend.steps[run.begun :])
    learned = [sample for micro_batch in run.backend.micro_batches for sample in micro_batch][:size]
    return [prompt_of[int(sample.split(".")[0])] for sample in learned]


@settings(max_examples=30, deadline=None, suppress_health_check=QUICK_OR_NOT, print_blob=True)
@given(
    seed=st.integers(0, 2**20),
    mini_batches=st.integers(2, 4),
    groups=st.integers(1, 3),
    minimum=st.integers(1, 8),
    stops=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    staleness=st.sampled_from([0, 1]),
    over_sampling=st.sampled_from([1.0, 1.5]),
)
@example(seed=1, mini_batches=4, groups=1, minimum=3, stops=[1, 1, 1], staleness=0, over_sampling=1.0)
@example(seed=1, mini_batches=4, groups=2, minimum=6, stops=[6], staleness=1, over_sampling=1.5)
@example(seed=1, mini_batches=4, groups=2, minimum=6, stops=[5], staleness=1, over_sampling=1.5)
def test_a_stop_between_mini_batches_keeps_what_is_learned(
    tmp_path_factory, seed, mini_batches, groups, minimum, stops, staleness, over_sampling
):
    """I1, I2, I3: whenever the run is asked to stop, each optimizer step has its exact samples, none is made twice, and
    each step trains as many prompts as it has."""
    spec = recipe(
        prompts_per_step=mini_batches * groups, mini_batch_prompts=groups, min_micro_batch_samples=minimum,
        max_staleness=staleness, over_sampling_factor=over_sampling,
    )  # fmt: skip
    folder, resume, parts = tmp_path_factory.mktemp("run"), None, []
    for number, after in enumerate([*stops, None]):
        run = Run.make(folder / str(number), FakeRollouts(echo, seed=seed + number), spec, resume=resume)
        run.begun = len(run.backend.steps)
        learn, left = run.backend.forward_backward, iter(range((after or 1) - 1))

        def stopping(*batch, learn=learn, left=left, run=run, after=after, **how):
            if after and next(left, None) is None:
                run.session.stop.set()
            return learn(*batch, **how)

        run.backend.forward_backward = stopping
        first, begun = run.session.state.step + 1, run.session.state.trained_groups
        done_all = asyncio.run(run.train(spec))
        wanted = ceil(spec.algorithm.prompts_per_step * over_sampling) - begun
        assert sum(one.step <= first for one in run.rollouts.submitted) == wanted, (
            "what is left of the step, and no more"
        )
        left_over = {one.id for one in run.rollouts.submitted if one.step == run.session.state.step}
        left_over -= {*run.rollouts.groups_acknowledged, *run.rollouts.discarded}
        assert run.session.state.carried == len(left_over)
        parts.append(run)
        resume = latest(folder / str(number))
        if done_all:
            break
    assert done_all
    assert run.backend.steps[run.begun :] == [groups * 3] * (len(run.backend.steps) - run.begun)
    assert len(run.backend.steps) == mini_batches * 3 == run.session.state.results.optimizer_steps
    assert run.session.state.trained_groups == 0
    trained = [prompt for part in parts for prompt in prompts_trained(part)]
    assert len(trained) == 3 * mini_batches * groups * 3
    if over_sampling == 1.0:
        whole = Run.make(folder / "whole", FakeRollouts(echo, seed=seed), spec)
        whole.begun = 0
        asyncio.run(whole.train(spec))
        assert sorted(trained) == sorted(prompts_trained(whole)), "the same prompts, none left out and none twice"


async def test_a_stop_while_samples_of_a_later_mini_batch_are_awaited_saves_those_before(tmp_path):
    """It was awaited until the process was killed, and all since the newest checkpoint was lost."""
    spec = recipe(steps=5, prompts_per_step=6, mini_batch_prompts=2)
    lost = {0, 7}

    def lose(group):
        return DiscardReason.ENGINE_REJECTED if group.id in lost else None

    one_step = spec.model_copy(update={"algorithm": spec.algorithm.model_copy(update={"steps": 1})})
    assert await Run.make(tmp_path, FakeRollouts(echo, lose=lose), one_step).train(one_step)
    run = Run.make(tmp_path, FakeRollouts(echo, lose=lose), spec, resume=latest(tmp_path))
    run.session.checkpoint_every_steps = 100
    delivers = run.rollouts.next

    async def starving(*asked, **how):
        if len(run.backend.steps) == 5:
            run.session.ask_to_stop()
            await asyncio.sleep(3600)
        return await delivers(*asked, **how)

    run.rollouts.next = starving
    async with asyncio.timeout(30):
        assert not await run.train(spec)
    resumed = Run.make(tmp_path, FakeRollouts(echo), spec, resume=latest(tmp_path))
    assert (resumed.session.state.step, resumed.session.state.trained_groups) == (1, 4)
    results, whole = resumed.session.state.results, json.loads((tmp_path / "metrics.jsonl").read_text())
    assert results.rl_train_seconds > whole["timing_s/train"], "what the left step took counts"
    assert results.rl_step_seconds > whole["timing_s/step"]
    assert results.dropped_groups == {"engineRejected": 2}, "one of each step"
    assert len(resumed.backend.steps) == 5
    whole_step, newest = (find_checkpoint(tmp_path / "checkpoints", step) for step in (1, None))
    assert newest == latest(tmp_path)
    assert newest.name == "rl-step-000001-and-000004-groups"
    kept = read_checkpoint(whole_step)
    assert (kept.step, kept.trained_groups, kept.stage_done) == (1, 0, True), "the end of the run before is still there"
    with pytest.raises(InvalidData, match=r"has learned 4 groups of the next step, .* 12 is no multiple of .* 5:"):
        await resumed.train(recipe(steps=5, prompts_per_step=12, mini_batch_prompts=5))
    assert not resumed.session.state.stage_done, "with one step it was"
    evaluated = spec.model_copy(update={"evaluation": EvaluationSpec(every_steps=1)})
    last = Run.make(tmp_path, rollouts := FakeRollouts(echo), evaluated, resume=latest(tmp_path))
    assert await last.train(evaluated)
    measured = [step for phase, step, _ in rollouts.reports if phase == "eval"]
    assert measured == [2, 3, 4], "not step 1, whose weights are gone"


@pytest.mark.parametrize("unanswered", ["acknowledge", "end_step", "report", "submit"])
async def test_a_stop_at_the_end_of_a_step_saves_it_though_no_manager_answers(
    tmp_path, monkeypatch, caplog, unanswered
):
    """As where a whole cluster is taken away: it was awaited until the process was killed."""
    monkeypatch.setattr("polyrl_trainer.session.LAST_ANSWER_S", 0.1)
    spec = recipe(steps=5)
    run = Run.make(tmp_path, FakeRollouts(echo), spec)
    run.session.checkpoint_every_steps = 100
    answers = getattr(run.rollouts, unanswered)

    async def frozen(*given, **named):
        if len(run.backend.steps) == 2:
            run.session.ask_to_stop()
            await asyncio.sleep(3600)
        return await answers(*given, **named)

    monkeypatch.setattr(run.rollouts, unanswered, frozen)
    async with asyncio.timeout(30):
        assert not await run.train(spec)
    assert latest(tmp_path).name == "rl-step-000002"
    gc.collect()
    assert caplog.text == "", "what was awaited in vain is no error"


async def test_nobody_left_to_deliver_fails_with_what_is_awaited(tmp_path, monkeypatch):
    monkeypatch.setattr("polyrl_trainer.loops.rl_loop.longest_wait_s", lambda recipe, speed: 0.2)
    run = Run.make(tmp_path, FakeRollouts(echo), spec := recipe())

    async def silent():
        await asyncio.sleep(3600)
        yield

    run.rollouts.turns = silent
    with pytest.raises(DeadlineExceeded, match="a batch of step 1"):
        await run.train(spec)


async def test_a_custom_filter_decides_over_whole_groups(tmp_path):
    seen = []

    def odd_only(samples):
        seen.append(len(samples))
        return samples[0].metadata["number"] % 2 == 1

    spec = recipe(max_replaced_groups_per_step=0)
    run = Run.make(tmp_path, FakeRollouts(echo), spec, group_filter=odd_only)
    assert await run.train(spec)
    prompts = dict(run.prompts())
    trained = {int(name.split(".")[0]) for batch in run.backend.micro_batches for name in batch}
    assert {int(prompts[group][:-1]) % 2 for group in trained} == {1}
    assert set(seen) == {3}
    assert set(run.rollouts.discarded.values()) == {DiscardReason.FILTERED}


@pytest.mark.parametrize(("bound", "fails"), [(None, False), (4, True)])
async def test_filtered_groups_are_no_failures_but_have_an_end(tmp_path, bound, fails):
    """Three of four groups are filtered: far more than promptsPerStep, the bound of failures."""

    def reward(sample):
        return float(int(sample.id.partition(".")[2]) if sample.metadata["number"] % 4 == 0 else 1)

    spec = recipe(max_filtered_groups_per_step=bound, steps=2)
    run = Run.make(
        tmp_path,
        FakeRollouts(echo),
        spec,
        reward,
        group_filter=lambda samples: len({one.reward for one in samples}) > 1,
    )
    if fails:
        with pytest.raises(RunFailed, match=r"more than 4 prompts .* did not pass recipe\.algorithm\.groupFilter"):
            await run.train(spec)
        return
    assert await run.train(spec)
    assert run.backend.steps == [12, 12]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert sum(line["rollout/filtered_groups"] for line in lines) > 8
    assert {line["rollout/replaced_groups"] for line in lines} == {0}
    for line in lines:
        filtered = line["rollout/filtered_groups"]
        assert line["rollout/zero_std"] == pytest.approx(filtered / (filtered + 4)), "counted before the filter"


async def test_a_stop_string_ends_what_is_scored_and_learned(tmp_path):
    """The fake engines write the prompt's digits and its `=`, and go on to an end token; the response ends with `=`."""
    seen = []

    def reward(sample):
        seen.append((sample.response, sample.finish_reason, sample.response_length))
        return 1.0

    spec = recipe()
    spec = spec.model_copy(update={"sampling": spec.sampling.model_copy(update={"stop": ["="]})})
    run = Run.make(tmp_path, FakeRollouts(echo), spec, reward)
    run.host.stop = spec.sampling.stop
    assert await run.train(spec)
    stopped = [(length, len(text)) for text, finish, length in seen if text.endswith("=") and finish == "stop"]
    assert stopped
    assert all(length == characters for length, characters in stopped), "no end token behind it"
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert max(line["response_length/max"] for line in lines) <= max(length for *_, length in seen)


async def test_episodes_use_the_calculator_turn_by_turn(tmp_path):
    call = TOKENIZER.encode_text("<calc>1+2</calc>")
    answer = TOKENIZER.encode_text("<result>3</result>")
    rewards = []

    def write(group, index, so_far):
        return [*call, EOS_ID] if not so_far else [TOKENIZER.encode_text("3")[0], EOS_ID]

    def reward(sample):
        rewards.append(sample)
        return 1.0

    spec = recipe(steps=1)
    environment = EnvironmentSpec(class_path="m:C", max_turns=3)
    run = Run.make(tmp_path, FakeRollouts(write), spec, reward, environment=environment)
    assert await run.train(spec)
    assert len(rewards) == 12
    for sample in rewards:
        assert sample.response == "<calc>1+2</calc><result>3</result>3"
        written = sample.tokens[sample.prompt_length + len(call) + 1 :][: len(answer)].tolist()
        assert written == answer
        assert sample.loss_mask.sum() == len(call) + 1 + 2


async def test_an_own_advantage_that_takes_its_time_holds_no_turn_up(tmp_path):
    spec = recipe(steps=1)
    run = Run.make(tmp_path, FakeRollouts(echo), spec)
    on_the_loops_thread = []

    def own(samples):
        on_the_loops_thread.append(threading.current_thread() is threading.main_thread())
        return [np.ones(sample.length) for sample in samples]

    run.parts = replace(run.parts, own=OwnAlgorithm(advantage=own))
    assert await run.train(spec)
    assert set(on_the_loops_thread) == {False}
