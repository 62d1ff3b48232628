"""Bad files: to recognise them runs nothing, imports no library and takes little memory, and has a kind or an error."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rl_eval.config.policy_sources import schemes
from tests.unit.bad_files import FILES, RAN

RECOGNISES = """
import json, resource, sys
from pathlib import Path
from rl_eval.config.model_files import described
from rl_eval.config.policy_sources import named_source, scheme_of, schemes
from rl_eval.errors import ConfigError

names = {id(scheme): name for name, scheme in schemes().items()}
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
kinds, errors = {}, {}
for path in sorted(Path("files").iterdir()):
    kinds[path.name] = names.get(id(scheme_of(described(path))))
    try:
        named_source(str(path))
    except ConfigError as error:
        errors[path.name] = str(error)
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
json.dump([kinds, errors, memory, sorted({name.partition(".")[0] for name in sys.modules})], sys.stdout)
"""
LIBRARIES = {"torch", "onnxruntime", "stable_baselines3", "d3rlpy", "skrl", "rsl_rl", "rl_games"}


@pytest.mark.process
def test_bad_files_are_recognised_or_refused(tmp_path: Path) -> None:
    assert len(FILES) >= 40
    (tmp_path / "files").mkdir()
    for name, (_, make) in FILES.items():
        make(tmp_path / "files" / name)
    command = [sys.executable, "-c", RECOGNISES]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    shutil.rmtree(tmp_path / "files")  # Nobody scans them.
    kinds, errors, memory, modules = json.loads(done.stdout)
    known = {name: kind if kind in schemes() else "torch" for name, (kind, _) in FILES.items() if kind}
    assert kinds == {name: known.get(name) for name in FILES}
    assert {name for name, kind in kinds.items() if kind is None} <= errors.keys()
    assert "git lfs pull" in errors["pointer.pt"]
    assert memory < 100_000
    assert not LIBRARIES & set(modules)
    assert not (tmp_path / RAN).exists()
