"""A job whose learner is two pods of one process each, which are two processes here, as a user starts it; one of them
is killed on the way."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import psutil
from transformers import AutoModelForCausalLM

from polyrl.testing.started import StartedProcess, words_of
from tests.integration.local.job_runs import command, environment, rl_rows, write_digits_job

DEADLINE_S = 500.0
POLL_S = 0.05
STEPS = 12
KILL_AFTER_STEP = 3
FOLLOWER = "polyrl_trainer.backends.fsdp"
JOB = f"""\
apiVersion: polyrl.dev/v1alpha1
kind: PolyRLJob
metadata:
  name: ranks
spec:
  recipe:
    mode: sft+rl
    seed: 3
    model:
      config:
        {{model_type: qwen2, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2,
         num_key_value_heads: 2, initializer_range: 0.2}}
      tokenizer: {{type: characters, alphabet: "0123456789="}}
      dtype: float32
    data:
      sft: [{{path: sft.jsonl}}]
      rl: [{{path: rl.jsonl}}]
    sft: {{steps: 4, batchSize: 16, optimizer: {{learningRate: 1e-2}}}}
    algorithm:
      name: ppo
      oldLogProbs: recompute
      steps: {STEPS}
      promptsPerStep: 16
      miniBatchPrompts: 8
      klCoefficient: 0.001
      optimizer: {{learningRate: 1e-2}}
      critic: {{optimizer: {{learningRate: 1e-2}}}}
    sampling: {{samplesPerPrompt: 4, maxNewTokens: 6}}
    reward: {{function: "reward:score"}}
    checkpoint: {{everySteps: 2}}
  rollout:
    replicas: 0
    engine: {{type: embedded, maxContext: 16, kvTokens: 1024}}
  trainer: {{reservedEngine: true, replicas: 2, storage: {{accessMode: ReadWriteMany}}}}
"""


def followers(top: psutil.Process) -> list[psutil.Process]:
    found = []
    for one in top.children(recursive=True):
        try:
            if FOLLOWER in words_of(one):
                found.append(one)
        except psutil.Error:
            continue
    return found


def test_a_killed_rank_costs_its_group_a_restart_and_the_run_nothing(tmp_path: Path) -> None:
    job, run = write_digits_job(tmp_path, JOB), tmp_path / "run"
    argv, env = command("run", job, "--no-check", "--out", run), environment()
    process = StartedProcess(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    deadline = time.monotonic() + DEADLINE_S
    while len(rl_rows(run)) < KILL_AFTER_STEP:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "no step was made"
        time.sleep(POLL_S)
    top = psutil.Process(process.pid)
    (first,) = followers(top)
    first.send_signal(signal.SIGKILL)
    output = process.communicate(timeout=DEADLINE_S)[0]
    assert process.returncode == 0, output
    steps = rl_rows(run)
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    assert "rank 1 of the learner's 2 was ended by SIGKILL" in (run / "logs" / "trainer.log").read_text()
    assert (run / "logs" / "trainer-1.log").is_file(), "a second start of the whole group"
    assert steps[-1]["reward/mean"] > steps[0]["reward/mean"] + 0.05
    # What the ranks serve is what they compute with.
    assert max(row["rollout_corr/k3_kl"] for row in steps) < 1e-5
    assert steps[0]["actor/kl_loss"] < steps[-1]["actor/kl_loss"]
    AutoModelForCausalLM.from_pretrained(run / "checkpoints" / f"rl-step-{STEPS:06d}" / "model")
    assert not psutil.pid_exists(first.pid)
