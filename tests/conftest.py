"""Settings that must hold before torch or Ray are imported by any test, and what every test starts from."""

import faulthandler
import functools
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
import typer.testing
from _pytest.faulthandler import fault_handler_stderr_fd_key

from rl_eval.supervision.process_environment import reproducible_environment
from tests.planted import leaking_files, leaks
from tests.tiers import TierWatch, scope_of, with_derived_marks

# Child processes compile what they import once, and not each anew.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# The in-process backend is compared with runners, which start with these variables.
os.environ.update(reproducible_environment())
# Every evaluation checks the rules of its schedule.
os.environ["RL_EVAL_VALIDATE"] = "1"
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
# Every warning of Ray is printed at once, and not as one of many in a later test.
os.environ["RAY_DEDUP_LOGS"] = "0"
# Runners have a runtime environment, for which no worker that was started in advance is of use.
os.environ.update({"RAY_enable_worker_prestart": "0", "RAY_prestart_worker_first_driver": "0"})
# A process in the background starts with Ctrl-C ignored, and some tests press it.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # By nohup, which stays in force for this process alone.
    signal.signal(signal.SIGHUP, lambda number, frame: None)

_MOST_WORKERS = 4
"""One worker has all tests on Ray, which take as long as those of three others."""
_WATCH = TierWatch()
_LOST_WORKERS: list[str] = []


# ------------------------------------------------------------------------------ which tests run, and where


def pytest_addoption(parser: pytest.Parser) -> None:
    """Offer a scan for secrets that tests have planted."""
    parser.addoption(
        "--scan-secrets",
        action="store_true",
        help="fail if a secret that a test planted is in any file or line that the tests wrote",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Let hypothesis try a few examples of each law; ``--hypothesis-profile=default`` lets it try a hundred."""
    if config.pluginmanager.hasplugin("hypothesispytest") and not config.getoption("--hypothesis-profile"):
        from hypothesis import settings

        settings.register_profile("quick", max_examples=25, deadline=None)
        settings.load_profile("quick")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Run a few named files in this process, and whole folders in as many workers as there are cores.

    Of all tests, many wait for processes, so that one worker more has something to do.
    """
    if config.args and all(Path(arg.partition("::")[0]).is_file() for arg in config.args):
        return 0
    everything = config.args_source is not pytest.Config.ArgsSource.ARGS
    return min((os.cpu_count() or 1) + everything, _MOST_WORKERS)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give all tests on the shared cluster to one worker, which begins with them, while the others share the rest."""
    from xdist.scheduler import LoadScopeScheduling

    class OneWorkerOnRay(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    return OneWorkerOnRay(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Note how the process of a worker ended that nobody had asked to end, which pytest-xdist does not say."""
    if error:
        _LOST_WORKERS.append(f"{node.gateway.id} ended with status {node.gateway._io.popen.wait(60)}")


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which workers were lost, and how."""
    for line in _LOST_WORKERS:
        terminalreporter.write_line(line)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests on Ray first."""
    items[:] = with_derived_marks(items)


# ------------------------------------------------------------------------------ what every test starts from


@pytest.fixture(autouse=True)
def _same_initial_weights() -> None:
    """Modules that a test makes are the same in every run, as pytest-randomly sees to for other generators."""
    if torch := sys.modules.get("torch"):
        # Not torch.manual_seed: where CUDA is not initialized, each call of it keeps a traceback.
        torch.default_generator.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _commands_are_made_once() -> Iterator[None]:
    """Typer reads the annotations of all commands anew in each call of a runner, which takes most of a short one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.testing, "_get_command", functools.cache(typer.main.get_command))
        yield


@pytest.fixture(scope="session")
def _nodes() -> Iterator[object]:
    """Start the one Ray cluster of the session, with more logical CPUs than any test asks for."""
    from machines import shared_cluster

    with shared_cluster() as cluster:
        yield cluster


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Somebody who reads the docs, in a folder with the configs of this project, from which modules can be imported."""
    from tests.unit.pages_world import ROOT, Reader, forget

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    yield Reader(tmp_path)
    forget(tmp_path)


@pytest.fixture(scope="module")
def ray_cluster(_nodes: object) -> Iterator[None]:
    """Connect a module's tests to the cluster of the session; afterwards nothing of theirs may run there."""
    from machines import connected

    with connected(_nodes):
        yield


# ------------------------------------------------------------------------------ what every test must keep


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Watch what a test starts; a crash prints its stacks, though ``ray.shutdown`` takes the handlers for that away."""
    if faulthandler.is_enabled():
        faulthandler.disable()
        faulthandler.enable(file=item.config.stash[fault_handler_stderr_fd_key])
    with _WATCH.over(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Fail a test that printed a planted secret, or started what its marks do not allow."""
    report = yield
    if (complaint := _WATCH.complaint()) and report.passed:
        report.outcome, report.longrepr = "failed", complaint
    scanned = item.config.getoption("--scan-secrets") and report.when == "call" and report.passed
    if scanned and (found := leaks("".join(text for _, text in report.sections))):
        report.outcome, report.longrepr = "failed", "printed a planted secret:\n" + "\n".join(found)
    return report


@pytest.fixture(scope="session", autouse=True)
def _no_secret_in_any_file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail the session's last test if a planted secret is in a file of any test."""
    yield
    if request.config.getoption("--scan-secrets"):
        found = list(leaking_files(tmp_path_factory.getbasetemp()))
        assert not found, "\n".join(found)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a config and the module that it names."""
    from tests.unit.cli_world import make_folder

    return Path(make_folder(tmp_path, monkeypatch))
