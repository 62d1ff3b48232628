"""``--policy``: what a word, a reference or a path stands for, and ``run`` without a config file."""

import json
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch
import yaml
from gymnasium import spaces
from safetensors.torch import save_file

from rl_eval import EvalConfig, evaluate
from rl_eval.cli.evaluated import policy_source
from rl_eval.config.policy_sources import forms
from rl_eval.errors import ConfigError
from rl_eval.integrations.sb3.files import unknown
from rl_eval.policies.noise import EpisodeNoise
from rl_eval.policies.uniform import UniformPolicy
from rl_eval.results.loading import load
from tests.refused import refused, untold
from tests.unit.cli_world import call, make_folder

SB3 = "rl_eval.integrations.sb3:load_policy"


@pytest.fixture(autouse=True)
def fresh():
    """Return to a process that has not warned of any model."""
    unknown.cache_clear()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    return make_folder(tmp_path, monkeypatch)


def model(path, **facts):
    """A file that looks like a saved model."""
    path.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data", json.dumps(facts))
        archive.writestr("policy.pth", b"")
    return path


# ------------------------------------------------------------------------------ what it stands for


def test_a_model_of_sb3_is_known_by_its_contents_and_brings_its_normalizer(tmp_path):
    path = model(tmp_path / "model")
    assert policy_source(str(path)).kwargs == {"path": str(path)}
    (tmp_path / "my_vecnormalize.pkl").touch()
    source = policy_source(str(path))
    assert source.factory == SB3
    assert source.kwargs["vecnormalize"] == str(tmp_path / "my_vecnormalize.pkl")
    assert source.pickled == str(path)
    assert "my_vecnormalize.pkl" in source.said


@pytest.mark.parametrize("normalizer", ["rl_model_vecnormalize_200_steps.pkl", "rl_model_200_steps/vecnormalize.pkl"])
def test_the_normalizer_is_the_one_of_this_model(tmp_path, normalizer):
    """Of the callbacks of SB3 by its name; of its zoo in the folder with the model's name."""
    path = model(tmp_path / "rl_model_200_steps.zip")
    (tmp_path / normalizer).parent.mkdir(exist_ok=True)
    (tmp_path / normalizer).touch()
    if "/" not in normalizer:
        (tmp_path / "rl_model_vecnormalize_100_steps.pkl").touch()
    assert policy_source(str(path)).kwargs["vecnormalize"] == str(tmp_path / normalizer)
    # One that was trained without takes none, and is not asked which of those of other models is its own.
    bare = model(tmp_path / "model.zip", _last_original_obs=None)
    assert policy_source(str(bare)).kwargs == {"path": str(bare)}


def test_a_run_of_the_zoo_has_one_normalizer_for_all_its_models(tmp_path):
    run = tmp_path / "ppo" / "Hopper-v5_1"
    (run / "Hopper-v5").mkdir(parents=True)
    statistics = run / "Hopper-v5" / "vecnormalize.pkl"
    statistics.touch()
    only = model(run / "Hopper-v5.zip", _last_original_obs={})
    assert policy_source(str(run)).kwargs == {"path": str(only), "vecnormalize": str(statistics)}
    best = model(run / "best_model.zip", _last_original_obs={})
    assert policy_source(str(best)).kwargs["vecnormalize"] == str(statistics)
    with refused(ConfigError, "policy.policy", value=str(run)) as caught:
        policy_source(str(run))
    assert all(path.name in str(caught.value) for path in (only, best))


