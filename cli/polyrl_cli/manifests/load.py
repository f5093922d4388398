"""From a file and `--set` flags to a valid `PolyRLJob`, or to every fault at once, each with its line.

Rules between fields are checked even when single fields are wrong: the wrong ones are taken out, and only rules that
read none of them are checked. So the user never mends one fault to be shown the next.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from polyrl.errors import InvalidManifest
from polyrl.history.steps import wanted_steps
from polyrl.manifest.base import CLUSTER_ONLY_KEY
from polyrl.manifest.cluster import gpus_asked_for
from polyrl.manifest.job import API_VERSION, KIND, RULE_ERROR, PolyRLJob, remove_field
from polyrl.manifest.recipe import ModelSpec, RecipeSpec
from polyrl.manifest.rules.between_fields import broken_rules
from polyrl.manifest.rules.rule import Rule
from polyrl.manifest.rules.template_gpus import template_notes
from polyrl.manifest.schema.crd import Schema, manifest_schema
from polyrl.manifest.spec import JobSpec, ReservedSleep, TrainerSpec
from polyrl_cli.manifests.checks import check_job, missing_sinks, unset_variables
from polyrl_cli.manifests.file_checks import absolute_paths_elsewhere, file_faults
from polyrl_cli.manifests.messages import node_at, sentence, shown, unknown_field
from polyrl_cli.manifests.model_size import size_notes
from polyrl_cli.manifests.yaml_source import (
    MAX_FAULTS,
    FieldPath,
    ManifestFault,
    ManifestSource,
    few,
    parse,
    path_text,
    read_source,
)
from polyrl_trainer.data.hub import is_fetched

PROCESSES: Final = "processesPerPod"
_STEP: Final = re.compile(r"(?:^|\.)([A-Za-z_][A-Za-z0-9_]*)|\[([0-9]{1,4})\]")


def load_manifest(path: Path, sets: Sequence[str] = ()) -> PolyRLJob:
    """The job that the file describes, with the overrides applied. Raises InvalidManifest with every fault found."""
    return job_of(read_manifest(path, sets))


def load_for_this_machine(path: Path, sets: Sequence[str] = ()) -> PolyRLJob:
    """`load_manifest` for a local run: without pods `trainer.processesPerPod` is 1 where it is left out, whatever the
    trainer's template asks for."""
    source = read_manifest(path, sets)
    trainer = _trainer_of(source.data)
    if trainer.get(PROCESSES) is None:
        trainer[PROCESSES] = 1
    return job_of(source)


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
    _apply_overrides(source, sets)
    return source


def job_of(source: ManifestSource) -> PolyRLJob:
    """The job that the source describes. Raises InvalidManifest with every fault found, in file order."""
    try:
        # Names as in Python would be pruned by the API server, so here they must not pass either.
        return PolyRLJob.model_validate(source.data, by_alias=True, by_name=False)
    except ValidationError as error:
        raise InvalidManifest(few(source.describe(_faults(source.data, error)))) from error


def check_files(
    job: PolyRLJob, manifest: Path, sets: Sequence[str] = (), *, absolute: bool = True, base: Path | None = None
) -> None:
    """Raises InvalidManifest with every file that the job names and that is not there or not what it is named for.

    `sets` are the overrides that made the job, so that a fault names its flag; `absolute` false leaves absolute paths
    to the machine that trains, which need not be this one; relative ones begin at `base`, else beside the manifest.
    """
    faults = file_faults(job.spec.recipe, base or manifest.parent, absolute=absolute)
    if faults:
        raise InvalidManifest(read_manifest(manifest, sets).describe(faults))


def check_contents(job: PolyRLJob, manifest: Path, sets: Sequence[str] = (), *, base: Path | None = None) -> list[str]:
    """Notes, also of what could not be looked at. Raises InvalidManifest with every fault of rows, model config and
    code, and then with what could not be looked at: it may hold more."""
    checked = check_job(job, base or manifest.parent)
    if checked.faults:
        described = read_manifest(manifest, sets).describe(checked.faults)
        raise InvalidManifest([*described, *(f"note: {note}" for note in checked.unmade)])
    return [*checked.unmade, *checked.notes]


