"""Everything global that a training loop relies on, as it is now."""

import os
import random
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import scipy.special  # noqa: F401  # Its first import adds a filter of warnings.
import torch
from torch import nn


def observe(module: nn.Module) -> dict[str, Any]:
    """Note the state of this process, and of a module in training."""
    from tensordict.nn.probabilistic import interaction_type  # It takes seconds to load.

    numpy_state = np.random.get_state()  # noqa: NPY002
    return {
        "random": random.getstate(),
        "numpy": (numpy_state[0], numpy_state[1].tobytes(), *numpy_state[2:]),
        "torch": torch.random.get_rng_state().numpy().tobytes(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "threads": torch.get_num_threads(),
        "interop threads": torch.get_num_interop_threads(),
        "default dtype": torch.get_default_dtype(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "training": [part.training for part in module.modules()],
        "weights": [tensor.detach().clone().numpy().tobytes() for tensor in module.state_dict().values()],
        "devices": [str(parameter.device) for parameter in module.parameters()],
        "gradients": [parameter.grad is None or float(parameter.grad.sum()) for parameter in module.parameters()],
        "requires_grad": [parameter.requires_grad for parameter in module.parameters()],
        "environment": dict(os.environ),
        "folder": str(Path.cwd()),
        "signals": {number: signal.getsignal(number) for number in sorted(signal.valid_signals())},
        "warnings": list(warnings.filters),
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook),
        "numpy errors": np.geterr(),
        "recursion": sys.getrecursionlimit(),
        "exploration": interaction_type(),
    }


def compare(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Fail with the names of what has changed, and how."""
    changed: dict[str, Any] = {name: (before[name], after[name]) for name in before if before[name] != after[name]}
    for name in {"environment", "signals"} & changed.keys():
        changed[name] = sorted(map(str, set(before[name].items()) ^ set(after[name].items())))
    if "warnings" in changed:
        changed["warnings"] = [one for one in after["warnings"] + before["warnings"] if one not in before["warnings"]]
    for name in {"random", "numpy", "torch"} & changed.keys():
        changed[name] = "other numbers would be drawn"
    assert not changed, changed
