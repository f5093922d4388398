"""Evaluations of the RL loop, and the samples that it keeps as text: exact, apart by set, bounded, awaited."""

from __future__ import annotations

import asyncio
import json

import pytest

from polyrl.manifest.data import EvaluationSampling, EvaluationSpec
from polyrl.manifest.parts.user_code import EnvironmentSpec
from polyrl.manifest.recipe import LoggingSpec, SampleLogSpec
from polyrl.manifest.spec import ReservedSleep
from polyrl.sample import DiscardReason, Finish, Purpose
from polyrl.sample_record import SAMPLES, Chosen, parse_records
from polyrl.wire import unpack_ids
from polyrl_trainer.checkpoints import latest, read_checkpoint
from polyrl_trainer.data.tokenizers import EOS_ID
from polyrl_trainer.generation.shared_devices import SharedDevices
from polyrl_trainer.sample_log import log as sample_log
from polyrl_trainer.testing.fake_rollouts import FakeRollouts
from tests.integration.trainer.loop_run import (
    TOKENIZER,
    Run,
    echo,
    recipe,
    reward_of_length,
)


@pytest.mark.parametrize("sleep", [ReservedSleep.ALWAYS, ReservedSleep.NEVER])
async def test_the_last_answer_of_an_evaluation_comes_when_engines_sleep_if_rows_of_a_file_are_learned_next(
    tmp_path, sleep
):
    spec, rollouts = recipe().model_copy(update={"evaluation": EvaluationSpec(every_steps=2)}), FakeRollouts(echo)
    run = Run.make(tmp_path, rollouts, spec)
    evaluator, versions = run.parts.evaluator, run.parts.versions

    async def before_sft():
        await versions.ensure_published(run.backend)
        return await evaluator.evaluate(0, learns_on=SharedDevices(sleep, lambda: None))

    metrics = await run.beside(before_sft())
    assert metrics["eval/scored"] == 5
    asleep = [at for at, alone in enumerate(rollouts.alone) if alone]
    assert asleep == ([len(rollouts.alone) - 1] if sleep is ReservedSleep.ALWAYS else [])


def records(folder):
    return parse_records((folder / SAMPLES).read_bytes().splitlines())


async def test_a_few_samples_of_each_step_and_all_of_an_evaluation_are_kept_as_text(tmp_path):
    spec = recipe(steps=4).model_copy(update={"evaluation": EvaluationSpec(every_steps=2)})
    run = Run.make(tmp_path, FakeRollouts(echo), spec)
    assert await run.train(spec)
    kept = records(tmp_path)
    trained = [one for one in kept if one.purpose is Purpose.TRAIN]
    assert {one.step for one in trained} == {1, 2, 3, 4}
    for step in (1, 2, 3, 4):
        of_step = [one for one in trained if one.step == step]
        assert 8 <= len(of_step) <= 10, "ten places, of which the best or the worst may be drawn as well"
        assert {Chosen.BEST, Chosen.WORST, Chosen.RANDOM} == {why for one in of_step for why in one.chosen}
        assert {one.versions for one in of_step} == {(step - 1,)}
        assert max(of_step, key=lambda one: one.reward).advantage > 0
    for one in kept:
        assert one.response
        assert one.prompt.startswith(one.response)
        assert (one.finish, one.metrics) == (Finish.STOP, {"exact_match": float(len(one.response) == 2)})
        assert one.reward == float(len(one.response) % 3)
    evaluated = [one for one in kept if one.purpose is Purpose.EVAL]
    assert [(one.step, one.prompt) for one in evaluated] == [(2, f"{number}=") for number in range(5)]
    assert {one.chosen for one in evaluated} == {()}

    state = read_checkpoint(tmp_path / "checkpoints" / "rl-step-000003")
    sample_log.go_back_to(tmp_path / SAMPLES, state, evaluated=True)
    assert records(tmp_path) == [one for one in kept if one.step <= 3]


