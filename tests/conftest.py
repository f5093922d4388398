"""One thread per process in every test: threads that wait for each other by spinning crawl when a core is shared."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
