"""Recognition of secrets by name, by place and by value, and of values that are not secrets."""

from __future__ import annotations

import json
import os
import pickle
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rl_eval import EvalConfig, evaluate
from rl_eval.cli.evaluated import policy_source
from rl_eval.config.settings import EvalSettings
from rl_eval.errors import ConfigError, EvalError, message_of, traceback_of
from rl_eval.errors.redaction import digest_secrets, learn, redact, redact_command, redact_text
from rl_eval.records.episode import MESSAGE_CAP, TRACEBACK_CAP, Fault
from tests.planted import leaking_files, leaks, secret
from tests.refused import refused


@pytest.mark.parametrize(
    "name",
    [
        "api_key", "apiKey", "API_KEY", "apikey", "key_api", "access_key_id", "private_key", "WANDB_KEY", "token",
        "hf_token", "HF_TOKEN_PATH", "password", "db-password", "passwd", "pwd", "client_secret", "auth",
        "Authorization", "credentials", "passphrase", "dbpassword", "authtoken", "accessToken", "sessiontoken",
        "secretkey", "accesskey", "sshkeys", "licence_key", "license_key", "activation_key", "subscription_key",
        "storage_key", "master_key", "connection_string", "ConnectionString", "conn_str", "connstr", "dsn", "pass",
        "PASS", "db_pass", "dbpass", "loginPass", "sim_user_pass", "cookie", "session-cookie", "jwt", "oauth", "creds",
        "passcode", "otp", "pw", "slack_webhook", "x-api-key", "encryption_key", "clientsecret",
    ],
)  # fmt: skip
def test_a_name_makes_a_secret(name: str) -> None:
    assert redact({"a": [{name: "value"}, {name: {"inner": ["one", b"two"]}}]}) == {
        "a": [{name: "***"}, {name: {"inner": ["***", "***"]}}]
    }


@pytest.mark.parametrize(
    "name",
    [
        "info_keys", "obs_key", "keyboard", "monkey", "hotkey", "key_dim", "tokenizer", "tokenization", "author",
        "authority", "secretary", "pass_rate", "n_passes", "bypass", "low_pass", "lowpass", "forward_pass", "compass",
        "pad_token", "eos_token", "connection", "string", "cookiecutter", "pattern", "pin", "session_id", "weights",
    ],
)  # fmt: skip
def test_other_names_do_not(name: str) -> None:
    assert redact({name: "butter_2x", "inner": [{name: ["a_1"]}]}) == {name: "butter_2x", "inner": [{name: ["a_1"]}]}


def test_nor_does_the_name_of_what_can_be_no_secret() -> None:
    """A number of tokens, a flag, nothing, and a key that does not look random."""
    values = {
        "num_tokens": 512, "max_tokens": 512, "auth": True, "token": None, "password": "", "key": "pixels", "seed": 7,
    }  # fmt: skip
    assert redact(values) == values
    assert redact({"key": "ab12cd34ef56ab12cd34", "password": 123456, "secret": 1.5}) == dict.fromkeys(
        ("key", "password", "secret"), "***"
    )


def test_what_follows_an_option_is_named_by_it() -> None:
    args = ["--token", "abc", "--verbose", "run", "--password", 123456, "--quiet", "--api-key=abc"]
    shown = ["--token", "***", "--verbose", "run", "--password", "***", "--quiet", "--api-key=***"]
    assert redact({"args": args}) == {"args": shown}
    assert not leaks(json.dumps(digest_secrets({"args": ["--token", secret("option")]})))


V = "Zq7Xw9Kp3LmR8tYv01"
"""A value that looks like a secret under no name."""


