"""What to evaluate and how: sections with defaults, a builder in RLlib's style, and YAML.

:class:`EvalConfig` is the builder: each section method changes it and returns it. What runs is
:class:`EvalSettings`, the frozen and validated copy that :meth:`EvalConfig.build` makes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rl_eval.errors import ConfigError, nearest
from rl_eval.plan import MAX_EPISODES

__all__ = [
    "EnvironmentSection",
    "EvalConfig",
    "EvalSettings",
    "EvaluationSection",
    "FaultToleranceSection",
    "PolicySection",
    "RunnersSection",
    "copy_containers",
    "describe_object",
]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, strict=False)


PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0)]


class EnvironmentSection(_Section):
    """Which environment."""

    env: Any = None
    """A gymnasium id, ``"module:attr"``, or a callable that takes an ``EnvContext``."""
    env_kwargs: dict[str, Any] = {}
    """Keyword arguments of the environment."""
    env_reuse: Literal["lane", "episode"] = "lane"
    """Whether an environment serves all episodes of its lane, or is built anew for each."""


class PolicySection(_Section):
    """Which policy, and how it acts."""

    policy: Any = None
    """An ``nn.Module``, a callable on batches, a ``Policy``, or ``"module:factory"``."""
    policy_kwargs: dict[str, Any] = {}
    """Keyword arguments of the factory."""
    weights: str | None = None
    """A safetensors file, or a torch file that ``weights_only=True`` can load."""
    deterministic: bool = True
    """Take the mode of the policy's distribution; else sample, from each episode's own stream."""
    actions: Literal["clip", "unsquash", "none"] = "clip"
    """For Box spaces: clip into the bounds, map [-1, 1] onto them, or pass actions as they are."""
    device: str = "cpu"
    """Torch device of the policy."""


class RunnersSection(_Section):
    """How many runners, of which kind, with which resources."""

    num_runners: Annotated[int, Field(ge=0)] = 0
    """Ray actors; 0 runs in this process, without Ray."""
    num_envs_per_runner: PositiveInt | None = None
    """Lanes per runner; by default 8, and 1 for ``single_agent``."""
    runner: str | type = "vector"
    """``vector``, ``single_agent``, or the ``"module:Class"`` of an ``EvalRunner``."""
    num_cpus_per_runner: Fraction = 1.0
    num_gpus_per_runner: Fraction = 0.0
    custom_resources_per_runner: dict[str, float] = {}
    label_selector: dict[str, str] = {}
    """Ray node labels that a runner's node must have."""
    runtime_env: dict[str, Any] = {}
    """Ray runtime environment of the runners, merged over rl_eval's own."""
    address: str | None = None
    """Ray cluster; by default ``RAY_ADDRESS``, else a local cluster that ends with the group."""
    runner_start_timeout_s: PositiveFloat = 120.0
    """Longest wait for the first runner."""

    @property
    def lanes(self) -> int:
        """Lanes per runner."""
        if self.num_envs_per_runner is not None:
            return self.num_envs_per_runner
        return 1 if self.single_agent else 8

    @property
    def single_agent(self) -> bool:
        """Whether the runner is the one with a single environment, however it is named."""
        name = self.runner if isinstance(self.runner, str) else self.runner.__name__
        return name.rpartition(":")[2] in {"single_agent", "SingleAgentEvalRunner"}


class EvaluationSection(_Section):
    """Which episodes, and what is recorded of them."""

    num_episodes: Annotated[int, Field(ge=1, le=MAX_EPISODES)] = 100
    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0
    """Root seed: the seed of every episode follows from it and the episode's index."""
    max_episode_steps: PositiveInt | None = None
    """Cut episodes after this many steps and mark them truncated by us."""
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount of ``discounted_return``."""
    info_keys: tuple[str, ...] = ()
    """Scalars of the step ``info`` to record, as of the episode's last step that has them."""
    return_bounds: tuple[float, float] | None = None
    """Least and greatest possible return: what failed episodes are assumed to be worth at worst and best."""


