"""Valid and invalid configurations, and their round trip through YAML."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rl_eval.config.builder import EvalConfig
from rl_eval.config.settings import EvalSettings, needs_interruption, needs_processes
from rl_eval.errors import ConfigError
from rl_eval.runners import SingleAgentEvalRunner, VectorEvalRunner, layout_of
from tests.refused import refused

EVERYTHING: dict[str, dict[str, Any]] = {
    "environment": {
        "env": "my_pkg:MyEnv-v3",
        "env_kwargs": {"size": 3, "name": "no", "deep": {"list": [1, 2.5, None, True], "empty": {}}},
        "wrappers": ["my_pkg:Wrapper", {"wrapper": "my_pkg:Other", "size": 2}],
        "env_reuse": "episode",
        "instances": "one",
        "python": ["conda", "run", "python"],
        "python_path": ["/src"],
        "agents": ["a", "b"],
        "action_masks": True,
    },
    "policy": {
        "policy": "my_pkg.policies:make",
        "policy_kwargs": {"hidden": [32, 32]},
        "weights": "/data/weights.safetensors",
        "weights_key": "model.actor",
        "normalizer": "/data/norm.npz",
        "deterministic": False,
        "actions": "unsquash",
        "device": "cuda:0",
        "inference": "batched",
        "allow_nondeterministic": True,
        "chunk": {"execute": 4, "delay": 2, "horizon": 8},
        "policies": {"a": {"policy": "my_pkg.policies:make", "weights": "/data/a.safetensors"}},
        "policy_mapping_fn": "my_pkg.policies:mapping",
    },
    "runners": {
        "num_runners": 3,
        "num_envs_per_runner": 5,
        "runner": "my_pkg.runners:MyRunner",
        "num_cpus_per_runner": 0.5,
        "num_gpus_per_runner": 0.25,
        "custom_resources_per_runner": {"accelerator": 1.0},
        "label_selector": {"zone": "a"},
        "in_placement_group": True,
        "init_fn": "os:getpid",
        "runtime_env": {"env_vars": {"A": "1"}, "pip": ["x==1"]},
        "address": "auto",
        "runner_start_timeout_s": 33.0,
    },
    "evaluation": {
        "num_episodes": 17,
        "seed": 2**64 - 1,
        "first_index": 200,
        "max_episode_steps": 99,
        "gamma": 0.97,
        "info_keys": ["speed", "x"],
        "success_key": "reached",
        "metrics": {"energy": "my_pkg:energy"},
        "return_bounds": [-1.5, 2.0],
        "observers": ["my_pkg:watch"],
        "rules": ["my_pkg:Misses"],
        "determinism_check": 0.02,
    },
    "fault_tolerance": {
        "max_attempts_per_episode": 7,
        "episode_timeout_s": 12.5,
        "reset_timeout_s": 30.0,
        "step_timeout_s": 3.0,
        "runner_timeout_s": 60.0,
        "fail_fast": False,
        "max_runner_restarts": 0,
        "max_failed_episodes": 0.25,
    },
}
"""A valid value, other than the default, of every key."""

KEYS = [(section, key) for section, keys in EVERYTHING.items() for key in keys]

_OF_PLANS = ("matchups", "symmetric", "conditions", "condition_target")
WITH_OTHERS = {("evaluation", key) for key in _OF_PLANS} | {("runners", "block")}
"""Keys that need or exclude others: ``test_matchups.py``, ``test_conditions.py`` and ``test_blocks.py`` set them."""


def minimal() -> EvalConfig:
    return EvalConfig().environment("CartPole-v1")


# ------------------------------------------------------------------------------ the builder


def test_the_sections_chain_and_set_every_key() -> None:
    """Each section method changes the builder and returns it; a dict sets the same; every key has an example here."""
    config = EvalConfig()
    for name, values in EVERYTHING.items():
        assert getattr(config, name)(**values) is config
    assert config.to_dict() == EVERYTHING
    assert EvalConfig.from_dict(EVERYTHING) == config
    assert {(section, key) for section, model in EvalSettings() for key in type(model).model_fields} == {
        *KEYS,
        *WITH_OTHERS,
    }


def test_what_is_given_counts() -> None:
    """Later values win, others stay, None is a value, a path becomes a string; a missing key has its default."""
    assert minimal().build() == EvalSettings(environment={"env": "CartPole-v1"})
    built = minimal().evaluation(num_episodes=5, seed=3).evaluation(num_episodes=6).build().evaluation
    assert (built.num_episodes, built.seed) == (6, 3)
    assert minimal().fault_tolerance(episode_timeout_s=None).build().fault_tolerance.episode_timeout_s is None
    assert minimal().policy(weights=Path("a") / "b.safetensors").to_dict()["policy"]["weights"] == "a/b.safetensors"


def test_copies_are_independent_and_equal_by_value() -> None:
    """Changing a copy leaves the original as it was."""
    config = minimal()
    assert config.copy() == config == minimal() != minimal().evaluation(seed=1)
    config.copy().evaluation(num_episodes=3).environment(env_kwargs={"a": 1})
    assert config == minimal()


# ------------------------------------------------------------------------------ frozen


def test_settings_are_frozen() -> None:
    """No field of built settings can be assigned."""
    built = minimal().build()
    for section, key in KEYS:
        with pytest.raises(ValidationError, match="frozen"):
            setattr(getattr(built, section), key, None)
        with pytest.raises(ValidationError, match="frozen"):
            setattr(built, section, getattr(built, section))


def test_the_builder_can_go_on_without_touching_what_it_built() -> None:
    """What was built keeps its values when the builder or the caller's containers change afterwards."""
    kwargs = {"size": 1, "deep": {"list": [1]}}
    config = minimal().environment(env_kwargs=kwargs)
    built = config.build()
    config.environment("Acrobot-v1").evaluation(num_episodes=3)
    kwargs["size"] = 2
    kwargs["deep"]["list"].append(2)
    assert built.environment.env == "CartPole-v1"
    assert built.evaluation.num_episodes == 100
    assert built.environment.env_kwargs == {"size": 1, "deep": {"list": [1]}}


