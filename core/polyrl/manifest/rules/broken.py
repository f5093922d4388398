"""What must hold between fields: one list, read by pydantic on a laptop and by the API server as CEL.

Each rule says the same thing twice, as a Python predicate and as CEL over `self` = spec with defaults filled in; a
property test proves that the two agree.

Refuses to hold: what one field alone can say (bounds and patterns stay on the field), and `replicas` out of its bounds,
which is clamped: an autoscaler must not get an opaque refusal. Read next: `rule`, `recipe_rules`, `fleet_rules`,
`pod_rules`, `transitions`, then `polyrl.manifest.schema.crd`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from polyrl.manifest.rules.fleet import FLEET_RULES
from polyrl.manifest.rules.pods import POD_RULES
from polyrl.manifest.rules.recipe import RECIPE_RULES
from polyrl.manifest.rules.rule import Rule
from polyrl.manifest.spec import JobSpec

RULES: Final = RECIPE_RULES + FLEET_RULES + POD_RULES


def broken_rules(spec: JobSpec) -> Iterator[tuple[Rule, str]]:
    """Each rule that `spec` breaks, with its sentence, in the order of RULES."""
    return ((rule, rule.sentence(spec)) for rule in RULES if not rule.holds(spec))
