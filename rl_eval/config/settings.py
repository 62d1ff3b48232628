"""Settings of an evaluation: sections with keys and defaults, validated and frozen.

The docstring of a key is its documentation in ``help()`` of the builder's methods, on the command line and in
``docs/configuration.md``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from rl_eval.adapters import loader_of
from rl_eval.config.conditions import load_conditions
from rl_eval.config.objects import describe_object, name_of
from rl_eval.config.policy_sources import absolute, file_digests, user_path, with_named_policies
from rl_eval.config.references import named_factories
from rl_eval.errors import ConfigError, nearest
from rl_eval.errors.redaction import digest_secrets, learn, redact
from rl_eval.records.plain import convert, in_our_words, plain_leaf
from rl_eval.scheduling.matchups import make_matchups
from rl_eval.scheduling.plan import MAX_EPISODES, EpisodePlan
from rl_eval.scheduling.rules import RULES, Rule, built_rules


class _Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, strict=False, use_attribute_docstrings=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_flag_or_text_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject ``true`` and text for a number, because pydantic would use ``true`` as 1 and ``"10"`` as 10."""
        if isinstance(value, (bool, str)):
            types = _types_of(cls.model_fields[str(info.field_name)].annotation)
            if {int, float} & types and (isinstance(value, bool) or types <= {int, float, type(None)}):
                raise ValueError("pass a number")
        return value


def _types_of(annotation: Any) -> set[Any]:
    """Return the types of an annotation, without ``Annotated`` metadata; an empty set if bool is one of the types."""
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    found = {get_args(part)[0] if get_origin(part) is Annotated else part for part in parts}
    return set() if bool in found else found


PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0)]
Reference = Annotated[str, Field(pattern=":")]
Processes = Field(json_schema_extra={"needs": "processes"})
"""Mark of a key that needs runners in separate processes, ``runners.num_runners`` of 1 or more."""
Interruption = Field(json_schema_extra={"needs": "interruption"})
"""Mark of a time limit of calls of environments, which needs separate processes for runners or for environments."""


NORMALIZER: Final = "policy.normalizer"
"""Name of the file of a normalizer among the files of a policy."""


class EnvironmentSection(_Section):
    """The environment, its arguments and its wrappers."""

    env: Any = None
    """A gymnasium id, ``"module:attr"``, or a callable. A parameter annotated ``EnvContext`` receives an
    ``EnvContext``. Without this annotation, the first parameter of a function receives it if its name is ``config``,
    ``context`` or ``env_config``, or if it has no default and is not in ``env_kwargs``. For a class, both conditions
    must hold. Multi-agent runners also take PettingZoo ids, such as ``aec:classic/tictactoe-v3`` and
    ``parallel:classic/rps-v2``."""
    env_kwargs: dict[str, Any] = {}
    """Keyword arguments of the environment."""
    wrappers: tuple[Any, ...] = ()
    """Wrappers of the environment, the innermost first: ``"module:Class"``, a callable that takes the environment, or a
    mapping with ``wrapper`` and its keyword arguments, such as ``{"wrapper":
    "gymnasium.wrappers:FrameStackObservation", "stack_size": 4}``."""
    env_reuse: Literal["lane", "episode"] = "lane"
    """``lane``: an environment runs all episodes of its slot. ``episode``: each episode gets a new environment."""
    instances: Literal["many", "one"] = "many"
    """``one``: a process can build only one environment. Then the default of ``num_envs_per_runner`` is 1, and episodes
    of the determinism check run again in the environment that exists."""
    python: str | tuple[str, ...] | None = None
    """Another interpreter for the environment, which needs no package of rl_eval: the path of a Python, or a command as
    a list, such as ``[conda, run, --no-capture-output, -n, libero, python]``. ``env`` and wrappers must be names. The
    runners are then ``subprocess``. A relative path in a config file is relative to that file."""
    python_path: tuple[str, ...] = ()
    """Folders to put first on the path of modules of ``python``. A relative folder in a config file is relative to that
    file."""
    agents: tuple[str, ...] = ()
    """Agents of a multi-agent environment in the order of their seats. By default the environment's
    ``possible_agents``; to read them, the process that starts the evaluation builds one environment."""
    action_masks: bool = False
    """Pass the environment's action masks to the policy. Its observations become dicts with ``observation`` and
    ``action_mask``. The mask comes from the environment's method ``action_masks()``, otherwise from
    ``info["action_mask"]``; with several agents, from each agent's info."""


