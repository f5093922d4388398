"""The RL loop over an in-memory rollout side: exact mini-batches, no short step, no silent zero, exact resume."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from polyrl.errors import RunFailed
from polyrl.manifest.data import EvaluationSpec
from polyrl.manifest.parts.user_code import EnvironmentSpec
from polyrl.manifest.recipe import LoggingSpec, RecipeSpec, SampleLogSpec
from polyrl.manifest.spec import ReservedSleep
from polyrl.sample import DiscardReason, Finish, Purpose
from polyrl.sample_record import SAMPLES, Chosen, parse_records
from polyrl.wire import unpack_ids
from polyrl_trainer.backend import StepResult
from polyrl_trainer.backends.weight_stream import write_stream
from polyrl_trainer.checkpoints import Checkpoints, latest, read_checkpoint
from polyrl_trainer.data.buffer import DataBuffer
from polyrl_trainer.data.examples import prepare_prompts
from polyrl_trainer.data.rows import DataRow
from polyrl_trainer.data.tokenizers import EOS_ID, CharacterTokenizer
from polyrl_trainer.environments import CalculatorEnvironment
from polyrl_trainer.generation.runner import UserCodeRunner
from polyrl_trainer.generation.shared_devices import SharedDevices
from polyrl_trainer.generation.supply import GroupSupply
from polyrl_trainer.loops.evaluation import Evaluator
from polyrl_trainer.loops.rl_loop import RlParts, run_rl_training
from polyrl_trainer.losses.own import OwnAlgorithm
from polyrl_trainer.metrics import MetricsLogger
from polyrl_trainer.preparation import EvaluationPrompts
from polyrl_trainer.sample_log import log as sample_log
from polyrl_trainer.sample_log.log import SampleLog
from polyrl_trainer.session import Session, run_beside
from polyrl_trainer.state import TrainerState, TrainingStage
from polyrl_trainer.testing.fake_rollouts import FakeRollouts
from polyrl_trainer.testing.inline_calls import InlineCalls
from polyrl_trainer.testing.memory_publisher import MemoryPublisher
from polyrl_trainer.user_code.episodes import Episodes
from polyrl_trainer.user_code.rewards import CallTimedOut, CustomGroupFilter, Failures, RewardFunction
from polyrl_trainer.user_code.workers.conversations import LocalConversations
from polyrl_trainer.weights.policy_versions import PolicyVersions

TOKENIZER = CharacterTokenizer("0123456789=<>/+acelrstu")
PROMPTS = 23
LONG_TIMEOUT_S = 60.0
"""For user code that answers at once: one that is starved has not hung."""
QUICK_OR_NOT = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


class CountingBackend:
    """Learns nothing; checks that gradients are accumulated and stepped as the port says."""

    def __init__(self) -> None:
        self.micro_batches: list[list] = []
        self.steps: list[int] = []
        self.trained: list[tuple[str, ...]] = []
        self.pending = 0
        self.mini_batches = 1

    def forward_backward(self, batch, loss, temperature=1.0, *, entropy_gradient=False):
        self.micro_batches.append([one.id for one in batch])
        self.pending += len(batch)
        tokens = float(sum(one.loss_mask.sum() for one in batch))
        assert all(one.advantages is not None and one.rollout_log_probs is not None for one in batch)
        old = [one.old_log_probs for one in batch if one.old_log_probs is not None]
        assert not old or {array[0] for array in old} == {len(self.steps) // self.mini_batches * self.mini_batches}
        sums = {"pg_loss": 0.0, "entropy": 0.0, "loss": 0.0, "tokens": tokens}
        return done({**sums, "positions": tokens, "padded_positions": 0.0, "padding_fraction": 0.0})

    def log_probs(self, batch, temperature=1.0):
        """The number of optimizer steps before, in place of a score."""
        assert self.pending == 0
        return done([np.full(one.length, len(self.steps), dtype=np.float32) for one in batch])

    def optim_step(self, normalizer):
        assert self.pending == normalizer, "an optimizer step over another number of samples than it divides by"
        self.steps.append(self.pending)
        self.pending = 0
        return done(StepResult(grad_norm=1.0, learning_rate=0.1))

    def discard_gradients(self):
        self.pending = 0
        return done(None)

    def export_weights(self, room):
        return write_stream({"w": torch.zeros(1)}, room)

    def serving_files(self):
        return {}

    def save(self, folder, *, copied):
        assert self.pending == 0
        (folder / "steps.json").write_text(json.dumps(len(self.steps)))
        return done(None)

    def state_bytes(self):
        return 8

    def load(self, folder):
        self.steps = [0] * json.loads((folder / "steps.json").read_text())


def done(value):
    future = Future()
    future.set_result(value)
    return future


def echo(group, index, so_far):
    """The prompt's digits again, differently long per sample."""
    ids = unpack_ids(group.prompt_ids).tolist()[1:]
    return [*ids[: 1 + (group.id + index) % len(ids)], EOS_ID]


