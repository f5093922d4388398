"""The ConfigMap that `recipe.code.configMap` names, made from the files beside a manifest, as kustomize would make it.

It holds the Python files of `code.path` and the data and tokenizer files there that the manifest names. A ConfigMap is
one folder of at most 1 MiB: what does not fit belongs on a volume or in an image, and is refused by its field.
"""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Final

from polyrl.cluster.actions import Object
from polyrl.errors import UserError
from polyrl.manifest.job import PolyRLJob
from polyrl_cli.manifests.file_checks import named_files
from polyrl_cli.manifests.yaml_source import path_text

MAX_BYTES: Final = 1 << 20
"""What the API server takes of data in one ConfigMap."""

_KEY: Final = re.compile(r"[-._a-zA-Z0-9]{1,253}")


def code_config_map(job: PolyRLJob, manifest: Path, namespace: str) -> Object | None:
    """The ConfigMap; None when the manifest names none. Raises UserError for a file that cannot be part of one."""
    name = job.spec.recipe.code.config_map
    if name is None:
        return None
    folder = (manifest.parent / job.spec.recipe.code.path).resolve()
    files = {path.name: path for path in sorted(folder.glob("*.py"))}
    for field, written, _ in named_files(job.spec.recipe):
        file = (manifest.parent / written).resolve()
        if Path(written).is_absolute():
            continue
        if file.parent != folder or not file.is_file():
            raise UserError(
                f"{path_text(field)}: {written} is no file directly in {folder}, so ConfigMap {name} cannot hold it;"
                " use recipe.code.volumeClaim or an image"
            )
        files[file.name] = file
    return _config_map(name, namespace, files)


def _config_map(name: str, namespace: str, files: dict[str, Path]) -> Object:
    data: dict[str, str] = {}
    binary: dict[str, str] = {}
    size = 0
    for key, file in files.items():
        if not _KEY.fullmatch(key):
            raise UserError(f"{file}: a ConfigMap's files are named by letters, digits, dots, dashes and underscores")
        content = file.read_bytes()
        size += len(key) + len(content)
        try:
            data[key] = content.decode()
        except UnicodeDecodeError:
            binary[key] = base64.b64encode(content).decode()
    if size > MAX_BYTES:
        largest = max(files.values(), key=lambda file: file.stat().st_size)
        raise UserError(
            f"spec.recipe.code.configMap: its files have {size:,} bytes, {largest} the most, and a ConfigMap takes"
            f" {MAX_BYTES:,}; use recipe.code.volumeClaim or an image"
        )
    metadata = {"name": name, "namespace": namespace, "labels": {"app.kubernetes.io/part-of": "polyrl"}}
    made: Object = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
    return made | ({"binaryData": binary} if binary else {})