# ------------------------------------------------------------------------------ dicts and YAML


def write(folder: Path, values: Any, name: str = "config.yaml") -> Path:
    path = folder / name
    path.write_text(yaml.safe_dump(values))
    return path


def test_the_whole_configuration_round_trips_through_yaml(tmp_path: Path) -> None:
    """YAML gives back every field, each at a value other than its default."""
    config = EvalConfig.from_dict(EVERYTHING)
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml())
    again = EvalConfig.from_yaml(path)
    assert again == config
    assert again.build() == config.build()
    defaults = EvalSettings()
    assert all(getattr(getattr(again.build(), s), k) != getattr(getattr(defaults, s), k) for s, k in KEYS)


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=8),
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.text("abc-é 01", max_size=4), parts, max_size=3),
    max_leaves=6,
)


@given(env_kwargs=st.dictionaries(st.sampled_from(["a", "on", "1", "null"]) | st.integers(), plain, max_size=3))
@settings(max_examples=30, deadline=None)
def test_any_plain_values_round_trip_through_yaml(env_kwargs: dict[Any, Any]) -> None:
    """Numbers keep their last bit and their type, keys too; words that YAML has a meaning for stay words."""
    config = minimal().environment(env_kwargs={"table": env_kwargs})
    again = EvalConfig.from_dict(yaml.safe_load(config.to_yaml()))
    assert repr(again.to_dict()) == repr(config.to_dict())


def test_a_section_of_a_larger_file_is_enough(tmp_path: Path) -> None:
    """An algorithm's config may hold the evaluation at any depth; the rest of it is not read."""
    inner = {"environment": {"env": "CartPole-v1"}, "evaluation": {"num_episodes": 9}}
    path = write(tmp_path, {"lr": 0.1, "evaluation": inner, "trainer": {"nested": {"evaluation": inner}}})
    assert EvalConfig.from_yaml(path, "evaluation").build().evaluation.num_episodes == 9
    assert EvalConfig.from_yaml(path, "trainer.nested.evaluation") == EvalConfig.from_dict(inner)
    assert EvalConfig.from_dict(yaml.safe_load(path.read_text())["evaluation"]) == EvalConfig.from_dict(inner)


