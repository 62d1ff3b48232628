"""Error classes, grouped by cause.

::

    EvalError
    ├── UsageError                 by the caller: fix the call and try again
    │   ├── ConfigError            a setting is unknown, invalid, or contradicts another setting
    │   ├── WeightsError           weights do not fit the policy
    │   ├── EvaluatorBusy          the queue of an evaluator is full
    │   ├── ComparisonError        two results cannot be compared
    │   ├── UntrustedError         a result names code that needs the user's consent to run
    │   ├── LogMismatch            an evaluation log has another plan, policy, environment, weights or code
    │   └── LogOwned               another process is writing the evaluation log
    ├── EpisodeError               in an episode: raised by a runner, recorded as a ``Fault``
    │   ├── EnvError               the environment raised, or broke its own contract
    │   │   └── EnvFailed          the environment failed in its own process
    │   ├── PolicyError            the policy raised, or returned invalid actions
    │   └── EpisodeTimeout         the episode exceeded ``episode_timeout_s``
    └── ClusterError               by the machine: the call is correct
        ├── RunnerStartError       no runner started in time
        ├── ClusterDied            the Ray cluster has died, or cannot be reached
        ├── RunnerLost             a runner died or stopped answering
        ├── PolicyUnavailable      a policy cannot act for now, for example because its server does not answer
        ├── LogError               an evaluation log is damaged, or cannot be read or written
        ├── LogFenced              another process took over the evaluation log
        └── NumericsMismatch       a runner computes floats differently from its group
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar, cast

from rl_eval.errors.redaction import redact_text

_Function = TypeVar("_Function", bound=Callable[..., Any])
_LONGEST_PART = 4_000
"""Maximum number of characters of a frame, a message or a line of a note in a traceback, so that a fault has frames."""


class EvalError(Exception):
    """Base of every error that rl_eval raises on purpose. Its text and its fields contain no secrets.

    Args:
        problem: Description of the problem, in one or more sentences.
        key: Setting, argument, option, file or field with the problem, such as ``"runners.num_runners"``.
        value: Value of the setting or argument; stored as its ``repr`` unless it is a string, a number, a bool or None.
        episode: Index of the episode.
        runner: Index of the runner.
        fix: Next step of the user, as a sentence; the text of the error ends with it.
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
        self.problem, self.fix = redact_text(str(problem)), redact_text(fix)
        super().__init__(_joined(self.problem, self.fix))
        self.key = key
        scalar = value is None or isinstance(value, (bool, int, float))
        self.value = value if scalar else redact_text(value if isinstance(value, str) else repr(value))
        self.episode = episode
        self.runner = runner


def _joined(problem: str, fix: str) -> str:
    if not fix or not problem:
        return problem or fix
    end = problem[-1]
    return f"{problem}{'' if end.isspace() else ' ' if end in '.?!' else '. '}{fix}"


class UsageError(EvalError):
    """The call cannot work as written."""


class ConfigError(UsageError):
    """A setting is unknown, invalid, or contradicts another setting; the message names the key of the setting."""


class WeightsError(UsageError):
    """Weights do not fit the policy into which they should be copied."""


class EvaluatorBusy(UsageError):
    """The queue of an evaluator is full, so the evaluator rejected a request; no weights were copied."""


class ComparisonError(UsageError):
    """Two results cannot be compared; the message names the reason."""


class UntrustedError(UsageError):
    """A result names code that needs the user's consent to run; the message lists the names."""


class LogMismatch(UsageError):
    """An evaluation log has another plan, policy, environment, weights or code; the message shows the difference.

    Args:
        differences: Differences between the log and this evaluation.
        fix: Next step, for callers who choose the log's folder.
    """

    def __init__(self, differences: str, fix: str = "") -> None:
        super().__init__(f"{differences}\n" if fix else differences, key="output", fix=fix)
        self.differences = differences


class LogOwned(UsageError):
    """Another process is writing this evaluation log; the message names the process."""


class EpisodeError(EvalError):
    """One episode failed; runners convert the error to a :class:`~rl_eval.records.episode.Fault`.

    ``evaluate`` raises it if every attempt failed alike. Then ``result`` is the result.
    """

    result: Any = None


class EnvError(EpisodeError):
    """The environment raised, or returned a value outside its spaces."""


class EnvFailed(EnvError):
    """The environment failed in its own process: the process ended, or the environment's error cannot be sent."""


class PolicyError(EpisodeError):
    """The policy raised, or returned invalid actions."""


class EpisodeTimeout(EpisodeError):
    """The episode ran longer than ``episode_timeout_s``."""


class ClusterError(EvalError):
    """Processes or machines failed; the call is correct."""


class RunnerStartError(ClusterError):
    """No runner started within ``runner_start_timeout_s``."""


class ClusterDied(ClusterError):
    """The Ray cluster has died, or cannot be reached; Ray's client may end the process at any moment."""


class RunnerLost(ClusterError):
    """A runner died or stopped answering."""


class PolicyUnavailable(ClusterError):
    """A policy cannot act for now, for example because its server does not answer.

    This error uses up no attempt of an episode.
    """


class LogError(ClusterError):
    """An evaluation log is damaged, or cannot be read or written; the message names the file."""


class LogFenced(ClusterError):
    """Another process took over the evaluation log, because this process had been silent.

    This process stopped writing.
    """


class NumericsMismatch(ClusterError):
    """The numerics key of a runner differs from that of its group, so its floats could differ too."""


