"""``rl-eval view``: pages about the runs in a folder, asked for by real requests; only listed runs are there."""

from __future__ import annotations

import html
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from rl_eval.cli.exits import ExitCode
from rl_eval.errors import UsageError
from rl_eval.recording.video_selection import video_name
from rl_eval.reports.html import Source, render
from rl_eval.reports.view import RunServer
from rl_eval.results.files import RESULT_FILE
from rl_eval.results.loading import load
from tests.refused import refused
from tests.unit.cli_world import call, printed, start
from tests.unit.results_world import drawn_result

EVIL = "</script><img src=x onerror=alert(1)>"


class Response(NamedTuple):
    """Answer of a server."""

    status: int
    headers: dict[str, str]
    text: str


class Client:
    """Asks a server on this machine, and may lie about the name by which it knows it."""

    def __init__(self, server: RunServer) -> None:
        self.port, self.url = server.server_address[1], server.url

    def get(self, target: str, host: str | None = None, method: str = "GET") -> Response:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request(method, target, headers={} if host is None else {"Host": host})
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return Response(answer.status, {name.lower(): value for name, value in answer.getheaders()}, text)

    def raw(self, request: bytes) -> bytes:
        """Send bytes, and return all that comes back."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as connection:
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: connection.recv(65_536), b""))

    def ids(self) -> dict[str, str]:
        """Return the id of each run that has a link, in the order of the index."""
        page = self.get("/").text.replace("<wbr>", "")
        return {name: id_ for id_, name in re.findall(r'<a href="report\?run=(\w+)">(.*?)</a>', page)}


def spoil(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs of different days, and three that cannot be read."""
    folder = tmp_path_factory.mktemp("view") / "runs"
    for day, name in enumerate(("b", "deeper/c", "a"), 1):
        drawn_result(40, day, failed=(3,) if name == "a" else (), return_bounds=(0, 999)).save(folder / name)
        data = json.loads((folder / name / RESULT_FILE).read_text())
        spoil(folder / name / RESULT_FILE, provenance={**data["provenance"], "finished_at": f"2026-11-0{day}T10:00"})
    for name, changes in {"newer": {"format": 99}, "odd": {"plan": None}}.items():
        drawn_result(4).save(folder / name)
        spoil(folder / name / RESULT_FILE, **changes)
    (folder / "torn").mkdir()
    (folder / "torn" / RESULT_FILE).write_bytes(b"\xff{")
    (folder / "secret.txt").write_text("not listed")
    return folder


@contextmanager
def serving(folder: Path) -> Iterator[Client]:
    with RunServer(folder) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield Client(server)
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def client(made: Path) -> Iterator[Client]:
    """Asks a server of the runs."""
    with serving(made) as client:
        yield client


# What it shows


def test_the_index_has_a_line_for_each_run_the_newest_first(client: Client, made: Path) -> None:
    """With the numbers of the result; one that cannot be read has its reason, and no link."""
    answer = client.get("/")
    assert (answer.status, list(client.ids())) == (200, ["a", "deeper/c", "b"])
    assert re.search(r">\D*\b6\b \D*<", answer.text)
    assert f"{load(made / 'b').mean_return:.1f} (" in answer.text
    assert re.search(r"\b39\b\D+\b40\b", answer.text)
    assert re.search(r"format\b\D*\b99\b", answer.text)
    assert re.search(rf"success</th>.*{100 * load(made / 'b').success_rate:.1f} % \(", answer.text, re.DOTALL)
    assert re.search(r"<th[^>]* hidden>episode_return_median</th>", answer.text)


def test_a_run_opens_as_its_report(client: Client, made: Path) -> None:
    """As the command writes it; chosen ones are compared with the oldest, in whatever order they were chosen."""
    ids = client.ids()
    answer = client.get(f"/report?run={ids['b']}")
    assert (answer.status, answer.text) == (200, render([Source(str(made / "b"), load(made / "b"))]))
    several = client.get("/report?" + "&".join(f"run={ids[name]}" for name in ("deeper/c", "a", "deeper/c", "b")))
    assert re.findall(r'<a href="#run-\d">(.*?)</a>', several.text) == ["b", "deeper/c", "a"]
    assert re.findall(r"<h3>(.*) against (.*)</h3>", several.text)[:2] == [("deeper/c", "b"), ("a", "b")]
    assert re.findall(r"<h2>Differences from (.*)</h2>", several.text) == ["b", "deeper/c", "a"]


