"""The CRD as a YAML file. Core holds no YAML, so this is here. Read next: `polyrl.manifest.schema.crd`."""

from __future__ import annotations

import yaml

from polyrl.manifest.schema.crd import custom_resource_definition

_HEADER = "# Written by `polyrl crd` from the manifest's models (make crds); do not edit.\n"
_WIDTH = 120


def crd_yaml() -> str:
    """The CustomResourceDefinition as YAML, the same bytes for the same models."""
    return _HEADER + yaml.safe_dump(custom_resource_definition(), sort_keys=False, width=_WIDTH, allow_unicode=True)
