"""The checkpoint watcher: every checkpoint once, none half-written, none lost to a kill, and an honest best."""

import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from contextlib import closing
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file
from waiting import eventually

from rl_eval import EvalConfig, evaluate, load, replay
from rl_eval.atomic_write import is_temporary
from rl_eval.cli.exits import ExitCode
from rl_eval.config.settings import make_settings
from rl_eval.errors import ClusterError, ConfigError, LogOwned
from rl_eval.training.watching import Watcher, WatchOptions, watcher
from rl_eval.training.watching.checkpoints import (
    Checkpoint,
    CheckpointFolder,
    companions_of,
    compile_step_pattern,
    copy_checkpoint,
    without_companions,
)
from rl_eval.training.watching.curve import curve_png, describe
from rl_eval.training.watching.journal import CheckpointScore, Entry, Journal
from tests.refused import refused, untold
from tests.unit.cli_world import call, environment, printed, start
from tests.unit.watch_world import (
    CONFIG,
    age,
    best,
    copies,
    curve,
    fingerprints,
    log_of,
    make_world,
    rows_in_logs,
    save,
    steps,
    watch_args,
    watch_once,
    weights_of_step,
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a training run; drawing takes longest, and has a test of its own."""
    monkeypatch.setattr(watcher, "curve_png", lambda entries, best, title: repr((entries, best)).encode())
    monkeypatch.syspath_prepend(tmp_path)
    return make_world(tmp_path, monkeypatch)


def make_watcher(said=None, config=CONFIG, submitted=lambda handle: None, **options):
    usual = {"folder": Path("run"), "pattern": "*.safetensors", "output": Path("run/eval")}
    say = [].append if said is None else said.append
    return Watcher(make_settings(config), WatchOptions(**(usual | options)), say, lambda: False, submitted)


def run_watcher(*args, **options):
    with closing(make_watcher(*args, **options)) as watching:
        watching.run(0.0, once=True)


def evaluated(path, **evaluation):
    """Return the result of a plain evaluation of a weights file."""
    return evaluate(EvalConfig.from_yaml("c.yaml").policy(weights=str(path)).evaluation(**evaluation))


ENVIRONMENT = """
from pathlib import Path

import gymnasium as gym


class Changed(gym.Wrapper):
    resets = 0

    def reset(self, **given):
        self.resets += {leak}
        return self.env.reset(**given)

    def step(self, action):
        observation, reward, *rest = self.env.step(action)
        return observation, (reward + self.resets) * {worth}, *rest


def make(context):
    if {licensed} and not Path("licence").exists():
        raise RuntimeError("no licence server")
    return Changed(gym.make("CartPole-v1"))
"""


def write_environment(name, leak=0, worth=1, licensed=False):
    """Write a module with CartPole whose rewards depend on the number of resets, on its code, or on a file."""
    Path(f"{name}.py").write_text(ENVIRONMENT.format(leak=leak, worth=worth, licensed=licensed))


def configure(**sections):
    Path("c.yaml").write_text(yaml.safe_dump(CONFIG | sections))


# ------------------------------------------------------------------------------ the curve and the best


def test_a_folder_of_checkpoints_becomes_a_curve(folder):
    """In the order of training, with the numbers of a plain evaluation of each file; ``--json`` prints the rows.

    Each is an ordinary evaluation log, whose provenance names the trainer's file.
    """
    configure(evaluation=CONFIG["evaluation"] | {"return_bounds": [0, 500]})
    paths = {step: save(step, good=step == 20) for step in (100, 3, 20)}
    outcome = watch_once("--json")
    assert outcome.exit_code == ExitCode.COMPLETE, outcome.output
    assert steps() == [3, 20, 100]
    for row, told in zip(curve(), printed("watch", outcome.stdout), strict=True):
        result = evaluated(paths[int(row["step"])])
        assert row["fingerprint"] == told["fingerprint"] == result.fingerprint
        assert float(row["episode_return_mean"]) == told["episode_return_mean"] == result.mean_return
        assert float(row["episode_return_ci_low"]) == result.interval.low
        assert float(row["episode_return_ci_high"]) == result.interval.high
        assert (row["status"], row["num_episodes"], row["num_failed_episodes"]) == ("complete", "6", "0")
        assert log_of(row).manifest.weights["version"] == int(row["step"])
        log = Path("run/eval/evaluations", row["evaluation"])
        assert load(log).fingerprint == row["fingerprint"]
        assert load(log).provenance["config"]["policy"]["weights"] == str(paths[int(row["step"])].resolve())
    assert replay(log, 2).identical
    mean = f"{evaluated(paths[20]).mean_return:.6g}"
    assert any(untold(line, 20, "model_20.safetensors", mean) == [] for line in outcome.stderr.splitlines())


def test_the_picture_can_be_decoded(folder, monkeypatch):
    """Without matplotlib there is the table alone, and one line says so."""
    monkeypatch.setattr(watcher, "curve_png", curve_png)
    from matplotlib.image import imread

    save(1)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.figure", None)
        outcome = watch_once()
        assert (outcome.exit_code, outcome.stdout.count("matplotlib")) == (ExitCode.COMPLETE, 1)
    assert (steps(), Path("run/eval/curve.png").exists()) == ([1], False)
    save(2, good=True)
    watch_once()
    picture = imread("run/eval/curve.png")
    assert picture.shape == (540, 960, 4)
    assert ((picture[..., 0] > 0.7) & (picture[..., 1] < 0.3)).any(), "the best is red"


def test_the_title_of_the_picture_may_contain_dollar_signs():
    """Matplotlib would read the text between them as mathematics."""
    pytest.importorskip("matplotlib")
    entry = Entry(Checkpoint("m", 1, 0.0, ""), "1", selection=CheckpointScore("complete", mean=1.0, low=0.5, high=1.5))
    assert curve_png([entry], None, "run_$a_$b").startswith(b"\x89PNG")


def test_the_best_is_tested_again_on_episodes_that_no_choice_has_seen(folder):
    for step in (1, 2, 3):
        save(step, good=step != 1)
    watch_once("--held-out", 9)
    winner = max(curve(), key=lambda row: float(row["episode_return_mean"]))
    found, path = best(), Path("run", winner["name"])
    selection, held_out = evaluated(path), evaluated(path, num_episodes=9, first_index=6)
    assert found["name"] == winner["name"]
    assert found["selection"]["fingerprint"] == selection.fingerprint
    assert found["held_out"]["fingerprint"] == held_out.fingerprint
    assert found["held_out"]["mean"] == held_out.mean_return != selection.mean_return
    assert not set(selection.plan.seeds) & set(held_out.plan.seeds)
    assert (found["held_out"]["first_index"], found["held_out"]["num_episodes"]) == (6, 9)
    assert Path("run/eval", found["checkpoint"]).read_bytes() == path.read_bytes()
    assert [row["name"] for row in curve() if row["best"] == "true"] == [winner["name"]]
    assert [row["name"] for row in curve() if row["held_out_return_mean"]] == [winner["name"]]
    assert float(winner["held_out_return_mean"]) == held_out.mean_return


def test_a_better_one_replaces_the_best(folder):
    """A worse or equal one does not; only the best one's copy is kept."""
    save(1)
    watch_once("--held-out", 0, "--output", "once")
    assert best("once")["held_out"] is None
    assert not Path("once/held_out").exists()
    watch_once()
    assert best()["step"] == 1
    shutil.copy("run/model_1.safetensors", "run/model_5.safetensors")
    watch_once()
    assert best()["step"] == 1
    save(7, good=True)
    watch_once()
    assert best()["step"] == 7
    assert copies() == [best()["checkpoint"]]
    assert len(list(Path("run/eval/held_out").iterdir())) == 2


@pytest.mark.parametrize(("status", "mean"), [("partial", 9.0), ("failed", 9.0), ("complete", None), ("complete", 1.0)])
def test_only_a_complete_evaluation_leads(folder, status, mean):
    """Not the mean of the episodes that happened to complete; among equals the first leads."""
    known = Journal(folder, {})
    for step, score in ((2, CheckpointScore("complete", mean=1.0)), (1, CheckpointScore(status, mean=mean))):
        known.put(Entry(Checkpoint(f"m{step}", step, 0.0, ""), f"{step}", selection=score))
    assert known.candidate.info.step == (1 if (status, mean) == ("complete", 1.0) else 2)
    assert Journal(folder, {}).candidate == known.candidate


@pytest.mark.parametrize("leak", [0, 1])
def test_a_failed_determinism_check_is_beside_each_number(folder, leak):
    """In the line of each checkpoint, in the table, and with both numbers of the best."""
    write_environment(f"watch_leaky{leak}", leak)
    save(1)
    outcome = watch_once("--set", f"environment.env=watch_leaky{leak}:make")
    (row,), found = curve(), best()
    warned = [row["determinism"], row["held_out_determinism"], found["selection"]["determinism"]]
    assert [bool(text) for text in warned] == [bool(leak)] * 3
    report = str(load(Path("run/eval/evaluations", row["evaluation"])).determinism)
    assert (report in outcome.stdout) == bool(leak)
    if leak:
        assert warned[0] == warned[2] == report
        assert sum(map(outcome.stdout.count, {*warned})) == 3
    repeatable = CheckpointScore(
        **{name: found["held_out"][name] for name in CheckpointScore.__match_args__} | {"determinism": ""}
    )
    told = describe(Entry(Checkpoint("m", 1, 0.0, ""), "1", held_out=repeatable), "m")["held_out"]["meaning"]
    assert (told == found["held_out"]["meaning"]) == (not leak)


# ------------------------------------------------------------------------------ each once


def test_nothing_is_evaluated_twice(folder):
    """Neither by the next call, nor if a file is only touched, nor if the curve is removed."""
    for step in (1, 2):
        save(step)
    watch_once()
    before, rows = fingerprints(), rows_in_logs()
    age("run/model_1.safetensors", -5)
    Path("run/eval/curve.csv").unlink()
    outcome = watch_once()
    assert outcome.exit_code == ExitCode.COMPLETE
    assert untold(outcome.stdout.splitlines()[0], 2) == []
    assert fingerprints() == before
    assert rows_in_logs() == rows == dict.fromkeys(rows, 6)
    save(1, good=True)
    watch_once()
    assert steps() == [1, 1, 2], "other contents under the same name are another checkpoint"
    assert len({row["digest"] for row in curve()}) == 3


def test_a_key_selects_the_weights_of_each_checkpoint(folder):
    configure(policy={**CONFIG["policy"], "weights_key": "model"})
    for step in (1, 2):
        torch.save({"model": weights_of_step(step), "optimizer": {"state": {}}}, f"run/model_{step}.pt")
    outcome = watch_once(checkpoints="run/*.pt")
    assert outcome.exit_code == 0, outcome.output
    assert [row["status"] for row in curve()] == ["complete", "complete"]


# ------------------------------------------------------------------------------ what a checkpoint is


def scanned(folder, pattern="**/*", step_pattern=None):
    return CheckpointFolder(folder, pattern, compile_step_pattern(step_pattern), folder / "eval")


def stable(pattern):
    """Return the one checkpoint of the run that stands still."""
    found = scanned(Path("run"), pattern)
    found.scan()
    [info] = found.scan()
    return info


def test_steps_are_read_from_names(tmp_path):
    expected = {
        None: {"model_1000_steps.zip": 1000, "checkpoint_000012": 12, "latest.zip": None, "a/b3/model_5.pt": 5},
        r"e(\d+)": {"ppo-v1_e7.zip": 7, "ppo.zip": None},
    }
    for pattern, names in expected.items():
        for name in names:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).touch()
        found = scanned(tmp_path, step_pattern=pattern)
        found.scan()
        assert names.items() <= {one.name: one.step for one in found.scan()}.items()