def test_a_new_run_is_there_when_the_index_is_loaded_again(tmp_path: Path) -> None:
    """And the ids of the others stay; an empty folder has a page, and one that went an error."""
    (tmp_path / "runs").mkdir()
    with serving(tmp_path / "runs") as client:
        assert (client.get("/").status, client.ids()) == (200, {})
        drawn_result(10).save(tmp_path / "runs" / "first")
        before = client.ids()
        drawn_result(10, 1).save(tmp_path / "runs" / "second")
        after = client.ids()
        assert after.items() - before.items() == {("second", after["second"])}
        assert client.get(f"/report?run={after['second']}").status == 200
        (tmp_path / "runs").rename(tmp_path / "gone")
        assert client.get("/").status == 500


def test_a_run_that_broke_since_it_was_listed_has_its_reason(tmp_path: Path) -> None:
    """The server goes on."""
    drawn_result(10).save(tmp_path / "run")
    with serving(tmp_path) as client:
        target = f"/report?run={client.ids()['run']}"
        summary = (tmp_path / "run" / RESULT_FILE).read_text()
        for spoiled in ("{", "[" * 100_000, summary.replace('"metrics"', '"x"'), summary.replace("Hopper", EVIL)):
            (tmp_path / "run" / RESULT_FILE).write_text(spoiled)
            answer = client.get(target)
            assert answer.status in (200, 500)
            assert "<img" not in answer.text
        (tmp_path / "run" / "episodes.parquet").unlink()
        assert (client.get(target).status, client.get("/").status) == (500, 200)


# What it refuses


@pytest.mark.parametrize(
    "target",
    [
        "/secret.txt", "/../secret.txt", "/%2e%2e/secret.txt", "//secret.txt", "/a/result.json",
        "/report?run=a", "/report?run=../a", "/report?run=..%2f..%2fetc",
        "/report?run=0123456789abcdef", "/%00", "/favicon.ico",
        "/report?" + "run=x&" * 300, "//[", "/report?run=%ff%fe", "/video",
    ],
)  # fmt: skip
def test_only_listed_runs_are_served(client: Client, target: str) -> None:
    """No path leads to the disk, and an id must have been given out."""
    answer = client.get(target, "localhost")
    assert answer.status == 404
    assert "not listed" not in answer.text


@pytest.mark.parametrize("target", ["/report", "/report?run="])
def test_a_report_of_no_run_is_the_list(client: Client, target: str) -> None:
    """Somebody selected nothing, and needs the list rather than an error."""
    answer = client.get(target)
    assert (answer.status, answer.text) == (200, client.get("/").text)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example:1", "", "[::1]", "0.0.0.0",
        "localhost@evil.example", "localhost:1:2", "localhost:x", "127.0.0.2", "10.0.0.1", "localhost, evil.example",
    ],
)  # fmt: skip
def test_a_foreign_name_of_this_server_is_refused(client: Client, host: str) -> None:
    """Such as that of a page elsewhere; a tunnel ends at another port of the browser's machine."""
    answer = client.get("/", host)
    assert answer.status == 421
    assert "deeper" not in answer.text
    assert client.get("/", "localhost:8000").status == client.get("/", "127.0.0.1").status == 200


def test_requests_without_one_name_are_refused(client: Client) -> None:
    """None, or two; and nothing can be written."""
    assert b" 421 " in client.raw(b"GET / HTTP/1.0\r\n\r\n").splitlines()[0]
    two = b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n"
    assert b" 421 " in client.raw(two).splitlines()[0]
    assert b"<b>" not in client.raw(b"GET <b> HTTP/9 x\r\nHost: localhost\r\n\r\n")
    assert {client.get("/", method=method).status for method in ("POST", "PUT", "DELETE", "TRACE")} == {501}


@pytest.mark.parametrize(
    ("target", "host", "method"),
    [
        ("/", None, "GET"),
        ("/", None, "HEAD"),
        ("/nowhere", None, "GET"),
        ("/", "evil.example", "GET"),
        ("/", None, "POST"),
    ],
)
def test_every_answer_forbids_frames_copies_and_guesses(
    client: Client, target: str, host: str | None, method: str
) -> None:
    """Errors too."""
    headers = client.get(target, host, method).headers
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert headers["cache-control"] == "no-store"


