"""Runs a program that nobody has read, in a process that first gives up what the program does not need.

    python -I confined.py FOLDER CPU_SECONDS MEMORY_MB      it may write in FOLDER alone

Given up, in this order: more than one core's seconds, memory, size of files, further processes and threads (rlimits and
seccomp); capabilities, and new ones by programs (no_new_privs); files, but for FOLDER and reading Python's own
(Landlock); sockets, signals, tracing and changes of files' attributes (seccomp). Only then one line on stderr says
READY, and the program is read from stdin, so no program can say it; what cannot be given up is said there instead.
Linux 5.13 or newer, x86-64 or arm64; in a container too: neither namespaces nor privileges are needed.

It keeps a model's slips and tricks off the machine. It is no wall against an attacker who knows a hole of the kernel:
for that run the trainer's pod under gVisor or Kata, and leave this in place.
"""

import ctypes
import os
import platform
import resource
import signal
import struct
import sys

READY = "confined"
FILE_BYTES = 1 << 20
LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 1, 38, 22

CREATE_RULESET, ADD_RULE, RESTRICT_SELF, CAPSET = 444, 445, 446, {"x86_64": 126, "aarch64": 91}
READ = 1 << 2 | 1 << 3  # files and folders
RIGHTS = {
    1: (1 << 13) - 1,
    2: (1 << 14) - 1,
    3: (1 << 15) - 1,
}  # all rights that a version of Landlock knows; later as 3

# By architecture: number of its audit; system calls that are refused.
DENIED = {
    "x86_64": (0xC000003E, {
        "socket": 41, "socketpair": 53, "clone": 56, "fork": 57, "vfork": 58, "execve": 59, "kill": 62, "shmget": 29,
        "ptrace": 101, "tkill": 200, "tgkill": 234, "prlimit64": 302, "process_vm_readv": 310, "process_vm_writev": 311,
        "execveat": 322, "setrlimit": 160, "chmod": 90, "fchmod": 91, "fchmodat": 268, "chown": 92, "utimensat": 280,
        "setxattr": 188, "bpf": 321, "userfaultfd": 323, "truncate": 76, "fchown": 93, "lchown": 94, "fchownat": 260,
        "utime": 132, "utimes": 235, "futimesat": 261, "lsetxattr": 189, "removexattr": 197, "lremovexattr": 198,
    }),
    "aarch64": (0xC00000B7, {
        "socket": 198, "socketpair": 199, "clone": 220, "execve": 221, "kill": 129, "shmget": 194, "ptrace": 117,
        "tkill": 130, "tgkill": 131, "prlimit64": 261, "process_vm_readv": 270, "process_vm_writev": 271,
        "execveat": 281, "setrlimit": 164, "fchmod": 52, "fchmodat": 53, "fchownat": 54, "utimensat": 88,
        "setxattr": 5, "bpf": 280, "userfaultfd": 282, "truncate": 45, "fchown": 55, "lsetxattr": 6, "removexattr": 14,
        "lremovexattr": 15,
    }),
}  # fmt: skip
EVERYWHERE = {"clone3": 435, "io_uring_setup": 425, "pidfd_open": 434, "pidfd_send_signal": 424, "fchmodat2": 452}


def confine(folder, cpu_seconds, memory_mb):
    """Gives up everything named above. Raises OSError for what the platform does not let a process give up."""
    check(LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "ending with the parent")
    limit_resources(cpu_seconds, memory_mb)
    check(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "giving up new privileges")
    close_files(folder)
    drop_capabilities()
    refuse_system_calls()


def limit_resources(cpu_seconds, memory_mb):
    limits = {
        resource.RLIMIT_AS: memory_mb << 20,
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for kind, wanted in limits.items():
        hard = resource.getrlimit(kind)[1]
        least = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(kind, (least, least))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))  # SIGXCPU, then SIGKILL


def close_files(folder):
    """Landlock: reading Python's own files, anything beneath `folder`, nothing else."""
    version = check(LIBC.syscall(CREATE_RULESET, None, 0, 1), "asking for Landlock")
    rights = RIGHTS.get(version, RIGHTS[3])
    attributes = struct.pack("Q", rights)
    rules = check(LIBC.syscall(CREATE_RULESET, attributes, len(attributes), 0), "Landlock's rules")
    readable = {sys.prefix, sys.base_prefix, "/usr/lib", "/lib", "/lib64", "/etc/ld.so.cache", "/dev/urandom"}
    for path in readable:
        if os.path.exists(path):
            allow(rules, path, READ if os.path.isdir(path) else 1 << 2)
    allow(rules, folder, rights & ~1)  # all but executing
    check(LIBC.syscall(RESTRICT_SELF, rules, 0), "closing files")
    os.close(rules)


def allow(rules, path, rights):
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    check(LIBC.syscall(ADD_RULE, rules, 1, struct.pack("=Qi", rights, place), 0), f"Landlock's rule of {path}")
    os.close(place)


def drop_capabilities():
    """A container's root has some."""
    header, none = struct.pack("Ii", 0x20080522, 0), bytes(24)
    check(LIBC.syscall(CAPSET[platform.machine()], header, none), "dropping capabilities")


def refuse_system_calls():
    """seccomp: a BPF program that answers EPERM to DENIED, and to another architecture's calls."""
    audit, calls = DENIED[platform.machine()]
    load, equal, at_least, answer = 0x20, 0x15, 0x35, 0x06
    refused, allowed = 0x00050001, 0x7FFF0000
    numbers = sorted({*calls.values(), *EVERYWHERE.values()})
    last = len(numbers) + 5  # the refusal's place; a jump counts from the step after its own
    steps = [(load, 0, 0, 4), (equal, 0, last - 2, audit), (load, 0, 0, 0), (at_least, last - 4, 0, 1 << 30)]
    steps += [(equal, last - place - 1, 0, number) for place, number in enumerate(numbers, 4)]
    steps += [(answer, 0, 0, allowed), (answer, 0, 0, refused)]
    program = b"".join(struct.pack("HBBI", *step) for step in steps)
    buffer = ctypes.create_string_buffer(program, len(program))
    filters = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(buffer))
    check(LIBC.prctl(PR_SET_SECCOMP, 2, filters, 0, 0), "refusing system calls")


def check(result, what):
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def main():
    folder, cpu_seconds, memory_mb = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.chdir(folder)
        confine(folder, cpu_seconds, memory_mb)
    except (OSError, KeyError, AttributeError) as error:
        sys.exit(f"this platform cannot confine a program: {error}")
    print(READY, file=sys.stderr, flush=True)
    os.dup2(nowhere, sys.stderr.fileno())
    program, sys.argv = sys.stdin.read(), ["program"]
    exec(compile(program, "program", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()
