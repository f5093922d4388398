"""What the environment says about the code under test on a cluster: images, the release's name and namespace."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[3]
IMAGES: Final = os.environ.get("POLYRL_IMAGES", "polyrl.test/ROLE:dev")
"""Reference of the images, with ROLE for each component's name; `make test-e2e` says it."""
ROLES: Final = ("operator", "manager", "trainer", "rollout")
RELEASE: Final = os.environ.get("POLYRL_RELEASE", "polyrl")
OPERATOR_NAMESPACE: Final = os.environ.get("POLYRL_OPERATOR_NAMESPACE", "polyrl-system")


def image(role: str) -> str:
    """Full reference of a component's image."""
    return IMAGES.replace("ROLE", role)
