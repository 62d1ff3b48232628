"""``rl-eval init``: what it writes loads to the settings of the same options; with ``--all``, it explains every key."""

import re
from pathlib import Path

import pytest

from rl_eval.cli.exits import ExitCode
from rl_eval.cli.init import commented_yaml
from rl_eval.config.builder import EvalConfig
from rl_eval.config.settings import SECTIONS
from rl_eval.errors import ConfigError
from rl_eval.results.loading import load
from tests.refused import refused
from tests.unit.cli_world import call, printed

CONFIGS = sorted(Path(__file__).parents[2].glob("configs/*.yaml"))


def rich_config():
    return (
        EvalConfig()
        .environment("CartPole-v1", env_kwargs={"text": "a: b # c\n- é", "deep": {"list": [1, None, 2.5]}})
        .policy("pkg:make", policy_kwargs={"sizes": [64, 64]}, deterministic=False)
        .evaluation(num_episodes=7, return_bounds=(0.0, 1e6), info_keys=("x",))
    )


@pytest.fixture(params=[rich_config, *CONFIGS], ids=lambda source: getattr(source, "stem", "rich"))
def config(request):
    if callable(request.param):
        return request.param()
    section = "evaluation" if request.param.stem == "ppo_cartpole" else None
    return EvalConfig.from_yaml(request.param, section)


def loaded(path, text):
    path.write_text(text, encoding="utf-8")
    return EvalConfig.from_yaml(path)


def test_it_loads_to_the_same_settings_and_explains_every_key(config, tmp_path):
    """By the docstring of its field. All lines that are keys count, without their marks: these are the defaults."""
    text = commented_yaml(config, every=True)
    assert loaded(tmp_path / "c.yaml", text).build() == config.build()
    words = " ".join(text.replace("#", " ").split())
    fields = {name: field for model in SECTIONS.values() for name, field in model.model_fields.items()}
    for name, field in fields.items():
        assert f"{' '.join(field.description.replace('``', '`').split())} {name}:" in words
    text = re.sub(rf"(?m)^(  )# (({'|'.join(fields)}): )", r"\1\2", text)
    text = re.sub(rf"(?m)^# (({'|'.join(SECTIONS)}):)$", r"\1", text)
    found = loaded(tmp_path / "c.yaml", text)
    assert {name for values in found.to_dict().values() for name in values} == fields.keys()
    if not config.build().policy.policies:  # Beside several policies, a runner that is named counts.
        assert found.build().model_dump() == config.build().model_dump()


def test_without_all_it_has_the_settings_that_differ(config, tmp_path):
    text = commented_yaml(config, every=False)
    assert "#" not in text.replace("b # c", "")
    assert loaded(tmp_path / "c.yaml", text).build() == config.build()
    defaults = {key: field.get_default(call_default_factory=True) for model in SECTIONS.values()
                for key, field in model.model_fields.items()}  # fmt: skip
    written = loaded(tmp_path / "c.yaml", text).to_dict()
    assert not [key for keys in written.values() for key, value in keys.items() if value == defaults[key]]


def test_live_objects_are_refused():
    with refused(ConfigError, "environment.env"):
        commented_yaml(EvalConfig().environment(dict), every=True)


def test_the_file_does_what_the_options_do(folder):
    options = ["--env", "cli_toys:count", "--policy", "random", "-n", 5, "--seed", 3, "--envs-per-runner", 2]
    outcome = call("init", "made.yaml", *options)
    assert outcome.exit_code == 0, outcome.output
    assert "rl-eval run made.yaml" in outcome.stderr
    assert call("run", *options, "--output", "a").exit_code == 0
    assert call("run", "made.yaml", "--output", "b").exit_code == 0
    assert load("a").fingerprint == load("b").fingerprint
    assert load("a").provenance["identity"] == load("b").provenance["identity"]


def test_nothing_is_replaced(folder):
    before = Path("toy.yaml").read_text()
    assert call("init", "toy.yaml", "--env", "CartPole-v1", "--policy", "random").exit_code == ExitCode.USAGE
    assert Path("toy.yaml").read_text() == before


def test_a_script_gets_the_file_and_the_command(folder):
    outcome = call("init", "a b.yaml", "--env", "CartPole-v1", "--policy", "random", "--json")
    assert printed("init", outcome.stdout) == {"path": "a b.yaml", "command": "rl-eval run 'a b.yaml'"}
    assert Path("a b.yaml").exists()


@pytest.mark.parametrize("more", [["CartPole-v1"], ["E", "--policy", "random", "-n", 0]])
def test_a_config_that_cannot_run_is_not_written(folder, more):
    assert call("init", "new.yaml", "--env", *more).exit_code == ExitCode.USAGE
    assert not Path("new.yaml").exists()