FORMS: list[tuple[Any, Any]] = [
    (f"Bearer {V}", "Bearer ***"),
    (f"Authorization: Bearer {V}", "Authorization: ***"),
    ([f"Authorization: Token {V}"], ["Authorization: ***"]),
    ("curl -H 'Authorization: Basic dXNlcjpwYXNz' h", "curl -H 'Authorization: ***' h"),
    (f"Basic {V}=", "Basic ***"),
    (f"X-Api-Key: {V}", "X-Api-Key: ***"),
    (f"Cookie: session={V}; theme=dark", "Cookie: ***"),
    (f'{{"password": "{V}", "user": "me"}}', '{"password": ***, "user": "me"}'),
    (f'{{"user":"me","dbpassword":"a \\"b\\" {V}"}}', '{"user":"me","dbpassword":***}'),
    (f"{{'token': '{V}', 'n': 3}}", "{'token': ***, 'n': 3}"),
    ('{"password": 123456}', '{"password": ***}'),
    (f"user: me\npassword: {V}\nsize: 3", "user: me\npassword: ***\nsize: 3"),
    ("password: hunter", "password: ***"),
    (f"- token: '{V}'", "- token: ***"),
    (f"sim --user me --password {V} --fast", "sim --user me --password *** --fast"),
    (f"sim --auth-token '{V} 2' x", "sim --auth-token *** x"),
    ({"name": "password", "value": V}, {"name": "password", "value": "***"}),
    ({"Name": "PASSWORD", "Value": V}, {"Name": "PASSWORD", "Value": "***"}),
    ([{"key": "API_TOKEN", "value": V, "n": 1}], [{"key": "API_TOKEN", "value": "***", "n": 1}]),
    (f"sk-{V}", "***"),
    (f"use sk-proj-{V}_x-2, please", "use ***, please"),
    (f"ghp_{V}", "***"),
    (f"github_pat_{V}_{V}", "***"),
    (f"hf_{V}", "***"),
    ("AKIAIOSFODNN7EXAMPLE", "***"),
    (f"-----BEGIN RSA PRIVATE KEY-----\n{V}\n-----END RSA PRIVATE KEY-----\nx", "***\nx"),
    (f"-----BEGIN PRIVATE KEY-----\n{V}", "***"),
    (f"a=1 dbpassword={V}", "a=1 dbpassword=***"),
]


@pytest.mark.parametrize("number", range(len(FORMS)))  # A test's name is in a variable of its process.
def test_a_form_makes_a_secret(number: int) -> None:
    """In a configuration, in its identity, which stays as it is when it is redacted again, and in printed text."""
    value, masked = FORMS[number]
    assert redact({"a": value}) == {"a": masked}
    assert V not in json.dumps(digest_secrets({"a": value}))
    assert redact({"a": masked}) == {"a": masked}
    digested = digest_secrets({"a": value})
    assert digest_secrets(digested) == redact(digested) == digested
    if isinstance(value, str):
        assert redact_text(value) == masked


@pytest.mark.parametrize(
    "text",
    [
        "my.auth:make_policy_v2",
        "secret_env:Env2d",
        "key: pixels_v2",
        "rl_eval cannot keep your key: /tmp/pytest-of-root/pytest-150/state/rl_eval/key",
        "def __init__(self, token: str, auth: tuple[str, int]) -> None:",
        "KeyError: 'token'",
        "unexpected token: END",
        "auth: false, token: null, password: none",
        "Args(auth=True, token=None)",
        "Basic CartPole-v1 and a bearer certificate",
        "Basic authentication",
        "num_tokens: 512 tokenizer: bert_2b pass_rate: 0.95",
        '{"num_tokens": 512, "tokenizer": "bert_2b", "pass_rate": "0.95", "obs_key": "image_2"}',
        "sim --tokenizer bert_2b --pass-rate 0.9",
        "sk-learn-0.24 and task-resnet50-pretrained-v2",
        "hf_transformers_model_v2_base",
        "AKIA is a prefix",
        "--token --quiet",
    ],
)
def test_other_texts_do_not(text: str) -> None:
    assert redact({"a": text, "b": [text]}) == {"a": text, "b": [text]}
    assert redact_text(text) == text


@pytest.mark.parametrize("name", ["name", "key"])
def test_a_name_and_a_value_that_are_not_a_secret_keep_their_place(name: str) -> None:
    """The digest of a secret below them is that of its own keys."""
    value = {name: "camera", "value": {"api_key": "abc"}}
    assert digest_secrets(value)["value"] == digest_secrets({"value": {"api_key": "abc"}})["value"]


def test_secret_variables_of_this_process_are_masked_in_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their names and forms, also if they are set later; a simulator's error may quote them."""
    names = ("SIM_API_KEY", "DB_PASSWORD", "LICENCE_KEY", "DATABASE_URL", "SIM_ASSETS", "PASS_RATE")
    for name in names:
        value = f"{secret(name)}-x"
        monkeypatch.setenv(name, f"x://u:{value}@h" if name == "DATABASE_URL" else value)
    for name in names[:4]:
        assert not leaks(redact_text(f"401 for {secret(name)}-x"))
    for name in names[4:]:
        assert leaks(redact_text(f"{secret(name)}-x"))
    assert leaks(json.dumps(redact({"a": f"{secret('DB_PASSWORD')}-x"})))


