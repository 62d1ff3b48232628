"""Settings of an evaluation: sections of keys with defaults, validated alone and together, frozen.

The docstring of a key is its documentation everywhere: in ``help()`` of the builder's methods, on the command line, and
in ``docs/configuration.md``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from types import UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from rl_eval.config.policy_sources import file_digests, with_named_policies
from rl_eval.config.references import import_attribute
from rl_eval.errors import ConfigError
from rl_eval.errors.redaction import digest_secrets, learn, redact
from rl_eval.records.plain import convert, plain_leaf
from rl_eval.scheduling.matchups import make_matchups
from rl_eval.scheduling.plan import MAX_EPISODES, EpisodePlan


class _Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, strict=False, use_attribute_docstrings=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_flag_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse ``true`` where a number is due, which Python takes for 1."""
        if isinstance(value, bool) and {int, float} & _types_of(cls.model_fields[str(info.field_name)].annotation):
            raise ValueError("give a number")
        return value


def _types_of(annotation: Any) -> set[Any]:
    """Return the alternatives of an annotation, without what is said about them; none where one of them is a flag."""
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    found = {get_args(part)[0] if get_origin(part) is Annotated else part for part in parts}
    return set() if bool in found else found


PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0)]
Reference = Annotated[str, Field(pattern=":")]
Processes = Field(json_schema_extra={"needs": "processes"})
"""Mark of a key that needs runners in processes of their own, ``runners.num_runners`` of 1 or more."""


class EnvironmentSection(_Section):
    """The environment, and how long each instance of it is used."""

    env: Any = None
    """A gymnasium id, ``"module:attr"``, or a callable. A parameter annotated ``EnvContext`` receives one. Without an
    annotation, the first parameter does, if it is named ``config``, ``context`` or ``env_config``, or if it has no
    default and is not in ``env_kwargs``; of a class, if both hold. For several agents also PettingZoo's ids, such as
    ``aec:classic/tictactoe-v3`` and ``parallel:classic/rps-v2``."""
    env_kwargs: dict[str, Any] = {}
    """Keyword arguments of the environment."""
    wrappers: tuple[Any, ...] = ()
    """Wrappers to put around the environment, the innermost first: ``"module:Class"``, a callable that takes the
    environment, or a mapping with ``wrapper`` and its keyword arguments, such as ``{"wrapper":
    "gymnasium.wrappers:FrameStackObservation", "stack_size": 4}``."""
    env_reuse: Literal["lane", "episode"] = "lane"
    """Whether an environment serves all episodes of its lane, or is built anew for each."""
    agents: tuple[str, ...] = ()
    """Agents of a multi-agent environment in the order of their seats. By default its ``possible_agents``, for which
    it is built once where the evaluation is started."""
    action_masks: bool = False
    """Hand the environment's action masks to the policy, whose observations become dicts of ``observation`` and
    ``action_mask``. The mask is what a method ``action_masks()`` of the environment returns, or else
    ``info["action_mask"]``; with several agents, that of each agent's info."""


