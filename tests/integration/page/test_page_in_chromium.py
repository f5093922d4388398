"""The page in a real Chromium, without a network: it renders on a phone and on a wide screen, and no script runs."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from polyrl.page.page import without_scripts
from polyrl_cli.page.live import PageServer
from polyrl_cli.page.page import make_page_of_run, write_page

pytestmark = pytest.mark.browser
WIDTHS = (400, 1400)
SHOWN = "document.querySelectorAll('figure svg').length"
OVERFLOW_PX = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
CLIPPED = "[...document.querySelectorAll('figure svg')].filter(one => one.getBoundingClientRect().height < 50).length"


@pytest.mark.parametrize("width", WIDTHS)
def test_a_long_hostile_run(made_run: Callable[[int], Path], width: int) -> None:
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    assert chromium, "make test-browser needs chromium in PATH"
    file, make = make_page_of_run(made_run(10_000))
    write_page(file, make())
    with sync_playwright() as playwright:
        # As root, as in a container, Chromium has no sandbox; the page is our own.
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": 900})
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(file.as_uri())
        assert page.title() != "taken"
        assert page.evaluate(SHOWN) == 4
        assert page.evaluate(OVERFLOW_PX) <= 0, "the page scrolls sideways"
        assert page.evaluate(CLIPPED) == 0
        assert asked == [file.as_uri()]
        page.locator("details summary").first.click()
        assert page.locator("details pre").first.is_visible()
        browser.close()


def test_the_same_served_live(made_run: Callable[[int], Path]) -> None:
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    _, make = make_page_of_run(made_run(10_000))
    with PageServer(make) as server, sync_playwright() as playwright:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(server.url)
        assert page.title() != "taken"
        assert page.evaluate(SHOWN) == 4
        assert asked == [server.url]
        browser.close()
        server.shutdown()


@pytest.mark.parametrize("doctype", ["", "<!DOCTYPE html>"], ids=["bare", "page"])
def test_no_script_of_a_page_that_another_made_runs(tmp_path: Path, doctype: str) -> None:
    """A manager's image may be anybody's: what `report --on kubernetes` wrote was its own words."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    script = "document.title = 'taken'"
    hostile = f'{doctype}<html><head><script>{script}</script></head><body onload="{script}">x'
    titles = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for text in (hostile, without_scripts(hostile)):
            page = browser.new_page()
            page.goto(write_page(tmp_path / "page.html", text).as_uri())
            titles.append(page.title())
        browser.close()
    assert titles == ["taken", ""]