def test_checkpoints_without_a_step_follow_by_time(folder):
    for name, seconds in (("b", 50), ("a", 10), ("c", 90)):
        age(save(0, name=name + ".safetensors"), seconds)
    save(4)
    assert watch_once().exit_code == ExitCode.COMPLETE
    assert [row["name"].partition(".")[0] for row in curve()] == ["model_4", "c", "b", "a"]
    assert [row["step"] for row in curve()] == ["4", "", "", ""]


def test_a_checkpoint_must_hold_still(tmp_path):
    """One that is new, grows, or is written again in place is left for later; hidden files never match."""
    folder, file = scanned(tmp_path), tmp_path / "m1"
    (tmp_path / ".hidden").touch()
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "m9").touch()
    file.write_bytes(b"abc")
    assert folder.scan() == []
    assert folder.unstable == ["m1"]
    assert [one.name for one in folder.scan()] == ["m1"]
    grow, rewrite = (lambda: file.write_bytes(b"abcd")), (lambda: file.write_bytes(b"xyzw"))
    for change in (grow, lambda: age(file), rewrite, file.unlink):
        change()
        assert folder.scan() == []
    assert folder.unstable == []
    file.mkdir()
    (file / "part").write_bytes(b"1")
    folder.scan()
    assert "m1" in [one.name for one in folder.scan()]
    (file / "part2").touch()
    assert "m1" not in [one.name for one in folder.scan()]