def test_a_section_that_is_not_there_is_named_with_the_nearest(tmp_path: Path) -> None:
    """The message names file and section, and suggests."""
    path = write(tmp_path, {"lr": 0.1, "evaluation": {"runners": {}}})
    for section, hint in [("evalution", "'evaluation'"), ("lr.rate", ""), ("evaluation.runers", "'runners'")]:
        with refused(ConfigError, str(path), value=section) as caught:
            EvalConfig.from_yaml(path, section)
        assert hint in str(caught.value)


def test_relative_weights_belong_to_the_file_that_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path of weights is taken from the config's folder, wherever the process stands."""
    folder = tmp_path / "configs"
    folder.mkdir()
    values = {"evaluation": {"policy": {"weights": "../weights/a.safetensors"}}}
    path = write(folder, values)
    monkeypatch.chdir(folder)
    for given_path in (path, Path("config.yaml")):
        config = EvalConfig.from_yaml(given_path, "evaluation").environment("CartPole-v1")
        assert config.build().policy.weights == str(tmp_path / "weights" / "a.safetensors")
    absolute = write(folder, {"policy": {"weights": "/w/a.safetensors"}}, "absolute.yaml")
    assert EvalConfig.from_yaml(absolute).to_dict()["policy"]["weights"] == "/w/a.safetensors"
    assert EvalConfig.from_dict({"policy": {"weights": "a.pt"}}).to_dict()["policy"]["weights"] == "a.pt"


@pytest.mark.parametrize(
    ("text", "key", "place"),
    [
        (b"environment: [1", None, "line 1, column 16"),
        (b"environment:\n  env: E\n evaluation:\n  seed: 1\n", None, "line 3, column 2"),
        (b"environment: {env: '\x01'}", None, "#x0001"),
        (b"\xff\xfe\x00\x01\x80", None, ""),
        (b"- a\n- b\n", "config", ""),
        (b"environment: CartPole-v1\n", "environment", ""),
        (b"environment:\n", "environment", ""),
        (b"1: {a: 2}\n", "1", ""),
        (b"runners: {1: 2}\n", "runners.1", ""),
        (b"evaluation: {num_episodes: 7}\nevaluation: {seed: 3}\n", None, "line 2, column 1"),
        (b"environment: {env: CartPole-v1, env: Hopper-v5}\n", None, "line 1, column 33"),
        (b"environment: {env_kwargs: {1: a, '1': b, 1: c}}\n", None, "line 1, column 42"),
    ],
)
def test_a_broken_file_is_a_config_error(tmp_path: Path, text: bytes, key: str | None, place: str) -> None:
    """The error names the place. A key that appears twice is rejected: YAML would silently keep the last one."""
    path = tmp_path / "broken.yaml"
    path.write_bytes(text)
    with refused(ConfigError, str(path) if key is None else key) as caught:
        EvalConfig.from_yaml(path)
    assert place in str(caught.value)


@pytest.mark.parametrize(
    ("section", "key"),
    [("evaluation", "seed"), ("evaluation", "max_episode_steps"), ("fault_tolerance", "step_timeout_s")],
)
def test_a_flag_is_no_number(section: str, key: str) -> None:
    """Python takes True for 1; boolean keys and nested values accept it."""
    config = EvalConfig().environment("E", env_kwargs={"on": True}).policy("a:b", deterministic=True)
    config.build()
    with refused(ConfigError, f"{section}.{key}", value=True):
        config.set(f"{section}.{key}", True).build()


def test_merged_mappings_may_say_another_value(tmp_path: Path) -> None:
    path = tmp_path / "merged.yaml"
    mine = "{environment: {env: E}, policy: {policy: 'a:b'}, evaluation: {<<: *base, seed: 2}}"
    path.write_text(f"base: &base {{seed: 1, num_episodes: 5}}\nmine: {mine}\n")
    evaluation = EvalConfig.from_yaml(path, "mine").build().evaluation
    assert (evaluation.seed, evaluation.num_episodes) == (2, 5)


def test_a_live_environment_cannot_serve_runners() -> None:
    """It is rejected before anything starts; a class with ``step`` is valid."""
    live = gym.make("CartPole-v1")
    config = EvalConfig().environment(live).runners(num_runners=2)  # type: ignore[arg-type]
    with refused(ConfigError, "environment.env", value=type(live).__name__):
        config.build()
    config.environment(type(live.unwrapped)).build()


