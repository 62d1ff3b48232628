"""Configuration of an evaluation: a builder in RLlib's style, and YAML.

:class:`EvalConfig` is the builder: each section method changes it and returns it. :meth:`EvalConfig.build` returns a
frozen and validated copy, :class:`~rl_eval.config.settings.EvalSettings`, with which the evaluation runs.
"""

from __future__ import annotations

import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, cast

import yaml

from rl_eval.bounded_read import read_named
from rl_eval.config.conditions import anchored_conditions
from rl_eval.config.policy_sources import absolute, anchored, user_path
from rl_eval.config.settings import SECTIONS, EvalSettings, copy_containers, make_settings
from rl_eval.errors import ConfigError, checked_keywords, nearest
from rl_eval.errors.other_names import KnowsNames
from rl_eval.errors.redaction import MASK, redact
from rl_eval.records.plain import convert

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _section(method: _Method) -> _Method:
    """Decorate the method of a section: the method stores its keywords, and its docstring documents the keys.

    The signature of the method shows the defaults of the section, but defaults are not stored.
    """
    name, signature = method.__name__, inspect.signature(method)

    @functools.wraps(method)
    def store(config: EvalConfig, *args: Any, **keywords: Any) -> EvalConfig:
        for key in sorted(keywords):
            _check_key(f"{name}.{key}")
        given = signature.bind(config, *args, **keywords).arguments
        for key, value in list(given.items())[1:]:
            config.set(f"{name}.{key}", str(value) if isinstance(value, Path) else value)
        return config

    fields = SECTIONS[name].model_fields.items()
    keys = [f"{key}: {' '.join((field.description or '').split())}" for key, field in fields]
    filled = [textwrap.fill(key, 100, initial_indent=" " * 4, subsequent_indent=" " * 8) for key in keys]
    store.__doc__ = "\n".join([f"{method.__doc__}\n\nArgs:", *filled])
    return cast(_Method, store)


def _check_key(key: str) -> None:
    """Raise an error for a dotted key that does not exist.

    The message suggests the section that has the key, or the nearest key.
    """
    section, _, name = key.partition(".")
    fields = {known: model.model_fields for known, model in SECTIONS.items()}
    if name in fields.get(section, {}):
        return
    word, known, inside = key, [f"{other}.{one}" for other, keys in fields.items() for one in keys], ""
    if section in fields and name:
        word, known, inside = name, [*fields[section]], f"{section}."
    places = [f"{other}.{word}" for other, keys in fields.items() if word.partition(".")[0] in keys]
    meant = f"did you mean {' or '.join(map(repr, places))}?" if places else nearest(word, known, inside)
    raise ConfigError(f"unknown config key {key!r}: {meant}", key=key)