@pytest.mark.parametrize("as_folder", [False, True], ids=["files", "folders"])
def test_a_factory_can_load_checkpoints_itself(folder, as_folder):
    """Each has runners of its own; a torn one is skipped and the others are not."""
    configure(policy={"policy": "watch_factories:from_path", "policy_kwargs": {"scale": 2.0}})
    for step in (1, 2, 3):
        home = Path("run", f"model_{step}") if as_folder else Path("run")
        home.mkdir(exist_ok=True)
        path = save(step, step == 3, home, "weights" if as_folder else "model_{}")
        if step == 2:
            path.write_bytes(path.read_bytes()[:1000])
        age(path)
    outcome = watch_once("--as", "policy.policy_kwargs.path", checkpoints="run/model_*")
    assert outcome.exit_code == ExitCode.PARTIAL, outcome.output
    assert [row["status"] for row in curve()] == ["complete", "unreadable", "complete"]
    assert best()["step"] == 3
    kept = Path("run/eval", best()["checkpoint"])
    assert (kept / "weights" if as_folder else kept).is_file()


def make_models(*steps):
    """Write zip files that look like models of Stable-Baselines3 to anything that does not load them."""
    for step in steps:
        with zipfile.ZipFile(f"run/model_{step}.zip", "w") as archive:
            archive.writestr("data", "{}")
            archive.writestr("policy.pth", b"")


