"""Definition of a suite, from a YAML file. Unknown keys are errors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from rl_eval.config.builder import compose_yaml, read_text
from rl_eval.config.conditions import anchored_conditions, load_conditions
from rl_eval.config.references import import_attribute
from rl_eval.config.settings import SECTIONS
from rl_eval.errors import ConfigError, nearest
from rl_eval.errors.redaction import redact
from rl_eval.records.plain import in_our_words, leaves, plain
from rl_eval.results.stats.interval import Bounds
from rl_eval.suites.aggregates import METRICS, Metric
from rl_eval.suites.atari import human_scale
from rl_eval.suites.normalization import Scale
from rl_eval.suites.units import Unit

Name = Annotated[str, Field(pattern=r"^\.*[\w+=-][\w.+=-]*$", min_length=1, max_length=100)]
Keys = dict[str, Any]
ScoreKind = Literal["return", "success_once", "success_at_end"]
_Place = tuple[str | int, ...]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class _Config(_Part):
    """Config values by section, as in the config file of one evaluation."""

    environment: Keys = {}
    policy: Keys = {}
    runners: Keys = {}
    evaluation: Keys = {}
    fault_tolerance: Keys = {}

    def values_by_section(self) -> dict[str, Keys]:
        """Return the sections that have values."""
        return {name: values for name in SECTIONS if (values := getattr(self, name))}


class Shared(_Config):
    """Config values of all cells."""


class Task(_Config):
    """Config values of one task, which override the shared values, and the score of an episode."""

    score: ScoreKind = "return"
    """Number that is the score of an episode: its return, or one of its success flags."""
    low: float | None = None
    """Score that is normalized to 0."""
    high: float | None = None
    """Score that is normalized to 1."""
    human_normalized: bool = False
    """Normalize by the published scores of a random policy and of a human in this Atari game, instead of ``low`` and
    ``high``."""


class Steps(_Part):
    """Range of training steps."""

    first: Annotated[int, Field(ge=0)] = 0
    """Lowest step; 0 by default."""
    last: Annotated[int, Field(ge=0)] | None = None
    """Highest step; by default, the step of the last checkpoint."""
    stride: Annotated[int, Field(ge=1)] | None = None
    """Distance between two steps; by default, the steps on disk are used."""


class Method(BaseModel):
    """A policy, as in the section ``policy`` of a config, with its checkpoints."""

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)

    checkpoints: str | None = None
    """Path of a checkpoint with the placeholders ``{task}``, ``{policy}``, ``{seed}`` and ``{step}``, relative to the
    folder of the suite's file."""
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Training seeds."""
    steps: Literal["last", "all"] | tuple[Annotated[int, Field(ge=0)], ...] | Steps = "last"
    """Training steps: the last checkpoint (``last``), all checkpoints (``all``), a list of steps, or a range."""

    @property
    def section(self) -> Keys:
        """Config values of the section ``policy``."""
        return dict(self.model_extra or {})


class Skip(_Part):
    """Cells that are not evaluated."""

    why: Annotated[str, Field(min_length=1)]
    """Reason, for readers of the report."""
    task: str = "*"
    """Name of the task, or a pattern such as ``push-*``."""
    policy: str = "*"
    """Name of the policy, or a pattern."""
    seed: int | None = None
    """Training seed; by default, every seed."""
    step: int | None = None
    """Training step; by default, every step."""

    def applies(self, task: str, policy: str, seed: int | None, step: int | None) -> bool:
        """Whether a cell is skipped."""
        same_run = self.seed in (None, seed) and self.step in (None, step)
        return same_run and fnmatchcase(task, self.task) and fnmatchcase(policy, self.policy)


class Aggregate(_Part):
    """Aggregates over tasks and training seeds."""

    unit: Unit | None = None
    """Unit of the bootstrap: ``run`` resamples training seeds, ``episode`` resamples the episodes of each run."""
    metrics: Annotated[tuple[Metric, ...], Field(min_length=1)] = tuple(METRICS)
    """Aggregates to show."""


class Compare(_Part):
    """Comparison of all policies with one of them."""

    baseline: str
    """Name of the policy with which the other policies are compared."""


class SuiteDefinition(_Part):
    """Tasks, policies, training seeds and steps to evaluate."""

    suite: Name
    """Name of the suite."""
    version: Annotated[int, Field(ge=1)] = 1
    """Version of the suite. A folder has cells of one version only."""
    shared: Shared = Shared()
    """Config values of all cells."""
    tasks: Annotated[dict[Name, Task], Field(min_length=1)]
    """Tasks by name."""
    policies: Annotated[dict[Name, Method], Field(min_length=1)]
    """Policies by name."""
    skip: tuple[Skip, ...] = ()
    """Cells to leave out."""
    conditions: Any = None
    """Initial conditions of the tasks that have no ``evaluation.conditions``."""
    aggregate: Aggregate = Aggregate()
    """Aggregates of the report."""
    compare: Compare | None = None
    """Comparison in the report."""
    _folder: Path = PrivateAttr(default_factory=Path.cwd)
    _digests: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def scales(self) -> dict[str, Scale] | None:
        """Scales of the tasks; None if a task has no scale."""
        found = {name: scale for name, task in self.tasks.items() if (scale := self._scale(task)) is not None}
        return found if len(found) == len(self.tasks) else None

    def _scale(self, task: Task) -> Scale | None:
        """Return the scale of a task; None if the task has no scale. By default, a success score has the scale 0 to 1.

        Raises:
            ConfigError: There are no published scores of the Atari game.
        """
        if task.human_normalized:
            env = task.environment.get("env", self.shared.environment.get("env"))
            return human_scale(str(env).rpartition(":")[2])
        if task.low is not None and task.high is not None:
            return Scale(task.low, task.high)
        return None if task.score == "return" else Scale(0.0, 1.0)

    @property
    def bounds(self) -> dict[str, Bounds]:
        """Lowest and highest possible score of each task for which they are known: success or ``return_bounds``."""
        found: dict[str, Bounds] = {}
        for name, task in self.tasks.items():
            declared = {**self.shared.evaluation, **task.evaluation}.get("return_bounds")
            match (0, 1) if task.score != "return" else declared:
                case [int() | float() as low, int() | float() as high]:
                    found[name] = (float(low), float(high))
        return found

    @property
    def folder(self) -> Path:
        """Folder of the suite's file. Relative paths in the file begin there."""
        return self._folder

    def conditions_digest(self, conditions: Any) -> str:
        """Return the digest of initial conditions, or the error message if they cannot be loaded.

        A file of conditions is read only once.
        """
        key = repr(conditions)
        if key not in self._digests:
            try:
                loaded = load_conditions(anchored_conditions(conditions, self.folder))
                self._digests[key] = "" if loaded is None else loaded.digest
            except ConfigError as error:
                self._digests[key] = str(error)
        return self._digests[key]

    @classmethod
    def from_yaml(cls, path: str | Path) -> SuiteDefinition:
        """Read a suite from a file.

        Raises:
            ConfigError: The file cannot be read, or a key or value in it is wrong; the message names the line and the
                column.
        """
        path = Path(path)
        values, marks = compose_yaml(read_text(path), path)
        return cls.from_dict(values, path.parent, f"{path}:", marks)

    @classmethod
    def from_dict(
        cls,
        values: Mapping[str, Any],
        folder: str | Path = ".",
        where: str = "",
        marks: Mapping[_Place, tuple[int, int]] = {},
    ) -> SuiteDefinition:
        """Create a suite from nested values.

        Args:
            values: Values, nested as in the file.
            folder: Folder where relative paths begin.
            where: Beginning of error messages, such as the name of the file.
            marks: Line and column of each key in the file, by the path of the key.

        Raises:
            ConfigError: A key or a value is wrong.
        """
        try:
            suite = cls.model_validate(_with_catalogues(values))
        except ValidationError as error:
            raise _explained(error, where, marks) from None
        for place, problem in suite.problems():
            raise _error(place, problem, where, marks)
        suite._folder = Path(folder).absolute()  # noqa: SLF001 - an attribute of this class
        return suite

    def problems(self) -> Iterator[tuple[_Place, str]]:
        """Yield the place and the description of each problem: unknown keys and names, and contradictory values."""
        yield from _unknown_keys(("shared",), self.shared.values_by_section())
        for name, task in self.tasks.items():
            yield from _unknown_keys(("tasks", name), task.values_by_section())
            if (task.low is None) != (task.high is None) or (task.low is not None and task.low == task.high):
                yield ("tasks", name), f"low is {task.low} and high is {task.high}; set two different numbers"
            if task.human_normalized and (task.low, task.high) != (None, None):
                yield (
                    ("tasks", name, "human_normalized"),
                    "low and high are also set; remove human_normalized, or low and high",
                )
            try:
                scale = self._scale(task)
            except ConfigError as error:
                yield ("tasks", name, "human_normalized"), str(error)
                continue
            if scale is None and any(other.low is not None or other.human_normalized for other in self.tasks.values()):
                yield (
                    ("tasks", name),
                    "the task has no low and high, but other tasks have; set low and high for every task or for none",
                )
        if self.aggregate.unit == "run" and all(len(method.seeds) < 2 for method in self.policies.values()):
            yield ("aggregate", "unit"), _ONE_SEED
        for name, method in self.policies.items():
            yield from _unknown_keys(("policies", name), {"policy": method.section}, flat=True)
            yield from _wrong_placeholders(("policies", name), method)
        for place, skip in enumerate(self.skip):
            for key, pattern, known in (("task", skip.task, self.tasks), ("policy", skip.policy, self.policies)):
                if not any(fnmatchcase(name, pattern) for name in known):
                    yield ("skip", place, key), f"no {key} matches {pattern!r}: {nearest(pattern, known)}"
        if self.compare is not None and self.compare.baseline not in self.policies:
            wrong = self.compare.baseline
            yield ("compare", "baseline"), f"there is no policy {wrong!r}: {nearest(wrong, self.policies)}"


