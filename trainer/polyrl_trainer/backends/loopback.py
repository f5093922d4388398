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
LISTENS: Final = "0A"
MAPPED: Final = "0000000000000000FFFF0000"
"""How an address of IPv4 begins where it is written as one of IPv6: one end of a connection may be either."""
HERE: Final = re.compile(r"[0-9A-F]{6}7F|0{24}01000000")
"""Addresses of loopback: 127.0.0.0/8 and ::1, as the kernel writes them."""
SOCKET: Final = re.compile(r"socket:\[(\d+)\]")


class Connection(NamedTuple):
    """A line of the kernel's table: one end of a connection."""

    local: str
    remote: str
    uid: int
    inode: int


def read_table(text: str) -> Iterator[Connection]:
    """What is or was connected, by /proc/net/tcp or tcp6 (proc(5)): half-closed ends have bytes to read as well."""
    for line in text.splitlines()[1:]:
        fields = line.split()
        if fields[3] != LISTENS:
            local, remote = (end.removeprefix(MAPPED) for end in fields[1:3])
            yield Connection(local, remote, uid=int(fields[7]), inode=int(fields[9]))


def strangers(table: list[Connection], own: Set[int], uid: int) -> list[int]:
    """Accounts at the other ends of the connections `own` (inodes) that are on this machine and are not `uid`; -1 for
    an end that no table holds."""
    # An end whose process has closed it has no inode and root's number: nobody can speak there any more.
    ends = {(one.local, one.remote): one.uid if one.inode else uid for one in table}
    here = [one for one in table if one.inode in own and HERE.match(one.remote)]
    others = (ends.get((one.remote, one.local), -1) for one in here)
    return sorted({other for other in others if other != uid})


def strangers_here() -> list[int]:
    """The strangers that this process has now; looked for twice, since the kernel's table changes while it is read."""
    first = _read_now()
    return sorted({*first} & {*_read_now()}) if first else []


def _read_now() -> list[int]:
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
