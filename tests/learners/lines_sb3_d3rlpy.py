"""What the lines on files of SB3, imitation and d3rlpy need."""

import base64
import json
import zipfile
from pathlib import Path

import gymnasium as gym
import pytest


def cloned():
    pytest.importorskip("imitation")
    import numpy as np
    from imitation.algorithms import bc
    from imitation.util import logger

    env = gym.make("CartPole-v1")
    trainer = bc.BC(
        observation_space=env.observation_space,
        action_space=env.action_space,
        rng=np.random.default_rng(0),
        custom_logger=logger.configure("logs", format_strs=[]),
    )
    trainer.policy.save("cloned.pt")
    return {"trainer": trainer}


def unreadable():
    """Save a model whose policy_kwargs another Python wrote."""
    model = pytest.importorskip("stable_baselines3").PPO("MlpPolicy", "CartPole-v1")
    model.save("new.zip")
    pickled = base64.b64encode(b"\x80\x04cgymnasium\nno_such_name\n.").decode()
    with zipfile.ZipFile("new.zip") as archive, zipfile.ZipFile("old.zip", "w") as old:
        for name in archive.namelist():
            content = archive.read(name)
            if name == "data":
                content = json.dumps({**json.loads(content), "policy_kwargs": {":serialized:": pickled}}).encode()
            old.writestr(name, content)
    return {}


def d3rlpy():
    pytest.importorskip("d3rlpy")
    from d3rlpy.algos import DQNConfig

    algo = DQNConfig().create()
    algo.build_with_env(gym.make("CartPole-v1"))
    algo.save("model.d3")
    assert Path("model.d3").is_file()
    return {"algo": algo}


CUSTOM = "policy.policy_kwargs.custom_objects={policy_kwargs: {net_arch: [64, 64]}}"
BEFORE = {
    "rl-eval run --env CartPole-v1 --policy cloned.pt --trust": cloned,
    f'rl-eval run --env CartPole-v1 --policy old.zip --trust --set "{CUSTOM}"': unreadable,
    "rl-eval run --env CartPole-v1 --policy model.d3": d3rlpy,
    'evaluate("CartPole-v1", trainer)': cloned,
    'evaluate("CartPole-v1", algo)': d3rlpy,
}
"""What makes each line ready."""