class EvalConfig(KnowsNames):
    """Builder of an evaluation's configuration.

    Example:
        >>> config = (
        ...     EvalConfig()
        ...     .environment("CartPole-v1")
        ...     .runners(num_runners=2, num_envs_per_runner=16)
        ...     .evaluation(num_episodes=200, seed=0)
        ... )
        >>> config.build().evaluation.num_episodes
        200
    """

    def __init__(self) -> None:
        self._values: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}

    # ------------------------------------------------------------------ sections

    @_section
    def environment(
        self,
        env: str | Callable[..., Any] | None = None,
        *,
        env_kwargs: Mapping[str, Any] = {},
        wrappers: Sequence[Any] = (),
        env_reuse: Literal["lane", "episode"] = "lane",
        instances: Literal["many", "one"] = "many",
        python: str | Sequence[str] | None = None,
        python_path: Sequence[str | Path] = (),
        agents: tuple[str, ...] | list[str] = (),
        action_masks: bool = False,
    ) -> EvalConfig:
        """Set values of the section ``environment``."""
        return self

    @_section
    def policy(
        self,
        policy: Any = None,
        *,
        policy_kwargs: Mapping[str, Any] = {},
        weights: str | Path | None = None,
        weights_key: str | None = None,
        normalizer: str | Path | None = None,
        deterministic: bool = True,
        actions: Literal["clip", "unsquash", "none"] = "clip",
        device: str = "cpu",
        inference: Literal["exact", "batched"] = "exact",
        allow_nondeterministic: bool = False,
        chunk: Mapping[str, int] | None = None,
        policies: Mapping[str, Any] = {},
        policy_mapping_fn: str | Callable[[Any, Any], str] | None = None,
    ) -> EvalConfig:
        """Set values of the section ``policy``."""
        return self

    @_section
    def runners(
        self,
        *,
        num_runners: int = 0,
        num_envs_per_runner: int | None = None,
        runner: str | type = "vector",
        block: int | None = None,
        num_cpus_per_runner: float = 1.0,
        num_gpus_per_runner: float = 0.0,
        custom_resources_per_runner: Mapping[str, float] = {},
        label_selector: Mapping[str, str] = {},
        in_placement_group: bool = False,
        init_fn: str | Callable[[], object] | None = None,
        runtime_env: Mapping[str, Any] = {},
        address: str | None = None,
        runner_start_timeout_s: float = 120.0,
    ) -> EvalConfig:
        """Set values of the section ``runners``."""
        return self

    @_section
    def evaluation(
        self,
        *,
        num_episodes: int = 100,
        seed: int = 0,
        first_index: int = 0,
        matchups: Any = None,
        symmetric: bool = False,
        conditions: Any = None,
        condition_target: Literal["rows", "population"] = "rows",
        max_episode_steps: int | None = None,
        gamma: float = 1.0,
        info_keys: tuple[str, ...] | list[str] = (),
        success_key: str | None = None,
        metrics: Mapping[str, Any] = {},
        return_bounds: tuple[float, float] | None = None,
        observers: tuple[Any, ...] | list[Any] = (),
        rules: tuple[Any, ...] | list[Any] = (),
        determinism_check: float | Literal["auto"] = "auto",
    ) -> EvalConfig:
        """Set values of the section ``evaluation``."""
        return self

    @_section
    def fault_tolerance(
        self,
        *,
        max_attempts_per_episode: int = 3,
        episode_timeout_s: float | None = 3600.0,
        reset_timeout_s: float | None = None,
        step_timeout_s: float | None = None,
        runner_timeout_s: float | None = None,
        max_runner_restarts: int = 10,
        fail_fast: bool = True,
        max_failed_episodes: float | None = None,
    ) -> EvalConfig:
        """Set values of the section ``fault_tolerance``."""
        return self

    # ------------------------------------------------------------------ in and out

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], folder: Path | None = None) -> EvalConfig:
        """Create a config from values by section and key, such as one section of a larger algorithm config.

        Args:
            values: Values by section and key.
            folder: Folder for resolving relative paths of weights, of conditions, and of policies with a scheme. By
                default, the working directory.

        Raises:
            ConfigError: ``values`` or a section is not a mapping, or a section or key is unknown. For an unknown name,
                the message suggests the nearest name.
        """
        config = cls()
        if not isinstance(values, Mapping):
            problem = f"the config is {_shown(values)}, not a mapping"
            fix = f"Write a mapping of sections: {', '.join(SECTIONS)}."
            raise ConfigError(problem, key="config", value=_shown(values), fix=fix)
        for section, keys in values.items():
            if section not in SECTIONS:
                advice = "run a suite with rl-eval suite run" if section == "suite" else nearest(str(section), SECTIONS)
                raise ConfigError(f"unknown config section {section!r}: {advice}", key=str(section))
            if not isinstance(keys, Mapping):
                problem = f"config section {section!r} must be a mapping of keys, not {_shown(keys)}"
                fix = f"Write {section}: {{{next(iter(SECTIONS[section].model_fields))}: VALUE}}."
                raise ConfigError(problem, key=section, value=_shown(keys), fix=fix)
            for key, value in keys.items():
                config.set(f"{section}.{key}", value)
        if folder is not None:
            for key, value in _anchored(config.to_dict().get("policy", {}), folder).items():
                config.set(f"policy.{key}", value)
            for key, value in _anchored_interpreter(config.to_dict().get("environment", {}), folder).items():
                config.set(f"environment.{key}", value)
            if (conditions := config.to_dict().get("evaluation", {}).get("conditions")) is not None:
                config.set("evaluation.conditions", anchored_conditions(conditions, folder))
        return config

    @classmethod
    def from_yaml(cls, path: str | Path, section: str | None = None) -> EvalConfig:
        """Read a YAML file, or one section of it.

        Paths of weights, of policies with a scheme and of conditions are relative to the file.

        Args:
            path: The file.
            section: Dotted key of the section with the config, such as ``training.evaluation``; None for the whole
                file.

        Raises:
            ConfigError: The file is missing or invalid, does not contain ``section``, or has an unknown section or key.
        """
        path = Path(path)
        values = _read_yaml(path)
        for part in section.split(".") if section else ():
            if not isinstance(values, Mapping) or part not in values:
                known = values if isinstance(values, Mapping) else ()
                raise ConfigError(
                    f"{path} has no section {section!r}: {nearest(part, map(str, known))}", key=str(path), value=section
                )
            values = values[part]
        try:
            return cls.from_dict(values, path.parent)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error.problem}", key=error.key, value=error.value, fix=error.fix) from None

    def set(self, key: str, value: Any) -> EvalConfig:
        """Set one value by its dotted key, as ``--set`` does.

        Raises:
            ConfigError: The key is unknown; the message suggests the nearest key.
        """
        _check_key(key)
        section, _, name = key.partition(".")
        self._values[section][name] = copy_containers(value)
        return self

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return the values that were set, by section and key, without defaults."""
        return {section: copy_containers(values) for section, values in self._values.items() if values}

    def to_yaml(self) -> str:
        """Return YAML that :meth:`from_yaml` reads back.

        Raises:
            ConfigError: A value is a Python object; pass it as ``"module:attr"`` instead.
        """
        # The keys of a mapping keep their types.
        return yaml.safe_dump(
            convert(self.to_dict(), _yaml_leaf, name=lambda key: _yaml_leaf("a key", key)), sort_keys=False
        )

    def copy(self) -> EvalConfig:
        """Return an independent copy. Python objects in the config are not copied."""
        duplicate = EvalConfig()
        duplicate._values = copy_containers(self._values)
        return duplicate

    def build(self) -> EvalSettings:
        """Return validated, frozen settings.

        Raises:
            ConfigError: A value is invalid, or two settings contradict each other.
        """
        return make_settings(self._values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EvalConfig) and self._values == other._values

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"EvalConfig({redact(self.to_dict())})"


def checked_settings(function: _Method) -> _Method:
    """Make a function reject an unknown keyword; for a key of a section, the error names the section."""

    def section(key: str) -> str:
        places = [name for name, model in SECTIONS.items() if key in model.model_fields]
        return f"pass a config: EvalConfig().{places[0]}({key}=...)" if places else ""

    return checked_keywords(function, section)


def settings_of(config: Any, **sections: Mapping[str, Any]) -> EvalSettings:
    """Return the settings of a config, or the default settings for an environment.

    Settings are returned unchanged, unless ``sections`` contains values.

    Args:
        config: An :class:`EvalConfig`, :class:`~rl_eval.config.settings.EvalSettings`, or an environment: an id or a
            callable.
        **sections: Values that replace those of the config, by section and key.

    Raises:
        ConfigError: The argument is something else, or the config is invalid.
    """
    if isinstance(config, EvalSettings) and not any(sections.values()):
        return config
    changed = _as_config(config)
    for name, values in sections.items():
        for key, value in values.items():
            changed.set(f"{name}.{key}", value)
    return changed.build()


def _as_config(given: Any) -> EvalConfig:
    """Return an independent config, made from a config, settings or an environment."""
    if isinstance(given, EvalConfig):
        return given.copy()
    if isinstance(given, EvalSettings):
        sections = {name: getattr(given, name) for name in SECTIONS}
        return EvalConfig.from_dict(
            {name: {key: getattr(one, key) for key in one.model_fields_set} for name, one in sections.items()}
        )
    if isinstance(given, str) or callable(given):
        return EvalConfig().environment(given)
    problem = f"a {type(given).__name__} is neither a config nor an environment"
    fix = (
        "Pass an EvalConfig, such as EvalConfig.from_yaml(FILE), a gymnasium id such as 'CartPole-v1', or a "
        "function or class that builds an environment."
    )
    raise ConfigError(problem, key="config", value=type(given).__name__, fix=fix)


def _anchored(section: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the values of a policy section that can be paths, by key; resolve relative paths against a folder."""
    result: dict[str, Any] = {}
    for key in ("weights", "normalizer"):
        if isinstance(path := section.get(key), str):
            result[key] = absolute(folder / path)
    if isinstance(policy := section.get("policy"), str):
        result["policy"] = anchored(policy, folder)
    if isinstance(policies := section.get("policies"), Mapping):
        result["policies"] = {name: _anchored_policy(one, folder) for name, one in policies.items()}
    return result


