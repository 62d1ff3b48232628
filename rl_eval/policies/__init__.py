"""Policies: adapters of users' objects to :class:`rl_eval.Policy`, and random numbers that depend only on the episode.

In the core, only this folder imports torch at module level.
"""

from __future__ import annotations

import contextlib
import inspect
import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, final

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import tree

from rl_eval.adapters import FROZEN, integration_for, integrations, loader_of
from rl_eval.config.policy_sources import changed_files, file_digests
from rl_eval.config.references import import_attribute, required, takes_observations
from rl_eval.config.settings import NORMALIZER, PolicySection
from rl_eval.errors import ConfigError, PolicyError, WeightsError, summary_of
from rl_eval.policies.normalization import NormalizedPolicy, by_path, check_shapes
from rl_eval.policies.subject import check_arguments
from rl_eval.protocols import Deferred, NoiseSource, Policy
from rl_eval.supervision.caller import survivable
from rl_eval.weights import module_of

_FROM_FACTORY: Final = "_rl_eval_from_policy_factory"
"""Attribute that marks an error of a factory. The error keeps its type, and a pickle of the error keeps the mark."""
_RANDOM_WEIGHTS: Final = "_rl_eval_random_weights"
"""Attribute of a module whose factory drew its weights at random."""
_CHOSEN_BY_TORCH: Final = 2**32
"""Seeds of 64 bits, of which nearly all are at least this, are those that torch draws; users set smaller ones."""
_MAKES: Final = (
    "rl_eval calls it to build the policy. If it is itself a policy (a function of observations), rename its parameter "
    "to 'observations', or pass a function that returns it, such as def make(): return {}."
)
_LACKS: Final = (
    "Otherwise set {} in policy.policy_kwargs; parameters named observation_space and action_space receive the spaces."
)
_ACTS: Final = {
    "predict": "lambda batch: model.predict(batch)[0] (if predict returns only actions, omit [0])",
    "get_action": "lambda batch: agent.get_action(batch)",
    "select_action": "lambda batch: agent.select_action(batch)",
    "choose_action": "lambda batch: agent.choose_action(batch)",
}
"""Functions of observations for objects of other libraries, by the name of the method with which the object acts."""


def adapt_policy(
    section: PolicySection, observation_space: gym.Space[Any], action_space: gym.Space[Any], policy: Any = None
) -> Policy:
    """Build the configured policy, or adapt the policy object that replaces it; with ``chunk``, execute its chunks.

    A factory is called with ``policy_kwargs``, and with ``observation_space`` and ``action_space`` if its signature
    has parameters of these names. A named function whose only required parameter is ``obs``, ``observation`` or
    ``observations`` is the policy itself. With ``policy.normalizer``, the policy gets normalized observations.

    Raises:
        ConfigError: There is no policy, the object cannot be used as a policy, the file of the normalizer cannot be
            read or does not fit, or the policy normalizes observations itself.
    """
    adapted = _adapted(section, observation_space, action_space, policy)
    if section.normalizer is not None:
        adapted = _normalized(adapted, section, observation_space)
    if section.chunk is None:
        return adapted
    from rl_eval.policies.chunks import ChunkedPolicy
    from rl_eval.policies.late_chunks import LateChunks

    if isinstance(adapted, ChunkedPolicy):
        return adapted
    executor = LateChunks if isinstance(adapted, Deferred) else ChunkedPolicy
    return executor(adapted, section, observation_space, action_space)


def _normalized(policy: Policy, section: PolicySection, observation_space: gym.Space[Any]) -> Policy:
    path = str(section.normalizer)
    if getattr(policy, "normalizes", False):
        problem = f"{NORMALIZER} is {path!r}, but the policy already normalizes observations, with its own statistics"
        fix = (
            f"Remove {NORMALIZER}. If the training normalized twice, use Normalized(policy, **frozen(FILE)) in Python."
        )
        raise ConfigError(problem, key=NORMALIZER, value=path, fix=fix)
    check_files(section)
    try:
        statistics = by_path(**import_attribute("the reader of policy.normalizer", FROZEN)(path))
        check_shapes(statistics, observation_space)
    except (ConfigError, WeightsError) as error:
        problem = f"{NORMALIZER} is {Path(path).name!r}: {error.problem}"
        raise ConfigError(problem, key=NORMALIZER, value=path, fix=error.fix) from error
    note = f"observations are normalized with the statistics of {Path(path).name}"
    return NormalizedPolicy(policy, lambda: statistics, notes=(note,))


