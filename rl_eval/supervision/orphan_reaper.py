"""Reaper of the child processes of dead runners, for the case that their node agent died, too.

If the evaluating process is killed, Ray ends its runners and node agents. But Ray ends neither the child processes of
runners nor a stopped runner. This small separate process survives its node agent. It reads the runners from a pipe.
When the pipe breaks, it waits until each runner dies, and then terminates the runner's child processes.

The process is ``python -m rl_eval.supervision.orphan_reaper SECONDS``, with the seconds between two checks. Its
standard input has one JSON line per runner.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from typing import IO, Final

from rl_eval.supervision.processes import ProcessInfo, end_runner, erase_recordings, living

_ROUND_S: Final = 0.5
_STOPPED_ROUNDS: Final = 20
"""Number of checks after which a stopped runner is terminated, because no process is left that could continue it."""


class OrphanReaper:
    """Node agent's handle on the reaper. It starts the reaper's process, and writes runners to its pipe.

    Args:
        round_s: Seconds between two checks of the runners.
    """

    def __init__(self, round_s: float = _ROUND_S) -> None:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        process = subprocess.Popen(  # noqa: S603  # This interpreter, this module.
            [sys.executable, "-m", __name__, str(round_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=env,
        )
        # The process forks at once, and its child continues: Ray ends the children of an actor, but not orphans.
        process.wait()
        assert process.stdin is not None
        self._pipe: IO[bytes] = process.stdin

    def learn(self, process_info: ProcessInfo) -> None:
        """Send a runner to the reaper, unless the reaper is stopped."""
        with contextlib.suppress(OSError, ValueError):  # Writing to a closed pipe raises ValueError.
            self._pipe.write(json.dumps(asdict(process_info)).encode() + b"\n")
            self._pipe.flush()

    def stop(self) -> None:
        """Stop the reaper, because no runner is left. Further calls have no effect."""
        if not self._pipe.closed:
            with contextlib.suppress(OSError):
                self._pipe.write(b"null\n")
                self._pipe.close()


def main() -> None:
    """Wait until the agent dies, then until its runners die, and terminate their child processes.

    If the agent stops normally, exit immediately.
    """
    if os.fork():
        os._exit(0)
    runners = []
    for line in sys.stdin:
        told = json.loads(line)
        if told is None:
            return
        runners.append(ProcessInfo(**told))
    still: dict[ProcessInfo, int] = dict.fromkeys(runners, 0)
    while still:
        for runner in list(still):
            status = living(runner)
            still[runner] = still[runner] + 1 if status and status.stopped else 0
            if status is None or still[runner] > _STOPPED_ROUNDS:
                end_runner(runner)
                erase_recordings(runner)
                del still[runner]
        time.sleep(float(sys.argv[1]))


if __name__ == "__main__":
    main()
