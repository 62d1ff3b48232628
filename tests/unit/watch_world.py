"""A training run's folder full of checkpoints, a config, and ways to watch it, that the tests of the watcher share."""

import csv
import json
import os
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file, save_file

from rl_eval.log import read_log
from rl_eval.policies.mlp import MLPActor
from tests.unit.cli_world import call, make_folder

WEIGHTS = Path(__file__).parents[2] / "configs" / "weights" / "cartpole_ppo_early.safetensors"
CONFIG = {
    "environment": {"env": "CartPole-v1"},
    "policy": {"policy": "rl_eval.policies.mlp:make_mlp"},
    "runners": {"num_runners": 0, "num_envs_per_runner": 4},
    "evaluation": {"num_episodes": 6, "seed": 3},
}
FACTORIES = '''
from pathlib import Path


def without_licence(context):
    """An environment that this machine cannot run."""
    raise RuntimeError("no licence server")


def reject(path):
    """A factory of something else."""
    raise ValueError(f"{path} is no checkpoint of mine")


def from_path(path, scale=1.0):
    """A trainer's own format: a file of weights, or a folder with one in it."""
    from safetensors.torch import load_file

    from rl_eval.policies.mlp import MLPActor

    path = Path(path)
    assert path.name.startswith("model_")
    module = MLPActor(4, 2)
    module.load_state_dict(load_file(path / "weights" if path.is_dir() else path))
    return module
'''


def make_world(tmp_path, monkeypatch):
    """Go to a folder with an empty training run in it."""
    make_folder(tmp_path, monkeypatch)
    (tmp_path / "watch_factories.py").write_text(FACTORIES)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(CONFIG))
    (tmp_path / "run").mkdir()
    return tmp_path


def weights_of_step(step, good=False):
    """Return CartPole weights: trained ones, which differ from step to step, or some that soon fall over."""
    if good:
        noise = torch.Generator().manual_seed(step)
        return {
            name: tensor + 0.01 * torch.randn(tensor.shape, generator=noise).to(tensor.dtype)
            for name, tensor in load_file(WEIGHTS).items()
        }
    module = MLPActor(4, 2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
        module.head.bias[step % 2] = 1.0 + step
    return module.state_dict()


def save(step, good=False, folder="run", name="model_{}.safetensors"):
    path = Path(folder, name.format(step))
    save_file(weights_of_step(step, good), path)
    return path


def age(path, seconds=3600):
    """Have a file changed long ago."""
    then = Path(path).stat().st_mtime - seconds
    os.utime(path, (then, then))


def watch_args(*args, checkpoints="run", poll_s=0.02):
    return ("watch", "c.yaml", checkpoints, "--poll-s", poll_s, *args)


def watch_once(*args, **more):
    return call(*watch_args("--once", *args, **more))


def curve(folder="run/eval"):
    with Path(folder, "curve.csv").open() as stream:
        return list(csv.DictReader(stream))


def steps(folder="run/eval"):
    return [int(row["step"]) for row in curve(folder)]


def best(folder="run/eval"):
    return json.loads(Path(folder, "best.json").read_text())


def copies(folder="run/eval"):
    """Return the copies of checkpoints."""
    return [path.relative_to(folder).as_posix() for path in Path(folder, "checkpoints").glob("*/*")]


def rows_in_logs(kind="evaluations", folder="run/eval"):
    """Return how many episode rows each evaluation log holds, repeated ones included."""
    import pyarrow.parquet as pq

    return {
        log.name: sum(pq.read_metadata(path).num_rows for path in log.glob("segments/*episodes*"))
        for log in sorted(Path(folder, kind).iterdir())
    }


def fingerprints(folder="run/eval"):
    return {row["name"]: row["fingerprint"] for row in curve(folder)}


def log_of(row, folder="run/eval"):
    return read_log(Path(folder, "evaluations", row["evaluation"]))
