"""A look at a cloud's metadata as values: questions out, answers in, a finding at the end; no socket, no clock.

    look = cloud.look(now)      a generator: yields a Question, is sent an Answer, returns a Finding

Refuses to hold: how questions travel (see `watcher`), what one cloud means (see `aws`, `gcp`, `azure`).
Read next: `aws`.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias

from polyrl.errors import ProtocolError

METADATA_URL: Final = "http://169.254.169.254"
"""Link-local, so it never leaves the machine; the same on AWS, GCP and Azure."""


@dataclass(frozen=True)
class Question:
    """One HTTP request."""

    path: str
    """With its query."""
    headers: Mapping[str, str] = field(default_factory=dict)
    method: str = "GET"
    wait_s: float = 0.0
    """How long the cloud may hold it back until something changes."""


@dataclass(frozen=True)
class Answer:
    """Its answer, whatever the status."""

    status: int
    body: bytes = b""
    etag: str = ""
    """Names this state of the value, so that a change between two questions is not missed."""


@dataclass(frozen=True)
class Notice:
    """The machine will be taken away."""

    seconds: float
    """Until then."""
    reason: str
    """In the cloud's words, for people."""


@dataclass(frozen=True)
class Finding:
    """What one look has brought."""

    notice: Notice | None = None
    advice: str = ""
    """A warning that is no notice: the machine may stay."""


Look: TypeAlias = Generator[Question, Answer, Finding]


class Cloud(Protocol):
    """One cloud's way to say it. Holds what outlasts a look: a token, a name."""

    pause_s: float
    """Between two looks."""

    def look(self, now: float) -> Look:
        """One look at `now`, Unix seconds. Raises ProtocolError for an answer that this cloud does not give."""
        ...


def expect(answer: Answer, what: str, *statuses: int) -> Answer:
    """The answer, if its status is one of these. Raises ProtocolError."""
    if answer.status not in statuses:
        raise ProtocolError(f"{what}: answered with HTTP status {answer.status}")
    return answer
