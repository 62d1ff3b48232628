"""Signs that a cluster is lost, with a clock that the test moves."""

import socket
from threading import Thread

import pytest

from rl_eval.backends.cluster_watch import Outage, sign_of, time_limits

LIMITS = {"no node": 30.0, "refused": 45.0, "silent": 155.0}


def over(*signs: tuple[str, float]) -> list[bool]:
    """Return after each sign whether the outage lasts too long; the second value is the time."""
    outage = Outage(LIMITS)
    found = []
    for sign, now in signs:
        outage.saw(sign, now)
        found.append(outage.lasts_too_long(now))
    return found


@pytest.mark.parametrize("sign", LIMITS)
def test_a_sign_may_last_until_its_limit(sign: str) -> None:
    """Counted from the first one."""
    end = 100 + LIMITS[sign]
    assert over(("alive", 99), (sign, 100), (sign, end), (sign, end + 1)) == [False, False, False, True]


def test_a_cluster_that_answers_again_begins_anew() -> None:
    """Only an outage without a pause ends an evaluation."""
    assert not any(over(("alive", 0), ("silent", 1), ("silent", 150), ("alive", 152), ("silent", 154), ("silent", 300)))


def test_a_refusal_counts_even_if_silence_follows() -> None:
    """Ray has begun to count at the refusal."""
    assert over(("alive", 0), ("silent", 1), ("refused", 20), ("silent", 66))[-1]
    assert not over(("alive", 0), ("silent", 1), ("silent", 66), ("refused", 67))[-1]


def test_a_cluster_that_never_answered_is_not_watched() -> None:
    """The driver may reach it in another way, such as a proxy."""
    assert not any(over(("refused", 0), ("refused", 100), ("silent", 1000)))


def test_each_sign_is_new_once_in_an_outage() -> None:
    """So there is one warning for each."""
    outage = Outage(LIMITS)
    signs = ("refused", "alive", "no node", "no node", "silent", "alive", "no node")
    assert [outage.saw(sign, 0) for sign in signs] == [False, False, True, False, True, False, True]


def test_the_limits_of_the_head_come_before_those_of_rays_client() -> None:
    """Which an environment variable sets, for clusters whose head can be replaced."""
    for variables, reconnect_s in (({}, 60), ({"RAY_gcs_rpc_server_reconnect_timeout_s": "600"}, 600)):
        limits = time_limits(variables)
        assert 0.5 * reconnect_s < limits["refused"] < reconnect_s
        assert 120 < limits["silent"] < 120 + reconnect_s


def test_what_is_no_head_of_a_cluster_tells_nothing() -> None:
    """A port that accepts connections may be a proxy; a closed one refuses them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        closing = Thread(target=lambda: [server.accept()[0].close() for _ in range(2)])
        closing.start()
        assert sign_of(address) == "alive"
        closing.join()
    assert sign_of(address) == "refused"
