"""The checkpoint watcher: every checkpoint once, none half-written, none lost to a kill, and an honest best."""

import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file
from waiting import eventually

from rl_eval import EvalConfig, evaluate, load, replay
from rl_eval.atomic_write import is_temporary
from rl_eval.cli.evaluated import Evaluated
from rl_eval.cli.exits import ExitCode
from rl_eval.config.settings import make_settings
from rl_eval.errors import ConfigError, LogOwned
from rl_eval.watching import Watcher, WatchOptions, watcher
from rl_eval.watching.best import BestCheckpoint
from rl_eval.watching.checkpoints import (
    CheckpointFolder,
    CheckpointInfo,
    Snapshot,
    SnapshotStore,
    compile_step_pattern,
)
from rl_eval.watching.companions import companions_of, with_companions, without_companions
from rl_eval.watching.curve import curve_png
from rl_eval.watching.journal import Journal, Score
from tests.unit.cli_world import call, environment, printed, start
from tests.unit.watch_world import (
    CONFIG,
    age,
    best,
    curve,
    fingerprints,
    kept_as_best,
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
    return make_world(tmp_path, monkeypatch)


def make_watcher(said=None, config=CONFIG, stopping=lambda: False, **options):
    usual = {"run_dir": Path("run"), "pattern": "*.safetensors", "output": Path("run/eval")}
    say = [].append if said is None else said.append
    return Watcher(make_settings(config), WatchOptions(**(usual | options)), say, stopping, lambda handle: None)


def evaluated(path, **evaluation):
    """Return what a plain evaluation of a weights file says."""
    config = EvalConfig.from_yaml("c.yaml").policy(weights=str(path)).evaluation(**evaluation)
    return evaluate(config)


# ------------------------------------------------------------------------------ what comes out


def test_a_folder_of_checkpoints_becomes_a_curve(folder):
    """In the order of training, each number that of a plain evaluation of the file, with its interval."""
    paths = {step: save(step, good=step == 20) for step in (100, 3, 20)}
    outcome = watch_once()
    assert outcome.exit_code == ExitCode.COMPLETE, outcome.output
    assert steps() == [3, 20, 100]
    for row in curve():
        result = evaluated(paths[int(row["step"])])
        assert row["fingerprint"] == result.fingerprint
        assert float(row["episode_return_mean"]) == result.mean_return
        assert float(row["episode_return_ci_low"]) == result.interval.low
        assert float(row["episode_return_ci_high"]) == result.interval.high
        assert (row["status"], row["num_episodes"], row["num_failed_episodes"]) == ("complete", "6", "0")
        assert log_of(row).manifest.weights["version"] == int(row["step"])
    assert "step 20 (model_20.safetensors): mean return" in outcome.stdout


def test_a_script_reads_the_curve_and_a_person_what_happens(folder):
    """The curve is on stdout when the watch ends, with what ``curve.csv`` has, and the lines are on stderr."""
    save(1)
    save(2, good=True)
    outcome = watch_once("--json")
    told, rows = printed("watch", outcome.stdout), curve()
    assert [point["step"] for point in told] == [1, 2]
    assert [point["best"] for point in told] == [False, True]
    assert told[1]["held_out_return_mean"] == float(rows[1]["held_out_return_mean"])
    assert told[0]["held_out_return_mean"] is None
    assert [[str(point[key]) for key in ("name", "fingerprint", "episode_return_mean")] for point in told] == [
        [row[key] for key in ("name", "fingerprint", "episode_return_mean")] for row in rows
    ]
    assert "step 2 (model_2.safetensors): mean return" in outcome.stderr
    assert printed("watch", watch_once("--json").stdout) == told


def settings_of_models(**kwargs):
    """Settings whose policies are models of Stable-Baselines3."""
    factory = "rl_eval.integrations.sb3:load_policy"
    return EvalConfig().environment("CartPole-v1").policy(factory, policy_kwargs=kwargs).build()


def test_a_model_brings_its_own_normalizer_and_no_other_has_it(folder):
    """Neither one that the config took from another model, nor one that it means for all."""
    make_models(1, 2)
    for step in (1, 2):
        Path(f"run/model_{step}_vecnormalize.pkl").write_text(str(step))
    models = {step: Path(f"run/model_{step}.zip").resolve() for step in (1, 2)}
    own = {step: Path(f"run/model_{step}_vecnormalize.pkl").resolve() for step in (1, 2)}
    plain, none = settings_of_models(), settings_of_models(vecnormalize=False)
    assert [companions_of(models[step], plain) for step in (1, 2)] == [{"vecnormalize": own[step]} for step in (1, 2)]
    assert companions_of(models[1], none) == {}
    of_one = settings_of_models(path=str(models[2]), vecnormalize=str(own[2]))
    assert without_companions(of_one).policy.policy_kwargs == {"path": str(models[2])}
    of_rewards = settings_of_models(path=str(models[2]), vecnormalize=False)
    assert without_companions(none) is none
    assert without_companions(of_rewards) is of_rewards
    shared = settings_of_models(vecnormalize=str(own[2]))
    assert without_companions(shared) is shared
    assert companions_of(models[2], shared) == {}
    with pytest.raises(ConfigError, match=r"model_1.zip has its own, model_1_vecnormalize.pkl: leave it out of the"):
        companions_of(models[1], shared)
    Path("run/model_1_vecnormalize.pkl").rename("run/other_vecnormalize.pkl")
    Path("run/another_vecnormalize.pkl").touch()
    assert companions_of(models[1], shared) == companions_of(models[1], plain) == {}
    assert with_companions(plain, companions_of(models[2], plain)).policy.policy_kwargs == {"vecnormalize": str(own[2])}


def test_what_belongs_to_a_checkpoint_is_copied_with_it(folder):
    """The trainer may remove it; if it does so meanwhile, the next look decides."""
    make_models(1)
    model, beside = Path("run/model_1.zip"), Path("run/model_1_vecnormalize.pkl")
    beside.write_text("statistics")
    found = CheckpointFolder(Path("run"), "*.zip", compile_step_pattern(None), Path("run/eval"))
    [info] = [found.scan(), found.scan()][1]
    store = SnapshotStore(Path("copies"), lambda _: None)
    taken = store.take(model, info, {"vecnormalize": beside})
    beside.unlink()
    assert store.found() == [taken]
    assert taken.companions == {"vecnormalize": beside}
    assert taken.copies["vecnormalize"].read_text() == "statistics"
    BestCheckpoint(Path("best")).keep(taken, {})
    assert sorted(path.name for path in Path("best", taken.id).iterdir()) == [model.name, beside.name]
    assert store.take(model, info, {"vecnormalize": beside}) is None


OPTIONS = ("-n", 6, "--seed", 3, "--runners", 0, "--envs-per-runner", 4)


def watch_without_config(*args, checkpoints="run"):
    return call("watch", checkpoints, "--once", "--poll-s", 0.02, *args)


def test_options_say_what_a_config_says(folder):
    """As for ``rl-eval run``; the weights are the checkpoints'."""
    save(1)
    by_config = watch_once("--output", "one")
    by_options = watch_without_config(
        *("--env", "CartPole-v1", "--policy", "rl_eval.policies.mlp:make_mlp", "--output", "two"), *OPTIONS
    )
    assert by_options.exit_code == by_config.exit_code == ExitCode.COMPLETE, by_options.output
    assert curve("two")[0]["fingerprint"] == curve("one")[0]["fingerprint"]
    assert "no --weights" not in by_options.output


def make_models(*steps):
    """Have files that are models of Stable-Baselines3 to whoever does not load them."""
    for step in steps:
        with zipfile.ZipFile(f"run/model_{step}.zip", "w") as archive:
            archive.writestr("data", "{}")
            archive.writestr("policy.pth", b"")


def test_a_model_says_itself_what_policy_it_is(folder):
    """It holds pickled objects."""
    make_models(1, 2)
    asked = watch_without_config("--env", "CartPole-v1", checkpoints="run/*.zip")
    assert asked.exit_code == ExitCode.USAGE
    assert "policy: a model of Stable-Baselines3, run/model_1.zip, and other checkpoints likewise" in asked.stderr
    assert "run/model_1.zip holds pickled objects" in asked.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "CHECKPOINTS is missing: give a folder, or a glob in quotes"),
        (("later",), "give a CONFIG file, or --env, as in rl-eval watch 'later'"),
        (("run", "c.yaml"), "run is a folder: CONFIG comes first, as in rl-eval watch c.yaml run"),
        (("c.yaml",), "CHECKPOINTS is missing: give a folder, or a glob in quotes"),
        (
            ("run/*.safetensors", "--env", "CartPole-v1"),
            "'run/model_1.safetensors' is a file of weights alone: say what",
        ),
        (("run/other*", "--env", "CartPole-v1"), "its kind cannot be told"),
        (
            ("run", "--env", "CartPole-v1", "--weights", "w.pt"),
            "--weights w.pt: a watch takes them from the checkpoints",
        ),
        (("run/*.pt", "--env", "CartPole-v1"), "matches '*.pt' yet"),
        (("run/*.zip",), "give a CONFIG file, or --env, as in rl-eval watch 'run/*.zip' --env CartPole-v1\n"),
    ],
)
def test_what_is_missing_is_named(folder, arguments, message):
    save(1)
    make_models(1)
    Path("run/other").touch()
    outcome = call("watch", *arguments, "--once")
    assert outcome.exit_code == ExitCode.USAGE
    assert message in outcome.stderr