def test_a_file_that_cannot_be_read_is_a_config_error(tmp_path: Path) -> None:
    """A missing file and a folder are named."""
    for path in (tmp_path, tmp_path / "missing.yaml"):
        with refused(ConfigError, str(path)):
            EvalConfig.from_yaml(path)


def test_an_empty_file_is_an_empty_config(tmp_path: Path) -> None:
    """Nothing set is nothing wrong, until it is built without an environment."""
    path = tmp_path / "empty.yaml"
    path.write_text("# nothing\n")
    config = EvalConfig.from_yaml(path)
    assert config.to_dict() == {}
    assert config.to_yaml() == "{}\n"
    with refused(ConfigError, "environment.env"):
        config.build()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("environment.env", lambda context: None),
        ("environment.env_kwargs.scene.texture", {"scene": {"fine": 1, "texture": np.zeros(3)}}),
        ("policy.policy", np.argmax),
        ("policy.policy_kwargs.layers", {"layers": [1, np.tanh]}),
        ("runners.runner", VectorEvalRunner),
        ("runners.runtime_env.working_dir", {"working_dir": Path()}),
    ],
)
def test_live_objects_refuse_yaml_by_name(key: str, value: Any) -> None:
    """A Python object cannot be written: the error names the item."""
    config = minimal().set(".".join(key.split(".")[:2]), value)
    with refused(ConfigError, key):
        config.to_yaml()


# ------------------------------------------------------------------------------ unknown names


@pytest.mark.parametrize(
    ("policy", "key", "known"),
    [
        ({"chunk": {"exec": 8}}, "policy.chunk.exec", "'execute'"),
        ({"policies": {"chunk": {"weight": "a"}}}, "policy.policies.chunk.weight", "'weights'"),
        ({"policies": {"a": {"devise": "cpu"}}}, "policy.policies.a.devise", "'device'"),
        ({"policies": {"a": {"chunk": {"delya": 2}}}}, "policy.policies.a.chunk.delya", "'delay'"),
    ],
)
def test_an_unknown_name_inside_of_a_key_is_an_error_with_the_nearest_known_one(
    policy: dict[str, Any], key: str, known: str
) -> None:
    with refused(ConfigError, key) as caught:
        EvalConfig.from_dict({"environment": {"env": "CartPole-v1"}, "policy": policy}).build()
    assert known in str(caught.value)


@pytest.mark.parametrize(
    ("values", "key", "known"),
    [
        ({"enviroment": {}}, "enviroment", "'environment'"),
        ({"zzz": {}}, "zzz", "environment, evaluation, fault_tolerance, policy, runners"),
        ({"evaluation": {"num_episode": 3}}, "evaluation.num_episode", "'evaluation.num_episodes'"),
        ({"runners": {"num_workers": 3}}, "runners.num_workers", "'runners.num_runners'"),
        ({"policy": {"polcy": "a:b"}}, "policy.polcy", "'policy.policy'"),
        ({"policy": {"qqq": 3}}, "policy.qqq", "actions, allow_nondeterministic"),
        ({"evaluation": {"step_timeout_s": 3}}, "evaluation.step_timeout_s", "'fault_tolerance.step_timeout_s'"),
        ({"environment": {"max_episode_steps": 3}}, "environment.max_episode_steps", "'evaluation.max_episode_steps'"),
    ],
)
def test_an_unknown_name_is_an_error_with_the_nearest_known_one(values: dict[str, Any], key: str, known: str) -> None:
    """A misspelt section or key is an error, and never ignored."""
    with refused(ConfigError, key) as caught:
        EvalConfig.from_dict(values)
    assert known in str(caught.value)
    if hasattr(EvalConfig, section := next(iter(values))):
        with refused(ConfigError, key):
            getattr(EvalConfig(), section)(**values[section])


