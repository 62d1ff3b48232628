"""Manifest of an evaluation log, comparison of manifests before a run continues the log, amendments, and retries.

The manifest is written once, before the first episode. It contains the plan, the identity (all other settings on which
the result depends), the weights, and the data needed to run the evaluation again. A run may continue a log if plan,
identity, weights and info keys are equal. Config and provenance may differ, because the number of runners and the
machine do not change the result.

The manifest never changes. Accepted code changes are numbered files in ``amendments/``. Requests to run failed episodes
again are numbered files in ``retries/``. These files never change either. The code of the next session is compared with
the last amendment.
"""

from __future__ import annotations

import datetime
import json
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash
from pydantic import Field

from rl_eval.errors import LogError
from rl_eval.log.storage import Storage
from rl_eval.records.episode import Outcome
from rl_eval.records.plain import ABSENT, Difference, differences, parse_json, plain, typed

FORMAT: Final = 2
"""Version of the log format; a reader rejects other versions."""

MANIFEST_FILE: Final = "manifest.json"
RESTORE: Final = "Restore the file from a copy, or start a new run with another output (--output)."
"""Next step of the user if a file of a log is damaged."""

_START: Final = '{{\n  "format": {},\n  "checksum": "'
"""Beginning of every manifest, with a placeholder for the format."""
_PLAN: Final = ("num_episodes", "seed", "first_index", "matchups", "conditions")
_MOST_DIFFERENCES: Final = 20
"""Maximum number of differences that a message shows, because every value of every condition can differ."""
_COMPARED: Final = (*_PLAN, "plan_fingerprint", "identity", "weights", "info_keys")


@dataclass(frozen=True)
class Manifest:
    """Manifest of an evaluation: its settings and its provenance. All values are plain JSON."""

    num_episodes: int
    seed: int
    plan_fingerprint: str
    identity: dict[str, Any]
    """Settings on which the result depends, apart from the plan and the weights."""
    weights: dict[str, Any]
    """Version and digest of the weights."""
    info_keys: tuple[str, ...]
    config: dict[str, Any]
    provenance: dict[str, Any]
    first_index: int = 0
    """Index of the plan's first episode. Older logs do not have this field, and start at 0."""
    matchups: list[Any] | None = None
    """Seatings of each matchup, in order; None for a single policy."""
    conditions: dict[str, Any] | None = None
    """Initial conditions: their digest, rows and counts; None without conditions."""
    code: dict[str, Any] = field(default_factory=dict)
    """Digests of source files and versions of packages; empty in older logs."""

    def to_json(self) -> str:
        """Return the text of ``manifest.json``, including a checksum."""
        body = plain(asdict(self))
        text = json.dumps({"format": FORMAT, "checksum": checksum(body), **body}, indent=2) + "\n"
        assert is_manifest(text.encode())
        return text

    @classmethod
    def from_json(cls, text: str | bytes, label: str = MANIFEST_FILE) -> Manifest:
        """Parse the text of ``manifest.json``; errors name the folder ``label``.

        Raises:
            ValueError: The text is damaged.
            LogError: Another version of this package wrote the manifest.
        """
        body = parse_json(text)
        if not isinstance(body, dict) or "format" not in body:
            raise ValueError("it is not a manifest")
        if (found := body.pop("format")) != FORMAT:
            problem = f"the log {label} has format {found}, but this version of rl_eval reads {FORMAT} only"
            fix = "Pass another folder (such as another --output), or delete this folder and evaluate again."
            raise LogError(problem, key="format", value=found, fix=fix)
        if body.pop("checksum", None) != checksum(body):
            raise ValueError("its checksum is wrong")
        if unknown := sorted(body.keys() - {field.name for field in fields(cls)}):
            problem = f"the manifest has {', '.join(unknown)}, which this version of rl_eval cannot read"
            raise LogError(problem, key=unknown[0])
        return typed(cls, body)

    def version_notes(self, now: Manifest) -> Iterator[str]:
        """Yield a note on each changed version: of Python, and of packages that the digests of code do not cover."""
        there, here = (
            {"python": one.provenance.get("python"), **one.provenance.get("packages", {})} for one in (self, now)
        )
        checked = now.code.get("packages", {})
        for name, version in here.items():
            if name not in checked and name.replace("-", "_") not in checked and there.get(name, version) != version:
                yield f"the run started with {name} {there[name]} and continued with {version}"

    def differences(self, other: Manifest) -> list[str]:
        """Return one line for each difference that prevents the run of another manifest from continuing this log."""
        found = [leaf for leaf in differences(self._compared(), other._compared()) if not _is_elsewhere(leaf)]
        if any(leaf.key.partition(".")[0] in _PLAN for leaf in found):
            # The plan determines its fingerprint, so this difference would repeat the others.
            found = [leaf for leaf in found if leaf.key != "plan_fingerprint"]
        lines = [f"{leaf.key}: {_shown(leaf.a)} -> {_shown(leaf.b)}" for leaf in found[:_MOST_DIFFERENCES]]
        return lines + ([f"and {len(found) - len(lines):,} more differences"] if len(found) > len(lines) else [])

    def is_of(self, plan_fingerprint: str, provenance: Mapping[str, Any]) -> bool:
        """Return whether a result with this plan and provenance belongs to the run of this log."""
        theirs = {"plan_fingerprint": plan_fingerprint, **{key: provenance.get(key) for key in ("identity", "weights")}}
        found = differences({key: plain(getattr(self, key)) for key in theirs}, plain(theirs))
        return all(_is_elsewhere(leaf) for leaf in found)

    def _compared(self) -> dict[str, Any]:
        return {name: plain(getattr(self, name)) for name in _COMPARED}


