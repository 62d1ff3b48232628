"""Findings of the determinism check: whether episodes that ran a second time came out as they were recorded."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import Field

__all__ = ["UNFINISHED", "Determinism", "FirstDifference"]

Cause = Literal["environment", "policy", ""]

_Count = Annotated[int, Field(ge=0, lt=2**31)]


class FirstDifference(NamedTuple):
    """Place where an episode first differed from its record."""

    episode: int
    """Index of the episode."""
    step: int
    """Number of the step, from 1; 0 is the reset; -1 where only the sums of the episode are known."""
    what: str
    """Name of the quantity, such as ``reward``."""
    cause: Cause
    """``policy`` if the same observations led to another action; empty where that is not known."""

    def __str__(self) -> str:
        if self.step < 0:
            return f"the {self.what} of episode {self.episode}"
        where = f"step {self.step}" if self.step else "the reset"
        return f"the {self.what} of {where} of episode {self.episode}"


@dataclass(frozen=True, slots=True)
class Determinism:
    """Outcome of the determinism check of one evaluation."""

    checked: _Count = 0
    """Episodes that completed a second time."""
    elsewhere: _Count = 0
    """Those of them that ran in another process than the first time."""
    mismatched: tuple[int, ...] = ()
    """Indices of those whose outcome differed."""
    failed: tuple[int, ...] = ()
    """Indices of episodes that completed once and did not complete again."""
    failure: str = ""
    """Why the first of these did not."""
    first: FirstDifference | None = None
    """Place of the first difference in the mismatched episode of the lowest index."""
    env_reuse_helps: bool | None = None
    """Whether the mismatched episodes agree with themselves in fresh environments; None where that was not tried."""
    remark: str = ""
    """What the check could not see, or why nothing was checked."""

    @property
    def passed(self) -> bool | None:
        """Whether every episode came out again as it was recorded; None if none was checked."""
        if self.mismatched or self.failed:
            return False
        return True if self.checked else None

    def rate_below(self, confidence: float = 0.95) -> float:
        """Return the upper limit of the mismatch rate (Clopper & Pearson 1934, one-sided); 1 if nothing was checked.

        For 0 of k it is ``1 - (1 - confidence) ** (1 / k)``.
        """
        if len(self.mismatched) >= self.checked:
            return 1.0
        from scipy.special import betaincinv

        return float(betaincinv(len(self.mismatched) + 1, self.checked - len(self.mismatched), confidence))

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain JSON values."""
        first = None if self.first is None else self.first._asdict()
        return asdict(self) | {"first": first, "passed": self.passed, "rate_below": self.rate_below()}

    def __str__(self) -> str:
        if self.passed is None:
            return f"not checked: {self.remark}" if self.remark else "not checked"
        if self.passed:
            where = f"{self.elsewhere} in another process" if self.elsewhere else ""
            told = "; ".join(filter(None, (where, self.remark)))
            return f"{self.checked} of {self.checked} re-run episodes identical" + (f" ({told})" if told else "")
        return f"NOT a function of its seed: {'; '.join(self._findings())}"

    def _findings(self) -> list[str]:
        total = self.checked + len(self.failed)
        findings = []
        if self.mismatched:
            place = f", first in {self.first}" if self.first else ""
            cause = f": {self.first.cause}" if self.first and self.first.cause else ""
            findings.append(f"{len(self.mismatched)} of {total} differ{place}{cause}")
        if self.failed:
            findings.append(
                f"{len(self.failed)} of {total} did not complete again, first episode {self.failed[0]}: {self.failure}"
            )
        return findings

    @property
    def advice(self) -> str:
        """Advice after a failed check, as far as remedies were tried; empty otherwise."""
        if not self.mismatched:
            return ""
        if self.first is not None and self.first.cause == "policy":
            return (
                "the policy chose another action for the same observation: state that it keeps between episodes, a "
                "random generator of its own or neighbours in its batch change what it does"
            )
        if self.env_reuse_helps:
            return "environment.env_reuse=episode builds a new environment for each, which cured these episodes"
        if self.env_reuse_helps is False:
            return "a new environment for each episode (environment.env_reuse=episode) would not cure it"
        return ""


UNFINISHED: Final = Determinism(remark="the evaluation was not finished")
