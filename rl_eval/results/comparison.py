"""Comparison of two results: checks that they can be compared, and statistics of their difference.

Episodes are paired by index. Equal indices mean equal starts only if plan, environment and step limit are equal. If
one of these differs, an error names the difference. A pair is an episode that completed on both sides. In the plan, a
pair comes before the first episode that one of the sides has not finished.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from rl_eval.errors import ComparisonError, UsageError, checked_keywords
from rl_eval.records.episode import RuleEnd
from rl_eval.records.guarantee import is_of_guarantee
from rl_eval.records.plain import ABSENT, Difference, differences, plain
from rl_eval.results.conditions import condition_masks
from rl_eval.results.observations import observed, rows_of, values_of
from rl_eval.results.stats.aggregate import exact_mean
from rl_eval.results.stats.interval import Bounds, Interval, no_interval
from rl_eval.results.stats.paired import McNemar, PairedDifference, difference_interval, mcnemar, paired_difference
from rl_eval.results.stats.rows import Rows
from rl_eval.results.text import (
    Printed,
    environment_name,
    interval_places,
    number,
    policy_name,
    several,
    weights_name,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from rl_eval.results.result import EvalResult


MUST_AGREE: Final = ("environment", "max_episode_steps")
"""Parts of ``provenance["identity"]`` that must be equal, so that equal seeds start equal episodes."""

_ZERO_SUM: Final = (
    "the returns of the agents sum to 0 in every episode, so their sum does not compare policies; to compare the "
    "policies of a game, use rl-eval crossplay"
)
_UNTESTED: Final = "the sum of the differences is too large for a float"
_SHOWN: Final = 5
_LONGEST: Final = 40
"""Maximum number of shown characters of a value. A digest has 32 characters."""

_RECORDED: Final = ("identity", "weights", "python", "packages", "numerics")
"""Parts of the provenance on which numbers may depend."""
_OF_A_POLICY: Final = ("identity", "weights")
"""Parts that determine a policy's numerics."""
_UNTOLD: Final = ("weights.version",)
"""Settings that are not compared, because a difference has no meaning."""
_OUTPUTS: Final = "numerics.outputs"
"""Digest of a policy's outputs, which differs between policies."""
_OF_FLOATS: Final = ("numerics", "packages", "python")
"""Parts of the provenance that change the last bits of one policy's actions."""


@dataclass(frozen=True, slots=True)
class DifferentSetting:
    """Recorded setting that differs between the two results."""

    key: str
    a: Any
    b: Any

    def __str__(self) -> str:
        return f"{self.key}: {_short(self.a)} in a, {_short(self.b)} in b"


@dataclass(frozen=True, slots=True)
class Side:
    """Data of one of the two results in a comparison."""

    policy: str
    weights: str
    status: str
    fingerprint: str
    mean_return: float
    """Mean return over the pairs. There may be fewer pairs than episodes of the result."""
    num_failed: int
    """Number of failed episodes that would otherwise be in a pair."""
    deterministic: bool | None
    """Whether the determinism check passed; None without a check."""
    ended_by: RuleEnd | None
    """End of the evaluation by a rule."""


@dataclass(frozen=True, slots=True)
class ConditionDifference:
    """Difference over the pairs of one condition, or of all conditions that have the same value of an axis."""

    value: Any
    """Id of the condition, or value of the axis."""
    num_pairs: int
    mean_a: float
    mean_b: float
    mean: float
    """Mean of the differences, ``b`` minus ``a``."""
    interval: Interval
    """Interval for the mean difference. It applies to this condition alone."""


