"""A stranger's first day: an empty folder and an empty home, the command line and nothing else, and no network: in a
namespace without a route, so that whatever would reach out fails. And every wall that people ran into on that day, by
the command that hit it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEADLINE_S = 600
"""Half a minute on two idle cores."""
COMMAND_S = 120
RUN = """
test "$(wc -l </proc/net/route)" -le 1 || echo "there is a route"
polyrl init my-task
polyrl validate my-task/job.yaml
polyrl reward my-task/job.yaml --row 3 --response 227
polyrl run my-task/job.yaml --out runs/one --set spec.recipe.algorithm.steps=3
polyrl ls
polyrl samples runs/one --best --limit 1
polyrl why runs/one
polyrl check runs/one
polyrl report runs/one --out page.html
polyrl export runs/one exported
polyrl generate exported "7>"
"""


class Home:
    """A folder, a home, and `polyrl` in PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.printed = ""
        (folder / "home").mkdir()
        self.environment = {
            "HOME": str(folder / "home"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            **{name: os.environ[name] for name in ("PYTHONPATH", "POLYRL_ALLOW_UNCONFINED") if name in os.environ},
        }

    def __call__(self, *argv: str, timeout_s: float = COMMAND_S) -> subprocess.CompletedProcess[str]:
        where = {"cwd": self.folder, "env": self.environment}
        return subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False, **where)  # type: ignore[call-overload,no-any-return]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """After the day's commands, none of which failed."""
    home = Home(tmp_path_factory.mktemp("stranger"))
    confined = (str(ROOT / "tests/sglang/confine.sh"), "bash", "-euo", "pipefail", "-c", RUN)
    answer = home(*confined, timeout_s=DEADLINE_S)
    assert answer.returncode == 0, answer.stdout[-3000:] + answer.stderr[-3000:]
    home.printed = answer.stdout
    assert ("there is a route" not in answer.stdout) or "warning: no network namespace" in answer.stderr
    return home


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S + 60)
def test_from_nothing_to_a_model_that_answers(home: Home) -> None:
    summary = json.loads((home.folder / "runs/one/summary.json").read_text())
    assert summary["outcome"] == "succeeded"
    panel = home.printed[home.printed.index("my-task  succeeded") :]
    assert "reward " in panel, "the reward is what was learned"
    assert "exact match" not in panel, "which this reward does not give"
    assert "my-task" in (home.folder / "page.html").read_text()
    assert (home.folder / "exported/model.safetensors").is_file()


SHOWN = {
    "what-the-model-writes": ("polyrl samples runs/one --best --limit 1", ("prompt ", "response ", "reward ")),
    "a-sample-with-its-text": ("polyrl explain runs/one 1.0", ("prompt:", "response:")),
    "a-tokenizer-beside-the-model": ("ls exported", ("tokenizer", "config.json", "README.md")),
    "one-row-without-a-run": ("polyrl reward my-task/job.yaml --row 1 --response 000", ("reward    1", "000")),
    "the-version": ("polyrl --version", ("polyrl ",)),
    "runs-on-one-page": ("polyrl ls", ("runs/one", "succeeded", "rl 3/3")),
    "a-run-under-way-or-ended": ("polyrl top runs/one --once", ("my-task", "3/3", "succeeded")),
    "a-run-that-is-done": ("polyrl resume runs/one", ("done, nothing is left to do", "spec.recipe.algorithm.steps=N")),
}
"""What could not be seen: the command, and words that it prints now."""


@pytest.mark.slow
@pytest.mark.parametrize("wall", SHOWN)
def test_what_could_not_be_seen_is_shown(home: Home, wall: str) -> None:
    command, words = SHOWN[wall]
    answer = home(*command.split())
    assert answer.returncode == 0, answer.stderr
    assert [word for word in words if word not in answer.stdout] == []


JOB = "my-task/job.yaml"
BAD_ROWS = {
    "no-prompt": (b'{"promt": "0>"}', "bad.jsonl:1: field `prompt` is missing; the row has `promt`"),
    "no-json": (b'{"prompt":', "bad.jsonl:2: not valid JSON"),
    "no-utf-8": (b'{"prompt": "\xff"}', "bad.jsonl:3: not UTF-8 at byte 12"),
    "strange-letter": (
        b'{"prompt": "x>", "answer": ""}',
        "bad.jsonl:4: field `prompt`: character 'x' is not in recipe.model.tokenizer.alphabet",
    ),
    "long-prompt": (b'{"prompt": "' + b"1" * 40 + b'>", "answer": ""}', "bad.jsonl:5: the prompt has "),
}
"""A row, and what `validate` says of it."""


