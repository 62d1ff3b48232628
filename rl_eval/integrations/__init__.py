"""Integrations of RLlib, TorchRL, SB3, CleanRL and Tianshou: their policies, weights, environments, training loops.

This module contains the table of integrations, and does not import the libraries. ``adapters.py`` imports the module of
an integration when it finds an object, a string or a factory of the library.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Final

from rl_eval.adapters import Integration

__all__ = ["INTEGRATIONS", "lazy_names"]

_HERE: Final = "rl_eval.integrations"
_CLEANRL: Final = (
    f"pass {_HERE}.cleanrl.AgentPolicy(agent) for an agent of CleanRL, or name its class and file, as cleanrl:{{}}@FILE"
)


def _learner(name: str, packages: tuple[str, ...], schemes: str, module: str = "", **others: Any) -> Integration:
    """Return the integration of a library whose adapter and loaders are in one module, by default that of its name."""
    module = f"{_HERE}.{module or name}"
    return Integration(
        name, packages=packages, adapter=module, schemes=f"{_HERE}.{schemes}", loaders=(module,), **others
    )


INTEGRATIONS: Final = (
    Integration(
        "gymnasium",
        watching_wrappers=(
            "gymnasium.wrappers.common:RecordEpisodeStatistics",
            "gymnasium.wrappers.rendering:",
            "gymnasium.wrappers.vector.common:RecordEpisodeStatistics",
            "gymnasium.wrappers.vector.dict_info_to_list:",
            "gymnasium.wrappers.vector.rendering:",
        ),
        learning_wrappers=dict.fromkeys(
            (
                "gymnasium.wrappers.stateful_observation:NormalizeObservation",
                "gymnasium.wrappers.stateful_reward:NormalizeReward",
                "gymnasium.wrappers.vector.stateful_observation:NormalizeObservation",
                "gymnasium.wrappers.vector.stateful_reward:NormalizeReward",
            ),
            "update_running_mean",
        ),
    ),
    _learner("rllib", ("ray.rllib",), "policy_files:RLLIB", folders=True),
    _learner(
        "sb3",
        ("stable_baselines3", "sb3_contrib", "imitation"),
        "sb3.files:SCHEMES",
        endings=("", ".zip", ".pkl"),
        companions="*vec*normalize*.pkl",
        distributions=("stable-baselines3", "sb3-contrib"),
        install="rl-eval[sb3]",
        watching_wrappers=(
            "stable_baselines3.common.monitor:",
            "stable_baselines3.common.vec_env.vec_check_nan:",
            "stable_baselines3.common.vec_env.vec_monitor:",
            "stable_baselines3.common.vec_env.vec_video_recorder:",
        ),
        modelled_wrappers=(
            "stable_baselines3.common.vec_env.vec_frame_stack:",
            "stable_baselines3.common.vec_env.vec_normalize:",
            "stable_baselines3.common.vec_env.vec_transpose:",
        ),
    ),
    _learner(
        "onnx",
        ("onnxruntime", f"{_HERE}.onnx"),
        "onnx_files:SCHEMES",
        distributions=("onnxruntime",),
        install="rl-eval[onnx]",
    ),
    _learner(
        "openpi",
        (f"{_HERE}.openpi",),
        "openpi:SCHEMES",
        distributions=("websockets",),
        incidental=("addresses", "key_variable", "connect_timeout_s", "answer_timeout_s", "patience_s"),
        install="rl-eval[openpi]",
    ),
    _learner("torchscript", ("torch.jit",), "policy_files:EXPORTS", "torch_exports"),
    Integration("torch_export", packages=("torch.export",), adapter=f"{_HERE}.torch_exports"),
    Integration("actors", packages=(f"{_HERE}.actors",), adapter=f"{_HERE}.actors"),
    Integration("lerobot", schemes=f"{_HERE}.policy_files:LEROBOT"),
    _learner("rsl_rl", ("rsl_rl",), "run_folders:RSL_RL", distributions=("rsl-rl-lib",), install="rsl-rl-lib>=5"),
    _learner("skrl", ("skrl",), "run_folders:SKRL", distributions=("skrl",), install="skrl>=2"),
    _learner("rl_games", ("rl_games",), "run_folders:RL_GAMES", distributions=("rl-games",), install="rl-games"),
    Integration("torch_module", schemes=f"{_HERE}.policy_files:TORCH", loaders=(f"{_HERE}.torch_module",)),
    Integration(
        "torchrl",
        packages=("torchrl", "tensordict.nn"),
        adapter=f"{_HERE}.torchrl",
        schemes=f"{_HERE}.policy_files:TORCHRL",
        install="rl-eval[torchrl]",
    ),
    Integration(
        "cleanrl",
        schemes=f"{_HERE}.policy_files:CLEANRL",
        loaders=(f"{_HERE}.cleanrl",),
        advice={"get_action_and_value": _CLEANRL, "get_action": _CLEANRL, "envs": _CLEANRL},
    ),
    Integration("tianshou", packages=("tianshou",), adapter=f"{_HERE}.tianshou"),
    _learner("d3rlpy", ("d3rlpy",), "policy_files:D3RLPY", distributions=("d3rlpy",), install="d3rlpy"),
    Integration(
        "jumanji",
        packages=("jumanji",),
        adapter=f"{_HERE}.jumanji",
        install="rl-eval[jumanji]",
        simulator=f"{_HERE}.jumanji:simulator",
    ),
    Integration(
        "envpool",
        packages=("envpool",),
        adapter=f"{_HERE}.envpool",
        install="rl-eval[envpool]",
        simulator=f"{_HERE}.envpool:EnvPoolSimulator",
    ),
)


def lazy_names(package: str, modules: Mapping[str, tuple[str, ...]]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a package. It imports a module when one of the module's names is first used.

    Args:
        package: Name of the package.
        modules: Names that each module of the package defines, by module name.
    """

    def find(name: str) -> Any:
        for module, names in modules.items():
            if name in names:
                return getattr(importlib.import_module(f"{package}.{module}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find
