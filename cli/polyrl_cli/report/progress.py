"""What a person sees while a run goes on: a live picture on a terminal, plain lines everywhere else."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from polyrl.history.cost import cost_words
from polyrl.history.fleet import RECLAIMED, FleetEvent, machines_by_pool, seconds_by_pool
from polyrl.history.foreign_text import printable
from polyrl.history.losses import clock_text
from polyrl.history.rows import MetricsRow, value_text
from polyrl.manifest.job import JobSpec
from polyrl.manifest.recipe import Mode
from polyrl.sample import Pool
from polyrl.status import EngineState, EngineStatus, ManagerStatus

PLAIN_EVERY_S: Final = 5.0
"""Between two plain lines: often enough to see progress, seldom enough for a log file."""

RATE_WINDOW_S: Final = 10.0
"""Over which tokens per second are averaged: longer than one step of a small job, so that the number is steady."""

SHOWN_EVENTS: Final = 5
SHOWN_WAITS: Final = 4
"""The longest ones; `polyrl why` shows all."""
SPARKS: Final = "▁▂▃▄▅▆▇█"
SPARK_WIDTH: Final = 16
PROGRESS_BAR_WIDTH: Final = 24
BESIDE_BAR: Final = 36
"""Columns of frame, label, count and loss on the line of a bar."""
WIDTH: Final = 80

REFRESH_PER_S: Final = 4
"""Redraws of the live picture; the status changes at most five times a second."""

REWARD: Final = "reward/mean"
LOSSES: Final = {"sft": "sft/loss", "dpo": "dpo/loss", "reward-model": "rm/loss"}
"""By the phases that have no reward."""
EXACT_MATCH: Final = "eval/exact_match"
"""Names under which the trainer reports; the field's."""

EVALUATED: Final = {EXACT_MATCH: "exact match", "eval/reward": "evaluated reward"}
"""Metrics of an evaluation and their labels: the first of these that it has is shown."""

STATE_MARKS: Final = {
    EngineState.JOINING: ("◌", "yellow"),
    EngineState.SERVING: ("●", "green"),
    EngineState.SUSPECT: ("◐", "yellow"),
    EngineState.SILENT: ("○", "red"),
    EngineState.DRAINING: ("◍", "magenta"),
}

EVENT_STYLES: Final = {RECLAIMED: "bold red", "serving": "green", "condition": "bold yellow", "exited": "dim"}


class Progress:
    """What is shown: totals from the manifest, the newest status, rates, the last events."""

    def __init__(self, name: str, spec: JobSpec, clock: Callable[[], float], began: float | None = None) -> None:
        """`began`: when the run did, by that clock; now, if it begins now."""
        self.name = name
        self.status = ManagerStatus(seq=-1, run_epoch=0)
        self.conditions: Sequence[str] = ()
        self.waits: Sequence[str] = ()
        """Who waits for whom, where somebody asks the manager."""
        self.evaluated = ""
        """What `evaluations` are numbers of."""
        self.evaluations: dict[str, float] = {}
        self.rewards: deque[float] = deque(maxlen=SPARK_WIDTH)
        self.loss: float | None = None
        self.events: deque[FleetEvent] = deque(maxlen=SHOWN_EVENTS)
        self.fleet: list[FleetEvent] = []
        """All that happened to workers, for what they cost."""
        self.held: tuple[Mapping[Pool, float], Mapping[Pool, int]] | None = None
        """Seconds and machines by a manager's own count; it has forgotten some events, and knows when the run ended."""
        self.outcome = ""
        """How the run ended; empty while it runs."""
        self.phase = ""
        self.steps: dict[str, int] = {}
        self.news = 0
        self.totals = _totals(spec)
        self._prices = spec.pricing
        self._clock, self._began = clock, clock() if began is None else began
        self._tokens: deque[tuple[float, int]] = deque()

    @property
    def elapsed(self) -> float:
        return self._clock() - self._began

    def take(self, status: ManagerStatus, conditions: Sequence[str]) -> None:
        """The newest status. A status seen before changes nothing."""
        self.conditions = conditions
        if status.seq != self.status.seq:
            self.status = status
            now = self.elapsed
            self._tokens.append((now, status.tokens.generated))
            while now - self._tokens[0][0] > RATE_WINDOW_S:
                self._tokens.popleft()

    def take_report(self, report: MetricsRow) -> None:
        """The trainer's row of one step or one evaluation."""
        self.phase, self.news = report.phase, self.news + 1
        if report.phase in self.totals:
            self.steps[report.phase] = report.step
        self.loss = report.values.get(LOSSES.get(report.phase, ""), self.loss)
        for name, words in EVALUATED.items():
            if name in report.values:
                self.evaluated, self.evaluations[self._moment()] = words, report.values[name]
                break
        if REWARD in report.values:
            self.rewards.append(report.values[REWARD])

    def take_event(self, event: FleetEvent) -> None:
        """Something happened to a worker."""
        self.fleet.append(event)
        if event.text:
            self.events.append(event)

    @property
    def cost(self) -> str:
        """In words; empty where the manifest names no prices."""
        if self.held is not None:
            return cost_words(self._prices, *self.held)
        if not self.fleet:
            return ""
        now = self.fleet[-1].time - self.fleet[-1].t + self.elapsed
        return cost_words(self._prices, seconds_by_pool(self.fleet, now), machines_by_pool(self.fleet))

    @property
    def tokens_per_s(self) -> float:
        """Generated, over the last RATE_WINDOW_S."""
        if len(self._tokens) < 2:
            return 0.0
        (t0, n0), (t1, n1) = self._tokens[0], self._tokens[-1]
        return (n1 - n0) / max(t1 - t0, 1e-9)

    def _moment(self) -> str:
        """To which moment of the run an evaluation belongs that is reported now."""
        if self.steps.get("rl") or self.steps.get("offline-rl"):
            return "now"
        return "SFT" if self.steps.get("sft") else "base"


