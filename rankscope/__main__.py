"""`python -m rankscope` and the `rankscope` command."""

from __future__ import annotations

import signal

__all__ = ["main"]


def main() -> None:
    """Run the command. Ctrl-C while modules are being imported ends the process immediately, without a traceback."""
    if is_default := signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from rankscope.cli import main as run

    if is_default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
