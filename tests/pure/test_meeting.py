"""Every task meets every other, its tasks played by threads on loopback."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from stratagem.cluster import line, meeting
from stratagem.cluster.keys import Key
from stratagem.cluster.meeting import Card

VERSIONS = (("jax", "1"),)
SECONDS = 20.0
SOON = 1.0  # For a task that somebody waits for in vain.


@pytest.fixture
def cluster():
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return tuple((f"worker {i}", f"127.0.0.1:{port}") for i, port in enumerate(ports))


def meet(cards, seconds=SECONDS, bandwidth=False):
    with ThreadPoolExecutor(len(cards)) as pool:
        return list(pool.map(lambda card: meeting.meet(card, seconds, bandwidth), cards))


def cards(cluster, indices=range(3)):
    return [Card(f"worker {i}", cluster, VERSIONS, f"{i} CPU") for i in indices]


@contextlib.contextmanager
def listening(address, answer=b"", late=0.0):
    """Something else at a task's address; it answers each connection with the same."""
    with socket.create_server(line.split_address(address)) as server:

        def serve():
            with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
                while True:
                    stack.enter_context(one := server.accept()[0])
                    time.sleep(late)
                    one.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_all_know_all(cluster):
    given = cards(cluster)
    for own, met in zip(given, meet(given), strict=True):
        assert met.card == own
        assert [link.card for link in met.links] == [c for c in given if c != own]
        assert {card.token for card in met.callers} == {c.token for c in given if c != own}
        assert all(link.problem == "" and link.milliseconds > 0 for link in met.links)
        assert all(abs(link.clock_offset) < 5 for link in met.links)  # It is the same clock.
        for source in given:
            others = {c.task for c in given if c != source}
            assert met.reach[source.task].keys() == others
            assert None not in met.reach[source.task].values()


def test_bandwidth(cluster):
    for met in meet(cards(cluster[:2], range(2)), bandwidth=True):
        assert all(link.megabytes_per_second > 0 for link in met.links)


def test_who_is_missing_is_known_to_all(cluster):
    for met in meet(cards(cluster, range(2)), SOON):
        problems = {link.task: link.problem for link in met.links}
        assert problems.pop("worker 2") == line.NOBODY_LISTENS
        assert list(problems.values()) == [""]
        for task in ("worker 0", "worker 1"):
            assert met.reach[task]["worker 2"] is None


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n", "something that is no stratagem doctor listens there"),
        (b'{"hello": "other"}\n', "something that is no stratagem doctor listens there"),
        (b"[" * 100_000 + b"\n", "something that is no stratagem doctor listens there"),
        (b'{"hello": "stratagem doctor 1"}\n{"card": {"cluster": 7}}\n', "something that is no"),
        (b'{"hello": "stratagem doctor 1"}\n7\n', "it closes the connection: no stratagem"),
        (b"", "it is connected, but does not answer"),
    ],
)
def test_others_that_listen_there(cluster, answer, problem):
    own, other = cluster[:2]
    with listening(other[1], answer):
        (met,) = meet([Card(own[0], (own, other), VERSIONS, "1 CPU")], SOON)
    assert met.links[0].problem.startswith(problem)
    assert met.reach == {"worker 0": {"worker 1": None}}


def test_a_try_has_time_however_near_its_deadline(cluster):
    own, other = cluster[:2]
    with listening(other[1], b"HTTP/1.1 400 Bad Request\r\n", late=0.1):
        (met,) = meet([Card(own[0], (own, other), VERSIONS, "1 CPU")], 0.05)
    assert met.links[0].problem == line.OTHER


@pytest.mark.parametrize(
    "text",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00\xff\n",
        b"[" * 100_000 + b"\n",
        b"7\n",
        b"x" * (line.LIMIT + 2),
        b"{}\n",
        b'{"card": {"task": "worker 1", "cluster": [["a"]]}}\n',
    ],
)
def test_strangers_hear_no_more_than_a_challenge_and_change_nothing(cluster, text):
    given = cards(cluster[:2], range(2))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(meeting.meet, given[0], SECONDS)
        stranger = _connect(cluster[0][1])
        with stranger, contextlib.suppress(ConnectionError):
            stranger.sendall(text)
            with stranger.makefile("rb") as answers:
                assert set(json.loads(answers.readline())) == {"hello", "challenge"}
                assert answers.read() == b""
        second = pool.submit(meeting.meet, given[1], SECONDS)
        for met in (first.result(), second.result()):
            assert met.links[0].problem == ""
            assert len(met.callers) == 1


