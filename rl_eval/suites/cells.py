"""Cells of a suite: the matrix of tasks, policies, training seeds and steps, and the settings of each cell."""

from __future__ import annotations

import glob
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from rl_eval.config.builder import EvalConfig
from rl_eval.config.model_files import described
from rl_eval.config.policy_sources import lasting, scheme_of, schemes
from rl_eval.config.settings import EvalSettings
from rl_eval.errors import ConfigError
from rl_eval.records.plain import convert, plain_leaf
from rl_eval.runners import layout_of
from rl_eval.suites.definition import Keys, Method, Skip, Steps, SuiteDefinition

EvaluatedSteps = Mapping[str, Mapping[int, str]]
"""Paths of the checkpoints that were evaluated, relative to the folder of the suite's file, by name of the training run
and by step."""
_CHECKPOINT: Final = "{checkpoint}"
_LONGEST: Final = 100
"""Maximum length of the name in the name of a folder."""


@dataclass(frozen=True, order=True)
class Cell:
    """One combination of task, policy, training seed and step."""

    task: str
    policy: str
    seed: int | None = None
    step: int | None = None

    def __str__(self) -> str:
        return "/".join(self.parts).removesuffix("/-").removesuffix("/-")

    @property
    def parts(self) -> tuple[str, ...]:
        """Task, policy, training seed and step as strings; ``-`` for a missing part."""
        return tuple("-" if part is None else str(part) for part in (self.task, self.policy, self.seed, self.step))

    @property
    def run(self) -> str:
        """Name of the training run: the name of the cell without the step."""
        return "/".join(self.parts[:3])

    @property
    def folder(self) -> str:
        """Folder of the cell's evaluation log, relative to the folder of the suite: the name, with a digest of it."""
        digest = hashlib.sha256(json.dumps([self.task, self.policy, self.seed, self.step]).encode()).hexdigest()[:16]
        name = re.sub(r"(?a)[^\w.-]+", "-", str(self))
        return f"cells/{name[:_LONGEST]}-{digest}"


@dataclass(frozen=True)
class PlannedCell:
    """A cell, and the path of its checkpoint."""

    cell: Cell
    checkpoint: Path | None = None
    """Absolute path of the checkpoint; None for a policy without checkpoints, or if there is no step to evaluate."""
    problem: str = ""
    """Reason why the cell cannot run; empty if it can run."""


@dataclass(frozen=True)
class Matrix:
    """All cells of a suite."""

    cells: tuple[PlannedCell, ...]
    skipped: tuple[tuple[Cell, str], ...]
    """Skipped cells, with the reason."""


def matrix(suite: SuiteDefinition, evaluated: EvaluatedSteps) -> Matrix:
    """Return all cells of a suite.

    Args:
        suite: The suite.
        evaluated: Checkpoints of earlier evaluations. The steps ``last`` and ``all`` include them, even if their files
            are missing now.

    Raises:
        ConfigError: Every cell is skipped.
    """
    cells: list[PlannedCell] = []
    skipped: list[tuple[Cell, str]] = []
    for planned in _all(suite, evaluated):
        cell = planned.cell
        if (skip := _skip_of(suite.skip, cell)) is None:
            cells.append(planned)
        else:
            skipped.append((cell, skip.why))
    if not cells:
        raise ConfigError("every cell is skipped", key="skip", fix="Skip fewer cells.")
    return Matrix(tuple(cells), tuple(skipped))


def chosen(cells: Sequence[PlannedCell], patterns: Sequence[str]) -> list[PlannedCell]:
    """Return the cells whose names match one of the patterns, such as ``hopper/ppo/0/*``.

    A pattern with fewer than four parts matches any value of the parts that it lacks.

    Raises:
        ConfigError: No cell matches a pattern.
    """
    found: dict[Cell, PlannedCell] = {}
    for pattern in patterns:
        whole = "/".join([*pattern.split("/"), *["*"] * 3][:4])
        matching = {one.cell: one for one in cells if fnmatchcase("/".join(one.cell.parts), whole)}
        if not matching:
            near = get_close_matches(pattern, [str(one.cell) for one in cells], cutoff=0.5)
            meant = f"Did you mean {' or '.join(near)}?" if near else "Pass TASK/POLICY/SEED/STEP."
            fix = f"{meant} `rl-eval suite plan SUITE --cells` prints all cells."
            raise ConfigError(f"cells (--cell): no cell has the name {pattern!r}", key="--cell", value=pattern, fix=fix)
        found |= matching
    return list(found.values())


