"""Loggers: what they write is read back by the readers people use, also after a kill and after a resume."""

import csv
import errno
import functools
import importlib.util
import io
import itertools
import json
import math
import os
import re
import signal
import struct
import subprocess
import sys
import tempfile
import time
import types
from dataclasses import replace
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from rich.console import Console

from rl_eval.atomic_write import is_temporary, temporary_name
from rl_eval.errors import ConfigError, UsageError
from rl_eval.recording.video import Encoder, Video
from rl_eval.results.result import EvalPoint
from rl_eval.training.loggers import (
    ConsoleLogger,
    CSVLogger,
    JSONLinesLogger,
    MLflowLogger,
    TensorBoardLogger,
    WandbLogger,
)
from tests.refused import refused, untold
from tests.unit.results_world import make_result


def point(step=100, returns=(1.0, 2.0, 4.0), prefix="eval", version=3, failed=0, **extra) -> EvalPoint:
    """Build a point whose result has these returns, and failed episodes after them."""
    count = len(returns)
    result = make_result(
        returns=np.array([*returns, *[np.nan] * failed]),
        success=-1,
        failed=range(count, count + failed),
        attempts=1,
        reason=f"{failed} episodes\nfailed" if failed else "",
        provenance={"finished_at": "2025-01-01T00:00:00+00:00"},
    )
    named = {f"{prefix}/{key}" if prefix else key: value for key, value in (result.metrics | extra).items()}
    return EvalPoint(step, version, result, named)


def make_video(tmp_path, index=2) -> Video:
    """Build a video of ten frames."""
    encoder = Encoder(tmp_path / "source.mp4", 10)
    for shade in range(10):
        encoder.write(np.full((32, 48, 3), 20 * shade, np.uint8))
    encoder.close()
    content = (tmp_path / "source.mp4").read_bytes()
    return Video(index, 7, 1, True, 4.0, 9, (), 10, False, 10.0, 48, 32, content)


def json_rows(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def csv_rows(path):
    with Path(path).open(newline="") as file:
        return list(csv.DictReader(file))


FILES = [(JSONLinesLogger, json_rows), (CSVLogger, csv_rows)]
both = pytest.mark.parametrize(("logger", "rows"), FILES, ids=["jsonl", "csv"])


# ------------------------------------------------------------------------------ files


def test_a_line_holds_everything(tmp_path):
    """NaN is null in strict JSON, and an empty cell; floats lose no bit."""
    one = point(returns=(0.1, 0.2, 0.7), best=math.inf, worst=-math.inf)
    for logger, rows in FILES:
        log = logger(tmp_path / "deep" / logger.__name__)
        log.log(one)
        (row,) = rows(log.path)
        as_text = str if logger is CSVLogger else lambda value: value
        assert (row["step"], row["weights_version"], row["status"]) == (as_text(100), as_text(3), "complete")
        assert (row["time"], row["fingerprint"]) == ("2025-01-01T00:00:00+00:00", one.result.fingerprint)
        assert float(row["eval/episode_return_mean"]) == one.result.mean_return
        assert row["eval/success_rate"] == ("" if logger is CSVLogger else None)
        assert (row["eval/best"], row["eval/worst"]) == ("inf", "-inf")
        assert list(row)[5:] == list(one.metrics)


@functools.cache
def plain_point(step, value, names):
    return point(step, returns=(value, value + 1.0), **dict.fromkeys(names, value))


class StepFile(RuleBasedStateMachine):
    """A file of one of both kinds, beside a table in memory."""

    @initialize(kind=st.sampled_from(FILES))
    def begin(self, kind):
        self.folder = tempfile.TemporaryDirectory()
        self.logger, self.rows = kind
        self.path = Path(self.folder.name, "curve")
        self.log = self.logger(self.path)
        self.table, self.columns = {}, []

    @rule(
        step=st.integers(0, 5),
        value=st.sampled_from([0.1, -3.0, 1e300]),
        names=st.sets(st.sampled_from(["goals", 'a,"b"', "new\nline", "ä"])).map(sorted).map(tuple),
        full=st.booleans(),
    )
    def log_a_point(self, step, value, names, full):
        one = plain_point(step, value, names)
        if full:  # Of the new file half is written.
            write = Path.write_text
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Path, "write_text", lambda path, text, **more: full_disk(write, path, text, **more))
                with pytest.raises(OSError) as caught:
                    self.log.log(one)
            assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(self.path))
            assert re.findall(r"\d+", caught.value.strerror) == [str(step)]
            return
        self.log.log(one)
        self.table[step] = {name: one.metrics.get(f"eval/{name}") for name in (*names, "episode_return_mean")}
        self.columns = list(dict.fromkeys([*self.columns, *one.metrics]))

    @rule()
    def resume(self):
        self.log = self.logger(self.path)

    @rule()
    def leave_half_a_file(self):
        (self.path.parent / temporary_name("curve")).write_text("half")

    @invariant()
    def every_step_has_one_line(self):
        """At its first place; a column of the table is where its first point put it, at the right."""
        rows = self.rows(self.path) if self.path.exists() else []
        assert [int(row["step"]) for row in rows] == list(self.table)
        for row, expected in zip(rows, self.table.values(), strict=True):
            found = {name: row.get(f"eval/{name}") for name in expected}
            assert {name: float(value) for name, value in found.items()} == expected
        if rows and self.logger is CSVLogger:
            assert {tuple(row)[5:] for row in rows} == {tuple(self.columns)}

    @invariant()
    def nothing_else_is_left(self):
        left = {path.name for path in self.path.parent.iterdir()} - {"curve"}
        assert all(is_temporary(name) for name in left)

    def teardown(self):
        self.folder.cleanup()