def test_what_lies_in_a_folder_instead_is_told(folder):
    Path("run").mkdir(exist_ok=True)
    Path("run/model_7.zip").touch()
    nothing = watch_once(checkpoints="run")
    assert nothing.exit_code == ExitCode.USAGE
    assert "matches '*.safetensors': for *.zip give a glob in quotes" in " ".join(nothing.stderr.split())


def test_the_picture_can_be_looked_at(folder, monkeypatch):
    """It decodes, has the promised size, and something is drawn in it."""
    monkeypatch.setattr(watcher, "curve_png", curve_png)
    from matplotlib.image import imread

    save(1)
    save(2, good=True)
    watch_once()
    picture = imread("run/eval/curve.png")
    assert picture.shape == (540, 960, 4)
    red = (picture[..., 0] > 0.7) & (picture[..., 1] < 0.3)
    assert red.any()


def test_without_matplotlib_there_is_the_table(folder, monkeypatch):
    """And a line that says what to install."""
    monkeypatch.setattr(watcher, "curve_png", curve_png)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    save(1)
    outcome = watch_once()
    assert outcome.exit_code == ExitCode.COMPLETE
    assert outcome.stdout.count("pip install 'rl-eval[plot]'") == 1
    assert steps() == [1]
    assert not Path("run/eval/curve.png").exists()


def test_the_best_is_tested_again_on_episodes_that_no_choice_has_seen(folder):
    """Both numbers are told, and which is which; the copy is the checkpoint."""
    for step in (1, 2, 3):
        save(step, good=step != 1)
    outcome = watch_once("--held-out", 9)
    winner = max(curve(), key=lambda row: float(row["episode_return_mean"]))
    found, path = best(), Path("run", winner["name"])
    selection, held_out = evaluated(path), evaluated(path, num_episodes=9, first_index=6)
    assert found["name"] == winner["name"]
    assert found["selection"]["fingerprint"] == selection.fingerprint
    assert found["held_out"]["fingerprint"] == held_out.fingerprint
    assert found["held_out"]["mean"] == held_out.mean_return != selection.mean_return
    assert not set(selection.plan.seeds) & set(held_out.plan.seeds)
    assert "biased upward" in found["selection"]["meaning"]
    assert found["held_out"]["episodes"] == "indices 6 to 14"
    assert Path("run/eval/best", found["checkpoint"]).read_bytes() == path.read_bytes()
    assert [row["name"] for row in curve() if row["best"] == "true"] == [winner["name"]]
    assert [row["name"] for row in curve() if row["held_out_return_mean"]] == [winner["name"]]
    assert float(winner["held_out_return_mean"]) == held_out.mean_return
    assert ": on average too high" in outcome.stdout
    assert "on episodes that had no part in the choice: mean return" in outcome.stdout


