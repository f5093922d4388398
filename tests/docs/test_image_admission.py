"""The policies of the page on admitting signed images have the form that holds what the page says; no cluster runs
them here."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/how-to/admit-signed-images.md").read_text()
POLICIES: dict[str, dict[str, Any]] = {
    policy["kind"]: policy for policy in map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL))
}
PREFIX = "registry.example.org/polyrl/"
KEY = "-----BEGIN PUBLIC KEY-----\n...\n-----END PUBLIC KEY-----"


def test_there_is_one_policy_for_each_controller() -> None:
    assert {kind: policy["apiVersion"] for kind, policy in POLICIES.items()} == {
        "ClusterPolicy": "kyverno.io/v1",
        "ClusterImagePolicy": "policy.sigstore.dev/v1beta1",
    }


def kyverno() -> dict[str, Any]:
    (rule,) = POLICIES["ClusterPolicy"]["spec"]["rules"]
    (verify,) = rule["verifyImages"]
    return {"resources": rule["match"]["any"][0]["resources"], **verify}


def test_kyverno_refuses_what_is_not_signed_and_what_it_cannot_ask_about() -> None:
    found = kyverno()
    assert POLICIES["ClusterPolicy"]["spec"]["webhookConfiguration"] == {"failurePolicy": "Fail"}
    assert found["resources"] == {"kinds": ["Pod"]}
    assert (found["failureAction"], found["required"], found["verifyDigest"]) == ("Enforce", True, True)


def test_kyverno_believes_the_release_key_alone_and_asks_no_log() -> None:
    (attestor,) = kyverno()["attestors"]
    (entry,) = attestor["entries"]
    assert attestor["count"] == 1
    assert entry["keys"] == {"publicKeys": KEY, "rekor": {"ignoreTlog": True}, "ctlog": {"ignoreSCT": True}}


def test_the_policy_controller_enforces_the_release_key_alone_and_asks_no_log() -> None:
    spec = POLICIES["ClusterImagePolicy"]["spec"]
    (authority,) = spec["authorities"]
    assert spec["mode"] == "enforce"
    assert authority.keys() == {"name", "key"}
    assert authority["key"] == {"hashAlgorithm": "sha256", "data": f"{KEY}\n"}


@pytest.mark.parametrize("role", ["operator", "manager", "trainer", "rollout"])
def test_every_image_of_a_release_is_meant(role: str) -> None:
    patterns = [
        *kyverno()["imageReferences"],
        *(one["glob"] for one in POLICIES["ClusterImagePolicy"]["spec"]["images"]),
    ]
    assert len(patterns) == 2
    for reference in (f"{PREFIX}{role}:1.2.3", f"{PREFIX}{role}@sha256:{64 * 'a'}"):
        assert [pattern for pattern in patterns if not fnmatchcase(reference, pattern)] == []
    assert [pattern for pattern in patterns if fnmatchcase("registry.example.org/polyrl-not/operator:1", pattern)] == []