class ProgressView:
    """Shows a Progress: on a terminal a picture of at most 80 columns that redraws itself, else a line per event and
    one every few seconds."""

    def __init__(self, progress: Progress, console: Console) -> None:
        self._progress, self._console = progress, console
        self._last_line, self._last_news = -PLAIN_EVERY_S, 0
        self._live: Live | None = None
        if console.is_terminal and sys.stdout.isatty():
            self._live = Live(
                get_renderable=lambda: picture(progress, console.width),
                console=console,
                refresh_per_second=REFRESH_PER_S,
                transient=True,
            )
            self._live.start()

    def update(self) -> None:
        """Something in the Progress may have changed."""
        now, news = self._progress.elapsed, self._progress.news
        if self._live is None and news != self._last_news and now - self._last_line >= PLAIN_EVERY_S:
            self._last_line, self._last_news = now, news
            self._print(line(self._progress))

    def event(self, event: FleetEvent) -> None:
        """Something happened to the fleet."""
        self._progress.take_event(event)
        if self._live is None:
            self._print(f"{clock_text(event.t)}  {printable(event.text)}")

    def printed(self, lines: Sequence[str]) -> None:
        """What user code printed; above the picture where there is one."""
        for text in lines:
            self._print(f"print: {text}")

    def close(self) -> None:
        """Leaves the terminal as it should stay."""
        if self._live is not None:
            self._live.stop()

    def _print(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)


def line(progress: Progress) -> str:
    """The run at this moment, as one line."""
    status = progress.status
    phase = progress.phase
    parts = [f"{clock_text(progress.elapsed)}  {phase or 'starting'}"]
    if phase in progress.totals:
        parts.append(f"step {progress.steps.get(phase, 0)}/{progress.totals[phase]}")
    if phase in LOSSES and progress.loss is not None:
        parts.append(f"loss {value_text(progress.loss)}")
    if progress.rewards:
        parts.append(f"reward {value_text(progress.rewards[-1])}")
    parts += [f"{progress.evaluated} {at} {value_text(value)}" for at, value in list(progress.evaluations.items())[-1:]]
    if status.engines:
        serving = sum(engine.state is EngineState.SERVING for engine in status.engines)
        parts.append(f"engines {serving}/{len(status.engines)}")
        parts.append(f"{progress.tokens_per_s:,.0f} tokens/s")
        parts.append(f"{status.samples.acknowledged:,} samples done")
    return "  ".join(parts)


