"""Options that say what is evaluated, and how: those of ``rl-eval run`` that stand for keys of a config."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from rl_eval.cli.policy_source import keys_of, policy_source
from rl_eval.cli.shared import option
from rl_eval.cli.trusting import consents
from rl_eval.config.policy_schemes import absolute
from rl_eval.errors import ConfigError

__all__ = [
    "Address",
    "Device",
    "Env",
    "NumEnvsPerRunner",
    "NumEpisodes",
    "NumRunners",
    "Policy",
    "Seed",
    "Stochastic",
    "TrustPolicy",
    "Weights",
    "check_evaluated",
    "config_keys",
]


Env = Annotated[str | None, option("ENV", "Environment: a gymnasium id, or pkg.module:attr.")]
Policy = Annotated[
    str | None,
    option(
        "POLICY",
        "Policy: a model.zip of Stable-Baselines3, a checkpoint folder of RLlib, pkg.module:attr of what makes it, or "
        "random; sb3:PATH, rllib:PATH, torch:MODULE:ATTR@FILE, torchrl:MODULE:ATTR@FILE or cleanrl:MODULE:CLASS@FILE "
        "where the path alone does not tell. A PATH or FILE may be hf://OWNER/REPO/FILE[@REVISION], which is "
        "downloaded.",
    ),
]
Weights = Annotated[
    Path | None, option("FILE", "Weights for the module of --policy pkg.module:attr: .safetensors, .pt.")
]
TrustPolicy = Annotated[
    bool, typer.Option("--trust", help="Load a policy file of pickled objects, which can run code, without asking.")
]
NumEpisodes = Annotated[int | None, option("N", "Episodes to run.", "--num-episodes", "-n")]
NumRunners = Annotated[
    int | None, option("N", "Ray actors; 0 is this process, without Ray.", "--num-runners", "--runners")
]
NumEnvsPerRunner = Annotated[
    int | None,
    option(
        "N",
        "Environments in each runner; by default 8, 1 for `single_agent`, and for others what their class says.",
        "--num-envs-per-runner",
        "--envs-per-runner",
    ),
]
Device = Annotated[str | None, option("DEVICE", "Device of the policy: cpu, cuda, cuda:0.")]
Stochastic = Annotated[bool, typer.Option("--stochastic", help="Sample actions, instead of the most likely ones.")]
Seed = Annotated[int | None, option("S", "Root seed of the plan.")]
Address = Annotated[str | None, option("A", "Address of the Ray cluster.")]


def config_keys(
    say: Callable[[str], None],
    *,
    policy: str | None,
    trust: bool | None,
    weights: Path | None,
    stochastic: bool,
    assignments: Sequence[str] | None = None,
    **values: Any,
) -> dict[str, Any]:
    """Return the config keys that options stand for, by dotted name.

    Args:
        say: Called with what a policy was taken for.
        policy: ``--policy``.
        trust: Whether files of pickled objects are trusted; None where nothing is loaded.
        weights: ``--weights``.
        stochastic: ``--stochastic``.
        assignments: ``--set``, of which arguments of the policy are not looked for beside its file.
        **values: Of the other options, by the names of their keys.
    """
    if weights is not None and str(weights).startswith("hf:/"):
        raise ConfigError("--weights downloads nothing: write --policy torch:MODULE:ATTR@hf://OWNER/REPO/FILE")
    keys = _policy_keys(policy, say, assignments or (), trust=trust)
    named = keys.get("policy.weights") or "path" in keys.get("policy.policy_kwargs", ())
    if weights is not None and named:
        raise ConfigError(f"--weights {weights}: --policy {policy} names a file as well: leave one out")
    given = {assignment.partition("=")[0] for assignment in assignments or ()}
    if weights is None and "policy.weights" not in given and policy not in (None, "random") and not named:
        say(f"policy: no --weights are given, so it has those that {keys['policy.policy']} makes, if any")
    flags = {
        "policy.weights": None if weights is None else absolute(weights),
        "policy.deterministic": False if stochastic else None,
        **{f"{section}.{name}": values[name] for section, names in _KEYS.items() for name in names},
    }
    return keys | {key: flag for key, flag in flags.items() if flag is not None}


_KEYS = {
    "environment": ("env",),
    "policy": ("device",),
    "evaluation": ("num_episodes", "seed"),
    "runners": ("num_runners", "num_envs_per_runner", "address"),
}


_KWARGS = "policy.policy_kwargs."


def _policy_keys(
    policy: str | None, say: Callable[[str], None], assignments: Sequence[str], *, trust: bool | None
) -> dict[str, Any]:
    if policy is None:
        return {}
    from rl_eval.cli.hub import on_this_machine

    given = {one.partition("=")[0].removeprefix(_KWARGS) for one in assignments if one.startswith(_KWARGS)}
    source = policy_source(on_this_machine(policy, say), given)
    if source.pickled is not None and trust is False:
        facts = f"{source.pickled} holds pickled objects, which can run any code when they are loaded"
        if not consents(f"{facts}.", "Load it?"):
            raise ConfigError(f"--policy {policy}: {facts}: give --trust if you know where it comes from")
    say(f"policy: {source.said}")
    return keys_of(source)


def check_evaluated(command: str, env: str | None, policy: str | None, assignments: list[str] | None) -> None:
    """Make sure that without a config file the options say what is evaluated."""
    given = {assignment.partition("=")[0] for assignment in assignments or ()}
    missing = [
        option
        for option, value, key in (("--env", env, "environment.env"), ("--policy", policy, "policy.policy"))
        if value is None and key not in given
    ]
    if missing:
        file = "a CONFIG file, or " if command == "run" else ""
        raise ConfigError(
            f"nothing says what to evaluate: give {file}{' and '.join(missing)}, as in "
            f"rl-eval {command} --env CartPole-v1 --policy random"
        )
