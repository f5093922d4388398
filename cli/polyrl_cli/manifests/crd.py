"""The CRD as a YAML file; core holds no YAML."""

from __future__ import annotations

import yaml

from polyrl.manifest.schema.crd import custom_resource_definition


def crd_yaml() -> str:
    """The CustomResourceDefinition as YAML, the same bytes for the same models."""
    header = "# Written by `polyrl crd` from the manifest's models (make crds); do not edit.\n"
    return header + yaml.safe_dump(custom_resource_definition(), sort_keys=False, width=120, allow_unicode=True)