def settings_of_models(**kwargs):
    factory = "rl_eval.integrations.sb3:load_policy"
    return EvalConfig().environment("CartPole-v1").policy(factory, policy_kwargs=kwargs).build()


def test_each_model_brings_its_own_normalizer(folder):
    """Not one of another model in the config; one in the config for all stays, unless a model has another."""
    make_models(1, 2)
    models = {step: Path(f"run/model_{step}.zip").resolve() for step in (1, 2)}
    own = {step: Path(f"run/model_{step}_vecnormalize.pkl").resolve() for step in (1, 2)}
    for step in (1, 2):
        own[step].write_text(str(step))
        assert companions_of(models[step], settings_of_models()) == {"vecnormalize": own[step]}
    assert companions_of(models[1], settings_of_models(vecnormalize=False)) == {}
    of_one = settings_of_models(path=str(models[2]), vecnormalize=str(own[2]))
    assert without_companions(of_one).policy.policy_kwargs == {"path": str(models[2])}
    shared = settings_of_models(vecnormalize=str(own[2]))
    assert without_companions(shared) is shared
    assert companions_of(models[2], shared) == {}
    with refused(ConfigError, "policy.policy_kwargs.vecnormalize"):
        companions_of(models[1], shared)
    info, both = stable("*_1.zip"), {"vecnormalize": own[1]}
    assert copy_checkpoint(models[1], info, both, Path("copy"))
    assert Path("copy", own[1].name).read_text() == "1"
    own[1].rename("run/other_vecnormalize.pkl")
    assert copy_checkpoint(models[1], info, both, Path("copy")) is None, "the trainer has removed a part"


# ------------------------------------------------------------------------------ bad ones


def test_a_torn_file_is_skipped(folder):
    """It is not tried again, unless asked for; the others have their points. Weights of another network likewise."""
    for step in (1, 2, 4):
        save(step)
    torn, strange = Path("run/model_2.safetensors"), Path("run/model_3.safetensors")
    torn.write_bytes(torn.read_bytes()[:-100])
    save_file({"strange": torch.zeros(3)}, strange)
    age(torn), age(strange)
    assert watch_once().exit_code == ExitCode.PARTIAL
    assert [row["status"] for row in curve()] == ["complete", "unreadable", "unreadable", "complete"]
    assert str(torn.resolve()) in curve()[1]["reason"]
    again = watch_once()
    assert again.exit_code == ExitCode.PARTIAL
    assert untold(again.stdout, torn.name, strange.name) == [torn.name, strange.name]
    assert untold(watch_once("--retry-unreadable").stdout, torn.name, strange.name) == []
    save(2)
    assert watch_once().exit_code == ExitCode.PARTIAL
    assert [row["status"] for row in curve() if row["step"] == "2"] == ["unreadable", "complete"]


def test_a_young_one_that_cannot_be_loaded_is_left_for_later(folder):
    """It may still be being written, however slowly."""
    whole = save(1).read_bytes()
    Path("run/model_1.safetensors").write_bytes(whole[:200])
    assert watch_once().exit_code == ExitCode.PARTIAL
    assert not Path("run/eval/curve.csv").exists()
    Path("run/model_1.safetensors").write_bytes(whole)
    assert watch_once().exit_code == ExitCode.COMPLETE
    assert steps() == [1]


@pytest.mark.parametrize("models", [False, True], ids=["an empty file", "a model of a library"])
def test_if_nothing_can_be_loaded_the_watch_has_failed(folder, models):
    """For a model of a library the message says how it is named."""
    make_models(1)
    Path("run/model_1.safetensors").write_bytes(b"")
    outcome = watch_once("--retry-s", 0, checkpoints="run/*.zip" if models else "run")
    assert outcome.exit_code == ExitCode.FAILED
    assert (f"sb3:{Path('run/model_1.zip').resolve()}" in outcome.output) == models


@pytest.mark.parametrize("as_folder", [False, True], ids=["file", "folder"])
@pytest.mark.parametrize("fate", ["overwritten", "removed", "untouched"])
def test_a_checkpoint_that_changes_while_it_is_copied_gives_no_copy(folder, monkeypatch, as_folder, fate):
    """The next scan decides. If it is untouched, the output folder is at fault, and would be again."""
    home = Path("run/model_1") if as_folder else Path("run")
    home.mkdir(exist_ok=True)
    for name in ("first", "second") if as_folder else ("model_1",):
        (home / name).write_text("weights")
    copied = Path("run/model_1")

    def disturb(source, target, **more):
        if fate == "overwritten":
            Path(source).write_text("other weights")
        elif fate == "removed":
            shutil.rmtree(copied) if as_folder else copied.unlink()
        raise OSError(28, "No space left on device", str(target))

    info = stable("model_1")
    monkeypatch.setattr(shutil, "copyfile", disturb)
    monkeypatch.setattr(shutil.copytree, "__defaults__", (False, None, disturb, False, False))
    if fate == "untouched":
        with pytest.raises(OSError, match="No space left"):
            copy_checkpoint(copied, info, {}, Path("copy"))
        with refused(ClusterError, "--output", value=str(Path("run/eval").resolve())):
            run_watcher(pattern="model_1")
    else:
        assert copy_checkpoint(copied, info, {}, Path("copy")) is None


