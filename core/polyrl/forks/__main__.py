"""`python -m polyrl.forks FD MODULES...`: loads the modules, and serves forks to whoever has the other end of FD."""

from __future__ import annotations

import importlib
import socket
import sys

from polyrl import interpreter, parent_death_signal
from polyrl.forks import server


def main() -> None:
    """Until whoever asks is gone."""
    parent_death_signal.hold()
    with interpreter.loading():
        for module in sys.argv[2:]:
            importlib.import_module(module)
    server.run(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
