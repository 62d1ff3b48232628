"""Numbers as text, and the base class of objects that are printed as a page."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final

from rl_eval.adapters import RANDOM, SERVED
from rl_eval.errors import listed
from rl_eval.errors.other_names import KnowsNames

if TYPE_CHECKING:
    from rl_eval.results.stats.interval import Interval


_PAGES: Final = "rl_eval.reports.pages"
"""Module with the function ``page_of``, which returns the page of an object."""


class Printed(KnowsNames):
    """Base class of objects that are printed as a page.

    In a terminal, :mod:`rich` adds colours. A notebook shows a table.
    """

    __slots__ = ()

    def __str__(self) -> str:
        return str(_page_of(self))

    def __rich__(self) -> Any:
        return _page_of(self)

    def _repr_html_(self) -> str:
        return str(_page_of(self)._repr_html_())


def _page_of(shown: Printed) -> Any:
    return importlib.import_module(_PAGES).page_of(shown)


def all_numbers(result: Printed) -> str:
    """Return the long page of a result as text."""
    return str(importlib.import_module(_PAGES).result_page(result))


_METHODS: Final = {
    "bca": "BCa bootstrap",
    "percentile": "percentile bootstrap",
    "student_t": "Student t",
    "clopper_pearson": "Clopper-Pearson",
    "wilson": "Wilson",
    "newcombe": "Newcombe",
}
BIASED_BEST: Final = "The highest of several means is biased upward. Quote its policy's mean over other episodes."
"""Meaning of the mean by which the best of several policies was chosen."""
_NAMED: Final = 6
"""Maximum number of names in a note."""
_CLAUSE_END: Final = re.compile(r"; |\. |, so ")
_LOADER: Final = re.compile(r"rl_eval\.integrations\.(\w+):\w+")
"""Factory of a library's models, as ``"module:attr"``."""


def decimals(spread: float, value: float = 0.0) -> int:
    """Return the number of decimals to show.

    Args:
        spread: Standard error of the value; 0 if there is none. The decimals show two digits of the standard error.
        value: The value. Without a standard error, the decimals show four digits of the value. A whole number then has
            no decimals.
    """
    if math.isfinite(spread) and spread > 0:
        return max(0, 1 - math.floor(math.log10(spread)))
    if not math.isfinite(value) or value == round(value):
        return 0
    return max(0, 3 - math.floor(math.log10(abs(value))))


def interval_places(interval: Interval, value: float) -> int:
    """Return the number of decimals for a value with an interval.

    A quarter of the interval's width is used as the standard error.
    """
    return decimals((interval.high - interval.low) / 4, value)


def number(value: float, places: int = 2) -> str:
    """Return a number as text, with thousands separators; ``n/a`` for NaN.

    Very large and small numbers have a power of ten.
    """
    if math.isnan(value):
        return "n/a"
    if math.isfinite(value) and (abs(value) >= 1e12 or places > 8):
        return f"{value:.4g}"
    text = f"{value:,.{places}f}"
    return text if text.strip("-0.") else text.removeprefix("-")


def rounded(value: float) -> str:
    """Return a number with four digits; a whole number without decimals."""
    return number(value, decimals(0.0, value))


def of_planned(count: int, planned: int) -> str:
    """Return a count, and the planned number if it differs, such as ``2 of 3``."""
    return f"{count:,}" if count == planned else f"{count:,} of {planned:,}"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, such as ``1 run`` or ``2,000 runs``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def percent(value: float) -> str:
    """Return a fraction as a percentage; ``n/a`` for NaN."""
    return "n/a" if math.isnan(value) else f"{100 * value:.1f} %"


def interval_text(interval: Interval, write: Callable[[float], str] = percent, *, brief: bool = False) -> str:
    """Return an interval as text, with its method and note. If there is no interval, return the reason.

    Args:
        interval: Interval, or the reason why there is none.
        write: Formats the ends.
        brief: Omit the method, and shorten the note to its first clause.
    """
    note = first_clause(interval.note) if brief else interval.note
    if not interval.exists:
        return f"no interval: {note}"
    ends = f"{100 * interval.confidence:g} % interval {write(interval.low)} to {write(interval.high)}"
    ends += "" if brief else f", {_METHODS[interval.method]}"
    return f"{ends} ({note})" if note else ends


