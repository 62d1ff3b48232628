"""Manifest of an evaluation log: what it is about, and whether a run may continue it.

The manifest is written once, before the first episode: plan, identity, weights, and what is needed to do
it again. A run continues a log whose plan, identity, weights and info keys equal its own; config and provenance
may differ, since neither more runners nor another machine change the result. Other code is for
:mod:`~rl_eval.log.changes` to judge.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final

import xxhash

from rl_eval.errors import LogError
from rl_eval.records.plain import ABSENT, Difference, differences, parse_json, plain, typed

__all__ = ["FORMAT", "MANIFEST_FILE", "Manifest", "checksum"]

FORMAT: Final = 1
"""Version of the log; a reader refuses what it does not know."""

MANIFEST_FILE: Final = "manifest.json"

_PLAN: Final = ("num_episodes", "seed", "first_index", "matchups")
_COMPARED: Final = (*_PLAN, "plan_fingerprint", "identity", "weights", "info_keys")


@dataclass(frozen=True)
class Manifest:
    """Manifest of an evaluation: its settings and their origin. All values are plain JSON."""

    num_episodes: int
    seed: int
    plan_fingerprint: str
    identity: dict[str, Any]
    """What the result depends on besides plan and weights."""
    weights: dict[str, Any]
    """Version and digest."""
    info_keys: tuple[str, ...]
    config: dict[str, Any]
    provenance: dict[str, Any]
    first_index: int = 0
    """Where the plan begins; logs from before there was a choice begin at 0."""
    matchups: list[Any] | None = None
    """Seatings of each matchup, in the order of their turns; None where nobody is seated."""
    code: dict[str, Any] = field(default_factory=dict)
    """Digests of source files and versions of packages; empty in logs from before they were kept."""

    def to_json(self) -> str:
        """Return the text of ``manifest.json``, which holds a checksum of itself."""
        body = plain(asdict(self))
        return json.dumps({"format": FORMAT, "checksum": checksum(body), **body}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Parse the text of ``manifest.json``.

        Raises:
            ValueError: It is damaged.
            LogError: Another version of this package wrote it.
        """
        body = parse_json(text)
        if not isinstance(body, dict) or "format" not in body:
            raise ValueError("it is no manifest")
        if body.pop("format") != FORMAT:
            raise LogError(f"the log has another format than {FORMAT}, which this version of rl_eval reads and writes")
        if body.pop("checksum", None) != checksum(body):
            raise ValueError("its contents do not have the checksum in it")
        if unknown := sorted(body.keys() - {field.name for field in fields(cls)}):
            raise LogError(f"the log says {', '.join(unknown)}, which this version of rl_eval does not know")
        return typed(cls, body)

    def version_notes(self, now: Manifest) -> Iterator[str]:
        """Yield a note for Python, and each package that digests of code leave out, with another version now."""
        there, here = (
            {"python": one.provenance.get("python"), **one.provenance.get("packages", {})} for one in (self, now)
        )
        checked = now.code.get("packages", {})
        for name, version in here.items():
            if name not in checked and name.replace("-", "_") not in checked and there.get(name, version) != version:
                yield f"the run was begun with {name} {there[name]} and continued with {version}"

    def differences(self, other: Manifest) -> list[str]:
        """Return one line per value of another run that keeps it from continuing this log."""
        found = [leaf for leaf in differences(self._compared(), other._compared()) if not _is_elsewhere(leaf)]
        if any(leaf.key in _PLAN for leaf in found):
            found = [leaf for leaf in found if leaf.key != "plan_fingerprint"]  # It follows from them.
        return [f"{leaf.key}: {_shown(leaf.a)} -> {_shown(leaf.b)}" for leaf in found]

    def _compared(self) -> dict[str, Any]:
        return {name: plain(getattr(self, name)) for name in _COMPARED}


def _is_elsewhere(leaf: Difference) -> bool:
    """Whether only one side found a file of a model: whoever loads it says what is missing."""
    return leaf.key.startswith("weights.files") and ABSENT in (leaf.a, leaf.b)


def checksum(body: Mapping[str, Any]) -> str:
    """Return the checksum that a JSON file of a log holds of its own body."""
    return str(xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()))


def _shown(value: Any) -> str:
    return ABSENT if value == ABSENT else json.dumps(value)
