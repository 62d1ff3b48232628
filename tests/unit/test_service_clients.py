"""Which clients a service remembers, and what for."""

import pytest

from rl_eval.errors import ClusterError, UsageError
from rl_eval.service.clients import ClientBook, Request
from rl_eval.service.messages import Answer, Ticket


def ask(client, name, step=0, weights=None):
    request = Request(client, Ticket(name, step, 0), weights)
    client.accept(request)
    return request


def answer(request):
    request.answer = Answer(request.ticket.request, 0, b"")


def test_who_connects_later_under_a_name_is_the_client():
    book = ClientBook()
    first = book.connect("a", lasting=True, now=0.0).session
    second = book.connect("a", lasting=True, now=1.0).session
    assert first != second
    assert book.find("a", second, now=2.0).seen == 2.0
    with pytest.raises(UsageError, match="'a' has connected once more"):
        book.find("a", first, now=2.0)


def test_an_answer_is_sent_until_it_is_received_and_again_to_the_next_session_until_it_is_read():
    book = ClientBook()
    client = book.connect("a", lasting=True, now=0.0)
    answer(ask(client, "x", step=7))
    assert [one.request for one in client.unsent] == ["x"]
    client.receive(["x", "unknown"])
    assert client.unsent == []
    client = book.connect("a", lasting=True, now=1.0)
    assert [one.request for one in client.unsent] == ["x"]
    client.read(["x", "unknown"])
    assert (client.unsent, client.requests, client.next_step) == ([], {}, 8)
    assert "x" in client.known


def test_what_is_not_answered_can_neither_be_received_nor_read():
    client = ClientBook().connect("a", lasting=True, now=0.0)
    ask(client, "x")
    client.receive(["x"])
    client.read(["x"])
    assert [one.ticket.request for one in client.unfinished] == ["x"]


@pytest.mark.parametrize("lasting", [True, False])
def test_results_wait_for_a_client_that_can_come_back(lasting):
    book = ClientBook()
    client = book.connect("a", lasting, now=0.0)
    answer(ask(client, "done"))
    later = ask(client, "later")
    book.leave(client)
    assert "later" in client.requests
    answer(later)
    book.settle(client)
    assert list(client.requests) == (["done", "later"] if lasting else [])
    assert [one.name for one in book] == (["a"] if lasting else [])
    with pytest.raises(UsageError):
        book.find("a", client.session, now=1.0)


def test_of_very_many_results_that_nobody_reads_the_oldest_go_but_none_that_is_not_received():
    client = ClientBook().connect("a", lasting=True, now=0.0)
    names = [str(number) for number in range(300)]
    for name in names:
        answer(ask(client, name))
    client.receive([])
    assert len(client.requests) == 300
    client.receive(names)
    assert list(client.requests) == names[-256:]


def test_the_number_of_clients_is_bounded_and_none_that_lives_or_waits_is_forgotten():
    book = ClientBook()
    waiting = book.connect("waiting", lasting=False, now=0.0)
    ask(waiting, "x")
    for number in range(63):
        book.connect(f"client{number}", lasting=number % 2 == 0, now=float(number))
    with pytest.raises(ClusterError, match="64 clients"):
        book.connect("new", lasting=True, now=50.0)
    book.connect("new", lasting=True, now=61.0)
    assert len(list(book)) == 64
    assert {"waiting", "new", "client1", "client62"} <= {one.name for one in book}
    assert "client0" not in {one.name for one in book}
    book.connect("newer", lasting=True, now=5000.0)
    # All were silent for long: made-up names go, chosen ones are remembered.
    assert {one.name for one in book} >= {"waiting", "new", "client2", "client62"}
    assert "client1" not in {one.name for one in book}


def test_a_client_falls_back_to_the_last_weights_that_fitted_unless_it_has_sent_newer_ones():
    client = ClientBook().connect("a", lasting=True, now=0.0)
    good, bad, worse = object(), object(), object()
    for name, sent in (("x", good), ("y", bad), ("z", worse)):
        ask(client, name, weights=sent)
    client.proven = good
    client.fall_back(bad)
    assert client.weights is worse
    client.fall_back(worse)
    assert client.weights is good
