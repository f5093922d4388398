"""Makes a folder of weights a model that anybody can load: tokenizer, chat template, origin, model card."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import msgspec

from polyrl.history.model_card import CARD, ORIGIN, model_card, model_origin
from polyrl.manifest.job import PolyRLJob
from polyrl_trainer.data.tokenizers import Tokenizer
from polyrl_trainer.state import TrainerState


@dataclass(frozen=True)
class ModelFiles:
    """What is the same for every checkpoint of a run."""

    job: PolyRLJob
    tokenizer: Tokenizer
    chat: bool
    """Prompts go through the chat template."""
    system_prompt: str = ""

    def write(self, folder: Path, state: TrainerState) -> None:
        """Beside the weights in `folder`, which are those of `state`."""
        self.tokenizer.save(folder)
        stage, results = state.stage.value, state.results
        origin = model_origin(self.job, stage, state.step, chat=self.chat, version=version("polyrl"))
        origin = msgspec.structs.replace(origin, groups=state.trained_groups, system_prompt=self.system_prompt)
        origin = msgspec.structs.replace(origin, reward=results.reward, evaluations=results.evaluations)
        (folder / ORIGIN).write_bytes(msgspec.json.format(msgspec.json.encode(origin)) + b"\n")
        (folder / CARD).write_text(model_card(origin), encoding="utf-8")
