"""Everything that can go wrong, split by whose fault it is.

::

    EvalError
    ├── UsageError                 the caller's: fix the call and try again
    │   ├── ConfigError            a setting is unknown, impossible or cannot be honoured
    │   ├── WeightsError           weights do not fit the policy
    │   ├── EvaluatorBusy          an evaluator has no room for another request
    │   ├── ComparisonError        two results cannot be compared
    │   ├── UntrustedError         a result names code that may not run without consent
    │   ├── LogMismatch            an evaluation log holds another plan, policy or environment
    │   └── LogOwned               an evaluation log is being written by another driver
    ├── EpisodeError               the episode's: raised by a runner, recorded as a ``Fault``
    │   ├── EnvError               the environment raised, or broke its own contract
    │   ├── PolicyError            the policy raised, or returned what no environment can take
    │   └── EpisodeTimeout         the episode outlived ``episode_timeout_s``
    └── ClusterError               the machine's: nothing in the call is wrong
        ├── RunnerStartError       no runner came up in time
        ├── ClusterDied            the Ray cluster that this process had started died
        ├── RunnerLost             a runner died or fell silent
        ├── LogError               an evaluation log is damaged, or cannot be read or written
        ├── LogFenced              another driver took this one's evaluation log over
        └── NumericsMismatch       a runner computes floats in another way than its group
"""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable

from rl_eval.errors.redaction import redact_text


class EvalError(Exception):
    """Base of every error that rl_eval raises on purpose. Its text and its fields contain no secrets.

    Args:
        problem: What happened, in one or more sentences.
        key: Setting, argument, option, file or field that the error is about, such as ``"runners.num_runners"``.
        value: Its value. Anything but a string, a number, a bool or None is kept as its ``repr``.
        episode: Index of the episode.
        runner: Index of the runner.
        fix: What to do, as a sentence; the text of the error ends with it.
    """

    def __init__(
        self,
        problem: object = "",
        *,
        key: str = "",
        value: object = None,
        episode: int | None = None,
        runner: int | None = None,
        fix: str = "",
    ) -> None:
        self.fix = redact_text(fix)
        super().__init__(_joined(redact_text(str(problem)), self.fix))
        self.key = key
        scalar = value is None or isinstance(value, (bool, int, float))
        self.value = value if scalar else redact_text(value if isinstance(value, str) else repr(value))
        self.episode = episode
        self.runner = runner


def _joined(problem: str, fix: str) -> str:
    if not fix or not problem:
        return problem or fix
    return f"{problem} {fix}" if problem[-1] in ".?!" else f"{problem}. {fix}"


class UsageError(EvalError):
    """The call cannot work as written."""


class ConfigError(UsageError):
    """A setting is unknown, impossible, or cannot be honoured; the message names its key."""


class WeightsError(UsageError):
    """Weights do not fit the policy they were sent to."""


class EvaluatorBusy(UsageError):
    """An evaluator refused a request, because earlier ones are not done; no weights were copied."""


class ComparisonError(UsageError):
    """Two results cannot be compared; the message names what differs."""


class UntrustedError(UsageError):
    """A result names code, which runs only with the user's consent; the message lists the names."""


class LogMismatch(UsageError):
    """An evaluation log belongs to another plan, policy or environment; the message shows the difference.

    Args:
        differences: What differs.
        advice: What to do, for callers who choose the log's folder themselves.
    """

    def __init__(self, differences: str, advice: str = "") -> None:
        super().__init__(f"{differences}\n{advice}" if advice else differences)
        self.differences = differences


class LogOwned(UsageError):
    """Another driver is writing this evaluation log; the message names it."""


class EpisodeError(EvalError):
    """One episode went wrong; runners turn it into a :class:`~rl_eval.records.episode.Fault`."""


class EnvError(EpisodeError):
    """The environment raised, or returned something outside its own spaces."""


class PolicyError(EpisodeError):
    """The policy raised, or returned actions that the environment cannot take."""


class EpisodeTimeout(EpisodeError):
    """The episode ran longer than ``episode_timeout_s``."""


class ClusterError(EvalError):
    """Processes or machines failed; the call itself is fine."""


class RunnerStartError(ClusterError):
    """No runner came up within ``runner_start_timeout_s``."""


class ClusterDied(ClusterError):
    """The Ray cluster that this process had started died; Ray's client may end the process at any moment."""


class RunnerLost(ClusterError):
    """A runner died or fell silent."""


class PolicyUnavailable(ClusterError):
    """The policy cannot act for now, such as when its server is gone; a policy may raise it, and charges no episode."""


class LogError(ClusterError):
    """An evaluation log is damaged, or cannot be read or written; the message names the file."""


class LogFenced(ClusterError):
    """Another driver took the evaluation log over, since this one had been silent; it wrote nothing more."""


class NumericsMismatch(ClusterError):
    """A runner's numerics key differs from its group's, so its floats could differ too."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Finish an error message about an unknown word: the nearest known one, or all of them.

    What contains all of its parts is near: ``mean_return`` is meant to be ``episode_return_mean``.
    """
    options, parts = sorted(known), {*word.casefold().split("_")}
    containing = [option for option in options if parts <= {*option.split("_")}]
    close = sorted(containing, key=len)[:3] or difflib.get_close_matches(word, options, n=1)
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    return f"known: {', '.join(options)}"


def summary_of(error: BaseException) -> str:
    """Return the class name of an exception and its :func:`message_of`, as ``Type: message``."""
    return f"{type(error).__name__}: {message_of(error)}"


def message_of(error: BaseException) -> str:
    """Return the text of an exception; of one that has none, as of a bare ``assert``, the line that raised it."""
    name = type(error).__name__
    try:
        text = str(error)
    except Exception:
        return f"{name}, whose text cannot be read"
    return text if text not in {"", name} else _line_of(error) or name


def _line_of(error: BaseException) -> str:
    """Return the innermost line of a traceback; empty without one."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    place = f"at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}"
    return f"{place}: {frames[-1].line}" if frames[-1].line else place