class ChunkSection(_Section):
    """Execution of action chunks."""

    execute: PositiveInt | None = None
    """Number of steps between two requests. By default ``horizon - delay``."""
    delay: Annotated[int, Field(ge=0)] = 0
    """Number of steps after a request in which the actions of the former chunk are used."""
    horizon: PositiveInt | None = None
    """Number of actions in a chunk. By default, one call with generated observations shows it."""


class PolicySection(_Section):
    """The policy, its weights, and its actions."""

    policy: Any = None
    """An ``nn.Module``, a callable on batches, a ``Policy``, ``"module:factory"``, ``"module:function"`` of
    ``observations`` (or ``obs``), ``random``, a path of a model, or a string with a scheme: ``torch:MODULE:ATTR@FILE``,
    ``torch_module:PATH``, or a library's, such as ``LIBRARY:PATH``. A relative path in a config file is relative to
    that file."""
    policy_kwargs: dict[str, Any] = {}
    """Keyword arguments of the factory."""
    weights: str | None = None
    """A safetensors file, or a torch file that ``weights_only=True`` can load."""
    weights_key: str | None = None
    """Key of the weights in a file that contains more, such as ``model`` in ``{"model": ..., "optimizer": ...}``; dots
    separate nested keys."""
    normalizer: str | None = None
    """A file with the statistics of the normalizer behind which the policy was trained: an npz or safetensors file with
    ``mean`` and ``var``, a pickle of a normalizer, or a torch file, such as a checkpoint of rsl_rl, skrl or
    rl_games. The policy must not have a normalizer of its own."""
    deterministic: bool = True
    """Take the mode of the policy's distribution; otherwise sample from a random stream of each episode."""
    actions: Literal["clip", "unsquash", "none"] = "clip"
    """For Box spaces: clip actions to the bounds, map [-1, 1] onto the bounds, or pass actions unchanged."""
    device: str = "cpu"
    """Torch device of the policy."""
    inference: Literal["exact", "batched"] = "exact"
    """``exact``: the action for one observation does not depend on the rest of its batch; a probe checks this.
    ``batched``: one forward pass for all live episodes, without a probe. The last bits of an action may then depend on
    the number of environments, and the result has a note."""
    allow_nondeterministic: bool = False
    """Evaluate a policy that returns different actions for equal observations; the result has a note."""
    chunk: ChunkSection | None = None
    """For a policy that returns chunks, a batch of actions with an additional dimension ``horizon`` after the first:
    ``{execute: 8, delay: 3}`` asks it every 8 steps, and uses a chunk from 3 steps after its request on. The first
    chunk of an episode is used at once. ``delay`` is at most ``execute``, and their sum at most ``horizon``. Defaults:
    a delay of 0, the ``horizon`` of the policy's answers, and ``execute`` as ``horizon - delay``."""
    policies: dict[str, PolicySection] = {}
    """Policies of a multi-agent environment by id, each with keys of this section. ``deterministic``, ``actions``,
    ``device``, ``inference``, ``allow_nondeterministic`` and ``chunk`` of this section are the defaults of all
    policies."""
    policy_mapping_fn: Reference | Callable[..., Any] | None = None
    """A callable ``(agent_id, spec)``, or its ``"module:attr"``, that returns the id of the agent's policy in an
    episode. Default: the only policy, the policy that ``evaluation.matchups`` seats, or the policy with the agent's
    id."""

    _digests: dict[str, tuple[Any, str]] = PrivateAttr(default_factory=dict)
    """Path and digest of each file, by argument. The path is compared, because a copy of this section may have other
    arguments."""

    @field_validator("normalizer")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        return None if value is None else absolute(user_path(value))

    def model_post_init(self, _: Any) -> None:
        """Hash the files now, before they are loaded. A later digest could be that of a file that changed meanwhile."""
        for name, digest in file_digests(self.policy, self.paths).items():
            self._digests[name] = self.paths[name], digest

    @property
    def paths(self) -> Mapping[str, Any]:
        """Values that can be paths of files of the policy: ``policy_kwargs``, and the normalizer."""
        return self.policy_kwargs if self.normalizer is None else {**self.policy_kwargs, NORMALIZER: self.normalizer}

    @property
    def file_digests(self) -> dict[str, str]:
        """Digests of the files in :attr:`paths`, by argument.

        With several policies, by ``policy.argument``.
        """
        taken = self._digests.items()
        own = {name: digest for name, (path, digest) in taken if self.paths.get(name) == path}
        return own | {
            f"{policy}.{name}": digest
            for policy, section in self.policies.items()
            for name, digest in section.file_digests.items()
        }

    def named_as(self, policy_kwargs: Mapping[str, Any]) -> PolicySection:
        """Return a copy of this section with other paths in the policy's arguments.

        The copy has the digests of the files at the paths of this section.
        """
        section = self.model_copy(update={"policy_kwargs": policy_kwargs})
        digests = file_digests(self.policy, self.paths)
        named = {name: (section.paths[name], digest) for name, digest in digests.items()}
        section._digests = named  # noqa: SLF001 - of this class
        return section

    @model_validator(mode="before")
    @classmethod
    def _share(cls, values: Any) -> Any:
        """Copy shared keys into each policy. A plain policy becomes a section with the key ``policy``."""
        if not isinstance(values, Mapping) or not isinstance(values.get("policies"), Mapping):
            return values
        shared = {key: values[key] for key in _SHARED if key in values}
        policies = {name: _policy_values(given, shared) for name, given in values["policies"].items()}
        return {**values, "policies": policies}


