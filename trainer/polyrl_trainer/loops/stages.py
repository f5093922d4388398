"""The stages of a run in order, and the evaluations between them: sft, rl, sft+rl, offline-rl, dpo, reward-model.

    evaluate base ─> SFT ─> checkpoint ─> evaluate afterSft ─> RL, from that checkpoint ─> evaluate afterRl

Each stage has a backend of its own, made from what the stage before it saved, with a fresh optimizer. A resumed run
enters the stage that its checkpoint belongs to, and repeats no evaluation that is in its results.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import structlog
import torch

from polyrl.errors import InvalidData
from polyrl.manifest.parts.optimizer import OptimizerSpec
from polyrl.manifest.recipe import Mode, RecipeSpec
from polyrl.manifest.spec import ReservedSleep
from polyrl_trainer.backends.configs import (
    AdapterConfig,
    EngineConfig,
    Head,
    ModelConfig,
    OptimizerConfig,
    SpecialTokens,
)
from polyrl_trainer.backends.device_load import device_use
from polyrl_trainer.backends.learners import Learner, Learners
from polyrl_trainer.backends.policy import ReferenceScores, device_name
from polyrl_trainer.backends.single_process import SingleProcess
from polyrl_trainer.backends.training_state import read_state
from polyrl_trainer.checkpoints import CRITIC, MODEL
from polyrl_trainer.generation.shared_devices import SharedDevices
from polyrl_trainer.loops.critic import Critic, SharedCritic
from polyrl_trainer.loops.evaluation import PREFIX
from polyrl_trainer.loops.mini_batches import updates_per_step, updates_until
from polyrl_trainer.loops.offline_loop import run_offline_training
from polyrl_trainer.loops.preference_loop import PreferenceStage, run_preference_training
from polyrl_trainer.loops.rl_loop import RlParts, RolloutSide, run_rl_training
from polyrl_trainer.loops.sft_loop import run_sft_training
from polyrl_trainer.losses.own import NOTHING_OWN, OwnAlgorithm
from polyrl_trainer.losses.policy_gradient import pulls_elsewhere
from polyrl_trainer.preparation import Prepared, check_vocabulary, context_fault, model_source
from polyrl_trainer.session import Session
from polyrl_trainer.state import TrainingStage

log = structlog.get_logger()

ModelPlace = Path | Mapping[str, Any]


@dataclass(eq=False)
class Stages:
    """One run's stages."""

    recipe: RecipeSpec
    manifest_dir: Path
    prepared: Prepared
    session: Session
    engine: EngineConfig
    max_context: int
    """Tokens of a row, or of a prompt and its response."""
    learners: Learners = field(default_factory=SingleProcess)
    resumed_from: Path | None = None
    own: OwnAlgorithm = NOTHING_OWN
    sleep: ReservedSleep = ReservedSleep.NEVER
    """When an engine on the learner's devices sleeps; never where there is none."""

    @cached_property
    def devices(self) -> SharedDevices:
        """The learner's, of all stages."""
        return SharedDevices(self.sleep, partial(device_use, torch.device(device_name(self.engine.device))))

    async def run(self, side: RolloutSide | None) -> bool:
        """True when all stages are done, False when the run was asked to stop."""
        mode = self.recipe.mode
        if not await self.session.unless_stopped(self._gathered()):
            return False
        if mode in (Mode.DPO, Mode.REWARD_MODEL):
            return await self._preferences(side)
        if mode.has_sft and not await self._sft(side):
            return False
        return mode is Mode.SFT or await self._rl(side)

    async def _gathered(self) -> bool:
        """Others may take minutes to come; this process hears meanwhile that it is to leave."""
        await self.learners.gather()
        return True

    async def _sft(self, side: RolloutSide | None) -> bool:
        state, sft = self.session.state, self.recipe.sft
        if state.stage is not TrainingStage.SFT:
            return True
        start = model_source(self.recipe, self.manifest_dir)
        with closing(self._backend(start, sft.optimizer, sft.steps)) as backend:
            await self._evaluate("base", side, backend, learns_on=self.devices)
            if not await self._train_sft(side, backend):
                return False
            # With RL to come, this is the same policy as the one that RL starts from.
            await self._evaluate("afterSft", side, backend)
        return not self.session.stop.is_set()

    async def _train_sft(self, side: RolloutSide | None, backend: Learner) -> bool:
        assert self.prepared.conversations is not None, "SFT has its data"

        every = self.recipe.evaluation.every_sft_steps

        async def after_step() -> None:
            if side is not None and side.evaluator is not None:
                await side.evaluator.evaluate_if_due(every, side.versions, backend, learns_on=self.devices)

        if side is not None and side.evaluator is not None:
            await side.evaluator.make_up(every, side.versions, backend, learns_on=self.devices)
        return await run_sft_training(
            backend, self.prepared.conversations, self.recipe.sft, session=self.session, after_step=after_step
        )

    async def _preferences(self, side: RolloutSide | None) -> bool:
        assert self.prepared.pairs is not None, "learning from pairs has its data"
        stage, start = PreferenceStage.of(self.recipe), model_source(self.recipe, self.manifest_dir)
        self.session.enter(stage.stage)
        with ExitStack() as stack:
            backend = stack.enter_context(closing(self._backend(start, stage.optimizer, stage.steps)))
            reference = None
            if self.recipe.mode is Mode.DPO:
                reference = stack.enter_context(closing(self._start_of(start, backend)))
            await self._evaluate("base", side, backend, learns_on=self.devices)
            if not await run_preference_training(
                backend, self.prepared.pairs, stage, session=self.session, reference=reference
            ):
                return False
            await self._evaluate("afterDpo", side, backend)
        return not self.session.stop.is_set()

    async def _rl(self, side: RolloutSide | None) -> bool:
        start = self._rl_start()
        self.session.enter(TrainingStage.OFFLINE_RL if self.recipe.mode is Mode.OFFLINE_RL else TrainingStage.RL)
        with ExitStack() as stack:
            critic = stack.enter_context(self._critic(start))
            backend = stack.enter_context(closing(self._rl_backend(start)))
            reference = stack.enter_context(self._reference(start, backend))
            await self._evaluate("base", side, backend, only_without=("afterSft",))
            if self.recipe.algorithm.shares_trunk:
                critic = SharedCritic(backend, self.recipe)
            if not await self._train_rl(side, backend, reference, critic):
                return False
            await self._evaluate("afterRl", side, backend)
        return not self.session.stop.is_set()

    async def _train_rl(
        self, side: RolloutSide | None, backend: Learner, reference: ReferenceScores | None, critic: Critic | None
    ) -> bool:
        prepared = self.prepared
        if self.recipe.mode is Mode.OFFLINE_RL:
            assert prepared.finished is not None, "offline RL has its data"
            return await run_offline_training(
                backend, prepared.finished, self.recipe, self.session, reference=reference, own=self.own
            )
        assert prepared.prompts is not None, "RL has its data"
        assert side is not None, "online RL runs with a manager"
        parts = RlParts(
            **vars(side),
            backend=backend,
            prompts=prepared.prompts,
            tokenizer=prepared.tokenizer,
            reference=reference,
            own=self.own,
            critic=critic,
            devices=self.devices,
        )
        return await run_rl_training(parts, self.recipe, self.session)

    async def _evaluate(
        self,
        moment: str,
        side: RolloutSide | None,
        backend: Learner,
        *,
        only_without: tuple[str, ...] = (),
        learns_on: SharedDevices | None = None,
    ) -> None:
        """Once per moment; skipped when nobody can generate, or when a moment of `only_without` says the same.
        `learns_on` as of the evaluator."""
        done = self.session.state.results.evaluations
        if side is None or side.evaluator is None or self.session.stop.is_set():
            return
        if moment in done or any(other in done for other in only_without):
            return
        if moment == "base" and self.session.state.has_learned:
            return  # rows to evaluate were named when the run went on, and it has learned since its beginning
        await side.versions.ensure_published(backend)
        evaluation = await side.evaluator.evaluate(self.session.state.step, learns_on=learns_on)
        if evaluation is not None:
            done = self.session.state.results.evaluations  # of the state as it is by now
            done[moment] = {name.removeprefix(PREFIX): value for name, value in evaluation.items()}

    def _rl_start(self) -> ModelPlace:
        """What RL learns from and is compared with: the end of SFT if there was one, else the manifest's model."""
        if self.recipe.mode is not Mode.SFT_RL or self.recipe.sft.steps == 0:
            return model_source(self.recipe, self.manifest_dir)
        final = self.session.checkpoints.stage_final(TrainingStage.SFT)
        if final is None:
            raise InvalidData(
                f"{self.session.checkpoints.folder}: lacks the last checkpoint of stage sft, where RL starts"
            )
        return final / MODEL

    def _rl_backend(self, source: ModelPlace) -> Learner:
        algorithm = self.recipe.algorithm
        head: Head = "both" if algorithm.shares_trunk else "tokens"
        # While a critic warms up, the policy's schedule stands still.
        total = updates_until(algorithm, algorithm.steps)
        return self._backend(source, algorithm.optimizer, total, head, ahead=self._ahead())

    def _ahead(self) -> int:
        """Optimizer steps that RL's schedule is ahead of the checkpoint's, whose steps had other mini-batches: it goes
        on from where the steps are."""
        state = self.session.state
        if self.resumed_from is None or not state.has_learned:
            return 0
        taken = read_state(self.resumed_from / MODEL, check=False).step
        now = updates_until(self.recipe.algorithm, state.step, state.trained_groups)
        return 0 if taken <= now <= taken + state.results.skipped_steps else now - taken

    @contextmanager
    def _critic(self, source: ModelPlace) -> Iterator[Critic | None]:
        """On a trunk of its own, which is the policy's at the stage's start."""
        algorithm = self.recipe.algorithm
        if not algorithm.uses_critic or algorithm.shares_trunk:
            yield None
            return
        total = algorithm.steps * updates_per_step(algorithm)
        schedule = OptimizerConfig.from_manifest(algorithm.critic.optimizer, total)
        model = replace(self._model(source), head="value")
        with closing(self.learners.learner(model, self.engine, schedule)) as backend:
            if self.resumed_from is not None and self.session.state.has_learned:
                if not (self.resumed_from / CRITIC).is_dir():
                    raise InvalidData(f"{self.resumed_from}: was saved without a critic, and advantage gae needs one")
                backend.load(self.resumed_from / CRITIC)
            self.session.critic = backend
            yield Critic(backend, self.recipe)
            self.session.critic = None

    def _backend(
        self, source: ModelPlace, optimizer: OptimizerSpec, total_steps: int, head: Head = "tokens", ahead: int = 0
    ) -> Learner:
        """The stage's backend, where its checkpoint stands if the run is resumed within this stage."""
        schedule = OptimizerConfig.from_manifest(optimizer, max(1, total_steps), ahead)
        head = "value" if self.recipe.mode is Mode.REWARD_MODEL else head
        model = replace(self._model(source), head=head)
        backend = self.learners.learner(model, self.engine, schedule)
        config = json.loads(backend.serving_files()["config.json"])
        check_vocabulary(self.prepared.tokenizer, int(config["vocab_size"]))
        if fault := context_fault(config, self.max_context):
            raise InvalidData(f"rollout.engine.maxContext: {fault}")
        if self.resumed_from is not None and self.session.state.has_learned:
            backend.load(self.resumed_from / MODEL)
            self.resumed_from = None
        return backend

    @contextmanager
    def _reference(self, source: ModelPlace, backend: Learner) -> Iterator[ReferenceScores | None]:
        if self.recipe.algorithm.kl_coefficient == 0:
            yield None
            return
        algorithm = self.recipe.algorithm
        if pulls_elsewhere(algorithm):
            log.warning(
                "this KL penalty does not pull towards the reference as it should",
                estimator=algorithm.kl_estimator.value,
                better="k2 or k3Ratio, see recipe.algorithm.klEstimator",
            )
        with closing(self._start_of(source, backend)) as reference:
            yield reference

    def _start_of(self, source: ModelPlace, backend: Learner) -> ReferenceScores:
        """What the stage learns from, and is compared with."""
        if self.recipe.model.lora is not None:
            return backend.below_adapters()
        return self.learners.reference(self._model(source), self.engine)

    def _model(self, source: ModelPlace) -> ModelConfig:
        tokenizer = self.prepared.tokenizer
        adapter = AdapterConfig.from_manifest(self.recipe.model)
        if adapter is not None and source != model_source(self.recipe, self.manifest_dir):
            adapter = replace(adapter, base=None)  # a stage's own result, which nobody else has
        special = SpecialTokens(tokenizer.pad_id, tokenizer.bos_id, eos=tokenizer.eos_id, ends=tokenizer.end_ids)
        return ModelConfig(
            source,
            self.recipe.seed,
            dtype=self.recipe.model.dtype,
            special_tokens=special,
            vocabulary=tokenizer.vocabulary,
            adapter=adapter,
        )
