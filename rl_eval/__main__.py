"""Entry point of ``rl-eval`` and ``python -m rl_eval``: the command line, in a process that computes as runners do."""

from __future__ import annotations

import gc
import os
import sys
from typing import Final

from rl_eval.supervision.process_environment import reproducible_environment

_STDERR: Final = 2


def main() -> None:
    """Run the command line.

    Python starts again first if a variable that it reads at its start is missing, or if a standard stream is closed.
    """
    filled = _fill_standard_streams()
    missing = {name: value for name, value in reproducible_environment().items() if not os.environ.get(name)}
    if missing or filled:
        command = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, command, os.environ | missing)  # noqa: S606 -- This very command.
    from rl_eval.cli import main as command_line

    try:
        command_line()
    finally:
        gc.freeze()  # Else Python ends by a search for cycles in all that torch and Ray brought: most of a second.


def _fill_standard_streams() -> bool:
    """Open /dev/null in place of closed standard streams; return whether there were any.

    Otherwise the next file that is opened, such as a log, gets their descriptor and all that libraries print there.
    """
    filled = False
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(descriptor, True)
        filled = True
    os.close(descriptor)
    return filled


if __name__ == "__main__":
    main()