class PolicySection(_Section):
    """The policy, its weights, and how it acts."""

    policy: Any = None
    """An ``nn.Module``, a callable on batches, a ``Policy``, ``"module:factory"``, ``"module:function"`` of
    ``observations`` (or ``obs``), ``random``, or a text with a scheme: ``torch:MODULE:ATTR@FILE``,
    ``torch_module:PATH``, or that of a library, such as ``LIBRARY:PATH``. A relative path in a file is relative to the
    file."""
    policy_kwargs: dict[str, Any] = {}
    """Keyword arguments of the factory."""
    weights: str | None = None
    """A safetensors file, or a torch file that ``weights_only=True`` can load."""
    weights_key: str | None = None
    """Where the weights are in a file that holds more, such as ``model`` in ``{"model": ..., "optimizer": ...}``; dots
    lead deeper."""
    deterministic: bool = True
    """Take the mode of the policy's distribution; else sample, from each episode's own stream."""
    actions: Literal["clip", "unsquash", "none"] = "clip"
    """For Box spaces: clip into the bounds, map [-1, 1] onto them, or pass actions as they are."""
    device: str = "cpu"
    """Torch device of the policy."""
    inference: Literal["exact", "batched"] = "exact"
    """``exact``: a row's action does not depend on the others in its forward pass, which a probe makes sure of.
    ``batched``: one pass over the live rows and no probe, where last bits may depend on the layout; a note says so."""
    allow_nondeterministic: bool = False
    """Evaluate a policy that gives other results each time it is asked; the result is labelled with a note."""
    policies: dict[str, PolicySection] = {}
    """Policies of a multi-agent environment by id, each with keys of this section, whose ``deterministic``,
    ``actions``, ``device``, ``inference`` and ``allow_nondeterministic`` are their defaults."""
    policy_mapping_fn: Reference | Callable[..., Any] | None = None
    """A callable ``(agent_id, spec)`` that returns the id of the agent's policy in an episode, or ``"module:attr"``.
    By default the only policy, the one that ``evaluation.matchups`` seats, or the one with the agent's id."""

    _digests: dict[str, tuple[Any, str]] = PrivateAttr(default_factory=dict)
    """Path and digest of files, by argument: a copy of this section may have other arguments."""

    def model_post_init(self, _: Any) -> None:
        """Take the digests of files before anybody loads them: those of later would not be of what acts."""
        for name, digest in file_digests(self.policy, self.policy_kwargs).items():
            self._digests[name] = self.policy_kwargs[name], digest

    @property
    def file_digests(self) -> dict[str, str]:
        """Digests of files that ``policy_kwargs`` names, by argument; by ``policy.argument`` of several policies."""
        taken = self._digests.items()
        own = {name: digest for name, (path, digest) in taken if self.policy_kwargs.get(name) == path}
        return own | {
            f"{policy}.{name}": digest
            for policy, section in self.policies.items()
            for name, digest in section.file_digests.items()
        }

    def named_as(self, policy_kwargs: Mapping[str, Any]) -> PolicySection:
        """Return a section that names files by other paths, with the digests of those that are loaded."""
        section = self.model_copy(update={"policy_kwargs": policy_kwargs})
        digests = file_digests(self.policy, self.policy_kwargs)
        named = {name: (policy_kwargs[name], digest) for name, digest in digests.items()}
        section._digests = named  # noqa: SLF001 - of this class
        return section

    @model_validator(mode="before")
    @classmethod
    def _share(cls, values: Any) -> Any:
        """Give policies what they share, and let a bare policy stand for its section."""
        if not isinstance(values, Mapping) or not isinstance(values.get("policies"), Mapping):
            return values
        shared = {key: values[key] for key in _SHARED if key in values}
        policies = {name: _policy_values(given, shared) for name, given in values["policies"].items()}
        return {**values, "policies": policies}


_SHARED: Final = ("deterministic", "actions", "device", "inference", "allow_nondeterministic")
"""Keys of the policy section that its ``policies`` have in common unless they say otherwise."""


def _policy_values(given: Any, shared: Mapping[str, Any]) -> Any:
    if isinstance(given, PolicySection):
        return given
    return {**shared, **(given if isinstance(given, Mapping) else {"policy": given})}


class RunnersSection(_Section):
    """The runners: how many, of which kind, with which resources."""

    num_runners: Annotated[int, Field(ge=0)] = 0
    """Ray actors; 0 is this process, without Ray."""
    num_envs_per_runner: PositiveInt | None = None
    """Environments in each runner; by default 8, 1 for ``single_agent``, and for others what their class says."""
    runner: str | type = "vector"
    """``vector``, ``single_agent``, ``multi_agent``, ``subprocess`` (a process for each environment), or the
    ``"module:Class"`` of a runner. With ``policy.policies`` the default is ``multi_agent``."""
    num_cpus_per_runner: Fraction = 1.0
    """CPUs that Ray reserves for each runner."""
    num_gpus_per_runner: Annotated[Fraction, Processes] = 0.0
    """GPUs that Ray reserves for each runner; a fraction shares one."""
    custom_resources_per_runner: Annotated[dict[str, float], Processes] = {}
    """Custom Ray resources that Ray reserves for each runner, by name; ``memory`` is in bytes."""
    label_selector: Annotated[dict[str, str], Processes] = {}
    """Ray node labels that a runner's node must have."""
    in_placement_group: Annotated[bool, Processes] = False
    """Place runners in free bundles of the placement group that the caller, such as a trial of Tune, is in; by default
    they are spread over the cluster, outside of it."""
    init_fn: Annotated[Reference | Callable[[], Any] | None, Processes] = None
    """A callable without arguments, or ``"module:attr"``: called first in a runner's process, before torch, the
    environment and the policy are imported."""
    runtime_env: Annotated[dict[str, Any], Processes] = {}
    """Ray runtime environment of the runners, merged over rl_eval's own."""
    address: Annotated[str | None, Processes] = None
    """Address of the Ray cluster. By default that of ``RAY_ADDRESS``, else a local cluster that ends with the group."""
    runner_start_timeout_s: PositiveFloat = 120.0
    """Longest wait for the first runner."""

    @property
    def lanes(self) -> int:
        """Lanes per runner."""
        if self.num_envs_per_runner is not None:
            return self.num_envs_per_runner
        return int(self.runner_class.default_lanes)

    @property
    def runner_class(self) -> Any:
        """Class of the runners, which is imported now.

        Raises:
            ConfigError: There is none.
        """
        return import_attribute("runners.runner", "rl_eval.runners:runner_class")(self.runner)