def test_a_normalizer_in_a_folder_of_somebody_else_is_not_taken(tmp_path, caplog):
    """Unless the zoo's files say that it is of the same run; a model that may need one says so."""
    path = model(tmp_path / "plain.zip", _last_original_obs={}, buffer_size=100)
    (tmp_path / "other").mkdir()
    statistics = tmp_path / "other" / "vecnormalize.pkl"
    statistics.touch()
    assert policy_source(str(path)).kwargs == {"path": str(path)}
    assert "plain.zip" in caplog.text
    (tmp_path / "other" / "args.yml").touch()
    caplog.clear()
    assert policy_source(str(path)).kwargs["vecnormalize"] == str(statistics)
    assert not caplog.text


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("rl_model_vecnormalize_400_steps", ()),
        ("hopper_early_vecnormalize", ()),
        ("vecnormalize_400", ()),
        ("early_vecnormalize", ("early",)),
    ],
)
def test_a_normalizer_that_names_another_model_is_a_question(tmp_path, name, others):
    """It would give numbers of another policy. A model that may need none is evaluated without it."""
    stem = "hopper_final" if "early" in name else "rl_model_60_steps"
    path = model(tmp_path / f"{stem}.zip", _last_original_obs={})
    for other in others:
        model(tmp_path / f"{other}.zip")
    (tmp_path / f"{name}.pkl").touch()
    with refused(ConfigError, "policy.policy_kwargs.vecnormalize", value=f"{name}.pkl"):
        policy_source(str(path))
    assert "vecnormalize" not in policy_source(str(path), {"vecnormalize"}).kwargs
    path = model(tmp_path / f"{stem}.zip", _last_original_obs={}, buffer_size=100)
    assert "vecnormalize" not in policy_source(str(path)).kwargs


@pytest.mark.parametrize(
    "name", ["vecnormalize", "vec_normalize_hopper", "statistics_vecnormalize", "hopper_vecnormalize"]
)
def test_a_normalizer_that_names_no_other_model_is_taken(tmp_path, name):
    path = model(tmp_path / "hopper_final.zip")
    model(tmp_path / "hopper_early.zip")
    (tmp_path / f"{name}.pkl").touch()
    assert policy_source(str(path)).kwargs["vecnormalize"] == str(tmp_path / f"{name}.pkl")


def test_a_reference_is_what_makes_the_policy_and_a_folder_of_rllib_is_known_by_its_file(tmp_path):
    (tmp_path / "rllib_checkpoint.json").touch()
    source = policy_source(str(tmp_path))
    assert (source.factory, source.settings) == ("rl_eval.integrations.rllib:load_policy", {"policy.actions": "none"})
    assert source.pickled
    named = policy_source("pkg.module:make")
    assert (named.factory, named.pickled) == ("pkg.module:make", None)


def test_the_first_kind_that_matches_counts(tmp_path):
    (tmp_path / "rllib_checkpoint.json").touch()
    path = model(tmp_path / "model.zip")
    assert policy_source(str(tmp_path)).kwargs == {"path": str(tmp_path)}
    (tmp_path / "notes.txt").touch()
    with refused(ConfigError, "policy.policy", value=str(tmp_path / "notes.txt")) as caught:
        policy_source(str(tmp_path / "notes.txt"))
    assert forms() in str(caught.value)
    assert policy_source(f"sb3:{tmp_path}").kwargs == {"path": str(path)}