@pytest.mark.parametrize(
    ("text", "key", "fix"),
    [
        ("policy: random", "policy", "policy: {policy: "),
        ("runners: 2", "runners", "runners: {num_runners: "),
        ("policy: {polcy: random}", "policy.polcy", ""),
        ("enviroment: {}", "enviroment", ""),
    ],
)
def test_an_error_in_a_file_names_the_file(tmp_path: Path, text: str, key: str, fix: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with refused(ConfigError, key) as caught:
        EvalConfig.from_yaml(path)
    assert str(path) in str(caught.value)
    assert fix in caught.value.fix


@pytest.mark.parametrize("key", ["num_episodes", "evaluation", "evaluation.", ".num_episodes", "eval.num_episodes", ""])
def test_set_wants_a_section_and_a_key(key: str) -> None:
    with refused(ConfigError, key):
        EvalConfig().set(key, 3)


# ------------------------------------------------------------------------------ ranges

WRONG: dict[str, tuple[Any, ...]] = {
    "evaluation.num_episodes": (0, -1, 2**31 + 1, 2.5, None, "many"),
    "evaluation.seed": (-1, 2**64, None),
    "evaluation.max_episode_steps": (0, -5),
    "evaluation.gamma": (-0.1, 1.1, float("nan")),
    "evaluation.info_keys": ("speed",),
    "evaluation.return_bounds": ((1.0,), (2.0, 1.0), (1.0, 1.0), (float("nan"), 1.0)),
    "evaluation.determinism_check": (1.5,),
    "runners.num_runners": (-1, 1.5),
    "runners.num_envs_per_runner": (0, -3),
    "runners.num_cpus_per_runner": (-1, float("nan")),
    "runners.num_gpus_per_runner": (-0.5,),
    "runners.runner": (7,),
    "runners.runner_start_timeout_s": (0,),
    "runners.init_fn": (7, "getpid"),
    "runners.custom_resources_per_runner": ("much",),
    "environment.env_reuse": ("always",),
    "environment.instances": (1, "two"),
    "environment.env_kwargs": ([1],),
    "policy.actions": ("squash",),
    "policy.deterministic": ("perhaps",),
    "policy.device": (3,),
    "policy.policy_mapping_fn": (7, "mapping"),
    "fault_tolerance.max_attempts_per_episode": (0, 60_001),
    "fault_tolerance.episode_timeout_s": (0, -1),
    "fault_tolerance.reset_timeout_s": (0,),
    "fault_tolerance.step_timeout_s": (0,),
    "fault_tolerance.runner_timeout_s": (-1,),
    "fault_tolerance.max_runner_restarts": (-1,),
    "fault_tolerance.max_failed_episodes": (-1,),
}
OUT_OF_RANGE = [(key, value) for key, values in WRONG.items() for value in values]


def test_a_value_out_of_range_is_named_with_its_key() -> None:
    """The error names the dotted key and the value, without jargon of the validator."""
    for key, value in OUT_OF_RANGE:
        shown = value if value is None or isinstance(value, (str, int, float)) else repr(value)
        with refused(ConfigError, key, value=shown) as caught:
            minimal().set(key, value).build()
        assert all(named in str(caught.value) for named in (key, repr(value)))
        assert "pydantic" not in str(caught.value)


def test_all_wrong_values_are_told_at_once() -> None:
    """The message names both mistakes, and the fields are those of the first."""
    with refused(ConfigError, "evaluation.num_episodes", value=0) as caught:
        minimal().evaluation(num_episodes=0, seed=-1).build()
    assert all(named in str(caught.value) for named in ("evaluation.num_episodes", "evaluation.seed", "-1"))


def test_the_number_of_lanes_follows_the_runner() -> None:
    """Without a number, the vectorized runner has eight lanes and the single-agent runner one."""
    for lanes, runner, expected in [(None, "vector", 8), (None, "single_agent", 1), (4, "vector", 4)]:
        settings = minimal().runners(num_envs_per_runner=lanes, runner=runner).build()
        assert layout_of(settings).lanes == expected


# ------------------------------------------------------------------------------ settings that contradict each other


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"runners.runner": "single_agent", "runners.num_envs_per_runner": 2}, "runners.num_envs_per_runner"),
        ({"runners.num_runners": 2, "policy.device": "cuda"}, "policy.device"),
        ({"evaluation.return_bounds": (3.0, -3.0)}, "evaluation.return_bounds"),
        ({"environment.env": None}, "environment.env"),
        ({"evaluation.symmetric": True}, "evaluation.symmetric"),
        ({"evaluation.condition_target": "population"}, "evaluation.condition_target"),
    ],
)
def test_a_setting_that_cannot_be_honoured_is_an_error(changes: dict[str, Any], key: str) -> None:
    """A setting without effect, given the other settings or the runner, is rejected with its key and its value."""
    config = minimal()
    for name, value in changes.items():
        config.set(name, value)
    value = changes[key]
    with refused(ConfigError, key, value=repr(value) if isinstance(value, tuple) else value):
        layout_of(config.build())


