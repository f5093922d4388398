"""`polyrl init`: a first job of one's own in a new folder: manifest, reward, ten rows, and a test of the reward.

The task `digits` runs as it is, on two cores in about a minute, so that whoever changes one thing after another always
has something that ran before; the README shows its manifest. `chat` is the same with a model of a Hub.
"""

from __future__ import annotations

import json
import re
from enum import StrEnum
from pathlib import Path
from shlex import quote
from typing import Final

from polyrl.errors import UserError

MAX_NAME: Final = 46
"""Characters of a job's name."""

MANIFEST: Final = """\
# A small model with random weights learns, by reward alone, to answer "7>" with "777". About a minute on two cores.
# Check it: polyrl validate job.yaml.   Run it: polyrl run job.yaml.   All fields: docs/reference/manifest.md
apiVersion: polyrl.dev/v1alpha1
kind: PolyRLJob
metadata: {name: NAME}
spec:
  recipe:
    model:
      # Yours: `path: FOLDER`, or `path: OWNER/NAME` on a Hub, and neither config nor tokenizer.
      config: {model_type: qwen2, vocab_size: 14, hidden_size: 64, intermediate_size: 256, num_hidden_layers: 2}
      tokenizer: {type: characters, alphabet: "0123456789>"}  # one token each, after <pad>, <bos>, <eos>
    # Rows: `prompt`, and whatever your reward wants to know. Evaluate on other rows than you train on.
    data: {rl: [{path: rows.jsonl}], eval: [{path: rows.jsonl}]}
    # Each step asks every prompt 16 times, and makes likelier what was better than the average of its prompt.
    algorithm: {steps: 60, promptsPerStep: 10, optimizer: {learningRate: 2.0e-3}}
    sampling: {samplesPerPrompt: 16, maxNewTokens: 4}
    reward: {function: "reward:score"}  # reward.py, beside this file
  # Models of real size: type sglang, on a GPU.
  rollout: {engine: {type: embedded, maxContext: 32}}
"""

REWARD_FILE: Final = '''\
"""What an answer is worth: the one function that you write."""


def score(sample):
    """The share of characters that are right. `sample.metadata` holds the row's further fields."""
    wanted = sample.metadata["answer"]
    right = sum(a == b for a, b in zip(sample.response, wanted))
    return right / max(len(wanted), len(sample.response))
'''

TEST_FILE: Final = '''\
"""Try the reward before the model does: python -m pytest test_reward.py"""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # where a run looks for it too
from reward import score  # noqa: E402


@pytest.mark.parametrize(
    ("response", "worth"), [("777", 1.0), ("77", 2 / 3), ("7777", 3 / 4), ("717", 2 / 3), ("123", 0.0), ("", 0.0)]
)
def test_an_answer_is_worth_its_share_of_right_characters(response, worth):
    assert score(SimpleNamespace(prompt="7>", response=response, metadata={"answer": "777"})) == pytest.approx(worth)
'''

CHAT_MANIFEST: Final = """\
# A chat model from a Hub learns to answer sums with nothing but the number. Wants a GPU, and 1 GB of download.
# Check it: polyrl validate job.yaml.   Run it: polyrl run job.yaml.   All fields: docs/reference/manifest.md
apiVersion: polyrl.dev/v1alpha1
kind: PolyRLJob
metadata: {name: NAME}
spec:
  recipe:
    # OWNER/NAME on a Hub, or a folder beside this file.
    model: {path: Qwen/Qwen2.5-0.5B-Instruct}
    # `promptField` names your own column. The system prompt makes each row a conversation.
    data:
      rl: [{path: rows.jsonl, promptField: question, systemPrompt: "Answer with the number only."}]
      eval: [{path: rows.jsonl, promptField: question, systemPrompt: "Answer with the number only."}]
    algorithm: {steps: 20, promptsPerStep: 10, optimizer: {learningRate: 1.0e-6}}
    sampling: {samplesPerPrompt: 8, maxNewTokens: 32}
    reward: {function: "reward:score"}  # reward.py, beside this file
    maxTokensPerMicroBatch: 4096  # of one pass of the learner: it, too, must fit into the GPU
  # The embedded engine generates on the CPU, slowly. With SGLang, on one GPU that it shares with the learner:
  # rollout: {replicas: 0, engine: {type: sglang, maxContext: 256, memFraction: 0.1}}
  rollout: {engine: {type: embedded, maxContext: 256}}
"""

CHAT_REWARD: Final = '''\
"""What an answer is worth: the one function that you write."""

import re


def score(sample):
    """1 for the number alone, a half for a sentence that ends in it; `sample.metadata` holds the row's other fields."""
    wanted = str(sample.metadata["answer"])
    if sample.response.strip() == wanted:
        return 1.0
    numbers = re.findall(r"-?[0-9]+", sample.response)
    return 0.5 if numbers and numbers[-1] == wanted else 0.0
'''

CHAT_TEST: Final = (
    TEST_FILE[: TEST_FILE.index("@pytest")]
    + """\
@pytest.mark.parametrize(
    ("response", "worth"), [("12", 1.0), (" 12\\n", 1.0), ("It is 12.", 0.5), ("13", 0.0), ("", 0.0)]
)
def test_the_number_alone_is_worth_most(response, worth):
    assert score(SimpleNamespace(response=response, metadata={"answer": 12})) == worth
"""
)

CHAT_ROWS: Final = "".join(
    json.dumps({"question": f"What is {one} + {one + 2}?", "answer": 2 * one + 2}) + "\n" for one in range(5, 15)
)

ROWS: Final = "".join(json.dumps({"prompt": f"{digit}>", "answer": f"{digit}" * 3}) + "\n" for digit in range(10))


class Task(StrEnum):
    """What the job is to learn at first."""

    DIGITS = "digits"
    """A small model with random weights repeats a digit; a minute on two cores."""
    CHAT = "chat"
    """A chat model from a Hub answers sums with the number alone; wants a GPU."""


STARTERS: Final = {
    Task.DIGITS: {"job.yaml": MANIFEST, "reward.py": REWARD_FILE, "rows.jsonl": ROWS, "test_reward.py": TEST_FILE},
    Task.CHAT: {
        "job.yaml": CHAT_MANIFEST,
        "reward.py": CHAT_REWARD,
        "rows.jsonl": CHAT_ROWS,
        "test_reward.py": CHAT_TEST,
    },
}


def init_lines(folder: Path, task: Task = Task.DIGITS) -> list[str]:
    """Writes the files and says what to do next. Raises UserError when one of them is there already."""
    name = job_name(folder.resolve().name)
    files = {
        file: content.replace("{name: NAME}", f"{{name: {as_text(name)}}}") for file, content in STARTERS[task].items()
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            if (folder / file).exists():
                raise UserError(f"{folder / file}: is there already; name a new folder")
        for file, content in files.items():
            (folder / file).write_text(content)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror}") from error
    return [f"{folder}: {', '.join(files)}", f"next: polyrl validate {quote(str(folder / 'job.yaml'))}"]


def as_text(name: str) -> str:
    """The name as YAML holds it: in quotes where it would be read as a number, as `007` would, or as `no`."""
    from polyrl_cli.manifests.yaml_source import parse  # --help loads this module, and no YAML

    return name if parse(name, "name").data == name else f'"{name}"'


def job_name(text: str) -> str:
    """A job's name that is as near to the text as names may be."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:MAX_NAME].rstrip("-") or "my-task"
