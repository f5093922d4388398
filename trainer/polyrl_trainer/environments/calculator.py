"""A calculator: the policy ends a turn with `<calc>EXPRESSION</calc>`, and reads `<result>VALUE</result>` in its next.

Names, calls, and powers or numbers large enough to stall the interpreter read `error`.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from typing import Final

from polyrl_trainer.environments.protocol import Generate
from polyrl_trainer.sample import Sample

MAX_EXPRESSION_CHARACTERS: Final = 200
"""Longer ones are no arithmetic that a step of reasoning needs, and deep ones would exhaust the parser's stack."""
MAX_MAGNITUDE: Final = 1e15
"""Above it doubles no longer hold whole numbers exactly."""
_CALL: Final = re.compile(r"<calc>(.*?)(?:</calc>)?\s*\Z", re.DOTALL)

_BINARY: Final[dict[type[ast.operator], Callable[[float, float], float]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class CalculatorEnvironment:
    """Answers calculator calls until the policy ends a turn without one."""

    async def run(self, sample: Sample, generate: Generate) -> None:
        """Plays one episode: every call at the end of a turn gets its result."""
        while (expression := find_call(sample.response)) is not None:
            sample = await generate(f"<result>{calculate(expression)}</result>")


def find_call(response: str) -> str | None:
    """The expression of a call at the very end of the response; None when the last turn calls nothing."""
    last = response.rfind("<calc>")
    match = _CALL.match(response, last) if last >= 0 else None
    return match.group(1) if match and "</calc>" not in match.group(1) else None


def calculate(expression: str) -> str:
    """The value of + - * / // % and parentheses over numbers, or `error`."""
    if len(expression) > MAX_EXPRESSION_CHARACTERS:
        return "error"
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return "error"
    return f"{value:.12g}"


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _bounded(_BINARY[type(op)](_value(left), _value(right)))
    raise ValueError("not arithmetic")


def _bounded(number: float) -> float:
    if not abs(number) <= MAX_MAGNITUDE:
        raise ValueError("too large")
    return number
