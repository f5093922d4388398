"""The documentation's site from a disk in a real Chromium: found by its search, shown whole, and nothing fetched."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.browser
ROOT = Path(__file__).parents[3]
PICTURES = "[...document.querySelectorAll('article img')].map(one => one.complete && one.naturalWidth > 0)"
OVERFLOW_PX = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


def test_it_reads_and_searches_without_a_server(tmp_path: Path) -> None:
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    assert chromium, "make test-browser needs chromium in PATH"
    build = [sys.executable, "-P", "-m", "mkdocs", "build", "--site-dir", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=240)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto((tmp_path / "tutorial/first-run.html").as_uri())
        assert len(page.evaluate(PICTURES)) == 2
        assert all(page.evaluate(PICTURES))
        for width in (400, 1400):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate(OVERFLOW_PX) <= 0, "the page scrolls sideways"
        page.locator("input[name=query]").press_sequentially("staleness")
        page.wait_for_selector(".md-search-result__item a[href*=glossary]", timeout=60_000)
        assert [url for url in asked if not url.startswith("file:")] == []
        browser.close()