class FaultToleranceSection(_Section):
    """How often to try again, and when to stop waiting."""

    max_attempts_per_episode: Annotated[int, Field(ge=1, le=60_000)] = 3
    """Attempts of one episode, all with its seed; after the last it is recorded as failed."""
    episode_timeout_s: PositiveFloat | None = 3600.0
    """Wall-clock limit of one attempt, checked between steps."""
    step_timeout_s: PositiveFloat | None = None
    """Longest silence of a runner inside one reset or step before it is killed and replaced."""
    max_runner_restarts: Annotated[int, Field(ge=0)] = 10
    """Consecutive replacements of lost runners without a finished episode in between."""
    max_failed_episodes: Fraction | None = None
    """More failed episodes than this count (or share, below 1) make the result ``failed``."""


class EvalSettings(_Section):
    """A complete, validated, frozen configuration: what actually runs."""

    environment: EnvironmentSection = EnvironmentSection()
    policy: PolicySection = PolicySection()
    runners: RunnersSection = RunnersSection()
    evaluation: EvaluationSection = EvaluationSection()
    fault_tolerance: FaultToleranceSection = FaultToleranceSection()

    def identity(self) -> dict[str, Any]:
        """What the result may depend on besides plan, weights and numerics; no layout in it."""
        return {
            "environment": {
                "env": describe_object(self.environment.env),
                "env_kwargs": _describe_tree(self.environment.env_kwargs),
                "env_reuse": self.environment.env_reuse,
            },
            "policy": describe_object(self.policy.policy),
            "policy_kwargs": _describe_tree(self.policy.policy_kwargs),
            "deterministic": self.policy.deterministic,
            "actions": self.policy.actions,
            "max_episode_steps": self.evaluation.max_episode_steps,
            "gamma": self.evaluation.gamma,
        }

    def described(self) -> dict[str, Any]:
        """Return everything as plain data; live objects are named, not stored."""
        described = _describe_tree(self.model_dump())
        assert isinstance(described, dict)
        return described


SECTIONS: Final[Mapping[str, type[_Section]]] = {
    "environment": EnvironmentSection,
    "policy": PolicySection,
    "runners": RunnersSection,
    "evaluation": EvaluationSection,
    "fault_tolerance": FaultToleranceSection,
}

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
        deterministic: bool = _UNSET,
        actions: Literal["clip", "unsquash", "none"] = _UNSET,
        device: str = _UNSET,
    ) -> EvalConfig:
        """Choose the policy; see :class:`PolicySection`."""
        return self._update(
            "policy",
            policy=policy,
            policy_kwargs=policy_kwargs,
            weights=str(weights) if isinstance(weights, Path) else weights,
            deterministic=deterministic,
            actions=actions,
            device=device,
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
            runtime_env=runtime_env,
            address=address,
            runner_start_timeout_s=runner_start_timeout_s,
        )

    def evaluation(
        self,
        *,
        num_episodes: int = _UNSET,
        seed: int = _UNSET,
        max_episode_steps: int | None = _UNSET,
        gamma: float = _UNSET,
        info_keys: tuple[str, ...] | list[str] = _UNSET,
        return_bounds: tuple[float, float] | None = _UNSET,
    ) -> EvalConfig:
        """Choose the episodes; see :class:`EvaluationSection`."""
        return self._update(
            "evaluation",
            num_episodes=num_episodes,
            seed=seed,
            max_episode_steps=max_episode_steps,
            gamma=gamma,
            info_keys=info_keys,
            return_bounds=return_bounds,
        )

    def fault_tolerance(
        self,
        *,
        max_attempts_per_episode: int = _UNSET,
        episode_timeout_s: float | None = _UNSET,
        step_timeout_s: float | None = _UNSET,
        max_runner_restarts: int = _UNSET,
        max_failed_episodes: float | None = _UNSET,
    ) -> EvalConfig:
        """Choose how faults are met; see :class:`FaultToleranceSection`."""
        return self._update(
            "fault_tolerance",
            max_attempts_per_episode=max_attempts_per_episode,
            episode_timeout_s=episode_timeout_s,
            step_timeout_s=step_timeout_s,
            max_runner_restarts=max_runner_restarts,
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
            raise ConfigError(f"a config is a mapping of sections ({', '.join(SECTIONS)}), not {values!r}")
        for section, keys in values.items():
            if section not in SECTIONS:
                raise ConfigError(f"unknown config section {section!r}: {nearest(str(section), SECTIONS)}")
            if not isinstance(keys, Mapping):
                raise ConfigError(f"config section {section!r} must be a mapping of keys, not {keys!r}")
            for key, value in keys.items():
                config.set(f"{section}.{key}", value)
        return config

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
        try:
            settings = EvalSettings.model_validate(copy_containers(self._values))
        except ValidationError as error:
            raise ConfigError(_explain(error)) from None
        _check_together(settings)
        return settings

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EvalConfig) and self._values == other._values

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"EvalConfig({self.to_dict()})"


