"""kopf without a memory in other people's objects: what it would remember of each, for handlers that we do not have.

kopf copies every object four times to compare it with what it remembered; that was two fifths of the operator's time.
Refuses to hold: anything. Read next: `watches`.
"""

from __future__ import annotations

from typing import Any

import kopf


class NoDiffs(kopf.DiffBaseStorage):
    """No object has an essence, so none ever differs."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> kopf.BodyEssence | None:
        return None

    def store(self, **_: Any) -> None:
        return None


class NoProgress(kopf.ProgressStorage):
    """No handler of ours has any progress to remember."""

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        return None

    def purge(self, **_: Any) -> None:
        return None

    def touch(self, **_: Any) -> None:
        return None

    def clear(self, *, essence: kopf.BodyEssence) -> kopf.BodyEssence:
        return essence