def _is_elsewhere(leaf: Difference) -> bool:
    """Return whether a difference is the digest of a model file that exists on one machine only.

    Such a difference does not prevent a run from continuing the log, because the loader of the policy reports a missing
    file.
    """
    return leaf.key.startswith("weights.files") and ABSENT in (leaf.a, leaf.b)


def is_manifest(text: bytes) -> bool:
    """Return whether a text is a manifest, or the beginning of a manifest."""
    start = _START.format(FORMAT).encode()
    return text.startswith(start) or start.startswith(text)


def checksum(body: Mapping[str, Any]) -> str:
    """Return the checksum of the body of a JSON file of a log."""
    return str(xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()))


def _shown(value: Any) -> str:
    return ABSENT if value == ABSENT else json.dumps(value)


Value = TypeVar("Value")


def write_numbered(storage: Storage, folder: str, number: int, fields: Any, indent: int | None = None) -> None:
    """Write a numbered JSON file to a folder; numbers start at 1."""
    body = json.loads(json.dumps(fields))
    text = json.dumps({"checksum": checksum(body), **body}, indent=indent) + "\n"
    storage.write(f"{folder}/{number:06d}.json", text.encode())


def read_numbered(storage: Storage, folder: str, kind: type[Value], unknown: str) -> Iterator[Value]:
    """Yield the contents of each file of a folder as a dataclass, in order.

    Raises:
        LogError: A file is damaged. The message names the lost information, ``unknown``.
    """
    for name in storage.names(folder):
        try:
            body = parse_json(storage.read(f"{folder}/{name}"))
            intact = body.pop("checksum") == checksum(body)
            found = typed(kind, body)
        except (ValueError, TypeError, KeyError, AttributeError):
            intact = False
        if not intact:
            problem = f"{storage.label}/{folder}/{name} is damaged; without this file, {unknown} cannot be read"
            raise LogError(problem, key=f"{folder}/{name}", value=storage.label, fix=RESTORE)
        yield found


_AMENDMENTS: Final = "amendments"
_SHOWN_DIGITS: Final = 12
"""Number of hexadecimal digits of a digest in a message."""


@dataclass(frozen=True)
class Amendment:
    """Accepted code change."""

    accepted_at: str
    host: str
    num_finished: int
    """Number of episodes of the earlier code that stay in the log."""
    differences: tuple[str, ...]
    code: dict[str, Any]
    """Digests of the code after the change."""

    def __str__(self) -> str:
        return (
            f"the code changed after {self.num_finished:,} finished episodes; the change was accepted on "
            f"{self.accepted_at}: {'; '.join(self.differences)}"
        )