async def test_samples_are_left_out_by_manifest_and_bounded_in_bytes(tmp_path):
    spec = recipe(steps=60)
    limits = {"per_step": 12, "max_bytes": 65_536, "max_chars": 16}
    bounded = spec.model_copy(update={"logging": LoggingSpec(samples=SampleLogSpec(**limits))})
    run = Run.make(tmp_path / "bounded", FakeRollouts(echo), bounded)
    assert await run.train(bounded)
    steps = list(dict.fromkeys(one.step for one in records(tmp_path / "bounded")))
    assert (tmp_path / "bounded" / SAMPLES).stat().st_size <= 65_536
    assert steps == sorted(steps)
    assert steps[-1] == 60
    assert 10 < len(steps) < 60

    off = SampleLogSpec(per_step=0, evaluation=False)
    spec = recipe(steps=2).model_copy(
        update={"evaluation": EvaluationSpec(every_steps=1), "logging": LoggingSpec(samples=off)}
    )
    run = Run.make(tmp_path / "none", FakeRollouts(echo), spec)
    assert await run.train(spec)
    assert records(tmp_path / "none") == []


async def test_an_evaluation_reports_exact_match_only_where_the_reward_names_it(tmp_path):
    spec = recipe(steps=2).model_copy(update={"evaluation": EvaluationSpec(every_steps=1)})
    run = Run.make(tmp_path, rollouts := FakeRollouts(echo), spec, lambda sample: {"reward": 2.0, "style": 0.5})
    assert await run.train(spec)
    (evaluated,) = [values for phase, _, values in rollouts.reports if phase == "eval"]
    assert (evaluated["eval/reward"], evaluated["eval/style"]) == (2.0, 0.5)
    assert not {"eval/exact_match", "exactMatch"} & evaluated.keys()


async def test_where_the_reward_names_an_exact_match_only_of_some_the_others_count_by_their_rewards(tmp_path):
    """One that names it of right answers alone had 1 in every evaluation."""

    def score(sample):
        named = {"reward": 0.5, "exact_match": 1.0}
        return [named, 1.0, 0.0, 0.0, 0.0][int(sample.id.partition(".")[2])]

    sampling = EvaluationSampling(samples_per_prompt=5)
    spec = recipe(steps=2).model_copy(update={"evaluation": EvaluationSpec(every_steps=1, sampling=sampling)})
    run = Run.make(tmp_path, rollouts := FakeRollouts(echo), spec, score)
    assert await run.train(spec)
    (evaluated,) = [values for phase, _, values in rollouts.reports if phase == "eval"]
    assert evaluated["eval/exact_match"] == evaluated["exactMatch"] == pytest.approx(2 / 5)
    assert evaluated["eval/pass@1"] == pytest.approx(2 / 5)


async def test_episodes_that_were_cut_are_cut_in_evaluations_and_in_kept_texts_too(tmp_path):
    """Those of even prompts go on calling the calculator after their last turn."""
    call = TOKENIZER.encode_text("<calc>1+2</calc>")

    def write(group, index, so_far):
        first = TOKENIZER.decode(unpack_ids(group.prompt_ids).tolist())[0]
        return [*call, EOS_ID] if int(first) % 2 == 0 else [*TOKENIZER.encode_text("3"), EOS_ID]

    spec = recipe(steps=2).model_copy(update={"evaluation": EvaluationSpec(every_steps=1)})
    environment = EnvironmentSpec(class_path="m:C", max_turns=2)
    run = Run.make(tmp_path, rollouts := FakeRollouts(write), spec, lambda sample: 1.0, environment=environment)
    assert await run.train(spec)
    (evaluated,) = [values for phase, _, values in rollouts.reports if phase == "eval"]
    assert evaluated["eval/clip_ratio"] == 0.6, "prompts 0, 2 and 4 of five"
    for one in records(tmp_path):
        assert one.finish is (Finish.LENGTH if int(one.prompt[0]) % 2 == 0 else Finish.STOP)


