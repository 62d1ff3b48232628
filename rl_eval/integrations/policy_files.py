"""Schemes of policy files: torch weights with a factory for their module, whole modules, RLlib checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from rl_eval.config.model_files import ModelFile, described
from rl_eval.config.policy_sources import PolicyScheme, PolicySource, absolute, file_in, path_in
from rl_eval.errors import ConfigError, listed

_CLEANRL: Final = ".cleanrl_model"
_HERE: Final = "rl_eval.integrations"


@contextmanager
def reading(key: str, path: object, what: str, advice: str = "") -> Iterator[None]:
    """Convert any exception during the reading of a file into an error that names the file.

    Args:
        key: Name of the argument of ``policy_kwargs`` with the path, or another config key.
        path: The file.
        what: Description of the expected content, for the message.
        advice: Last sentence of the message.

    Raises:
        ConfigError: The file cannot be read.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        if "weights_only" in told:  # torch advises to load the file without protection.
            told = "torch cannot read it without running code of the file"
        where, key = ("", key) if "." in key else (f"policy_kwargs.{key}: ", f"policy.policy_kwargs.{key}")
        problem = f"{where}{str(path)!r} cannot be read as {what}: {told}"
        raise ConfigError(problem, key=key, value=str(path), fix=missing_module(error) or advice) from error


def key_in(saved: Mapping[str, Any], path: object, *names: str) -> str:
    """Return the first of some keys that a checkpoint has.

    Raises:
        ConfigError: It has none of them.
    """
    if (found := next((name for name in names if name in saved), None)) is None:
        problem = f"policy_kwargs.path: {str(path)!r} has {listed([*saved], 8)}, but not {' or '.join(names)}"
        fix = "Pass the path alone, without a scheme: its content shows its type."
        raise ConfigError(problem, key="policy.policy_kwargs.path", value=str(path), fix=fix)
    return found


def missing_module(error: Exception) -> str:
    """Return the advice for a file that needs a module that cannot be imported; an empty string for another error."""
    name = error.name if isinstance(error, ImportError) else None
    if name == "numpy._core":
        return "The file was saved with NumPy 2. Install numpy>=2."
    if name is None:
        return ""
    module = name.partition(".")[0]
    return (
        f"If {module} is a package, install it. If it is your module, run in the folder that contains it, or add this "
        "folder to PYTHONPATH."
    )


def _module(form: str, what: str, reference: str, path: Path | None, given: Collection[str]) -> PolicySource:
    """Return the policy source for a module that a factory builds. If ``path`` is set, load this file's weights."""
    _check(form, reference, path)
    said = f"{what} of {reference}"
    if path is None:
        return PolicySource(reference, said)
    weights = {"policy.weights": absolute(path)}
    return PolicySource(reference, f"{said} with the weights of {path}", settings=weights)


def _agent(form: str, reference: str, path: Path | None, given: Collection[str]) -> PolicySource:
    """Return the policy source for an agent of CleanRL. Its weights are in the file that CleanRL's script saved."""
    _check(form, reference, path)
    if path is None:
        problem = f"the policy 'cleanrl:{reference}' has no model file"
        raise ConfigError(
            problem, key="policy.policy", value=f"cleanrl:{reference}", fix=f"Write the policy as {form}."
        )
    return PolicySource(
        f"{_HERE}.cleanrl:load_agent",
        f"the agent {reference} of CleanRL with the weights of {path}",
        {"agent": reference, "path": absolute(path)},
    )


def _lerobot(reference: str, path: Path | None, given: Collection[str]) -> PolicySource:
    problem = f"the policy {str(path)!r} is a model of LeRobot, which needs packages and preprocessing of its own"
    fix = "Serve it from LeRobot's environment, and pass a function that asks the server (docs/invariance.md)."
    raise ConfigError(problem, key="policy.policy", value=str(path), fix=fix)


def _checkpoint(reference: str, path: Path | None, given: Collection[str]) -> PolicySource:
    path = path_in("rllib:checkpoint_000010", path)
    return PolicySource(
        f"{_HERE}.rllib:load_policy",
        f"a checkpoint of RLlib, {path}",
        {"path": str(path.resolve())},
        {"policy.actions": "none"},  # RLlib's own connectors map actions.
        pickled=str(path),
    )


def _is_checkpoint(file: ModelFile) -> bool:
    return file.is_folder and file.contains("rllib_checkpoint.json")