class EvaluationSection(_Section):
    """The episodes, and what is recorded of them."""

    num_episodes: Annotated[int, Field(ge=1, le=MAX_EPISODES)] = 100
    """Episodes to run."""
    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0
    """Root seed of the plan. The seed of every episode follows from it and the episode's index."""
    first_index: Annotated[int, Field(ge=0, lt=MAX_EPISODES)] = 0
    """Where the plan begins: episodes ``first_index`` to ``first_index + num_episodes - 1`` of this root seed. Plans
    over ranges that do not overlap share no episode."""
    matchups: Any = None
    """Who sits where, of several policies: ``self`` (one policy in all seats), ``round_robin`` (different policies, in
    every order), ``{focal: [a], background: [b, c]}`` (each of one list with each of the other, in the first seat or in
    those of ``focal_seats: [0, 1]``), or a list of seatings, such as ``[[a, b], [b, a]]``, and of the former. The seats
    are those of ``environment.agents``, else of the seatings, else two."""
    symmetric: bool = False
    """Play every seed of a matchup in all orders of its seats, in consecutive episodes, so that what a seat is worth
    cancels. Needs ``evaluation.matchups``."""
    max_episode_steps: PositiveInt | None = None
    """Cut episodes after this many steps and mark them as truncated by rl_eval. The environment's own limit still
    applies. If it is lower, the result has a note."""
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount of ``discounted_return``."""
    info_keys: tuple[str, ...] = ()
    """Scalars of the step ``info`` to record, as of the episode's last step that has them."""
    return_bounds: tuple[float, float] | None = None
    """Least and greatest possible return: what failed episodes are assumed to be worth at worst and best."""
    observers: tuple[Any, ...] = ()
    """Factories of ``rl_eval.runners.EpisodeObserver``, callables that take an environment or ``"module:attr"``:
    what their observers return at the end of an episode is in ``result.artifacts``."""
    determinism_check: Literal["auto"] | Annotated[float, Field(ge=0, le=1)] = "auto"
    """Share of the episodes that are run once more in fresh environments, and compared with their records. ``auto``
    is four episodes, or as many as take no longer than two seconds or 2 % of the run; 0 is none."""


class FaultToleranceSection(_Section):
    """Faults: how often to try again, and when to stop waiting."""

    max_attempts_per_episode: Annotated[int, Field(ge=1, le=60_000)] = 3
    """Attempts of one episode, all with its seed; after the last it is recorded as failed."""
    episode_timeout_s: PositiveFloat | None = 3600.0
    """Wall-clock limit of one attempt, checked between steps."""
    reset_timeout_s: Annotated[PositiveFloat | None, Processes] = None
    """Longest reset, constructor or close; a runner that takes longer is ended and the episode charged."""
    step_timeout_s: Annotated[PositiveFloat | None, Processes] = None
    """Longest step; a runner that takes longer is ended and the episode charged."""
    runner_timeout_s: Annotated[PositiveFloat | None, Processes] = None
    """Longest silence of a working runner, whatever it does."""
    max_runner_restarts: Annotated[int, Field(ge=0)] = 10
    """Consecutive replacements of one runner without a finished episode, anybody's, in between."""
    fail_fast: bool = True
    """End the evaluation as ``failed`` when its first attempts, 20 or four per lane, all fail with one error at one
    place."""
    max_failed_episodes: Fraction | None = None
    """More failed episodes than this count (or share, below 1) make the result ``failed``."""


