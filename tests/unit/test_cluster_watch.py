"""Signs that a cluster is lost, with a clock that the test moves."""

import resource
import runpy
import socket
from contextlib import ExitStack
from threading import Thread

import pytest

from rl_eval.backends import cluster_watch
from rl_eval.backends.cluster_watch import LIMITS_S, NO_NODE, REFUSED, SILENT, Outage, trouble_of


def over(*signs: tuple[str, float]) -> list[bool]:
    """Return after each sign whether the outage lasts too long; the second value is the time."""
    outage = Outage()
    return [outage.saw(sign, now) == "over" for sign, now in signs]


@pytest.mark.parametrize("sign", LIMITS_S)
def test_a_sign_may_last_until_its_limit(sign: str) -> None:
    """Counted from the first one."""
    end = 100 + LIMITS_S[sign]
    assert over(("", 99), (sign, 100), (sign, end), (sign, end + 1)) == [False, False, False, True]


def test_a_cluster_that_answers_again_begins_anew() -> None:
    """Only an outage without a pause ends an evaluation."""
    assert not any(over(("", 0), (SILENT, 1), (SILENT, 150), ("", 152), (SILENT, 154), (SILENT, 300)))


def test_a_refusal_counts_even_if_silence_follows() -> None:
    """Ray has begun to count at the refusal."""
    assert over(("", 0), (SILENT, 1), (REFUSED, 20), (SILENT, 66))[-1]
    assert not over(("", 0), (SILENT, 1), (SILENT, 66), (REFUSED, 67))[-1]


def test_a_cluster_that_never_answered_is_not_watched() -> None:
    """The driver may reach it in another way, such as a proxy."""
    assert not any(over((REFUSED, 0), (REFUSED, 100), (SILENT, 1000)))


def test_each_sign_is_new_once_in_an_outage() -> None:
    """So there is one warning for each."""
    outage = Outage()
    signs = (REFUSED, "", NO_NODE, NO_NODE, SILENT, "", NO_NODE)
    assert [outage.saw(sign, now) == "new" for now, sign in enumerate(signs)] == [
        False,
        False,
        True,
        False,
        True,
        False,
        True,
    ]


def test_the_limits_of_the_head_come_before_those_of_rays_client() -> None:
    """Which are 60 s without a head, after 120 s in which it does not notice a cut link."""
    assert 30 < LIMITS_S[REFUSED] < 55
    assert 120 < LIMITS_S[SILENT] < 170


def test_what_is_no_head_of_a_cluster_tells_nothing() -> None:
    """A port that accepts connections may be a proxy; a closed one refuses them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        closing = Thread(target=lambda: [server.accept()[0].close() for _ in range(2)])
        closing.start()
        assert trouble_of(address) == ""
        closing.join()
    assert trouble_of(address) == REFUSED


def test_a_process_without_free_files_is_no_sign() -> None:
    """The head may be well."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        try:
            assert trouble_of(address) == ""
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_head_that_does_not_accept_is_silent() -> None:
    with socket.socket() as server, ExitStack() as waiting:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        address = server.getsockname()
        for _ in range(3):  # They fill the queue, so the next connection waits.
            one = waiting.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(address)
        assert trouble_of(f"127.0.0.1:{address[1]}") == SILENT


def test_an_empty_limit_is_that_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "")
    assert runpy.run_path(cluster_watch.__file__)["LIMITS_S"][REFUSED] == 0.75 * 60