def _is_script(file: ModelFile) -> bool:
    return "constants.pkl" in file.members and any(name.startswith("code/") for name in file.members)


def _is_export(file: ModelFile) -> bool:
    return "archive_format" in file.members or any(re.fullmatch(r"models/.*\.json", name) for name in file.members)


def _is_lerobot(file: ModelFile) -> bool:
    return file.is_folder and file.contains("config.json", "model.safetensors")


def _is_algorithm(file: ModelFile) -> bool:
    return file.head.startswith(b"\x80") and {"torch", "config", "version"} <= file.texts


def _is_whole(file: ModelFile) -> bool:
    """Whether a file contains a whole module that ``torch.save`` wrote, not only weights."""
    return file.is_torch and "_parameters" in file.texts


def _has_weights(file: ModelFile) -> bool:
    return file.is_safetensors or (file.is_torch and not _is_whole(file))


def _check(form: str, reference: str, path: Path | None) -> None:
    if path is not None and not reference:
        problem = f"the policy {str(path)!r} contains only weights"
        fix = f"Name the factory that builds the module for these weights, as in {form.replace('FILE', str(path))}."
        if _is_whole(described(path)):
            problem, fix = f"the policy {str(path)!r} is a whole module", f"Write the policy as torch_module:{path}."
        raise ConfigError(problem, key="policy.policy", value=str(path), fix=fix)
    module, _, attribute = reference.partition(":")
    if not module or not attribute:
        problem = f"the policy is {reference!r}, not MODULE:ATTR"
        raise ConfigError(problem, key="policy.policy", value=reference, fix=f"Write the policy as {form}.")


def _has_suffix(suffixes: tuple[str, ...], file: ModelFile) -> bool:
    return not file.is_folder and file.path.suffix in suffixes


def _scheme(form: str, what: str, recognises: Callable[[ModelFile], bool]) -> PolicyScheme:
    return PolicyScheme(form, partial(_module, form, what), recognises, fallback=True)


def file_scheme(
    name: str,
    factory: str,
    what: str,
    recognises: Callable[[ModelFile], bool],
    *,
    runs_code: bool = True,
    **others: Any,
) -> PolicyScheme:
    """Return the scheme of a file that a factory loads.

    Args:
        name: Name of the scheme.
        factory: Factory in this package, as ``"module:attr"``.
        what: Description of the content.
        recognises: Whether a file is of this type.
        runs_code: Whether the file can run code when it is loaded.
        others: Other fields of the scheme.
    """

    def source(reference: str, path: Path | None, given: Collection[str]) -> PolicySource:
        path = file_in(f"{name}:policy.pt", path)
        pickled = str(path) if runs_code else None
        return PolicySource(f"{_HERE}.{factory}", f"{what} in {path}", {"path": absolute(path)}, pickled=pickled)

    return PolicyScheme(f"{name}:PATH", source, recognises, **others)


_CLEANRL_FORM: Final = "cleanrl:MODULE:CLASS@FILE"

TORCH: Final = {
    "torch": _scheme("torch:MODULE:ATTR@FILE", "the module", _has_weights),
    "torch_module": file_scheme(
        "torch_module", "torch_module:load_module", "the module of torch.save", _is_whole, fallback=True
    ),
}
EXPORTS: Final = {
    "torchscript": file_scheme("torchscript", "torch_exports:load_script", "a module of TorchScript", _is_script),
    "torch_export": file_scheme("torch_export", "torch_exports:load_export", "a program of torch.export", _is_export),
}
LEROBOT: Final = {"lerobot": PolicyScheme("lerobot:PATH", _lerobot, _is_lerobot)}
TORCHRL: Final = {"torchrl": _scheme("torchrl:MODULE:ATTR@FILE", "the TorchRL module", partial(_has_suffix, ()))}
CLEANRL: Final = {
    "cleanrl": PolicyScheme(_CLEANRL_FORM, partial(_agent, _CLEANRL_FORM), partial(_has_suffix, (_CLEANRL,)))
}
D3RLPY: Final = {
    "d3rlpy": file_scheme("d3rlpy", "d3rlpy:load_policy", "an algorithm of d3rlpy", _is_algorithm, runs_code=False)
}
RLLIB: Final = {"rllib": PolicyScheme("rllib:PATH", _checkpoint, _is_checkpoint)}