async def test_sets_of_an_evaluation_are_measured_apart_each_with_its_own_sampling(tmp_path):
    one_set = {"name": "hard", "data": [{"path": "hard.jsonl"}], "sampling": {"samplesPerPrompt": 4, "maxNewTokens": 9}}
    spec = recipe(steps=2).model_copy(
        update={"evaluation": EvaluationSpec.model_validate({"everySteps": 1, "passReward": 2, "sets": [one_set]})}
    )
    run = Run.make(tmp_path, rollouts := FakeRollouts(echo), spec)
    assert await run.train(spec)
    (evaluated,) = [values for phase, _, values in rollouts.reports if phase == "eval"]
    asked = [group for group in rollouts.submitted if group.purpose is Purpose.EVAL]
    assert [(group.n, group.sampling.temperature, group.sampling.max_new_tokens) for group in asked] == [
        *[(1, 0.0, 30)] * 5,
        *[(4, 1.0, 9)] * 3,
    ]
    assert (evaluated["eval/scored"], evaluated["eval/hard/scored"]) == (5, 12)
    kept = [one for one in records(tmp_path) if one.purpose is Purpose.EVAL]
    rewards = [one.reward for one in kept]
    assert evaluated["eval/reward"] == pytest.approx(sum(rewards[:5]) / 5)
    assert evaluated["eval/hard/reward"] == pytest.approx(sum(rewards[5:]) / 12)
    assert evaluated["eval/hard/pass@1"] == pytest.approx(sum(reward >= 2 for reward in rewards[5:]) / 12)
    solved = [any(reward >= 2 for reward in rewards[first : first + 4]) for first in (5, 9, 13)]
    assert evaluated["eval/hard/pass@4"] == pytest.approx(sum(solved) / 3)
    assert "eval/pass@1" not in evaluated


async def test_a_set_whose_own_reward_may_take_an_hour_is_awaited_for_it(tmp_path):
    class Timed(FakeRollouts):
        async def next(self, step, *, purpose, deadline_s, **asked):
            deadlines.append((purpose, deadline_s))
            return await super().next(step, purpose=purpose, deadline_s=deadline_s, **asked)

    deadlines, judge = [], {"function": "j:score", "timeoutSeconds": 3600}
    one_set = {"name": "hard", "data": [{"path": "hard.jsonl"}], "sampling": {}, "reward": judge}
    spec = recipe(steps=2).model_copy(
        update={"evaluation": EvaluationSpec.model_validate({"everySteps": 1, "sets": [one_set]})}
    )
    assert await Run.make(tmp_path, Timed(echo), spec).train(spec)
    longest = [deadline for purpose, deadline in deadlines if purpose is Purpose.EVAL]
    assert longest[0] < 1000, "data.eval has the recipe's reward"
    assert longest[-1] > 3600


@pytest.mark.parametrize(
    ("every", "step", "done", "evaluates"),
    [
        pytest.param(0, 4, False, False, id="never"),
        pytest.param(2, 4, False, True, id="due"),
        pytest.param(2, 3, False, False, id="between"),
        pytest.param(2, 4, True, False, id="the-stage-ends-and-is-evaluated-anyway"),
    ],
)
async def test_when_a_stage_is_evaluated(tmp_path, every, step, done, evaluates):
    run = Run.make(tmp_path, rollouts := FakeRollouts(echo), recipe())
    run.session.state.step, run.session.state.stage_done = step, done
    await run.beside(run.parts.evaluator.evaluate_if_due(every, run.parts.versions, run.backend))
    assert bool(rollouts.reports) == evaluates


class AskedToStop(FakeRollouts):
    """The trainer is asked to stop when the first evaluation waits for its answers, or when it has its numbers."""

    def __init__(self, within):
        super().__init__(echo)
        self.within = within
        self.stop = lambda: None

    async def next(self, step, *, purpose, **asked):
        if purpose is Purpose.EVAL and self.within:
            self.stop()
            await asyncio.Event().wait()
        return await super().next(step, purpose=purpose, **asked)

    async def report(self, phase, *rest):
        await super().report(phase, *rest)
        if phase == "eval":
            self.stop()


