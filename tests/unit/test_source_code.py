"""Which files and packages stand for the code of an evaluation, and what a log makes of a change in them."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from torch import nn

from rl_eval import EvalConfig
from rl_eval.errors import LogError, LogMismatch
from rl_eval.log import EvaluationLog, Manifest, read_log
from rl_eval.log.manifest import checksum
from rl_eval.results.source_code import code_of
from tests.refused import refused
from tests.unit.log_world import make_batch, make_manifest


def zeros(observations: Any) -> Any:
    return observations[:, 0] * 0


def files(config: EvalConfig) -> dict[str, str]:
    return {module: found["sha256"] for module, found in code_of(config.build())["files"].items()}


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a package ``plain_project`` that nothing has imported, and that fails when imported."""
    folder = tmp_path / "plain_project"
    (folder / "deep").mkdir(parents=True)
    (folder / "__init__.py").write_text("from .deep.envs import build as make\nfrom . import policies\n1 / 0\n")
    (folder / "policies.py").write_text("def make(): ...\n")
    (folder / "deep" / "__init__.py").write_text("")
    (folder / "deep" / "envs.py").write_text("def build(context): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def written(project: Path) -> dict[str, str]:
    """Return what is expected of all files of a project."""
    paths = {".".join(path.relative_to(project.parent).with_suffix("").parts): path for path in project.rglob("*.py")}
    return {module.removesuffix(".__init__"): sha256(path) for module, path in paths.items()}


def test_a_name_is_followed_to_the_file_that_defines_it_without_an_import(project: Path) -> None:
    config = EvalConfig().environment("plain_project:make").policy("plain_project:policies.make")

    assert files(config) == written(project)
    assert "plain_project" not in sys.modules


IMPORTS = {
    "absolute": "import plain_project.other",
    "renamed": "import plain_project.other as o",
    "inside a function": "def make():\n    from plain_project.other import thing",
    "relative": "from .other import *",
    "module of a package": "from . import other",
    "through another": "from .deep import *",
    "entry point": "register('My-v0', entry_point='plain_project.other:Env')",
}


@pytest.mark.parametrize("statement", IMPORTS.values(), ids=list(IMPORTS))
@pytest.mark.parametrize("env", ["plain_project.policies:make", "plain_project:My-v0"])
def test_files_are_followed_through_what_they_import(project: Path, env: str, statement: str) -> None:
    """A cycle too; a package that is not installed is followed from any of its modules."""
    (project / "policies.py").write_text(statement + "\n")
    (project / "deep" / "__init__.py").write_text("from .. import other\n")
    (project / "other.py").write_text("from . import policies\nimport json, numpy\n")
    before = files(EvalConfig().environment(env))
    (project / "other.py").write_text("import json\n")

    assert before != files(EvalConfig().environment(env)) == written(project)


def test_folders_without_init_files_are_followed(project: Path) -> None:
    for path in project.rglob("__init__.py"):
        path.unlink()
    (project / "deep" / "er").mkdir()
    (project / "deep" / "er" / "envs.py").write_text("from plain_project.deep import envs\n")
    found = files(EvalConfig().environment("plain_project.deep.er.envs:make"))
    assert sorted(found) == ["plain_project.deep.envs", "plain_project.deep.er.envs"]


@pytest.mark.parametrize("env", ["plain_project.deep.envs:Known-v0", "Known-v0"])
def test_a_registered_gymnasium_id_stands_for_its_class_too(
    project: Path, env: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "__init__.py").write_text("")
    spec = gymnasium.envs.registration.EnvSpec("Known-v0", entry_point="plain_project.policies:Env")
    monkeypatch.setitem(gymnasium.registry, "Known-v0", spec)
    found = files(EvalConfig().environment(env))
    assert "plain_project.policies" in found
    assert ("plain_project.deep.envs" in found) == (":" in env)


def test_names_among_the_arguments_stand_for_their_files(project: Path) -> None:
    (project / "__init__.py").write_text("")
    kwargs = {"wrappers": ["plain_project.policies:make"], "url": "http://there:80/x", "text": "plain_project: no name"}
    assert "plain_project.policies" in files(EvalConfig().environment("CartPole-v1", env_kwargs=kwargs))
    assert "plain_project.policies" in files(
        EvalConfig().environment("CartPole-v1").policy("a:b", policy_kwargs=kwargs)
    )


def test_a_package_that_is_installed_elsewhere_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on clusters, whose modules put other folders of packages on the path."""
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "vendored.py").write_text("")
    (tmp_path / "mine.py").write_text("import vendored, torch, rl_eval\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    assert list(files(EvalConfig().environment("mine:make"))) == ["mine"]


def test_files_of_installed_packages_stand_for_their_versions() -> None:
    found = code_of(EvalConfig().environment("CartPole-v1").policy(nn.Linear(2, 2)).build())

    versions = {name: importlib.metadata.version(name) for name in ("gymnasium", "torch")}
    assert found == {"files": {}, "packages": versions}


def test_live_objects_stand_for_their_files() -> None:
    """Functions, classes, partials and instances, also among the arguments."""

    class Env(gymnasium.Wrapper[Any, Any, Any, Any]): ...

    configs = [
        *(EvalConfig().environment(env) for env in (Env, functools.partial(Env), lambda _: Env(gymnasium.Env()))),
        EvalConfig().environment("CartPole-v1").policy(zeros),
        EvalConfig().environment("CartPole-v1", env_kwargs={"wrappers": [[Env]]}),
    ]
    for config in configs:
        assert files(config)[__name__] == sha256(Path(__file__))
        assert not any(module.startswith("rl_eval") for module in files(config)), "that is a package of its own"


def test_what_has_no_file_is_left_out() -> None:
    exec("def made(context): ...", scope := {"__name__": "nowhere"})
    for env in (scope["made"], len, "no_such_module:make", "no.such:make", "NoSuch-v0"):
        assert code_of(EvalConfig().environment(env).build()) == {"files": {}, "packages": {}}


SCRIPT = """
import json, sys
from rl_eval import EvalConfig
from rl_eval.results.source_code import code_of

if {runners} < 0:
    from helper import Env

NUM_RUNNERS = {runners}

class Env:
    limit = {limit}

print(json.dumps(code_of(EvalConfig().environment(Env).build())["files"]))
"""


@pytest.mark.process
def test_of_the_script_itself_only_the_source_of_the_object_counts(tmp_path: Path) -> None:
    """A script also says how many runners there are, which must not keep it from being continued."""

    def found(**values: int) -> Any:
        path = tmp_path / "script.py"
        path.write_text(SCRIPT.format(**values))
        return json.loads(subprocess.run([sys.executable, path], capture_output=True, check=True).stdout)

    (tmp_path / "helper.py").write_text("")
    first = found(runners=1, limit=1)
    assert sorted(first) == ["__main__:Env", "helper"]
    assert found(runners=2, limit=1) == first
    assert found(runners=1, limit=2) != first


# ------------------------------------------------------------------------------ in a log


def described(sha: str = "a" * 64, version: str = "1.0", **provenance: Any) -> Manifest:
    code = {"files": {"my.envs": {"path": "/home/me/my/envs.py", "sha256": sha}}, "packages": {"ale_py": version}}
    return make_manifest(code=code, provenance=provenance)


def session(log_dir: Path, manifest: Manifest, *indices: int, accept: bool = False) -> None:
    log = EvaluationLog.open(log_dir, accept_code_change=accept)
    try:
        log.begin(manifest)
        log.append(make_batch(indices))
        log.flush(10)
    finally:
        log.close()


def texts(log_dir: Path) -> Iterator[str]:
    return (path.read_text() for path in sorted(log_dir.glob("amendments/*")))


def test_changed_code_is_refused_with_the_difference_named(tmp_path: Path) -> None:
    session(tmp_path, described(), 0, 1)
    before = (tmp_path / "manifest.json").read_bytes()
    with refused(LogMismatch, "output") as caught:
        session(tmp_path, described("b" * 64, "1.1"), 2)

    for named in ("/home/me/my/envs.py", "my.envs", "a" * 12, "b" * 12, "ale_py", "1.0", "1.1", "--accept-code-change"):
        assert named in str(caught.value)
    session(tmp_path, described(), 3)
    assert (tmp_path / "manifest.json").read_bytes() == before
    assert not list(texts(tmp_path))


def test_an_accepted_change_is_an_amendment_and_a_note(tmp_path: Path) -> None:
    """The history is kept: the manifest as it was, and one file per change, which never changes."""
    session(tmp_path, described(), 0, 1)
    before = (tmp_path / "manifest.json").read_bytes()
    session(tmp_path, described("b" * 64), 2, accept=True)
    first = list(texts(tmp_path))
    session(tmp_path, described("b" * 64), 4)
    with refused(LogMismatch, "output") as caught:
        session(tmp_path, described(), 5)
    assert all(sha * 12 in str(caught.value) for sha in "ab")
    session(tmp_path, described("c" * 64), 5, accept=True)

    assert (tmp_path / "manifest.json").read_bytes() == before
    assert len(first) == 1
    assert list(texts(tmp_path))[:1] == first
    found = read_log(tmp_path)
    assert found.rows["index"].tolist() == [0, 1, 2, 4, 5]
    assert [change.num_finished for change in found.amendments] == [2, 4]
    assert len(found.notes) == 2
    assert all(sha * 12 in found.notes[1] for sha in "bc")


def test_a_log_without_digests_is_continued(tmp_path: Path) -> None:
    """There is nothing to compare with in a log of an earlier version."""
    session(tmp_path, described(), 0)
    path = tmp_path / "manifest.json"
    body = json.loads(path.read_text())
    head = {"format": body.pop("format")}
    del body["code"], body["checksum"]
    path.write_text(json.dumps(head | {"checksum": checksum(body)} | body))
    session(tmp_path, described("b" * 64), 1)

    assert read_log(tmp_path).rows["index"].tolist() == [0, 1]
    assert not list(texts(tmp_path))


def test_other_packages_are_a_note() -> None:
    """They can matter, but are not what is evaluated."""
    begun = described(python="3.11.2", packages={"numpy": "2.0", "ale-py": "1.0", "torch": "2.5"})
    now = described(python="3.11.2", packages={"numpy": "2.1", "ale-py": "1.1", "mujoco": "3.3"})
    [note] = begun.version_notes(now)
    assert all(named in note for named in ("numpy", "2.0", "2.1"))


@pytest.mark.parametrize("damage", ["", "{}", '{"checksum": "0", "differences": []}', "[]"])
def test_a_damaged_amendment_is_an_error(tmp_path: Path, damage: str) -> None:
    session(tmp_path, described(), 0)
    session(tmp_path, described("b" * 64), 1, accept=True)
    (path,) = tmp_path.glob("amendments/*")
    path.write_text(damage)
    with refused(LogError, f"amendments/{path.name}", value=str(tmp_path)):
        read_log(tmp_path)