def test_a_better_one_replaces_the_best(folder):
    """A worse or equal one does not; only one copy is kept, and none elsewhere."""
    save(1)
    watch_once()
    assert best()["step"] == 1
    shutil.copy("run/model_1.safetensors", "run/model_5.safetensors")
    watch_once()
    assert best()["step"] == 1
    save(7, good=True)
    watch_once()
    assert best()["step"] == 7
    assert kept_as_best() == [best()["checkpoint"]]
    assert list(Path("run/eval/checkpoints").iterdir()) == []
    assert len(list(Path("run/eval/held_out").iterdir())) == 2


@pytest.mark.parametrize(("status", "mean"), [("partial", 9.0), ("failed", 9.0), ("complete", None), ("complete", 1.0)])
def test_only_a_complete_evaluation_leads(folder, status, mean):
    """Not one whose mean goes over the episodes that happened to complete; among equals the first leads."""
    journal = Journal(folder, {})
    for step, score in ((2, ("complete", 1.0)), (1, (status, mean))):
        info = CheckpointInfo(f"m{step}", step, 0.0, "")
        journal.record(Snapshot(info, f"{step}", folder), Score(score[0], "", score[1], None, None, 3, 0, 0, "f"))
    assert journal.best_candidate.info.step == (1 if (status, mean) == ("complete", 1.0) else 2)
    assert Journal(folder, {}).best_candidate == journal.best_candidate


LEAKY = """
import gymnasium as gym


class Leaky(gym.Wrapper):
    resets = 0

    def reset(self, **given):
        self.resets += 1
        return self.env.reset(**given)

    def step(self, action):
        observation, reward, *rest = self.env.step(action)
        return observation, reward + self.resets, *rest


def make(context):
    return Leaky(gym.make("CartPole-v1"))
"""


def test_an_environment_that_leaks_is_told_wherever_its_numbers_are(folder, monkeypatch):
    """In the line of each checkpoint, in the table, and with both numbers of the best, which nobody is to quote."""
    Path("watch_leaky.py").write_text(LEAKY)
    monkeypatch.syspath_prepend(folder)
    save(1)
    outcome = watch_once("--set", "environment.env=watch_leaky:make")
    lines = [line for line in outcome.stdout.splitlines() if "mean return" in line]
    assert len(lines) == 3
    assert all("NOT a function of its seed" in line for line in lines), lines
    (row,), found = curve(), best()
    assert "NOT a function of its seed" in row["determinism"]
    assert "NOT a function of its seed" in row["held_out_determinism"]
    for kind in ("selection", "held_out"):
        assert "NOT a function of its seed" in found[kind]["determinism"]
    assert "quote this one" not in found["held_out"]["meaning"]


def test_of_a_deterministic_environment_one_number_is_to_be_quoted(folder):
    """Nothing is said of the check, whose words depend on what was left to run."""
    save(1)
    assert "NOT a function" not in watch_once().stdout
    assert (curve()[0]["determinism"], best()["held_out"]["determinism"]) == ("", "")
    assert best()["held_out"]["meaning"].endswith("quote this one")


def test_without_held_out_episodes_there_is_no_second_number(folder):
    save(1)
    watch_once("--held-out", 0)
    assert best()["held_out"] is None
    assert not Path("run/eval/held_out").exists()


def test_an_evaluation_can_be_loaded_and_replayed(folder):
    """It is an ordinary evaluation log, whose provenance names the trainer's file."""
    path = save(4, good=True)
    watch_once()
    log = Path("run/eval/evaluations", curve()[0]["evaluation"])
    assert load(log).fingerprint == curve()[0]["fingerprint"]
    assert load(log).provenance["config"]["policy"]["weights"] == str(path.resolve())
    assert replay(log, 2).identical


# ------------------------------------------------------------------------------ once each


def test_nothing_is_evaluated_twice(folder):
    """Neither by the next call, nor when a file is only touched, nor when curve and picture are gone."""
    for step in (1, 2):
        save(step)
    watch_once()
    before, rows = fingerprints(), rows_in_logs()
    age("run/model_1.safetensors", -5)
    Path("run/eval/curve.csv").unlink()
    outcome = watch_once()
    assert outcome.exit_code == ExitCode.COMPLETE
    assert outcome.stdout == f"nothing new: 2 checkpoints are in {folder}/run/eval/curve.csv\n"
    assert fingerprints() == before
    assert rows_in_logs() == rows == dict.fromkeys(rows, 6)


def test_another_content_under_the_same_name_is_another_checkpoint(folder):
    """Both have been policies of this run; the points are told apart by their digests."""
    save(1)
    watch_once()
    save(1, good=True)
    watch_once()
    assert steps() == [1, 1]
    assert len({row["digest"] for row in curve()}) == 2
    assert best()["digest"] == max(curve(), key=lambda row: float(row["episode_return_mean"]))["digest"]


def test_runners_stay_warm_between_checkpoints(folder, monkeypatch):
    """Only weights change, so one group serves all checkpoints and the second test."""
    made = []
    real = watcher.EvalRunnerGroup
    monkeypatch.setattr(watcher, "EvalRunnerGroup", lambda *args: made.append(args) or real(*args))
    for step in (1, 2, 3):
        save(step)
    watch_once()
    assert steps() == [1, 2, 3]
    assert len(made) == 1


# ------------------------------------------------------------------------------ what a checkpoint is


