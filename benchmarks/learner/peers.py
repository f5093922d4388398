"""TRL, and a plain transformers loop, on the batch that PolyRL has: a process in TRL's own environment.

    python peers.py FOLDER      FOLDER/batch.json, FOLDER/model, FOLDER/reference, FOLDER/scorer

It answers each line on stdin, a JSON object, with one on stdout. `{"do": "loss", "kind": ..., "settings": ...}` gives
the loss and the norm of its gradient before clipping; `{"do": "work", "side": "trl" or "hf", "seconds": ...}` takes
whole optimizer steps for so long and gives tokens and CPU seconds.

Only TRL's own code computes what is called TRL's: its trainers are made, and their loss is called with the batch in
place of the one that they would generate. Of generation, rewards and data loading nothing is in the figures.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence

RATE, CLIP = 1e-5, 0.2
QUIET: dict[str, Any] = {"use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}


def padded(rows: list[list[Any]], value: float = 0, *, left: bool = False) -> torch.Tensor:
    side = "left" if left else "right"
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value, padding_side=side)


class Peers:
    """TRL's trainers, made when they are first needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.batch = json.loads((folder / "batch.json").read_text())
        self.micro_batch: int = self.batch["micro_batch"]
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
        self._trainers: dict[str, Any] = {}
        self._plain: Any = None

    def model(self, name: str = "model") -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(self.folder / name, dtype=torch.float32)

    def trainer(self, kind: str) -> Any:
        if kind not in self._trainers:
            self._trainers[kind] = getattr(self, f"_{kind}")()
        return self._trainers[kind]

    def _grpo(self) -> Any:
        config = trl.GRPOConfig(
            output_dir=str(self.folder / "grpo"),
            learning_rate=RATE,
            per_device_train_batch_size=self.micro_batch,
            num_generations=self.micro_batch,
            max_completion_length=self.batch["limit"],
            **QUIET,
        )
        data = Dataset.from_list([{"prompt": "1"}] * self.micro_batch)
        made = trl.GRPOTrainer(
            self.model(), [_no_reward], args=config, train_dataset=data, processing_class=self.tokenizer
        )
        made.current_gradient_accumulation_steps = 1
        made.model.train()
        return made

    def _dpo(self) -> Any:
        config = trl.DPOConfig(output_dir=str(self.folder / "dpo"), learning_rate=RATE, max_length=None, **QUIET)
        data = Dataset.from_list([{"prompt": "1", "chosen": "2", "rejected": "3"}])
        made = trl.DPOTrainer(
            self.model(),
            ref_model=self.model("reference"),
            args=config,
            train_dataset=data,
            processing_class=self.tokenizer,
        )
        made.model.train()
        return made

    def _reward(self) -> Any:
        config = trl.RewardConfig(output_dir=str(self.folder / "reward"), learning_rate=RATE, max_length=None, **QUIET)
        model = transformers.AutoModelForSequenceClassification.from_pretrained(
            self.folder / "scorer", dtype=torch.float32
        )
        data = Dataset.from_list([{"chosen": "12", "rejected": "13"}])
        made = trl.RewardTrainer(model, args=config, train_dataset=data, processing_class=self.tokenizer)
        made.model.train()
        return made

    # --- losses -------------------------------------------------------------------------------------------------------

    def loss(self, kind: str, settings: dict[str, Any]) -> dict[str, float]:
        made = self.trainer(kind)
        for name, value in settings.items():
            setattr(made if hasattr(made, name) else made.args, name, value)
        made.model.zero_grad()
        if kind == "grpo":
            value = made._compute_loss(made.model, self.grpo_inputs(self.batch["samples"]))
        else:
            value = made.compute_loss(made.model, self.pair_inputs(made))
        value.backward()
        gradients = [one.grad for one in made.model.parameters() if one.grad is not None]
        return {"loss": float(value), "norm": float(torch.nn.utils.get_total_norm(gradients))}

    def grpo_inputs(self, samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        prompts, answers = [one["prompt"] for one in samples], [one["response"] for one in samples]
        mask = padded([[1] * len(one) for one in answers])
        return {
            "prompt_ids": padded(prompts, left=True),
            "prompt_mask": padded([[1] * len(one) for one in prompts], left=True),
            "completion_ids": padded(answers),
            "completion_mask": mask,
            "advantages": torch.tensor([one["advantage"] for one in samples]),
            "old_per_token_logps": padded([one["old"] for one in samples]),
            "ref_per_token_logps": padded([one["reference"] for one in samples]),
            "num_items_in_batch": mask.sum(),
        }

    def pair_inputs(self, made: Any) -> dict[str, torch.Tensor]:
        """By TRL's own collator."""
        rows = []
        for pair in self.batch["pairs"]:
            chosen, rejected = pair["chosen"], pair["rejected"]
            if isinstance(made, trl.DPOTrainer):
                rows.append({"prompt_ids": pair["prompt"], "chosen_ids": chosen, "rejected_ids": rejected})
            else:
                both = {"chosen_ids": pair["prompt"] + chosen, "rejected_ids": pair["prompt"] + rejected}
                rows.append({**both, "margin": pair["margin"]})
        collated: dict[str, torch.Tensor] = made.data_collator(rows)
        return collated

    # --- speed --------------------------------------------------------------------------------------------------------

    def work(self, side: str, seconds: float) -> dict[str, float]:
        step = self.trl_step() if side == "trl" else self.plain_step()
        tokens, began, cpu = 0, time.perf_counter(), time.process_time()
        while time.perf_counter() - began < seconds:
            step()
            tokens += sum(len(one["prompt"]) + len(one["response"]) for one in self.batch["samples"])
        return {"tokens": tokens, "cpuSeconds": time.process_time() - cpu, "seconds": time.perf_counter() - began}

    def chunks(self) -> Iterator[list[dict[str, Any]]]:
        samples = self.batch["samples"]
        for first in range(0, len(samples), self.micro_batch):
            yield samples[first : first + self.micro_batch]

    def trl_step(self) -> Callable[[], None]:
        """Of loss type grpo; a generation batch is padded as a whole and then divided, as TRL does."""
        made = self.trainer("grpo")
        made.loss_type, made.beta = "grpo", 0.0
        optimizer = made.optimizer or made.create_optimizer()
        whole = self.grpo_inputs(self.batch["samples"])
        count = len(self.batch["samples"])
        parts = [
            {name: value[first : first + self.micro_batch] if value.dim() else value for name, value in whole.items()}
            for first in range(0, count, self.micro_batch)
        ]
        made.current_gradient_accumulation_steps = len(parts)

        def step() -> None:
            for part in parts:
                made.accelerator.backward(made._compute_loss(made.model, part))
            torch.nn.utils.clip_grad_norm_(made.model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return step

    def plain_step(self) -> Callable[[], None]:
        """What one writes first: padded batches, whole logits, the same loss."""
        if self._plain is None:
            model = self.model().train()
            self._plain = model, torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
        model, optimizer = self._plain

        def step() -> None:
            for chunk in self.chunks():
                plain_loss(model, chunk).div(len(self.batch["samples"])).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return step


def plain_loss(model: Any, samples: list[dict[str, Any]]) -> torch.Tensor:
    """GRPO's, summed over samples."""
    ids = padded([one["prompt"] + one["response"] for one in samples])
    attention = padded([[1] * (len(one["prompt"]) + len(one["response"])) for one in samples])
    mask = padded([[0.0] * len(one["prompt"]) + [1.0] * len(one["response"]) for one in samples])[:, 1:]
    old = padded([[0.0] * len(one["prompt"]) + one["old"] for one in samples])[:, 1:]
    advantages = torch.tensor([one["advantage"] for one in samples]).unsqueeze(1)
    logits = model(input_ids=ids, attention_mask=attention, use_cache=False).logits[:, :-1].float()
    log_probs = torch.log_softmax(logits, -1).gather(2, ids[:, 1:, None]).squeeze(2)
    ratio = torch.exp(log_probs - old)
    per_token = -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return ((per_token * mask).sum(1) / mask.sum(1)).sum()


def _no_reward(completions: list[Any], **_: Any) -> list[float]:
    return [0.0] * len(completions)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    peers = Peers(Path(sys.argv[1]))
    print(json.dumps({name: version(name) for name in ("trl", "transformers", "torch")}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        what = asked.pop("do")
        found = peers.loss(**asked) if what == "loss" else peers.work(**asked)
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
