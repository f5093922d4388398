"""Whether all connections of this process over loopback lead to processes of its own account.

Gloo believes whoever dials it while ranks meet. The kernel's table of connections names the account of both ends of
each connection that stays on the machine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Final, NamedTuple

TABLES: Final = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
ESTABLISHED: Final = "01"
SOCKET: Final = re.compile(r"socket:\[(\d+)\]")


class Connection(NamedTuple):
    """A line of the kernel's table: one end of a connection."""

    local: str
    remote: str
    uid: int
    inode: int


def read_table(text: str) -> Iterator[Connection]:
    """The established connections of /proc/net/tcp (proc(5))."""
    for line in text.splitlines()[1:]:
        fields = line.split()
        if fields[3] == ESTABLISHED:
            yield Connection(fields[1], fields[2], uid=int(fields[7]), inode=int(fields[9]))


def strangers(table: list[Connection], own: Set[int], uid: int) -> list[int]:
    """Accounts at the other ends of the connections `own` (inodes) that are on this machine and are not `uid`."""
    ends = {(one.local, one.remote): one.uid for one in table}
    others = (ends.get((one.remote, one.local), uid) for one in table if one.inode in own)
    return sorted({other for other in others if other != uid})


def strangers_here() -> list[int]:
    """Of this process, now."""
    table = [one for path in TABLES if path.exists() for one in read_table(path.read_text())]
    return strangers(table, _own_sockets(), os.getuid())


def _own_sockets() -> set[int]:
    found = set[int]()
    for link in Path("/proc/self/fd").iterdir():
        try:
            match = SOCKET.fullmatch(os.readlink(link))
        except FileNotFoundError:  # closed meanwhile
            continue
        if match:
            found.add(int(match[1]))
    return found
