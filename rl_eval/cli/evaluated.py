"""Options that say what is evaluated, and how: those of ``run``, ``init``, ``plan``, ``doctor``, ``watch``."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from rl_eval.cli.settings import consents
from rl_eval.cli.shared import option
from rl_eval.config.policy_sources import PolicySource, absolute, forms, named_source, schemes
from rl_eval.config.references import dotted
from rl_eval.errors import ConfigError
from rl_eval.errors.redaction import redact_command

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
            "makes it or of a function of observations, random, LIBRARY:PATH, or torch:MODULE:ATTR@FILE. A PATH or "
            "FILE may be hf://OWNER/REPO/FILE[@REVISION], which is downloaded.",
        ),
    ] = None
    weights: Annotated[Path | None, option("FILE", "Weights (.safetensors, .pt) for --policy pkg.module:attr.")] = None
    num_episodes: Annotated[int | None, option("N", "Number of episodes.", "--num-episodes", "-n")] = None
    num_runners: Annotated[
        int | None, option("N", "Ray actors; 0 runs in this process, without Ray.", "--num-runners", "--runners")
    ] = None
    num_envs_per_runner: Annotated[
        int | None, option("N", "Environments per runner.", "--num-envs-per-runner", "--envs-per-runner")
    ] = None
    device: Annotated[str | None, option("DEVICE", "Device of the policy: cpu, cuda, cuda:0.")] = None
    stochastic: Annotated[
        bool | None, option(None, "Sample actions, or take the most likely ones.", "--stochastic/--deterministic")
    ] = None
    seed: Annotated[int | None, option("S", "Root seed of all episodes.")] = None
    address: Annotated[str | None, option("A", "Address of the Ray cluster.")] = None

    def check(
        self, command: str, assignments: Sequence[str] | None, *, takes_file: bool = True, needs_policy: bool = True
    ) -> None:
        """Make sure that without a config file the options name environment and policy.

        Args:
            command: The command, for the message.
            assignments: ``--set``, which may name them as well.
            takes_file: Whether the command takes a config file.
            needs_policy: Whether a policy has to be named; checkpoints may name theirs.
        """
        given = _keys(assignments)
        named = {
            "--env": self.env or "environment.env" in given,
            "--policy": self.policy or "policy.policy" in given or not needs_policy,
        }
        if missing := " and ".join(name for name, is_named in named.items() if not is_named):
            policy = f" --policy {self.policy or 'random'}" if needs_policy else ""
            raise ConfigError(
                f"nothing says what to evaluate: give {'a CONFIG file, or ' if takes_file else ''}{missing}, as in "
                f"rl-eval {command} --env {self.env or 'CartPole-v1'}{policy}"
            )

    def keys(
        self, say: Callable[[str], None], assignments: Sequence[str] | None, *, trust: bool | None
    ) -> dict[str, Any]:
        """Return the config keys that the options stand for, by dotted name.

        Args:
            say: Called with what a policy was taken for.
            assignments: ``--set``, of which arguments of the policy are not looked for beside its file.
            trust: Whether files of pickled objects are trusted; None where nothing is loaded.
        """
        keys = {} if self.policy is None else self._policy_keys(self.policy, say, assignments, trust=trust)
        named = keys.get("policy.weights") or "path" in keys.get("policy.policy_kwargs", ())
        if self.weights is not None:
            if str(self.weights).startswith("hf:/"):
                raise ConfigError("--weights downloads nothing: write --policy torch:MODULE:ATTR@hf://OWNER/REPO/FILE")
            if named:
                raise ConfigError(f"--weights {self.weights}: --policy {self.policy} names a file too: leave one out")
            keys["policy.weights"] = absolute(self.weights)
        elif self.policy not in (None, "random") and not named and "policy.weights" not in _keys(assignments):
            say(f"policy: no --weights are given, so it has those that {keys['policy.policy']} makes, if any")
        flags = {
            "policy.deterministic": None if self.stochastic is None else not self.stochastic,
            **{f"{section}.{name}": getattr(self, name) for section, names in _KEYS.items() for name in names},
        }
        return keys | {key: flag for key, flag in flags.items() if flag is not None}

    def _policy_keys(
        self, policy: str, say: Callable[[str], None], assignments: Sequence[str] | None, *, trust: bool | None
    ) -> dict[str, Any]:
        """Return config keys that replace all that a config file says of its policy's making."""
        from rl_eval.cli.hub import on_this_machine

        kwargs = [one.removeprefix(_KWARGS) for one in assignments or () if one.startswith(_KWARGS)]
        source = policy_source(on_this_machine(policy, say), _keys(kwargs))
        if source.pickled is not None and trust is False:
            facts = f"{source.pickled} holds pickled objects, which can run any code when they are loaded"
            if not consents(f"{facts}.", "Load it?"):
                raise ConfigError(f"--policy {policy}: {facts}: give --trust if you know where it comes from")
        say(", with ".join([f"policy: {source.said}", *redact_command(kwargs)]))
        return {
            "policy.policy": source.factory,
            "policy.policy_kwargs": dict(source.kwargs),
            "policy.weights": None,
            "policy.weights_key": None,
            **source.settings,
        }


_KEYS: Final = {
    "environment": ("env",),
    "policy": ("device",),
    "evaluation": ("num_episodes", "seed"),
    "runners": ("num_runners", "num_envs_per_runner", "address"),
}
_KWARGS: Final = "policy.policy_kwargs."


def policy_source(text: str, given: Collection[str] = ()) -> PolicySource:
    """Return what ``random``, ``sb3:model.zip``, ``rllib:checkpoint``, ``pkg.module:attr`` or a path stands for.

    Args:
        text: The value of ``--policy``.
        given: Names of arguments that are given apart, and are not looked for.

    Raises:
        ConfigError: It stands for nothing, or a path for no or several kinds of policies.
    """
    if not text:
        raise ConfigError("--policy is empty, as where a variable of the shell is not set")
    if (source := named_source(text, given)) is not None:
        return source
    path, (name, _, attribute) = Path(text).expanduser(), text.partition(":")
    if name.endswith(".py"):
        wanted = dotted(text if attribute else f"{name}:NAME")
        raise ConfigError(f"--policy {text}: name what makes the policy, in a module and not in a file: {wanted}")
    if path.exists():
        kinds = [scheme for scheme in schemes().values() if scheme.recognises(path)]
        if len(kinds) == 1:
            return kinds[0].source("", path, given)
        files = ", ".join(sorted(file.name for file in path.glob("*.zip"))) if not kinds else ""
        possible = ", ".join(scheme.named(path) for scheme in kinds) or forms()
        fix = f"and it holds {files}: give one of them" if files else f"so name it: one of {possible}"
        raise ConfigError(f"--policy {path}: its kind cannot be told, {fix}")
    if name and attribute and "/" not in name:
        return PolicySource(text, text)
    known = {"random": "random"}
    for one in path.parent.glob("*"):
        is_module = one.suffix == ".py" and not one.is_absolute()
        known[str(one).removesuffix(".py")] = dotted(f"{one}:ATTR") if is_module else str(one)
    close = [known[one] for one in difflib.get_close_matches(str(path), known, n=1)]
    raise ConfigError(
        f"--policy {text}: there is no such file or folder, and it is not random, {forms()} or pkg.module:attr"
        + (f": did you mean {close[0]!r}?" if close else "")
    )


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