def _anchored_interpreter(section: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the keys of an environment section that name an interpreter; resolve relative paths against a folder."""
    result: dict[str, Any] = {}
    if isinstance(python := section.get("python"), str) and "/" in python:
        result["python"] = absolute(folder / user_path(python))
    if isinstance(folders := section.get("python_path"), (list, tuple)):
        result["python_path"] = [absolute(folder / user_path(str(one))) for one in folders]
    return result


def _anchored_policy(given: Any, folder: Path) -> Any:
    if isinstance(given, str):
        return anchored(given, folder)
    return {**given, **_anchored(given, folder)} if isinstance(given, Mapping) else given


def _shown(value: Any) -> str:
    """Return the repr of a value that should be a mapping.

    Text after ``=`` or ``:`` is masked, because it may be a secret.
    """
    return re.sub(r"(?s)([=:]).*", rf"\1{MASK}", repr(value))


def _read_yaml(path: Path) -> Any:
    return compose_yaml(read_text(path), path)[0] or {}


def read_text(path: Path) -> str:
    """Return the text of a config file.

    Raises:
        ConfigError: There is no such file, it cannot be read, or it is not text.
    """
    try:
        return read_named(path).decode()
    except FileNotFoundError:
        fix = (
            "Pass the path of a YAML file."
            if path.suffix in {".yaml", ".yml"}
            else f"To evaluate an environment, set environment.env (--env {path})."
        )
        raise ConfigError(f"there is no config file {str(path)!r}", key=str(path), fix=fix) from None
    except OSError as error:
        fix = "Pass a YAML file." if path.is_dir() else ""
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}", key=str(path), fix=fix) from None
    except UnicodeDecodeError:
        fix = f"To evaluate a model file, set policy.policy (--policy {path})."
        raise ConfigError(f"{path} is not a text file, so it is not a config", key=str(path), fix=fix) from None


_MOST_VALUES: Final = 50_000
"""Maximum number of values and keys. To parse them takes about a second."""
_DEEPEST: Final = 100
_MOST_DIGITS: Final = 1_000
Marks = dict[tuple[str | int, ...], tuple[int, int]]


def compose_yaml(text: str, path: Path) -> tuple[Any, Marks]:
    """Parse YAML. Return the values, and the line and column (from 1) of each key and list item.

    Args:
        text: The text.
        path: Its file, for the message.

    Raises:
        ConfigError: The text is not valid YAML, or contains a key twice.
    """
    try:
        return _parsed(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}", key=str(path)) from None


def _parsed(text: str) -> tuple[Any, Marks]:
    try:
        loader = _StrictLoader(text)
        node = loader.get_single_node()
        return None if node is None else loader.construct_document(node), _marks(node)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # A value does not fit its tag.
        raise yaml.YAMLError(f"a value cannot be read: {error}") from error


def _marks(node: yaml.Node | None, place: tuple[str | int, ...] = ()) -> Marks:
    found: Marks = {}
    pairs = node.value if isinstance(node, yaml.MappingNode) else ()
    items = enumerate(node.value) if isinstance(node, yaml.SequenceNode) else ()
    for key, item, value in [(k.value, k, v) for k, v in pairs] + [(number, v, v) for number, v in items]:
        found[(*place, key)] = item.start_mark.line + 1, item.start_mark.column + 1
        found |= _marks(value, (*place, key))
    return found


def _yaml_leaf(key: str, value: Any) -> Any:
    if value is None or isinstance(value, str | int | float | bool):
        return value
    problem = f"{key} is a Python object ({value!r}) and cannot be written to YAML"
    raise ConfigError(problem, key=key, value=value, fix='Set the key to the name of the object, "module:attr".')


def read_yaml(text: str) -> Any:
    """Parse YAML as ``yaml.safe_load`` does.

    Raises:
        yaml.YAMLError: The text is not valid YAML, or contains a key twice.
    """
    return _parsed(text)[0]


def _too_large(event: Any) -> yaml.YAMLError:
    problem = f"more than {_MOST_VALUES:,} values, with those of aliases, {_DEEPEST} levels, or {_MOST_DIGITS:,} digits"
    return yaml.composer.ComposerError(problem=problem, problem_mark=event.start_mark)


class _StrictLoader(yaml.SafeLoader):
    """Loader that also rejects repeated keys, very many values, deep nesting, and numbers with very many digits."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._level = self._values = 0
        self._sizes: dict[str | None, int] = {}
        """Number of values of each anchor whose end was reached."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node, and count it. An alias counts as all values of its anchor, because readers copy them."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        before, copies = self._values, 0
        if isinstance(event, yaml.AliasEvent) and event.anchor in self.anchors:
            copies = self._sizes.get(event.anchor, _MOST_VALUES)  # Without a size, it contains itself.
        self._values, self._level = self._values + 1 + copies, self._level + 1
        if self._values > _MOST_VALUES or self._level > _DEEPEST:
            raise _too_large(event)
        node = super().compose_node(parent, index)
        self._level -= 1
        self._sizes[event.anchor] = self._values - before
        if isinstance(node, yaml.ScalarNode) and node.tag.endswith(":int") and len(node.value) > _MOST_DIGITS:
            raise _too_large(event)
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and not key.tag.endswith(":merge"):
                if (key.tag, key.value) in seen:
                    raise yaml.composer.ComposerError(
                        problem=f"the key {key.value} appears twice", problem_mark=key.start_mark
                    )
                seen.add((key.tag, key.value))
        return node


def _tuple(loader: yaml.SafeLoader, node: yaml.SequenceNode) -> tuple[Any, ...]:
    return tuple(loader.construct_sequence(node, deep=True))


# ``yaml.dump`` writes tuples with this tag. Other tags of Python are an error, because they can run code.
_StrictLoader.add_constructor("tag:yaml.org,2002:python/tuple", _tuple)
