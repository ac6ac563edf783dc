"""Requests and their deadlines, repeats and losses, on the twin's clock."""

from __future__ import annotations

import random

import numpy as np
import pytest

from stratagem.errors import PeerLostError, PeerTimeoutError, RemoteError
from stratagem.transport import incoming, outgoing
from stratagem.transport.hub import Hub
from stratagem.transport.incoming import Request
from stratagem.transport.local import LocalNetwork
from stratagem.transport.message import Message
from stratagem.transport.seldom import Seldom

ADDRESS = "host:1"


class Counter:
    """A server that counts what it executes."""

    def __init__(self, network: LocalNetwork, name: str = "ps 0") -> None:
        self.executed: list[int] = []
        self.later: list[Request] = []
        self.hub = network.hub(name)
        self.hub.listen(ADDRESS, self.serve)

    def serve(self, request: Request) -> Message | None:
        if request.method == "fail":
            raise KeyError("no such variable")
        if request.method == "later":
            self.later.append(request)
            return None
        self.executed.append(request.fields.get("n", -1))
        return Message("", {"n": request.fields.get("n")}, request.arrays)


@pytest.fixture
def network() -> LocalNetwork:
    return LocalNetwork()


@pytest.fixture
def server(network) -> Counter:
    return Counter(network)


@pytest.fixture
def hub(network) -> Hub:
    return network.hub("worker 0")


@pytest.fixture
def peer(hub, server):
    return hub.connect(ADDRESS, "ps 0")


def test_a_request_is_answered(hub, peer, server):
    assert peer.incarnation is None
    got = hub.call(peer, "echo", {"n": 4}, [np.arange(3)], seconds=1)
    assert got.fields == {"n": 4}
    np.testing.assert_array_equal(got.arrays[0], np.arange(3))
    assert peer.incarnation == server.hub.incarnation
    assert str(peer) == "ps 0 at host:1"


def test_requests_are_answered_in_any_order(hub, peer, server, network):
    first, second = peer.post("later", seconds=9), peer.post("echo", {"n": 1}, seconds=9)
    assert hub.wait([second])[0].fields == {"n": 1}
    assert not first.done
    with pytest.raises(RuntimeError, match=r"Expected a request that is over. Got 'later' to ps 0"):
        first.result()
    server.later[0].answer(fields={"late": True})
    assert hub.wait([first])[0].fields == {"late": True}
    with pytest.raises(RuntimeError, match="Expected one answer to 'later'. Got a second one"):
        server.later[0].answer()


def test_callbacks_get_the_answer_or_the_error(hub, peer, network):
    got: list = []
    peer.post("echo", {"n": 1}, seconds=1, done=got.append)
    peer.post("fail", seconds=1, done=got.append)
    network.run(0.1)
    assert got[0].fields == {"n": 1}
    assert isinstance(got[1], RemoteError)


def test_an_error_of_the_server_comes_with_its_traceback(hub, peer):
    with pytest.raises(RemoteError, match=r"ps 0 at host:1 could not do 'fail': KeyError: 'n") as e:
        hub.call(peer, "fail", seconds=1)
    assert (e.value.type_name, e.value.text) == ("KeyError", "'no such variable'")
    assert 'raise KeyError("no such variable")' in e.value.traceback


def test_the_deadline_says_what_was_awaited_from_whom(hub, peer, network):
    with pytest.raises(PeerTimeoutError) as error:
        hub.call(peer, "later", seconds=5)
    assert network.now == 5
    assert str(error.value).startswith(
        "Expected an answer of ps 0 at host:1 to 'later' within 5 s (this is worker 0). Got none. "
        "It is alive: it is busy"
    )


def test_the_deadline_says_that_a_peer_was_never_heard(hub, network):
    nobody = hub.connect("host:2", "ps 1")
    with pytest.raises(PeerTimeoutError, match=r"never heard: it does not run.*CLUSTER_KEY"):
        hub.call(nobody, "echo", seconds=3600)
    assert network.now == 3600
    assert not nobody.heard


def test_the_deadline_says_that_a_peer_is_silent(hub, peer, network):
    hub.call(peer, "echo", seconds=1)
    network.cut("worker 0", "ps 0")
    with pytest.raises(PeerTimeoutError, match=r"It has been silent for 29.0 s"):
        hub.call(peer, "echo", seconds=30)
    assert 28 < peer.silence <= 30


def test_a_peer_that_listens_later_is_found(hub, network):
    peer = hub.connect(ADDRESS, "ps 0")
    ticket = peer.post("echo", {"n": 1}, seconds=60)
    network.run(30)
    server = Counter(network)
    hub.wait([ticket])
    assert server.executed == [1]
    assert network.now < 32