def test_a_number_of_many_digits_is_text_like_any_other() -> None:
    """Python converts no more than 4300 of them."""
    assert redact_text("password=" + "9" * 5000) == "password=***"


def test_what_is_no_text_and_no_number_is_left_as_it_is() -> None:
    values = {"secrets": np.zeros(2), "token": object()}
    learn(values)
    assert redact(values) == values


def test_variables_of_runners_are_secrets_unless_they_steer_a_library() -> None:
    variables = {
        "OMP_NUM_THREADS": "1", "MUJOCO_GL": "egl", "CUDA_VISIBLE_DEVICES": "0", "PYTHONPATH": "/src", "HF_HOME": "/hf",
        "RAY_DEDUP_LOGS": "0", "RL_EVAL_VERBOSE": "1", "TZ": "UTC",
    }  # fmt: skip
    hidden = {"RAY_AUTH_TOKEN": "x", "PYTHON_KEYRING_PASSWORD": "x", "STAGE": "x", "DATABASE": "x", "OPENAI": "x"}

    masked = dict.fromkeys(hidden, "***")
    assert redact({"env_vars": variables | hidden}, "runners", "runtime_env") == {"env_vars": variables | masked}


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("s3://AKIA:abc@bucket/path", "s3://***@bucket/path"),
        ("s3://AKIA:a/b+c/d@bucket/path", "s3://***@bucket/path"),
        ("see https://me@host/x, and more", "see https://***@host/x, and more"),
        ("abfs://c@a.dfs.core.windows.net/x", "abfs://***@a.dfs.core.windows.net/x"),
        ("x://h/p?client_secret=ab/c&region=eu", "x://h/p?client_secret=***&region=eu"),
        ("s3://b/p?endpoint_override=localhost:9000&scheme=http", None),
        ("'gs://b/p?sig=abc'", "'gs://b/p?sig=***'"),
        ("s3://bucket/path@v1", None),
        ("file:///home/me@work/x", None),
        ("http://127.0.0.1:8265/x?flag", None),
        ("user@host and a?b=c", None),
        ("https://h/x;token=abc", "https://h/x;token=***"),
        ("AccountName=me;AccountKey=ab/c==;Suffix=net", "AccountName=me;AccountKey=***;Suffix=net"),
        ("host=h password='a b' user=me", "host=h password=*** user=me"),
        ("client(api_key='ab", "client(api_key=***"),
        ("num_tokens=512 tokenizer=bert key=pixels token==other RAY_AUTH_MODE=token", None),
    ],
)
def test_uris_show_where_and_not_who(text: str, redacted: str | None) -> None:
    assert redact_text(text) == (text if redacted is None else redacted)


def test_a_command_line_is_redacted_by_name_and_place() -> None:
    command = [
        "rl-eval", "run", "c.yaml", "--set", "environment.env_kwargs.api_key=abc", "--set=policy.policy_kwargs.token=x",
        "--set", "runners.runtime_env.env_vars.DATABASE=abc", "--set", "runners.runtime_env={env_vars: {A: b}}",
        "--set", "runners.runtime_env.env_vars.OMP_NUM_THREADS=1", "--password", "abc", "--api-key=abc", "--seed", "7",
        "--output", "s3://a:b@c/d?sig=e", "--token", "--quiet",
    ]  # fmt: skip
    assert redact_command(command) == [
        "rl-eval", "run", "c.yaml", "--set", "environment.env_kwargs.api_key=***",
        "--set=policy.policy_kwargs.token=***", "--set", "runners.runtime_env.env_vars.DATABASE=***",
        "--set", "runners.runtime_env=***", "--set", "runners.runtime_env.env_vars.OMP_NUM_THREADS=1",
        "--password", "***", "--api-key=***", "--seed", "7",
        "--output", "s3://***@c/d?sig=***", "--token", "--quiet",
    ]  # fmt: skip


def test_what_a_configuration_held_is_masked_wherever_it_turns_up() -> None:
    """In URIs, JSON and reprs too; a text in several lines also line by line."""
    key = "-----BEGIN-----\nMIIpl4ntedline1\nMIIpl4ntedline2"
    learn(
        {
            "env_vars": {"DATABASE": secret("variable") + '"quoted"'},
            "private_key": key,
            "uri": f"x://u:{secret('uri')}@h",
        }
    )
    for text in (secret("variable") + '"quoted"', key, secret("uri")):
        shown = [text, repr(text), json.dumps({"a": text}), f"prefix{text}suffix", *text.splitlines()]
        assert not leaks(redact_text(" ".join(shown))), shown


