"""What used to end a run after ten to fifty seconds is refused before it starts, with file and line."""

# ruff: noqa: E501 - a row of a table is one line
from __future__ import annotations

import http.server
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from polyrl.errors import InvalidManifest, UserError
from polyrl_cli.manifests import checks
from polyrl_cli.manifests.load import check_contents, load_manifest
from polyrl_cli.manifests.reward import reward_lines
from tests.integration.local.job_runs import polyrl

GONE_S = 10.0
"""For a killed process to end, on a loaded machine."""

GOOD = """\
apiVersion: polyrl.dev/v1alpha1
kind: PolyRLJob
metadata: {name: sort}
spec:
  recipe:
    mode: sft+rl
    model:
      config: {model_type: qwen2, hidden_size: 64}
      tokenizer: {type: characters, alphabet: "0123456789 "}
    data:
      sft: [{path: sft.jsonl}]
      rl: [{path: rl.jsonl}]
    sft: {steps: 1}
    algorithm: {steps: 1}
    sampling: {maxNewTokens: 8}
    reward: {function: "reward:score", timeoutSeconds: 2}
  rollout:
    engine: {type: embedded, maxContext: 24}
"""


ROWS = 32
"""Prompts of a step, of which fewer are a note."""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "job.yaml").write_text(GOOD)
    (tmp_path / "sft.jsonl").write_text('{"prompt": "1", "response": "1"}\n')
    (tmp_path / "rl.jsonl").write_text('{"prompt": "12", "answer": "12"}\n' * ROWS)
    (tmp_path / "reward.py").write_text("def score(sample):\n    return 1.0\n")
    return tmp_path / "job.yaml"


def refusal(job: Path, *sets: str) -> list[str]:
    with pytest.raises(InvalidManifest) as refused:
        print("not looked at:", check_contents(load_manifest(job, sets), job, sets))
    return [fault.replace(f"{job.parent}/", "") for fault in refused.value.faults]


RL = "job.yaml:12 spec.recipe.data.rl[0].path: rl.jsonl"
SFT = "job.yaml:11 spec.recipe.data.sft[0].path: sft.jsonl"
REWARD = "job.yaml:16 spec.recipe.reward.function: "
ON_A_ROW = f"{REWARD}on rl.jsonl:1, for response '12': "
CONFIG = "--set spec.recipe.model.config."
BAD_ROWS = (
    b'{"prompt": "1"}\n{"question": "1"}\n{"prompt": \n{"prompt": "\xff"}\n'
    b'{"prompt": "x"}\n{"prompt": "12345678901234567890"}\n'
)

