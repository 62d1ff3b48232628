"""Metrics of the user: functions that compute a number from the record of each completed episode."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_eval.config.references import import_attribute
from rl_eval.config.settings import EvaluationSection
from rl_eval.errors import ConfigError, summary_of
from rl_eval.records.episode import COLUMNS, EpisodeRecord, record_of
from rl_eval.supervision.caller import survivable

MetricFunction = Callable[[EpisodeRecord, Mapping[str, float]], float]


def scalar_columns(section: EvaluationSection) -> tuple[str, ...]:
    """Return the names of the ``info`` scalars, and of the metrics after them."""
    return (*section.info_keys, *section.metrics)


def metric_functions(section: EvaluationSection) -> dict[str, MetricFunction]:
    """Return the functions of ``evaluation.metrics``, by name.

    Raises:
        ConfigError: A function cannot be imported or called, or its name is that of another column.
    """
    found: dict[str, MetricFunction] = {}
    for name, given in section.metrics.items():
        key = f"evaluation.metrics.{name}"
        function = import_attribute(key, given) if isinstance(given, str) else given
        if not callable(function):
            problem = f"{key} is {given!r}, which is not callable"
            raise ConfigError(problem, key=key, value=given, fix="Pass a function, or its name module:attr.")
        if name in section.info_keys or name in COLUMNS:
            raise ConfigError(f"{key} has the name of another column", key=key, value=name, fix="Choose another name.")
        found[name] = function
    return found


def write_metrics(
    functions: Mapping[str, MetricFunction],
    rows: Sequence[tuple[Any, ...]],
    keys: Sequence[str],
    infos: npt.NDArray[np.float64],
    note: Callable[[str], None],
) -> None:
    """Compute the metrics of some episodes. A metric that raises is NaN, and adds a note.

    Args:
        functions: Functions by name.
        rows: Rows of the episodes.
        keys: Names of the columns of ``infos``, the metrics included.
        infos: Info scalars of the rows, shape (n, len(keys)); the metrics are written into it.
        note: Adds a note to the result.
    """
    places = {name: keys.index(name) for name in functions}
    for row, values in zip(rows, infos, strict=True):
        known = {key: float(value) for key, value in zip(keys, values, strict=True) if key not in functions}
        record = record_of(row, known)
        for name, function in functions.items():
            try:
                value = float(function(record, known))
            except survivable() as error:
                value = math.nan
                note(f"the metric {name} has no value in episode {record.index}: {summary_of(error)}")
            values[places[name]] = value
