"""The trainer Job's podFailurePolicy: which ends of a trainer count, which do not, and which end the job.

Order: disruptions are ignored, the user's rules decide, exit codes by which a trainer said why fail the job.
Refuses to hold: the trainer's exit codes themselves (see its `__main__`).
"""

from __future__ import annotations

from typing import Any, Final

from polyrl.cluster.resources.pods.template import Fields
from polyrl.local.planner import SAID_WHY_EXITS
from polyrl.manifest.cluster import FailurePolicy, FailureRule
from polyrl.worker import HANDED_OVER_EXIT, Role

DISRUPTED: Final[Fields] = {
    "action": "Ignore",
    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
}


def failure_rules(policy: FailurePolicy) -> list[Fields]:
    """Rules in order; the first that matches decides, and without a match the end counts."""
    return [
        DISRUPTED,
        _on_exit("Ignore", HANDED_OVER_EXIT),
        *(_rule(rule) for rule in policy.rules),
        _on_exit("FailJob", *SAID_WHY_EXITS),
    ]


def _on_exit(action: str, *codes: int) -> Fields:
    matched = {"containerName": Role.TRAINER.value, "operator": "In", "values": sorted(codes)}
    return {"action": action, "onExitCodes": matched}


def _rule(rule: FailureRule) -> Fields:
    plain: dict[str, Any] = rule.model_dump(mode="json", by_alias=True, exclude_none=True)
    return plain
