"""Options that say what is evaluated, and how: those of ``run``, ``init``, ``plan``, ``doctor``, ``watch``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from rl_eval.cli.policy_source import keys_of, policy_source
from rl_eval.cli.shared import option
from rl_eval.cli.trusting import consents
from rl_eval.config.policy_schemes import absolute
from rl_eval.errors import ConfigError
from rl_eval.redaction import redact_command

__all__ = ["Evaluated", "TrustPolicy", "with_evaluated"]

TrustPolicy = Annotated[
    bool, typer.Option("--trust", help="Load a policy file of pickled objects, which can run code, without asking.")
]


@dataclass(frozen=True)
class Evaluated:
    """What the options of a command say of an evaluation; None where they say nothing."""

    env: Annotated[str | None, option("ENV", "Environment: a gymnasium id, or pkg.module:attr.")] = None
    policy: Annotated[
        str | None,
        option(
            "POLICY",
            "Policy: the file or folder of a library's model, a module that torch.save wrote, pkg.module:attr of what "
            "makes it or of a function of observations, or random; LIBRARY:PATH or torch:MODULE:ATTR@FILE where the "
            "path alone does not tell. A PATH or FILE may be hf://OWNER/REPO/FILE[@REVISION], which is downloaded.",
        ),
    ] = None
    weights: Annotated[
        Path | None, option("FILE", "Weights for the module of --policy pkg.module:attr: .safetensors, .pt.")
    ] = None
    num_episodes: Annotated[int | None, option("N", "Episodes to run.", "--num-episodes", "-n")] = None
    num_runners: Annotated[
        int | None, option("N", "Ray actors; 0 is this process, without Ray.", "--num-runners", "--runners")
    ] = None
    num_envs_per_runner: Annotated[
        int | None,
        option(
            "N",
            "Environments in each runner; by default 8, 1 for `single_agent`, and for others what their class says.",
            "--num-envs-per-runner",
            "--envs-per-runner",
        ),
    ] = None
    device: Annotated[str | None, option("DEVICE", "Device of the policy: cpu, cuda, cuda:0.")] = None
    stochastic: Annotated[
        bool | None,
        typer.Option(
            "--stochastic/--deterministic",
            show_default=False,
            help="Sample actions, or take the most likely ones; by default as CONFIG says, and without one the latter.",
        ),
    ] = None
    seed: Annotated[int | None, option("S", "Root seed of the plan.")] = None
    address: Annotated[str | None, option("A", "Address of the Ray cluster.")] = None

    def check(
        self, command: str, assignments: Sequence[str] | None, *, takes_file: bool = True, needs_policy: bool = True
    ) -> None:
        """Make sure that without a config file the options say what is evaluated.

        Args:
            command: The command, for the message.
            assignments: ``--set``, which may say it as well.
            takes_file: Whether the command takes a config file.
            needs_policy: Whether a policy has to be named; checkpoints may say theirs.
        """
        given = _keys(assignments)
        missing = [
            f"--{name}"
            for name, key in (("env", "environment.env"), ("policy", "policy.policy"))[: 1 + needs_policy]
            if getattr(self, name) is None and key not in given
        ]
        if missing:
            file = "a CONFIG file, or " if takes_file else ""
            policy = f" --policy {self.policy or 'random'}" if needs_policy else ""
            example = f"--env {self.env or 'CartPole-v1'}{policy}"
            raise ConfigError(
                f"nothing says what to evaluate: give {file}{' and '.join(missing)}, as in rl-eval {command} {example}"
            )

    def is_on_ray(self, assignments: Sequence[str] | None) -> bool:
        """Whether an evaluation without a config file uses Ray: asked before anything is read or imported."""
        return bool(self.num_runners) or "runners.num_runners" in _keys(assignments)

    def keys(
        self, say: Callable[[str], None], assignments: Sequence[str] | None, *, trust: bool | None
    ) -> dict[str, Any]:
        """Return the config keys that the options stand for, by dotted name.

        Args:
            say: Called with what a policy was taken for.
            assignments: ``--set``, of which arguments of the policy are not looked for beside its file.
            trust: Whether files of pickled objects are trusted; None where nothing is loaded.
        """
        weights, policy = self.weights, self.policy
        if weights is not None and str(weights).startswith("hf:/"):
            raise ConfigError("--weights downloads nothing: write --policy torch:MODULE:ATTR@hf://OWNER/REPO/FILE")
        keys = self._policy_keys(say, assignments, trust=trust)
        named = keys.get("policy.weights") or "path" in keys.get("policy.policy_kwargs", ())
        if weights is not None and named:
            raise ConfigError(f"--weights {weights}: --policy {policy} names a file as well: leave one out")
        if (
            weights is None
            and "policy.weights" not in _keys(assignments)
            and policy not in (None, "random")
            and not named
        ):
            say(f"policy: no --weights are given, so it has those that {keys['policy.policy']} makes, if any")
        flags = {
            "policy.weights": None if weights is None else absolute(weights),
            "policy.deterministic": None if self.stochastic is None else not self.stochastic,
            **{f"{section}.{name}": getattr(self, name) for section, names in _KEYS.items() for name in names},
        }
        return keys | {key: flag for key, flag in flags.items() if flag is not None}

    def _policy_keys(
        self, say: Callable[[str], None], assignments: Sequence[str] | None, *, trust: bool | None
    ) -> dict[str, Any]:
        if self.policy is None:
            return {}
        from rl_eval.cli.hub import on_this_machine

        kwargs = [one.removeprefix(_KWARGS) for one in assignments or () if one.startswith(_KWARGS)]
        source = policy_source(on_this_machine(self.policy, say), _keys(kwargs))
        if source.pickled is not None and trust is False:
            facts = f"{source.pickled} holds pickled objects, which can run any code when they are loaded"
            if not consents(f"{facts}.", "Load it?"):
                raise ConfigError(f"--policy {self.policy}: {facts}: give --trust if you know where it comes from")
        say(", with ".join([f"policy: {source.said}", *redact_command(kwargs)]))
        return keys_of(source)


_KEYS: Final = {
    "environment": ("env",),
    "policy": ("device",),
    "evaluation": ("num_episodes", "seed"),
    "runners": ("num_runners", "num_envs_per_runner", "address"),
}
_KWARGS: Final = "policy.policy_kwargs."


def with_evaluated(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that has the fields of :class:`Evaluated` as options, in place of the argument ``evaluated``."""
    own = inspect.signature(command, eval_str=True).parameters
    fields = inspect.signature(Evaluated, eval_str=True).parameters

    @functools.wraps(command)
    def called(**given: Any) -> None:
        command(evaluated=Evaluated(**{name: given.pop(name) for name in fields}), **given)

    together = [one for name in own for one in (fields.values() if name == "evaluated" else [own[name]])]
    vars(called)["__signature__"] = inspect.Signature(together)  # typer reads it.
    return called


def _keys(assignments: Sequence[str] | None) -> set[str]:
    """Return the keys that ``--set`` sets."""
    return {assignment.partition("=")[0] for assignment in assignments or ()}