_ONE_SEED: Final = (
    "the unit is 'run', but no policy has two training seeds, so nothing is known about other seeds. Add seeds, or "
    "set the unit to 'episode' "
    "to get numbers about these trained policies only"
)


_PLACEHOLDERS: Final = ("task", "policy", "seed", "step")
"""Names of the placeholders that ``checkpoints`` may contain."""


def _wrong_placeholders(place: _Place, method: Method) -> Iterator[tuple[_Place, str]]:
    path = method.checkpoints
    texts = path or "", *(str(value) for _, value in leaves(plain(method.section)))
    for name in re.findall(r"{(\w*)}", path or ""):
        if name not in _PLACEHOLDERS:
            yield (*place, "checkpoints"), f"unknown placeholder {{{name}}}: {nearest(name, _PLACEHOLDERS)}"
    if len(set(method.seeds)) < len(method.seeds):
        yield (*place, "seeds"), "a seed appears twice"
    if method.seeds and not any("{seed}" in text for text in texts):
        yield (*place, "seeds"), "there are seeds, but no {seed} in checkpoints, so all would evaluate the same policy"
    if path is None and (method.steps != "last" or any("{checkpoint}" in text for text in texts)):
        yield place, "checkpoints is missing"
    if not method.seeds and any("{seed}" in text for text in texts):
        yield (*place, "seeds"), "there is {seed} in a value, but seeds is missing"
    if path is not None and "{step}" not in path and method.steps != "last":
        yield (*place, "steps"), "there is no {step} in checkpoints"
    if "{step}" not in (path or "") and any("{step}" in text for text in texts):
        yield place, "there is {step} in a value, but not in checkpoints"