def _adapted(
    section: PolicySection, observation_space: gym.Space[Any], action_space: gym.Space[Any], policy: Any = None
) -> Policy:
    check_arguments(section)
    candidate = section.policy if policy is None else policy
    if named := isinstance(candidate, str):
        candidate = _from_factory(section, observation_space, action_space)
    _check_built(candidate)
    candidate = _of_library(candidate, section, observation_space, action_space)
    if isinstance(candidate, Policy):
        _check_act(candidate)
        if (module := module_of(candidate)) is not None:
            _to_device(module, section.device)
            with contextlib.suppress(NotImplementedError):  # A module of torch.export keeps its mode.
                module.eval()
        return candidate
    answers_chunks = _has(candidate, "predict_action_chunk")
    if _has(candidate, "select_action") and _has(candidate, "reset") and not answers_chunks:
        problem = (
            f"policy.policy is a {type(candidate).__name__} with select_action() and reset(), which keeps the actions "
            "of one episode, but a policy acts for many episodes"
        )
        fix = (
            "An object with predict_action_chunk(batch) is a chunk policy: pass one, with policy.chunk. If another "
            "method only depends on observations, pass a function that calls it."
        )
        raise ConfigError(problem, key="policy.policy", value=type(candidate).__name__, fix=fix)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(candidate, torch.nn.Module):
        from rl_eval.policies.module import ModulePolicy
        from rl_eval.policies.normalized import Normalized

        if isinstance(candidate, Normalized):
            check_shapes(candidate.statistics, observation_space)
            inside = section.model_copy(update={"policy": candidate.policy, "policy_kwargs": {}})
            inner = _adapted(inside, observation_space, action_space)
            candidate.weights = module_of(inner)
            return NormalizedPolicy(inner, lambda: candidate.statistics, candidate)
        if not answers_chunks:
            _check_forward(candidate, torch.nn.Module.forward)
        _to_device(candidate, section.device)
        how = section.deterministic, section.device
        return ModulePolicy(candidate, action_space, *how, chunks=section.chunk is not None)
    if answers_chunks:
        candidate = _of_tensors(candidate.predict_action_chunk)
    _check_callable(candidate, named)
    if not section.deterministic:
        problem = (
            "policy.deterministic is False, but the policy is a plain callable, whose distribution rl_eval cannot see"
        )
        fix = "Return logits from an nn.Module, or implement rl_eval.Policy and draw from its noise argument."
        raise ConfigError(problem, key="policy.deterministic", value=False, fix=fix)
    if not _takes_an_argument(candidate):
        problem = f"policy.policy is {candidate!r}, which does not take observations as its only required argument"
        fix = 'If it builds the policy, pass its result or its name, as "module:attr".'
        raise ConfigError(problem, key="policy.policy", value=candidate, fix=fix)
    return CallablePolicy(candidate)


def _of_library(value: Any, section: PolicySection, *spaces: gym.Space[Any]) -> Any:
    """Return the policy for an object of a library; any other object itself."""
    if hasattr(type(value), "act"):
        return value
    if (adapter := integration_for(value, "as_policy")) is not None:
        return adapter(value, section, *spaces)
    if (detached := integration_for(value, "portable")) is not None:
        return _of_library(detached(value), section, *spaces)
    return value


def _check_built(candidate: Any) -> None:
    if inspect.isclass(candidate):
        problem = f"policy.policy is the class {candidate.__name__}"
        fix = (
            "Pass an object of this class, or the name of the class, "
            f"'{candidate.__module__}:{candidate.__qualname__}', which is "
            "built with policy.policy_kwargs."
        )
        raise ConfigError(problem, key="policy.policy", value=candidate.__name__, fix=fix)


def _check_act(policy: Policy) -> None:
    try:
        inspect.signature(policy.act).bind(None, None, None, None)
    except TypeError as error:
        problem = (
            f"policy.policy is a {type(policy).__name__}, whose act() does not take the arguments of "
            f"act(observations, state, live, noise): {error}"
        )
        raise ConfigError(problem, key="policy.policy", value=type(policy).__name__) from error
    except ValueError:  # Some callables hide their signature.
        pass


