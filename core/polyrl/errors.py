"""Every error PolyRL raises on purpose, drawn once.

    PolyRLError
    ├── UserError            the user's input is wrong; one sentence, exit 2, never retried
    │   ├── InvalidManifest  carries every fault found, each with its place
    │   ├── InvalidData      a data row, a data file or a tokenizer
    │   ├── InvalidCode      the user's reward or environment cannot be loaded
    │   └── CannotGoOn       a run of which something is saved, with the input as it is now
    ├── ProtocolError        a peer sent something that cannot be true; the frame is counted and dropped
    ├── DeadlineExceeded     a wait ended without its event; names what was awaited, from whom, for how long
    ├── DiskRefused          a file of ours cannot be written; names it, what was wrong and what would be right
    ├── GroupLost            processes that learn together lost one of them; a new start goes on from the checkpoint
    │   └── GroupLeft        all of one pod's are gone, and how that pod ended says whether it counts
    ├── Superseded           another process has taken this one's place; it must touch nothing any more
    └── RunFailed            the run cannot go on; names the cause, exit 1

Foreign exceptions are translated at the edge where they happen, chained with `from`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

import msgspec

T = TypeVar("T")

UNDECODABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises on bytes that are not what was asked for: text that is no UTF-8 is not among its own errors."""

MAX_UNREADABLE: Final = 10_000
"""Lines that are no rows, after which the rest is not looked at: a writer tears one each time that it is killed, and
a file of nothing but line ends, some kilobytes of an archive, has a thousand million."""

MAX_FILE_ROWS: Final = 500_000
"""Most rows of a file: a run of 100,000 steps has fewer, and Python makes half a kilobyte of a row of forty bytes."""


def rows_of(lines: Iterable[bytes], decode: Callable[[bytes], T], where: str) -> Iterator[T]:
    """What `decode` makes of each line of a file, which may be anybody's; those that are no rows are left out.

    Raises InvalidData, which names the file by `where`, when there are more than MAX_FILE_ROWS.
    """
    unreadable = rows = 0
    for line in lines:
        try:
            row = decode(line)
        except (*UNDECODABLE, KeyError, ValueError):
            unreadable += 1
            if unreadable > MAX_UNREADABLE:
                return
        else:
            rows += 1
            if rows > MAX_FILE_ROWS:
                raise InvalidData(f"{where}: has more than {MAX_FILE_ROWS:,} rows, which are the most that are read")
            yield row


class PolyRLError(Exception):
    """Root of the tree; catching it catches only what PolyRL raised on purpose."""


class UserError(PolyRLError):
    """Input that the user must change. The message is the whole sentence that the user sees."""


class InvalidManifest(UserError):
    """A manifest with one or more faults; `faults` are ready-to-print lines, in file order."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


class InvalidData(UserError):
    """A data file, row or tokenizer that cannot be used; the message names the file and the line."""


class InvalidCode(UserError):
    """User code that cannot be loaded or has the wrong shape; the message names `module:function`."""


class CannotGoOn(UserError):
    """Input with which a run does not go on from its newest checkpoint; with other input it does."""


class ProtocolError(PolyRLError):
    """Bytes or messages that no correct peer sends."""


class DeadlineExceeded(PolyRLError):
    """A wait that outlived its deadline."""

    def __init__(self, awaited: str, counterpart: str, seconds: float) -> None:
        super().__init__(f"waited {seconds:.1f} s for {awaited} from {counterpart}, which did not come")
        self.awaited = awaited
        self.counterpart = counterpart
        self.seconds = seconds


class DiskRefused(PolyRLError):
    """A file that cannot be written: the disk is full, or not ours to write to. The message names the file."""


class StoreFailed(PolyRLError):
    """A place for checkpoints cannot be reached or refuses; it may answer in a while. The message names its URI."""


PASSING = (DeadlineExceeded, DiskRefused, StoreFailed)
"""What may be over when another process tries again."""


class GroupLost(PolyRLError):
    """One of the processes that learn together is gone, so that none of them can go on; all of them anew can."""


class GroupLeft(GroupLost):
    """A pod is gone with all of its processes that learned, without a word: the cluster saw how it ended, and counts
    that, so that the end of the others counts for nothing."""


class Superseded(PolyRLError):
    """Another process does this one's work now: a machine that was thought dead came back."""


class RunFailed(PolyRLError):
    """The run ends here for a named cause that is not the user's input."""