@pytest.mark.parametrize(
    ("name", "pattern", "step"),
    [
        ("model_1000_steps.zip", None, 1000),
        ("checkpoint_000012", None, 12),
        ("ppo-v1_e7.zip", r"e(\d+)", 7),
        ("latest.zip", None, None),
        ("ppo.zip", r"e(\d+)", None),
        ("a/b3/model_5.pt", None, 5),
    ],
)
def test_steps_are_read_from_names(tmp_path, name, pattern, step):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    found = CheckpointFolder(tmp_path, "**/*", compile_step_pattern(pattern), tmp_path / "eval")
    found.scan()
    steps = {info.name: info.step for info in found.scan()}
    assert steps[name] == step


def test_those_without_a_step_follow_by_time(folder):
    """And the curve counts checkpoints then."""
    for name, seconds in (("b", 50), ("a", 10), ("c", 90)):
        age(save(0, name=name + ".safetensors"), seconds)
    save(4)
    assert watch_once().exit_code == ExitCode.COMPLETE
    assert [row["name"] for row in curve()] == [
        "model_4.safetensors", "c.safetensors", "b.safetensors", "a.safetensors",
    ]  # fmt: skip
    assert [row["step"] for row in curve()] == ["4", "", "", ""]


def test_a_checkpoint_must_hold_still(tmp_path):
    """What is new, grows, shrinks, or is written again in place is left for later; hidden files are none at all."""
    folder, file = CheckpointFolder(tmp_path, "**/*", compile_step_pattern(None), tmp_path / "eval"), tmp_path / "m1"
    (tmp_path / ".hidden").touch()
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "m9").touch()
    file.write_bytes(b"abc")
    assert folder.scan() == []
    assert folder.unstable == ("m1",)
    assert [info.name for info in folder.scan()] == ["m1"]
    grow, rewrite = (lambda: file.write_bytes(b"abcd")), (lambda: file.write_bytes(b"xyzw"))
    for change in (grow, lambda: age(file), rewrite, file.unlink):
        change()
        assert folder.scan() == []
    assert folder.unstable == ()
    file.mkdir()
    (file / "part").write_bytes(b"1")
    folder.scan()
    assert "m1" in [info.name for info in folder.scan()]
    (file / "part2").touch()
    assert "m1" not in [info.name for info in folder.scan()]


@pytest.mark.parametrize("as_folder", [False, True], ids=["zip files", "folders"])
def test_a_factory_can_load_checkpoints_itself(folder, as_folder):
    """Each has runners of its own then; a torn one is skipped and the others are not."""
    config = CONFIG | {"policy": {"policy": "watch_factories:from_path", "policy_kwargs": {"scale": 2.0}}}
    Path("c.yaml").write_text(yaml.safe_dump(config))
    for step in (1, 2, 3):
        home = Path("run", f"model_{step}") if as_folder else Path("run")
        home.mkdir(exist_ok=True)
        path = home / ("weights.zip" if as_folder else f"model_{step}.zip")
        torch.save(weights_of_step(step, good=step == 3), path)
        if step == 2:
            path.write_bytes(path.read_bytes()[:1000])
        age(path)
    checkpoints = "run/model_*" if as_folder else "run/*.zip"
    outcome = watch_once("--as", "policy.policy_kwargs.path", checkpoints=checkpoints)
    assert outcome.exit_code == ExitCode.PARTIAL, outcome.output
    assert [row["status"] for row in curve()] == ["complete", "unreadable", "complete"]
    assert best()["step"] == 3
    kept = Path("run/eval/best", best()["checkpoint"])
    assert (kept / "weights.zip" if as_folder else kept).is_file()


# ------------------------------------------------------------------------------ bad ones


def test_a_torn_file_is_skipped_and_said(folder):
    """It is not tried again, unless asked for; the others have their points."""
    for step in (1, 2, 3):
        save(step)
    torn = Path("run/model_2.safetensors")
    torn.write_bytes(torn.read_bytes()[:-100])
    age(torn)
    outcome = watch_once()
    assert outcome.exit_code == ExitCode.PARTIAL
    assert "step 2 (model_2.safetensors): skipped" in outcome.stdout
    assert [row["status"] for row in curve()] == ["complete", "unreadable", "complete"]
    assert str(torn.resolve()) in curve()[1]["reason"]
    again = watch_once()
    assert (again.exit_code, again.stdout.split(":")[0]) == (ExitCode.PARTIAL, "nothing new")
    assert "step 2 (model_2.safetensors): skipped" in watch_once("--retry-unreadable").stdout
    save(2)
    assert watch_once().exit_code == ExitCode.PARTIAL
    assert [row["status"] for row in curve() if row["step"] == "2"] == ["unreadable", "complete"]


def test_weights_of_another_network_are_the_checkpoints_fault(folder):
    """And the runners keep working."""
    save_file({"strange": torch.zeros(3)}, "run/model_1.safetensors")
    age("run/model_1.safetensors")
    save(2)
    outcome = watch_once()
    assert outcome.exit_code == ExitCode.PARTIAL
    assert "strange" in curve()[0]["reason"] or "lack" in curve()[0]["reason"]
    assert curve()[1]["status"] == "complete"


def test_a_young_one_that_cannot_be_loaded_is_left_for_later(folder):
    """It may still be being written, however slowly."""
    whole = save(1).read_bytes()
    Path("run/model_1.safetensors").write_bytes(whole[:200])
    outcome = watch_once()
    assert outcome.exit_code == ExitCode.PARTIAL
    assert "is tried again" in outcome.stdout
    assert not Path("run/eval/curve.csv").exists()
    Path("run/model_1.safetensors").write_bytes(whole)
    assert watch_once().exit_code == ExitCode.COMPLETE
    assert steps() == [1]


def test_when_nothing_can_be_loaded_the_watch_has_failed(folder):
    Path("run/model_1.safetensors").write_bytes(b"")
    age("run/model_1.safetensors")
    assert watch_once().exit_code == ExitCode.FAILED


