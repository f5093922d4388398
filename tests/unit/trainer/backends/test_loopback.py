"""Who is at the other end of a loopback connection, read from tables as the kernel prints them."""

from __future__ import annotations

import pytest

from polyrl_trainer.backends.loopback import read_table, strangers

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
OURS, THEIRS = "0100007F:9C41", "0100007F:B1F4"
OWN = 5001
MAPPED = "0000000000000000FFFF0000"
OURS6, THEIRS6 = f"{'0' * 24}01000000:9C41", f"{'0' * 24}01000000:B1F4"


def line(local: str, remote: str, uid: int, inode: int, state: str = "01") -> str:
    return f"   0: {local} {remote} {state} 00000000:00000000 00:00000000 00000000  {uid}        0 {inode} 1 0000 20\n"


ACCEPTED = line(OURS, THEIRS, 1000, OWN)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (ACCEPTED + line(THEIRS, OURS, 1000, 7), []),
        (ACCEPTED + line(THEIRS, OURS, 65534, 7), [65534]),
        (ACCEPTED + line(THEIRS, OURS, 0, 7), [0]),
        (ACCEPTED, [-1]),
        (ACCEPTED + line(THEIRS, OURS, 0, 0, state="06"), []),
        (line(OURS, "0A00000A:B1F4", 1000, OWN), []),
        (ACCEPTED + line(MAPPED + THEIRS, MAPPED + OURS, 65534, 7), [65534]),
        (line(MAPPED + OURS, MAPPED + THEIRS, 1000, OWN) + line(THEIRS, OURS, 65534, 7), [65534]),
        (line(OURS6, THEIRS6, 1000, OWN) + line(THEIRS6, OURS6, 65534, 7), [65534]),
        (line(OURS, THEIRS, 1000, OWN, state="08") + line(THEIRS, OURS, 65534, 7, state="05"), [65534]),
        (line(OURS, THEIRS, 1000, 6000) + line(THEIRS, OURS, 65534, 7), []),
        (line(OURS, "00000000:0000", 1000, OWN, state="0A") + line(THEIRS, OURS, 65534, 7), []),
    ],
    ids=[
        "our own",
        "another account",
        "root",
        "no end here",
        "closed by its process",
        "another machine",
        "who dials as IPv6",
        "who is dialled as IPv6",
        "IPv6",
        "half-closed",
        "not this process's",
        "only listening",
    ],
)
def test_the_account_of_the_other_end(lines: str, expected: list[int]) -> None:
    assert strangers(list(read_table(HEAD + lines)), {OWN}, 1000) == expected
