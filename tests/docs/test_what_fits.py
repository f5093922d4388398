"""The table of what fits where is what its command prints."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "run-on-a-workstation.md"


def test_the_page_holds_what_the_command_prints() -> None:
    argv = [sys.executable, ROOT / "docs" / "site" / "what_fits.py"]
    printed = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout
    (shown,) = re.findall(r"<!-- what-fits -->\n(.*?)<!-- /what-fits -->", PAGE.read_text(), re.DOTALL)
    assert shown.strip() == printed.strip()