@pytest.mark.parametrize("key", ["policy.weights", "policy.policy_kwargs.path"])
@pytest.mark.parametrize("fate", ["overwritten", "removed"])
def test_a_file_that_changes_while_it_is_evaluated_gives_the_number_of_its_former_bytes(folder, key, fate):
    """Also in the second test, which begins afterwards."""
    path = save(1)
    expected = evaluated(shutil.copy(path, "former.safetensors"))
    config = CONFIG if key == "policy.weights" else CONFIG | {"policy": {"policy": "watch_factories:from_path"}}
    change = (lambda: save(1, good=True)) if fate == "overwritten" else (lambda: path.unlink(missing_ok=True))
    run_watcher(config=config, key=key, submitted=lambda handle: change())
    (row,) = curve()
    assert float(row["episode_return_mean"]) == expected.mean_return
    held_out = evaluated("former.safetensors", first_index=6)
    assert float(row["held_out_return_mean"]) == held_out.mean_return
    assert Path("run/eval", best()["checkpoint"]).read_bytes() == Path("former.safetensors").read_bytes()


# ------------------------------------------------------------------------------ the command line


def test_options_replace_a_config(folder):
    """As for ``rl-eval run``; the weights are the checkpoints'."""
    save(1)
    watch_once("--output", "one")
    options = ("--env", "CartPole-v1", "--policy", "rl_eval.policies.mlp:make_mlp", "-n", 6, "--seed", 3)
    runners = ("--runners", 0, "--envs-per-runner", 4)
    assert call("watch", "run", "--once", "--poll-s", 0.02, "--output", "two", *options, *runners).exit_code == 0
    assert curve("two")[0]["fingerprint"] == curve("one")[0]["fingerprint"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("c.yaml",), "CHECKPOINTS"),
        (("c.yaml", "run", "more.safetensors"), "CHECKPOINTS"),
        (("run", "c.yaml"), "rl-eval watch c.yaml run"),
        (("run/*.zip",), "--env"),
        (("run/*.safetensors", "--env", "CartPole-v1"), "--policy"),
        (("run/*.zip", "--env", "CartPole-v1"), "--trust"),
        (("run", "--env", "CartPole-v1", "--weights", "w.pt"), "--weights w.pt"),
        (("c.yaml", "run", "--as", "policy.device"), "--as policy.device"),
        (("c.yaml", "run", "--step-pattern", "("), "--step-pattern"),
        (("c.yaml", "run", "--held-out", 2**31 - 3), "first_index"),
        (("c.yaml", "run", "--output", "c.yaml"), "output folder"),
        (("c.yaml", "run/*.pt"), "run' matches '*.pt'"),
        (("c.yaml", "elsewhere"), "elsewhere'"),
    ],
)
def test_a_mistake_is_named_before_anything_runs(folder, arguments, named):
    save(1)
    make_models(1)
    Path("run/other").touch()
    outcome = call("watch", *arguments, "--once", "--poll-s", 0.02)
    assert outcome.exit_code == ExitCode.USAGE, outcome.output
    assert named in " ".join(outcome.stderr.split())
    assert not Path("run/eval/evaluations").exists()
    assert not Path("elsewhere").exists()


@pytest.mark.parametrize(
    ("checkpoints", "found", "home"),
    [
        ("run", ["model_1.safetensors", "other_2.safetensors"], "run"),
        ("run/model_*.safetensors", ["model_1.safetensors"], "run"),
        ("run/**/*_*.safetensors", ["model_1.safetensors", "other_2.safetensors", "deep/model_3.safetensors"], "run"),
        ("r?n/model_*.safetensors", ["run/model_1.safetensors"], "."),
        ("[odd] run", ["model_4.safetensors"], "[odd] run"),
        ("~/run/deep", ["model_3.safetensors"], "run/deep"),
    ],
)
def test_checkpoints_are_a_folder_or_a_glob(folder, monkeypatch, checkpoints, found, home):
    """The curve goes into the part without wildcards."""
    monkeypatch.setenv("HOME", str(folder))
    for place in ("run/deep", "[odd] run"):
        Path(place).mkdir()
    save(1), save(2, name="other_{}.safetensors"), save(3, folder="run/deep"), save(4, folder="[odd] run")
    outcome = watch_once("--held-out", 0, "--set", "evaluation.num_episodes=1", checkpoints=checkpoints)
    assert outcome.exit_code == 0, outcome.output
    assert [row["name"] for row in curve(f"{home}/eval")] == found


