"""What the kills did, read from the manager's journal, the trainer's batches and the engines' counters, afterwards."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec
from batches import Client
from counted_agent import FORMAT
from journal import Aftermath, Journal, Kill
from plan import SAMPLES_IN_FLIGHT, SAMPLES_PER_GROUP, Plan
from promises import Wait, broken, difference, waits
from reference import Reference

MAX_LOST: Final = 0.01
"""Share of generated tokens that kills may cost, when they are as rare as the plan's own pace has them."""

LOST_OF_EACH: Final = 10
"""Tokens of each sample in flight that one kill may cost, however dense kills are: those that its agent had from its
engine and that were still on their way. Five rows as an agent sends them; 2 to 4 are usual, 8 the most measured."""

MAX_BYTES_PER_TOKEN: Final = 16.0
"""From agents to the manager: eight for the id and the logprob, the rest for rows and frames."""


class Report(msgspec.Struct, rename="camel", kw_only=True):
    """What `run` prints; seconds unless said otherwise."""

    seed: int
    engine: str
    exits_reported: bool
    """The runner informs the manager that a process has ended; else only the lease does."""
    kills: int
    response_tokens: int
    wall_seconds: float
    samples: dict[str, int]
    tokens: dict[str, int]
    kept_share: float
    bytes_per_token: float
    """All frames from agents to the manager, greetings and heartbeats too, over the generated tokens."""
    moved: dict[str, int]
    """Samples by the cause of the move."""
    moved_by_kill: dict[str, float]
    lost_by_kill: dict[str, float]
    """Tokens that the victim's agent had from its engine and the manager never took."""
    kill_to_moved: dict[str, float]
    kill_to_first_tokens: dict[str, float]
    """Per kill: the first of its samples flows elsewhere."""
    kill_to_all_tokens: dict[str, float]
    """Per kill: the last of its samples flows elsewhere."""
    waits: list[Wait]
    """The longest of each kind."""
    logprob_difference: float
    violations: list[str]


def judge(run: Path, kills: list[Kill], reference: Reference, plan: Plan, wall_seconds: float) -> Report:
    """Reads a finished run's folder."""
    journal, client = Journal(run / "journal.sqlite"), Client(run)
    counters = {file.name: struct.unpack(FORMAT, file.read_bytes()) for file in (run / "counters").iterdir()}
    counted = {name: tokens for name, (tokens, _) in counters.items()}
    differences = [difference(sample, reference) for sample in client.samples]
    tokens = tokens_of(counted, journal)
    report = Report(
        seed=plan.seed,
        engine=plan.engine,
        exits_reported=plan.exits_reported,
        kills=len(kills),
        response_tokens=plan.tokens,
        wall_seconds=round(wall_seconds, 1),
        samples={"submitted": len(client.groups) * SAMPLES_PER_GROUP, **Counter(kind for _, kind in journal.ends)},
        tokens=tokens,
        kept_share=round(tokens["kept"] / tokens["generated"], 5),
        bytes_per_token=round(sum(sent for _, sent in counters.values()) / tokens["generated"], 2),
        moved=dict(Counter(moved.cause for moved in journal.moved.values())),
        lost_by_kill=quantiles([float(counted[kill.victim] - journal.accepted[kill.victim]) for kill in kills]),
        **after_kills([journal.aftermath(kill) for kill in kills]),
        waits=[],
        logprob_difference=max((d for d in differences if d is not None), default=0.0),
        violations=[],
    )
    report.waits = waits(report.kill_to_moved["max"], journal, client)
    report.violations = list(broken(run, journal, client, differences, reference))
    report.violations += figures_wrong(report)
    return report


def tokens_of(counted: dict[str, int], journal: Journal) -> dict[str, int]:
    """Where the tokens that left the engines went."""
    generated, kept = sum(counted.values()), journal.accepted.total()
    refused = sum(event.in_vain + event.repeated for event in journal.taken)
    return {"generated": generated, "kept": kept, "refused": refused, "lost": generated - kept - refused}


def after_kills(aftermaths: list[Aftermath]) -> dict[str, dict[str, float]]:
    """The figures of a report that are per kill; a kill that took nothing counts in the first only."""
    flows = [aftermath.flowing for aftermath in aftermaths if aftermath.flowing]
    return {
        "moved_by_kill": quantiles([float(len(aftermath.detected)) for aftermath in aftermaths]),
        "kill_to_moved": quantiles([max(aftermath.detected) for aftermath in aftermaths if aftermath.detected]),
        "kill_to_first_tokens": quantiles([min(flowing) for flowing in flows]),
        "kill_to_all_tokens": quantiles([max(flowing) for flowing in flows]),
    }


def figures_wrong(report: Report) -> Iterable[str]:
    """Tokens kept, bytes, and every wait within its stated deadline."""
    for wait in report.waits:
        if wait.seconds > wait.deadline:
            yield f"the longest wait {wait.what} was {wait.seconds:.1f} s, its deadline {wait.deadline:.1f} s"
    lost, generated = report.tokens["lost"], report.tokens["generated"]
    if lost > max(MAX_LOST * generated, LOST_OF_EACH * SAMPLES_IN_FLIGHT * report.kills):
        yield f"{lost} of {generated} generated tokens were lost to {report.kills} kills"
    if lost < 0:
        yield "more tokens were accepted than engines generated"
    if report.bytes_per_token > MAX_BYTES_PER_TOKEN:
        yield f"{report.bytes_per_token} bytes per token went from agents to the manager"


def quantiles(values: list[float]) -> dict[str, float]:
    """p50, p95 (nearest rank) and max."""
    ranked = sorted(values) or [0.0]
    ranks = {"p50": 0.5, "p95": 0.95, "max": 1.0}
    return {name: round(ranked[max(0, -int(-q * len(ranked) // 1) - 1)], 3) for name, q in ranks.items()}
