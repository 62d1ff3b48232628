"""How an evaluation is told what to do: a builder in RLlib's style, and YAML.

:class:`EvalConfig` is the builder: each section method changes it and returns it. What runs is
:class:`~rl_eval.settings.EvalSettings`, the frozen and validated copy that :meth:`EvalConfig.build` makes.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import yaml

from rl_eval.errors import ConfigError, nearest
from rl_eval.redaction import MASK, redact
from rl_eval.settings import SECTIONS, EvalSettings, copy_containers, make_settings

__all__ = ["EvalConfig"]

_UNSET: Final[Any] = object()


class EvalConfig:
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

    def environment(
        self,
        env: str | Callable[..., Any] = _UNSET,
        *,
        env_kwargs: Mapping[str, Any] = _UNSET,
        env_reuse: Literal["lane", "episode"] = _UNSET,
    ) -> EvalConfig:
        """Choose the environment; see :class:`EnvironmentSection`."""
        return self._update("environment", env=env, env_kwargs=env_kwargs, env_reuse=env_reuse)

    def policy(
        self,
        policy: Any = _UNSET,
        *,
        policy_kwargs: Mapping[str, Any] = _UNSET,
        weights: str | Path | None = _UNSET,
        weights_key: str | None = _UNSET,
        deterministic: bool = _UNSET,
        actions: Literal["clip", "unsquash", "none"] = _UNSET,
        device: str = _UNSET,
        inference: Literal["exact", "batched"] = _UNSET,
        allow_nondeterministic: bool = _UNSET,
    ) -> EvalConfig:
        """Choose the policy; see :class:`PolicySection`."""
        return self._update(
            "policy",
            policy=policy,
            policy_kwargs=policy_kwargs,
            weights=str(weights) if isinstance(weights, Path) else weights,
            weights_key=weights_key,
            deterministic=deterministic,
            actions=actions,
            device=device,
            inference=inference,
            allow_nondeterministic=allow_nondeterministic,
        )

    def runners(
        self,
        *,
        num_runners: int = _UNSET,
        num_envs_per_runner: int | None = _UNSET,
        runner: str | type = _UNSET,
        num_cpus_per_runner: float = _UNSET,
        num_gpus_per_runner: float = _UNSET,
        custom_resources_per_runner: Mapping[str, float] = _UNSET,
        label_selector: Mapping[str, str] = _UNSET,
        init_fn: str | Callable[[], object] | None = _UNSET,
        runtime_env: Mapping[str, Any] = _UNSET,
        address: str | None = _UNSET,
        runner_start_timeout_s: float = _UNSET,
    ) -> EvalConfig:
        """Choose the runners; see :class:`RunnersSection`."""
        return self._update(
            "runners",
            num_runners=num_runners,
            num_envs_per_runner=num_envs_per_runner,
            runner=runner,
            num_cpus_per_runner=num_cpus_per_runner,
            num_gpus_per_runner=num_gpus_per_runner,
            custom_resources_per_runner=custom_resources_per_runner,
            label_selector=label_selector,
            init_fn=init_fn,
            runtime_env=runtime_env,
            address=address,
            runner_start_timeout_s=runner_start_timeout_s,
        )

    def evaluation(
        self,
        *,
        num_episodes: int = _UNSET,
        seed: int = _UNSET,
        first_index: int = _UNSET,
        max_episode_steps: int | None = _UNSET,
        gamma: float = _UNSET,
        info_keys: tuple[str, ...] | list[str] = _UNSET,
        return_bounds: tuple[float, float] | None = _UNSET,
        observers: tuple[Any, ...] | list[Any] = _UNSET,
        purity_check: float | Literal["auto"] = _UNSET,
    ) -> EvalConfig:
        """Choose the episodes; see :class:`EvaluationSection`."""
        return self._update(
            "evaluation",
            num_episodes=num_episodes,
            seed=seed,
            first_index=first_index,
            max_episode_steps=max_episode_steps,
            gamma=gamma,
            info_keys=info_keys,
            return_bounds=return_bounds,
            observers=observers,
            purity_check=purity_check,
        )

    def fault_tolerance(
        self,
        *,
        max_attempts_per_episode: int = _UNSET,
        episode_timeout_s: float | None = _UNSET,
        reset_timeout_s: float | None = _UNSET,
        step_timeout_s: float | None = _UNSET,
        runner_timeout_s: float | None = _UNSET,
        max_runner_restarts: int = _UNSET,
        fail_fast: bool = _UNSET,
        max_failed_episodes: float | None = _UNSET,
    ) -> EvalConfig:
        """Choose how faults are met; see :class:`FaultToleranceSection`."""
        return self._update(
            "fault_tolerance",
            max_attempts_per_episode=max_attempts_per_episode,
            episode_timeout_s=episode_timeout_s,
            reset_timeout_s=reset_timeout_s,
            step_timeout_s=step_timeout_s,
            runner_timeout_s=runner_timeout_s,
            max_runner_restarts=max_runner_restarts,
            fail_fast=fail_fast,
            max_failed_episodes=max_failed_episodes,
        )

    def _update(self, section: str, **values: Any) -> EvalConfig:
        given = {key: copy_containers(value) for key, value in values.items() if value is not _UNSET}
        self._values[section].update(given)
        return self

    # ------------------------------------------------------------------ in and out

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EvalConfig:
        """Build from nested sections, such as one section of a larger algorithm config.

        Raises:
            ConfigError: A section or key is unknown; the message suggests the nearest.
        """
        config = cls()
        if not isinstance(values, Mapping):
            raise ConfigError(f"a config is a mapping of sections ({', '.join(SECTIONS)}), not {_shown(values)}")
        for section, keys in values.items():
            if section not in SECTIONS:
                raise ConfigError(f"unknown config section {section!r}: {nearest(str(section), SECTIONS)}")
            if not isinstance(keys, Mapping):
                raise ConfigError(f"config section {section!r} must be a mapping of keys, not {_shown(keys)}")
            for key, value in keys.items():
                config.set(f"{section}.{key}", value)
        return config

    @classmethod
    def from_algorithm_config(cls, config: Any) -> EvalConfig:
        """Translate an RLlib ``AlgorithmConfig``; see :func:`rl_eval.integrations.rllib.eval_config_of`.

        Raises:
            ConfigError: A setting that concerns evaluation cannot be honoured.
        """
        translated: EvalConfig = importlib.import_module("rl_eval.integrations.rllib").eval_config_of(config)
        return translated

    @classmethod
    def from_yaml(cls, path: str | Path, section: str | None = None) -> EvalConfig:
        """Read a YAML file, or one (dotted) section of it.

        A relative ``policy.weights`` is taken relative to the file.

        Raises:
            ConfigError: The file is missing or broken, or holds an unknown section or key.
        """
        path = Path(path)
        values = _read_yaml(path)
        for part in section.split(".") if section else ():
            if not isinstance(values, Mapping) or part not in values:
                known = values if isinstance(values, Mapping) else ()
                raise ConfigError(f"{path} has no section {section!r}: {nearest(part, map(str, known))}")
            values = values[part]
        config = cls.from_dict(values)
        weights = config._values["policy"].get("weights")
        if isinstance(weights, str) and not Path(weights).is_absolute():
            config._values["policy"]["weights"] = str((path.parent / weights).resolve())
        return config

    def set(self, key: str, value: Any) -> EvalConfig:
        """Set one value by its dotted name, as ``--set`` does.

        Raises:
            ConfigError: The key is unknown; the message suggests the nearest.
        """
        section, _, name = key.partition(".")
        if section not in SECTIONS or not name:
            known = [f"{s}.{k}" for s, model in SECTIONS.items() for k in model.model_fields]
            raise ConfigError(f"unknown config key {key!r}: {nearest(key, known)}")
        if name not in SECTIONS[section].model_fields:
            raise ConfigError(f"unknown config key {key!r}: {nearest(name, SECTIONS[section].model_fields)}")
        self._values[section][name] = copy_containers(value)
        return self

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return the values that were set, as nested plain data where they are plain."""
        return {section: copy_containers(values) for section, values in self._values.items() if values}

    def to_yaml(self) -> str:
        """Return YAML that :meth:`from_yaml` reads back.

        Raises:
            ConfigError: A value is a live object; give it as ``"module:attr"`` instead.
        """
        plain: dict[str, dict[str, Any]] = {}
        for section, values in self.to_dict().items():
            plain[section] = {key: _plain(f"{section}.{key}", value) for key, value in values.items()}
        return yaml.safe_dump(plain, sort_keys=False)

    def copy(self) -> EvalConfig:
        """Return an independent copy; live objects are shared."""
        duplicate = EvalConfig()
        duplicate._values = copy_containers(self._values)
        return duplicate

    def build(self) -> EvalSettings:
        """Validate and freeze.

        Raises:
            ConfigError: A value is wrong, or a setting cannot be honoured with the others.
        """
        return make_settings(self._values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EvalConfig) and self._values == other._values

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"EvalConfig({redact(self.to_dict())})"


def _shown(value: Any) -> str:
    """Return what is where a mapping should be; what it assigns may be a secret."""
    return re.sub(r"(?s)([=:]).*", rf"\1{MASK}", repr(value))


def _read_yaml(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text()) or {}
    except FileNotFoundError:
        raise ConfigError(f"there is no config file {str(path)!r}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} cannot be read: it is no text file ({error})") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML{_locate(error)}") from None


def _locate(error: yaml.YAMLError) -> str:
    """Say where YAML is broken and why, with the line itself and a mark below the place."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:
        return f": {str(error).splitlines()[0]}"
    shown = f"\n{snippet}" if (snippet := mark.get_snippet()) else ""
    return f", in line {mark.line + 1}, column {mark.column + 1}: {problem}{shown}"


def _plain(key: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_plain(key, name): _plain(f"{key}.{name}", item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(key, item) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise ConfigError(f'{key} is a live object ({value!r}) and cannot be written to YAML: give it as "module:attr"')
