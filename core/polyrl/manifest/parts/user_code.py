"""The user's own Python in a recipe: where it lies, what it is given, and the processes that it runs in."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from polyrl.manifest.base import FunctionName, ManifestModel, Name, PathText


class EnvironmentVariable(ManifestModel):
    """One variable of the environment in which the user's code runs."""

    name: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
    """Name of the variable."""
    value: Annotated[str, Field(max_length=4096)] | None = None
    """Its value. Left out, it is taken from the environment of `polyrl run`; on a cluster from `recipe.envSecret`."""


class CodeSpec(ManifestModel):
    """Where the user's Python lives; one of the three, and the same names work on a laptop and on a cluster."""

    path: PathText = "."
    """Folder put on the trainer's import path, relative to the manifest; on a cluster the mount point of the ConfigMap
    or volume, or a folder of the image."""
    config_map: Name | None = None
    """ConfigMap whose keys are the files of that folder, rows of data included if they are small; kustomize makes it
    from the files beside job.yaml. A local run reads the folder itself."""
    volume_claim: Name | None = None
    """PersistentVolumeClaim mounted there, read-only. A local run reads the folder itself."""


class RewardSpec(ManifestModel):
    """The one function the user writes: `def score(sample) -> float | dict`, sync or async."""

    function: FunctionName
    """`module:function`, importable from `code.path`. One that is called `score_batch` gets a list of samples,
    `score_group` the list of all samples of a prompt; they return a list of as many results."""
    max_batch: Annotated[int, Field(ge=1, le=4096)] = 32
    """Samples that one call of a `score_batch` gets at most: those that wait when a worker is free."""
    timeout_seconds: Annotated[int, Field(ge=1, le=86_400)] = 30
    """A call that outlasts it discards its sample with reason rewardTimedOut."""
    max_concurrency: Annotated[int, Field(ge=1, le=4096)] = 32
    """Calls of an `async def` that run at once; more wait. Of others each worker runs one."""
    workers: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Processes that the function runs in. Default: half of the trainer's cores, at least 1. More than cores suit a
    sync function that waits for the network: each takes one call at a time."""
    memory_mib: Annotated[int, Field(ge=256, le=2**20)] = 4096
    """Memory in MiB that one worker may take; what asks for more raises MemoryError."""


class EnvironmentSpec(ManifestModel):
    """A multi-turn episode: what is written between the policy's turns. Without it a sample is one turn."""

    class_path: FunctionName
    """`module:Class`, importable from `code.path`; its `async run(sample, generate)` plays one episode.
    `polyrl_trainer.environments.calculator:CalculatorEnvironment` ships."""
    max_turns: Annotated[int, Field(ge=1, le=1024)] = 8
    """Turns of the policy. The environment is asked after each of them; where it would go on after the last one, the
    episode is cut: it is scored as it stands, and its finish_reason is `length`."""
    timeout_seconds: Annotated[int, Field(ge=1, le=86_400)] = 30
    """Time that the environment may take between two turns; beyond it the sample is discarded (environmentFailed).
    Waiting while another sample's environment holds the same process does not count."""
    workers: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Processes that environments run in, many samples in each. Default: half of the trainer's cores, at least 1."""
    memory_mib: Annotated[int, Field(ge=256, le=2**20)] = 4096
    """Memory in MiB that one worker may take, with all its samples; what asks for more raises MemoryError."""