def test_one_that_is_removed_in_time_is_no_error(folder):
    """The trainer keeps its last few."""
    said = []
    for step in (1, 2):
        save(step)
    watching = make_watcher(said)
    try:
        real = watching._snapshots.take
        watching._snapshots.take = lambda path, info, companions: (
            path.unlink() if info.step == 2 else None,
            real(path, info, companions),
        )[1]
        watching.run_once(0.0)
    finally:
        watching.close()
    assert "model_2.safetensors was removed before it was evaluated" in said
    assert steps() == [1]


@pytest.fixture
def folders(folder, monkeypatch):
    """Two checkpoints that are folders of some files."""
    monkeypatch.syspath_prepend(folder)
    for step in (1, 2):
        Path(f"run/model_{step}").mkdir()
        save(step, folder=f"run/model_{step}", name="weights.safetensors")
        for part in range(5):
            Path(f"run/model_{step}/part{part}").touch()


def watch_folders(said, disturb):
    """Watch folders, with something that happens after the first file of the first one was copied."""
    policy = {"policy": "watch_factories:from_safetensors"}
    watching = make_watcher(said, CONFIG | {"policy": policy}, pattern="model_*", key="policy.policy_kwargs.path")
    real, copied = shutil.copy2, []

    def copy2(source, target, **more):
        done = real(source, target, **more)
        copied.append(source)
        if len(copied) == 1:
            disturb(target)
        return done

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shutil.copytree, "__defaults__", (False, None, copy2, False, False))
            watching.run_once(0.0)
            watching.run_once(0.0)
    finally:
        watching.close()
    assert copied


def test_a_folder_that_is_removed_while_it_is_copied_is_no_error(folders):
    """The trainer keeps its last one; the watch goes on with that."""
    said = []
    watch_folders(said, lambda target: shutil.rmtree("run/model_1"))
    assert said.count("model_1 was removed before it was evaluated") == 1
    assert steps() == [2]


def test_a_folder_that_loses_a_file_while_it_is_copied_is_looked_at_again(folders):
    """Its next look decides: it holds still then, and is evaluated as it is."""
    said = []
    watch_folders(said, lambda target: [part.unlink() for part in Path("run/model_1").glob("part*")])
    assert said.count("model_1 changed while it was copied: the next look decides") == 1
    assert steps() == [1, 2]


def test_a_folder_that_cannot_be_copied_though_nobody_touched_it_ends_the_watch(folders, monkeypatch):
    """The output folder is at fault, and it will be at the next look too."""

    def full(target):
        raise OSError(28, "No space left on device", target)

    with pytest.raises(ConfigError, match=r"model_1 cannot be copied to .*No space left"):
        watch_folders([], full)


def test_a_folder_that_goes_while_checkpoints_are_searched_is_no_error(tmp_path, monkeypatch):
    """The others are found."""
    real, gone = Path.glob, []

    def glob(path, pattern):
        found = list(real(path, pattern))
        yield from found[:1]
        if not gone:
            gone.append(path)
            raise FileNotFoundError(path)
        yield from found[1:]

    for step in (1, 2):
        (tmp_path / f"m{step}").touch()
    folder = CheckpointFolder(tmp_path, "**/m*", compile_step_pattern(None), tmp_path / "eval")
    folder.scan()
    monkeypatch.setattr(Path, "glob", glob)
    assert [info.step for info in folder.scan()] == [1, 2]
    assert gone


def test_one_that_changes_while_it_is_copied_is_taken_later(folder):
    """What is evaluated is never a mixture."""
    save(1)
    said = []
    watching = make_watcher(said)
    try:
        real = watcher.SnapshotStore.take.__globals__["shutil"].copyfile

        def slow(source, target):
            real(source, target)
            save(1, good=True)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shutil, "copyfile", slow)
            watching.run_once(0.0)
        assert not Path("run/eval/curve.csv").exists()
        assert "model_1.safetensors changed while it was copied: the next look decides" in said
        watching.run_once(0.0)
    finally:
        watching.close()
    assert [row["fingerprint"] for row in curve()] == [evaluated("run/model_1.safetensors").fingerprint]


# ------------------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--as", "policy.device"), "--as policy.device"),
        (("--as", "policy.policy_kwargs."), "policy.policy_kwargs.NAME"),
        (("--step-pattern", "("), "--step-pattern"),
        (("--step-pattern", "step"), "has no group"),
        (("more.safetensors",), "2 CHECKPOINTS are given, run the first: give one folder, or one glob in quotes"),
        (("--set", "evaluation.first_index=2147483640"), "first_index"),
        (("--held-out", 2**31 - 3), "first_index"),
        (("--output", "c.yaml"), "output folder"),
    ],
)
def test_mistakes_are_told_before_anything_runs(folder, args, message):
    save(1)
    outcome = watch_once(*args)
    assert outcome.exit_code == ExitCode.USAGE, outcome.output
    assert message in outcome.stderr
    assert not Path("run/eval/evaluations").exists()


@pytest.mark.parametrize(
    ("checkpoints", "message"),
    [
        ("run/*.pt", "nothing in '{}/run' matches '*.pt'"),
        ("elsewhere", "nothing in '{}/elsewhere' matches '*.safetensors'"),
    ],
)
def test_without_a_checkpoint_it_is_said_where_none_is(folder, checkpoints, message):
    """With the pattern that was looked for."""
    save(1)
    outcome = watch_once(checkpoints=checkpoints)
    assert outcome.exit_code == ExitCode.USAGE
    assert message.format(folder) in outcome.stderr


def test_a_pattern_that_finds_nothing_ever_is_refused(tmp_path):
    """It is no glob of a folder's contents."""
    folder = CheckpointFolder(tmp_path, "/abs*", compile_step_pattern(None), tmp_path / "eval")
    with pytest.raises(ConfigError, match=r"CHECKPOINTS '/abs\*' cannot be used"):
        folder.scan()