_SHARED: Final = ("deterministic", "actions", "device", "inference", "allow_nondeterministic", "chunk")
"""Keys of the section ``policy`` that are defaults for each policy in ``policies``."""


def _policy_values(given: Any, shared: Mapping[str, Any]) -> Any:
    if isinstance(given, PolicySection):
        return given
    return {**shared, **(given if isinstance(given, Mapping) else {"policy": given})}


class RunnersSection(_Section):
    """The runners: their number, class and resources."""

    num_runners: Annotated[int, Field(ge=0)] = 0
    """Number of Ray actors; 0 runs in this process, without Ray."""
    num_envs_per_runner: PositiveInt | None = None
    """Number of environments per runner. The default is 1 for ``single_agent``, and 8 for other runners, unless their
    class has another default."""
    runner: str | type = "vector"
    """``vector``, ``single_agent``, ``multi_agent``, ``subprocess`` (one process per environment), ``batched`` (one
    simulator for all environments), or the ``"module:Class"`` of a runner. With ``policy.policies`` the default is
    ``multi_agent``."""
    block: PositiveInt | None = None
    """With ``batched``, for a simulator that cannot restart single slots: number of episodes that each slot runs after
    a full reset, such as 64. The result then depends on ``num_envs_per_runner`` and ``block`` (guarantee
    ``layout``)."""
    num_cpus_per_runner: Fraction = 1.0
    """CPUs that Ray reserves for each runner."""
    num_gpus_per_runner: Annotated[Fraction, Processes] = 0.0
    """GPUs that Ray reserves for each runner; a fraction shares a GPU."""
    custom_resources_per_runner: Annotated[dict[str, float], Processes] = {}
    """Custom Ray resources that Ray reserves for each runner, by name; ``memory`` is in bytes."""
    label_selector: Annotated[dict[str, str], Processes] = {}
    """Ray node labels that a runner's node must have."""
    in_placement_group: Annotated[bool, Processes] = False
    """Place runners in free bundles of the caller's placement group, such as that of a Tune trial. By default they are
    spread over the cluster, outside the placement group."""
    init_fn: Annotated[Reference | Callable[[], Any] | None, Processes] = None
    """A callable without arguments, or its ``"module:attr"``. A runner's process calls it first, before it imports
    torch, the environment and the policy."""
    runtime_env: Annotated[dict[str, Any], Processes] = {}
    """Ray runtime environment of the runners; its keys override those of rl_eval."""
    address: Annotated[str | None, Processes] = None
    """Address of the Ray cluster. Default: ``RAY_ADDRESS``; if it is not set, a local cluster that stops with the
    group."""
    runner_start_timeout_s: PositiveFloat = 120.0
    """Time limit for the start of the first runner, in seconds."""