def test_what_is_short_common_or_part_of_a_digest_is_left_in_texts() -> None:
    learn({"env_vars": {"A": "12345", "B": "evaluation", "C": "abc123"}, "password": "pl4ntpw"})
    text = "12345 evaluation d0abc1234f"
    assert redact_text(f"{text} abc123 pl4ntpw") == f"{text} *** ***"


@pytest.mark.parametrize("value", ["100000", "0.12345", "characters", "Simple", "ENABLED"])
def test_plain_words_and_numbers_are_left_in_texts(value: str) -> None:
    """Whatever they are called: they would be masked where they mean something else; but not very long words."""
    for name in ("STAGE", "TOKENS", "AUTH"):
        learn({"env_vars": {name: value}, name: value, "uri": f"x://me:{value}@h?a={value}"})
    learn({"password": "correcthorsebatterystaple"})
    assert redact_text(f"after {value} correcthorsebatterystaple") == f"after {value} ***"


def test_paths_that_exist_are_left_in_texts(tmp_path: Path) -> None:
    learn({"env_vars": {"ASSETS": str(tmp_path), "LONG": "/" + "a" * 9000}})
    assert redact_text(f"{tmp_path}/robot.xml is missing") == f"{tmp_path}/robot.xml is missing"


def test_what_is_known_changes_no_config_and_no_identity() -> None:
    """A result says what was evaluated, whatever else the same process was given as a secret."""

    def built() -> EvalSettings:
        config = EvalConfig().environment("CartPole-v1", env_kwargs={"model": "/no-such/assets/robot.xml"})
        config.policy("CartPole-v1:p", weights="/no-such/assets/net.pt")
        return config.runners(num_runners=1, runtime_env={"env_vars": {"ASSETS": "/no-such/assets"}}).build()

    settings = built()
    described = settings.described()
    assert described["environment"]["env_kwargs"] == {"model": "/no-such/assets/robot.xml"}
    assert described["policy"]["weights"] == "/no-such/assets/net.pt"
    assert redact(described) == described, "what is saved is what was signed"
    assert redact(settings.identity()) == settings.identity()
    assert redact_text("/no-such/assets/net.pt") == "***/net.pt"


def test_every_error_of_ours_is_redacted_in_its_own_process_and_in_others() -> None:
    learn({"password": secret("error")})
    error = ConfigError(f"bad value {secret('error')} in s3://me:you@there", value=secret("error"), fix=secret("error"))
    assert (str(error), error.value, error.fix) == ("bad value *** in s3://***@there. ***", "***", "***")
    assert vars(pickle.loads(pickle.dumps(error))) == vars(error)
    assert isinstance(error, EvalError)


def test_a_fault_is_redacted_before_it_is_cut() -> None:
    """Half a secret is half a secret too many."""
    learn({"password": secret("fault") * 3})
    for length in (MESSAGE_CAP - 10, TRACEBACK_CAP - 10):
        described = Fault.describe(ValueError("x" * length + secret("fault") * 3))
        assert not leaks(" ".join(described))


def config(**env_kwargs: Any) -> EvalConfig:
    return EvalConfig().environment("CartPole-v1", env_kwargs=env_kwargs)


def test_the_identity_tells_secrets_apart_without_holding_them() -> None:
    identity = config(api_key=secret("a"), url=f"https://u:{secret('b')}@h").build().identity()
    assert not leaks(json.dumps(identity))
    assert identity == config(api_key=secret("a"), url=f"https://u:{secret('b')}@h").build().identity()
    for other in (
        config(api_key="x", url=f"https://u:{secret('b')}@h"),
        config(api_key=secret("a"), url="https://u:x@h"),
    ):
        assert other.build().identity() != identity


def test_a_digest_never_changes_and_is_kept_by_a_second_redaction() -> None:
    """It is in the identity of every log."""
    found = digest_secrets({"api_key": "abc", "url": "https://a:b@c"}, "environment", "env_kwargs")
    assert found == {"api_key": "*** (3f47)", "url": "https://***@c (56c2)"}
    assert redact(found) == digest_secrets(found) == found


