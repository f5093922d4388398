"""`polyrl init --task chat` as a user with a model in a folder goes through it: a tiny Qwen2 with a real tokenizer and
chat template stands for the Hub's model, a script for nvidia-smi. No GPU and no network are needed, and none was there.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from polyrl_cli.manifests.starter import CHAT_ROWS
from tests.integration.local.job_runs import polyrl

DEADLINE_S = 500
REFUSED_WITHIN_S = 60.0
"""Three seconds of work; the rest is for a machine that does other things as well."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ONE_GPU = """#!/bin/sh
case "$1" in
  -L) echo 'GPU 0: NVIDIA GeForce RTX 4090 (UUID: GPU-aaaa)' ;;
  *) echo 'GPU-aaaa, 24564' ;;
esac
"""
SMALL = {
    "spec.recipe.algorithm.steps": 2,
    "spec.recipe.algorithm.promptsPerStep": 4,
    "spec.recipe.sampling.samplesPerPrompt": 4,
    "spec.recipe.sampling.maxNewTokens": 8,
    "spec.rollout.replicas": 0,
}


def make_model(folder: Path) -> None:
    """What `hf download` of a chat model leaves, a thousand times smaller."""
    bytes_of_text = Tokenizer(models.BPE())
    bytes_of_text.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_of_text.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet)
    bytes_of_text.train_from_iterator(CHAT_ROWS.splitlines(), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_of_text, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=1, eos_token_id=tokenizer.eos_token_id, **sizes)
    Qwen2ForCausalLM(config).save_pretrained(folder)


@pytest.mark.slow
def test_with_a_folder_it_is_valid_runs_and_answers(tmp_path: Path) -> None:
    job, model, run = tmp_path / "my-chat" / "job.yaml", tmp_path / "tiny", tmp_path / "run"
    make_model(model)
    assert polyrl("init", job.parent, "--task", "chat").returncode == 0
    sets = [f"--set=spec.recipe.model.path={model}", *(f"--set={path}={value}" for path, value in SMALL.items())]
    checked = polyrl("validate", job, *sets)
    assert (checked.returncode, "is valid" in checked.stdout) == (0, True), checked.stdout + checked.stderr
    done = polyrl("run", job, *sets, "--out", run)
    assert done.returncode == 0, done.stdout + done.stderr
    answered = polyrl("generate", run, "What is 3 + 4?")
    assert (answered.returncode, answered.stderr) == (0, ""), answered.stderr
    tokenizer = AutoTokenizer.from_pretrained(max((run / "checkpoints").glob("[!.]*/model")))
    sample = json.loads((run / "samples.jsonl").read_text().splitlines()[0])
    system = {"role": "system", "content": "Answer with the number only."}
    conversation = [system, {"role": "user", "content": sample["prompt"]}]
    read = tokenizer.apply_chat_template(conversation, add_generation_prompt=True)["input_ids"]
    assert sample["prompt_tokens"] == len(read), "rows go through the model's own chat template"
    a_learner_without_its_gpu_is_refused(tmp_path, job, sets)


def a_learner_without_its_gpu_is_refused(folder: Path, job: Path, sets: list[str]) -> None:
    """It is given one that only the stand-in for nvidia-smi has, and must not learn on the CPU instead."""
    (folder / "bin").mkdir()
    stand_in, run = folder / "bin" / "nvidia-smi", folder / "on-a-gpu"
    stand_in.write_text(ONE_GPU)
    stand_in.chmod(0o755)
    path = {"PATH": f"{stand_in.parent}:{os.environ['PATH']}"}
    refused = polyrl("run", job, "--no-check", *sets, "--out", run, **path)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert "the learner was given a GPU, and torch" in refused.stderr
    assert "GPUs (NVIDIA GeForce RTX 4090): the learner 0" in refused.stdout
    assert json.loads((run / "summary.json").read_text())["gpus"] == {"trainer": ["0"]}
    assert "start trainer on GPU 0" in (run / "fleet.jsonl").read_text()


@pytest.mark.slow
def test_without_network_the_hubs_name_is_refused_in_one_sentence_within_seconds(tmp_path: Path) -> None:
    job = tmp_path / "my-chat" / "job.yaml"
    assert polyrl("init", job.parent, "--task", "chat").returncode == 0
    began = time.monotonic()
    nobody = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "cache")}
    refused = polyrl("run", job, "--out", tmp_path / "run", **nobody)
    assert time.monotonic() - began < REFUSED_WITHIN_S
    assert refused.returncode == 2
    (sentence,) = refused.stderr.strip().splitlines()
    assert sentence.startswith("recipe.model.path: Qwen/Qwen2.5-0.5B-Instruct is no folder beside the manifest")
    assert "name a folder, a mirror (HF_ENDPOINT), or download it before" in sentence
    assert not (tmp_path / "run").exists()
