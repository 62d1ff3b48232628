"""``hf://``: files that are downloaded from a server that answers as the Hugging Face Hub does, or are not."""

import hashlib
import json
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
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
from tests.refused import refused
from tests.unit.cli_world import call, make_folder
from tests.unit.test_onnx_files import model as onnx_model
from tests.unit.test_policy_source import model

pytest.importorskip("huggingface_hub")

REPO = "me/nets"
REVISIONS = {"main": "a" * 40, "v1": "b" * 40}


def digest(content):
    return hashlib.sha1(content).hexdigest()


class Hub(BaseHTTPRequestHandler):
    """One repository, whose files differ from revision to revision, as ``server.files`` has them."""

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def answer(self):
        path, files = unquote(self.path.partition("?")[0].strip("/")), self.server.files
        self.server.asked.append(path)
        status, content, headers = 200, b"{}", {}
        match path.removeprefix("api/models/").split("/", 4):
            case ["me", "nets", "resolve", sha, name] if name in files[sha]:
                content, headers = files[sha][name], {"ETag": f'"{digest(files[sha][name])}"', "X-Repo-Commit": sha}
            case ["me", "nets", "revision", name] if (sha := REVISIONS.get(name, name)) in files:
                names = [{"rfilename": name} for name in files[sha]]
                content = json.dumps({"id": REPO, "sha": sha, "siblings": names}).encode()
            case ["me", "nets", "tree", sha, *_] if sha in files:
                found = [(name, {"size": len(text), "oid": digest(text)}) for name, text in files[sha].items()]
                content = json.dumps([{"type": "file", "path": name, **facts} for name, facts in found]).encode()
            case ["me", "nets", kind, *_]:
                what = "Entry" if kind == "resolve" else "Revision"
                status, headers = 404, {"X-Error-Code": f"{what}NotFound"}
            case _:
                status, headers = 404, {"X-Error-Code": "RepoNotFound"}
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
            "policy.onnx": onnx_model("policy.onnx.data"),
            "policy.onnx.data": b"weights",
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


RUN = ("run", "--env", "CartPole-v1", "--policy")
INIT = ("init", "made.yaml", "--env", "CartPole-v1", "--policy")


def said(done):
    return " ".join(done.output.split())


@pytest.mark.parametrize(("revision", "sha", "local"), [("", "a" * 40, "new"), ("@v1", "b" * 40, "old")])
def test_weights_of_a_revision_are_evaluated(hub, revision, sha, local):
    """The numbers are those of the file, and the provenance names the revision; no other file is downloaded."""
    done = call(*RUN, f"torch:my_net:make@hf://{REPO}/net.safetensors{revision}", "-n", 3, "--output", "out")
    assert done.exit_code == 0, done.output
    assert hub.url in said(done)
    result = load("out")
    assert f"/snapshots/{sha}/net.safetensors" in result.provenance["config"]["policy"]["weights"]
    plain = EvalConfig().environment("CartPole-v1").policy("my_net:make", weights=f"{local}.safetensors")
    expected = evaluate(plain.evaluation(num_episodes=3)).table.rows["episode_return"]
    assert np.array_equal(result.table.rows["episode_return"], expected)
    assert not any(path.endswith("huge.bin") for path in hub.asked)


def test_a_model_brings_the_normalizer_beside_it_and_needs_trust(hub):
    """It is guessed from what was downloaded; the config has the path in the cache."""
    text = f"hf://{REPO}/runs/best model.zip"
    without = call(*RUN, text)
    assert without.exit_code == 2
    assert "--trust" in said(without)
    done = call(*INIT, f"sb3:{text}@{REVISIONS['main']}")
    assert done.exit_code == 0, done.output
    kwargs = yaml.safe_load((hub.folder / "made.yaml").read_text())["policy"]["policy_kwargs"]
    cache = hub.folder / "hf" / "hub" / "models--me--nets" / "snapshots" / REVISIONS["main"] / "runs"
    assert kwargs == {"path": str(cache / "best model.zip"), "vecnormalize": str(cache / "vec_normalize.pkl")}
    assert (cache / "vec_normalize.pkl").read_bytes() == b"statistics"


def test_a_model_brings_its_external_data(hub):
    done = call(*INIT, f"hf://{REPO}/policy.onnx")
    assert done.exit_code == 0, done.output
    path = Path(yaml.safe_load((hub.folder / "made.yaml").read_text())["policy"]["policy_kwargs"]["path"])
    assert (path.parent / "policy.onnx.data").read_bytes() == b"weights"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"hf://{REPO}/net.safetensor", "me/nets"),
        (f"hf://{REPO}/net.safetensors@v2", "me/nets/revision/v2"),
        ("hf://me/other/net.safetensors", "me/other/revision/main"),
        (f"hf://{REPO}", "hf://OWNER/REPO/FILE"),
        (f"hf://{REPO}/x@", "hf://OWNER/REPO/FILE"),
    ],
)
def test_a_missing_file_is_named(hub, text, message):
    done = call(*RUN, text)
    assert done.exit_code == 2
    assert message in said(done)


@pytest.mark.parametrize("network", ["off", "refused", "silent"])
def test_without_an_answer_the_cache_is_used(hub, monkeypatch, network):
    """By a switch, because nothing listens, or because the server never answers; other files are an error at once."""
    policy = f"torch:my_net:make@hf://{REPO}/net.safetensors"
    assert call(*INIT, policy).exit_code == 0
    (hub.folder / "made.yaml").unlink()
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if network == "silent":
            server.listen()
        variables = {"HF_ENDPOINT": f"http://127.0.0.1:{server.getsockname()[1]}", "HF_HUB_ETAG_TIMEOUT": "1"}
        connect(monkeypatch, hub.folder, **({"HF_HUB_OFFLINE": "1"} if network == "off" else variables))
        before = time.monotonic()
        again = call(*INIT, policy)
        assert again.exit_code == 0, again.output
        for revision in ("@v1", f"@{REVISIONS['v1']}"):
            done = call(*INIT, f"{policy}{revision}")
            assert done.exit_code == 2
            assert ("HF_HUB_OFFLINE" if network == "off" else variables["HF_ENDPOINT"]) in said(done)
        assert time.monotonic() - before < 10


def test_without_its_package_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    done = call(*RUN, "hf://a/b/c.zip")
    assert done.exit_code == 2
    assert "pip install 'rl-eval[hf]'" in said(done)


def test_a_config_downloads_nothing():
    """Nor do ``--weights``, and both name the way that does."""
    done = call(*RUN, "a:b", "--weights", "hf://a/b/c.safetensors")
    assert done.exit_code == 2
    assert "--policy torch:MODULE:ATTR@hf://OWNER/REPO/FILE" in said(done)
    with refused(ConfigError, "policy.policy", value="sb3:hf://a/b/c.zip") as caught:
        EvalConfig().policy("sb3:hf://a/b/c.zip").build()
    assert "--policy sb3:hf://a/b/c.zip" in caught.value.fix
