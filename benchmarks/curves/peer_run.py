"""GRPO by a peer on the example's prompts and reward: a process in TRL's environment.

    python peer_run.py SETTINGS.json OUT.json      SETTINGS: fields of `Settings`

`trl` is TRL's own trainer, which generates by transformers; `hf` the loop that one writes first, with the loss of
`learner/peers.py`. OUT gets the mean reward of each step, and versions.
"""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset

sys.path.append(str(Path(__file__).parents[1] / "learner"))
from peers import QUIET, padded, plain_loss


@dataclass(frozen=True)
class Settings:
    """Of one run; those of the manifest have its meaning."""

    side: str
    seed: int
    model: str
    rewards: str
    """File with the reward function."""
    prompts_file: str
    """JSON lines."""
    steps: int
    prompts: int
    mini_batches: int
    group: int
    limit: int
    rate: float
    warmup: int
    betas: tuple[float, float]
    threads: int

    @property
    def updates(self) -> int:
        return self.steps * self.mini_batches


class Rewards:
    """The function, and the mean of each step."""

    def __init__(self, file: Path) -> None:
        spec = importlib.util.spec_from_file_location("example_reward", file)
        assert spec is not None
        assert spec.loader is not None
        self._module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self._module)
        self.means: list[float] = []

    def score(self, prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        found = [
            float(self._module.score(SimpleNamespace(prompt=prompt, response=response))["reward"])
            for prompt, response in zip(prompts, completions, strict=True)
        ]
        self.means.append(sum(found) / len(found))
        print(f"step {len(self.means)}: {self.means[-1]:.3f}", file=sys.stderr, flush=True)
        return found


def read_prompts(settings: Settings) -> list[str]:
    return [json.loads(line)["prompt"] for line in Path(settings.prompts_file).read_text().splitlines()]


def load(settings: Settings) -> tuple[Any, Any, torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
    """Model, tokenizer, optimizer, and the manifest's linear schedule."""
    model = transformers.AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.rate, betas=settings.betas, weight_decay=0.0)

    def share(update: int) -> float:
        if update < settings.warmup:
            return (update + 1) / (settings.warmup + 1)
        return 1 - (update - settings.warmup) / (settings.updates - settings.warmup)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    return model, transformers.AutoTokenizer.from_pretrained(settings.model), optimizer, schedule


def run_trl(settings: Settings, folder: Path, rewards: Rewards) -> None:
    model, tokenizer, optimizer, schedule = load(settings)
    config = trl.GRPOConfig(
        output_dir=str(folder),
        seed=settings.seed,
        per_device_train_batch_size=settings.prompts * settings.group // settings.mini_batches,
        gradient_accumulation_steps=1,
        steps_per_generation=settings.mini_batches,
        num_iterations=1,
        num_generations=settings.group,
        max_completion_length=settings.limit,
        max_steps=settings.updates,
        max_grad_norm=1.0,
        loss_type="grpo",
        scale_rewards="group",
        beta=0.0,
        epsilon=0.2,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        repetition_penalty=1.0,
        mask_truncated_completions=False,
        vllm_importance_sampling_correction=False,
        logging_strategy="no",
        **QUIET,
    )
    trl.GRPOTrainer(
        model,
        [rewards.score],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in read_prompts(settings)]),
        processing_class=tokenizer,
        optimizers=(optimizer, schedule),
    ).train()


def run_hf(settings: Settings, _: Path, rewards: Rewards) -> None:
    transformers.set_seed(settings.seed)
    model, tokenizer, optimizer, schedule = load(settings)
    chance = random.Random(settings.seed)
    order = shuffled(read_prompts(settings), chance)
    for _step in range(settings.steps):
        prompts = [prompt for prompt in (next(order) for _ in range(settings.prompts)) for _ in range(settings.group)]
        samples = draw(model, tokenizer, prompts, settings.limit)
        texts = [tokenizer.decode(one["response"], skip_special_tokens=True) for one in samples]
        for one, advantage in zip(samples, advantages(rewards.score(prompts, texts), settings.group), strict=True):
            one["advantage"] = advantage
        chance.shuffle(samples)  # as TRL does: a mini-batch of whole groups would see half of the prompts
        size = len(samples) // settings.mini_batches
        for first in range(0, len(samples), size):
            plain_loss(model, samples[first : first + size]).div(size).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()


def shuffled(prompts: list[str], chance: random.Random) -> Iterator[str]:
    while True:
        chance.shuffle(prompts)
        yield from prompts


@torch.no_grad()
def draw(model: Any, tokenizer: Any, prompts: list[str], limit: int) -> list[dict[str, Any]]:
    """Samples of temperature 1, with their logprobs."""
    rows = tokenizer(prompts)["input_ids"]
    ids, there = padded(rows, tokenizer.pad_token_id, left=True), padded([[1] * len(one) for one in rows], left=True)
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": limit}
    drawn = model.generate(
        input_ids=ids,
        attention_mask=there,
        pad_token_id=tokenizer.pad_token_id,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    answers = drawn.sequences[:, ids.shape[1] :]
    log_probs = model.compute_transition_scores(drawn.sequences, drawn.scores, normalize_logits=True)
    is_end = (answers == tokenizer.eos_token_id).int()
    lengths = ((is_end.cumsum(1) - is_end) == 0).sum(1).tolist()
    return [
        {
            "prompt": rows[row],
            "response": answers[row, :length].tolist(),
            "old": log_probs[row, :length].tolist(),
        }
        for row, length in enumerate(lengths)
    ]


def advantages(rewards: list[float], group: int) -> list[float]:
    grouped = torch.tensor(rewards).view(-1, group)
    centred = grouped - grouped.mean(1, keepdim=True)
    return [float(value) for value in (centred / (grouped.std(1, keepdim=True) + 1e-4)).flatten()]


def main() -> None:
    settings = Settings(**json.loads(Path(sys.argv[1]).read_text()))
    out = Path(sys.argv[2])
    torch.set_num_threads(settings.threads)
    rewards = Rewards(Path(settings.rewards))
    {"trl": run_trl, "hf": run_hf}[settings.side](settings, out.with_suffix(""), rewards)
    versions = {name: version(name) for name in ("trl", "transformers", "torch")}
    found = {"rewards": rewards.means, "settings": asdict(settings), "versions": versions}
    partial = out.with_suffix(".partial")  # a run that was cut off is no run
    partial.write_text(json.dumps(found))
    partial.replace(out)


if __name__ == "__main__":
    main()
