"""Code that a model's folder brings is never run, and nobody is asked whether it should be."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from polyrl.history.model_card import ORIGIN, model_origin
from polyrl.manifest.job import PolyRLJob
from polyrl.testing.job_values import raw_job

ROOT = Path(__file__).parents[2]
PACKAGES = ["core", "cli", "operator", "rollout", "trainer"]
SECONDS = 120.0


def loads() -> dict[str, ast.Call]:
    """Every call of `from_pretrained` in production, by its place."""
    found = {}
    for file in (file for package in PACKAGES for file in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "from_pretrained"
            ):
                found[f"{file.relative_to(ROOT)}:{node.lineno}"] = node
    return found


def test_every_load_says_that_code_is_not_trusted() -> None:
    calls = loads()
    assert len(calls) >= 6
    for place, call in calls.items():
        written = ast.unparse(call)
        if "GenerationConfig" in written or "type(model)" in written:
            continue  # of a class that is known already
        assert "trust_remote_code=False" in written, place


def test_every_load_of_weights_takes_safetensors_and_no_kernels_of_a_hub() -> None:
    written = {place: ast.unparse(call) for place, call in loads().items()}
    weights = {
        place: call for place, call in written.items() if re.search("Model|MODEL|type", call.split("(folder")[0])
    }
    assert len(weights) == 3, written
    for place, call in weights.items():
        assert "use_safetensors=True" in call, place
        assert "attn_implementation=" in call, place


def all_of(terminal: int) -> str:
    """What was written to a terminal that everybody has left: the kernel hands it on a while after it was written."""
    pieces = []
    with open(terminal, "rb", buffering=0) as window, suppress(OSError):  # which is how a terminal ends
        while piece := window.read(65536):
            pieces.append(piece)
    return b"".join(pieces).decode(errors="replace")


@pytest.mark.timeout(2 * SECONDS)
def test_generate_from_a_folder_with_code_is_refused_on_a_terminal(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    ran = tmp_path / "ran"
    (model / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Own: pass\n")
    (model / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "evil.Own"}}))
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["evil.Own", None]}}
    (model / "tokenizer_config.json").write_text(json.dumps(own))
    (model / ORIGIN).write_bytes(
        msgspec.json.encode(model_origin(PolyRLJob.model_validate(raw_job()), "rl", step=1, chat=False, version="0"))
    )
    parent, child = os.openpty()
    os.write(parent, b"y\ny\ny\n")
    command = [sys.executable, "-c", "from polyrl_cli.app import main; main()", "generate", str(model), "hi"]
    done = subprocess.run(command, stdin=child, stdout=child, stderr=child, timeout=SECONDS, check=False)
    os.close(child)
    printed = all_of(parent)
    assert done.returncode == 2, printed
    assert "is not run" in " ".join(printed.split())
    assert "Traceback" not in printed
    assert not ran.exists()