def first_clause(text: str) -> str:
    """Return the first clause of a note or of the reason of a result."""
    return _CLAUSE_END.split(text, maxsplit=1)[0]


def several(count: int, what: str, confidence: float) -> str:
    """Return a note on the errors of several intervals or comparisons, each at one level; empty for fewer than two.

    The probability of any error is at most the sum of the probabilities of each error (Bonferroni).

    Args:
        count: Number of intervals or comparisons.
        what: Plural noun for them.
        confidence: Nominal level of each.
    """
    if count < 2:
        return ""
    one = 1 - confidence
    return (
        f"{count:,} {what} at {100 * confidence:g} %: each is wrong with a probability of {100 * one:.3g} %. The "
        f"probability that at least one is wrong can be up to {100 * min(1.0, count * one):.3g} %"
    )


def merged_notes(notes: Iterable[tuple[str, str]]) -> list[str]:
    """Return one note per text, given pairs of a name and a text; a note lists the names with its text."""
    names: dict[str, dict[str, None]] = {}
    for name, text in notes:
        names.setdefault(text, {})[name] = None
    return [f"{listed([*those], _NAMED)}: {text}" for text, those in names.items()]


def lookup(value: Any, *keys: str) -> str:
    """Return the text at a path of keys in nested mappings; empty if there is none."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return "" if value is None else str(value)


def environment_name(provenance: Mapping[str, Any]) -> str:
    """Return the environment's name without the digest of its data; empty if the provenance has no name."""
    return lookup(provenance, "identity", "environment", "env").partition(", digest ")[0]


def policy_name(provenance: Mapping[str, Any]) -> str:
    """Return the policy's name; empty if the provenance has no name.

    The random policy is ``random``. The name of a library's model is the end of its path, such as
    ``sb3:seed_1/best_model.zip``, because all models have the same factory, and many have the same file name. Boolean
    arguments, such as ``vecnormalize=False``, are appended. A policy on a server has its address.
    """
    factory = lookup(provenance, "identity", "policy")
    if factory == RANDOM:
        return "random"
    if factory == SERVED:
        return f"openpi://{lookup(provenance, 'config', 'policy', 'policy_kwargs', 'addresses')}"
    path = PurePath(lookup(provenance, "identity", "policy_kwargs", "path"))
    library = _LOADER.fullmatch(factory)
    if library is None or not path.name:
        return factory
    name = f"{path.parent.name}/{path.name}" if path.parent.name else path.name
    kwargs = provenance["identity"]["policy_kwargs"]
    switches = [f"{key}={value}" for key, value in kwargs.items() if isinstance(value, bool)]
    return " ".join([f"{library[1]}:{name}", *switches])


def weights_file(provenance: Mapping[str, Any]) -> str:
    """Return the path of the weights or of the model file; empty if the provenance has no path."""
    return lookup(provenance, "config", "policy", "weights") or lookup(provenance, "identity", "policy_kwargs", "path")


def weights_name(provenance: Mapping[str, Any], version: float) -> str:
    """Return the digests and the version of the weights, if they are known.

    Args:
        provenance: Provenance of the result.
        version: Version of the weights in the records; NaN if there is none.
    """
    digest, recorded = lookup(provenance, "weights", "digest"), provenance.get("weights")
    files = recorded.get("files") if isinstance(recorded, Mapping) else None
    named = {**files} if isinstance(files, Mapping) else {}
    of_files = [f"{'model file' if name == 'path' else name} {str(found)[:16]}" for name, found in named.items()]
    named_by = [*filter(None, (digest[:16], *of_files))]
    # Version 0 of a policy without weights says nothing.
    versions = [f"version {int(version)}"] if version > 0 or (named_by and version == 0) else []
    return "   ".join(named_by + versions)