class EvaluationSection(_Section):
    """The episodes, and the data that is recorded about them."""

    num_episodes: Annotated[int, Field(ge=1, le=MAX_EPISODES)] = 100
    """Number of episodes."""
    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0
    """Root seed of all episodes. The seed of an episode depends only on the root seed and the episode's index."""
    first_index: Annotated[int, Field(ge=0, lt=MAX_EPISODES)] = 0
    """Index of the plan's first episode in the sequence of this root seed; the plan ends with index
    ``first_index + num_episodes - 1``. Plans over ranges that do not overlap have no episode in common."""
    matchups: Any = None
    """Policies of the seats, for several policies. ``self``: one policy in all seats. ``round_robin``: different
    policies, in every order. ``{focal: [a], background: [b, c]}``: each focal policy with each background policy;
    ``focal_seats: [0, 1]`` lists the seats of the focal policy, by default the first. Or a list of seatings, such as
    ``[[a, b], [b, a]]``, which may also contain the other forms. The number of seats is that of ``environment.agents``,
    otherwise of the seatings, otherwise two."""
    symmetric: bool = False
    """Play every seed of a matchup in all orders of its seats, in consecutive episodes, so that the advantage of a seat
    cancels. Needs ``evaluation.matchups``."""
    conditions: Annotated[Any, BeforeValidator(load_conditions)] = None
    """Initial conditions of the episodes, which take turns. A Parquet, CSV or JSON file, a list of rows with an ``id``
    each, or a mapping with ``file``, ``rows`` or ``axes``. ``{axes: {friction: [0.5, 1.0], light: [a, b]}}`` gives all
    combinations. A mapping may also have ``counts``: episodes of an id in one round, 1 if missing. ``env.reset``
    receives the other columns of a row as ``options``. The environment declares them in an attribute
    ``condition_keys``. A relative path in a config file is relative to that file."""
    condition_target: Literal["rows", "population"] = "rows"
    """Target of intervals and tests with conditions. ``rows``: the mean over these rows, so the spread between rows is
    not an error. ``population``: the mean over all rows from which these rows are a random sample, so each row is one
    observation. It has no effect on records."""
    max_episode_steps: PositiveInt | None = None
    """Step limit of an episode; a longer episode is truncated and marked as truncated by rl_eval. The environment's own
    limit still applies. If it is lower, the result has a note."""
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount factor of ``discounted_return``."""
    info_keys: tuple[str, ...] = ()
    """Keys of scalars in the step ``info`` to record. The record has the value of the last step whose ``info`` has the
    key."""
    success_key: str | None = None
    """Key of the step ``info`` that reports success; null for ``is_success``, or else ``success``."""
    metrics: dict[str, Any] = {}
    """Own numbers of each completed episode, by name: functions, or ``"module:attr"``. A function is called once per
    episode with its record and the values of ``info_keys`` by key, in the process of its runner. Its number is a column
    of the records, like those of ``info_keys``."""
    return_bounds: tuple[float, float] | None = None
    """Lowest and highest possible return. If nearly all returns are equal, as in a solved task, there is an interval
    only with these bounds. They are also the worst and the best case of failed episodes."""
    observers: tuple[Any, ...] = ()
    """Factories of ``rl_eval.runners.EpisodeObserver``: callables that take an environment, or ``"module:attr"``. The
    values that observers return at the end of an episode are in ``result.artifacts``."""
    rules: tuple[Any, ...] = ()
    """Factories of ``rl_eval.scheduling.rules.Rule``: callables without arguments, or ``"module:attr"``. A rule is
    asked after each completed prefix of the plan. Its first answer ends the evaluation: later episodes do not count."""
    determinism_check: Literal["auto"] | Annotated[float, Field(ge=0, le=1)] = "auto"
    """Fraction of the episodes to run again in new environments and compare with their records. ``auto`` runs up to
    four episodes, within two seconds or 2 % of the run; 0 disables the check."""

    @property
    def success_keys(self) -> tuple[str, str]:
        """Keys of the step ``info`` that report success; the second one is read if the first one is missing."""
        return ("is_success", "success") if self.success_key is None else (self.success_key, self.success_key)


class FaultToleranceSection(_Section):
    """Faults: retries and time limits."""

    max_attempts_per_episode: Annotated[int, Field(ge=1, le=60_000)] = 3
    """Maximum number of attempts of one episode, all with the same seed. After the last failed attempt, the episode is
    recorded as failed."""
    episode_timeout_s: PositiveFloat | None = 3600.0
    """Time limit of one attempt, in seconds, without the construction of environments. It is checked between steps.
    null for no limit."""
    reset_timeout_s: Annotated[PositiveFloat | None, Interruption] = None
    """Time limit of one reset, constructor or close, in seconds; null for no limit. The process that exceeds it is
    terminated, which uses up an attempt of the episode."""
    step_timeout_s: Annotated[PositiveFloat | None, Interruption] = None
    """Time limit of one step, in seconds; null for no limit. The process that exceeds it is terminated, which uses up
    an attempt of the episode."""
    runner_timeout_s: Annotated[PositiveFloat | None, Processes] = None
    """Time limit of any call of a working runner, in seconds; null for no limit."""
    max_runner_restarts: Annotated[int, Field(ge=0)] = 10
    """Maximum number of consecutive replacements of one runner. If any runner finishes an episode, the count begins
    again."""
    fail_fast: bool = True
    """End the evaluation as ``failed`` if its first attempts (four per environment, at least 20) all fail with the same
    error at the same place."""
    max_failed_episodes: Fraction | None = None
    """Maximum number of failed episodes, or maximum fraction if the value is below 1. With more failed episodes, the
    result is ``failed``. null for no limit."""


class EvalSettings(_Section):
    """Complete, validated and frozen configuration of an evaluation."""

    environment: EnvironmentSection = EnvironmentSection()
    policy: PolicySection = PolicySection()
    runners: RunnersSection = RunnersSection()
    evaluation: EvaluationSection = EvaluationSection()
    fault_tolerance: FaultToleranceSection = FaultToleranceSection()

    def plan(self) -> EpisodePlan:
        """Return the episode plan.

        Raises:
            ConfigError: The plan would exceed the highest index, split the episodes that share a seed, or be shorter
                than a round of matchups. Or ``evaluation.matchups`` is invalid, or ``evaluation.symmetric`` is set
                without matchups. Or ``evaluation.condition_target`` is ``population`` without conditions.
        """
        asked, matchups = self.evaluation, None
        if asked.matchups is not None:
            seats = len(self.environment.agents) or None
            matchups = make_matchups(
                asked.matchups, tuple(self.policy.policies), symmetric=asked.symmetric, seats=seats
            )
        elif asked.symmetric:
            problem = "evaluation.symmetric is true, but there are no seats to permute"
            raise ConfigError(problem, key="evaluation.symmetric", value=True, fix="Set evaluation.matchups.")
        if asked.condition_target == "population" and asked.conditions is None:
            problem, key = "evaluation.condition_target is population, but there are no rows", "condition_target"
            fix = "Set evaluation.conditions."
            raise ConfigError(problem, key=f"evaluation.{key}", value=asked.condition_target, fix=fix)
        return EpisodePlan(asked.num_episodes, asked.seed, asked.first_index, matchups, asked.conditions)

    def rules(self) -> dict[str, Rule]:
        """Build the rules of an evaluation, by name.

        Raises:
            ConfigError: A rule cannot be built.
        """
        return built_rules(named_factories(RULES, self.evaluation.rules))

    def identity(self) -> dict[str, Any]:
        """Return the settings on which a result depends, apart from the plan, the weights and the numerics.

        The numbers of runners and environments are not included. Secrets are replaced with digests.
        """
        environment, policy = self.environment, self.policy
        built = {
            "env": _named_environment(environment.env),
            "env_kwargs": _identified(environment.env_kwargs, "environment", "env_kwargs"),
            "env_reuse": environment.env_reuse,
        }
        wrapping = {"wrappers": _identified(list(environment.wrappers), "environment", "wrappers")}
        optional = {
            "policies": {name: _acting(one, "policy", "policies", name) for name, one in policy.policies.items()},
            "policy_mapping_fn": describe_object(policy.policy_mapping_fn),
            "agents": list(environment.agents),
            "action_masks": environment.action_masks,
            "success_key": self.evaluation.success_key,
            "metrics": {name: describe_object(function) for name, function in self.evaluation.metrics.items()},
            "rules": [describe_object(rule) for rule in self.evaluation.rules],
        }
        return {
            # Unused keys are left out, so that logs of older versions still match.
            "environment": built | (wrapping if environment.wrappers else {}),
            **_acting(policy, "policy"),
            "max_episode_steps": self.evaluation.max_episode_steps,
            "gamma": self.evaluation.gamma,
            **{key: value for key, value in optional.items() if value},
        }

    def described(self) -> dict[str, Any]:
        """Return all settings as plain JSON; objects are replaced with their names, and secrets are masked."""
        values, environment = self.model_dump(), self.environment
        # model_dump() converts dataclasses to dicts, but the arguments of a factory are objects.
        values["environment"] |= {key: getattr(environment, key) for key in ("env_kwargs", "wrappers")}
        values["environment"]["env"] = _named_environment(environment.env)
        policies = {name: _with_objects(one) for name, one in self.policy.policies.items()}
        values["policy"] = _with_objects(self.policy) | {"policies": policies}
        described = redact(_described(values))
        assert isinstance(described, dict)
        return described


LIVE_ENVIRONMENT: Final = "every slot needs its own environment: pass a function that builds the environment"
"""Message for an environment object in place of a factory."""

SECTIONS: Final[Mapping[str, type[_Section]]] = {
    "environment": EnvironmentSection,
    "policy": PolicySection,
    "runners": RunnersSection,
    "evaluation": EvaluationSection,
    "fault_tolerance": FaultToleranceSection,
}


def needs_processes(section: str) -> list[str]:
    """Return the keys of a section that need runners in separate processes."""
    return _marked(section, Processes)


def needs_interruption(section: str) -> list[str]:
    """Return the keys of a section that need separate processes for runners or for environments."""
    return _marked(section, Interruption)


def _marked(section: str, mark: Any) -> list[str]:
    fields = SECTIONS[section].model_fields
    return [name for name, field in fields.items() if field.json_schema_extra == mark.json_schema_extra]


def with_values(settings: EvalSettings, **sections: Mapping[str, Any]) -> EvalSettings:
    """Return settings in which some values are replaced, by section and key. The new values are not validated."""
    changed = {name: getattr(settings, name).model_copy(update=values) for name, values in sections.items()}
    return settings.model_copy(update=changed)


def make_settings(values: Mapping[str, Mapping[str, Any]]) -> EvalSettings:
    """Return validated, frozen settings.

    Raises:
        ConfigError: A value is invalid, or two settings contradict each other.
    """
    learn(values)  # Before a message can quote secrets.
    try:
        settings = EvalSettings.model_validate(copy_containers(with_named_policies(values)))
    except ValidationError as error:
        raise _explained(error) from None
    if settings.policy.policies and "runner" not in settings.runners.model_fields_set:
        settings = with_values(settings, runners={"runner": "multi_agent"})
    elif settings.environment.python is not None and "runner" not in settings.runners.model_fields_set:
        settings = with_values(settings, runners={"runner": "subprocess"})
    _check_together(settings)
    return settings


def copy_containers(value: Any) -> Any:
    """Copy nested dicts, lists and tuples. Other objects in them are not copied."""
    if isinstance(value, Mapping):
        return {key: copy_containers(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copy_containers(item) for item in value)
    return value


def is_live_environment(value: Any) -> bool:
    """Whether a value is an environment, not a factory."""
    return hasattr(value, "step") and not isinstance(value, type)


def _named_environment(env: Any) -> Any:
    """Return the name of an environment's factory or class.

    For an environment object, the name also contains the id of its single environments.
    """
    if not is_live_environment(env):
        return describe_object(env)
    spec = getattr(env, "spec", None)
    return name_of(env) if spec is None else f"{name_of(env)} of {spec.id}"


def _with_objects(section: PolicySection) -> dict[str, Any]:
    return section.model_dump() | {"policy": name_of(section.policy), "policy_kwargs": section.policy_kwargs}


def _described(value: Any) -> Any:
    return convert(value, lambda key, leaf: plain_leaf(key, describe_object(leaf)))


def _identified(value: Any, *path: str) -> Any:
    return digest_secrets(_described(value), *path)


def _acting(section: PolicySection, *path: str) -> dict[str, Any]:
    """Return the identity of one policy and its actions."""
    library = loader_of(section.policy)
    skipped = library.incidental if library else ()
    kwargs = {name: value for name, value in section.policy_kwargs.items() if name not in skipped}
    return {
        "policy": name_of(section.policy),
        "policy_kwargs": _identified(kwargs, *path, "policy_kwargs"),
        "deterministic": section.deterministic,
        "actions": section.actions,
        # The policy determines the horizon.
        **({"chunk": section.chunk.model_dump(exclude={"horizon"})} if section.chunk else {}),
        **({"normalizer": section.normalizer} if section.normalizer else {}),
    }


def _explained(error: ValidationError) -> ConfigError:
    """Return an error about all invalid values. The fields of the error describe the first invalid value."""
    found = []
    for problem in error.errors():
        loc = [*map(str, problem["loc"])]
        deep = 4 if "policies" in loc[:2] else 2  # Further parts are not keys, except those of a chunk.
        chunk = loc[deep - 1 : deep] == ["chunk"]
        key = ".".join(loc[: deep + chunk])
        shown = redact(problem["input"], *loc)
        told = f"{key} is {shown!r}: {in_our_words(problem['msg'])}"
        if problem["type"] == "extra_forbidden":
            known = (ChunkSection if chunk else SECTIONS[loc[0]]).model_fields
            told = f"{key} is an unknown key: {nearest(loc[-1], known)}"
        found.append((key, shown, told))
    return ConfigError("; ".join(line for _, _, line in found), key=found[0][0], value=found[0][1])


def _check_together(settings: EvalSettings) -> None:
    runners = settings.runners
    if settings.environment.env is None:
        problem = "environment.env is missing"
        raise ConfigError(
            problem, key="environment.env", fix='Set environment.env to a gymnasium id, "module:attr" or a callable.'
        )
    if settings.environment.python is not None:
        _check_interpreter(settings)
    elif settings.environment.python_path:
        problem = "environment.python_path is set, but environment.python is not"
        fix = "Set environment.python, or remove environment.python_path."
        raise ConfigError(problem, key="environment.python_path", value=settings.environment.python_path, fix=fix)
    if runners.num_runners and is_live_environment(settings.environment.env):
        problem = (
            f"environment.env is a {type(settings.environment.env).__name__} object, but runners.num_runners is "
            f"{runners.num_runners}, and {LIVE_ENVIRONMENT}"
        )
        raise ConfigError(problem, key="environment.env", value=type(settings.environment.env).__name__)
    for name, policy in settings.policy.policies.items():
        if policy.policies or policy.policy_mapping_fn is not None:
            problem = f"policy.policies.{name} has policies itself"
            raise ConfigError(problem, key=f"policy.policies.{name}", fix="Set one policy per id.")
        for longer in settings.policy.policies:
            if longer.startswith(f"{name}."):
                problem = f"weights named {longer}.* could belong to policy.policies.{name} or policy.policies.{longer}"
                raise ConfigError(problem, key=f"policy.policies.{longer}", value=longer, fix="Rename one of the two.")
    settings.plan()
    bounds = settings.evaluation.return_bounds
    if bounds is not None and not -math.inf < bounds[0] < bounds[1] < math.inf:
        problem, fix = f"evaluation.return_bounds is {bounds}", "Set two finite numbers, with the lower number first."
        raise ConfigError(problem, key="evaluation.return_bounds", value=bounds, fix=fix)
    if not runners.num_runners:
        _check_in_process(settings)
    elif not runners.num_gpus_per_runner:
        _check_devices(settings.policy)


def _check_interpreter(settings: EvalSettings) -> None:
    """Reject an environment that cannot be built in another interpreter."""
    section = settings.environment
    if not section.python or not section.python[0]:
        fix = "Name a Python, or remove the key."
        raise ConfigError("environment.python is empty", key="environment.python", value=section.python, fix=fix)
    wrappers = [one.get("wrapper") if isinstance(one, Mapping) else one for one in section.wrappers]
    live = next((one for one in (section.env, *wrappers) if not isinstance(one, str)), None)
    if live is not None:
        key = "environment.env" if live is section.env else "environment.wrappers"
        problem = f"{key} is {describe_object(live)}, an object of this interpreter, but environment.python is set"
        fix = 'Name it, as "module:attr" or as an id of gymnasium or gym.'
        raise ConfigError(problem, key=key, value=describe_object(live), fix=fix)


def _check_devices(section: PolicySection, key: str = "policy") -> None:
    """Reject any device other than ``cpu``, because Ray would reserve no GPU for the runners."""
    if section.device != "cpu":
        problem = (
            f"{key}.device is {section.device!r}, but runners.num_gpus_per_runner is 0, so no runner would see a GPU"
        )
        fix = "Set runners.num_gpus_per_runner to 1, or to a fraction."
        raise ConfigError(problem, key=f"{key}.device", value=section.device, fix=fix)
    for name, policy in section.policies.items():
        _check_devices(policy, f"{key}.policies.{name}")


def _check_in_process(settings: EvalSettings) -> None:
    """Reject keys that need runners in separate processes."""
    for section in SECTIONS:
        for key in needs_processes(section):
            if value := redact(getattr(getattr(settings, section), key), section, key):
                problem = (
                    f"{section}.{key} is {value!r}, but with runners.num_runners=0 everything runs in this process, "
                    "without Ray"
                )
                fix = "Remove the key, or set runners.num_runners to 1 or more."
                raise ConfigError(problem, key=f"{section}.{key}", value=value, fix=fix)