def _unknown_keys(place: _Place, values: Mapping[str, Keys], *, flat: bool = False) -> Iterator[tuple[_Place, str]]:
    own = Method.model_fields if flat else ()
    for section, keys in values.items():
        known = [*SECTIONS[section].model_fields, *own]
        for key in keys:
            if key not in known:
                full = (*place, key) if flat else (*place, section, key)
                yield full, f"unknown key {key!r}: {nearest(str(key), known)}"


def _with_catalogues(values: Any) -> Any:
    """Replace each task that names a catalogue with the tasks of the catalogue."""
    if not isinstance(values, Mapping) or not isinstance(values.get("tasks"), Mapping):
        return values
    tasks: dict[Any, Any] = {}
    for name, task in values["tasks"].items():
        if not isinstance(task, Mapping) or "catalogue" not in task:
            tasks[name] = task
            continue
        rest = {one: value for one, value in task.items() if one not in ("catalogue", "pick")}
        for one, given in _picked(f"tasks.{name}", task).items():
            full = str(name).replace("*", one.replace("/", "-"))
            if full in tasks or (full != name and full in values["tasks"]):
                fix = "Put a * into the name; each name in the catalogue replaces it. Give other tasks different names."
                raise ConfigError(f"tasks.{name}: two tasks have the name {full}", key=f"tasks.{name}", fix=fix)
            tasks[full] = {**given, **rest}
    return {**values, "tasks": tasks}


