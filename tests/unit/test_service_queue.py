"""The order in which a service runs the requests of its clients."""

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from rl_eval.training.service.queue import FairQueue

CLIENTS = "abcd"

EVENTS = st.lists(
    st.one_of(
        st.sampled_from(CLIENTS).map(lambda client: ("push", client)),
        st.just(("take", "")),
        st.tuples(st.just("remove"), st.sampled_from(CLIENTS)),
    ),
    max_size=120,
)


class Model:
    """What a queue was told and what it gave, with the obligations that follow."""

    def __init__(self):
        self.queue = FairQueue()
        self.waiting = defaultdict(list)
        self.ahead = {}  # Of each client that waits: whom its first request has let pass since it is the first.
        self.pushed = 0

    def push(self, client):
        item = (client, self.pushed)
        self.pushed += 1
        self.queue.push(client, item)
        self.waiting[client].append(item)
        self.ahead.setdefault(client, [])

    def take(self):
        item = self.queue.take()
        if item is None:
            assert not any(self.waiting.values())
            return
        client, _ = item
        assert self.waiting[client][0] == item, "not the client's oldest request, or one that was not waiting"
        self.waiting[client].pop(0)
        del self.ahead[client]
        for other, passed in self.ahead.items():
            assert client not in passed, f"{other} waited for two requests of {client}"
            passed.append(client)
        if self.waiting[client]:
            self.ahead[client] = []

    def remove(self, client):
        line = self.waiting[client]
        item = line[len(line) // 2] if line else (client, -1)
        assert self.queue.remove(client, item) is bool(line)
        if line:
            line.remove(item)
            if not line:
                del self.ahead[client]

    def check(self):
        assert len(self.queue) == sum(map(len, self.waiting.values()))
        for client in CLIENTS:
            assert self.queue.waiting(client) == len(self.waiting[client])


@given(EVENTS)
def test_each_request_runs_once_in_its_clients_order_and_none_waits_for_two_of_another(events):
    model = Model()
    for event, client in events:
        getattr(model, event)(*([client] if client else []))
        model.check()
    for _ in range(sum(map(len, model.waiting.values()))):
        model.take()
        model.check()
    assert model.queue.take() is None


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4))
def test_full_lines_are_served_in_turns(lengths):
    queue = FairQueue()
    for client, length in zip(CLIENTS, lengths, strict=False):
        for number in range(length):
            queue.push(client, (number, client))
    taken = [queue.take() for _ in range(sum(lengths))]
    assert taken == sorted(taken)  # All first requests, then all second ones, ...


def test_a_newcomer_has_its_turn_before_the_second_request_of_anybody():
    queue = FairQueue()
    for number in range(3):
        queue.push("old", f"old{number}")
    assert queue.take() == "old0"
    queue.push("new", "new0")
    assert [queue.take() for _ in range(3)] == ["old1", "new0", "old2"]


def test_a_client_gains_nothing_by_asking_one_at_a_time():
    queue = FairQueue()
    for number in range(3):
        queue.push("patient", f"patient{number}")
    order = []
    for number in range(3):
        queue.push("hasty", f"hasty{number}")
        order += [queue.take(), queue.take()]
    assert [item[:-1] for item in order].count("hasty") == 3
    assert order == ["patient0", "hasty0", "patient1", "hasty1", "patient2", "hasty2"]
