"""A script under a module's name, since only modules are forked: `python -m polyrl.testing.script FILE [ARGUMENT ...]`.

It finds its neighbours, as one that Python is given by its file does."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
