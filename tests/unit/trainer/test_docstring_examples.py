"""The ports' docstrings carry an example each, and it runs as it stands."""

from __future__ import annotations

import ast
import doctest
import inspect
import sys

import pytest

from polyrl_trainer.backend import TrainingBackend
from polyrl_trainer.client import RolloutClient
from polyrl_trainer.environments import Environment
from polyrl_trainer.user_code.rewards import RewardFunction


@pytest.mark.parametrize(
    "port", [RolloutClient, TrainingBackend, RewardFunction, Environment], ids=lambda c: c.__name__
)
def test_the_example_of_a_port_runs(port: type) -> None:
    names = dict(vars(sys.modules[port.__module__]))
    (example,) = doctest.DocTestFinder(recurse=False).find(port, globs=names)
    assert example.examples, f"{port.__name__} has no example in its docstring"
    assert len(inspect.cleandoc(port.__doc__ or "").splitlines()) < 40, "an example is short"
    report: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(example, out=report.append)
    assert not result.failed, "".join(report)


def test_the_clients_example_calls_what_the_client_has() -> None:
    """It runs on the fake, which has the same port; a method that the client alone renames would go unnoticed."""
    (example,) = doctest.DocTestFinder(recurse=False).find(RolloutClient, globs={})
    tree = ast.parse("".join(step.source for step in example.examples))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    used = [call for call in calls if isinstance(call.func.value, ast.Name) and call.func.value.id == "client"]
    assert len(used) >= 6
    for call in used:
        assert isinstance(call.func, ast.Attribute)
        named = {keyword.arg: None for keyword in call.keywords if keyword.arg}
        inspect.signature(vars(RolloutClient)[call.func.attr]).bind_partial(None, *call.args, **named)
