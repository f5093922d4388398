"""What is generated from the manifest's models is checked in as the models make it now."""

from __future__ import annotations

from pathlib import Path

from polyrl.manifest.schema.reference_page import manifest_page
from polyrl_cli.manifests.crd import crd_yaml

ROOT = Path(__file__).parents[4]


def test_crd_is_current() -> None:
    assert (ROOT / "crds/polyrljobs.yaml").read_text() == crd_yaml(), "run `make crds`"


def test_reference_page_is_current() -> None:
    assert (ROOT / "docs/reference/manifest.md").read_text() == manifest_page(), "run `make crds`"