def validation_report(file: Path, sets: Sequence[str], *, check: bool = True) -> list[str]:
    """Lines for a valid manifest. Raises InvalidManifest with every fault: of fields, of named files, and with `check`
    of what is in them, which executes user code."""
    job = load_manifest(file, sets)
    check_files(job, file, sets, absolute=False)
    unchecked = check_contents(job, file, sets) if check else []
    recipe, rollout = job.spec.recipe, job.spec.rollout
    stages = wanted_steps(job.model_dump(mode="json", by_alias=True, include={"spec": {"recipe"}}))
    steps = " and ".join(f"{count} {stage.upper()}" for stage, count in stages.items())
    lines = [
        f"{file} is valid: {job.metadata.name}, mode {recipe.mode}, {steps} steps,"
        f" {rollout.min_replicas} to {rollout.max_replicas} rollouts",
        *(f"note: {note}" for note in [*notes(job), *template_notes(job.spec)]),
        *(f"note: {fault.sentence}" for fault in unset_variables(job)),
        *(f"note: {path_text(fault.field)} {fault.sentence}" for fault in missing_sinks(job)),
        *(f"note: {note}" for note in _hub_notes(recipe.model, file.parent)),
        *(f"note: {note}" for note in store_notes(recipe)),
        *(f"note: {note}" for note in size_notes(job.spec, file.parent)),
        *(f"note: {note}" for note in unchecked),
    ]
    elsewhere = absolute_paths_elsewhere(recipe)
    return lines + ([f"note: not on this machine, so not checked: {', '.join(elsewhere)}"] if elsewhere else [])


def _hub_notes(model: ModelSpec, base: Path) -> Iterator[str]:
    if model.source is not None and is_fetched(model.source, base):
        where = "from there" if model.source.is_uri else "from the Hub"
        yield f"spec.recipe.model.path: there is no folder {model.path} here, so the run takes it {where}"


def store_notes(recipe: RecipeSpec) -> Iterator[str]:
    """What reaches the object stores that the run reads or writes: an image has it where it was built so, and this
    machine may not need it."""
    named = [(one.field, one.path) for one in recipe.sources] + [("recipe.checkpoint.uri", recipe.checkpoint.uri or "")]
    for field, uri in named:
        scheme, _, rest = uri.partition("://")
        if not rest:
            continue
        from polyrl_trainer.checkpoints.store import PACKAGES  # torch: seconds

        if scheme not in PACKAGES:
            continue
        extra = PACKAGES[scheme]
        name = extra[extra.index("[") + 1 : -1]
        here = "" if find_spec(f"{name}fs") else f"; here it needs pip install '{extra}'"
        yield (
            f"spec.{field}: the trainer's image reaches {scheme}:// only if it was built with EXTRA=\"trainer"
            f' {name}"{here}'
        )


def notes(job: PolyRLJob) -> list[str]:
    """What a local run has otherwise than a cluster: the pods of its trainer, and the cluster-only fields that the user
    set, all in one note."""
    given = job.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True)
    fields = [path_text(path) for path in _cluster_only(manifest_schema(), given, ())]
    found = [*_pods_as_processes(job.spec.trainer), *_nothing_that_sleeps(job.spec)]
    if fields:
        has = "has" if len(fields) == 1 else "have"
        found.append(f"on this machine {', '.join(fields)} {has} no effect (cluster only)")
    return found


def _pods_as_processes(trainer: TrainerSpec) -> Iterator[str]:
    if trainer.replicas > 1:
        yield (
            f"on this machine the {trainer.replicas} pods of spec.trainer.replicas are processes that learn beside each"
            " other, for each pod processesPerPod of them, or 1 where that is left out"
        )


def _nothing_that_sleeps(spec: JobSpec) -> Iterator[str]:
    if spec.trainer.reserved_sleep is not ReservedSleep.ALWAYS:
        return
    if not spec.trainer.reserved_engine:
        yield "spec.trainer.reservedSleep: always has no effect without spec.trainer.reservedEngine"
    elif not spec.rollout.engine.type.is_server:
        yield "spec.trainer.reservedSleep: always has no effect on an embedded engine, which has nothing to give back"


def _cluster_only(node: Schema, given: Any, path: FieldPath) -> Iterator[FieldPath]:
    for name, child in node.get("properties", {}).items():
        if not isinstance(given, dict) or name not in given:
            continue
        if child.get(CLUSTER_ONLY_KEY):
            yield (*path, name)
        else:
            yield from _cluster_only(child, given[name], (*path, name))