def picture(progress: Progress, width: int) -> RenderableType:
    """The run at this moment, as a panel no wider than the terminal."""
    width = min(WIDTH, width)
    parts: list[RenderableType] = [_bars(progress, width), Text()]
    if progress.status.engines:
        parts += [_numbers(progress), Text(), _engines(progress.status.engines, width), Text()]
    parts += [Text(f"! {sentence}", style="bold yellow") for sentence in progress.conditions]
    parts += [Text(f"… {sentence}", style="dim") for sentence in progress.waits]
    parts += [_event_line(event) for event in progress.events]
    title = Text.assemble((progress.name, "bold"), "  ", (clock_text(progress.elapsed), "dim"), progress.outcome)
    return Panel(Group(*parts), title=title, title_align="left", width=width, border_style="blue", padding=(1, 2))


def sparkline(values: Sequence[float]) -> str:
    """Values as a row of bars between their least and their greatest."""
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((value - low) * scale)] for value in values)


def _totals(spec: JobSpec) -> dict[str, int]:
    """Steps of each stage that the mode runs; the stages of a mode stand in its name."""
    recipe = spec.recipe
    steps = {"sft": recipe.sft.steps, "rl": recipe.algorithm.steps, "dpo": recipe.dpo.steps}
    steps["reward-model"] = recipe.reward_model.steps
    if spec.recipe.mode is Mode.OFFLINE_RL:
        return {"offline-rl": steps["rl"]}
    return {stage: steps[stage] for stage in spec.recipe.mode.value.split("+")}


def _bars(progress: Progress, width: int) -> Table:
    table = Table.grid(padding=(0, 2))
    longest = min(PROGRESS_BAR_WIDTH, max(1, width - BESIDE_BAR))
    for phase, total in progress.totals.items():
        done = progress.steps.get(phase, 0)
        bar = ProgressBar(total=max(total, 1), completed=done, width=longest, finished_style="green")
        table.add_row(Text(phase.upper(), style="bold"), bar, f"{done}/{total}", _bar_note(progress, phase))
    return table


def _bar_note(progress: Progress, phase: str) -> Text:
    """Loss or reward, with what it was lately."""
    if phase in LOSSES and progress.loss is not None:
        return Text(f"loss {value_text(progress.loss)}")
    if phase not in LOSSES and progress.rewards:
        return Text.assemble(f"reward {value_text(progress.rewards[-1])}  ", (sparkline(progress.rewards), "cyan"))
    return Text()


def _numbers(progress: Progress) -> Table:
    samples, tokens = progress.status.samples, progress.status.tokens
    table = Table.grid(padding=(0, 2))
    if progress.evaluations:
        steps = [f"{moment} {value_text(value)}" for moment, value in progress.evaluations.items()]
        table.add_row(Text(progress.evaluated, style="dim"), Text("  →  ".join(steps), style="bold"))
    table.add_row(Text("tokens", style="dim"), f"{progress.tokens_per_s:,.0f} /s   {tokens.generated:,} generated")
    discarded = sum(samples.discarded.values())
    balance = f"{samples.acknowledged:,} done   {discarded:,} discarded   {samples.open:,} under way"
    table.add_row(Text("samples", style="dim"), balance)
    if cost := progress.cost:
        table.add_row(Text("cost", style="dim"), Text(cost))
    return table


def _engines(engines: Sequence[EngineStatus], width: int) -> Table:
    table = Table.grid(padding=(0, 2))
    if width < WIDTH:
        for engine in engines:
            mark, style = STATE_MARKS[engine.state]
            shown = f"{engine.running} running" if engine.state is EngineState.SERVING else engine.state.value
            table.add_row(Text(f"{mark} {engine.name}", style=style), shown)
        return table
    for engine in engines:
        mark, style = STATE_MARKS[engine.state]
        load = ProgressBar(total=max(engine.max_running, 1), completed=engine.running, width=10, pulse=False)
        version = f"v{engine.weight_version}" if engine.weight_version >= 0 else "no weights"
        table.add_row(
            Text(f"{mark} {engine.name}", style=style),
            Text(engine.pool.value, style="dim"),
            f"{engine.state.value:<8}",
            f"{version:<10}",
            load,
            f"{engine.running} running",
        )
    return table


def _event_line(event: FleetEvent) -> Text:
    shown = (printable(event.text), EVENT_STYLES.get(event.kind, ""))
    return Text.assemble((f"{clock_text(event.t)}  ", "dim"), shown, no_wrap=True, overflow="ellipsis")