@pytest.mark.parametrize("way", [("worker 0", "ps 0"), ("ps 0", "worker 0")])
def test_what_is_lost_is_sent_again_and_executed_once(hub, peer, server, network, way):
    network.run(0.5)
    network.drop(*way)
    assert hub.call(peer, "echo", {"n": 1}, seconds=10).fields == {"n": 1}
    assert 0 < network.now < 4
    assert server.executed == [1]


def test_what_comes_twice_is_executed_once(hub, peer, server, network):
    network.duplicate("worker 0", "ps 0", 50)
    network.duplicate("ps 0", "worker 0", 50)
    for n in range(20):
        hub.call(peer, "echo", {"n": n}, seconds=1)
    network.run(5)
    assert server.executed == list(range(20))


def test_a_slow_answer_is_not_asked_for_with_the_whole_request(hub, peer, server, network):
    ticket = peer.post("later", {}, [np.zeros(1000)], seconds=100)
    network.run(60)
    server.later[0].answer()
    hub.wait([ticket])
    assert len(server.later) == 1
    assert network.messages < 150  # pings and pongs


def test_a_cut_that_heals_loses_nothing_and_repeats_nothing(hub, peer, server, network):
    hub.call(peer, "echo", {"n": 0}, seconds=1)
    for lose in (False, True):
        server.executed.clear()
        network.cut("worker 0", "ps 0", lose=lose)
        tickets = [peer.post("echo", {"n": n}, seconds=20) for n in range(50)]
        network.run(3)
        network.mend("worker 0", "ps 0")
        hub.wait(tickets)
        assert sorted(server.executed) == list(range(50))


@pytest.mark.parametrize("seed", range(5))
def test_chance_of_loss_delay_and_duplicates_changes_nothing(hub, peer, server, network, seed):
    chance = random.Random(seed)
    for pair in (("worker 0", "ps 0"), ("ps 0", "worker 0")):
        faults = network.faults(*pair)
        faults.chosen = lambda: chance.random() < 0.2
        faults.duplicate = 100
        faults.delay = 0.3
    tickets = [peer.post("echo", {"n": n}, seconds=600) for n in range(200)]
    assert [answer.fields["n"] for answer in hub.wait(tickets)] == list(range(200))
    assert sorted(server.executed) == list(range(200))


def test_a_restarted_peer_fails_what_was_asked_of_the_former_one(hub, peer, server, network):
    hub.call(peer, "echo", {"n": 0}, seconds=1)
    ticket = peer.post("later", seconds=600)
    network.run(0.1)
    network.kill(server.hub)
    second = Counter(network)
    with pytest.raises(PeerLostError, match=r"ps 0 at host:1 to 'later' .*it was restarted"):
        hub.wait([ticket])
    assert network.now < 3
    assert hub.call(peer, "echo", {"n": 7}, seconds=1).fields == {"n": 7}
    assert second.executed == [7]
    assert peer.incarnation == second.hub.incarnation


def test_a_request_for_the_former_process_is_not_executed_by_the_next(hub, peer, server, network):
    hub.call(peer, "echo", {"n": 0}, seconds=1)
    network.kill(server.hub)
    ticket = peer.post("echo", {"n": 1}, seconds=600)
    second = Counter(network)
    with pytest.raises(PeerLostError):
        hub.wait([ticket])
    assert second.executed == []


def test_silence_counts_from_what_was_not_answered(hub, peer, server, network):
    network.run(30)
    assert peer.silence < 0.1
    network.cut("worker 0", "ps 0")
    network.run(10)
    assert 8 <= peer.silence <= 10
    network.mend("worker 0", "ps 0")
    network.run(2)
    assert peer.silence < 0.1


def test_a_full_window_waits_for_room(hub, peer, network, monkeypatch):
    monkeypatch.setattr(outgoing, "WINDOW_REQUESTS", 2)
    for n in range(10):
        peer.post("echo", {"n": n}, seconds=1)
        assert peer.open <= 2
    network.run(1)
    peer.post("later", seconds=50)
    peer.post("later", seconds=50)
    with pytest.raises(PeerTimeoutError, match="Expected room for another request of ps 0"):
        peer.post("echo", seconds=3)
    assert network.now == pytest.approx(4, abs=0.5)


def test_bytes_of_open_requests_are_bounded(hub, peer, network, monkeypatch):
    monkeypatch.setattr(outgoing, "WINDOW_BYTES", 1000)
    peer.post("later", {}, [np.zeros(1000)], seconds=50)  # one alone may be larger
    with pytest.raises(PeerTimeoutError, match="Expected room"):
        peer.post("echo", {}, [np.zeros(1)], seconds=3)