@pytest.mark.process
def test_the_command_waits_for_the_folder_and_for_the_first_policy(folder):
    """It does not make the folder, which may be misspelt, and it waits for the end of a half-written model."""
    with Path("out.txt").open("w") as out:
        process = start("watch", "later", "--env", "CartPole-v1", "--poll-s", 0.05, stdout=out, stderr=out)
        try:
            assert eventually(lambda: "waiting" in Path("out.txt").read_text(), process=process)
            assert not Path("later").exists()
            Path("later").mkdir()
            Path("later/model_1.zip").write_bytes(b"PK")
            assert eventually(lambda: Path("out.txt").read_text().count("waiting") == 2, process=process)
            make_models(1)
            Path("run/model_1.zip").replace("later/model_1.zip")
            assert process.wait(60) == ExitCode.USAGE
        finally:
            process.kill()
    assert untold(Path("out.txt").read_text(), "Stable-Baselines3", "--trust") == []


# ------------------------------------------------------------------------------ one curve, one evaluation


def test_a_curve_has_points_of_one_evaluation(folder):
    """Another plan, environment or policy needs another folder; other runners do not matter."""
    save(1)
    watch_once()
    outcome = watch_once("--set", "evaluation.num_episodes=7")
    assert outcome.exit_code == ExitCode.USAGE
    assert "num_episodes: 6 -> 7" in outcome.stderr
    assert watch_once("--set", "runners.num_envs_per_runner=2").exit_code == ExitCode.COMPLETE


def test_a_curve_has_points_of_one_code(folder):
    """Edits between two calls or two scans are errors that name the file; with the former code it continues."""
    write_environment("watch_worth")
    config = CONFIG | {"environment": {"env": "watch_worth:make"}}
    save(1)
    run_watcher(config=config)
    save(2)
    watching = make_watcher(config=config)
    write_environment("watch_worth", worth=3)
    changed = f"file {folder}/watch_worth.py (module watch_worth)"
    with closing(watching), refused(ConfigError, changed):
        watching.run(0.0, once=True)
    with refused(ConfigError, changed):
        make_watcher(config=config)
    assert steps() == [1]
    write_environment("watch_worth")
    run_watcher(config=config)
    assert steps() == [1, 2]
    sys.modules.pop("watch_worth")


@pytest.mark.parametrize("factory", ["reject", "from_pat"])
def test_a_mistake_that_left_no_points_can_be_corrected(folder, factory):
    """A factory that does not exist records nothing; one that raises leaves unreadable checkpoints."""
    age(save(1))
    wrong = watch_once("--set", f"policy.policy=watch_factories:{factory}", "--as", "policy.policy_kwargs.path")
    assert wrong.exit_code == (ExitCode.FAILED if factory == "reject" else ExitCode.USAGE), wrong.output
    assert Path("run/eval/curve.csv").exists() == (factory == "reject")
    assert watch_once().exit_code == ExitCode.COMPLETE
    assert [row["status"] for row in curve()] == ["complete"]


@pytest.mark.parametrize("key", ["policy.weights", "policy.policy_kwargs.path"])
def test_a_fault_of_the_environment_is_never_the_checkpoints(folder, key):
    """It ends the watch and leaves no point; the next call evaluates all checkpoints."""
    write_environment("watch_licensed", licensed=True)
    if key != "policy.weights":
        configure(policy={"policy": "watch_factories:from_path"})
    for step in (1, 2):
        age(save(step))
    args = ("--set", "environment.env=watch_licensed:make", "--as", key)
    outcome = watch_once(*args)
    assert outcome.exit_code == ExitCode.CLUSTER, outcome.output
    assert "no licence server" in outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert not Path("run/eval/curve.csv").exists()
    Path("licence").touch()
    assert watch_once(*args).exit_code == ExitCode.COMPLETE
    assert steps() == [1, 2]


# ------------------------------------------------------------------------------ folders of others


def contents(folder):
    """Return every file of a folder, and the folders without any."""
    return {
        str(path): path.read_bytes() if path.is_file() else b""
        for path in Path(folder).rglob("*")
        if path.is_file() or not any(path.iterdir())
    }


FOREIGN = ("run", ".", "link", "results", "other", "damaged", "escaping", None)
"""The watched folder, one above it, a link to it; other files; three kinds of watch.json; what the trainer uses."""
ESCAPING = {"schema": "rl_eval watch", "format": 3, "checkpoints": [{"info": 3, "digest": "/../../run"}]}


