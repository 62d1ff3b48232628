"""The evaluation log: a folder of files that never change, from which an evaluation is read, and continued.

``manifest.json`` says what is evaluated, ``segments/`` holds what finished, ``owners/`` says who writes,
``amendments/`` which changes of the code were accepted, and ``damaged/`` what was set aside. See ``docs/log.md``.
"""

from rl_eval.log.code_changes import version_notes
from rl_eval.log.contents import LogContents, read_log
from rl_eval.log.manifest import Manifest
from rl_eval.log.segments import Batch
from rl_eval.log.writer import EvaluationLog

__all__ = ["Batch", "EvaluationLog", "LogContents", "Manifest", "read_log", "version_notes"]
