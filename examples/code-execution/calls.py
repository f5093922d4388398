"""The system calls that a confined program keeps, and the seccomp filter that lets no other through.

What is not here answers EPERM: sockets, processes and threads, signals, priorities, limits, prctl, namespaces, keys,
pipes, memory files, IPC and every change of a folder. A call of another architecture, or x32, ends the program.
"""

# Name: its number on x86-64, on arm64 (None: it has none).
CALLS = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "lseek": (8, 62), "fstat": (5, 80), "newfstatat": (262, 79),
    "statx": (332, 291), "stat": (4, None), "lstat": (6, None), "access": (21, None), "faccessat": (269, 48),
    "faccessat2": (439, 439), "readlink": (89, None), "readlinkat": (267, 78), "getdents64": (217, 61),
    "getcwd": (79, 17), "pread64": (17, 67), "pwrite64": (18, 68), "readv": (19, 65), "writev": (20, 66),
    "ftruncate": (77, 46), "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24),
    "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "mremap": (25, 216), "madvise": (28, 233),
    "brk": (12, 214), "futex": (202, 98), "sched_yield": (24, 124), "getrandom": (318, 278),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "sigaltstack": (131, 132),
    "restart_syscall": (219, 128), "alarm": (37, None), "setitimer": (38, 103),
    "nanosleep": (35, 101), "clock_nanosleep": (230, 115), "select": (23, None), "pselect6": (270, 72),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "gettimeofday": (96, 169), "times": (100, 153),
    "getrusage": (98, 165), "uname": (63, 160), "sysinfo": (99, 179), "getpid": (39, 172), "getppid": (110, 173),
    "gettid": (186, 178), "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177),
    "exit": (60, 93), "exit_group": (231, 94), "open": (2, None), "openat": (257, 56), "fcntl": (72, 25),
    "ioctl": (16, 29), "sched_getaffinity": (204, 123),
}  # fmt: skip

# Who opens to read does not truncate: Landlock sees that from Linux 6.2 on.
OPENING = (0x203, (0, 1, 2, 0x201, 0x202))
WHOLE = 0xFFFFFFFF
# Name: place of an argument, a mask, what it may be behind the mask.
ARGUMENTS = {
    "open": (1, *OPENING),
    "openat": (2, *OPENING),
    "fcntl": (1, WHOLE, (0, 1, 2, 3, 1030)),  # duplicates and flags of descriptors; no owner, signal or lock
    "ioctl": (1, WHOLE, (0x5401, 0x5413, 0x5450, 0x5451)),  # is it a terminal, its size, closing on exec
    "sched_getaffinity": (0, WHOLE, (0,)),
}

MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of CALLS, number of its audit
X32 = 1 << 30
LOAD, EQUAL, AT_LEAST, AND, ANSWER = 0x20, 0x15, 0x35, 0x54, 0x06
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050001, 0x80000000


def filter_steps(machine):
    """The BPF program: (code, steps to skip if true, if false, operand) each."""
    column, audit = MACHINES[machine]
    steps = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, audit), (ANSWER, 0, 0, KILL)]
    steps += [(LOAD, 0, 0, 0), (AT_LEAST, 0, 1, X32), (ANSWER, 0, 0, KILL)]
    for name, numbers in CALLS.items():
        if numbers[column] is not None:
            allowed = answer_by_argument(*ARGUMENTS[name]) if name in ARGUMENTS else [(ANSWER, 0, 0, ALLOW)]
            steps += [(EQUAL, 0, len(allowed), numbers[column]), *allowed]
    return [*steps, (ANSWER, 0, 0, REFUSE)]


def answer_by_argument(place, mask, values):
    """The arguments looked at are 32 bits wide for the kernel too: the low half of their 64."""
    steps = [(LOAD, 0, 0, 16 + 8 * place), (AND, 0, 0, mask)]
    for value in values:
        steps += [(EQUAL, 0, 1, value), (ANSWER, 0, 0, ALLOW)]
    return [*steps, (ANSWER, 0, 0, REFUSE)]
