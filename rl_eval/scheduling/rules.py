"""Rules that may end an evaluation before all episodes of its plan have run.

A rule is asked about each completed prefix of the plan, in order: after the first episode, after the first two, and so
on. The first answer ends the evaluation, and the episodes behind this prefix do not count. A rule sees only outcomes,
in plan order. So neither the runners nor the time of finishing can change the number of episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol, final, runtime_checkable

import numpy as np
import numpy.typing as npt

from rl_eval.errors import ConfigError, EvalError
from rl_eval.errors.redaction import redact_text
from rl_eval.records.episode import EpisodeTable, Outcome, RuleEnd

RULES: Final = "evaluation.rules"


@runtime_checkable
class Rule(Protocol):
    """Rule that may end an evaluation. Each evaluation builds its own, so a rule may keep sums between calls."""

    def after(self, k: int, rows: npt.NDArray[np.void]) -> str | None:
        """Return the reason to end the evaluation after its first ``k`` episodes; None to continue.

        The calls of an evaluation have k = 1, 2, 3 and so on, also if an earlier process ran the episodes. The answer
        may depend only on the arguments.

        Args:
            k: Number of episodes, which are the first of the plan.
            rows: Outcomes of these episodes, in plan order: a read-only structured array, shape (k,), with the columns
                of the fingerprint (:meth:`~rl_eval.records.episode.EpisodeTable.fingerprint`). The return of a failed
                episode is NaN.
        """


def built_rules(factories: Mapping[str, Callable[[], Any]]) -> dict[str, Rule]:
    """Build the rules of an evaluation, by name.

    Raises:
        ConfigError: A factory raised an exception, or built something else.
    """
    rules = {name: _built(name, factory) for name, factory in factories.items()}
    for name, rule in rules.items():
        if not isinstance(rule, Rule):
            problem = f"{RULES} has {name}, but a {type(rule).__name__} has no method after(k, rows)"
            raise ConfigError(problem, key=RULES, value=name, fix="Pass a class with this method, or another factory.")
    return rules


def _built(name: str, factory: Callable[[], Any]) -> Any:
    try:
        return factory()
    except Exception as error:
        problem = f"{RULES} has {name}, which raised {type(error).__name__}: {error}"
        raise ConfigError(problem, key=RULES, value=name) from error


@final
class Rules:
    """Rules of one evaluation.

    Args:
        rules: The rules, by name.
        table: Committed records of the evaluation.
    """

    def __init__(self, rules: Mapping[str, Rule], table: EpisodeTable) -> None:
        self._rules, self._table = rules, table
        self._asked = 0
        """Length of the longest prefix that the rules have seen."""
        self._rows = np.zeros(len(table), table.outcomes(slice(0)).dtype)
        self._shown = self._rows.view()
        self._shown.flags.writeable = False

    def ask(self) -> RuleEnd | None:
        """Ask about the prefixes that were completed since the last call; return the first answer, if there is one.

        Raises:
            EvalError: A rule raised an exception.
        """
        outcome, first, end = self._table.rows["outcome"], self._asked, self._asked
        while end < len(outcome) and outcome[end] != Outcome.MISSING:
            end += 1
        if end == first:
            return None
        self._rows[first:end] = self._table.outcomes(slice(first, end))
        self._asked = end
        answers = (self._answer(k) for k in range(first + 1, end + 1))
        return next(filter(None, answers), None)

    def _answer(self, k: int) -> RuleEnd | None:
        for name, rule in self._rules.items():
            try:
                reason = rule.after(k, self._shown[:k])
            except Exception as error:
                problem = f"the rule {name} raised {type(error).__name__} after {k} episodes: {error}"
                raise EvalError(problem, key=RULES, value=name) from error
            if reason:
                return RuleEnd(k, name, redact_text(str(reason)))
        return None
