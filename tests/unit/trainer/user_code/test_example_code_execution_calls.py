"""examples/code-execution: what its system-call filter answers, read as the kernel reads it, for both architectures."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

CALLS = runpy.run_path(str(Path(__file__).parents[4] / "examples" / "code-execution" / "calls.py"))
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050001, 0x80000000


def answer(machine: str, *call: int, audit: int | None = None) -> int:
    """The filter's answer to (number, arguments...)."""
    number, *arguments = call
    data = {0: number, 4: audit or AUDIT[machine]} | {16 + 8 * place: value for place, value in enumerate(arguments)}
    steps, at, held = CALLS["filter_steps"](machine), 0, 0
    while True:
        code, if_true, if_false, operand = steps[at]
        if code == 0x06:
            return int(operand)
        if code in (0x20, 0x54):
            held = data.get(operand, 0) if code == 0x20 else held & operand
        else:
            at += if_true if (held == operand if code == 0x15 else held >= operand) else if_false
        at += 1


# Number on x86-64, on arm64.
REFUSED = {
    "socket": (41, 198), "socketpair": (53, 199), "clone": (56, 220), "clone3": (435, 435), "execve": (59, 221),
    "kill": (62, 129), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424), "prctl": (157, 167), "seccomp": (317, 277), "prlimit64": (302, 261),
    "setpriority": (141, 140), "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119),
    "ioprio_set": (251, 30), "capset": (126, 91),
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "ptrace": (101, 117), "bpf": (321, 280),
    "keyctl": (250, 219), "add_key": (248, 217), "msgget": (68, 186), "semget": (64, 190), "shmget": (29, 194),
    "mq_open": (240, 180), "memfd_create": (319, 279), "pipe2": (293, 59), "io_uring_setup": (425, 425),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "mkdirat": (258, 34), "unlinkat": (263, 35),
    "fchmodat": (268, 53), "openat2": (437, 437), "a call of next year": (900, 900),
}  # fmt: skip


@pytest.mark.parametrize("column", [0, 1], ids=list(AUDIT))
def test_what_is_not_listed_is_refused(column: int) -> None:
    machine = list(AUDIT)[column]
    assert {name: answer(machine, numbers[column]) for name, numbers in REFUSED.items()} == dict.fromkeys(
        REFUSED, REFUSE
    )


@pytest.mark.parametrize(("machine", "fcntl"), [("x86_64", 72), ("aarch64", 25)])
def test_descriptors_get_no_owner_signal_or_lock(machine: str, fcntl: int) -> None:
    answers = {command: answer(machine, fcntl, 3, command) for command in (0, 1, 2, 3, 1030, 4, 6, 8, 10, 15, 1031)}
    assert {command for command, given in answers.items() if given == ALLOW} == {0, 1, 2, 3, 1030}


@pytest.mark.parametrize(("machine", "openat", "affinity"), [("x86_64", 257, 204), ("aarch64", 56, 123)])
def test_arguments_decide_for_files_and_affinity(machine: str, openat: int, affinity: int) -> None:
    read, truncating_read, write_new = 0o2000000, 0o1000, 0o1101
    answers = [answer(machine, openat, 0, 0, flags) for flags in (read, truncating_read, write_new)]
    assert answers == [ALLOW, REFUSE, ALLOW]
    assert [answer(machine, affinity, pid) for pid in (0, 1)] == [ALLOW, REFUSE]


@pytest.mark.parametrize("machine", AUDIT)
def test_another_architectures_calls_end_the_program(machine: str) -> None:
    read = {"x86_64": 0, "aarch64": 63}[machine]
    assert answer(machine, read) == ALLOW
    assert answer(machine, read, audit=0x40000003) == KILL
    assert answer(machine, read | 1 << 30) == KILL