@pytest.mark.parametrize(
    ("values", "key", "shown"),
    [
        ({"runtime_env": {"env_vars": {"DATABASE": "abc"}}}, "runtime_env", "{'env_vars': {'DATABASE': '***'}}"),
        ({"num_runners": 1, "num_cpus_per_runner": "s3://a:b@c"}, "num_cpus_per_runner", "s3://***@c"),
        ({"runtime_env": "K=abc"}, "runtime_env", "***"),
        ({"runtime_env": ["K=abc"]}, "runtime_env", "['***']"),
    ],
)
def test_messages_about_settings_hold_no_secrets(values: dict[str, Any], key: str, shown: str) -> None:
    with refused(ConfigError, f"runners.{key}", value=shown) as caught:
        config().runners(**values).build()
    assert shown in str(caught.value)


@pytest.mark.parametrize(
    ("values", "key"),
    [({"runners": "K=pl4nted"}, "runners"), ({"runners": ["K=pl4nted"]}, "runners"), ("K=pl4nted", "config")],
)
def test_text_where_a_mapping_should_be_is_not_quoted(values: Any, key: str) -> None:
    with refused(ConfigError, key) as caught:
        EvalConfig.from_dict(values)
    assert not leaks(f"{caught.value} {caught.value.value} {config(api_key=secret('repr'))!r}")


# ------------------------------------------------------------------------------ values that change, long texts


def test_a_variable_that_is_renewed_under_its_name_is_masked_and_so_are_its_former_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The number of variables stays the same; simulators renew tokens, and URIs with passwords, while they run."""
    texts = []
    for round_ in ("first", "other", "third"):
        monkeypatch.setenv("SIM_PASSWORD", f"{secret(round_)}-a")
        monkeypatch.setenv("SIM_URL", f"db://me:{secret(round_)}-b@there")
        texts += [f"no login with {secret(round_)}-{end}" for end in "ab"]
        assert not leaks(" ".join(map(redact_text, texts)))


class Renews(gym.Env[Any, Any]):
    """Renews its token in each reset, and quotes it in an error."""

    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    resets = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        Renews.resets += 1
        os.environ["SIM_TOKEN"] = secret(f"renewed{Renews.resets}")
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        raise RuntimeError(f"cannot log in with {os.environ['SIM_TOKEN']}")


@pytest.mark.parametrize("runner", ["single_agent", pytest.param("subprocess", marks=pytest.mark.process)])
def test_a_renewed_token_is_in_no_fault_and_no_file(
    runner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in an environment with its own process, whose variables the runner does not know."""
    monkeypatch.setenv("SIM_TOKEN", secret("at start"))
    config = EvalConfig().environment(Renews).policy(lambda observations: np.zeros(len(observations), np.int64))
    result = evaluate(config.runners(runner=runner).evaluation(num_episodes=2), output=tmp_path / "log")
    result.save(tmp_path / "result")
    assert len(result.faults) == 6
    assert all("cannot log in with ***" in f"{fault.message} {fault.traceback}" for fault in result.faults)
    assert list(leaking_files(tmp_path)) == []


HUGE = 300_000_000


def notes(error: Exception) -> Exception:
    if hasattr(error, "add_note"):
        error.add_note("N" * HUGE)
    return error


def causes(error: Exception) -> Exception:
    for _ in range(1_000):
        cause, error = error, ValueError("C" * 100_000)
        error.__cause__ = cause
    return error


@pytest.mark.parametrize("grown", [lambda error: ValueError("A" * HUGE), notes, causes])
def test_a_text_is_cut_before_it_is_searched(grown: Any) -> None:
    """300 MB took minutes."""
    began = time.perf_counter()
    name, message, traceback = Fault.describe(grown(ValueError("short")))
    assert (name, len(message) <= MESSAGE_CAP, len(traceback) <= TRACEBACK_CAP) == ("ValueError", True, True)
    error = EvalError("A" * HUGE, value="A" * HUGE, fix="A" * HUGE)
    assert len(str(error)) + len(str(error.value)) < 1_000_000
    assert time.perf_counter() - began < 30


def test_the_frames_of_a_huge_error_are_kept() -> None:
    def fail() -> None:
        raise ValueError("A" * 1_000_000)

    with pytest.raises(ValueError, match="AAA") as caught:
        fail()
    assert "in fail" in Fault.describe(caught.value)[2]