def test_what_needs_processes_is_refused_without_them() -> None:
    """Every key with the mark is rejected; with a runner it is valid."""
    marked = [(section, key) for section in EVERYTHING for key in needs_processes(section)]
    assert {key for _, key in marked} >= {"init_fn", "num_gpus_per_runner", "address", "runner_timeout_s"}
    for section, key in marked:
        value = EVERYTHING[section][key]
        config = minimal().set(f"{section}.{key}", value)
        with refused(ConfigError, f"{section}.{key}"):
            config.build()
        config.runners(num_runners=1).build()


@pytest.mark.parametrize("key", needs_interruption("fault_tolerance"))
def test_a_limit_of_calls_needs_processes_of_runners_or_of_environments(key: str) -> None:
    config = minimal().set(f"fault_tolerance.{key}", 2.0)
    with refused(ConfigError, f"fault_tolerance.{key}", value=2.0):
        layout_of(config.build())
    layout_of(config.runners(runner="subprocess").build())
    layout_of(config.runners(runner="vector", num_runners=1).build())


class OneOnly(SingleAgentEvalRunner):  # type: ignore[misc]
    """Runner of a user, described only by its facts."""

    facts = SingleAgentEvalRunner.facts._replace(processes=True)


@pytest.mark.parametrize("runner", [SingleAgentEvalRunner, "rl_eval.runners:SingleAgentEvalRunner", OneOnly])
def test_the_lanes_of_a_runner_are_those_of_its_class(runner: Any) -> None:
    """However it is named; more than it can have are refused, by its path when a group needs it."""
    assert layout_of(minimal().runners(runner=runner, num_runners=1).build()).lanes == 1
    with refused(ConfigError, "runners.num_envs_per_runner", value=4):
        layout_of(minimal().runners(runner=runner, num_runners=1, num_envs_per_runner=4).build())


def test_a_runner_that_needs_processes_gets_them() -> None:
    """In this process it is rejected."""
    with refused(ConfigError, "runners.num_runners", value=0):
        layout_of(minimal().runners(runner=OneOnly).build())


# ------------------------------------------------------------------------------ what is written about it


def test_a_description_is_plain_data_that_names_live_objects() -> None:
    """A result's provenance is JSON; a live object appears as ``module:qualname``."""
    config = minimal().environment(json.dumps, env_kwargs={"codec": object(), "n": (1, 2), "s": {"b", "a"}})
    described = json.loads(json.dumps(config.build().described()))
    assert described["environment"]["env"] == "json:dumps"
    assert described["environment"]["env_kwargs"] == {"codec": "builtins:object", "n": [1, 2], "s": ["a", "b"]}
    assert set(described) == set(EVERYTHING)


ELSEWHERE = {
    "num_episodes", "seed", "first_index", "info_keys", "return_bounds", "determinism_check", "weights", "weights_key",
    "device", "allow_nondeterministic", "observers", "inference", "instances", "python", "python_path",
}  # fmt: skip
"""Keys of environment, policy and evaluation that are not in the identity: plan, weights, and what is only recorded."""


def test_the_identity_holds_what_changes_numbers_and_no_layout() -> None:
    """Runners and fault tolerance stay out of the identity; environment, policy and caps are in it."""
    for section, key in KEYS:
        config = EvalConfig.from_dict({"environment": {"env": "CartPole-v1"}, "runners": {"num_runners": 1}})
        if key == "python_path":
            config.set("environment.python", "python3")
        before = config.runners(num_gpus_per_runner=1.0).build().identity()
        after = config.set(f"{section}.{key}", EVERYTHING[section][key]).build().identity()
        assert (before == after) == (section in ("runners", "fault_tolerance") or key in ELSEWHERE), key
