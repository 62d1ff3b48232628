"""``rl-eval view``: pages about the runs in a folder, asked for by real requests; what is not listed is not there."""

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
from rl_eval.results.loading import load
from rl_eval.results.page import site as site_module
from rl_eval.results.page.html import Source, _breakable, render
from rl_eval.results.page.server import RunServer
from rl_eval.results.page.site import RunSite
from rl_eval.results.report.files import RESULT_FILE
from rl_eval.results.videos import video_name
from tests.unit.cli_world import call, printed, start
from tests.unit.report_world import make_result

NOTHING = {"default-src", "base-uri", "frame-ancestors"}
EVIL = "</script><img src=x onerror=alert(1)>"


class Response(NamedTuple):
    """What came back."""

    status: int
    headers: dict[str, str]
    text: str


class Client:
    """Asks a server on this machine, and may lie about the name by which it knows it."""

    def __init__(self, server: RunServer) -> None:
        self.port = server.server_address[1]

    def get(self, target: str, host: str | None = None, method: str = "GET", part: str = "") -> Response:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        headers = ({} if host is None else {"Host": host}) | ({"Range": part} if part else {})
        connection.request(method, target, headers=headers)
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
        make_result(40, day, failed=(3,) if name == "a" else (), return_bounds=(0, 999)).save(folder / name)
        data = json.loads((folder / name / RESULT_FILE).read_text())
        spoil(folder / name / RESULT_FILE, provenance={**data["provenance"], "finished_at": f"2026-11-0{day}T10:00"})
    for name, changes in {"newer": {"format": 99}, "odd": {"plan": None}}.items():
        make_result(4).save(folder / name)
        spoil(folder / name / RESULT_FILE, **changes)
    (folder / "torn").mkdir()
    (folder / "torn" / RESULT_FILE).write_bytes(b"\xff{")
    (folder / "secret.txt").write_text("not listed")
    return folder


@contextmanager
def serving(folder: Path) -> Iterator[Client]:
    with RunServer(RunSite(folder)) as server:
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
    assert answer.status == 200
    assert list(client.ids()) == ["a", "deeper/c", "b"]
    assert "6 runs, the newest first" in answer.text
    assert f"{load(made / 'b').mean_return:.1f} (" in answer.text
    assert "39 of 40" in answer.text
    assert answer.text.index(">newer<") < answer.text.index("has format 99")
    assert "is damaged" in answer.text


def test_a_run_opens_as_its_report(client: Client, made: Path) -> None:
    """As the command writes it, with the path that commands take."""
    answer = client.get(f"/report?run={client.ids()['b']}")
    assert answer.status == 200
    assert answer.text == render([Source(str(made / "b"), load(made / "b"))])


def test_chosen_runs_are_compared_with_the_oldest(client: Client, made: Path) -> None:
    """In whatever order they were chosen, and however often."""
    ids = client.ids()
    answer = client.get("/report?" + "&".join(f"run={ids[name]}" for name in ("deeper/c", "a", "deeper/c", "b")))
    assert re.findall(r'<a href="#run-\d">(.*?)</a>', answer.text) == ["b", "c", "a"]
    assert re.findall(r"<h2>(\w) <span .*?>against</span> (\w)</h2>", answer.text) == [("c", "b"), ("a", "b")]


@pytest.mark.parametrize(
    "name",
    [
        "2026-11-24-152540-|CartPole-|v1", "20261124-151010-|lunarlander-|ablation-3", "seed_1/|best_|model",
        "my_|pkg.|policies:|make", "v1.2.3", "0123456789abcdef0123|456789&amp;",
    ],
)  # fmt: skip
def test_a_line_ends_between_the_parts_of_a_name(name: str) -> None:
    """A time, a version and a number stay with what they belong to; a word without end is broken all the same."""
    assert _breakable(html.unescape(name.replace("|", ""))) == name.replace("|", "<wbr>")


def test_a_new_run_is_there_when_the_index_is_loaded_again(tmp_path: Path) -> None:
    """And the ids of the others stay."""
    make_result(10).save(tmp_path / "first")
    with serving(tmp_path) as client:
        before = client.ids()
        make_result(10, 1).save(tmp_path / "second")
        after = client.ids()
        assert after.keys() - before.keys() == {"second"}
        assert after["first"] == before["first"]
        assert client.get(f"/report?run={after['second']}").status == 200