def _check_forward(module: Any, undefined: Any) -> None:
    if inspect.getattr_static(module, "forward", undefined) is not undefined:
        return
    advice = _advice(dir(module), f"{type(module).__module__}:{type(module).__qualname__}")
    problem = f"policy.policy is a {type(module).__name__} without a method forward(observations) to choose actions"
    fix = _sentence(advice) or "Define forward(observations)."
    raise ConfigError(problem, key="policy.policy", value=type(module).__name__, fix=fix)


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:].rstrip('.')}." if text else ""


def _advice(names: Collection[str], reference: str) -> str:
    """Return advice for a policy of a library, recognized by method or argument names; an empty string if unknown."""
    found = (text for one in integrations() for name, text in one.advice.items() if name in names)
    return next(found, "").format(reference)


def _check_callable(candidate: Any, named: bool) -> None:
    if isinstance(candidate, Mapping):
        problem, fix = (
            "policy.policy is a mapping, such as a state dict",
            "Pass the module to which the state dict belongs.",
        )
        raise ConfigError(problem, key="policy.policy", value=type(candidate).__name__, fix=fix)
    if not callable(candidate):
        made = "built " if named else "is "
        call = _call_of(candidate)
        problem = f"policy.policy {made}{candidate!r}, which is not a module, a callable or a Policy"
        fix = f"Pass a function of a batch of observations{call and f', such as {call}'}."
        raise ConfigError(problem, key="policy.policy", value=candidate, fix=fix)


def _has(candidate: Any, method: str) -> bool:
    return callable(getattr(candidate, method, None))


