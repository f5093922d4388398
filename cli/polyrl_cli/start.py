"""Where the `polyrl` command begins: who interrupts it while its libraries load has interrupted nothing."""

import signal
import sys


def main() -> None:
    """Entry point of the `polyrl` command."""
    handler = signal.getsignal(signal.SIGINT)
    # Whoever ignores interrupts, as shells do for jobs beside them, goes on so.
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from polyrl_cli.app import main as command

    signal.signal(signal.SIGINT, handler)
    try:
        command()
    except KeyboardInterrupt:  # typer answers those of a command, not of the time in which it makes one
        sys.exit(128 + signal.SIGINT)
