"""What an operator is told once, when it is installed: images and the cluster's own habits.

Refuses to hold: anything that a job says (see `polyrl.manifest`). Read next: `objects`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Of one operator, for all jobs."""

    manager_image: str
    trainer_image: str
    rollout_image: str
    """Default images; a template's own `image` wins."""
    image_pull_policy: str = "IfNotPresent"
    cluster_domain: str = "cluster.local"
    trainer_priority_class: str = ""
    rollout_priority_class: str = ""
    """Names of PriorityClasses that the chart made; empty: none."""
