"""The manager's status, as people and the operator read it over HTTP: one JSON value, camelCase.

`GET /v1/status?since=SEQ&waitSeconds=S` (see `control`) answers at once when `seq` > SEQ, else when something changes
or after S seconds, with the same value: a watcher needs no polling. Counters never fall within an epoch.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final

import msgspec

from polyrl.sample import Pool

MAX_NAME: Final = 512
"""Characters of a name or a sentence of a few words. A manager's image may be its job's author's own: what the operator
keeps of its answers is bounded in number and in length, some 0.5 MB of each."""
MAX_MESSAGE: Final = 4096
"""Characters of a trainer's closing message."""
MAX_ENGINES: Final = 1280
"""More than a manifest allows, and those that begin while others end."""
MAX_FETCHES: Final = 64
"""Pods of a trainer that are known to fetch their model."""
MAX_NUMBERS: Final = 128
"""Named numbers, and reasons."""
MAX_STEPS: Final = 512
"""More than a manager keeps."""

MAX_COUNT: Final = 1 << 53
"""What JSON's readers keep exactly, and a status of Kubernetes holds."""
MAX_MEASURE: Final = 1e9
"""Seconds, of thirty years, or engines: what is reckoned with them stays a number."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
_Version = Annotated[int, msgspec.Meta(ge=-1, le=MAX_COUNT)]
_Measure = Annotated[float, msgspec.Meta(ge=-MAX_MEASURE, le=MAX_MEASURE)]
_Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]


class EngineState(StrEnum):
    """An engine as the manager sees it."""

    JOINING = "joining"
    """Greeted, but serves no verified weight version yet."""
    SERVING = "serving"
    """Generates with a verified weight version."""
    SUSPECT = "suspect"
    """Failed lately: pauses, or proves itself with one sample."""
    SILENT = "silent"
    """Gave no sign of life for a lease; gets nothing new, and is gone if it stays so."""
    DRAINING = "draining"
    """Finishes or hands back what it runs; gets nothing new."""


class EngineStatus(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """One live engine."""

    name: _Name = msgspec.field(name="engine")
    pool: Pool
    state: EngineState
    weight_version: _Version
    """-1: none yet."""
    running: _Count
    """Samples assigned to it now."""
    max_running: _Count
    tokens: _Count
    """Generated and accepted since it greeted."""
    departed: _Name = ""
    """How its tokens were others than the fleet's when they last were; empty if they never were."""


