"""What must hold between fields: one list, read by pydantic on a laptop and by the API server as CEL.

`replicas` out of its bounds is no broken rule: it is clamped, for an autoscaler must not get an opaque refusal.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from polyrl.manifest.rules.fleet import FLEET_RULES
from polyrl.manifest.rules.recipe import RECIPE_RULES
from polyrl.manifest.rules.rule import Rule
from polyrl.manifest.spec import JobSpec

RULES: Final = RECIPE_RULES + FLEET_RULES


def broken_rules(spec: JobSpec) -> Iterator[tuple[Rule, str]]:
    """Each rule that `spec` breaks, with its sentence, in the order of RULES."""
    return ((rule, rule.sentence(spec)) for rule in RULES if not rule.holds(spec))