def test_the_end_of_a_long_chain_of_errors_is_kept() -> None:
    """The last error is at the end, whatever the lengths of the others add up to."""
    cause: Exception | None = None
    for _ in range(130):
        error, last = ValueError("a" * 900), RuntimeError("the last error")
        error.__cause__, last.__cause__ = cause, error
        cause = error
        assert "the last error" in traceback_of(last)


@pytest.mark.parametrize("length", [99_950, 99_990, 100_000, 3_950, 3_995])
def test_a_cut_leaves_no_part_of_a_secret(length: int) -> None:
    learn({"password": f"{secret('whole')} {secret('cut')}" * 3})
    error = ValueError("x" * length + f"{secret('whole')} {secret('cut')}" * 3 + "y" * 100_000)
    for text in (message_of(error), traceback_of(error)):
        assert not leaks(text)
        assert "***" in text or text.rstrip().endswith("(cut)")


PARTS = (
    "pw=",
    "pw='",
    'pw="\\"',
    "key=",
    "key: ",
    '"key":"',
    "://",
    "://a:",
    "://a:b@",
    "://?a=",
    "--token ",
    "Bearer ",
)
PARTS += (
    "authorization: ",
    "sk-aA1",
    "-----BEGIN A-----",
    'token: "',
    "token=\"'",
    "a_",
    "pw=true))",
    "\x1b[",
    "\x1b]",
)


@pytest.mark.parametrize("part", PARTS)
def test_the_time_of_the_search_grows_with_the_length_only(part: str) -> None:
    """A quadratic search of this length would take hours."""
    began = time.perf_counter()
    redact({"text": part * (2_000_000 // len(part))})
    redact_text(part * 1_000_000)
    assert time.perf_counter() - began < 100


# ------------------------------------------------------------------------------ files, and characters that control


@pytest.mark.parametrize("path", ["/etc/passwd", "/run/secrets/db-password", "C:\\state\\token", "../api_key"])
def test_a_file_is_not_the_name_of_a_secret(path: str) -> None:
    for text in (f"--policy {path}: unknown policy type", f"open {path}: Permission denied", f"'{path}': unreadable"):
        assert redact_text(text) == text


@pytest.mark.parametrize("path", ["/prod/db/password", "C:\\cfg\\api_key", "../token", "secret/data/pwd"])
@pytest.mark.parametrize("value", ["Hunter2Secret!", "abcdEF12345"])
def test_a_path_of_a_parameter_is_the_name_of_a_secret(path: str, value: str) -> None:
    assert redact_text(f"SSM {path}: {value} is not valid") == f"SSM {path}: *** is not valid"
    assert redact({"note": f"{path}: {value}"}) == {"note": f"{path}: ***"}


@pytest.mark.parametrize("name", ["/etc/passwd", "passwd", "token"])
def test_a_policy_that_is_no_policy_file_is_named_with_the_reason(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("token").touch()
    with refused(ConfigError, value=name) as caught:
        policy_source(name)
    assert "***" not in str(caught.value)


def test_a_variable_of_any_bytes_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a value of the configuration that no file system can encode."""
    monkeypatch.setenv("CAFE_TOKEN", f"caf\udce9{secret('bytes')}")
    learn({"password": f"\ud800{secret('half')}"})
    assert redact_text(f"with {os.environ['CAFE_TOKEN']} and \ud800{secret('half')}") == "with *** and ***"


def test_a_program_may_replace_the_environment_with_a_dict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ) | {"DICT_TOKEN": secret("dict")})
    assert redact_text(f"with {secret('dict')}") == "with ***"


CONTROLS = "\x1b[36mray::A.run()\x1b[39m \x1b]0;title\x07\x9b31mred\x1b(B\x00\x08\u202egnp.exe\u2066\u200f\r\n"
CONTROLS += "next\u2028last\ttab"


def test_a_text_has_no_terminal_codes_and_no_marks_of_direction() -> None:
    assert redact_text(CONTROLS) == "ray::A.run() redgnp.exe\nnext\nlast\ttab"
    assert Fault.describe(ValueError(CONTROLS))[1] == redact_text(CONTROLS)
    assert str(ConfigError(CONTROLS)) == redact_text(CONTROLS)


def test_a_secret_is_found_between_terminal_codes() -> None:
    learn({"password": secret("coloured")})
    coloured = "\x1b[1m".join(secret("coloured"))
    assert redact_text(f"with {coloured}") == "with ***"


def test_a_file_name_that_is_not_utf8_stays() -> None:
    assert redact_text("run\udcff") == "run\udcff"
