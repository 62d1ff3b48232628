"""Settings that must hold before torch or Ray are imported by any test, and what every test starts from."""

import os
import signal
import tempfile
from collections.abc import Iterator

import pytest

from rl_eval.numerics import reproducible_environment
from tests.planted import leaking_files, leaks

# The in-process backend is compared with runners, which start with these variables.
os.environ.update(reproducible_environment())
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
# A process in the background starts with Ctrl-C ignored, and some tests press it.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Nothing of the user who runs the tests is touched; child processes inherit it.
_STATE = tempfile.TemporaryDirectory(prefix="rl_eval-state-")
os.environ["XDG_STATE_HOME"] = _STATE.name


@pytest.fixture(autouse=True)
def _same_initial_weights() -> None:
    """Modules that a test makes are the same in every run, as pytest-randomly sees to for other generators."""
    import torch

    torch.manual_seed(0)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Offer a scan for secrets that tests have planted."""
    parser.addoption(
        "--scan-secrets",
        action="store_true",
        help="fail if a secret that a test planted is in any file or line that the tests wrote",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Fail a test that printed a planted secret."""
    report = yield
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
