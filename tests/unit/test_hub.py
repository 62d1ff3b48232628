"""``hf://``: files that are downloaded from a server that answers as the Hugging Face Hub does, or are not."""

import hashlib
import json
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from urllib.parse import unquote

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file

from rl_eval import EvalConfig, evaluate
from rl_eval.errors import ConfigError
from rl_eval.results.loading import load
from tests.unit.cli_world import call, make_folder
from tests.unit.test_policy_source import model

pytest.importorskip("huggingface_hub")

REPO = "me/nets"
REVISIONS = {"main": "a" * 40, "v1": "b" * 40}


class Hub(BaseHTTPRequestHandler):
    """One repository, whose files differ from revision to revision, as ``server.files`` has them."""

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def answer(self):
        path = unquote(self.path.partition("?")[0].strip("/"))
        self.server.asked.append(path)
        kind, _, rest = path.removeprefix(f"api/models/{REPO}/").partition("/")
        if path.startswith(f"{REPO}/resolve/"):
            self.send_file(*path.removeprefix(f"{REPO}/resolve/").split("/", 1))
        elif not path.startswith(f"api/models/{REPO}/"):
            self.send(404, b"{}", **{"X-Error-Code": "RepoNotFound"})
        elif kind == "revision" and (sha := REVISIONS.get(rest, rest)) in self.server.files:
            names = [{"rfilename": name} for name in self.server.files[sha]]
            self.send(200, json.dumps({"id": REPO, "sha": sha, "siblings": names}).encode())
        elif kind == "tree" and rest in self.server.files:
            files = self.server.files[rest].items()
            self.send(200, json.dumps([self.described(name, content) for name, content in files]).encode())
        else:
            self.send(404, b"{}", **{"X-Error-Code": "RevisionNotFound"})

    def described(self, name, content):
        return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

    def send_file(self, sha, name):
        content = self.server.files[sha].get(name)
        if content is None:
            self.send(404, b"", **{"X-Error-Code": "EntryNotFound"})
        else:
            tag = hashlib.sha1(content).hexdigest()
            self.send(200, content, **{"ETag": f'"{tag}"', "X-Repo-Commit": sha})

    def send(self, status, content, **headers):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_):
        """Nothing."""


