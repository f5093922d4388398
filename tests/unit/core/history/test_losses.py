"""What losses cost, of as many as a long run on spot has."""

from collections.abc import Iterator

from polyrl.history.fleet import FleetEvent
from polyrl.history.losses import losses
from polyrl.history.rows import MetricsRow
from polyrl.page.contents import SHOWN_LOSSES, RunRecord, make_contents
from polyrl.page.page import render_page

MANY = 4_000
PASSES = 2


class CountedReads(list[FleetEvent]):
    """A list that counts what is read of it."""

    reads = 0

    def __iter__(self) -> Iterator[FleetEvent]:
        for position in range(len(self)):
            self.reads += 1
            yield self[position]

    def __reversed__(self) -> Iterator[FleetEvent]:
        self.reads += len(self)
        return super().__reversed__()


def an_event(at: float, kind: str, worker: str) -> FleetEvent:
    return FleetEvent(time=at, t=at, kind=kind, worker=worker, text=f"{worker} {kind}")


def many_losses() -> list[FleetEvent]:
    """None of which is replaced: a scan would go to the end."""
    return [an_event(float(number), "reclaimed", f"e{number}") for number in range(MANY)]


def test_the_own_return_replaces_nobody() -> None:
    events = [
        an_event(1.0, "reclaimed", "a"),
        an_event(2.0, "serving", "a"),
        an_event(3.0, "reclaimed", "a"),
        an_event(4.0, "serving", "a"),
        an_event(6.0, "serving", "b"),
        an_event(5.0, "serving", "b"),  # the clock was set back
        an_event(7.0, "reclaimed", "b"),
    ]
    assert [loss.replaced_after_seconds for loss in losses(events, [])] == [5.0, 3.0, None]


def test_thousands_of_losses_take_one_pass() -> None:
    rows = [MetricsRow(float(at), "rl", step=at, values={"timing_s/step": float(at)}) for at in range(MANY)]
    events = CountedReads(many_losses())
    assert [loss.step_seconds for loss in losses(events, rows)] == [float(at) for at in range(MANY)]
    assert events.reads <= PASSES * MANY


def test_the_page_lists_the_newest_losses_and_counts_the_others() -> None:
    record = RunRecord(
        job="j", state="failed", job_settings={}, settings="", rows=(), events=many_losses(), samples=(),
        seconds=1.0, held={}, machines={},
    )  # fmt: skip
    contents = make_contents(record)
    assert len(contents.losses) == SHOWN_LOSSES
    assert contents.losses[-1].text == f"e{MANY - 1} reclaimed"
    assert contents.more_losses == MANY - SHOWN_LOSSES
    assert "3,900 more before these" in render_page(record)
