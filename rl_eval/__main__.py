"""Entry point of ``rl-eval`` and ``python -m rl_eval``: the command line, in a process that computes as runners do."""

from __future__ import annotations

import gc
import os
import sys

from rl_eval.supervision.process_environment import reproducible_environment

__all__ = ["main"]


def main() -> None:
    """Run the command line, starting Python again first if a variable that it reads at its start is missing."""
    missing = {name: value for name, value in reproducible_environment().items() if not os.environ.get(name)}
    if missing:
        command = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, command, os.environ | missing)  # noqa: S606 -- This very command.
    from rl_eval.cli import main as command_line

    try:
        command_line()
    finally:
        gc.freeze()  # Else Python ends by a search for cycles in all that torch and Ray brought: most of a second.


if __name__ == "__main__":
    main()
