"""The page of made runs: what stands in it, and that no foreign text is markup there."""

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from polyrl.errors import UserError
from polyrl_cli.page.page import make_page_of_run, write_page

MEGABYTE = 1 << 20


def write_report(run: Path, out: Path | None = None) -> Path:
    file, make = make_page_of_run(run)
    return write_page(out or file, make())


class Elements(HTMLParser):
    """Names of all elements and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found |= {tag} | {name for name, _ in attrs}


def test_a_long_hostile_run_is_a_small_page_without_script(made_run: Callable[[int], Path]) -> None:
    text = write_report(made_run(10_000), None).read_text()
    elements = Elements()
    elements.feed(text)
    assert not {
        name for name in elements.found if name in {"script", "img", "iframe", "object"} or name.startswith("on")
    }
    assert "\x1b" not in text
    assert "49" not in re.findall(r"<h1>(.*?)</h1>", text, re.DOTALL)[0]
    assert len(text) < MEGABYTE
    assert "default-src 'none'" in text


def test_what_a_reader_asks_first_stands_there(made_run: Callable[[int], Path]) -> None:
    text = write_report(made_run(40), None).read_text()
    for wanted in (
        "failed",
        "0.100 → 0.900",
        "replaced after 10.0 s",
        "rl step 3, sample 7.0 (best)",
        "evaluation after rl",
    ):
        assert wanted in text, wanted
    assert text.count("<svg") == 4  # learning, a step's time, fleet, lengths
    assert 'http-equiv="refresh"' not in text


def test_equal_runs_give_equal_pages(made_run: Callable[[int], Path]) -> None:
    folder = made_run(40)
    assert write_report(folder, None).read_bytes() == write_report(folder, folder / "again.html").read_bytes()


def test_a_run_that_has_only_begun_has_a_page(made_run: Callable[[int], Path]) -> None:
    folder = made_run(1)
    for name in ("metrics.jsonl", "fleet.jsonl", "samples.jsonl", "summary.json"):
        (folder / name).unlink()
    assert "none yet" in write_report(folder, None).read_text()


def test_a_page_that_cannot_be_written_is_one_sentence(made_run: Callable[[int], Path]) -> None:
    with pytest.raises(UserError, match="cannot be written"):
        write_report(made_run(1), Path("/proc/no/report.html"))