# Faults that do not hide each other stand in one job, since each job is looked at by several processes: the files, the
# overrides, and one line for each fault.
JOBS: dict[str, tuple[dict[str, str | bytes], list[str], list[str]]] = {
    "rows of prompts and of answers": (
        {"rl.jsonl": BAD_ROWS, "sft.jsonl": '{"prompt": "1"}\n', "reward.py": "import torch_of_tomorrow\ndef score(s): ...\n"},
        ["spec.recipe.model.config.hidden_sise=8"],
        [
            f"{SFT}:1: field `response` is missing; the row has `prompt`",
            f"{RL}:2: field `prompt` is missing; the row has `question`",
            f"{RL}:3: not valid JSON: Expecting value at column 1",
            f"{RL}:4: not UTF-8 at byte 12 of the line",
            f"{RL}:5: field `prompt`: character 'x' is not in recipe.model.tokenizer.alphabet",
            f"{RL}:6: the prompt has 21 tokens; at most 16 leave room for recipe.sampling.maxNewTokens in rollout.engine.maxContext",
            f"{REWARD}reward:score: importing `reward` raised ModuleNotFoundError: No module named 'torch_of_tomorrow' (reward.py:1)",
            f"{CONFIG}hidden_sise: qwen2 has no such field; did you mean hidden_size?",
        ],
    ),
    "no rows": (
        {"sft.jsonl": "\n\n", "reward.py": "def score(): ...\n"},
        ["spec.recipe.model.config.vocab_size=8"],
        [
            f"{CONFIG}vocab_size: the tokenizer has 14 tokens, the model's vocab_size is 8; make it that",
            f"{SFT}: holds no rows",
            f"{REWARD}reward:score: is called with 1 argument, but its signature is ()",
        ],
    ),
    "adapters of layers that are not there": (
        {"reward.py": "def score(sample):\n    return sample.metadata['anwser']\n"},
        ["spec.recipe.model.lora.targetModules=[q_prok]"],
        [
            "--set spec.recipe.model.lora.targetModules: the model has no linear layer q_prok, only down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj; did you mean q_proj?",
            f"{ON_A_ROW}KeyError: 'anwser' (reward.py:2)",
        ],
    ),
    "a size below nothing": (
        {"reward.py": "import json\ndef score(sample):\n    return json.loads('{')\n"},
        ["spec.recipe.model.config.hidden_size=-3"],
        [
            f"{CONFIG}hidden_size: -3 is less than 1",
            f"{ON_A_ROW}JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1) (reward.py:3)",
        ],
    ),
    "heads that do not divide": (
        {"reward.py": "def score(sample):\n    print('{}')\n    return None\n"},
        ["spec.recipe.model.config.num_attention_heads=3"],
        [
            f"{CONFIG}num_attention_heads: 3 does not divide hidden_size (64)",
            f"{ON_A_ROW}`reward` must be a finite number, got None",
        ],
    ),
    "heads of keys that do not divide": (
        {"reward.py": "import time\ndef score(sample):\n    time.sleep(600)\n"},
        ["spec.recipe.model.config.num_key_value_heads=5"],
        [
            f"{CONFIG}num_key_value_heads: 5 does not divide num_attention_heads (32)",
            f"{ON_A_ROW}no reward within 2 s",
        ],
    ),
    "fewer positions than the context has": (
        {},
        ["spec.recipe.model.config={model_type: gpt2, n_embd: 16, n_layer: 1, n_head: 2, n_positions: 16}"],
        ["job.yaml:18 spec.rollout.engine.maxContext: 24 is more than the 16 positions that the model has, a gpt2: take 16 at most"],
    ),
    "an unknown model": (
        {"reward.py": "import os\ndef score(sample):\n    print('bye', flush=True)\n    os._exit(7)\n"},
        ["spec.recipe.model.config.model_type=qwen22"],
        [
            f"{CONFIG}model_type: transformers knows no 'qwen22'; did you mean qwen2?",
            f"{ON_A_ROW}reward:score: its worker ended (exit 7), 2 times",
        ],
    ),
    "own loss and advantage": (
        {"own.py": "def loss(tokens):\n    return tokens.log_prob\ndef best(samples): return 1.0\n"},
        ["spec.recipe.algorithm.lossFunction=own:loss", "spec.recipe.algorithm.advantageFunction=own:best"],
        [
            "--set spec.recipe.algorithm.lossFunction: own:loss raised AttributeError: 'LossInputs' object has no attribute 'log_prob' (own.py:2)",
            "--set spec.recipe.algorithm.advantageFunction: own:best: must return a list of 3 numbers, got 1.0",
        ],
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_what_ended_a_run_late_is_refused_first(job: Path, name: str) -> None:
    files, overrides, lines = JOBS[name]
    for file, content in files.items():
        (job.parent / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert sorted(refusal(job, *overrides)) == sorted(lines)


@pytest.mark.slow
def test_all_faults_come_at_once_and_a_few_of_a_file(job: Path) -> None:
    (job.parent / "rl.jsonl").write_text('{"promt": "1"}\n' * 40)
    (job.parent / "reward.py").write_text("def score(a, b): ...\n")
    faults = refusal(job, "spec.recipe.model.config.hidden_sise=8")
    assert len(faults) == 5 + 1 + 1 + 1
    assert faults[5] == "job.yaml:12 spec.recipe.data.rl[0].path: rl.jsonl: 35 more rows are refused likewise"


@pytest.mark.slow
def test_code_that_hangs_is_named_and_leaves_no_process(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = job.parent / "pid"
    child = "import os, subprocess, sys, time\nchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    (job.parent / "reward.py").write_text(f"{child}open({str(pid)!r}, 'w').write(str(child.pid))\ntime.sleep(600)\n")
    monkeypatch.setitem(checks.DEADLINES_S, checks.CheckPart.CODE, 4.0)
    assert refusal(job) == ["job.yaml:16 spec.recipe.reward.function: importing reward:score did not end within 6 s"]
    with suppress(psutil.NoSuchProcess):
        left = psutil.Process(int(pid.read_text()))
        deadline = time.monotonic() + GONE_S
        while left.status() != psutil.STATUS_ZOMBIE:  # killed, but it may still sleep on a disk
            assert time.monotonic() < deadline, f"it still is there, {left.status()}"
            time.sleep(0.02)


def test_user_code_is_not_executed_where_it_should_not_be(job: Path) -> None:
    (job.parent / "reward.py").write_text("def score(sample): ...\nraise SystemExit('executed')\n")
    done = polyrl("validate", "job.yaml", "--no-check", cwd=job.parent)
    assert (done.returncode, done.stderr) == (0, "")
    assert "executed" in polyrl("validate", "job.yaml", cwd=job.parent).stderr


def test_where_libraries_are_loaded_already_checks_are_forked(job: Path) -> None:
    code = "import sys\nraise SystemExit('loaded' if 'torch' in sys.modules else 'bare')\n"
    (job.parent / "reward.py").write_text(code)
    (fault,) = refusal(job)
    assert "loaded" in fault


def test_what_a_check_reads_is_not_written_again(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that read the job just then found an empty file, and ended without a word."""
    seen, start = [], checks.start

    def spy(argv: list[str], *args: Any, **named: Any) -> Any:
        status = Path(argv[argv.index("--job") + 1]).stat()
        seen.append((status.st_ino, status.st_mtime_ns, status.st_size))
        return start(argv, *args, **named)

    monkeypatch.setattr(checks, "start", spy)
    assert check_contents(load_manifest(job), job) == []
    assert len(seen) == 3
    assert len(set(seen)) == 1


def test_what_could_not_be_looked_at_is_said_beside_what_is_wrong(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = checks.start

    def without_end(argv: list[str], *args: Any, **named: Any) -> Any:
        """The others may take longer than the model's would."""
        is_model = argv[argv.index("--part") + 1] == checks.CheckPart.MODEL.value
        return start([sys.executable, "-c", "import time; time.sleep(600)"] if is_model else argv, *args, **named)

    monkeypatch.setattr(checks, "start", without_end)
    monkeypatch.setitem(checks.DEADLINES_S, checks.CheckPart.MODEL, 0.0)
    (job.parent / "reward.py").write_text("def score(): ...\n")
    fault, note = refusal(job)
    assert fault.startswith(REWARD)
    assert note == "note: the check of model did not end within 0 s"


@pytest.mark.slow
def test_without_the_extra_one_note_says_what_was_not_checked(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "import sys\nfor name in ('transformers', 'huggingface_hub', 'torch'): sys.modules[name] = None\n"
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} -c "$(cat {tmp_path}/without.txt)" "$@"\n')
    fake.chmod(0o755)
    (tmp_path / "without.txt").write_text(
        f"{program}import runpy; runpy.run_module('polyrl_trainer.check', run_name='__main__')"
    )
    monkeypatch.setattr(checks, "sys", SimpleNamespace(executable=str(fake)))
    (note,) = check_contents(load_manifest(job), job)
    assert note.startswith(
        "needs the trainer extra (pip install 'polyrl[trainer]'); these checks were not made: the model's config"
    )


class _Judge(http.server.BaseHTTPRequestHandler):
    """Wants a key, and answers with a number."""

    def do_GET(self) -> None:
        right = self.headers.get("Authorization") == "Bearer sesame"
        self.send_response(200 if right else 401)
        self.end_headers()
        self.wfile.write(b"0.75")

    def log_message(self, *_: object) -> None:
        """Silent."""


@pytest.fixture
def judge() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


ASKS = """\
import os, urllib.request
from importlib.util import find_spec

def score(sample):
    print("asked about", sample.response, find_spec("torch") is not None)
    key = {"Authorization": "Bearer " + os.environ["JUDGE_API_KEY"]}
    request = urllib.request.Request(os.environ["JUDGE_URL"] + os.environ["JUDGE_PATH"], headers=key)
    return {"reward": float(urllib.request.urlopen(request).read()), "length": len(sample.response)}
"""


@pytest.mark.slow
def test_a_judge_over_the_network_gets_its_key_and_the_reward_is_shown(job: Path, judge: str) -> None:
    (job.parent / "reward.py").write_text(ASKS)
    sets = ("--set", "spec.recipe.env=[{name: JUDGE_URL}, {name: JUDGE_PATH, value: score}]")
    asked = ("reward", "job.yaml", "--response", "21", *sets)
    done = polyrl(*asked, cwd=job.parent, JUDGE_API_KEY="sesame", JUDGE_URL=judge)
    assert done.returncode == 0, done.stderr
    shown = [line for line in done.stdout.splitlines() if not line.startswith("took ")]
    assert shown == [
        "row       rl.jsonl:1",
        "prompt    '12'",
        "response  '21'",
        "reward    0.75",
        "metric    length 2",
        "printed:",
        "  asked about 21 True",
    ]
    wrong = polyrl(*asked, cwd=job.parent, JUDGE_API_KEY="barley", JUDGE_URL=judge)
    assert wrong.returncode == 1
    assert f"no reward: HTTPError: HTTP Error 401: Unauthorized ({job.parent}/reward.py:8)" in wrong.stdout
    unset = polyrl(*asked, cwd=job.parent, JUDGE_API_KEY="sesame")
    assert (unset.returncode, unset.stderr) == (
        2,
        "--set spec.recipe.env[0].name: JUDGE_URL is not set in your environment; export it, or give it a value\n",
    )


LOUD = """\
def score(sample):
    print("begin" + "x" * 1_000_000 + "the end")
    return {"reward": 1.0, **{f"{'m' * 8}{n}": 1.0 for n in range(300)}}
"""


@pytest.mark.slow
def test_what_a_reward_prints_and_names_is_bounded_and_a_wrong_response_is_the_flags(job: Path) -> None:
    (job.parent / "reward.py").write_text(LOUD)
    done = polyrl("reward", "job.yaml", cwd=job.parent)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) < 50_000
    printed = done.stdout[done.stdout.index("printed:") :]
    assert "begin" in printed
    assert "the end" in printed
    assert "bytes left out" in printed
    assert "250 metrics more" in done.stdout
    refused = polyrl("reward", "job.yaml", "--response", "12 x", cwd=job.parent)
    assert refused.returncode == 2
    assert refused.stderr.startswith("--response: ")
    assert len(refused.stderr.splitlines()) == 1


def test_without_the_models_tokenizer_rows_are_read_and_it_is_said_what_was_not(
    job: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    text = job.read_text()
    begin, end = text.index("    model:"), text.index("    data:")
    job.write_text(f"{text[:begin]}    model: {{path: someone/a-model}}\n{text[end:]}")
    sentence = (
        "someone/a-model: not on this machine yet (a run downloads a Hub's model; `hf download someone/a-model` does it now), so no "
        "length was looked at and the reward was not called"
    )
    assert check_contents(load_manifest(job), job) == [sentence]
    with pytest.raises(UserError) as refused:
        reward_lines(job, (), 1, None)
    assert str(refused.value) == sentence
    (job.parent / "rl.jsonl").write_text('{"question": "12", "answer": "12"}\n')
    fault, note = refusal(job)
    assert note == f"note: {sentence}"
    assert "rl.jsonl:1" in fault
    assert "prompt" in fault