def test_a_dead_peer_cannot_fill_the_memory(hub, peer, network, monkeypatch):
    monkeypatch.setattr(outgoing, "WINDOW_BYTES", 10_000)
    network.cut("worker 0", "ps 0")
    for _ in range(9):
        with pytest.raises(PeerTimeoutError, match="Expected an answer"):
            hub.call(peer, "echo", {}, [np.zeros(125)], seconds=3)
    with pytest.raises(PeerTimeoutError, match="Expected room"):  # it may all be on the way yet
        hub.call(peer, "echo", {}, [np.zeros(125)], seconds=3)
    network.mend("worker 0", "ps 0")
    hub.call(peer, "echo", {}, [np.zeros(125)], seconds=3)
    network.run(2)
    assert peer.bytes == 0


def test_who_waits_in_a_handler_or_callback_is_told(hub, peer, network):
    other = network.hub("ps 1")
    there = other.connect(ADDRESS, "ps 0")
    other.listen("host:9", lambda _: other.call(there, "later", seconds=1))
    with pytest.raises(RemoteError, match="Expected no wait in a handler or callback of the same"):
        hub.call(hub.connect("host:9", "ps 1"), "x", seconds=5)


def test_a_handler_may_ask_others_and_answer_later(hub, network, server):
    middle = network.hub("ps 1")
    there = middle.connect(ADDRESS, "ps 0")

    def forward(request: Request) -> None:
        there.post("echo", request.fields, seconds=5, done=request.answer)

    middle.listen("host:9", forward)
    answer = hub.call(hub.connect("host:9", "ps 1"), "x", {"n": 3}, seconds=5)
    assert answer.fields == {"n": 3}


def test_answers_that_nobody_takes_are_forgotten_and_said_so(
    hub, peer, server, network, monkeypatch
):
    monkeypatch.setattr(incoming, "KEPT_BYTES", 10_000)
    hub.call(peer, "echo", {"n": 0}, seconds=1)
    network.cut("ps 0", "worker 0", lose=True)
    network.faults("worker 0", "ps 0").cut = False
    tickets = [peer.post("echo", {"n": n}, [np.zeros(1000)], seconds=60) for n in range(1, 4)]
    network.run(1)
    network.mend("ps 0", "worker 0")
    with pytest.raises(RemoteError, match="Expected a client that takes its answers"):
        hub.wait(tickets)
    assert server.executed == [0, 1, 2, 3]
    assert hub.wait(tickets[-1:])[0].fields == {"n": 3}


def test_a_closed_hub_fails_what_is_open(hub, peer):
    ticket = peer.post("later", seconds=5)
    hub.close()
    with pytest.raises(PeerLostError, match="this end has closed its connections"):
        ticket.result()
    with pytest.raises(RuntimeError, match="Expected an open hub"):
        peer.post("echo", seconds=1)


def test_a_disconnected_peer_fails_what_is_open(hub, peer):
    ticket = peer.post("later", seconds=5)
    hub.disconnect(peer)
    with pytest.raises(PeerLostError, match="this end has disconnected"):
        ticket.result()


def test_a_hub_listens_once(server):
    with pytest.raises(RuntimeError, match="Expected one call of listen"):
        server.hub.listen("host:2", server.serve)


def test_an_answer_that_cannot_be_sent_is_an_error_at_the_client(hub, network):
    odd = network.hub("ps 1")
    odd.listen("host:9", lambda _: Message("", {"a": object()}))
    with pytest.raises(RemoteError, match="Expected plain data in the fields"):
        hub.call(hub.connect("host:9", "ps 1"), "x", seconds=5)


def test_a_thousand_peers_cost_a_turn_what_comes(network):
    hub = network.hub("chief")
    peers = []
    for i in range(1000):
        other = network.hub(f"worker {i}")
        other.listen(f"w:{i + 1}", lambda request: Message("", request.fields))
        peers.append(hub.connect(f"w:{i + 1}", f"worker {i}"))
    answers = hub.wait([peer.post("run", {"n": i}, seconds=5) for i, peer in enumerate(peers)])
    assert [answer.fields["n"] for answer in answers] == list(range(1000))


def test_warnings_that_anybody_can_cause_are_seldom(caplog):
    now = [0.0]
    seldom = Seldom(lambda: now[0])
    for i in range(1000):
        seldom.warning("kind", "refused %d", i)
    assert len(caplog.records) == 5
    now[0] = 11.0
    seldom.warning("kind", "refused %d", 1000)
    assert caplog.messages[-1] == "refused 1000 (995 more of this kind were left out)"