def full_disk(write, path, text, **more):
    write(path, text[: len(text) // 2], **more)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


StepFile.TestCase.settings = settings(max_examples=40, stateful_step_count=12, deadline=None)
TestStepFile = StepFile.TestCase


@pytest.mark.process
@both
def test_a_kill_leaves_the_file_as_it_was(tmp_path, logger, rows):
    """Half a new file beside it is removed by the next point; an empty file is no obstacle."""
    path = tmp_path / "curve"
    write = Path.write_text
    for before in ([], [10]):
        child = os.fork()
        if not child:
            Path.write_text = lambda self, text, **_: (write(self, text[: len(text) // 2]), os.kill(os.getpid(), 9))
            try:
                logger(path).log(point(20))
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        assert len(list(tmp_path.iterdir())) == 1 + path.exists()
        assert [int(row["step"]) for row in (rows(path) if path.exists() else [])] == before
        path.touch()
        logger(path).log(point(10))
        assert list(tmp_path.iterdir()) == [path]


FOREIGN = (
    "hello\nworld\n",
    '"a\n',
    "[1]\n",
    "step,train_loss,lr\n10000,0.51,3e-4\n",
    "step,weights_v",
    " \n\n \n",
    '{"step": 10000, "loss": 0.5}\n{"step": 20000, "loss": 0.4}\n',
    '{"step": 10000, "loss": 0.5}',
    '{"step": 10',
    "step,\udcff\n",
)
"""Text, half a quote, lists, tables and objects of a trainer, torn ones, blank lines, and what is not UTF-8."""


@both
def test_a_file_of_something_else_is_refused(tmp_path, logger, rows):
    """At once, or when it appears before the first point, by name and with what helps; not a byte of it changes."""
    path = tmp_path / "curve"
    logger(path).log(point(10))
    ours = path.read_text()
    columns = len(ours.splitlines()[0].split(","))
    line = '{"loss": 0.5}' if logger is JSONLinesLogger else ",".join("x" * columns)
    behind = [ours + line, ours + line + "\n", ours + "# learning rate lowered\n", ours[:-50]]
    for content in (*FOREIGN, *behind):
        path.unlink()
        log = logger(path)
        path.write_text(content, errors="surrogateescape")
        before = path.read_bytes(), path.stat().st_mtime_ns
        for use in (lambda: logger(path), lambda log=log: log.log(point(10))):
            with refused(UsageError, "path"):
                use()
        assert (path.read_bytes(), path.stat().st_mtime_ns) == before


@pytest.mark.parametrize("logger", [JSONLinesLogger, CSVLogger])
def test_a_metric_with_the_name_of_a_column_is_refused(tmp_path, logger):
    """It would replace the value of the row."""
    with refused(UsageError, "status"):
        logger(tmp_path / "rows").log(point(prefix="", status=1.0))


# ------------------------------------------------------------------------------ console


@pytest.mark.process
def test_the_console_shows_one_line_per_point_and_video(tmp_path):
    """However narrow, for files and pipes; also if every episode failed, and with what is odd about a video."""
    text, video = io.StringIO(), make_video(tmp_path)
    log = ConsoleLogger(Console(file=text, width=20))
    for one in (point(10_000, speed=0.25), point(20_000, failed=2), point(failed=2, returns=())):
        log.log(one)
    log.log_video(video.save(tmp_path), point())
    log.log_video(replace(video, differences=("length",)), point())
    first, second, third, *videos = text.getvalue().splitlines()
    assert third.count("nan") == 3
    interval = point().result.interval
    assert untold(first, "10,000", 3, 2.33333) == []
    assert f"({interval.low:.6g} to {interval.high:.6g}) 95%" in first
    assert untold(first, 3, 300, "2.0 s", "speed", 0.25) == []
    assert untold(second, "partial", 2) == []
    assert videos == [
        f"  video of episode 2: {tmp_path / video.name}",
        "  video of episode 2 (differs from the record in length)",
    ]


# ------------------------------------------------------------------------------ TensorBoard


def events(folder, run="eval"):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    everything = dict.fromkeys(("scalars", "histograms", "images", "tensors"), 0)
    return EventAccumulator(str(Path(folder, run)), size_guidance=everything).Reload()


def scalars(folder, tag="eval/episode_return_mean"):
    return [(event.step, event.value) for event in events(folder).Scalars(tag)]


def test_tensorboard_reads_every_scalar_back(tmp_path):
    """All finite metrics, the ends of the interval among them; the others are left out."""
    points = [point(10), point(20, returns=(0.1, 0.2), bad=math.nan, worse=math.inf)]
    with TensorBoardLogger(tmp_path) as log:
        for one in points:
            log.log(one)
    read = events(tmp_path)
    expected = {name: value for name, value in points[1].metrics.items() if math.isfinite(value)}
    assert {"eval/episode_return_ci_low", "eval/episode_return_ci_high"} <= set(expected)
    assert set(read.Tags()["scalars"]) == set(expected)
    for name, value in expected.items():
        found = read.Scalars(name)
        assert [event.step for event in found] == [10, 20]
        assert found[1].value == np.float32(value)
        assert found[0].value == np.float32(points[0].metrics[name])


def test_tensorboard_reads_histogram_and_band_back(tmp_path):
    """Of the counted returns: how many, their sum, least and greatest, and where they lie; of the mean, its ends."""
    from tensorboard.plugins.custom_scalar import layout_pb2

    returns = [0.0] * 10 + [1.0] * 30 + [5.0] * 2
    with TensorBoardLogger(tmp_path) as log:
        log.log(point(10, returns=returns, failed=1, prefix="held_out"))
        log.log(point(20, returns=[3.0] * 4, prefix="held_out"))
        log.log(point(30, returns=[], failed=1, prefix="held_out"))
    read = events(tmp_path, "held_out")
    first, second = read.Histograms("held_out/episode_return")
    found = first.histogram_value
    assert (found.num, found.sum, found.min, found.max) == (42, 40, 0, 5)
    assert sorted(count for count in found.bucket if count) == [2, 10, 30]
    assert [end % 1 for end in found.bucket_limit] == [0.5] * len(found.bucket_limit)
    assert (second.step, second.histogram_value.num, second.histogram_value.sum) == (20, 4, 12)
    (content,) = read.Tensors("custom_scalars__config__")[0].tensor_proto.string_val
    (category,) = layout_pb2.Layout.FromString(content).category
    (series,) = category.chart[0].margin.series
    ends = [series.value, series.lower, series.upper]
    assert ends == [f"held_out/episode_return_{end}" for end in ("mean", "ci_low", "ci_high")]


@pytest.mark.process
@pytest.mark.parametrize("prefix", ["eval", ""])
def test_tensorboard_gets_videos_as_animated_pictures(tmp_path, prefix):
    """It shows no others. A point is readable at once; ``log_prefix=""`` leaves the prefix out."""
    start = prefix and f"{prefix}/"
    with TensorBoardLogger(tmp_path) as log:
        one = point(10, prefix=prefix)
        log.log(one)
        assert len(scalars(tmp_path, f"{start}episode_return_mean")) == 1
        log.log_video(make_video(tmp_path), one)
    assert events(tmp_path).Tags()["histograms"] == [f"{start}episode_return"]
    (image,) = events(tmp_path).Images(f"{start}episode_2")
    assert (image.step, image.width, image.height) == (10, 48, 32)
    assert image.encoded_image_string.startswith(b"GIF89a")


def test_tensorboard_hides_what_was_written_from_a_repeated_step_on(tmp_path, monkeypatch):
    """In the same process, and after a restart; and nothing of the training, which is ahead of its evaluation."""
    from tensorboard.summary.writer import event_file_writer
    from torch.utils.tensorboard import SummaryWriter

    # A second passes between two files of events, whose names begin with it.
    clock = types.SimpleNamespace(**vars(time))
    clock.time = itertools.count(int(time.time())).__next__
    monkeypatch.setattr(event_file_writer, "time", clock)
    with SummaryWriter(tmp_path) as training:
        for step in range(40):
            training.add_scalar("train/loss", 1.0, step)
        with TensorBoardLogger(tmp_path) as log:
            for step in (10, 20, 30):
                log.log(point(step))
            log.log(point(20, returns=(7.0, 9.0)))
        mean = pytest.approx(7 / 3)
        assert scalars(tmp_path) == [(10, mean), (20, 8)]
        with TensorBoardLogger(tmp_path) as log:
            log.log(point(20, returns=(1.0, 2.0)))
            log.log(point(30))
        assert scalars(tmp_path) == [(10, mean), (20, 1.5), (30, mean)]
        for step in range(40, 60):
            training.add_scalar("train/loss", 1.0, step)
    assert [event.step for event in events(tmp_path, ".").Scalars("train/loss")] == list(range(60))


@pytest.mark.process
@pytest.mark.parametrize("module", ["torch.utils.tensorboard", "tensorboardX"])
def test_a_writer_that_is_there_is_used_and_left_open(tmp_path, module):
    """It is training's, in whose folder nothing is hidden."""
    training = pytest.importorskip(module).SummaryWriter(str(tmp_path))
    for step in range(40):
        training.add_scalar("train/loss", 1.0, step)
    with TensorBoardLogger(writer=training) as log:
        for one in (point(10), point(20), point(10)):
            log.log(one)
        log.log_video(make_video(tmp_path), one)
    if module != "tensorboardX":  # Its flush does not wait for its own queue.
        assert len(events(tmp_path, ".").Scalars("eval/episode_return_mean")) == 3
    training.add_scalar("train/loss", 1.0, 40)
    training.close()
    read = events(tmp_path, ".")
    assert [event.step for event in read.Scalars("train/loss")] == list(range(41))
    assert [event.step for event in read.Scalars("eval/episode_return_mean")] == [10, 20, 10]
    assert [read.Histograms("eval/episode_return")[1].histogram_value.num] == [3]
    assert read.Images("eval/episode_2")[0].encoded_image_string.startswith(b"GIF89a")
    assert len(list(tmp_path.glob("events.*"))) == 1, "it was not closed and opened again"
    assert "custom_scalars__config__" not in read.Tags()["tensors"]


# ------------------------------------------------------------------------------ MLflow


@pytest.fixture
def store(monkeypatch, tmp_path):
    """A store of files, and MLflow's client of it."""
    for name, value in {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    return pytest.importorskip("mlflow").MlflowClient()


def only_run(store, experiment):
    (run,) = store.search_runs([store.get_experiment_by_name(experiment).experiment_id])
    return run


def values(store, run, name="eval/episode_return_mean"):
    return [(metric.step, metric.value) for metric in store.get_metric_history(run.info.run_id, name)]


@pytest.mark.process
def test_mlflow_reads_every_metric_and_the_video_back(store, tmp_path):
    """All finite metrics, at their steps; a step that is evaluated again is a second value."""
    one = point(10, bad=math.nan, worse=math.inf)
    with MLflowLogger("curves", run_name="first", tags={"team": "a"}) as log:
        log.log(one)
        log.log_video(make_video(tmp_path), one)
        log.log(point(5, returns=(0.1, 0.2)))
        log.log(point(10, returns=(7.0,)))
        assert only_run(store, "curves").info.status == "RUNNING"
    run = only_run(store, "curves")
    assert (run.info.run_name, run.data.tags["team"], run.info.status) == ("first", "a", "FINISHED")
    finite = {name for name, value in one.metrics.items() if math.isfinite(value)}
    assert finite <= set(run.data.metrics)
    assert not {"eval/bad", "eval/worse"} & set(run.data.metrics)
    assert values(store, run) == [(10, one.result.mean_return), (5, pytest.approx(0.15)), (10, 7.0)]
    (artifact,) = store.list_artifacts(run.info.run_id, "eval/step_10")
    video = Path(store.download_artifacts(run.info.run_id, artifact.path, str(tmp_path)))
    assert video.read_bytes() == make_video(tmp_path).content


def test_mlflow_leaves_a_run_that_it_was_given_open(store, monkeypatch):
    """By its object or its id; names that MLflow refuses are written otherwise. No run starts before its first point.

    The experiment of a new one is that which the environment names.
    """
    run = store.create_run(store.create_experiment("train"))
    for given in (run, run.info.run_id):
        with MLflowLogger(run=given) as log:
            log.log(point(10, **{"speed[%]": 0.5}))
        log.close()
    found = only_run(store, "train")
    assert found.info.status == "RUNNING"
    assert values(store, found) == [(10, point().result.mean_return)] * 2
    assert values(store, found, "eval/speed___") == [(10, 0.5)] * 2
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "named outside")
    log = cloudpickle.loads(cloudpickle.dumps(MLflowLogger()))
    log.close()
    assert store.get_experiment_by_name("named outside") is None
    log.log(point(10))
    assert only_run(store, "named outside").info.status == "RUNNING"


# ------------------------------------------------------------------------------ W&B


@pytest.fixture
def quiet(monkeypatch, tmp_path):
    """Keep W&B to this folder, and end its service after the test."""
    import wandb

    monkeypatch.chdir(tmp_path)
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield wandb
    wandb.teardown()


def wandb_records(folder):
    """Read the transaction log of an offline run: LevelDB's log format, with protocol buffers in it."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = Path(folder).glob("wandb/offline-run-*/run-*.wandb")
    content, offset, records, parts = path.read_bytes(), 7, [], b""
    while offset + 7 <= len(content):
        if 32768 - offset % 32768 < 7:
            offset += 32768 - offset % 32768
            continue
        _, length, kind = struct.unpack("<IHB", content[offset : offset + 7])
        parts += content[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):
            records.append(Record.FromString(parts))
            parts = b""
    return records


def wandb_history(folder):
    told = [one.history.item for one in wandb_records(folder) if one.WhichOneof("record_type") == "history"]
    return [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row} for row in told]


@pytest.mark.process
def test_wandb_writes_an_offline_run(quiet, tmp_path):
    """With every finite metric, the histogram and the video, over the training step."""
    one = point(10, bad=math.nan, worse=math.inf)
    with WandbLogger("curves", mode="offline", dir=str(tmp_path), name="first") as log:
        log.log(one)
        log.log_video(make_video(tmp_path), one)
        log.log(point(5))
    quiet.teardown()  # Its service writes the last of it when it ends.
    history = wandb_history(tmp_path)
    rows = [row for row in history if "eval/episode_return_mean" in row]
    assert [row["eval/step"] for row in rows] == [10, 5]
    finite = {name: value for name, value in one.metrics.items() if math.isfinite(value)}
    assert {name: rows[0][name] for name in finite} == pytest.approx(finite)
    assert "eval/bad" not in rows[0]
    assert sum(rows[0]["eval/episode_return/values"]) == 3
    assert [end % 1 for end in rows[0]["eval/episode_return/bins"]] == [0.5] * len(rows[0]["eval/episode_return/bins"])
    assert [row["eval/step"] for row in history if "eval/episode_2/path" in row] == [10]
    (video,) = Path(tmp_path).glob("wandb/offline-run-*/files/media/videos/eval/*.mp4")
    assert video.read_bytes() == make_video(tmp_path).content
    axes = [record.metric for record in wandb_records(tmp_path) if record.WhichOneof("record_type") == "metric"]
    assert {axis.step_metric for axis in axes if axis.name} == {"eval/step"}
    assert {*finite, "eval/episode_return", "eval/episode_2"} <= {axis.name for axis in axes}


@pytest.mark.process
def test_wandb_leaves_a_run_that_it_was_given_open(quiet, tmp_path):
    run = quiet.init(project="train", mode="offline", dir=str(tmp_path), reinit="create_new")
    with WandbLogger(run=run) as log:
        log.log(point(10))
    run.log({"loss": 1.0})
    run.finish()
    quiet.teardown()
    history = wandb_history(tmp_path)
    assert [row["eval/step"] for row in history if "eval/step" in row] == [10]
    assert [row["loss"] for row in history if "loss" in row] == [1.0]


# ------------------------------------------------------------------------------ all of them


@pytest.mark.parametrize("logger", [TensorBoardLogger, WandbLogger, MLflowLogger])
def test_a_missing_package_is_named_with_its_extra(monkeypatch, logger):
    """When the logger is made, and not when the first evaluation ends."""
    package = logger.__name__.removesuffix("Logger").lower()
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    with refused(ConfigError, "logger"):
        logger("x")


WRITER = types.SimpleNamespace(add_scalar=print)


@pytest.mark.parametrize(
    ("logger", "args", "options", "key"),
    [
        (TensorBoardLogger, [], {}, "log_dir"),
        (TensorBoardLogger, ["x"], {"writer": WRITER}, "log_dir"),
        (TensorBoardLogger, [WRITER], {}, "log_dir"),
        (TensorBoardLogger, [], {"writer": "x"}, "log_dir"),
        (WandbLogger, ["curves"], {"run": object()}, "run"),
        (MLflowLogger, ["curves"], {"run": "0123"}, "run"),
        (MLflowLogger, [], {"run": "0123", "run_name": "x"}, "run"),
    ],
)
def test_a_place_is_given_once(logger, args, options, key):
    """A run or a writer together with settings of another would leave one of them ignored."""
    with refused(ConfigError, key):
        logger(*args, **options)


@pytest.mark.process  # Some versions of W&B look for libraries with a program.
@pytest.mark.parametrize(
    "make",
    [
        ConsoleLogger,
        lambda: JSONLinesLogger("curve"),
        lambda: CSVLogger("curve"),
        lambda: TensorBoardLogger("curve"),
        lambda: WandbLogger("curves", mode="disabled"),
    ],
)
def test_loggers_travel_before_their_first_point(make, tmp_path, monkeypatch):
    """To an evaluator in another process; before it they write nothing, and closing twice is fine."""
    monkeypatch.chdir(tmp_path)
    arrived = cloudpickle.loads(cloudpickle.dumps(make()))
    arrived.close()
    arrived.close()
    assert list(tmp_path.iterdir()) == []
    arrived.log(point())
    arrived.close()
    assert bool(list(tmp_path.iterdir())) == (type(arrived) not in (ConsoleLogger, WandbLogger))


@pytest.mark.process
def test_loggers_are_imported_when_they_are_used():
    """None brings the packages of another; nor does the log bring what reads and writes its files."""
    heavy = ("torch", "ray", "wandb", "mlflow", "tensorboard", "imageio_ffmpeg", "pyarrow", "obstore")
    script = (
        "import sys, rl_eval.log, rl_eval.training.loggers as l; [getattr(l, name) for name in l.__all__]\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
