"""`python -m polyrl_rollout.engines.leashed COMMAND...`: becomes COMMAND, which then ends with its parent.

For programs that know nothing of PolyRL's leash; the kernel keeps the leash over exec.
"""

from __future__ import annotations

import os
import sys

from polyrl_rollout import leash

if __name__ == "__main__":
    leash.hold()
    os.execvp(sys.argv[1], sys.argv[1:])