def test_what_a_peer_says_cannot_move_the_cursor(cluster):
    own, other = cluster[:2]
    given = [
        Card(own[0], (own, other), VERSIONS, "1 CPU"),
        Card(other[0], (own, other), VERSIONS, "\x1b[2J\n" + "x" * 1000),
    ]
    devices = meet(given)[0].links[0].card.devices
    assert devices.startswith("?[2J?x")
    assert len(devices) == 300


@pytest.mark.parametrize(
    ("secrets", "problems"),
    [
        (("", "b" * 16), ["has no STRATAGEM_CLUSTER_KEY", "has a STRATAGEM_CLUSTER_KEY, and this"]),
        (("a" * 16, "b" * 16), ["has another STRATAGEM_CLUSTER_KEY"] * 2),
        (("a" * 16, "a" * 16), None),
    ],
)
def test_who_has_not_the_key_is_refused(cluster, secrets, problems):
    tasks = cluster[:2]

    def one(index):
        card = Card(tasks[index][0], tasks, VERSIONS, "1 CPU")
        return meeting.meet(card, SECONDS if problems is None else SOON, key=Key(secrets[index]))

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(one, range(2)))
    assert [len(met.callers) for met in found] == ([1, 1] if problems is None else [0, 0])
    for met, problem in zip(found, problems or ["", ""], strict=True):
        assert met.links[0].problem.startswith(problem and f"it refuses this task, which {problem}")


def test_a_host_that_cannot_prove_the_key_is_not_believed(cluster):
    """It says that it is a doctor, and repeats what it hears."""
    own, other = cluster[:2]
    card = {"task": other[0], "cluster": [], "versions": [], "devices": "", "token": ""}
    said = ({"hello": "stratagem doctor 1", "challenge": "1"}, {"card": card, "proof": "0" * 64})
    with listening(other[1], b"".join(json.dumps(one).encode() + b"\n" for one in said)):
        mine = Card(own[0], (own, other), VERSIONS, "1 CPU")
        met = meeting.meet(mine, SOON, key=Key("a" * 16))
    assert met.links[0].problem == "it has another STRATAGEM_CLUSTER_KEY"


def test_an_address_that_leads_back_is_seen(cluster):
    tasks = (cluster[0], ("worker 1", cluster[0][1].replace("127.0.0.1", "localhost")))
    (met,) = meet([Card("worker 0", tasks, VERSIONS, "1 CPU")])
    assert met.links[0].card.token == met.card.token


def test_an_own_address_that_is_taken(cluster):
    with listening(cluster[0][1]), pytest.raises(OSError, match="in use"):
        meeting.meet(cards(cluster)[0], SOON)


def test_peers_are_tried_whatever_runs_there(cluster):
    with listening(cluster[0][1]):
        tried = meeting.try_peers((*cluster[:2], ("worker 2", "no.such.host.invalid:1")), SECONDS)
    assert tried["worker 0"] == ""
    assert tried["worker 1"] == line.NOBODY_LISTENS
    assert "'no.such.host.invalid'" in tried["worker 2"]


def test_names(monkeypatch):
    found = meeting.resolve_all(["127.0.0.1", "no.such.host.invalid"], SECONDS)
    assert found["127.0.0.1"] == ("127.0.0.1",)
    assert found["no.such.host.invalid"].startswith(
        "the host name 'no.such.host.invalid' is unknown ("
    )
    asked = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kw: asked.wait(SECONDS) and [])
    found = meeting.resolve_all(["slow"], 0.1)
    asked.set()
    assert found == {"slow": "the name service does not answer within 0.1 s"}


def test_a_row_that_is_no_row_is_not_believed(cluster):
    """A peer's numbers are data: what is none, or of no task, is left out."""
    card = cards(cluster)[0]
    state = meeting._Meeting(card, 1.0, False, Key())
    state._hear("worker 1", {"row": {"worker 0": "x", "worker 9": 1, "worker 2": 3}})
    state._hear("worker 0", {"row": {"worker 1": 1}})
    state._hear("worker 9", {"row": {"worker 1": 1}})
    state._hear("worker 2", json.loads('{"row": {"worker 0": NaN, "worker 1": 1e99}}'))
    nothing = {"worker 0": None, "worker 1": None}
    assert state._rows == {
        "worker 0": {},
        "worker 1": {"worker 0": None, "worker 2": 3.0},
        "worker 2": nothing,
    }


def _connect(address):
    """A connection to a task that is about to listen."""
    deadline = threading.Event()
    for _ in range(1000):
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(line.split_address(address), timeout=SECONDS)
        deadline.wait(0.01)
    raise TimeoutError(address)