@pytest.mark.parametrize(
    ("checkpoints", "found", "home"),
    [
        ("run", ["model_1.safetensors", "other_2.safetensors"], "run"),
        ("{}/run/", ["model_1.safetensors", "other_2.safetensors"], "run"),
        ("run/model_*.safetensors", ["model_1.safetensors"], "run"),
        ("run/**/*_*.safetensors", ["model_1.safetensors", "other_2.safetensors", "deep/model_3.safetensors"], "run"),
        ("r?n/model_*.safetensors", ["run/model_1.safetensors"], "."),
        ("run/model_1.safetensors", ["model_1.safetensors"], "run"),
        ("[odd] run", ["model_4.safetensors"], "[odd] run"),
        ("~/run/deep", ["model_3.safetensors"], "run/deep"),
    ],
)
def test_checkpoints_are_a_folder_or_a_glob(folder, monkeypatch, checkpoints, found, home):
    """The part without wildcards is the folder, in which the curve is put."""
    monkeypatch.setenv("HOME", str(folder))
    for place in ("run/deep", "[odd] run"):
        Path(place).mkdir()
    save(1), save(2, name="other_{}.safetensors"), save(3, folder="run/deep"), save(4, folder="[odd] run")
    outcome = watch_once("--held-out", 0, "--set", "evaluation.num_episodes=1", checkpoints=checkpoints.format(folder))
    assert outcome.exit_code == 0, outcome.output
    assert [row["name"] for row in curve(f"{home}/eval")] == found


def test_a_folder_that_is_not_there_is_waited_for_and_not_made(folder, monkeypatch):
    """Its training run makes it, or nobody does where it is misspelt; with ``--once`` nothing is left behind."""
    looks = []

    def train(seconds):
        assert not Path("later").exists()
        looks.append(seconds)
        if len(looks) == 2:
            Path("later").mkdir()
            save(1, folder="later")

    outcome = watch_once(checkpoints="later")
    assert outcome.exit_code == ExitCode.USAGE
    assert f"nothing in '{folder}/later' matches '*.safetensors': there is no such folder" in " ".join(
        outcome.stderr.split()
    )
    assert not Path("later").exists()
    watch = sys.modules["rl_eval.cli.watch"]
    monkeypatch.setattr(watch.time, "sleep", train)
    watch._wait_for(Path("later"), "*.safetensors", Path("later/eval"), 3.0, print)
    assert looks == [3.0, 3.0]
    watch._wait_for(Path("never"), "*.safetensors", Path("eval"), 3.0, print)


def test_the_first_checkpoint_is_waited_for_where_it_says_what_policy_it_is(folder, monkeypatch, capsys):
    """Also while it is half-written; where something else is there already, nobody waits for ever."""
    watch, said = sys.modules["rl_eval.cli.watch"], []

    def train(_):
        if (model := Path("later/model_1.zip")).exists():
            model.unlink()
            make_models(1)
            Path("run/model_1.zip").rename(model)
        else:
            model.parent.mkdir()
            model.write_bytes(b"PK")

    monkeypatch.setattr(watch.time, "sleep", train)
    found = watch._with_policy(Evaluated(env="CartPole-v1"), Path("later"), "*.zip", 3.0, said.append)
    assert found.policy == "later/model_1.zip"
    assert "a model of Stable-Baselines3" in capsys.readouterr().err
    assert [line.partition(": ")[0] for line in said] == ["waiting for a checkpoint that says what policy it is"] * 2
    assert "matches '*.zip' yet" in said[0]
    with pytest.raises(ConfigError, match=r"matches .\*\.csv. yet"):
        watch._with_policy(Evaluated(env="CartPole-v1"), Path("run"), "*.csv", None, said.append)
    Path("run/log.csv").touch()
    with pytest.raises(ConfigError, match="--policy is missing"):
        watch._with_policy(Evaluated(env="CartPole-v1"), Path("run"), "*.csv", 3.0, said.append)


def test_a_model_of_another_library_says_which_option_takes_it(folder):
    """Its weights are no file of their own."""
    with zipfile.ZipFile("run/model_1.zip", "w") as archive:
        archive.writestr("data", "{}")
        archive.writestr("policy.pth", b"")
    outcome = watch_once("--retry-s", 0, checkpoints="run/*.zip")
    assert outcome.exit_code == ExitCode.FAILED, outcome.output
    assert "as sb3:PATH names it: set policy.policy to rl_eval.integrations.sb3:load_policy" in outcome.output


def test_a_curve_has_points_of_one_evaluation(folder):
    """Another plan, environment or policy belongs into another folder; other runners do not matter."""
    save(1)
    watch_once()
    outcome = watch_once("--set", "evaluation.num_episodes=7")
    assert outcome.exit_code == ExitCode.USAGE
    assert "num_episodes: 6 -> 7" in outcome.stderr
    assert "--output" in outcome.stderr
    assert watch_once("--set", "runners.num_envs_per_runner=2").exit_code == ExitCode.COMPLETE


WORTH = """
import gymnasium as gym


def make(context):
    return gym.wrappers.TransformReward(gym.make("CartPole-v1"), lambda reward: reward * {worth})
"""


@pytest.fixture
def worth(folder, monkeypatch):
    """Settings with an environment whose code can be edited, and one evaluated checkpoint."""
    monkeypatch.syspath_prepend(folder)
    Path("watch_worth.py").write_text(WORTH.format(worth=1))
    config = CONFIG | {"environment": {"env": "watch_worth:make"}}
    save(1)
    run_watcher(config=config)
    yield config
    sys.modules.pop("watch_worth")


def run_watcher(*args, **options):
    watching = make_watcher(*args, **options)
    try:
        watching.run_once(0.0)
    finally:
        watching.close()


def test_a_curve_has_points_of_one_code(worth):
    """What was edited, between two calls or two looks, is named, with what helps; the former code goes on."""
    save(2)
    watching = make_watcher(config=worth)
    Path("watch_worth.py").write_text(WORTH.format(worth=3))
    try:
        with pytest.raises(ConfigError, match=r"watch_worth\.py.*--output"):
            watching.run_once(0.0)
    finally:
        watching.close()
    with pytest.raises(ConfigError, match=r"watch_worth\.py.*--output"):
        make_watcher(config=worth)
    assert steps() == [1]
    Path("watch_worth.py").write_text(WORTH.format(worth=1))
    run_watcher(config=worth)
    assert steps() == [1, 2]


