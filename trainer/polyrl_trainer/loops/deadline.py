"""How long a loop waits for samples before it fails the run and names who was awaited."""

from __future__ import annotations

from typing import Final

from polyrl.manifest.recipe import RecipeSpec

RECOVERY_S: Final = 600.0
"""A fleet that has just lost everything but its reserved engine is back by then."""
FIRST_TOKENS_PER_S: Final = 10.0
"""Speed of one sequence, before any was measured: full engines on GPUs give 20 to 40, the embedded one hundreds."""
MIN_TOKENS_PER_S: Final = 1.0
"""A measurement below it says that answers are short, not that the engines are so slow."""
SLOWDOWN: Final = 2.0
"""What is awaited may run on fewer and fuller engines than what was measured."""


def longest_wait_s(
    recipe: RecipeSpec, tokens_per_s: float | None, max_new_tokens: int = 0, *, judge_s: float = 0.0
) -> float:
    """Seconds in which at least one of the awaited samples is complete, if anything works at all: the longest one of
    the manifest, or of `max_new_tokens`, at the measured speed of a sequence, with its environment, its reward or
    another one that may take `judge_s`, and the user's filter, which may take as long as the reward."""
    speed = FIRST_TOKENS_PER_S if tokens_per_s is None else max(tokens_per_s, MIN_TOKENS_PER_S)
    turns, reward = recipe.environment, recipe.reward
    verdict = reward.timeout_seconds * (1 if recipe.algorithm.filter_function is None else 2) if reward else 0
    user_code = (turns.max_turns * turns.timeout_seconds if turns else 0) + max(verdict, judge_s)
    return RECOVERY_S + SLOWDOWN * max(recipe.sampling.max_new_tokens, max_new_tokens) / speed + user_code