@pytest.mark.parametrize("within", [pytest.param(True, id="within it"), pytest.param(False, id="after it")])
async def test_an_evaluation_that_its_trainer_did_not_end_is_made_up_for_by_the_next_one(tmp_path, within):
    spec = recipe(steps=6).model_copy(update={"evaluation": EvaluationSpec(every_steps=2)})
    run = Run.make(tmp_path, AskedToStop(within), spec)
    run.rollouts.stop = run.session.ask_to_stop
    assert not await run.train(spec)
    resumed = Run.make(tmp_path, FakeRollouts(echo, seed=2), spec, resume=latest(tmp_path))
    assert await resumed.train(spec)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    seen = [f"{row['phase']}{row['step']}" for row in rows]
    assert seen == ["rl1", "rl2", "eval2", "rl3", "rl4", "eval4", "rl5", "rl6"]


@pytest.mark.parametrize("unanswered", ["publish", "submit", "end_step"])
async def test_a_stop_in_an_evaluation_saves_its_step_though_no_manager_answers(tmp_path, monkeypatch, unanswered):
    """It was awaited until the process was killed, or for as many times two seconds as there are sets."""
    monkeypatch.setattr("polyrl_trainer.session.LAST_ANSWER_S", 2.0)
    sets = [{"name": f"s{n}", "data": [{"path": "e.jsonl"}], "sampling": {}} for n in range(8)]
    evaluation = EvaluationSpec.model_validate({"everySteps": 2, "sets": sets})
    spec = recipe(steps=6).model_copy(update={"evaluation": evaluation})
    run = Run.make(tmp_path, FakeRollouts(echo), spec)
    run.session.checkpoint_every_steps = 100
    answers = getattr(run.rollouts, unanswered)

    async def frozen(*given, **named):
        if run.session.state.step == 2:
            run.session.ask_to_stop()
            await asyncio.sleep(3600)
        return await answers(*given, **named)

    monkeypatch.setattr(run.rollouts, unanswered, frozen)
    assert not await run.train(spec)
    assert latest(tmp_path).name == "rl-step-000002"
    assert asyncio.get_running_loop().time() - run.session.leave_by + run.session.grace_s < 6.0


async def test_evaluation_is_exact_and_counts_what_it_could_not_score(tmp_path):
    def reward(sample):
        if sample.metadata["number"] == 3:
            raise ValueError("no")
        return reward_of_length(sample)

    spec = recipe()
    lost: list[int] = []

    def lose(group):
        if group.id == 1:
            lost.append(group.id)
            return DiscardReason.ENGINE_REJECTED
        return None

    run = Run.make(tmp_path, FakeRollouts(echo, lose=lose), spec, reward)

    async def work():
        await run.parts.versions.ensure_published(run.backend)
        return await run.parts.evaluator.evaluate(0)

    evaluation = await run.beside(work())
    assert lost == [1]
    assert not +run.parts.supply.dropped, "counted are groups of training"
    assert (evaluation["eval/scored"], evaluation["eval/unscored"]) == (4, 1)
    groups = [group for group in run.rollouts.submitted if group.id not in run.rollouts.discarded]
    lengths = [len(TOKENIZER.decode(echo(group, 0, []))) for group in groups]
    assert evaluation["eval/exact_match"] == sum(length == 2 for length in lengths) / 4
    assert all(group.sampling.temperature == 0 and group.n == 1 for group in groups)


async def test_an_evaluation_waits_for_one_group_at_a_time(tmp_path):
    """All of a set may take far longer than the longest answer, which is what its deadline is made for."""
    spec = recipe(steps=2).model_copy(update={"evaluation": EvaluationSpec(every_steps=1)})
    run = Run.make(tmp_path, rollouts := FakeRollouts(echo), spec)
    asked = []
    give = rollouts.next

    async def noting(step, **how):
        asked.append((how["purpose"], how["min_samples"], how["max_samples"]))
        return await give(step, **how)

    rollouts.next = noting
    assert await run.train(spec)
    of_evaluation = [(least, most) for purpose, least, most in asked if purpose is Purpose.EVAL]
    assert of_evaluation
    assert {least for least, _ in of_evaluation} == {1}
    assert of_evaluation[0] == (1, 5)