def test_a_half_finished_evaluation_of_other_code_is_refused_in_words_of_this_command(worth):
    """None of the options that it names are another command's."""
    forget_the_evaluations()
    Path("watch_worth.py").write_text(WORTH.format(worth=3))
    with pytest.raises(ConfigError, match=r"(?s)was begun with other code.*watch_worth\.py.*--output") as refused:
        run_watcher(config=worth)
    for option in ("--log-dir", "--fresh", "--accept-code-change"):
        assert option not in str(refused.value)


def forget_the_evaluations():
    """Have the journal say what it says between the first episode and the first entry, of whatever code."""
    path = Path("run/eval/watch.json")
    content = json.loads(path.read_text())
    content["task"].pop("code", None)
    path.write_text(json.dumps(content | {"checkpoints": []}))


def test_a_mistake_that_left_no_points_can_be_corrected(folder):
    """The factory was another one, so no checkpoint could be loaded; with the right one they all are."""
    age(save(1))
    wrong = watch_once("--set", "policy.policy=watch_factories:reject", "--as", "policy.policy_kwargs.path")
    assert wrong.exit_code == ExitCode.FAILED
    assert watch_once().exit_code == ExitCode.COMPLETE
    assert [row["status"] for row in curve()] == ["complete"]


def test_a_mistake_of_the_config_is_nobody_elses(folder):
    """A factory that does not exist ends the watch; no checkpoint is recorded as unreadable."""
    age(save(1))
    outcome = watch_once("--set", "policy.policy=watch_factories:from_pat", "--as", "policy.policy_kwargs.path")
    assert outcome.exit_code == ExitCode.USAGE
    assert "from_pat" in outcome.stderr
    assert not journal().entries


@pytest.mark.parametrize(
    "content", ['{"format": 1, "checkp', "[]", '{"schema": "rl_eval watch", "format": 1, "folders": 3}']
)
def test_a_damaged_journal_is_said_and_can_be_mended(folder, content):
    """The message says how; the evaluations are there, so nothing runs again."""
    save(1)
    watch_once()
    rows = rows_in_logs()
    Path("run/eval/watch.json").write_text(content)
    outcome = watch_once()
    assert outcome.exit_code == ExitCode.USAGE
    mark = '{"schema": "rl_eval watch"}'
    assert f"write {mark} into the file" in outcome.stderr
    with pytest.raises(ConfigError, match="damaged"):
        make_watcher()
    Path("run/eval/watch.json").write_text(mark)
    assert watch_once().exit_code == ExitCode.COMPLETE
    assert rows_in_logs() == rows


# ------------------------------------------------------------------------------ what is not ours


def journal():
    return Journal(Path("run/eval").resolve(), {})


def contents(folder):
    """Return every file of a folder, and the folders without any."""
    return {
        str(path): path.read_bytes() if path.is_file() else b""
        for path in Path(folder).rglob("*")
        if path.is_file() or not any(path.iterdir())
    }


FOREIGN = {
    "the watched folder": ("run", "the trainer's"),
    "one above it": (".", "the trainer's"),
    "the watched folder by a link": ("link", "the trainer's"),
    "a folder of somebody else": ("results", "results holds best, notes.txt"),
    "one whose watch.json is another program's": ("other", "was not written by rl-eval watch"),
    "the default, which the trainer uses": (None, "holds best, mine.csv"),
}


