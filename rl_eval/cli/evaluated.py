"""Options of an evaluation that ``run``, ``init``, ``plan``, ``doctor`` and ``watch`` share."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from rl_eval.cli.settings import consents
from rl_eval.cli.shared import advanced, option
from rl_eval.config.policy_sources import PolicySource, absolute, forms, is_there, named_source, user_path
from rl_eval.config.references import dotted
from rl_eval.errors import ConfigError
from rl_eval.errors.redaction import redact_command

TrustPolicy = Annotated[bool, advanced(None, "Load pickle files without asking. They can run any code.", "--trust")]


@dataclass(frozen=True)
class Evaluated:
    """Options of an evaluation; None for an option that is not passed."""

    env: Annotated[str | None, option("ENV", "Environment: a gymnasium id or pkg.module:attr.")] = None
    policy: Annotated[
        str | None,
        option(
            "POLICY",
            "Policy: random; a model file or folder, or hf://OWNER/REPO/FILE; or pkg.module:attr, which builds a "
            "policy or is a function from observations to actions. PREFIX:PATH names the library of a model.",
        ),
    ] = None
    weights: Annotated[
        Path | None, option("FILE", "Weights file (.safetensors, .pt) for --policy pkg.module:attr.")
    ] = None
    num_episodes: Annotated[int | None, option("N", "Number of episodes.", "--num-episodes", "-n")] = None
    num_runners: Annotated[
        int | None,
        option("N", "Number of Ray actors; 0 runs in this process, without Ray.", "--num-runners", "--runners"),
    ] = None
    num_envs_per_runner: Annotated[
        int | None, advanced("N", "Number of environments per runner.", "--num-envs-per-runner", "--envs-per-runner")
    ] = None
    batched: Annotated[
        bool,
        advanced(
            None,
            "Step all environments in one call. For this, --env must name a vector environment or a batched simulator.",
        ),
    ] = False
    stochastic: Annotated[
        bool | None, advanced(None, "Sample actions, or use the most likely actions.", "--stochastic/--deterministic")
    ] = None
    seed: Annotated[int | None, option("S", "Root seed of all episodes.")] = None
    address: Annotated[str | None, advanced("A", "Address of the Ray cluster.")] = None

    def check(
        self, command: str, assignments: Sequence[str] | None, *, takes_file: bool = True, needs_policy: bool = True
    ) -> None:
        """Check that the options name an environment and a policy. Both are required if there is no config file.

        Args:
            command: Command for the example in the error message, such as ``run``.
            assignments: Values of ``--set``. They may also name the environment and the policy.
            takes_file: Whether the command takes a config file.
            needs_policy: Whether a policy is required. If not, the command detects the policy from checkpoints.
        """
        given = _keys(assignments)
        named = {
            "--env": self.env or "environment.env" in given,
            "--policy": self.policy or "policy.policy" in given or not needs_policy,
        }
        if missing := " and ".join(name for name, is_named in named.items() if not is_named):
            policy = f" --policy {self.policy or 'random'}" if needs_policy else ""
            fix = (
                f"Pass {'a CONFIG file, or ' if takes_file else ''}{missing}, such as "
                f"`rl-eval {command} --env {self.env or 'CartPole-v1'}{policy}`."
            )
            raise ConfigError(f"{missing} {'are' if ' ' in missing else 'is'} missing", key=missing.split()[0], fix=fix)

    def keys(
        self, say: Callable[[str], None], assignments: Sequence[str] | None, *, trust: bool | None
    ) -> dict[str, Any]:
        """Return the config values that the options set, by dotted key.

        Args:
            say: Prints a note, such as the detected type of a policy.
            assignments: Values of ``--set``. If they set a policy argument, no file next to the model is used for this
                argument.
            trust: Whether pickle files are trusted; None if nothing is loaded.
        """
        keys = {} if self.policy is None else self._policy_keys(self.policy, say, assignments, trust=trust)
        named = keys.get("policy.weights") or "path" in keys.get("policy.policy_kwargs", ())
        if self.weights is not None:
            if str(self.weights).startswith("hf:/"):
                fix = "Use --policy torch:MODULE:ATTR@hf://OWNER/REPO/FILE."
                problem = f"--weights {self.weights}: --weights accepts only a local file"
                raise ConfigError(problem, key="--weights", value=str(self.weights), fix=fix)
            if named:
                problem = f"--weights {self.weights}: --policy {self.policy} also names a file"
                raise ConfigError(problem, key="--weights", value=str(self.weights), fix="Pass only one of the files.")
            keys["policy.weights"] = absolute(self.weights)
        flags = {
            "policy.deterministic": None if self.stochastic is None else not self.stochastic,
            "runners.runner": "batched" if self.batched else None,
            **{f"{section}.{name}": getattr(self, name) for section, names in _KEYS.items() for name in names},
        }
        return keys | {key: flag for key, flag in flags.items() if flag is not None}

    def _policy_keys(
        self, policy: str, say: Callable[[str], None], assignments: Sequence[str] | None, *, trust: bool | None
    ) -> dict[str, Any]:
        """Return config values that replace the policy of a config file."""
        from rl_eval.cli.hub import on_this_machine

        kwargs = [one.removeprefix(_KWARGS) for one in assignments or () if one.startswith(_KWARGS)]
        source = policy_source(on_this_machine(policy, say), _keys(kwargs))
        if source.pickled is not None and trust is False:
            facts = f"{source.pickled} can run any code when it is loaded"
            if not consents(f"{facts}.", "Load it?"):
                fix = "Pass --trust if you trust the source of the file."
                raise ConfigError(f"--policy {policy}: {facts}", key="--policy", value=policy, fix=fix)
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
    "evaluation": ("num_episodes", "seed"),
    "runners": ("num_runners", "num_envs_per_runner", "address"),
}
_KWARGS: Final = "policy.policy_kwargs."


def policy_source(text: str, given: Collection[str] = ()) -> PolicySource:
    """Return the source of a policy, such as ``random``, ``sb3:model.zip``, ``pkg.module:attr`` or a path.

    Args:
        text: Value of ``--policy``.
        given: Names of policy arguments that the caller sets. Other arguments can come from files that this function
            finds next to a model.

    Raises:
        ConfigError: The value is unknown, or the type of a path is unknown.
    """
    if not text:
        fix = "Pass a policy; a shell variable may be unset."
        raise ConfigError("--policy is empty", key="--policy", value=text, fix=fix)
    path, (name, _, attribute) = user_path(text), text.partition(":")
    if name.endswith(".py"):
        wanted = dotted(text if attribute else f"{name}:NAME")
        fix = f"Pass a factory as pkg.module:attr, such as {wanted}."
        raise ConfigError(f"--policy {text!r}: a Python file is not a policy", key="--policy", value=text, fix=fix)
    if (source := named_source(text, given)) is not None:
        return source
    if name and attribute and not {*"/\\"} & {*text}:
        return PolicySource(text, text)
    known = {"random": "random"}
    for one in filter(is_there, path.parent.glob("*") if is_there(path.parent) else ()):
        is_module = one.suffix == ".py" and not one.is_absolute()
        known[str(one).removesuffix(".py")] = dotted(f"{one}:ATTR") if is_module else str(one)
    close = [known[one] for one in difflib.get_close_matches(str(path), known, n=1)]
    fix = f"Did you mean {close[0]!r}?" if close else f"Pass a path, random, {forms()} or pkg.module:attr."
    raise ConfigError(f"--policy {text!r}: not a file or folder", key="--policy", value=text, fix=fix)


def with_evaluated(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command with the fields of :class:`Evaluated` as options instead of the argument ``evaluated``."""
    own = inspect.signature(command, eval_str=True).parameters
    fields = inspect.signature(Evaluated, eval_str=True).parameters

    @functools.wraps(command)
    def called(**given: Any) -> None:
        command(evaluated=Evaluated(**{name: given.pop(name) for name in fields}), **given)

    together = [one for name in own for one in (fields.values() if name == "evaluated" else [own[name]])]
    vars(called)["__signature__"] = inspect.Signature(together)  # typer reads it.
    return called


def _keys(assignments: Sequence[str] | None) -> set[str]:
    """Return the keys in values of ``--set``."""
    return {assignment.partition("=")[0] for assignment in assignments or ()}
