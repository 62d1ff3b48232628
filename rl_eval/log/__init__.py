"""Evaluation log: a folder of files that never change, from which a run is read and continued.

``manifest.json`` describes the evaluation. ``segments/`` contains finished episodes and faults. ``owners/`` contains
the claims of drivers, ``amendments/`` accepted code changes, ``retries/`` requests to run failed episodes again, and
``damaged/`` segments that were set aside. See ``docs/log.md``.
"""

from rl_eval.log.contents import LogContents, read_log
from rl_eval.log.manifest import Manifest
from rl_eval.log.writer import EvaluationLog

__all__ = ["EvaluationLog", "LogContents", "Manifest", "read_log"]