def _of_tensors(predict: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function of arrays for a function of tensors."""
    import torch

    return lambda observations: predict(tree.map_structure(torch.as_tensor, observations))


def _call_of(candidate: Any) -> str:
    """Return a lambda, as text, that passes observations to an object's method; an empty string if none is known."""
    return next((call for name, call in _ACTS.items() if _has(candidate, name)), "")


def _takes_an_argument(function: Any) -> bool:
    try:
        signature = inspect.signature(function)
        signature.bind(None)
    except TypeError:
        return False
    except ValueError:  # Some callables hide their signature.
        return True
    # A function that can be called without arguments takes settings, not observations: it builds something.
    variadic = any(each.kind is each.VAR_POSITIONAL for each in signature.parameters.values())
    return variadic or not inspect.isfunction(function) or bool(required(signature.parameters))


def _to_device(module: Any, device: str) -> Any:
    try:
        return module.to(device)
    except (RuntimeError, AssertionError) as error:
        text = f"policy.device is {device!r}, but the policy cannot be moved to it: {error}"
        raise ConfigError(text, key="policy.device", value=device) from error


def _from_factory(section: PolicySection, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> Any:
    factory = import_attribute("policy.policy", section.policy)
    name = section.policy.rpartition(":")[2]
    if not callable(factory):
        problem = f"policy.policy is {section.policy!r}, which is not callable"
        fix = f"Name a function that returns a policy, as in def make(): return {_call_of(factory) or name}."
        raise ConfigError(problem, key="policy.policy", value=section.policy, fix=fix)
    if takes_observations(factory) and not section.policy_kwargs:
        return factory
    offered = {"observation_space": observation_space, "action_space": action_space}
    parameters = inspect.signature(factory).parameters
    spaces = {
        name: space for name, space in offered.items() if name in parameters and name not in section.policy_kwargs
    }
    try:
        with random_state_kept(), _fresh_weights() as fresh:
            made = factory(**spaces, **section.policy_kwargs)
        if (module := module_of(made)) is not None and fresh(module):
            vars(module)[_RANDOM_WEIGHTS] = True
    except TypeError as error:
        lacking = [name for name in required(parameters) if name not in spaces and name not in section.policy_kwargs]
        unknown = [one for one in section.policy_kwargs if one not in parameters]
        made = f"{name}(...)" if inspect.isclass(factory) else name
        hint = _MAKES.format(made) if lacking or module_of(factory) is factory else ""
        if lacking:
            advice = _advice(lacking, section.policy)
            hint += f" {_sentence(advice) or _LACKS.format(' and '.join(map(repr, lacking)))}"
        elif unknown:
            hint += f" {name} takes {', '.join(parameters) or 'no arguments'}."
        wrong = ConfigError(
            f"policy.policy {section.policy!r} cannot be built: {error}",
            key="policy.policy_kwargs" if lacking or unknown else "policy.policy",
            value=", ".join(lacking or unknown) or section.policy,
            fix=hint.strip(),
        )
        setattr(wrong, _FROM_FACTORY, True)
        raise wrong from error
    except Exception as error:
        setattr(error, _FROM_FACTORY, True)
        raise
    check_files(section)
    return made


@contextlib.contextmanager
def _fresh_weights() -> Iterator[Callable[[Any], bool]]:
    """Yield a function that returns whether a module has weights that its factory drew without setting a seed."""
    if "torch" not in sys.modules:
        yield _written_once
        return
    from rl_eval.policies.fresh_weights import FreshWeights

    with FreshWeights() as context:
        yield context.in_module


def _written_once(module: Any) -> bool:
    """Return whether the factory that imported torch drew each weight, and did not replace any.

    Each tensor counts its in-place writes.
    """
    torch = sys.modules["torch"]
    seed, tensors = torch.initial_seed(), [*module.parameters()]
    untouched = torch.equal(torch.random.get_rng_state(), torch.Generator().manual_seed(seed).get_state())
    if seed < _CHOSEN_BY_TORCH or untouched:
        return False
    return any(one._version for one in tensors) and all(one._version <= 1 for one in tensors)


def has_random_weights(policy: Policy) -> bool:
    """Return whether the factory of a policy drew the weights at random."""
    return getattr(module_of(policy), _RANDOM_WEIGHTS, False)


def check_files(section: PolicySection) -> None:
    """Raise if a model file changed after the settings were built, since other runners may have loaded the old file.

    Only normalizers, and files of factories that load models, are checked. Arguments of other factories may be files
    that the factory writes.
    """
    before, now = section.file_digests, file_digests(section.policy, section.paths)
    for name in changed_files(before, now):
        if name != NORMALIZER and loader_of(section.policy) is None:
            continue
        key = name if name == NORMALIZER else f"policy.policy_kwargs.{name}"
        raise ConfigError(
            f"the file of {key} was changed after the evaluation was configured (digest {before[name][:16]} -> "
            f"{now[name][:16]})",
            key=key,
            fix="Evaluate a copy that does not change, or configure the evaluation again.",
        )


def came_from_factory(error: BaseException) -> bool:
    """Return whether an exception was raised by the factory of a policy, in this process or in a runner."""
    return getattr(error, _FROM_FACTORY, False)


_ONE_BY_ONE: Final = (
    "Pass a function of a batch, such as lambda batch: np.array([policy(observation) for observation in batch])."
)


@final
class CallablePolicy:
    r"""Stateless policy around a function of observations.

    Args:
        function: Maps a batch in the structure of the observation space (leaves of shape
            (batch, \\*leaf_shape)) to a batch of actions.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def act(
        self, observations: Any, state: Any, live: npt.NDArray[np.bool_], noise: NoiseSource | None
    ) -> tuple[Any, None]:
        """Choose actions; see :class:`rl_eval.Policy`."""
        return self.function(observations), None

    def explained(self, error: BaseException, observations: Any) -> BaseException:
        """Return an error that says that the function takes one observation, if it does; otherwise the given error.

        Args:
            error: Error of the function for a batch.
            observations: The batch. Its observations come from the environment: a function may reject others.
        """
        if not isinstance(error, (IndexError, TypeError, ValueError)) or not self._takes_one(observations):
            return error
        text = f"the policy takes a single observation, but raises {summary_of(error)} for a batch"
        explained = PolicyError(text, key="policy.policy", fix=_ONE_BY_ONE)
        explained.__cause__ = error
        return explained

    def _takes_one(self, observations: Any) -> bool:
        """Return whether the function takes a single observation, but not a batch that contains one observation."""
        return self._takes(tree.map_structure(itemgetter(0), observations)) and not self._takes(
            tree.map_structure(itemgetter(slice(1)), observations)
        )

    def _takes(self, observations: Any) -> bool:
        try:
            self.function(observations)
        except survivable():
            return False
        return True


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore the global random generators at the end: new layers draw weights from them, and a trainer uses them."""
    torch = sys.modules.get("torch")
    states = random.getstate(), np.random.get_state(), torch.random.get_rng_state() if torch else None  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        if torch:
            torch.random.set_rng_state(states[2])