def copy_containers(value: Any) -> Any:
    """Copy nested dicts, lists and tuples, so that later changes do not reach in; live objects are shared."""
    if isinstance(value, Mapping):
        return {key: copy_containers(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copy_containers(item) for item in value)
    return value


def describe_object(value: Any) -> Any:
    """Name a live object as ``module:qualname``; return plain data as it is."""
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    target = value if isinstance(value, type) or hasattr(value, "__qualname__") else type(value)
    return f"{target.__module__}:{target.__qualname__}"


def _describe_tree(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _describe_tree(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_describe_tree(item) for item in value]
    return describe_object(value)


def _read_yaml(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text()) or {}
    except FileNotFoundError:
        raise ConfigError(f"there is no config file {str(path)!r}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None


def _plain(key: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_plain(key, name): _plain(f"{key}.{name}", item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(key, item) for item in value]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise ConfigError(f'{key} is a live object ({value!r}) and cannot be written to YAML: give it as "module:attr"')


def _explain(error: ValidationError) -> str:
    lines = []
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"][:2])
        lines.append(f"{key} is {problem['input']!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}")
    return "; ".join(lines)


def _check_together(settings: EvalSettings) -> None:
    runners, faults = settings.runners, settings.fault_tolerance
    if runners.single_agent and runners.lanes != 1:
        raise ConfigError(
            f"runners.num_envs_per_runner is {runners.lanes}, but the single_agent runner has one environment: "
            'leave it out, or set runners.runner to "vector"'
        )
    if settings.environment.env is None:
        raise ConfigError('environment.env is missing: give a gymnasium id, "module:attr" or a callable')
    bounds = settings.evaluation.return_bounds
    if bounds is not None and not bounds[0] < bounds[1]:
        raise ConfigError(f"evaluation.return_bounds is {bounds}: the first must be less than the second")
    if runners.num_runners:
        if settings.policy.device != "cpu" and not runners.num_gpus_per_runner:
            raise ConfigError(
                f"policy.device is {settings.policy.device!r}, but runners.num_gpus_per_runner is 0, so no runner "
                "would see a GPU: give each runner a GPU, or a fraction of one"
            )
        return
    if faults.step_timeout_s is not None:
        raise ConfigError(
            f"fault_tolerance.step_timeout_s is {faults.step_timeout_s}, but with runners.num_runners=0 the "
            "environment steps in this process, where nothing can interrupt it: use runners.num_runners=1 or more"
        )
    for key in ("num_gpus_per_runner", "custom_resources_per_runner", "label_selector", "runtime_env", "address"):
        if value := getattr(runners, key):
            raise ConfigError(
                f"runners.{key} is {value!r}, but with runners.num_runners=0 everything runs in this process, "
                "without Ray: remove it, or use runners.num_runners=1 or more"
            )
