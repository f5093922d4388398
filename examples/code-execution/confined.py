"""Runs a program that nobody has read, in a process that first gives up what the program does not need.

    python -BEs confined.py CPU_SECONDS MEMORY_MB SCRATCH    the last is a descriptor, the program's /dev/fd/3

Given up, in this order: more than one core's seconds, memory, size of files (rlimits); capabilities, and new ones by
programs (no_new_privs); files, but for that one and reading Python's own (Landlock, where the kernel can also TCP and
signals); and all system calls but those of `calls.py`, which compute, print and read (seccomp). Only then one line on
stderr says READY, and the program is read from stdin, so no program can say it; what cannot be given up is said there
instead. Linux 5.13 or newer, x86-64 or arm64; in a container too: neither namespaces nor privileges are needed.

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

from calls import filter_steps

READY = "confined"
FILE_BYTES = 1 << 20
LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 1, 38, 22

CREATE_RULESET, ADD_RULE, RESTRICT_SELF, CAPSET = 444, 445, 446, {"x86_64": 126, "aarch64": 91}
READ = 1 << 2 | 1 << 3  # files and folders
WRITE = 1 << 1 | 1 << 2 | 1 << 14  # of a file: write, read, truncate
FILE_RIGHTS = (13, 14, 15, 15, 16)  # how many a version of Landlock knows; later ones as the fifth
TCP, SCOPES = 3, 3  # binding and connecting; signals and abstract sockets across the border
SCRATCH = 3


def confine(cpu_seconds, memory_mb):
    """Gives up everything named above. Raises OSError for what the platform does not let a process give up."""
    check(LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "ending with the parent")
    limit_resources(cpu_seconds, memory_mb)
    check(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "giving up new privileges")
    close_files()
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
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))  # SIGKILL, which no program handles


def close_files():
    """Landlock: reading Python's own files, the scratch file, nothing else; no file or folder is made or removed."""
    version = check(LIBC.syscall(CREATE_RULESET, None, 0, 1), "asking for Landlock")
    rights = (1 << FILE_RIGHTS[min(version, 5) - 1]) - 1
    attributes = struct.pack("QQQ", rights, TCP, SCOPES)[: 8 if version < 4 else 16 if version < 6 else 24]
    rules = check(LIBC.syscall(CREATE_RULESET, attributes, len(attributes), 0), "Landlock's rules")
    readable = {sys.prefix, sys.base_prefix, "/usr/lib", "/lib", "/lib64", "/etc/ld.so.cache", "/dev/urandom"}
    for path in readable:
        if os.path.exists(path):
            allow(rules, path, READ if os.path.isdir(path) else 1 << 2)
    allow(rules, f"/dev/fd/{SCRATCH}", WRITE & rights)
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
    """seccomp, with the filter of `calls.py`."""
    steps = filter_steps(platform.machine())
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
    cpu_seconds, memory_mb, scratch = (int(word) for word in sys.argv[1:])
    try:
        os.dup2(scratch, SCRATCH)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.chdir("/")
        confine(cpu_seconds, memory_mb)
    except (OSError, KeyError, AttributeError) as error:
        sys.exit(f"this platform cannot confine a program: {error}")
    print(READY, file=sys.stderr, flush=True)
    os.dup2(nowhere, sys.stderr.fileno())
    del sys.path[0]  # where this file lies
    program, sys.argv = sys.stdin.read(), ["program"]
    exec(compile(program, "program", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()