def nearest(word: str, known: Iterable[str], section: str = "") -> str:
    """Return advice about an unknown word: "did you mean" and the nearest known words, or all known words.

    A known word that contains all parts of the unknown word is near: ``episode_return_mean`` for ``mean_return``. So is
    a known word whose parts are all in the unknown word: ``std`` for ``std_return``. ``section`` precedes near words.
    """
    known = sorted(known)
    close = [f"{section}{one}" for one in nearest_words(word, known)]
    return f"did you mean {' or '.join(map(repr, close))}?" if close else f"known: {', '.join(known)}"


_SYNONYMS: Final = {
    **dict.fromkeys(("n", "nb", "number"), "num"),
    **dict.fromkeys(("workers", "actors", "processes"), "runners"),
    **dict.fromkeys(("model", "checkpoint", "agent"), "policy"),
    **dict.fromkeys(("out", "outdir", "dir", "directory", "folder", "log", "logdir", "rundir"), "output"),
    **dict.fromkeys(("gpu", "cuda"), "device"),
    "environment": "env",
    "format": "to",
    "reward": "return",
    "rewards": "returns",
}
"""Parts of names in other libraries, with the parts of names here."""


def nearest_words(word: str, known: Sequence[str]) -> list[str]:
    """Return at most three known words that an unknown word may mean, the nearest first."""
    if word in known:
        return [word]
    named = [_SYNONYMS.get(part, part) for part in word.casefold().split("_")]
    parts, near = {*named}, functools.partial(difflib.get_close_matches, "_".join(named), known, n=1)
    known_parts = {option: {_SYNONYMS.get(part, part) for part in option.split("_")} for option in known}
    containing = [option for option in known if parts <= known_parts[option]]
    contained = [option for option in known if parts > known_parts[option]]
    found = near(cutoff=0.9) or sorted(containing, key=len)[:3] or sorted(contained, key=len)[-1:] or near()
    spelled = [difflib.get_close_matches(part, {*"_".join(known).split("_")}, 1, 0.8) or [part] for part in named]
    corrected = "_".join(part for part, *_ in spelled)
    return found or (nearest_words(corrected, known) if corrected != "_".join(named) else [])


@contextlib.contextmanager
def needs_extra(name: str, problem: str, key: str = "", value: Any = None) -> Iterator[None]:
    """Replace the error of a failed import by a :class:`ConfigError` that names the extra to install."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(problem, key=key, value=value, fix=f"Run pip install 'rl-eval[{name}]'.") from error


def check_known(key: str, value: object, known: Collection[str], error: type[EvalError] = ConfigError) -> None:
    """Raise an error for a value that is not one of the known words."""
    if value not in known:
        raise error(f"{key} is {value!r}: {nearest(str(value), known)}", key=key, value=value)


def listed(names: Sequence[Any], most: int) -> str:
    """Return the first ``most`` names, separated by commas, and the number of the other names."""
    shown = ", ".join(map(str, names[:most]))
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


_RENAMED: Final = {"log_dir": "output", "n": "num_episodes"}
"""Names of former keywords and of short options, with the present names of the keywords."""


def checked_keywords(function: _Function, elsewhere: Callable[[str], str] = lambda _: "") -> _Function:
    """Make a function reject arguments that it does not have, with a :class:`ConfigError`.

    For a keyword, the error names the nearest known keyword.

    Args:
        function: The function.
        elsewhere: Returns advice for a keyword that belongs to another function; empty if there is none.
    """
    parameters = inspect.signature(function).parameters.values()
    known = [one.name for one in parameters if one.name != "self"]
    places = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]

    @functools.wraps(function)
    def checked(*args: Any, **keywords: Any) -> Any:
        if unknown := keywords.keys() - known:
            key = min(unknown)
            advice = elsewhere(key) or nearest(_RENAMED.get(key, key), known)
            raise ConfigError(f"{function.__qualname__}() has no argument {key!r}: {advice}", key=key)
        if len(args) > len(places):
            problem = f"{function.__qualname__}() has the arguments {', '.join(places)} by position, not {len(args)}"
            raise ConfigError(problem, key=places[-1], value=args[len(places)], fix="Pass the others by name.")
        return function(*args, **keywords)

    return cast(_Function, checked)


def summary_of(error: BaseException) -> str:
    """Return the class name of an exception and its :func:`message_of`, as ``Type: message``."""
    return f"{type(error).__name__}: {message_of(error)}"


def message_of(error: BaseException) -> str:
    """Return the text of an exception, without secrets, and cut if it is very long.

    If the text is empty, as for a bare ``assert``, return the line that raised it.
    """
    name = type(error).__name__
    try:
        text = str(error)
    except Exception:
        return f"{name}, whose text cannot be read"
    return redact_text(text if text not in {"", name} else _line_of(error) or name)


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an exception and its causes, without secrets; only the end of a long traceback."""
    parts, left = [], 100_000
    for part in reversed([*traceback.TracebackException.from_exception(error).format()]):
        shown = part if len(part) <= _LONGEST_PART else f"{redact_text(part, _LONGEST_PART)}\n"
        left -= len(shown)
        if left < 0:
            break
        parts.append(shown)
    return redact_text("".join(reversed(parts)))


def _line_of(error: BaseException) -> str:
    """Return the location and the source line that raised an exception; an empty string if there is no traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    place = f"at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}"
    return f"{place}: {frames[-1].line}" if frames[-1].line else place
