"""`kubectl apply -k` of each example: the job and its files, in a size that kubectl can remember."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("example", ["sort-digits", "gsm8k", "shop-assistant"])
def test_kubectl_applies_an_example_whole(server: Any, example: str) -> None:
    namespace = f"apply-{example}"
    made = server.request("POST", "/api/v1/namespaces", {"kind": "Namespace", "metadata": {"name": namespace}})
    assert made[0] == 201, made
    applied = server.kubectl("apply", "-n", namespace, "-k", ROOT / "examples" / example, "-o", "json")
    assert applied.returncode == 0, applied.stderr
    by_kind = {one["kind"]: one for one in json.loads(applied.stdout)["items"]}
    assert by_kind.keys() == {"ConfigMap", "PolyRLJob"}
    files, recipe = by_kind["ConfigMap"], by_kind["PolyRLJob"]["spec"]["recipe"]
    assert recipe["code"]["configMap"] == files["metadata"]["name"]
    held = {*files["data"], *files.get("binaryData", {})}
    named = {row["path"] for rows in recipe["data"].values() if isinstance(rows, list) for row in rows}
    code = [recipe["reward"]["function"]] + [recipe[key]["classPath"] for key in ("environment",) if key in recipe]
    modules = {f"{name.partition(':')[0]}.py" for name in code}
    assert {path for path in named if not path.startswith("/")} | modules == held