def test_an_empty_folder_says_so(tmp_path: Path) -> None:
    with serving(tmp_path) as client:
        assert "There are no runs here yet" in client.get("/").text
        tmp_path.rmdir()
        assert (client.get("/").status, "is no folder" in client.get("/").text) == (500, True)


def test_runs_beyond_the_limit_are_counted(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest are not listed, and so not served."""
    oldest = RunSite(made)
    ids = [id_ for id_, run in oldest._listed.items() if run.path == "b"]
    monkeypatch.setattr(site_module, "_MOST_ROWS", 2)
    with serving(made) as client:
        assert "6 runs, the newest first; the first 2 are shown" in client.get("/").text
        assert list(client.ids()) == ["a", "deeper/c"]
        assert client.get(f"/report?run={ids[0]}").status == 404


def test_what_broke_since_it_was_listed_is_said(tmp_path: Path) -> None:
    """Whatever it is: the server goes on."""
    make_result(10).save(tmp_path / "run")
    with serving(tmp_path) as client:
        target = f"/report?run={client.ids()['run']}"
        summary = (tmp_path / "run" / RESULT_FILE).read_text()
        for spoiled in (
            "{",
            "[" * 100_000,
            summary.replace('"metrics"', '"no_metrics"'),
            summary.replace("Hopper", EVIL),
        ):
            (tmp_path / "run" / RESULT_FILE).write_text(spoiled)
            answer = client.get(target)
            assert "<img" not in answer.text
            assert answer.status == 200 or (answer.status, answer.headers["content-type"][:10]) == (500, "text/plain")
        (tmp_path / "run" / "episodes.parquet").unlink()
        assert client.get(target).status == 500
        assert client.get("/").status == 200


# What it refuses


@pytest.mark.parametrize(
    "target",
    [
        "/secret.txt", "/../secret.txt", "/%2e%2e/secret.txt", "/..%2fsecret.txt", "//secret.txt",
        "/report/../secret.txt", "/a/result.json", "/report", "/report?run=", "/report?run=a", "/report?run=../a",
        "/report?run=..%2f..%2fetc",
        "/report?run=0123456789abcdef", "/report?path=a", "/%00", "/index.html", "/favicon.ico", "http://evil.example/",
        "/report?" + "run=x&" * 300, "//[", "/report?run=%ff%fe",
    ],
)  # fmt: skip
def test_what_is_not_listed_is_not_served(client: Client, target: str) -> None:
    """No path leads to the disk, and an id must have been given out."""
    answer = client.get(target, "localhost")
    assert answer.status in (400, 404)
    assert answer.headers["content-type"].startswith("text/plain")
    assert "not listed" not in answer.text


def test_a_broken_run_beside_a_good_one_is_refused(client: Client, made: Path) -> None:
    """It has an id nobody was given; nothing of it is shown."""
    broken = next(id_ for id_, run in RunSite(made)._listed.items() if run.path == "odd")
    assert client.get(f"/report?run={client.ids()['b']}&run={broken}").status == 404


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example:1", "", "[::1]", "0.0.0.0",
        "localhost@evil.example", "localhost:1:2", "localhost:x", "127.0.0.2", "10.0.0.1", "localhost, evil.example",
    ],
)  # fmt: skip
@pytest.mark.parametrize("target", ["/", "/report?run=x"])
def test_a_foreign_name_of_this_server_is_refused(client: Client, host: str, target: str) -> None:
    """Such as that of a page that had its own name lead here."""
    answer = client.get(target, host)
    assert answer.status == 421
    assert "deeper" not in answer.text


def test_the_name_of_a_tunnel_is_served(client: Client) -> None:
    """It ends at another port of the machine that the browser is on."""
    assert client.get("/", "localhost:8000").status == client.get("/", "127.0.0.1").status == 200


def test_requests_without_one_name_are_refused(client: Client) -> None:
    """None, or two."""
    assert b" 421 " in client.raw(b"GET / HTTP/1.0\r\n\r\n").splitlines()[0]
    two = b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n"
    assert b" 421 " in client.raw(two).splitlines()[0]
    malformed = client.raw(b"GET <b> HTTP/9 x\r\nHost: localhost\r\n\r\n")
    assert b"Bad request" in malformed
    assert b"<b>" not in malformed


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT"])
def test_nothing_can_be_written(client: Client, method: str) -> None:
    assert client.get("/", method=method).status == 501


def test_a_head_is_an_answer_without_content(client: Client) -> None:
    head, whole = client.get("/", method="HEAD"), client.get("/")
    assert (head.status, head.text) == (200, "")
    assert int(head.headers["content-length"]) == len(whole.text.encode())


@pytest.mark.parametrize(
    ("target", "host", "method"),
    [("/", None, "GET"), ("/nowhere", None, "GET"), ("/", "evil.example", "GET"), ("/", None, "POST")],
)
def test_every_answer_forbids_what_a_page_does_not_need(client: Client, target: str, host: str, method: str) -> None:
    """Errors too: nothing from elsewhere, no guessing at types, no frame around it, no copy of it."""
    headers = client.get(target, host, method).headers
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert {policy[name] for name in NOTHING} == {"'none'"}
    assert policy["form-action"] == policy["media-src"] == "'self'"
    assert {*policy} - {"style-src", "script-src", "form-action", "media-src"} == NOTHING
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert headers["cache-control"] == "no-store"


def test_the_policy_of_the_server_allows_what_the_pages_have(client: Client) -> None:
    """The digests in the policy of a report are those in the header."""
    answer = client.get(f"/report?run={client.ids()['b']}")
    inside = re.search(r'http-equiv="Content-Security-Policy" content="(.*?)"', answer.text)
    digests = re.findall(r"sha256-[^&']+", inside[1])
    assert len(digests) == 2
    assert all(digest.replace("&#43;", "+") in answer.headers["content-security-policy"] for digest in digests)


# Videos


@pytest.fixture
def filmed(tmp_path: Path) -> tuple[Path, str]:
    """A folder with a run that has a video, and the video's name."""
    result = make_result(10)
    result.save(tmp_path / "run")
    record = result.table.record(3)
    name = video_name(3, record.seed, record.episode_return)
    (tmp_path / "run" / "videos").mkdir()
    (tmp_path / "run" / "videos" / name).write_text("0123456789")
    return tmp_path, name


def test_the_video_of_an_episode_is_served_whole_and_in_parts(filmed: tuple[Path, str]) -> None:
    """At the address that the report links to."""
    with serving(filmed[0]) as client:
        report = client.get(f"/report?run={client.ids()['run']}").text
        link = html.unescape(re.search(r'<a href="(video\?.*?)"', report)[1])
        whole = client.get(f"/{link}")
        assert (whole.status, whole.text, whole.headers["content-type"]) == (200, "0123456789", "video/mp4")
        for asked, part, place in [("4-6", "456", "4-6/10"), ("7-", "789", "7-9/10"), ("8-99", "89", "8-9/10")]:
            answer = client.get(f"/{link}", part=f"bytes={asked}")
            assert (answer.status, answer.text, answer.headers["content-range"]) == (206, part, f"bytes {place}")
        for asked in ("10-", "5-4", "-3", "1-2,4-5", "x"):
            answer = client.get(f"/{link}", part=f"bytes={asked}")
            assert (answer.status, answer.text) == (200, "0123456789")
        assert client.get(f"/{link}", method="HEAD").headers["content-length"] == "10"
        assert client.get(f"/{link}", "evil.example").status == 421


@pytest.mark.parametrize("how", ["link", "linked folder", "other name", "path", "other run", "gone", "folder"])
def test_no_other_file_is_served_as_a_video(filmed: tuple[Path, str], how: str) -> None:
    """No link, no path, and nothing that is called otherwise."""
    folder, name = filmed
    file, asked = folder / "run" / "videos" / name, name
    with serving(folder) as client:
        id_ = client.ids()["run"]
        if how in ("link", "gone", "folder"):
            file.rename(folder / "elsewhere")
        if how == "link":
            file.symlink_to(folder / "elsewhere")
        elif how == "folder":
            file.mkdir()
        elif how == "linked folder":
            file.parent.rename(folder / "elsewhere")
            file.parent.symlink_to(folder / "elsewhere")
        elif how == "other name":
            asked = "notes.mp4"
            (file.parent / asked).touch()
        elif how == "path":
            asked = f"../videos/{name}"
        elif how == "other run":
            id_ = "run"
        assert client.get(f"/video?run={id_}&name={asked}").status == 404
        assert client.get("/video").status == client.get(f"/video?run={id_}").status == 404


def test_a_video_that_becomes_a_link_is_not_served(filmed: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at the folder and the opening of the file."""
    folder, name = filmed
    file = folder / "run" / "videos" / name
    file.rename(folder / "elsewhere")
    file.symlink_to(folder / "elsewhere")
    monkeypatch.setattr(site_module, "video_files", lambda _: {name: file})
    with serving(folder) as client:
        assert client.get(f"/video?run={client.ids()['run']}&name={name}").status == 404


# Strangers


def test_foreign_text_stays_text(tmp_path: Path) -> None:
    """Names of folders, policies and environments, and reasons: markup, control characters, half characters."""
    make_result(10, policy=EVIL, env="\ud800\x1b[31m\nred").save(tmp_path / EVIL.replace("/", "|"))
    torn = tmp_path / os.fsdecode(b"\xff\n")
    torn.mkdir()
    (torn / RESULT_FILE).write_text("{")
    make_result(10).save(tmp_path / "<b>broken")
    spoil(tmp_path / "<b>broken" / RESULT_FILE, format="<b>")
    with serving(tmp_path) as client:
        page = client.get("/").text
        assert "<img" not in page
        assert "<b>" not in page
        assert "&lt;img" in page
        assert "\x1b" not in page
        assert page.count("broken</td>") == 2
        assert [client.get(f"/report?run={id_}").status for id_ in client.ids().values()] == [200]


def test_nothing_that_a_run_names_is_imported(client: Client) -> None:
    for id_ in client.ids().values():
        client.get(f"/report?run={id_}")
    assert "my_pkg" not in sys.modules


def test_a_visitor_who_says_nothing_holds_up_nobody(client: Client) -> None:
    with socket.create_connection(("127.0.0.1", client.port)):
        assert client.get("/").status == 200


def test_a_visitor_who_leaves_is_no_error(client: Client, capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", client.port)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert client.get("/").status == 200
    assert capfd.readouterr().err == ""


def test_it_listens_on_the_loopback_alone(made: Path) -> None:
    with RunServer(RunSite(made)) as server:
        assert server.server_address[0] == "127.0.0.1"
        assert server.url == f"http://127.0.0.1:{server.server_address[1]}/"


# The command


def test_wrong_usage_of_the_command(tmp_path: Path) -> None:
    """No folder, and a port that somebody else has."""
    outcome = call("view", tmp_path / "nowhere")
    assert (outcome.exit_code, "nowhere is no folder" in outcome.stderr) == (ExitCode.USAGE, True)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        outcome = call("view", tmp_path, "--port", port)
        assert (outcome.exit_code, f"port {port} cannot be used" in outcome.stderr) == (ExitCode.USAGE, True)
    assert call("view", tmp_path, "--port", 70_000).exit_code == ExitCode.USAGE
    with pytest.raises(UsageError):
        RunSite(tmp_path / "nowhere")


@pytest.mark.parametrize("words", [(), ("--open",)])
def test_the_command_prints_its_address_and_ends_quietly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """Ctrl-C is how it ends, so that is no failure."""
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)

    def interrupted(server: RunServer) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RunServer, "serve_forever", interrupted)
    make_result(5).save(tmp_path / "run")
    outcome = call("view", tmp_path, *words)
    assert (outcome.exit_code, outcome.stderr) == (0, "")
    address = re.fullmatch(rf"(http://127\.0\.0\.1:\d+/)   1 run in {tmp_path}, until Ctrl-C\n", outcome.stdout)
    assert opened == [address[1]] * len(words)


def test_a_script_is_told_the_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunServer, "serve_forever", lambda server: None)
    make_result(5).save(tmp_path / "run")
    told = printed("view", call("view", tmp_path, "--json").stdout)
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", told.pop("url"))
    assert told == {"folder": str(tmp_path), "runs": 1}


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