def definition_of(suite: SuiteDefinition, planned: PlannedCell) -> dict[str, Any]:
    """Return all settings in the suite's file on which the records of a cell depend, as plain JSON values.

    For initial conditions, the digest of their rows is added. Other files, such as a file in ``policy_kwargs``, are
    described only by their path. The address of a policy server is not part of the definition.
    """
    path = planned.checkpoint
    relative = None if path is None else Path(_relative(path, suite.folder)).as_posix()
    values = _values(suite, planned, {**_section(suite, planned, relative), "checkpoint": relative})
    values["policy"] = lasting(values["policy"])
    kept = {name: keys for name, keys in values.items() if name not in ("runners", "fault_tolerance")}
    described = {"version": suite.version, **{key: convert(value, plain_leaf) for key, value in kept.items()}}
    if (conditions := values.get("evaluation", {}).get("conditions")) is not None:
        described["conditions_sha256"] = suite.conditions_digest(conditions)
    return described


def settings_of_cell(suite: SuiteDefinition, planned: PlannedCell, runners: Mapping[str, Any]) -> EvalSettings:
    """Return the settings of a cell.

    Args:
        suite: The suite.
        planned: The cell.
        runners: Config values of the section ``runners``, which override the values in the suite.

    Raises:
        ConfigError: The checkpoint of the cell is missing, or its settings are invalid.
    """
    if planned.problem:
        raise ConfigError(planned.problem, key=f"policies.{planned.cell.policy}.checkpoints", value=str(planned.cell))
    checkpoint = None if planned.checkpoint is None else str(planned.checkpoint)
    section = _section(suite, planned, checkpoint)
    written = json.dumps(suite.policies[planned.cell.policy].section, default=str)
    if checkpoint is not None and _CHECKPOINT not in written:
        section |= _with_checkpoint(section.get("policy"), checkpoint, planned)
    values = _values(suite, planned, section)
    values["runners"] = {**values.get("runners", {}), **runners}
    settings = EvalConfig.from_dict(values, suite.folder).build()
    layout_of(settings)
    return settings


def _section(suite: SuiteDefinition, planned: PlannedCell, checkpoint: str | None) -> Keys:
    """Return the section ``policy`` as written in the suite's file, with the placeholders replaced."""
    cell = planned.cell
    names = {"{task}": cell.task, "{policy}": cell.policy, "{seed}": cell.seed, "{step}": cell.step}
    section: Keys = _filled(suite.policies[cell.policy].section, {**names, _CHECKPOINT: checkpoint})
    return section


def _values(suite: SuiteDefinition, planned: PlannedCell, section: Keys) -> dict[str, Keys]:
    """Return the config values of a cell, by section. ``section`` contains the values of the section ``policy``."""
    parts, conditions = (suite.shared, suite.tasks[planned.cell.task]), suite.conditions
    found = _merged(*(part.values_by_section() for part in parts))
    for part in parts:
        conditions = part.evaluation.get("conditions", conditions)
    found = _merged(found, {"policy": section})
    if conditions is not None:
        found["evaluation"] = {**found.get("evaluation", {}), "conditions": conditions}
    return found