class EvalSettings(_Section):
    """A complete, validated, frozen configuration: what actually runs."""

    environment: EnvironmentSection = EnvironmentSection()
    policy: PolicySection = PolicySection()
    runners: RunnersSection = RunnersSection()
    evaluation: EvaluationSection = EvaluationSection()
    fault_tolerance: FaultToleranceSection = FaultToleranceSection()

    def plan(self) -> EpisodePlan:
        """Return the episodes to run.

        Raises:
            ConfigError: There are not so many from ``evaluation.first_index`` on, or ``evaluation.matchups`` is none.
        """
        asked, matchups = self.evaluation, None
        if asked.matchups is not None:
            seats = len(self.environment.agents) or None
            matchups = make_matchups(
                asked.matchups, tuple(self.policy.policies), symmetric=asked.symmetric, seats=seats
            )
        elif asked.symmetric:
            raise ConfigError(
                "evaluation.symmetric is true, but there are no seats to permute: set evaluation.matchups"
            )
        return EpisodePlan(asked.num_episodes, asked.seed, asked.first_index, matchups)

    def identity(self) -> dict[str, Any]:
        """Settings that a result may depend on besides plan, weights and numerics: no layout, digests of secrets."""
        environment, policy = self.environment, self.policy
        built = {
            "env": describe_object(environment.env),
            "env_kwargs": _identified(environment.env_kwargs, "environment", "env_kwargs"),
            "env_reuse": environment.env_reuse,
        }
        wrapping = {"wrappers": _identified(list(environment.wrappers), "environment", "wrappers")}
        several = {
            "policies": {name: _acting(one, "policy", "policies", name) for name, one in policy.policies.items()},
            "policy_mapping_fn": describe_object(policy.policy_mapping_fn),
            "agents": list(environment.agents),
            "action_masks": environment.action_masks,
        }
        return {
            # What is not used is left out, as in logs of before there was any.
            "environment": built | (wrapping if environment.wrappers else {}),
            **_acting(policy, "policy"),
            "max_episode_steps": self.evaluation.max_episode_steps,
            "gamma": self.evaluation.gamma,
            **{key: value for key, value in several.items() if value},
        }

    def described(self) -> dict[str, Any]:
        """Return everything as plain JSON; live objects are named, not stored, and secrets are masked."""
        described = redact(_described(self.model_dump()))
        assert isinstance(described, dict)
        return described


DEFAULT_LANES: Final = 8
"""Lanes of a runner whose class does not say otherwise."""

LIVE_ENVIRONMENT: Final = "every lane needs one of its own: give a function that builds it"
"""What is wrong with an environment where one that can be built is needed."""

SECTIONS: Final[Mapping[str, type[_Section]]] = {
    "environment": EnvironmentSection,
    "policy": PolicySection,
    "runners": RunnersSection,
    "evaluation": EvaluationSection,
    "fault_tolerance": FaultToleranceSection,
}


def needs_processes(section: str) -> list[str]:
    """Return the keys of a section that need runners in processes of their own."""
    fields = SECTIONS[section].model_fields
    return [name for name, field in fields.items() if field.json_schema_extra == Processes.json_schema_extra]


def with_values(settings: EvalSettings, **sections: Mapping[str, Any]) -> EvalSettings:
    """Return settings with other values, by section and key; they are not validated again."""
    changed = {name: getattr(settings, name).model_copy(update=values) for name, values in sections.items()}
    return settings.model_copy(update=changed)


def make_settings(values: Mapping[str, Mapping[str, Any]]) -> EvalSettings:
    """Validate and freeze nested values.

    Raises:
        ConfigError: A value is wrong, or a setting cannot be honoured with the others.
    """
    learn(values)  # Before any message can quote them.
    try:
        settings = EvalSettings.model_validate(copy_containers(with_named_policies(values)))
    except ValidationError as error:
        raise ConfigError(_explain(error)) from None
    if settings.policy.policies and "runner" not in settings.runners.model_fields_set:
        settings = with_values(settings, runners={"runner": "multi_agent"})
    _check_together(settings)
    return settings


def copy_containers(value: Any) -> Any:
    """Copy nested dicts, lists and tuples, so that later changes do not reach in; live objects are shared."""
    if isinstance(value, Mapping):
        return {key: copy_containers(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copy_containers(item) for item in value)
    return value


def is_live_environment(value: Any) -> bool:
    """Whether a value is an environment, and not what builds one."""
    return hasattr(value, "step") and not isinstance(value, type)


def describe_object(value: Any) -> Any:
    """Name a live object as ``module:qualname``; return plain data as it is."""
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, np.ndarray):
        digest = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()[:16]
        return f"array of {value.dtype} {list(value.shape)}, sha256 {digest}"
    target = value if isinstance(value, type) or hasattr(value, "__qualname__") else type(value)
    return f"{target.__module__}:{target.__qualname__}"


