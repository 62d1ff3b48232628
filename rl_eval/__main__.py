"""Entry point of ``rl-eval`` and ``python -m rl_eval``: the command line, with the environment variables of runners."""

from __future__ import annotations

import gc
import os
import sys
from typing import Final

from rl_eval.supervision.process_environment import reproducible_environment

_STDERR: Final = 2


def main() -> None:
    """Run the command line.

    Restart Python first if a variable that it reads at its start is missing, or if a standard stream is closed.
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
        gc.freeze()  # Otherwise Python searches all objects of torch and Ray for cycles at exit, for most of a second.


def _fill_standard_streams() -> bool:
    """Open /dev/null in place of closed standard streams; return whether there were any.

    Otherwise the next opened file, such as a log, gets their descriptor and receives the output of libraries.
    """
    filled = False
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(descriptor, True)
        filled = True
    os.close(descriptor)
    return filled


if __name__ == "__main__":
    main()
