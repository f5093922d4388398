"""User code that cannot work is refused before the run starts, with a sentence that names it."""

from __future__ import annotations

import itertools

import pytest

from polyrl.errors import InvalidCode
from polyrl_trainer.user_code.loading import load_environment, load_function

fresh_names = (f"user_code_{number}" for number in itertools.count())

BAD = [
    # (reference, file, what the sentence says)
    ("{m}", "", "must look like `module:function`"),
    ("{m}:", "", "must look like `module:function`"),
    ("{m}.py:score", "", "there is no module"),
    ("../{m}:score", "", "must look like `module:function`"),
    ("{m}_other:score", "", "there is no module `{m}_other` in"),
    ("{m}:score", "def reward(sample): return 1", "has no `score`; it has `reward`"),
    ("{m}:score", "x = 1", "has no `score`; it has no functions"),
    ("{m}:score", "score = 1.0", "must be a function, got float"),
    ("{m}:score", "class score: pass", "must be a function, got a class"),
    ("{m}:score", "def score(): return 1", r"is called with 1 argument, but its signature is \(\)"),
    ("{m}:score", "def score(a, b): return 1", r"is called with 1 argument, but its signature is \(a, b\)"),
    ("{m}:score", "def score(sample): yield 1", "must return its result, but it yields"),
    ("{m}:score", "async def score(sample): yield 1", "must return its result, but it yields"),
    ("{m}:score", "def score(sample)\n    return 1", "{m}.py:1: syntax error: expected ':'"),
    (
        "{m}:score",
        "import torch_of_tomorrow",
        "raised ModuleNotFoundError: No module named 'torch_of_tomorrow' .*{m}.py:1",
    ),
    ("{m}:score", "\n\nraise RuntimeError('boom')", "importing `{m}` raised RuntimeError: boom .*{m}.py:3"),
    ("{m}:score", "import sys\nsys.exit(3)", "importing `{m}` raised SystemExit: 3 .*{m}.py:2"),
    ("{m}:score", "1 / 0", "raised ZeroDivisionError: division by zero .*{m}.py:1"),
]


@pytest.mark.parametrize(("reference", "source", "sentence"), BAD, ids=[f"{s[:30]!r}-{r}" for r, s, _ in BAD])
def test_bad_code_is_refused(tmp_path, monkeypatch, reference, source, sentence):
    monkeypatch.syspath_prepend(tmp_path)
    module = next(fresh_names)
    (tmp_path / f"{module}.py").write_text(source)
    with pytest.raises(InvalidCode, match=sentence.format(m=module)) as refusal:
        load_function(reference.format(m=module), tmp_path)
    assert "\n" not in str(refusal.value)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(InvalidCode, match=r"recipe.code.path .*nowhere is no folder"):
        load_function("reward:score", tmp_path / "nowhere")


@pytest.mark.parametrize(
    "source", ["def score(sample): return 1", "async def score(sample, *, k=1): return 1", "score = lambda *a: 1.0"]
)
def test_good_code_is_loaded(tmp_path, monkeypatch, source):
    monkeypatch.syspath_prepend(tmp_path)
    module = next(fresh_names)
    (tmp_path / f"{module}.py").write_text(source)
    assert callable(load_function(f"{module}:score", tmp_path))


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("def play(sample): return 1", "must be a class with `async def run"),
        ("class play: pass", "has no `async def run"),
        ("class play:\n    def run(self, sample, generate): pass", "has no `async def run"),
        ("class play:\n    async def run(self, sample): pass", "is called with 2 arguments, but its signature"),
        ("class play:\n    def __init__(self, model): pass", "is called with 0 arguments, but its signature"),
    ],
)
def test_bad_environments_are_refused(tmp_path, monkeypatch, source, sentence):
    monkeypatch.syspath_prepend(tmp_path)
    module = next(fresh_names)
    (tmp_path / f"{module}.py").write_text(source)
    with pytest.raises(InvalidCode, match=sentence):
        load_environment(f"{module}:play", tmp_path)