OPTIONS = ("", "modle.zip", "./a:b", "net", "nets")
"""Texts that are refused as an option, since they begin as no reference does."""
REFUSED = {
    "": "--policy",  # As of a variable that a script forgot to set.
    "modle.zip": "model.zip",
    "./a:b": "./a:b",
    "net": "'net:ATTR'",
    "nets": "'net:ATTR'",
    "net:Net@lin.pt": "'torch:net:Net@lin.pt'",
    "net.safetensors": "torch:MODULE:ATTR@net.safetensors",
    "notes.txt": "rllib:PATH, sb3:PATH",
    "zips": "a.zip, b.zip",
    "sb3:modle.zip": "'modle.zip'",
    "rllib:checkpoint": "'checkpoint'",
    "torch:pkg:make@net.pt": "'net.pt'",
    "cleanrl:ppo:Agent@ppo.cleanrl_model": "'ppo.cleanrl_model'",
    "sb3:": "sb3:model.zip",
    "rllib:": "rllib:checkpoint_000010",
    "cleanrl:ppo:Agent": "cleanrl:MODULE:CLASS@FILE",
    **dict.fromkeys(["torch:", "torch:make@", "torch:pkg:"], "torch:MODULE:ATTR@FILE"),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_names_no_policy_is_refused_with_what_was_meant(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    model(tmp_path / "model.zip")
    save_file({}, tmp_path / "net.safetensors")
    for name in ("net.py", "notes.txt"):
        (tmp_path / name).touch()
    for name in ("a.zip", "b.zip"):
        (tmp_path / "zips").mkdir(exist_ok=True)
        with zipfile.ZipFile(tmp_path / "zips" / name, "w") as archive:
            archive.writestr("x", b"")
    with refused(ConfigError, "--policy" if text in OPTIONS else "policy.policy") as caught:
        policy_source(text)
    assert REFUSED[text] in str(caught.value)


FACTORIES = """
def drawn():
    import torch
    return torch.nn.Linear(4, 2)
def seeded():
    import torch
    torch.manual_seed(1)
    return torch.nn.Linear(4, 2)
def own():
    import torch
    net = torch.nn.Linear(4, 2, bias=False)
    torch.nn.init.ones_(net.weight)
    return net
def function():
    return lambda observations: observations[:, 2] > 0
"""


@pytest.mark.process
@pytest.mark.parametrize(("name", "noted"), [("drawn", True), ("seeded", False), ("own", False), ("function", False)])
def test_random_weights_are_noted_even_if_only_the_factory_imports_torch(tmp_path, name, noted):
    """A policy without weights has no note on weights."""
    (tmp_path / "made.py").write_text(FACTORIES)
    words = ["run", "--env", "CartPole-v1", "--policy", f"made:{name}", "-n", "2"]
    command = [sys.executable, "-m", "rl_eval", *words]
    done = subprocess.run(command, check=True, cwd=tmp_path, capture_output=True, text=True)
    assert ("weights at random" in done.stdout) == noted
    assert "weights" not in done.stderr


def said(done):
    return " ".join(done.output.split())


def test_the_ending_of_a_model_may_be_left_out(tmp_path):
    """As SB3 has it; and the normalizer is found all the same."""
    path = model(tmp_path / "model.zip")
    (tmp_path / "vecnormalize.pkl").touch()
    assert policy_source(f"sb3:{tmp_path / 'model'}") == policy_source(str(path))
    assert policy_source(str(path)).kwargs["path"] == str(path)


def test_a_file_keeps_its_name_where_it_is_a_link(tmp_path, monkeypatch):
    """Caches name what they hold by digests, and say in folders' names which version it is."""
    (tmp_path / "snapshots" / "abc").mkdir(parents=True)
    (tmp_path / "snapshots" / "abc" / "model.zip").symlink_to(model(tmp_path / "blob"))
    named = tmp_path / "snapshots" / "abc" / "model.zip"
    assert policy_source(str(named)).kwargs == {"path": str(named)}
    (tmp_path / "c.yaml").write_text("policy: {policy: 'a:b', weights: snapshots/abc/model.zip}")
    assert EvalConfig.from_yaml(tmp_path / "c.yaml").to_dict()["policy"]["weights"] == str(named)
    monkeypatch.chdir(named.parent)
    done = call("init", "made.yaml", "--env", "a:b", "--policy", "a:b", "--weights", named.name)
    assert done.exit_code == 0, done.output
    assert EvalConfig.from_yaml("made.yaml").to_dict()["policy"]["weights"] == str(named)


# ------------------------------------------------------------------------------ schemes in a config


SUPER = "        super().__init__(4, 2)"


@pytest.fixture
def network(folder, monkeypatch):
    """A module with a class, and the weights of one of it, which are not those that it begins with."""
    lines = ("import torch", "class Agent(torch.nn.Linear):", "    def __init__(self, envs=None):", SUPER, "")
    (folder / "my_net.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(folder))
    weights = {"weight": torch.tensor([[0.0] * 4, [0.0, 0.0, 1.0, 1.0]]), "bias": torch.zeros(2)}
    save_file(weights, folder / "net.safetensors")
    torch.save(weights, folder / "net.cleanrl_model")
    yield folder
    sys.modules.pop("my_net", None)


@pytest.mark.parametrize(
    "text",
    [
        "torch:my_net:Agent@net.safetensors",
        "torchrl:my_net:Agent@net.safetensors",
        "cleanrl:my_net:Agent@net.cleanrl_model",
    ],
)
def test_weights_come_with_what_builds_their_module(network, text):
    """In a config, on the command line, and as keys, it is the same policy."""
    config = EvalConfig().environment("CartPole-v1").evaluation(num_episodes=3)
    plain = config.copy().policy("my_net:Agent", weights="net.safetensors")
    expected = evaluate(plain).table.rows["episode_return"]
    assert (evaluate(config.copy().policy(text)).table.rows["episode_return"] == expected).all()
    done = call("run", "--env", "CartPole-v1", "-n", 3, "--policy", text, "--output", "out")
    assert done.exit_code == 0, done.output
    assert "my_net:Agent" in done.output
    assert (load("out").table.rows["episode_return"] == expected).all()


def test_a_whole_module_is_loaded_with_trust(network):
    """By its path, by its scheme and in a config: the module with its weights, as torch.save wrote it."""
    code = "import torch, my_net; m = my_net.Agent(); m.load_state_dict(torch.load('net.cleanrl_model')); "
    exec(code + "torch.save(m, 'whole.pt'); torch.save(m.state_dict(), 'weights.pt')", {})
    config = EvalConfig().environment("CartPole-v1").evaluation(num_episodes=3)
    expected = evaluate(config.copy().policy("my_net:Agent", weights="net.safetensors")).fingerprint
    assert evaluate(config.copy().policy("torch_module:whole.pt")).fingerprint == expected
    for text in ("whole.pt", "torch_module:whole.pt"):
        assert policy_source(text).pickled == "whole.pt"
        command = ("run", "--env", "CartPole-v1", "-n", 3, "--policy", text, "--output", "out", "--force")
        assert call(*command).exit_code == 2
        done = call(*command, "--trust")
        assert done.exit_code == 0, done.output
        assert load("out").fingerprint == expected
    assert "torch_module:whole.pt" in said(call("run", "--env", "CartPole-v1", "--policy", "torch:whole.pt"))
    assert "torch:MODULE:ATTR@weights.pt" in said(call("run", "--env", "CartPole-v1", "--policy", "weights.pt"))


def test_a_file_that_is_not_a_module_whose_class_is_known_is_an_error(network, monkeypatch):
    """The message names the file, and what is in it."""
    from rl_eval.integrations.torch_module import load_module

    local = type("Missing", (torch.nn.Linear,), {"__module__": __name__})
    monkeypatch.setattr(sys.modules[__name__], "Missing", local, raising=False)
    torch.save(local(1, 1), "local.pt")
    monkeypatch.delattr(sys.modules[__name__], "Missing")
    (network / "half.pt").write_bytes(b"half")
    for name in ("local.pt", "net.cleanrl_model", "half.pt"):
        with refused(ConfigError, "policy.policy_kwargs.path", value=name):
            load_module(name)


def test_a_path_in_a_config_file_begins_at_the_file(tmp_path):
    """So does that of one of several policies; arguments that are set stay."""
    path = model(tmp_path / "model.zip")
    (tmp_path / "a_vecnormalize.pkl").touch()
    (tmp_path / "b_vecnormalize.pkl").touch()
    several = {"x": "random", "y": {"policy": "sb3:model.zip", "policy_kwargs": {"vecnormalize": False}}}
    (tmp_path / "several.yaml").write_text(yaml.safe_dump({"policy": {"policies": several}}))
    built = (
        EvalConfig.from_yaml(tmp_path / "several.yaml").environment("x:y", agents=("x", "y")).build().policy.policies
    )
    assert built["y"].policy_kwargs == {"path": str(path), "vecnormalize": False}
    assert built["y"].policy == SB3
    assert (built["x"].policy, built["x"].deterministic) == ("rl_eval.policies.uniform:UniformPolicy", False)


def test_a_masked_policy_in_a_config_is_given_masks_unless_it_says_otherwise(tmp_path):
    path = model(tmp_path / "m.zip", policy_class={"__module__": "sb3_contrib.common.maskable.policies"})
    assert "environment.action_masks" not in policy_source(str(model(tmp_path / "plain.zip"))).settings
    config = EvalConfig().environment("CartPole-v1").policy(f"sb3:{path}")
    assert config.build().environment.action_masks
    assert not config.environment(action_masks=False).build().environment.action_masks
    assert config.to_dict()["policy"] == {"policy": f"sb3:{path}"}
    assert config.policy(policy_kwargs={"path": "other.zip"}).build().policy.policy_kwargs == {"path": "other.zip"}


def test_two_files_of_weights_are_one_too_many(network):
    with refused(ConfigError, "policy.weights", value="other.pt"):
        EvalConfig().policy("torch:my_net:Agent@net.safetensors", weights="other.pt").build()
    done = call(
        "run", "--env", "CartPole-v1", "--policy", "torch:my_net:Agent@net.safetensors", "--weights", "other.pt"
    )
    assert done.exit_code == 2


def test_a_normalizer_is_chosen_on_the_command_line(folder):
    """Which of two it is, is a question without it."""
    model(folder / "model.zip")
    for name in ("a_vecnormalize.pkl", "b_vecnormalize.pkl"):
        (folder / name).touch()
    command = ("init", "made.yaml", "--env", "CartPole-v1", "--policy", "model.zip")
    assert "policy.policy_kwargs.vecnormalize" in said(call(*command))
    done = call(*command, "--set", "policy.policy_kwargs.vecnormalize=b_vecnormalize.pkl")
    assert done.exit_code == 0, done.output
    assert untold(done.output, "model.zip", "vecnormalize", "b_vecnormalize.pkl") == []
    kwargs = yaml.safe_load((folder / "made.yaml").read_text())["policy"]["policy_kwargs"]
    assert kwargs == {"path": str(folder / "model.zip"), "vecnormalize": "b_vecnormalize.pkl"}


# ------------------------------------------------------------------------------ rl-eval run without a config


def test_a_policy_replaces_that_of_the_file_with_its_weights(folder):
    """Weights of another policy would not fit."""
    config = yaml.safe_load((folder / "toy.yaml").read_text())
    config["policy"] |= {"policy_kwargs": {"wrong": 1}, "weights": "nowhere.safetensors"}
    (folder / "other.yaml").write_text(yaml.safe_dump(config))
    done = call("run", "other.yaml", "--policy", "cli_toys:alternate", "-n", "4", "--quiet")
    assert done.exit_code == 0, done.output
    assert done.output.startswith("complete")


def test_pickled_objects_are_not_loaded_without_a_word(folder):
    """Nobody sits at a terminal here, so nobody can be asked."""
    model(folder / "model.zip")
    done = call("run", "--env", "CartPole-v1", "--policy", "model.zip")
    assert done.exit_code == 2
    assert "--trust" in done.output
    assert "stable_baselines3" not in sys.modules


# ------------------------------------------------------------------------------ the random policy

SPACES = {
    "discrete": spaces.Discrete(3, start=-1),
    "multi": spaces.MultiDiscrete([[2, 5], [3, 1]]),
    "binary": spaces.MultiBinary([2, 3]),
    "box": spaces.Box(np.float32([-2, 0]), np.float32([2, 10])),
    "integers": spaces.Box(-3, 3, (2,), np.int8),
    "without entries": spaces.Box(-1, 1, (0,)),
    "unbounded": spaces.Box(np.float32([-np.inf, 1, -np.inf]), np.float32([np.inf, np.inf, -1])),
}


@pytest.mark.parametrize("space", [*SPACES.values(), spaces.Dict(SPACES), spaces.Tuple([*SPACES.values()])], ids=str)
def test_random_actions_are_in_the_space_and_a_function_of_the_episode(space):
    seeds = np.arange(200)
    whole, _ = UniformPolicy(space).act(None, None, np.ones(200, bool), EpisodeNoise(seeds, np.zeros(200, np.int64)))
    for lane in (0, 7, 199):
        one = np.full(1, lane)
        alone, _ = UniformPolicy(space).act(None, None, np.ones(1, bool), EpisodeNoise(one, np.zeros(1, np.int64)))
        assert row(alone, 0) in space
        assert str(row(alone, 0)) == str(row(whole, lane))


def row(actions, lane):
    if isinstance(actions, dict):
        return {name: row(part, lane) for name, part in actions.items()}
    return tuple(row(part, lane) for part in actions) if isinstance(actions, tuple) else actions[lane]


def test_random_actions_are_uniform():
    noise = EpisodeNoise(np.arange(30_000), np.zeros(30_000, np.int64))
    actions, _ = UniformPolicy(SPACES["integers"]).act(None, None, np.ones(30_000, bool), noise)
    shares = np.bincount(actions[:, 0].astype(int) + 3, minlength=7) / 30_000
    assert shares == pytest.approx(np.full(7, 1 / 7), abs=0.01)


def test_what_it_cannot_draw_is_refused():
    with refused(ConfigError, "action_space", value=str(spaces.Text(3))):
        UniformPolicy(spaces.Dict(a=spaces.Text(3)))
    with refused(ConfigError, "policy.deterministic", value=True):
        UniformPolicy(SPACES["discrete"]).act(None, None, np.ones(1, bool), None)


def test_a_mask_is_kept_to():
    mask = np.array([[0, 1, 0], [1, 0, 1]] * 500, np.int8)
    noise = EpisodeNoise(np.arange(1000), np.zeros(1000, np.int64))
    actions, _ = UniformPolicy(spaces.Discrete(3)).act({"action_mask": mask}, None, np.ones(1000, bool), noise)
    assert set(actions[::2]) == {1}
    assert set(actions[1::2]) == {0, 2}


# ------------------------------------------------------------------------------ what is not a path

LONG = "a" * 10_000


@pytest.mark.parametrize(
    "policy",
    [
        *(LONG, f"{LONG}:x", f"toys:{LONG}", f"sb3:{LONG}", f"torch:toys:make@{LONG}", f"{LONG}/{LONG}"),
        *("/dev/zero", "sb3:/dev/zero", "torch_module:/dev/zero", "~no_such_user/a.zip", "sb3:~no_such_user/a.zip"),
    ],
)
def test_a_policy_that_is_not_a_path_is_a_usage_error(folder, policy):
    """It may be too long for one, a device, or in the home of an unknown user."""
    for arguments in (("--policy", policy), ("--policy", "random", "--set", f"policy.policy={policy}")):
        outcome = call("run", "--env", "CartPole-v1", "-n", 1, "--runners", 0, *arguments)
        assert outcome.exit_code == 2, outcome.output
        assert "Traceback" not in outcome.output


@pytest.mark.parametrize("command", ["show", "report", "compare", "export", "view", "run", "suite run", "replay"])
def test_an_argument_that_is_too_long_for_a_path_is_a_usage_error(folder, command):
    several = [LONG, LONG] if command == "compare" else [LONG]
    outcome = call(*command.split(), *several)
    assert outcome.exit_code == 2, outcome.output
    assert "Traceback" not in outcome.output


def test_a_path_of_windows_is_no_module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = r"C:\models\ppo.zip"  # The message quotes it.
    outcome = call("run", "--env", "CartPole-v1", "--policy", path)
    assert outcome.exit_code == 2
    assert untold(outcome.stderr, repr(path)[1:-1], "not a file or folder") == []
    assert "weights" not in outcome.stderr


def test_a_path_without_its_prefix_is_the_same_policy_in_a_config(tmp_path, monkeypatch):
    """In Python, in a file and beside it, alone and among several."""
    path = model(tmp_path / "ppo.zip")
    section = {"policy": SB3, "policy_kwargs": {"path": str(path)}}
    named = EvalConfig().environment("CartPole-v1").policy(str(path)).build().policy
    assert {name: getattr(named, name) for name in section} == section
    (tmp_path / "c.yaml").write_text("policy: {policies: {a: ppo.zip, b: random}}")
    monkeypatch.chdir("/")
    built = EvalConfig.from_yaml(tmp_path / "c.yaml").environment("x:y", agents=("a", "b")).build()
    assert {name: getattr(built.policy.policies["a"], name) for name in section} == section
    (tmp_path / "notes.txt").write_text("notes")
    with refused(ConfigError, "policy.policy", value=str(tmp_path / "notes.txt")) as caught:
        evaluate("CartPole-v1", str(tmp_path / "notes.txt"))
    assert untold(str(caught.value), "neither", forms()) == []