def _with_checkpoint(policy: Any, checkpoint: str, planned: PlannedCell) -> Keys:
    """Return the keys of the policy section that load a checkpoint."""
    if policy is not None and (policy not in schemes()):
        return {"weights": checkpoint}
    if policy is not None:
        return {"policy": schemes()[policy].named(checkpoint)}
    path = planned.checkpoint
    scheme = scheme_of(described(path)) if path is not None and path.exists() else None
    if scheme is None:
        problem = f"policies.{planned.cell.policy}: the type of {checkpoint} is unknown"
        fix = (
            f"Set policy to one of {', '.join(schemes())}, or to the pkg.module:attr of a function that builds the "
            "module for these weights."
        )
        raise ConfigError(problem, key=f"policies.{planned.cell.policy}.policy", value=checkpoint, fix=fix)
    return {"policy": scheme.named(checkpoint)}


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two nested mappings. If both have a value for a key, use the value of the second mapping."""
    result = dict(one)
    for key, value in other.items():
        inner = result.get(key)
        both = isinstance(inner, Mapping) and isinstance(value, Mapping)
        result[key] = _merged(inner, value) if both else value  # type: ignore[arg-type]
    return result


def _filled(value: Any, names: Mapping[str, Any]) -> Any:
    """Replace the placeholders in all strings of nested containers."""
    if isinstance(value, Mapping):
        return {key: _filled(item, names) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_filled(item, names) for item in value]
    if isinstance(value, str):
        for name, given in names.items():
            if given is not None:
                value = value.replace(name, str(given))
    return value


def _all(suite: SuiteDefinition, evaluated: EvaluatedSteps) -> Iterator[PlannedCell]:
    for task in suite.tasks:
        for policy, method in suite.policies.items():
            for seed in method.seeds or (None,):
                cell = Cell(task, policy, seed)
                yield from _of_run(suite.folder, method, cell, evaluated.get(cell.run, {}))


def _of_run(folder: Path, method: Method, cell: Cell, evaluated: Mapping[int, str]) -> Iterator[PlannedCell]:
    """Yield the cells of one training run, one for each step."""
    if method.checkpoints is None:
        yield PlannedCell(cell)
        return
    names = {"{task}": cell.task, "{policy}": cell.policy, "{seed}": cell.seed}
    template = str(folder / _filled(method.checkpoints, names))
    if "{step}" not in template:
        path = Path(template)
        yield PlannedCell(cell, path, "" if path.exists() else f"there is no checkpoint {path}")
        return
    there = {step: folder / path for step, path in evaluated.items()} | _steps_on_disk(template)
    wanted = _wanted(method, sorted(there))
    if not wanted:
        problem = f"no file matches {template.replace('{step}', '*')}"
        if there:
            problem = f"none of the steps on disk is wanted; they are {min(there)} to {max(there)}"
        yield PlannedCell(cell, None, problem)
    for step in wanted:
        path = there.get(step, Path(template.replace("{step}", str(step))))
        missing = "" if path.exists() else f"there is no checkpoint {path}"
        yield PlannedCell(Cell(cell.task, cell.policy, cell.seed, step), path, missing)


def _steps_on_disk(template: str) -> dict[int, Path]:
    """Return the files that match a path with ``{step}``, by step."""
    first, *rest = map(re.escape, template.split("{step}"))
    pattern = re.compile(first + r"(?P<step>\d+)" + r"(?P=step)".join(rest))
    paths = glob.glob("*".join(map(glob.escape, template.split("{step}"))))  # noqa: PTH207 - {step} may be in a folder
    return {int(match["step"]): Path(path) for path in sorted(paths) if (match := pattern.fullmatch(path))}


def _wanted(method: Method, there: list[int]) -> list[int]:
    """Return the steps to evaluate, given the sorted steps whose checkpoints are on disk or were evaluated earlier."""
    steps = method.steps
    if steps == "last":
        return there[-1:]
    if steps == "all":
        return there
    if isinstance(steps, Steps):
        last = steps.last if steps.last is not None else max(there, default=-1)
        if steps.stride is None:
            return [step for step in there if steps.first <= step <= last]
        return list(range(steps.first, last + 1, steps.stride))
    return sorted(set(steps))


def _skip_of(skips: Sequence[Skip], cell: Cell) -> Skip | None:
    return next((one for one in skips if one.applies(cell.task, cell.policy, cell.seed, cell.step)), None)


def _relative(path: Path, folder: Path) -> str:
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)