def code_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return one line for each file with another digest, for each package with another version, and for other objects.

    A file or package that only one of the two mappings contains is not a difference. A policy object that cannot be
    pickled has no digest, so it is not known whether an object of another process is the same.
    """
    files, packages, objects = (before.get(name, {}) for name in ("files", "packages", "objects"))
    return [
        *(
            f"file {found['path']} (module {module}): sha256 {files[module]['sha256'][:_SHOWN_DIGITS]} -> "
            f"{found['sha256'][:_SHOWN_DIGITS]}"
            for module, found in now.get("files", {}).items()
            if module in files and files[module]["sha256"] != found["sha256"]
        ),
        *(
            f"package {name}: {packages[name]} -> {version}"
            for name, version in now.get("packages", {}).items()
            if packages.get(name, version) != version
        ),
        *(
            f"{name}: {objects.get(name, ABSENT)} -> {now.get('objects', {}).get(name, ABSENT)}"
            for name in sorted({*objects, *now.get("objects", {})})
            if objects.get(name) != now.get("objects", {}).get(name)
        ),
    ]


def newest_code(manifest: Manifest, amendments: Sequence[Amendment]) -> dict[str, Any]:
    """Return the digests of the code that the last session used."""
    return amendments[-1].code if amendments else manifest.code


def read_changes(storage: Storage) -> tuple[list[Amendment], list[Retry]]:
    """Read all amendments and retries of a log, in order.

    Raises:
        LogError: A file is damaged.
    """
    amendments = read_numbered(storage, _AMENDMENTS, Amendment, "the code of the last episodes")
    return [*amendments], [*read_numbered(storage, _RETRIES, Retry, "the list of retried episodes")]


def amend(storage: Storage, manifest: Manifest, known: Sequence[Amendment], ours: Manifest, finished: int) -> Amendment:
    """Write an amendment: this session's code becomes the code of the log."""
    before = newest_code(manifest, known)
    amendment = Amendment(
        accepted_at=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        host=socket.gethostname(),
        num_finished=finished,
        differences=tuple(code_differences(before, ours.code)),
        code={part: {**before.get(part, {}), **found} for part, found in ours.code.items()},
    )
    write_numbered(storage, _AMENDMENTS, len(known) + 1, asdict(amendment), indent=2)
    return amendment


_RETRIES: Final = "retries"
_SHOWN_INDICES: Final = 8
"""Maximum number of indices in a note."""


@dataclass(frozen=True)
class Retry:
    """Request to run failed episodes again."""

    asked_at: str
    epoch: int
    """Number of the session in which the request was written."""
    indices: tuple[Annotated[int, Field(ge=0, lt=2**31)], ...]

    def __str__(self) -> str:
        named = ", ".join(map(str, self.indices[:_SHOWN_INDICES])) + (
            ", ..." if len(self.indices) > _SHOWN_INDICES else ""
        )
        return f"failed episodes ran again, as requested on {self.asked_at}: {len(self.indices):,}, with index {named}"


def ask_again(storage: Storage, epoch: int, indices: Iterable[int], known: Sequence[Retry]) -> Retry:
    """Write a request to run failed episodes again.

    Raises:
        OSError: The file cannot be written.
    """
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    retry = Retry(now, epoch, tuple(sorted(indices)))
    write_numbered(storage, _RETRIES, len(known) + 1, asdict(retry))
    return retry


def retried_since(retries: Iterable[Retry]) -> dict[int, int]:
    """Return the number of the last session that requested a retry of an episode, by index of the episode."""
    return {index: retry.epoch for retry in retries for index in retry.indices}


def counts(rows: npt.NDArray[np.void], epoch: int, retried: Mapping[int, int]) -> npt.NDArray[np.bool_]:
    """Return a mask of the valid rows of a session, shape (n,). A later retry makes a failed row invalid."""
    superseded = [index for index, since in retried.items() if epoch < since]
    return np.asarray(~((rows["outcome"] == Outcome.FAILED) & np.isin(rows["index"], superseded)))
