"""Bad files with the libraries that load them: without trust, no code of a file runs, and each is a usage error."""

import shutil
from pathlib import Path

import pytest

from tests.unit.bad_files import FILES, RAN
from tests.unit.cli_world import call

pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}Warning") for kind in ("Deprecation", "Future", "User")]


@pytest.mark.parametrize("name", FILES)
def test_without_trust_no_code_of_a_file_runs(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    FILES[name][1](tmp_path / name)
    done = call("run", "--env", "CartPole-v1", "-n", 1, "--policy", name)
    shutil.rmtree(name) if Path(name).is_dir() else Path(name).unlink()
    assert not Path(RAN).exists()
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.output
