"""The evaluation log: a folder of files that never change, from which an evaluation is read, and continued.

``manifest.json`` describes the evaluation, ``segments/`` holds finished episodes and faults, ``owners/`` the claims of
drivers, ``amendments/`` the accepted changes of the code, ``retries/`` which failed episodes were to run again, and
``damaged/`` segments that were set aside.
See ``docs/log.md``.
"""

from rl_eval.log.contents import LogContents, read_log
from rl_eval.log.manifest import Manifest
from rl_eval.log.writer import EvaluationLog

__all__ = ["EvaluationLog", "LogContents", "Manifest", "read_log"]