def test_requests_leave_nothing_on_the_disk(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the queries: a page elsewhere can send them in any number."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with serving(made) as client:
        target = f"/report?run={client.ids()['b']}"
        pages = {client.get(f"{one}&q={number}").text for one in ("/?", target) for number in range(5)}
        assert len(pages) == 2
        assert [client.get(target, method="HEAD").text for _ in range(2)] == ["", ""]
        assert list(tmp_path.rglob("*.html")) == []


# Videos


@pytest.mark.parametrize("how", ["", "link", "linked folder", "other name", "path", "other run", "gone", "folder"])
def test_only_the_videos_of_a_run_are_served(tmp_path: Path, how: str) -> None:
    """At the address in its report; no link, no path, and no file with another name."""
    result = drawn_result(10)
    result.save(tmp_path / "run")
    record = result.table.record(3)
    asked = video_name(3, record.seed, record.episode_return)
    file = tmp_path / "run" / "videos" / asked
    file.parent.mkdir()
    file.write_text("0123456789")
    with serving(tmp_path) as client:
        id_ = client.ids()["run"]
        if how in ("link", "gone", "folder"):
            file.rename(tmp_path / "elsewhere")
        if how == "link":
            file.symlink_to(tmp_path / "elsewhere")
        elif how == "folder":
            file.mkdir()
        elif how == "linked folder":
            file.parent.rename(tmp_path / "elsewhere")
            file.parent.symlink_to(tmp_path / "elsewhere")
        elif how == "other name":
            asked = "notes.mp4"
            (file.parent / asked).touch()
        elif how == "path":
            asked = f"../videos/{asked}"
        elif how == "other run":
            id_ = "run"
        if how:
            assert client.get(f"/video?run={id_}&name={asked}").status == 404
            return
        link = html.unescape(re.search(r'<a href="(video\?.*?)"', client.get(f"/report?run={id_}").text)[1])
        answer = client.get(f"/{link}")
        assert (answer.status, answer.text, answer.headers["content-type"]) == (200, "0123456789", "video/mp4")


# Foreign text


def test_foreign_text_stays_text(tmp_path: Path) -> None:
    """Names of folders, policies and environments, and reasons: markup, control characters, half characters."""
    drawn_result(10, policy=EVIL, env="\ud800\x1b[31m\nred").save(tmp_path / EVIL.replace("/", "|"))
    torn = tmp_path / os.fsdecode(b"\xff\n")
    torn.mkdir()
    (torn / RESULT_FILE).write_text("{")
    drawn_result(10).save(tmp_path / "<b>broken")
    spoil(tmp_path / "<b>broken" / RESULT_FILE, format="<b>")
    with serving(tmp_path) as client:
        page = client.get("/").text
        assert not any(part in page for part in ("<img", "<b>", "\x1b"))
        assert "&lt;img" in page
        assert page.count("broken</td>") == 2
        assert [client.get(f"/report?run={id_}").status for id_ in client.ids().values()] == [200]
    assert "my_pkg" not in sys.modules


def test_a_visitor_who_is_silent_or_leaves_disturbs_no_other(client: Client, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_connection(("127.0.0.1", client.port)):
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", client.port)) as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.get("/").status == 200
    assert capfd.readouterr().err == ""


# The command


def test_wrong_usage_of_the_command(tmp_path: Path) -> None:
    """No folder, and a port that is in use."""
    assert call("view", tmp_path / "nowhere").exit_code == ExitCode.USAGE
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert call("view", tmp_path, "--port", other.getsockname()[1]).exit_code == ExitCode.USAGE
    assert call("view", tmp_path, "--port", 70_000).exit_code == ExitCode.USAGE
    with refused(UsageError, str(tmp_path / "nowhere")):
        RunServer(tmp_path / "nowhere")


@pytest.mark.parametrize("words", [(), ("--open",), ("--json",)])
def test_the_command_prints_its_address_and_ends_quietly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """Ctrl-C is how it ends, so that is not a failure."""
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)

    def interrupted(server: RunServer) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RunServer, "serve_forever", interrupted)
    drawn_result(5).save(tmp_path / "run")
    outcome = call("view", tmp_path, *words)
    assert (outcome.exit_code, outcome.stderr) == (0, "")
    address = re.search(r"http://127\.0\.0\.1:\d+/", outcome.stdout)[0]
    assert opened == [address] * ("--open" in words)
    if "--json" in words:
        assert printed("view", outcome.stdout) == {"url": address, "folder": str(tmp_path), "runs": 1}


@pytest.mark.process
def test_a_real_ctrl_c_ends_a_real_server(made: Path) -> None:
    """With 0, at once, and without a word."""
    process = start("view", made, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    address = process.stdout.readline().split()[0]
    host, port = re.fullmatch(r"http://(.*):(\d+)/", address).groups()
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    connection.request("GET", "/")
    assert connection.getresponse().status == 200
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 0