def _faults(data: dict[str, Any], error: ValidationError) -> list[ManifestFault]:
    details = error.errors(include_url=False)
    # In a manifest of another kind the fields are no misspelt ones of ours.
    if not difflib.get_close_matches(str(data.get("kind", KIND)).lower(), [KIND.lower()]):
        details = [detail for detail in details if detail["loc"] in (("apiVersion",), ("kind",))]
    faults: list[ManifestFault] = []
    wrong: set[FieldPath] = set()
    for detail in details[: MAX_FAULTS + 1]:
        path = detail["loc"]
        if detail["type"] == "extra_forbidden":
            text, meant = unknown_field(path)
            wrong |= {meant} if meant else set()
        else:
            text = sentence(detail, path)
        faults.append(ManifestFault(path, text))
        wrong.add(path[:-1] if detail["type"] == "missing" else path)
    if len(details) > MAX_FAULTS:
        return faults
    if any(detail["type"] != RULE_ERROR for detail in details):
        faults += _faults_of_rules(data, wrong)
    return faults


def _faults_of_rules(data: dict[str, Any], wrong: set[FieldPath]) -> list[ManifestFault]:
    """Broken rules that read no wrong field; nothing when the rest is no spec without the wrong fields."""
    rest = deepcopy(data)
    for path in sorted(wrong, key=path_text, reverse=True):
        remove_field(rest, path)
    try:
        spec = JobSpec.model_validate(rest.get("spec"), by_alias=True, by_name=False)
    except ValidationError:
        return []
    unread = wrong | ({("spec", "trainer", PROCESSES)} if _processes(rest) != _processes(data) else set())
    broken = ((rule, text) for rule, text in broken_rules(spec) if not _reads(rule, unread))
    return [ManifestFault(("spec", *rule.field), text) for rule, text in broken]


def _processes(data: Any) -> Any:
    """Processes of a trainer's pod, as written or as its template's GPUs make them."""
    trainer = _trainer_of(data)
    return trainer.get(PROCESSES) or gpus_asked_for(trainer.get("template"))


def _trainer_of(data: dict[str, Any]) -> dict[str, Any]:
    """`spec.trainer` as it is written; one of its own where there is none."""
    spec = data.get("spec")
    trainer = spec.get("trainer") if isinstance(spec, dict) else None
    return trainer if isinstance(trainer, dict) else {}


def _reads(rule: Rule, wrong: set[FieldPath]) -> bool:
    read: set[FieldPath] = {("spec", *field) for field in rule.fields_read() | {rule.field}}
    return any(a[: len(b)] == b or b[: len(a)] == a for a in read for b in wrong)


def own_overrides(seed: int | None, name: str | None) -> list[str]:
    """Overrides that have a flag of their own, as `--set` would write them."""
    seeds = [] if seed is None else [f"spec.recipe.seed={seed}"]
    return seeds if name is None else [*seeds, f"metadata.name={name}"]


def _apply_overrides(source: ManifestSource, sets: Sequence[str]) -> None:
    faults = [fault for text in sets if (fault := _apply(source, text)) is not None]
    if faults:
        raise InvalidManifest(faults)


def _apply(source: ManifestSource, text: str) -> str | None:
    written, equals, given = text.partition("=")
    steps = list(_STEP.finditer(written))
    if not equals or not steps or "".join(step[0] for step in steps) != written:
        return (
            f"--set {text}: write a path and a value, as spec.rollout.maxReplicas=4 or spec.recipe.data.rl[0].weight=2"
        )
    path: FieldPath = tuple(step[1] or int(step[2]) for step in steps)
    node = node_at(path)
    if node is None:
        return f"--set {written}: {unknown_field(path)[0]}"
    is_text = node.get("type") == "string"
    try:
        value = parse(given, f"--set {written}").data
    except InvalidManifest:
        if not is_text:
            return f"--set {written}: {given!r} is not valid YAML"
        value = given
    if is_text and value is not None and not isinstance(value, str):
        # A shell takes the quotes away with which a file would say that 0123 is text.
        value = given
    fault = _write(source.data, path, value)
    if fault is None:
        source.overridden.add(path)
    return f"--set {written}: {fault}" if fault else None


def _write(data: Any, path: FieldPath, value: Any) -> str | None:
    """Puts the value at the path, making what is missing on the way; the fault as a sentence, or None."""
    for depth, key in enumerate(path):
        last = depth == len(path) - 1
        empty: Any = [] if not last and isinstance(path[depth + 1], int) else {}
        if isinstance(key, int):
            if not isinstance(data, list) or key > len(data):
                found = f"has {len(data)} entries" if isinstance(data, list) else "is no list"
                return f"{path_text(path[:depth])} {found}"
            if key == len(data):
                data.append(empty)
        elif not isinstance(data, dict):
            return f"{path_text(path[:depth])} has no fields"
        elif data.get(key) is None:
            data[key] = empty
        if last:
            data[key] = value
        data = data[key]
    return None
