"""Evaluation log: a folder from which a run is read and continued.

Claims are the only files whose content changes after they were written.

- ``manifest.json`` describes the evaluation.
- ``segments/`` contains finished episodes and faults.
- ``owners/`` contains a claim of each driver, the process that runs the evaluation and writes the log.
- ``amendments/`` contains accepted code changes.
- ``retries/`` contains requests to run failed episodes again.
- ``damaged/`` contains segments that were set aside.

See ``docs/log.md``.
"""

from rl_eval.log.contents import LogContents, read_log
from rl_eval.log.manifest import Manifest
from rl_eval.log.writer import EvaluationLog

__all__ = ["EvaluationLog", "LogContents", "Manifest", "read_log"]
