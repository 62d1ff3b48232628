"""How a contender reports: one JSON line, whatever happens.

A contender is a script ``python -m benchmarks.contenders.NAME PARAMS``. ``PARAMS`` is a JSON object
with the scenario's name and settings; the answer is the last line of its output.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "FIRST_ROUNDS",
    "Measure",
    "Params",
    "broadcast_row",
    "cpu_seconds",
    "evaluated",
    "pooled",
    "ray_cluster",
    "run",
    "steps_row",
    "timed",
    "touch_store",
    "versions",
]

Params = dict[str, Any]
Measure = Callable[[Params], dict[str, Any]]

_PACKAGES: Final = ("ray", "torch", "gymnasium", "torchrl", "tensordict", "stable-baselines3", "tianshou", "numpy")
FIRST_ROUNDS: Final = 3
"""Broadcasts that are reported but not part of the median."""


def run(measures: Mapping[str, Measure]) -> None:
    """Measure what the command line asks for and print the row; an error becomes the row's ``error``."""
    params: Params = json.loads(sys.argv[1])
    row: dict[str, Any]
    try:
        row = {"status": "ok", **measures[params["scenario"]](params)}
    except ModuleNotFoundError as error:
        row = {"status": "not installed", "error": str(error)}
    except Exception as error:  # a contender that dies is a result
        row = {"status": "error", "error": _one_line(error)}
    row["versions"] = versions()
    sys.stdout.flush()
    print("\n" + json.dumps(row), flush=True)


def _one_line(error: BaseException) -> str:
    """The cause that the contender's users would look for, cut to a line."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"[:200]


def versions() -> dict[str, str]:
    """Versions of this Python and of the packages that make a difference to speed."""
    found = {"python": sys.version.split()[0]}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


@contextlib.contextmanager
def ray_cluster(num_cpus: int, object_store_gb: float = 0.5) -> Iterator[Any]:
    """A fresh local Ray cluster that ends with the block."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    import ray

    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        object_store_memory=int(object_store_gb * 1e9),
        log_to_driver=False,
    )
    try:
        yield ray
    finally:
        ray.shutdown()


def touch_store(ray: Any, gigabytes: float) -> None:
    """Write most of the object store once: fresh pages cost more than a broadcast, and only the first time."""
    import numpy as np

    blocks = [ray.put(np.ones(100_000_000, np.uint8)) for _ in range(int(gigabytes * 8))]
    del blocks


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """The result of a call and the wall seconds it took."""
    start = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start


def cpu_seconds() -> float:
    """CPU seconds of this process and of all that it has started and that still live, Ray's among them."""
    spent, parents = {}, {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # It has ended.
            fields = file.read_text().rpartition(")")[2].split()
            parents[int(file.parent.name)] = int(fields[1])
            spent[int(file.parent.name)] = int(fields[11]) + int(fields[12])
    ours = [os.getpid()]
    for process in ours:
        ours += [child for child, parent in parents.items() if parent == process]
    return sum(spent[process] for process in ours) / os.sysconf("SC_CLK_TCK")


def steps_row(steps: float, seconds: float, episodes: int, mean_return: float | None) -> dict[str, Any]:
    """A throughput row. ``steps`` are those of episodes that count in the result, and no others."""
    return {
        "steps": round(steps),
        "seconds": seconds,
        "steps_per_second": steps / seconds,
        "episodes": episodes,
        "mean_length": steps / episodes,
        "mean_return": mean_return,
    }


def evaluated(episodes: int, mean_return: float, **more: Any) -> dict[str, Any]:
    """A row of the fault matrix, printed at once too: what follows, the ends of workers and cluster, may hang."""
    row = {"status": "ok", "episodes": episodes, "mean_return": mean_return, **more}
    print("\n" + json.dumps(row), flush=True)
    return row


def pooled(parts: Sequence[tuple[float, int]]) -> dict[str, Any]:
    """A correctness row: several evaluations' ``(mean, episodes)`` as one mean over all episodes."""
    episodes = sum(count for _, count in parts)
    if not episodes:
        raise RuntimeError("no episode was evaluated")
    mean = sum(value * count for value, count in parts) / episodes
    return {"mean_return": mean, "episodes": episodes, "means": [value for value, _ in parts]}


def broadcast_row(module: nn.Module, send: Callable[[], Any], rounds: int) -> dict[str, Any]:
    """Time ``send`` and a memcpy of the module's bytes in turns, so that both see the same machine.

    The weights change before every round, which keeps any cache of unchanged weights out of it. In the first
    rounds processes map pages that are new to them; these are reported, and left out of the median.
    """
    import numpy as np
    import torch

    size = sum(tensor.numel() * tensor.element_size() for tensor in module.state_dict().values())
    source, target = np.full(size, 1, np.uint8), np.full(size, 2, np.uint8)
    sends, copies = [], []
    for _ in range(FIRST_ROUNDS + rounds):
        with torch.no_grad():
            for tensor in module.parameters():
                tensor.add_(1.0)
        copies.append(timed(lambda: np.copyto(target, source))[1])
        sends.append(timed(send)[1])
    multiples = [spent / copy for spent, copy in zip(sends, copies, strict=True)]
    return {
        "bytes": size,
        "seconds": statistics.median(sends[FIRST_ROUNDS:]),
        "memcpy_seconds": statistics.median(copies[FIRST_ROUNDS:]),
        "memcpys": statistics.median(multiples[FIRST_ROUNDS:]),
        "memcpys_first": multiples[:FIRST_ROUNDS],
        "memcpys_all": multiples[FIRST_ROUNDS:],
    }
