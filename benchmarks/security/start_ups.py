"""CPU seconds of a start: each role's program is imported whole, and what only security needs is there or is not.

What is left out in a turn are modules that nothing else needs, replaced by ones that do nothing, and what security does
at a start. Each start is a process of its own, and its CPU seconds are those that the system counts for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Final

SECURITY_ALONE: Final = (
    "polyrl.wire.engine_identity",
    "polyrl.wire.sealing",
    "polyrl.wire.unfinished",
    "polyrl.ledger.messages.sampled",
    "polyrl.history.strange_requests",
    "polyrl_operator.metrics_readers",
)
"""But for the operator's certificates (`polyrl_operator.secret`), without which it reaches no manager, and the look for
engines that depart, whose findings the journal keeps."""

NOTHING: Final = """
import sys, types
class Nothing(int):
    def __call__(self, *_, **__): return self
    def __getattr__(self, name):
        if name.startswith("__"): raise AttributeError(name)
        return self
class Left(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"): raise AttributeError(name)
        return Nothing()
for name in sys.argv[1:]: sys.modules[name] = Left(name)
"""

ROLES: Final = {
    "manager": (
        "import polyrl_rollout.manager.__main__",
        "from polyrl.keys import leave_no_core_dump; leave_no_core_dump()\n"
        "from polyrl_rollout.manager.journal import RevokedNames; RevokedNames(None)",
    ),
    "agent": (
        "import polyrl_rollout.agent.__main__",
        "from polyrl.keys import leave_no_core_dump; leave_no_core_dump()\n"
        "from polyrl.wire.engine_identity import draw_process; draw_process()",
    ),
    "operator": (
        "import polyrl_operator.__main__",
        "from polyrl.keys import leave_no_core_dump; leave_no_core_dump()\n"
        "from polyrl_operator.secret import make_certificate, server_tls; server_tls(make_certificate(['operator']))",
    ),
}
"""What a role imports, and what only security does as it starts."""


def start(role: str, *, secure: bool) -> float:
    """CPU seconds of one."""
    imports, acts = ROLES[role]
    program = f"{NOTHING}\n{imports}\n{acts if secure else ''}"
    process = subprocess.Popen([sys.executable, "-c", program, *(() if secure else SECURITY_ALONE)])
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"the start of {role} failed")
    return used.ru_utime + used.ru_stime
