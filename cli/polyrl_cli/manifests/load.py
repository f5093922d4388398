"""From a file and `--set` flags to a valid `PolyRLJob`, or to every fault at once, each with its line.

    read_source ─> apply_overrides ─> field faults (pydantic) ─┬─> faults in file order
                                      rule faults ─────────────┘
Rules between fields are checked even when single fields are wrong: the wrong ones are taken out, and only rules that
look at none of them speak. So the user never mends one fault to be shown the next.

Refuses to do: anything with the files that a manifest names (see `file_checks`). Read next: `sentences`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from polyrl.errors import InvalidManifest
from polyrl.manifest.base import CLUSTER_ONLY_KEY
from polyrl.manifest.job import API_VERSION, KIND, RULE_ERROR, PolyRLJob
from polyrl.manifest.rules.broken import broken_rules
from polyrl.manifest.rules.rule import Rule
from polyrl.manifest.schema.crd import Schema, manifest_schema
from polyrl.manifest.spec import JobSpec
from polyrl_cli.manifests.fields import unknown_field
from polyrl_cli.manifests.messages import sentence, shown
from polyrl_cli.manifests.overrides import apply_overrides
from polyrl_cli.manifests.yaml_source import FieldPath, ManifestSource, path_text, read_source


@dataclass(frozen=True)
class ManifestFault:
    """One thing that is wrong, at one field."""

    path: FieldPath
    sentence: str


def load_manifest(path: Path, sets: Sequence[str] = ()) -> PolyRLJob:
    """The job that the file describes, with the overrides applied. Raises InvalidManifest with every fault found."""
    return job_of(read_manifest(path, sets))


def read_manifest(path: Path, sets: Sequence[str] = ()) -> ManifestSource:
    """The file's data and lines, with the overrides applied, not yet validated. Raises InvalidManifest."""
    source = read_source(path)
    if source.data is None:
        raise InvalidManifest([f"{path}: is empty; a manifest begins with apiVersion: {API_VERSION}"])
    if not isinstance(source.data, dict):
        line = source.lines[()]
        raise InvalidManifest([f"{path}:{line} holds {shown(source.data)}, not the fields of a manifest (key: value)"])
    # The operator's words to the user; a file that was fetched from a cluster carries them back.
    source.data.pop("status", None)
    apply_overrides(source, sets)
    return source


def job_of(source: ManifestSource) -> PolyRLJob:
    """The job that the source describes. Raises InvalidManifest with every fault found, in file order."""
    try:
        return _validated(source.data)
    except ValidationError as error:
        raise InvalidManifest(fault_lines(source, _faults(source.data, error))) from error


def fault_lines(source: ManifestSource, faults: Sequence[ManifestFault]) -> list[str]:
    """Ready-to-print lines in file order."""
    ordered = sorted(faults, key=lambda fault: source.rank(fault.path))
    return [_one_line(f"{source.place(fault.path)}: {fault.sentence}") for fault in ordered]


def _one_line(text: str) -> str:
    """What cannot be printed as it is, a line break in a field's name for one, is shown as an escape."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def notes(job: PolyRLJob) -> list[str]:
    """What a local run leaves aside: one note that names the cluster-only fields which the user set, or nothing."""
    given = job.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True)
    fields = [path_text(path) for path in _cluster_only(manifest_schema(), given, ())]
    if not fields:
        return []
    return [f"on this machine {', '.join(fields)} {'has' if len(fields) == 1 else 'have'} no effect (cluster only)"]


def _cluster_only(node: Schema, given: Any, path: FieldPath) -> Iterator[FieldPath]:
    for name, child in node.get("properties", {}).items():
        if not isinstance(given, dict) or name not in given:
            continue
        if child.get(CLUSTER_ONLY_KEY):
            yield (*path, name)
        else:
            yield from _cluster_only(child, given[name], (*path, name))


def _validated(data: Any) -> PolyRLJob:
    # Names as in Python would be pruned by the API server, so here they must not pass either.
    return PolyRLJob.model_validate(data, by_alias=True, by_name=False)


def _faults(data: dict[str, Any], error: ValidationError) -> list[ManifestFault]:
    details = error.errors(include_url=False)
    if _is_something_else(data):
        details = [detail for detail in details if detail["loc"] in (("apiVersion",), ("kind",))]
    faults: list[ManifestFault] = []
    wrong: set[FieldPath] = set()
    for detail in details:
        path, said = detail["loc"], ""
        if detail["type"] == "extra_forbidden":
            said, meant = unknown_field(path)
            wrong |= {meant} if meant else set()
        faults.append(ManifestFault(path, said or sentence(detail, path)))
        wrong.add(path[:-1] if detail["type"] == "missing" else path)
    if any(detail["type"] != RULE_ERROR for detail in details):
        faults += _faults_of_rules(data, wrong)
    return faults


def _is_something_else(data: dict[str, Any]) -> bool:
    """Whether this is a manifest of another kind: then its fields are no misspelt ones of ours."""
    kind = str(data.get("kind", KIND))
    return not difflib.get_close_matches(kind.lower(), [KIND.lower()])


def _faults_of_rules(data: dict[str, Any], wrong: set[FieldPath]) -> list[ManifestFault]:
    """Broken rules that look at no wrong field; nothing when the rest is no spec without the wrong fields."""
    rest = deepcopy(data)
    for path in sorted(wrong, key=path_text, reverse=True):
        _remove(rest, path)
    try:
        spec = JobSpec.model_validate(rest.get("spec"), by_alias=True, by_name=False)
    except ValidationError:
        return []
    broken = ((rule, said) for rule, said in broken_rules(spec) if not _looks_at(rule, wrong))
    return [ManifestFault(("spec", *rule.field), said) for rule, said in broken]


def _looks_at(rule: Rule, wrong: set[FieldPath]) -> bool:
    read: set[FieldPath] = {("spec", *field) for field in rule.fields_read() | {rule.field}}
    return any(a[: len(b)] == b or b[: len(a)] == a for a in read for b in wrong)


def _remove(data: Any, path: FieldPath) -> None:
    for key in path[:-1]:
        if isinstance(data, list) and isinstance(key, int) and key < len(data):
            data = data[key]
        else:
            data = data.get(key) if isinstance(data, dict) else None
    if isinstance(data, dict) and path:
        data.pop(path[-1], None)
    elif isinstance(data, list) and path and isinstance(path[-1], int) and path[-1] < len(data):
        del data[path[-1]]
