"""`polyrl validate`: everything about a manifest that can be known without running it. Read next: `manifest_file`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from polyrl.manifest.job import PolyRLJob
from polyrl_cli.manifests.file_checks import check_files, unchecked
from polyrl_cli.manifests.load import load_manifest, notes


def validation_report(file: Path, sets: Sequence[str]) -> list[str]:
    """Lines for a valid manifest. Raises InvalidManifest with every fault, those of named files included."""
    job = load_manifest(file, sets)
    check_files(job, file, sets, absolute=False)
    return [f"{file} is valid: {_in_short(job)}", *(f"note: {note}" for note in _notes(job, file))]


def _notes(job: PolyRLJob, file: Path) -> list[str]:
    elsewhere = unchecked(job, file)
    return notes(job) + ([f"not on this machine, so not checked: {', '.join(elsewhere)}"] if elsewhere else [])


def _in_short(job: PolyRLJob) -> str:
    recipe, rollout = job.spec.recipe, job.spec.rollout
    return (
        f"{job.metadata.name}, mode {recipe.mode}, {recipe.sft.steps} SFT and {recipe.algorithm.steps} RL steps,"
        f" {rollout.min_replicas} to {rollout.max_replicas} rollouts"
    )