@dataclass(frozen=True, slots=True)
class Comparison(Printed):
    """Comparison of two results on the same plan: their difference, ``b`` minus ``a``."""

    environment: str
    a: Side
    b: Side
    num_planned: int
    """Number of planned pairs: of episodes, or of seeds if episodes share seeds."""
    num_pairs: int
    num_dropped: int
    """Number of pairs that were left out because they failed on one side or on both sides."""
    num_unfinished: int
    """Number of pairs that were left out because one side stopped before it finished them."""
    difference: PairedDifference
    success: McNemar | None
    """Comparison of the success on both sides; None if no pair reports success on both sides."""
    confidence: float
    verdict: str
    different_settings: tuple[DifferentSetting, ...] = ()
    """Settings of the two results that differ: policy, weights, choice of actions, versions."""
    by_condition: Mapping[str, Sequence[ConditionDifference]] = field(default_factory=dict)
    """Differences by ``id`` of the condition, and by each axis; empty without conditions."""

    @property
    def notes(self) -> list[str]:
        """Notes that limit the use of the numbers; empty for an ordinary comparison."""
        return list(_notes(self))

    @property
    def regressed(self) -> bool:
        """Whether ``b`` is significantly worse than ``a``, according to both the interval and the test."""
        return not self.unanswerable() and is_shown(self.difference, self.confidence) and self.difference.mean < 0

    def unanswerable(self, a: str = "a", b: str = "b") -> str:
        """Return the reason why this comparison shows nothing, neither a difference nor a requirement; empty if it can.

        Pairs that are missing because an episode failed are not a random sample. Suppose that a policy crashes the
        environment whenever the policy plays badly. If the missing pairs were ignored, such a policy could meet a
        requirement. So the worst is assumed for them, or there is no interval.
        """
        sides = ((a, self.a), (b, self.b))
        if self.num_unfinished and (ended := " and ".join(name for name, side in sides if side.ended_by)):
            lack = f"{self.num_unfinished} of {self.num_planned} episodes have no pair"
            return f"a rule ended {ended}, so {lack}: evaluate both without evaluation.rules"
        if self.num_unfinished:
            short = " and ".join(name for name, side in sides if side.status != "complete")
            return f"{short} did not reach {self.num_unfinished} of {self.num_planned} episodes: continue the run"
        why = _undecided(self.difference, self.confidence)
        failed = " and ".join(name for name, side in sides if side.num_failed)
        return (
            f"{why}; to repeat the failed episodes of {failed}, use rl-eval run --retry DIR" if why and failed else why
        )

    def verdict_on(self, a: str = "a", b: str = "b") -> str:
        """Return the verdict, with names of the two results."""
        if why := self.unanswerable(a, b):
            return f"no verdict: {why}"
        return verdict_of(self.difference, self.confidence, self.different_settings, a, b)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain JSON values; NaN becomes None."""
        found = {**asdict(self), "notes": self.notes}
        for name in ("samples", "rows"):
            del found["difference"][name]
        return {key: plain(value) for key, value in found.items()}


@checked_keywords
def compare(a: EvalResult, b: EvalResult, confidence: float = 0.95, *, force: bool = False) -> Comparison:
    """Compare two results of the same plan, episode by episode. Episodes that share a seed are compared together.

    Args:
        a: The first result, such as the baseline.
        b: The second result. Differences are ``b`` minus ``a``.
        confidence: Nominal coverage of the interval. The level of the test is ``1 - confidence``.
        force: Whether to compare results that failed the determinism check. The comparison then has a note.

    Raises:
        UsageError: ``a`` or ``b`` is not a result.
        ComparisonError: The results have different episodes, environments or step limits. Or a guarantee is ``layout``,
            and the simulators or numbers of environments differ. Or no episode completed in both results. Or one of
            the results failed the determinism check, and ``force`` is false. The message has the reason.
    """
    for name, side in (("a", a), ("b", b)):
        if not hasattr(side, "plan_fingerprint"):
            fix = "Pass a result, such as rl_eval.load(FOLDER)."
            raise UsageError(f"{name} is {side!r}, a {type(side).__name__}", key=name, value=side, fix=fix)
    _check_identities(a, b)
    _check_plans(a, b)
    _check_guarantees(a, b)
    if not force:
        _check_determinism(a, b)
    groups = a.seed_groups
    reached, paired = observed(a.scope & b.scope, groups), observed(a.counted & b.counted, groups)
    dropped = int((reached & ~paired).sum())
    if not paired.any():
        ours, theirs = int(a.counted.sum()), int(b.counted.sum())
        problem = f"no episode completed in both results: a completed {ours} and b {theirs} of {len(a.plan)}"
        raise ComparisonError(problem, key="episodes", value=(ours, theirs))
    settings = tuple(_different_settings(a.provenance, b.provenance))
    difference = paired_difference(
        _returns(a, paired),
        _returns(b, paired),
        confidence,
        one_policy=bool(_changes_of_floats(settings)),
        num_missing=dropped,
        bounds=_bounds(a, b),
        rows=rows_of(_rows(a, b), paired, reached & ~paired),
    )
    if a.is_zero_sum and b.is_zero_sum:
        difference = replace(difference, interval=no_interval(confidence, _ZERO_SUM))
    found = Comparison(
        environment=environment_name(a.provenance),
        a=_side(a, paired, reached),
        b=_side(b, paired, reached),
        num_planned=len(reached),
        num_pairs=difference.count,
        num_dropped=dropped,
        num_unfinished=int((~reached).sum()),
        difference=difference,
        success=_success(a, b, paired) if groups is None else None,
        confidence=confidence,
        verdict="",
        different_settings=settings,
        by_condition=_by_condition(a, b, reached, paired, confidence),
    )
    return replace(found, verdict=found.verdict_on())


def _bounds(a: EvalResult, b: EvalResult) -> tuple[Bounds, Bounds] | None:
    """Return the bounds of the returns of each side; None if they are unknown.

    If only one result declares bounds, they apply to both, since environment and step limit are the same.
    """
    known = a.return_bounds or b.return_bounds, b.return_bounds or a.return_bounds
    return None if known[0] is None or known[1] is None else (known[0], known[1])


def _rows(a: EvalResult, b: EvalResult) -> Rows | None:
    """Return the rows of the episodes. The target is the population of rows if it is the target of one result."""
    found = [side.condition_rows for side in (a, b)]
    return next((rows for rows in found if rows and rows.target == "population"), found[0])


def _returns(result: EvalResult, chosen: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    return values_of(result.table.rows["episode_return"], chosen, result.seed_groups)


def _by_condition(
    a: EvalResult,
    b: EvalResult,
    reached: npt.NDArray[np.bool_],
    paired: npt.NDArray[np.bool_],
    confidence: float,
) -> dict[str, list[ConditionDifference]]:
    found: dict[str, list[ConditionDifference]] = {}
    for column, value, mask in condition_masks(a.plan):
        own = observed(mask, a.seed_groups)
        first, second = (_returns(side, paired & own) for side in (a, b))
        means = (exact_mean(first), exact_mean(second), exact_mean(second - first))
        missing = reached & ~paired & own
        rows = rows_of(_rows(a, b), paired & own, missing)
        several_rows = rows if rows is not None and len(rows) > 1 else None
        interval = difference_interval(
            first, second, confidence, num_missing=int(missing.sum()), bounds=_bounds(a, b), rows=several_rows
        )
        found.setdefault(column, []).append(ConditionDifference(value, len(first), *means, interval))
    return found


def _check_plans(a: EvalResult, b: EvalResult) -> None:
    if a.plan_fingerprint == b.plan_fingerprint:
        return
    found = list(differences(a.plan.to_dict(), b.plan.to_dict(), "plan"))
    fix = "Evaluate both with the same seed, number of episodes and conditions."
    raise _different("the results have different episodes", found, fix)


def _check_guarantees(a: EvalResult, b: EvalResult) -> None:
    """Raise an error if a guarantee is ``layout``, and the guarantees or their facts differ.

    Such a fact is the number of environments.
    """
    if "layout" not in (a.guarantee, b.guarantee):
        return
    ours, theirs = (_mapping(side.provenance.get("numerics")) for side in (a, b))
    keys = [key for key in dict.fromkeys([*ours, *theirs]) if is_of_guarantee(key)]
    found = [
        leaf for key in keys for leaf in differences(ours.get(key, ABSENT), theirs.get(key, ABSENT), f"numerics.{key}")
    ]
    if found:
        fix = "Evaluate both with the same simulator and number of environments."
        raise _different("the guarantee is layout, so equal indices do not mean equal episodes", found, fix)


def _check_determinism(a: EvalResult, b: EvalResult) -> None:
    for name, side in (("a", a), ("b", b)):
        if side.determinism.passed is False:
            problem = (
                f"result {name} is {side.determinism}; the difference of the results may not come from the policies"
            )
            fix = "Fix the cause and evaluate again, or compare with force=True (--force)."
            raise ComparisonError(problem, key="determinism", value=name, fix=fix)


def _check_identities(a: EvalResult, b: EvalResult) -> None:
    ours, theirs = (_identity(side) for side in (a, b))
    found = [leaf for key in MUST_AGREE for leaf in differences(ours.get(key, ABSENT), theirs.get(key, ABSENT), key)]
    if found:
        raise _different("the results have different settings", found)


def _identity(result: EvalResult) -> Mapping[str, Any]:
    identity = result.provenance.get("identity")
    return identity if isinstance(identity, Mapping) else {}


def _different(problem: str, found: Sequence[Difference], fix: str = "") -> ComparisonError:
    """Return an error that lists the first differences. The fields of the error are those of the first difference."""
    shown = [f"{leaf.key} is {leaf.a!r} in a and {leaf.b!r} in b" for leaf in found[:_SHOWN]]
    more = [f"and {len(found) - _SHOWN} more differences"] if len(found) > _SHOWN else []
    key, *values = found[0]
    return ComparisonError(f"{problem}: {'; '.join(shown + more)}", key=key, value=tuple(values), fix=fix)


def _different_settings(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[DifferentSetting]:
    """Yield the settings that differ.

    A setting that differs only because the policies differ is left out, such as a package that one policy imports.
    """
    code = list(_different_code(a, b))
    others = bool(code) or any(True for part in _OF_A_POLICY for _ in _differing(a, b, part))
    yield from code
    for part in _RECORDED:
        for found in _differing(a, b, part):
            one_sided = part in ("numerics", "packages") and ABSENT in (found.a, found.b)
            follows = others and (found.key == _OUTPUTS or one_sided)
            if not follows:
                yield DifferentSetting(found.key.removeprefix("identity."), found.a, found.b)


def _different_code(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[DifferentSetting]:
    """Yield the modules of environment or policy whose source or package version differs.

    Only modules that both sides recorded are compared. Packages in ``provenance["packages"]`` are compared elsewhere.
    """
    for kind, part, told in (("source", "files", {}), ("version", "packages", _mapping(a.get("packages")))):
        ours, theirs = _code(a, part), _code(b, part)
        for name in sorted(ours.keys() & theirs.keys() - told.keys()):
            if ours[name] != theirs[name]:
                yield DifferentSetting(f"{kind} of {name}", ours[name], theirs[name])
    changes = [len(found) if isinstance(found := side.get("code_changes"), list) else 0 for side in (a, b)]
    if changes[0] != changes[1]:
        yield DifferentSetting("changes of the source during the run", *changes)


def _code(provenance: Mapping[str, Any], part: str) -> dict[str, str]:
    """Return a mapping from names of code to its digests or versions at the start of the run."""
    found = _mapping(_mapping(provenance.get("code")).get(part))
    return {str(name): str(_mapping(value).get("sha256", value))[:16] for name, value in found.items()}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _differing(a: Mapping[str, Any], b: Mapping[str, Any], part: str) -> Iterator[Difference]:
    found = differences(a.get(part, ABSENT), b.get(part, ABSENT), part)
    return (one for one in found if one.key not in _UNTOLD)


def _short(value: Any) -> str:
    """Return a value as text. The middle of a long value is left out, because paths differ at their ends."""
    text, half = str(value) or "not set", _LONGEST // 2
    return text if len(text) <= _LONGEST else f"{text[: half - 3]}...{text[-half:]}"


def _side(result: EvalResult, paired: npt.NDArray[np.bool_], reached: npt.NDArray[np.bool_]) -> Side:
    return Side(
        policy=policy_name(result.provenance),
        weights=weights_name(result.provenance, result.metrics["weights_version"]),
        status=result.status,
        fingerprint=result.fingerprint,
        mean_return=exact_mean(_returns(result, paired)),
        num_failed=int((reached & ~observed(result.counted, result.seed_groups)).sum()),
        deterministic=result.determinism.passed,
        ended_by=result.ended_by,
    )


def _success(a: EvalResult, b: EvalResult, paired: npt.NDArray[np.bool_]) -> McNemar | None:
    ours, theirs = (side.table.rows["success_at_end"][paired] for side in (a, b))
    both = (ours >= 0) & (theirs >= 0)
    return mcnemar(ours[both] > 0, theirs[both] > 0) if both.any() else None


def _changes_of_floats(settings: Sequence[DifferentSetting]) -> list[str]:
    """Return the keys of the settings that differ.

    If one of these settings changes more than the last bits of floats, return an empty list.
    """
    keys = [one.key for one in settings if one.key != _OUTPUTS]
    return keys if all(key.partition(".")[0] in _OF_FLOATS for key in keys) else []


def verdict_of(
    difference: PairedDifference,
    confidence: float,
    settings: Sequence[DifferentSetting] = (),
    a: str = "a",
    b: str = "b",
) -> str:
    """Return the verdict on the paired difference of two results, named ``a`` and ``b``, that differ in ``settings``.

    There is a difference only if both the interval and the test show it, and if it is larger than rounding.
    """
    interval, level = difference.interval, f"{100 * confidence:g} %"
    if why := _undecided(difference, confidence):
        return f"no verdict: {why}"
    places = interval_places(interval, difference.mean)
    low, high, mean = (number(end, places) for end in (interval.low, interval.high, difference.mean))
    if difference.rounding:
        cause = ", ".join(_changes_of_floats(settings))
        return (
            f"equal up to rounding: mean difference {mean} over {difference.count} pairs; settings that differ: {cause}"
        )
    facts = f"mean difference {mean}, interval {low} to {high}, p {difference.p_text}"
    if is_shown(difference, confidence):
        return f"{b} has a {'higher' if difference.mean > 0 else 'lower'} return than {a} at {level}: {facts}"
    if 0 not in interval:
        facts += "; the interval excludes 0, but the sign-flip test does not reject"
    elif difference.p_value <= 1 - confidence:
        facts += "; the sign-flip test rejects, but the interval contains 0"
    return f"no difference shown at {level}: {facts}"


def _undecided(difference: PairedDifference, confidence: float) -> str:
    """Return the reason why the interval or the test cannot show a difference; empty if both can.

    Rounding is no difference, so it needs neither.
    """
    if difference.rounding:
        return ""
    if not difference.interval.exists:
        return difference.interval.note
    if math.isnan(difference.p_value):
        return _UNTESTED
    count = difference.num_signs
    least = 2.0 ** (1 - count)
    what = "pairs" if count == difference.count else "rows"
    few = f"{count} {what} are too few: no difference of the returns has a p-value below {least:g}"
    return few if least > 1 - confidence else ""


def is_shown(difference: PairedDifference, confidence: float) -> bool:
    """Whether a difference is shown: there is an interval, it excludes 0, and the test at the same level rejects.

    Differences by rounding are never shown.
    """
    interval = difference.interval
    excludes_0 = interval.exists and 0 not in interval
    return excludes_0 and difference.p_value <= 1 - confidence and not difference.rounding


def _notes(comparison: Comparison) -> Iterator[str]:
    a, b, dropped, unfinished = comparison.a, comparison.b, comparison.num_dropped, comparison.num_unfinished
    for name, side in (("a", a), ("b", b)):
        if side.deterministic is False:
            yield f"{name} failed its determinism check, so its number of runners may cause the difference"
    if dropped:
        failed = f"in a {a.num_failed}, in b {b.num_failed}"
        yield f"pairs dropped because a side failed: {dropped} ({failed}); the difference may be biased"
    if unfinished:
        biased = "" if a.ended_by or b.ended_by else "; long episodes are less likely to be in the pairs"
        yield f"planned episodes that a side did not reach: {unfinished} of {comparison.num_planned}{biased}"
    if a.fingerprint == b.fingerprint:
        yield "both results have the same records"
    num_parts = sum(map(len, comparison.by_condition.values()))
    if note := several(num_parts, "intervals by condition", comparison.confidence):
        yield note
    if comparison.success and (silent := comparison.num_pairs - comparison.success.count):
        yield f"pairs left out of the success test, because a side does not report success: {silent}"