@pytest.mark.slow
def test_rows_that_no_run_can_use_are_named_before_one_starts(home: Home) -> None:
    (home.folder / "my-task/bad.jsonl").write_bytes(b"\n".join(row for row, _ in BAD_ROWS.values()) + b"\n")
    answer = home("polyrl", "validate", JOB, "--set", "spec.recipe.data.rl=[{path: bad.jsonl}]")
    assert answer.returncode == 2, answer.stdout[-1000:] + answer.stderr[-1000:]
    sentences = answer.stderr.splitlines()
    assert len(sentences) == len(BAD_ROWS), sentences
    assert [words for _, words in BAD_ROWS.values() if not any(words in sentence for sentence in sentences)] == []


BAD_REWARDS = {
    "other-signature": ("def score(a, b, c): return 1", "is called with 1 argument, but its signature is (a, b, c)"),
    "own-frame": ("def score(sample): return sample.nothing", "bad_reward.py:1)"),
    "no-such-function": ("def other(sample): return 1", "defines no score"),
    "does-not-import": ("import nothing_of_the_kind\n\ndef score(sample): return 1", "nothing_of_the_kind"),
}
"""The file of a reward, and what `validate` says of it."""


@pytest.mark.slow
@pytest.mark.parametrize("wall", BAD_REWARDS)
def test_a_reward_that_cannot_be_called_is_named_with_the_users_own_line(home: Home, wall: str) -> None:
    code, words = BAD_REWARDS[wall]
    (home.folder / "my-task/bad_reward.py").write_text(code + "\n")
    answer = home("polyrl", "validate", JOB, "--set", "spec.recipe.reward.function=bad_reward:score")
    assert_refused(answer, words)


REFUSED = {
    "place-of-data": (f"polyrl validate {JOB} --set data=x", "did you mean spec.recipe.data?"),
    "place-of-the-learning-rate": (
        f"polyrl validate {JOB} --set spec.recipe.algorithm.learningRate=1",
        "did you mean spec.recipe.algorithm.optimizer.learningRate?",
    ),
    "words-for-numbers": (f"polyrl validate {JOB} --set spec.recipe.algorithm.steps=many", "is not a whole number"),
    "nobody-generates": (
        f"polyrl run {JOB} --set spec.rollout.maxReplicas=0 --set spec.trainer.reservedEngine=false",
        "nothing would generate",
    ),
    "an-engine-for-other-models": (f"polyrl run {JOB} --set spec.rollout.engine.type=sglang", "recipe.model.path"),
    "more-than-this-machine": (
        f"polyrl run {JOB} --set spec.recipe.model.config.hidden_size=65536",
        "GiB of memory here",
    ),
    "more-than-any-cluster": (f"polyrl validate {JOB} --set spec.rollout.maxReplicas=100000", "the most allowed, 1024"),
    "another-shape": (
        "polyrl resume runs/one --set spec.recipe.model.config.hidden_size=32",
        "was 64 when the run began, 32 now",
    ),
    "no-such-run": ("polyrl resume runs/none", "the newest runs here are runs/one"),
    "no-such-sample": ("polyrl explain runs/one 999.9", "samples of this run are "),
    "the-same-folder-twice": (f"polyrl run {JOB} --out runs/one", "runs/one"),
}
"""The command that ended in a traceback, in silence, or half a minute into a run; and what it says now."""


@pytest.mark.slow
@pytest.mark.parametrize("wall", REFUSED)
def test_what_cannot_be_is_refused_by_a_sentence_that_helps(home: Home, wall: str) -> None:
    command, words = REFUSED[wall]
    assert_refused(home(*command.split()), words)


def assert_refused(answer: subprocess.CompletedProcess[str], words: str) -> None:
    """One sentence, a status for programs, no traceback."""
    assert answer.returncode == 2, answer.stdout[-1000:] + answer.stderr[-1000:]
    assert words in answer.stderr
    assert answer.stderr.strip().count("\n") == 0, answer.stderr