def _picked(place: str, task: Mapping[str, Any]) -> Mapping[str, Keys]:
    """Return the tasks of a catalogue that match ``pick``."""
    key = f"{place}.catalogue"
    found = import_attribute(key, str(task["catalogue"]))
    listed = found() if callable(found) else found
    if not isinstance(listed, Mapping) or not all(isinstance(one, Mapping) for one in listed.values()):
        fix = "Return a mapping of names to tasks, which are mappings."
        raise ConfigError(f"{key} is not a mapping of names to tasks", key=key, value=type(listed).__name__, fix=fix)
    pick = task.get("pick", "*")
    patterns = [pick] if isinstance(pick, str) else pick
    if not isinstance(patterns, list):
        raise ConfigError(f"{place}.pick is {pick!r}", key=f"{place}.pick", value=pick, fix="Write a list of patterns.")
    chosen = {one: given for one, given in listed.items() if any(fnmatchcase(one, str(p)) for p in patterns)}
    if not chosen:
        text = f"{place}.pick is {pick!r}: no task of the catalogue matches"
        raise ConfigError(text, key=f"{place}.pick", value=pick, fix=f"It has {', '.join(listed)}.")
    return chosen


_PARTS: Final[Mapping[str, type[BaseModel]]] = {
    "tasks": Task,
    "policies": Steps,
    "shared": Shared,
    "skip": Skip,
    "aggregate": Aggregate,
    "compare": Compare,
}
_OF_PYDANTIC: Final = ("tuple[", "function-", "literal[", "Steps", "constrained-")
"""Beginnings of the names that pydantic inserts into the path of a wrong value for each member of a union type."""


def _explained(error: ValidationError, where: str, marks: Mapping[_Place, tuple[int, int]]) -> ConfigError:
    """Return an error about the first unknown key; if all keys are known, about the first wrong value."""
    first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")  # It may explain the other errors.
    place = tuple(part for part in first["loc"] if not str(part).startswith(_OF_PYDANTIC))
    if first["type"] == "extra_forbidden":
        model = _PARTS.get(str(place[0]), SuiteDefinition) if len(place) > 1 else SuiteDefinition
        problem = f"unknown key {place[-1]!r}: {nearest(str(place[-1]), model.model_fields)}"
    elif first["type"] == "missing":
        problem = "this key is required"
    else:
        problem = f"it is {redact(first['input'], *map(str, place))!r}: {in_our_words(first['msg'])}"
    return _error(place, problem, where, marks)


def _error(place: _Place, problem: str, where: str, marks: Mapping[_Place, tuple[int, int]]) -> ConfigError:
    found = next((marks[place[:end]] for end in range(len(place), -1, -1) if place[:end] in marks), None)
    at = where if found is None else f"{where}{found[0]}:{found[1]}:"
    key = ".".join(map(str, place))
    return ConfigError(f"{at} {key}: {problem}".strip(), key=key)