def connect(monkeypatch, folder, **variables):
    """Have the package read these environment variables, which it does when it is imported."""
    monkeypatch.setenv("HF_HOME", str(folder / "hf"))
    for name, value in {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1", **variables}.items():
        monkeypatch.setenv(name, value)
    for name in [name for name in sys.modules if name.partition(".")[0] == "huggingface_hub"]:
        monkeypatch.delitem(sys.modules, name)


def agent(scale):
    return {"weight": torch.tensor([[0.0] * 4, [0.0, 0.0, scale, 1.0]]), "bias": torch.zeros(2)}


def content_of(weights, path):
    save_file(weights, path)
    return path.read_bytes()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A folder, and a server with two revisions of a repository."""
    folder = make_folder(tmp_path, monkeypatch)
    (folder / "my_net.py").write_text("import torch\n\ndef make():\n    return torch.nn.Linear(4, 2)\n")
    monkeypatch.syspath_prepend(str(folder))
    zipped = model(folder / "made.zip").read_bytes()
    files = {
        REVISIONS["main"]: {
            "net.safetensors": content_of(agent(1.0), folder / "new.safetensors"),
            "runs/best model.zip": zipped,
            "runs/vec_normalize.pkl": b"statistics",
            "huge.bin": b"0" * 1000,
        },
        REVISIONS["v1"]: {"net.safetensors": content_of(agent(-1.0), folder / "old.safetensors")},
    }
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.files, server.asked, server.daemon_threads = files, [], True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    connect(monkeypatch, folder, HF_ENDPOINT=url)
    yield SimpleNamespace(folder=folder, asked=server.asked, url=url)
    sys.modules.pop("my_net", None)
    server.shutdown()
    server.server_close()
    thread.join()


def said(done):
    return " ".join(done.output.split())


def test_weights_of_a_revision_are_evaluated(hub):
    """The numbers are those of the file, and the provenance names the revision."""
    for text, sha, local in (("", REVISIONS["main"], "new"), ("@v1", REVISIONS["v1"], "old")):
        policy = f"torch:my_net:make@hf://{REPO}/net.safetensors{text}"
        done = call("run", "--env", "CartPole-v1", "-n", 3, "--policy", policy, "--output", f"out-{local}")
        assert done.exit_code == 0, done.output
        assert f"asking {hub.url}, which needs the network" in said(done)
        assert f"hf://{REPO}/net.safetensors{text}: revision {sha}" in said(done)
        result = load(f"out-{local}")
        assert f"/snapshots/{sha}/net.safetensors" in result.provenance["config"]["policy"]["weights"]
        plain = EvalConfig().environment("CartPole-v1").policy("my_net:make", weights=f"{local}.safetensors")
        expected = evaluate(plain.evaluation(num_episodes=3)).table.rows["episode_return"]
        assert np.array_equal(result.table.rows["episode_return"], expected)
    assert not any(path.endswith("huge.bin") for path in hub.asked)


def test_a_model_brings_the_normalizer_beside_it_and_needs_trust(hub):
    """It is guessed from what was downloaded; the config has the path in the cache."""
    text = f"hf://{REPO}/runs/best model.zip"
    refused = call("run", "--env", "CartPole-v1", "--policy", text)
    assert refused.exit_code == 2
    assert "holds pickled objects, which can run any code when they are loaded: give --trust" in said(refused)
    done = call("init", "made.yaml", "--env", "CartPole-v1", "--policy", f"sb3:{text}@{REVISIONS['main']}")
    assert done.exit_code == 0, done.output
    kwargs = yaml.safe_load((hub.folder / "made.yaml").read_text())["policy"]["policy_kwargs"]
    cache = hub.folder / "hf" / "hub" / "models--me--nets" / "snapshots" / REVISIONS["main"] / "runs"
    assert kwargs == {"path": str(cache / "best model.zip"), "vecnormalize": str(cache / "vec_normalize.pkl")}
    assert (cache / "vec_normalize.pkl").read_bytes() == b"statistics"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"hf://{REPO}/net.safetensor", "me/nets has no such file: did you mean 'net.safetensors'?"),
        (f"hf://{REPO}/net.safetensors@v2", "me/nets has no revision v2"),
        ("hf://me/other/net.safetensors", "there is no repository me/other, or it is private: log in"),
        (f"hf://{REPO}", "write it as hf://OWNER/REPO/FILE"),
        (f"hf://{REPO}/x@", "write it as hf://OWNER/REPO/FILE"),
    ],
)
def test_what_is_not_there_is_said(hub, text, message):
    done = call("run", "--env", "CartPole-v1", "--policy", text)
    assert done.exit_code == 2
    assert message in said(done)


def test_without_a_network_it_is_said_at_once(hub, monkeypatch):
    """By a switch, or because nobody listens; what was downloaded before is used."""
    policy = f"torch:my_net:make@hf://{REPO}/net.safetensors"
    command = ("init", "made.yaml", "--env", "CartPole-v1", "--policy")
    slept = []
    assert call(*command, policy).exit_code == 0
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{unused.getsockname()[1]}"
        for variables, reason in (
            ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
            ({"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": closed}, f"{closed} has not answered"),
        ):
            connect(monkeypatch, hub.folder, **variables)
            (hub.folder / "made.yaml").unlink()
            again = call(*command, policy)
            assert again.exit_code == 0, again.output
            monkeypatch.setattr(time, "sleep", slept.append)
            done = call(*command, f"torch:my_net:make@hf://{REPO}/net.safetensors@v1")
            assert slept == [], "it tried again after a while"
            assert done.exit_code == 2
            assert f"it is not in the cache, and {reason}" in said(done)


def test_a_server_that_never_answers_is_given_up(hub, monkeypatch):
    """After the time that the package has for it; what was downloaded before is used."""
    policy = f"torch:my_net:make@hf://{REPO}/net.safetensors"
    command = ("init", "made.yaml", "--env", "CartPole-v1", "--policy")
    assert call(*command, policy).exit_code == 0
    (hub.folder / "made.yaml").unlink()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        connect(monkeypatch, hub.folder, HF_ENDPOINT=url, HF_HUB_ETAG_TIMEOUT="1")
        before = time.monotonic()
        again = call(*command, policy)
        assert again.exit_code == 0, again.output
        for revision in ("@v1", f"@{REVISIONS['v1']}"):
            done = call(*command, f"{policy}{revision}")
            assert done.exit_code == 2
            assert f"{url} has not answered within 1 s (HF_HUB_ETAG_TIMEOUT)" in said(done)
        assert time.monotonic() - before < 10


def test_without_its_package_it_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    done = call("run", "--env", "CartPole-v1", "--policy", "hf://a/b/c.zip")
    assert done.exit_code == 2
    assert "needs the package huggingface_hub: pip install 'rl-eval[hf]'" in said(done)


def test_a_config_downloads_nothing():
    """Nor do ``--weights``, and both say what does."""
    done = call("run", "--env", "CartPole-v1", "--policy", "a:b", "--weights", "hf://a/b/c.safetensors")
    assert done.exit_code == 2
    assert "write --policy torch:MODULE:ATTR@hf://OWNER/REPO/FILE" in said(done)
    with pytest.raises(ConfigError, match=r"rl-eval init FILE --policy sb3:hf://a/b/c\.zip downloads it"):
        EvalConfig().policy("sb3:hf://a/b/c.zip").build()