@pytest.mark.parametrize(("output", "message"), FOREIGN.values(), ids=FOREIGN)
def test_a_folder_of_somebody_else_is_refused_and_stays_as_it_is(folder, output, message):
    """Whatever names are in it: the trainer may have a folder named best."""
    save(1)
    for name in ("run/best/mine/model.bin", "results/best/run7/model.bin", "results/notes.txt", "other/best/x/y"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("precious")
    Path("other/watch.json").write_text('{"format": 1, "interval": 5}')
    Path("link").symlink_to("run")
    if output is None:
        Path("run/eval/best/a").mkdir(parents=True)
        Path("run/eval/mine.csv").write_text("step,loss")
    before = contents(".")
    outcome = watch_once(*(() if output is None else ("--output", output)))
    assert outcome.exit_code == ExitCode.USAGE, outcome.output
    assert message in outcome.stderr
    assert "--output" in outcome.stderr
    assert contents(".") == before


def test_what_others_put_into_its_folder_stays(folder):
    """Only what the journal lists is removed: by a new best, and by an evaluation that takes the place of another."""
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
    assert not Path("run/eval/best", former).exists()
    assert [path.read_text() for path in mine] == ["precious"] * 4


LICENSED = """
from pathlib import Path

import gymnasium as gym


def make(context):
    if not Path("licence").exists():
        raise RuntimeError("no licence server")
    return gym.make("CartPole-v1")
"""


@pytest.mark.parametrize("key", ["policy.weights", "policy.policy_kwargs.path"])
def test_a_fault_of_the_environment_is_never_the_checkpoints(folder, monkeypatch, key):
    """It ends the watch, is told, and leaves no entry: the next call evaluates them all."""
    Path("watch_licensed.py").write_text(LICENSED)
    monkeypatch.syspath_prepend(folder)
    if key != "policy.weights":
        use_factory()
    for step in (1, 2):
        age(save(step))
    args = ("--set", "environment.env=watch_licensed:make", "--as", key)
    outcome = watch_once(*args)
    assert outcome.exit_code == ExitCode.CLUSTER, outcome.output
    assert "model_1.safetensors was not evaluated" in outcome.stderr
    assert "no licence server" in outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert not journal().entries
    Path("licence").touch()
    assert watch_once(*args).exit_code == ExitCode.COMPLETE
    assert steps() == [1, 2]


def use_factory():
    """Have checkpoints loaded by a factory that takes files of weights."""
    config = CONFIG | {"policy": {"policy": "watch_factories:from_file"}}
    Path("c.yaml").write_text(yaml.safe_dump(config))


CLAIM = """
import sys
from pathlib import Path
from rl_eval.watching.claim import OutputClaim
OutputClaim(Path("run").resolve(), Path("run/eval").resolve())
"""


@pytest.mark.process
def test_of_two_watchers_one_is_refused(folder):
    """In one process or in two; the refused one, when it goes, lets nobody in; the closed one does."""
    first = make_watcher()
    for _ in range(2):
        with pytest.raises(LogOwned, match="another watcher of this process"):
            make_watcher()
    for closed in (False, True):
        if closed:
            first.close()
        other = subprocess.run(
            [sys.executable, "-c", CLAIM], env=environment(), capture_output=True, text=True, check=False
        )
        refusal = f"run/eval is being written by process {os.getpid()} on"
        assert ("one watcher is enough" in other.stderr, refusal in other.stderr) == (not closed, not closed)
        assert other.returncode == (not closed)
    make_watcher().close()


# ------------------------------------------------------------------------------ crashes


class Crash(BaseException):
    """The process is gone."""


def crash_at(monkeypatch, number):
    """Let the n-th change of a file or folder be the last: a file is half written, anything else does not happen.

    Nothing is cleaned up after it either. The evaluation logs have a test of their own.
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


@pytest.mark.parametrize("stride", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_whatever_is_the_last_thing_that_happens_the_next_watcher_continues(folder, monkeypatch, stride):
    """A crash before and in every n-th change of the output folder: the end is the same, and no episode ran twice."""
    for step in (1, 2):
        save(step, good=step == 2)
    config = CONFIG | {"evaluation": {"num_episodes": 3, "max_episode_steps": 20}}
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # The power stays on.
    undisturbed = make_watcher(config=config, output=Path("plain"))
    undisturbed.run_once(0.0)
    undisturbed.close()
    crashes = left = 0
    for number in range(1, 1000, stride):
        output, crashed = Path(f"out{number}"), False
        with pytest.MonkeyPatch.context() as patch:
            crash_at(patch, number)
            watching = None
            try:
                watching = make_watcher(config=config, output=output)
                watching.run_once(0.0)
            except Crash:
                crashed = True
            finally:
                patch.undo()
                half_written = any(is_temporary(path.name) for path in output.rglob("*"))
                if watching is not None:
                    watching.close()
        crashes += crashed
        again = make_watcher(config=config, output=output)
        again.run_once(0.0)
        again.close()
        assert curve(output) == curve("plain"), number
        assert (output / "curve.png").read_bytes() == Path("plain/curve.png").read_bytes(), number
        assert best(output) == best("plain"), number
        assert rows_in_logs(folder=output) == rows_in_logs(folder="plain"), number
        assert list((output / "checkpoints").iterdir()) == [], number
        assert kept_as_best(output) == [best(output)["checkpoint"]], number
        assert [path for path in output.rglob("*") if is_temporary(path.name)] == [], number
        left += crashed and half_written
        shutil.rmtree(output)
        if not crashed:
            break
    assert crashes > 40 // stride
    assert left >= 20 // stride


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
    "a copy is made": lambda: any(Path("run/eval/checkpoints").glob("*-*/origin.json")),
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
    assert list(Path("run/eval/checkpoints").iterdir()) == []


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


@pytest.mark.slow
@pytest.mark.process
def test_a_signal_between_two_looks_ends_it_cleanly(folder):
    save(1)
    process = start(*watch_args(poll_s=1), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert eventually(Path("run/eval/best/best.json").exists, process=process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, (out, err)
    assert "Traceback" not in err


# ------------------------------------------------------------------------------ while training writes

WRITER = """
import sys, time
from pathlib import Path
source, target = Path(sys.argv[1]), Path(sys.argv[2])
data = source.read_bytes()
with target.open("wb") as stream:
    for part in range(20):
        stream.write(data[part * len(data) // 20:(part + 1) * len(data) // 20])
        stream.flush()
        time.sleep(0.05)
"""


@pytest.mark.slow
@pytest.mark.process
def test_files_that_are_written_slowly_are_evaluated_whole(folder):
    """Two writers beside a running watcher, one that pauses half way: one point each, of the end."""
    Path("done").mkdir()
    finals = {step: save(step, good=True, folder="done") for step in (1, 2)}
    steady = [sys.executable, "-c", WRITER, str(finals[1]), "run/model_1.safetensors"]
    data = finals[2].read_bytes()
    with Path("out.txt").open("w") as out, Path("run/model_2.safetensors").open("wb") as pausing:
        process = start(*watch_args(poll_s=0.1), stdout=out, stderr=subprocess.PIPE, text=True)
        try:
            pausing.write(data[: len(data) // 2])
            pausing.flush()
            subprocess.run(steady, check=True, timeout=60)
            assert eventually(
                lambda: "model_2.safetensors cannot be evaluated yet" in Path("out.txt").read_text(), process=process
            )
            pausing.write(data[len(data) // 2 :])
            pausing.flush()
            assert eventually(lambda: Path("run/eval/curve.csv").exists() and len(curve()) == 2, process=process)
        finally:
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert fingerprints() == {path.name: evaluated(path).fingerprint for path in finals.values()}
    assert {row["status"] for row in curve()} == {"complete"}


def test_the_command_is_documented():
    """Help names the exit codes."""
    assert "usage error" in call("watch", "--help").stdout


def test_a_key_selects_the_weights_of_each_checkpoint(folder):
    """Training checkpoints hold more than weights; the config says which part they are."""
    Path("c.yaml").write_text(yaml.safe_dump({**CONFIG, "policy": {**CONFIG["policy"], "weights_key": "model"}}))
    for step in (1, 2):
        torch.save({"model": weights_of_step(step), "optimizer": {"state": {}}}, f"run/model_{step}.pt")
    outcome = watch_once(checkpoints="run/*.pt")
    assert outcome.exit_code == 0, outcome.output
    assert [row["status"] for row in curve()] == ["complete", "complete"]