@pytest.mark.parametrize("output", FOREIGN)
def test_a_foreign_folder_is_refused_and_stays_as_it_is(folder, output):
    """Whatever names are in it: the trainer may have a folder named best."""
    save(1)
    for name in ("run/best/mine/model.bin", "results/notes.txt", "other/best/x/y", "damaged/x", "escaping/x"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("precious")
    Path("other/watch.json").write_text('{"format": 3, "interval": 5}')
    Path("damaged/watch.json").write_text('{"schema": "rl_eval watch", "format": 3, "checkp')
    Path("escaping/watch.json").write_text(json.dumps(ESCAPING))
    Path("link").symlink_to("run")
    if output is None:
        Path("run/eval/best/a").mkdir(parents=True)
        Path("run/eval/mine.csv").write_text("step,loss")
    before = contents(".")
    outcome = watch_once(*(() if output is None else ("--output", output)))
    assert outcome.exit_code == ExitCode.USAGE, outcome.output
    assert "--output" in outcome.stderr
    assert contents(".") == before


def test_checkpoints_with_equal_contents_have_folders_of_their_own():
    names = ["a/b_1.pt", "a_b_1.pt", "a b_1.pt", f"x/{'long' * 30}/m.pt", f"y/{'long' * 30}/m.pt"]
    assert len({Entry(Checkpoint(name, 0, 0.0, ""), "same").id for name in names}) == len(names)


def test_names_in_a_journal_lead_to_no_other_folder():
    """Names and digests may come from a file that another program wrote."""
    name = Entry(Checkpoint("../../a/..", 1, 0.0, ""), "/../../b").id
    assert ("/" in name, name[0] == ".") == (False, False)


def test_files_that_others_put_into_the_output_folder_stay(folder):
    """Only copies of checkpoints in the journal are removed."""
    Path("run/eval").mkdir()
    age(save(1))
    wrong = ("--set", "policy.policy=watch_factories:reject", "--as", "policy.policy_kwargs.path")
    assert watch_once(*wrong).exit_code == ExitCode.FAILED
    mine = [Path("run/eval", kind, "mine", "file") for kind in ("best", "checkpoints", "evaluations", "held_out")]
    for path in mine:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("precious")
    watch_once()
    former = best()["checkpoint"]
    save(7, good=True)
    watch_once()
    assert best()["step"] == 7
    assert not Path("run/eval", former).exists()
    assert [path.read_text() for path in mine] == ["precious"] * 4


CLAIM = """
from pathlib import Path
from rl_eval.training.watching.journal import claim_output
claim_output(Path("run").resolve(), Path("run/eval").resolve())
"""


@pytest.mark.process
def test_of_two_watchers_one_is_refused(folder):
    """In one process or in two; the refused one lets no other in, the closed one does, whatever forks live on."""
    first = make_watcher()
    if not (fork := os.fork()):
        signal.pause()
    for _ in range(2):
        with refused(LogOwned, "--output"):
            make_watcher()
    for closed in (False, True):
        if closed:
            first.close()
        other = subprocess.run([sys.executable, "-c", CLAIM], env=environment(), capture_output=True, check=False)
        assert other.returncode == (not closed), other.stderr
        assert (b"LogOwned" in other.stderr) == (not closed)
    make_watcher().close()
    os.kill(fork, signal.SIGKILL)
    os.waitpid(fork, 0)


# ------------------------------------------------------------------------------ crashes


class Crash(BaseException):
    """The process is gone."""


def crash_at(monkeypatch, number):
    """Make the n-th change of a file or folder the last one: a file is half written, any other change is left out.

    Nothing is cleaned up afterwards. The evaluation logs have a separate test.
    """
    count = 0

    def guarded(operation, half=lambda *args: None):
        def run(path, *args, **kwargs):
            nonlocal count
            if {"evaluations", "held_out"} & set(Path(path).parts):
                return operation(path, *args, **kwargs)
            count += 1
            if count >= number:
                half(path, *args)
                raise Crash
            return operation(path, *args, **kwargs)

        return run

    def unlink(path, missing_ok=False):
        if count < number:
            real_unlink(path, missing_ok)

    def half_of(write):
        return lambda path, data: write(path, data[: len(data) // 2])

    real_unlink = Path.unlink
    for name in ("write_text", "write_bytes"):
        write = getattr(Path, name)
        monkeypatch.setattr(Path, name, guarded(write, half_of(write)))
    for owner, name in ((shutil, "rmtree"), (shutil, "copyfile"), (Path, "rename"), (Path, "replace")):
        monkeypatch.setattr(owner, name, guarded(getattr(owner, name)))
    monkeypatch.setattr(Path, "unlink", unlink)


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_whatever_is_the_last_thing_that_happens_the_next_watcher_continues(folder, monkeypatch, stride):
    """A crash before and in every n-th change of the output folder: the end is the same, and no episode ran twice."""
    for step in (1, 2):
        save(step, good=step == 2)
    config = CONFIG | {"evaluation": {"num_episodes": 3, "max_episode_steps": 20}}
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # The power stays on.
    run_watcher(config=config, output=Path("plain"))
    crashes = left = 0
    for number in range(1, 1000, stride):
        output, crashed = Path(f"out{number}"), False
        with pytest.MonkeyPatch.context() as patch:
            crash_at(patch, number)
            watching = None
            try:
                watching = make_watcher(config=config, output=output)
                watching.run(0.0, once=True)
            except Crash:
                crashed = True
            finally:
                patch.undo()
                half_written = any(is_temporary(path.name) for path in output.rglob("*"))
                if watching is not None:
                    watching.close()
        crashes += crashed
        run_watcher(config=config, output=output)
        assert curve(output) == curve("plain"), number
        assert (output / "curve.png").read_bytes() == Path("plain/curve.png").read_bytes(), number
        assert best(output) == best("plain"), number
        assert rows_in_logs(folder=output) == rows_in_logs(folder="plain"), number
        assert copies(output) == [best(output)["checkpoint"]], number
        assert [path for path in output.rglob("*") if is_temporary(path.name)] == [], number
        left += crashed and half_written
        shutil.rmtree(output)
        if not crashed:
            break
    assert crashes > 25 // stride
    assert left >= 10 // stride


SLOW = {
    "environment": {"env": "cli_toys:count", "env_kwargs": {"pause_s": 0.004, "slow": "slow"}},
    "policy": {"policy": "watch_toys:make"},
}
SLOW_POLICY = '''
import torch


class Choice(torch.nn.Module):
    """Takes action 1 in the first steps of an episode: the more, the higher its weight."""

    def __init__(self):
        super().__init__()
        self.limit = torch.nn.Parameter(torch.zeros(1))

    def forward(self, observations):
        return torch.cat([observations - self.limit, self.limit - observations], 1)


def make():
    return Choice()
'''


@pytest.fixture
def slow_run(folder):
    """Checkpoints worth 2, 4, 6; while a file is there, they take longer than the log waits with its first segment."""
    Path("slow").touch()
    Path("watch_toys.py").write_text(SLOW_POLICY)
    Path("c.yaml").write_text(yaml.safe_dump(CONFIG | SLOW | {"evaluation": {"num_episodes": 40, "seed": 3}}))
    for step in (1, 2, 3):
        save_file({"limit": torch.full((1,), 2.0 * step - 0.5)}, f"run/model_{step}.safetensors")
    return folder


def segments():
    return len(list(Path("run/eval").glob("*/*/segments/*episodes*")))


KILL_WHEN = {
    "a copy is made": lambda: any(Path("run/eval/checkpoints").glob("*-*/*")),
    "episodes are in the first log": lambda: segments() >= 1,
    "one is committed": lambda: Path("run/eval/curve.csv").exists(),
    "the third is half done": lambda: any(Path("run/eval/evaluations").glob("model_3*/segments/*episodes*")),
    "the winner is tested again": lambda: any(Path("run/eval/held_out").glob("*/segments/*episodes*")),
}


ALL_PHASES = pytest.param([*KILL_WHEN], [1, 2, 3], marks=pytest.mark.slow)


@pytest.mark.process
@pytest.mark.parametrize(
    ("phases", "last"), [(["episodes are in the first log"], [1, 2]), ALL_PHASES], ids=["one", "all"]
)
def test_a_killed_watcher_is_continued(slow_run, phases, last):
    """SIGKILL, in one phase after the other; and the trainer removes a checkpoint that was begun."""
    for step in {1, 2, 3} - {*last}:
        Path(f"run/model_{step}.safetensors").unlink()
    for phase in phases:
        process = start(*watch_args(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert eventually(KILL_WHEN[phase], process=process)
        process.kill()
        process.communicate()
        if phase == "episodes are in the first log":
            Path("run/model_1.safetensors").unlink()
    Path("slow").unlink()
    outcome = watch_once()
    assert outcome.exit_code == ExitCode.COMPLETE, outcome.output
    assert steps() == last
    assert [float(row["episode_return_mean"]) for row in curve()] == [2.0 * step for step in last]
    assert best()["step"] == last[-1]
    assert best()["held_out"]["mean"] == 2.0 * last[-1]
    # An episode that was finished and not yet in the log runs again; what is in the log does not.
    assert set(rows_in_logs().values()) == {40}
    assert list(rows_in_logs("held_out").values()) == [40]
    assert copies() == [best()["checkpoint"]]


@pytest.mark.process
def test_a_signal_during_an_evaluation_ends_it_cleanly(slow_run):
    """What had finished is in the log, and the next call continues there."""
    Path("run/model_3.safetensors").unlink()
    process = start(*watch_args("--held-out", 0), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert eventually(KILL_WHEN["one is committed"], process=process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 143, (out, err)
    assert "Traceback" not in err
    Path("slow").unlink()
    assert watch_once("--held-out", 0).exit_code == ExitCode.COMPLETE
    assert steps() == [1, 2]
    assert set(rows_in_logs().values()) == {40}
