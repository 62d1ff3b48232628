"""YAML that would take minutes, all memory or an error of Python: a config error that names the file, at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rl_eval import EvalConfig
from rl_eval.cli.exits import ExitCode
from rl_eval.config.builder import compose_yaml
from rl_eval.errors import ConfigError
from rl_eval.suites.definition import SuiteDefinition
from tests.refused import refused
from tests.unit import cli_world
from tests.unit.small_files import laughs

GAME = "environment: {env: CartPole-v1}\n"
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} {{<<: [{','.join(['*' + chr(97 + n)] * 9)}]}}\n" for n in range(9)
)
BAD = {
    "aliases": laughs(),
    "aliases in an argument": "environment:\n  env_kwargs:\n"
    + "".join(f"    {line}\n" for line in laughs().splitlines()),
    "merged aliases": MERGES,
    "it contains itself": "environment: &e\n  env: CartPole-v1\n  env_kwargs: {a: *e}\n",
    "a key contains itself": "environment:\n  env: CartPole-v1\n  env_kwargs: &e {a: *e}\n",
    "merged with itself": "a: &a {<<: *a}",
    "5,000 lists": "environment: " + "[" * 5000 + "]" * 5000,
    "3,000 mappings": "environment: " + "{a: " * 3000 + "1" + "}" * 3000,
    "3,000 items": "- " * 3000,
    "3,000 keys": "? " * 3000,
    "a list of 10 MB": "x: [" + "1," * 5_000_000 + "1]",
    "a list of 200 kB": "x: [" + "1," * 100_000 + "1]",
    "5,000 digits": "evaluation: {num_episodes: " + "9" * 5000 + "}",
    "5,000 hexadecimal digits": "evaluation: {num_episodes: 0x" + "f" * 5000 + "}",
    "base 60": "evaluation: {num_episodes: " + ":".join(["1"] * 100_000) + "}",
    "a number in base 60": "evaluation: {num_episodes: " + ":".join(["1"] * 1000) + ".5}",
    "a date": "evaluation: {num_episodes: 2026-13-45}",
    "no integer": "evaluation: {num_episodes: !!int ''}",
    "no truth value": "evaluation: {num_episodes: !!bool maybe}",
    "no time": "evaluation: {num_episodes: !!timestamp now}",
    "a mapping as a key": "? {a: b}\n: 3",
    "NUL": "environment: \x00",
}


@pytest.mark.parametrize("name", BAD)
def test_it_is_a_config_error(tmp_path: Path, name: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(BAD[name])
    for read in (EvalConfig.from_yaml, SuiteDefinition.from_yaml):
        with refused(ConfigError, str(path)):
            read(path)


@pytest.mark.parametrize("name", [name for name in BAD if len(BAD[name]) < 120_000 and name != "NUL"])
def test_it_is_a_usage_error_of_set(name: str) -> None:
    """An argument of a program has at most 128 KiB."""
    outcome = cli_world.call(
        "run", "--env", "CartPole-v1", "--policy", "random", "--set", f"policy.policy_kwargs={BAD[name]}"
    )
    assert outcome.exit_code == ExitCode.USAGE, outcome.output


def test_aliases_are_shared_as_before(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "environment: {env: CartPole-v1, env_kwargs: &a {x: [1, 2], y: &b 0x10}}\n"
        "policy: {policy: random, policy_kwargs: {a: *a, b: *b, c: {<<: *a, y: 1_000}}}\n"
    )
    arguments = EvalConfig.from_yaml(tmp_path / "c.yaml").to_dict()["policy"]["policy_kwargs"]
    given = {"x": [1, 2], "y": 16}
    assert arguments == {"a": given, "b": 16, "c": given | {"y": 1000}}


def test_long_comments_are_read(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(GAME + "# a comment\n" * 200_000)
    assert EvalConfig.from_yaml(tmp_path / "c.yaml").to_dict()["environment"]["env"] == "CartPole-v1"


def test_a_config_may_be_a_pipe() -> None:
    read, write = os.pipe()
    os.write(write, GAME.encode())
    os.close(write)
    assert EvalConfig.from_yaml(f"/dev/fd/{read}").to_dict()["environment"]["env"] == "CartPole-v1"
    os.close(read)


def test_a_config_of_many_conditions_is_read(tmp_path: Path) -> None:
    rows = "".join(f"    - {{id: c{number}, gravity: {number}.5}}\n" for number in range(5000))
    (tmp_path / "c.yaml").write_text(f"{GAME}evaluation:\n  conditions:\n{rows}")
    assert len(EvalConfig.from_yaml(tmp_path / "c.yaml").to_dict()["evaluation"]["conditions"]) == 5000


def test_tuples_are_the_only_objects_of_python() -> None:
    """Other tags of Python are an error everywhere, and run nothing."""
    text = "betas: !!python/tuple [0.9, !!python/tuple [1, 2]]\n"
    assert compose_yaml(text, Path("x.yaml"))[0] == {"betas": (0.9, (1, 2))}
    for tag in ("object/apply:os.system [ls]", "name:os.system", "module:os", "object:os.x {}", "tuple x"):
        with refused(ConfigError, "x.yaml"):
            compose_yaml(f"a: !!python/{tag}\n", Path("x.yaml"))
    with refused(ConfigError, "x.yaml"):
        compose_yaml("? !!python/tuple [1, [2]]\n: 3\n", Path("x.yaml"))