def reward_of_length(sample):
    return {"reward": float(len(sample.response) % 3), "exact_match": float(len(sample.response) == 2)}


def recipe(**changes):
    algorithm = {"steps": 3, "prompts_per_step": 4, "min_micro_batch_samples": 2, **changes}
    return RecipeSpec(
        model={"config": {"model_type": "qwen2"}}, algorithm=algorithm,
        sampling={"samples_per_prompt": 3, "max_new_tokens": 30},
        reward={"function": "r:score"}, evaluation={"every_steps": 0},
    )  # fmt: skip


@dataclass
class Run:
    """A run in memory, and what is left of it."""

    session: Session
    rollouts: FakeRollouts
    backend: CountingBackend
    parts: RlParts
    host: UserCodeRunner

    @classmethod
    def make(
        cls,
        folder,
        rollouts,
        spec,
        reward=reward_of_length,
        resume=None,
        environment=None,
        group_filter=None,
        timeout_s=LONG_TIMEOUT_S,
    ):
        checkpoints = Checkpoints(folder, keep=2)
        checkpoints.start()
        backend, state = CountingBackend(), TrainerState(seed=7, stage=TrainingStage.RL)
        if resume is not None:
            state = read_checkpoint(resume)
            backend.load(resume / "model")
        samples = SampleLog(folder, spec.logging.samples, seed=7)
        session = Session(state, checkpoints, MetricsLogger(folder), 1, rollouts, samples)
        rows = [DataRow(f"f:{number}", {"prompt": f"{number}=", "number": number}) for number in range(PROMPTS)]
        prompts = prepare_prompts(rows, TOKENIZER, 100)
        failures = Failures(state.results.user_code_failures, state.results.first_failures)
        scoring = RewardFunction(InlineCalls(reward), timeout_s=timeout_s, failures=failures)
        calculators = LocalConversations(CalculatorEnvironment(), LONG_TIMEOUT_S)
        episodes = Episodes(calculators, environment.max_turns, tokenizer=TOKENIZER) if environment else None
        custom_filter = (
            CustomGroupFilter(
                InlineCalls(group_filter, whole_groups=True),
                timeout_s=timeout_s,
                samples_per_group=spec.sampling.samples_per_prompt,
            )
            if group_filter
            else None
        )
        host = UserCodeRunner(rollouts, TOKENIZER, reward=scoring, episodes=episodes, group_filter=custom_filter)
        supply = GroupSupply(rollouts, host, session=session)
        parts = RlParts(
            backend=backend,
            prompts=DataBuffer([prompts], [1.0], seed=7),
            tokenizer=TOKENIZER,
            rollouts=rollouts,
            runner=host,
            supply=supply,
            versions=PolicyVersions(MemoryPublisher(), rollouts, session=session),
            evaluator=Evaluator(
                [
                    EvaluationPrompts("", prompts[:5], spec.evaluation.sampling),
                    *(EvaluationPrompts(one.name, prompts[5:8], one.sampling) for one in spec.evaluation.sets),
                ],
                spec,
                tokenizer=TOKENIZER,
                rollouts=rollouts,
                supply=supply,
                session=session,
            ),
        )
        return cls(session, rollouts, backend, parts, host)

    async def beside(self, work):
        try:
            async with asyncio.timeout(60):
                return await run_beside(work, self.host.run(), self.parts.supply.run(), self.parts.versions.run())
        finally:
            await self.session.close_saves()
            self.session.end(self.session.checkpoints.folder.parent, "done")

    async def train(self, spec):
        return await self.beside(run_rl_training(self.parts, spec, self.session))

    def prompts(self):
        """Prompt of every training submission, in order."""
        groups = [group for group in self.rollouts.submitted if group.purpose is Purpose.TRAIN]
        return [(group.id, TOKENIZER.decode(unpack_ids(group.prompt_ids).tolist())) for group in groups]


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
    sample_log.go_back_to(tmp_path / SAMPLES, state)
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


async def test_nobody_left_to_deliver_fails_with_what_is_awaited(tmp_path, monkeypatch):
    monkeypatch.setattr("polyrl_trainer.loops.rl_loop.longest_wait_s", lambda recipe, speed: 0.2)
    run = Run.make(tmp_path, FakeRollouts(echo), spec := recipe())

    async def silent():
        await asyncio.sleep(3600)
        yield

    run.rollouts.turns = silent
    with pytest.raises(TimeoutError):
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
    assert (evaluation["eval/scored"], evaluation["eval/unscored"]) == (4, 1)
    groups = [group for group in run.rollouts.submitted if group.id not in run.rollouts.discarded]
    lengths = [len(TOKENIZER.decode(echo(group, 0, []))) for group in groups]
    assert evaluation["eval/exact_match"] == sum(length == 2 for length in lengths) / 4
    assert all(group.sampling.temperature == 0 and group.n == 1 for group in groups)


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