class SampleCounts(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """The ledger's balance, training and evaluation together: submitted = open + acknowledged + discarded."""

    submitted: _Count = 0
    acknowledged: _Count = 0
    open: _Count = 0
    discarded: Annotated[dict[_Name, _Count], msgspec.Meta(max_length=MAX_NUMBERS)] = {}
    """By DiscardReason."""
    offered_again: _Count = 0
    """Acknowledged by a trainer whose successor went back to a checkpoint, and counted as open again since."""
    released_early: _Count = 0
    """Acknowledged samples that were not kept until a checkpoint, for want of room."""


class TokenCounts(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """Tokens of all samples."""

    generated: _Count = 0
    """Accepted from engines."""
    kept: _Count = 0
    """Generated tokens that survived every loss of an engine."""
    regenerated: _Count = 0
    """Generated again because an engine took them with it before they were sent."""


class StepValue(StrEnum):
    """Names in `ManagerStatus.values` by which the trainer reports its last finished RL step."""

    ROLLOUT_SECONDS = "rolloutSeconds"
    """From submission to the last turn that was used."""
    RESERVED_SECONDS = "reservedSeconds"
    """The part of these seconds in which a reserved engine, if there is one, generated as well."""
    TRAIN_SECONDS = "trainSeconds"
    """The learner's own work."""
    STEP_SECONDS = "stepSeconds"
    """From publishing the weights to the step's end; validation and checkpoints lie between steps."""
    POLLUTED_STEP = "pollutedStep"
    """1.0 when the step is no measure of the fleet, see `FinishedStep.steady`; else 0.0."""
    REWARD = "reward"
    """Mean of the step's samples."""
    LARGEST_ENGINE_SHARE = "largestEngineShare"
    """Share of the step's trained tokens that one engine drew, the one that drew most of them."""
    EXACT_MATCH = "exactMatch"
    """Exact match of the last evaluation."""


class FinishedStep(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """What a finished RL step took, and what engines did for it; evaluations and checkpoints are no part of a step."""

    step: _Count
    engines: _Measure
    """Mean number that could generate, while the step's turns ran; a reserved one only while it may."""
    rollout_seconds: _Measure
    """From submission to the last turn that was used; of several steps that are under way at once, a step's part."""
    train_seconds: _Measure
    """The learner's own work."""
    step_seconds: _Measure
    """From publishing the weights to the step's end."""
    busy_engine_seconds: _Measure
    """Time of engines with samples of this step, summed over the engines that came and went."""
    shared_engine_seconds: _Measure
    """The part of it that more engines would share: rolloutSeconds = a + this / engines, where no engine shortens a."""
    evaluation_engine_seconds: _Measure
    """Time of engines with samples of evaluations since the step before."""
    next_engine_saves_seconds: _Measure
    """By how much one more engine would have shortened rolloutSeconds."""
    steady: bool
    """False when it is no measure of the fleet: the trainer's first, in which engines still started, and those of which
    an earlier trainer left a part."""

    @property
    def size(self) -> int:
        """Steps of fleets of one size are alike."""
        return round(self.engines)


class FetchStatus(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """How much of its model one of the trainer's pods has fetched, before its trainer begins."""

    pod: _Name
    place: _Name
    """What is fetched, as the manifest names it."""
    fetched: _Count
    """Bytes that have come."""
    total: _Count
    """Bytes that there are; 0: that is not known."""

    @property
    def amount(self) -> str:
        """For people, in steps of a tenth: `3.2 of 14.9 GB`."""
        unit, size = next(one for one in _UNITS if max(self.fetched, self.total) >= one[1] or one is _UNITS[-1])
        return f"{self.fetched / size:.1f} {f'of {self.total / size:.1f} ' if self.total else ''}{unit}"


_UNITS: Final = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3))


class ManagerStatus(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """The whole run at one moment."""

    seq: _Count
    """Grows with every change."""
    run_epoch: _Count = msgspec.field(name="epoch")
    phase: _Name = ""
    """As the trainer last reported it, e.g. `sft`, `rl`, `evaluate`; empty before its first report."""
    step: _Count = 0
    values: Annotated[dict[_Name, float], msgspec.Meta(max_length=MAX_NUMBERS)] = {}
    """Named numbers of the trainer's last report, and those of `StepValue` as they last were."""
    weight_version: _Version = -1
    """Newest published."""
    trainer_connected: bool = False
    fetches: Annotated[tuple[FetchStatus, ...], msgspec.Meta(max_length=MAX_FETCHES)] = ()
    """Model fetches of the trainer's pods: under way, or since a trainer last greeted; the newest news last."""
    engines: Annotated[tuple[EngineStatus, ...], msgspec.Meta(max_length=MAX_ENGINES)] = ()
    engines_lost: _Count = 0
    """Engines whose lease ran out or whose connection ended without a Deregister."""
    samples: SampleCounts = SampleCounts()
    tokens: TokenCounts = TokenCounts()
    delta_bytes: _Count = 0
    """Bytes of token deltas received; divided by generated tokens it is what a token costs on the wire."""
    finished_steps: Annotated[tuple[FinishedStep, ...], msgspec.Meta(max_length=MAX_STEPS)] = ()
    """In order, the last one newest; of each size of the fleet some, so that its effect can be seen."""
    finished: bool = False
    ok: bool = False
    message: Annotated[str, msgspec.Meta(max_length=MAX_MESSAGE)] = ""
    """The trainer's closing message, when finished."""