def _described(value: Any) -> Any:
    return convert(value, lambda key, leaf: plain_leaf(key, describe_object(leaf)))


def _identified(value: Any, *path: str) -> Any:
    return digest_secrets(_described(value), *path)


def _acting(section: PolicySection, *path: str) -> dict[str, Any]:
    """Identity of one policy, and of how it acts."""
    return {
        "policy": describe_object(section.policy),
        "policy_kwargs": _identified(section.policy_kwargs, *path, "policy_kwargs"),
        "deterministic": section.deterministic,
        "actions": section.actions,
    }


def _explain(error: ValidationError) -> str:
    lines = []
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"][:2])
        shown = redact(problem["input"], *map(str, problem["loc"]))
        message = problem["msg"].replace("a valid tuple", "a list")  # YAML has no tuples.
        lines.append(f"{key} is {shown!r}: {message[0].lower()}{message[1:]}")
    return "; ".join(lines)


def check_runner(settings: EvalSettings) -> None:
    """Check settings against the facts of the class of their runners.

    Raises:
        ConfigError: They contradict it, or there is no such class.
    """
    runners, policies = settings.runners, settings.policy.policies
    cls = runners.runner_class
    if policies and not cls.several_agents:
        raise ConfigError(
            f"runners.runner is {runners.runner!r}, which has one policy, but policy.policies names {len(policies)}: "
            'set it to "multi_agent", or leave it out'
        )
    if cls.several_agents and settings.environment.wrappers:
        raise ConfigError(
            "environment.wrappers are wrappers of gymnasium, and several agents have no such environment: wrap it in "
            "the function of environment.env"
        )
    if cls.max_lanes is not None and runners.lanes > cls.max_lanes:
        raise ConfigError(
            f"runners.num_envs_per_runner is {runners.lanes}, but runners.runner {runners.runner!r} has at most "
            f'{cls.max_lanes}: leave it out, or set runners.runner to "vector"'
        )
    if cls.needs_processes and not runners.num_runners:
        raise ConfigError(
            f"runners.num_runners is 0, but runners.runner {runners.runner!r} cannot share this process: use 1 or more"
        )


def _check_together(settings: EvalSettings) -> None:
    runners = settings.runners
    if isinstance(runners.runner, type) or ":" not in runners.runner:
        check_runner(settings)  # A user's module is not imported before a group needs it.
    if settings.environment.env is None:
        raise ConfigError('environment.env is missing: give a gymnasium id, "module:attr" or a callable')
    if runners.num_runners and is_live_environment(settings.environment.env):
        raise ConfigError(
            f"environment.env is a live {type(settings.environment.env).__name__}, but runners.num_runners is "
            f"{runners.num_runners}, and {LIVE_ENVIRONMENT}"
        )
    for name, policy in settings.policy.policies.items():
        if policy.policies or policy.policy_mapping_fn is not None:
            raise ConfigError(f"policy.policies.{name} has policies of its own: give one policy for each id")
    settings.plan()
    bounds = settings.evaluation.return_bounds
    if bounds is not None and not -math.inf < bounds[0] < bounds[1] < math.inf:
        raise ConfigError(f"evaluation.return_bounds is {bounds}: give two finite numbers, the lesser one first")
    if not runners.num_runners:
        _check_in_process(settings)
    elif not runners.num_gpus_per_runner:
        _check_devices(settings.policy)


def _check_devices(section: PolicySection, key: str = "policy") -> None:
    """Refuse a device that no runner would see."""
    if section.device != "cpu":
        raise ConfigError(
            f"{key}.device is {section.device!r}, but runners.num_gpus_per_runner is 0, so no runner "
            "would see a GPU: give each runner a GPU, or a fraction of one"
        )
    for name, policy in section.policies.items():
        _check_devices(policy, f"{key}.policies.{name}")


def _check_in_process(settings: EvalSettings) -> None:
    """Refuse what only runners in processes of their own can honour."""
    for section in SECTIONS:
        for key in needs_processes(section):
            if value := redact(getattr(getattr(settings, section), key), section, key):
                raise ConfigError(
                    f"{section}.{key} is {value!r}, but with runners.num_runners=0 everything runs in this process, "
                    "where no deadline can interrupt a call: remove it, or use runners.num_runners=1 or more"
                )
