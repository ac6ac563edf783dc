"""The roll call before a job, its tasks played by threads on loopback."""

from __future__ import annotations

import dataclasses
import random
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stratagem.cluster import rollcall
from stratagem.cluster.keys import Key
from stratagem.cluster.rollcall import Card
from stratagem.errors import JobMismatchError, PeerTimeoutError

sys.path.insert(0, str(Path(__file__).parents[1]))

from noise import malformed


@pytest.fixture
def cluster():
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return tuple((f"worker {i}", f"127.0.0.1:{port}") for i, port in enumerate(ports))


def cards(cluster):
    return [Card(task, cluster, "stratagem 1, jax 2", 0, time.time()) for task, _ in cluster]


def meet(cards, ranks=range(3), seconds=10.0, keys=("", "", "")):
    """What `call` returns or raises on each rank."""

    def one(rank):
        try:
            return rollcall.call(cards[rank], rank, seconds, lambda: "host:1", Key(keys[rank]))
        except Exception as error:
            return error

    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(one, ranks))


def test_all_get_the_address_of_the_service(cluster):
    assert meet(cards(cluster)) == ["host:1"] * 3


def test_a_task_alone_waits_for_nobody(cluster):
    card = dataclasses.replace(cards(cluster)[0], cluster=cluster[:1])
    assert rollcall.call(card, 0, 1.0, lambda: "host:1") == "host:1"


@pytest.mark.parametrize("present", [(0, 1), (0,)])
def test_missing_workers_are_named_by_all(cluster, present):
    for rank, error in zip(present, meet(cards(cluster), present, 0.5), strict=True):
        assert isinstance(error, PeerTimeoutError)
        absent = ", ".join(f"{t} at {a}" for t, a in cluster if int(t[-1]) not in present)
        assert f"Expected 3 tasks to start within 0.5 s. Missing: {absent}." in str(error)
        assert f"(this is {cluster[rank][0]} at {cluster[rank][1]})" in str(error)


def test_a_missing_leader_is_named(cluster):
    for error in meet(cards(cluster), (1, 2), 0.5):
        assert isinstance(error, PeerTimeoutError)
        assert f"Missing: worker 0 at {cluster[0][1]}." in str(error)
        assert "The last try: ConnectionRefusedError" in str(error)


def test_a_try_has_time_however_near_its_deadline(cluster):
    host, port = rollcall.split_address(cluster[0][1])
    with socket.create_server((host, port)) as server, ThreadPoolExecutor(1) as pool:

        def stranger():
            line, _ = server.accept()
            with line:
                time.sleep(0.2)
                line.sendall(b"HTTP/1.1 400 Bad Request\r\n")

        pool.submit(stranger)
        (error,) = meet(cards(cluster), (1,), 0.1)
    assert "The last try: what answers there is no leader of this job." in str(error)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"cluster": (("worker 0", "a:1"), ("worker 1", "b:2"))}, "its cluster is [worker 0 at a"),
        ({"version": "stratagem 0, jax 2"}, "it runs stratagem 0, jax 2, not stratagem 1, jax 2"),
        ({"attempt": 1}, "it is of attempt 1, not 0"),
        ({"clock": 1000.0}, "s off the leader's"),
        ({"task": "worker 7"}, "it is none of the cluster's tasks"),
        ({"task": "worker 1"}, "worker 1: is there twice"),
    ],
)
def test_what_differs_is_said_by_all(cluster, change, text):
    all_cards = cards(cluster)
    leader = cluster[0]
    own = dataclasses.replace(all_cards[2], **change)

    def odd():
        with socket.create_connection(("127.0.0.1", int(leader[1].split(":")[1])), 5) as line:
            return rollcall._ask(line, own, time.monotonic() + 10, Key())[0]

    with ThreadPoolExecutor(3) as pool:
        others = pool.submit(meet, all_cards, (0, 1), 10.0)
        answer = {}
        deadline = time.monotonic() + 10
        while not answer and time.monotonic() < deadline:
            try:
                answer = odd()
            except OSError:
                time.sleep(0.02)
        for error in others.result():
            assert isinstance(error, JobMismatchError)
            assert text in str(error)
            assert "Expected the same TF_CONFIG cluster, versions and clock on every task" in str(
                error
            )
    assert text in answer["error"]


def test_an_address_in_use_names_the_field(cluster):
    with socket.create_server(("127.0.0.1", int(cluster[0][1].split(":")[1]))):
        with pytest.raises(
            ValueError, match=r"TF_CONFIG cluster.worker\[0\]: expected a free"
        ) as e:
            rollcall.call(cards(cluster)[0], 0, 1.0, lambda: "host:1")
    assert f"Got {cluster[0][1]}: Address already in use" in str(e.value)


def test_an_address_of_another_machine_names_the_field(cluster):
    elsewhere = (("worker 0", "192.0.2.1:2222"), *cluster[1:])  # a network for documents
    card = dataclasses.replace(cards(cluster)[0], cluster=elsewhere)
    with pytest.raises(ValueError, match="Got 192.0.2.1:2222: Cannot assign requested address"):
        rollcall.call(card, 0, 1.0, lambda: "host:1")


def test_an_unknown_host_is_named(cluster):
    elsewhere = (("worker 0", "no-such-host.invalid:2222"), *cluster[1:])
    card = dataclasses.replace(cards(cluster)[0], cluster=elsewhere)
    with pytest.raises(ValueError, match="the host name is unknown"):
        rollcall.call(card, 0, 1.0, lambda: "host:1")


@pytest.mark.parametrize(
    "noise",
    [b"GET / HTTP/1.1\r\n\r\n", b"\n", b"{}\n", b"[1]\n", b'{"task": 1}\n', b"\xff" * 70000, b""],
)
def test_strangers_are_ignored(cluster, noise):
    def stranger():
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            try:
                port = int(cluster[0][1].split(":")[1])
                with socket.create_connection(("127.0.0.1", port), 1) as line:
                    line.sendall(noise)
                    return
            except OSError:
                time.sleep(0.01)

    with ThreadPoolExecutor(2) as pool:
        leader = pool.submit(meet, cards(cluster), (0,), 5.0)
        pool.submit(stranger).result()
        assert meet(cards(cluster), (1, 2)) == ["host:1"] * 2
        assert leader.result() == ["host:1"]


KEY, OTHER = "a key of the job " * 2, "another key " * 2


def test_who_has_the_key_is_let_in(cluster):
    assert meet(cards(cluster), keys=(KEY,) * 3) == ["host:1"] * 3


@pytest.mark.parametrize(("key", "fault"), [("", "has no"), (OTHER, "has another")])
def test_who_has_not_the_key_is_refused_and_does_not_end_the_others(cluster, key, fault):
    first, second, third = meet(cards(cluster), seconds=2.0, keys=(KEY, KEY, key))
    assert isinstance(third, JobMismatchError)
    assert "Expected every task of the job to have the same STRATAGEM_CLUSTER_KEY" in str(third)
    assert f"Got: worker 2 {fault} STRATAGEM_CLUSTER_KEY. Set the variable to" in str(third)
    for error in (first, second):
        assert isinstance(error, PeerTimeoutError)
        assert f"Came and were refused: worker 2 {fault} STRATAGEM_CLUSTER_KEY" in str(error)
        assert KEY not in str(error)


def test_a_key_that_the_leader_has_not_is_a_difference(cluster):
    for error in meet(cards(cluster), keys=("", "", KEY)):
        assert isinstance(error, JobMismatchError)
        assert "worker 2: has a STRATAGEM_CLUSTER_KEY, and this end has none" in str(error)


def test_a_leader_without_the_key_is_not_believed(cluster):
    """What listens at the leader's address must know the key too."""
    with socket.create_server(("127.0.0.1", int(cluster[0][1].split(":")[1]))) as server:

        def impostor():
            line, _ = server.accept()
            with line:
                rollcall._send(line, {"challenge": "1"})
                rollcall._read_line(line)
                rollcall._send(line, {"answer": {"service": "evil:1"}, "proof": "0" * 64})

        with ThreadPoolExecutor(1) as pool:
            pool.submit(impostor)
            (error,) = meet(cards(cluster), (1,), keys=(KEY,) * 3)
    assert isinstance(error, JobMismatchError)
    assert "Got: the leader worker 0 at 127.0.0.1:" in str(error)
    assert "has another STRATAGEM_CLUSTER_KEY" in str(error)


def test_tasks_need_not_start_at_once(cluster, monkeypatch):
    monkeypatch.setattr(rollcall, "MAX_CLOCK_SKEW", 0.5)
    all_cards = cards(cluster)
    with ThreadPoolExecutor(1) as pool:
        leader = pool.submit(meet, all_cards, (0,))
        time.sleep(1.0)  # The leader's card is older than the others' by more than that.
        late = [dataclasses.replace(card, clock=time.time()) for card in all_cards]
        assert meet(late, (1, 2)) == ["host:1"] * 2
        assert leader.result() == ["host:1"]


def test_thousands_of_malformed_cards_are_read_or_ignored(cluster):
    mine = cards(cluster)[0]
    message = {"card": dataclasses.asdict(cards(cluster)[1]), "challenge": "1", "proof": ""}
    rng, read = random.Random(0), []
    for _ in range(5000):
        found = rollcall._read_card(malformed(rng, message))
        if found is not None:
            read.append(rollcall._differences(mine, found[0]))
            assert Key(KEY).fault(found[2], "task", "2", found[1], dataclasses.asdict(found[0]))
    assert read  # some are cards, of a task that is another


def test_strangers_of_all_kinds_leave_a_leader_with_a_key_up(cluster):
    message = {"card": dataclasses.asdict(cards(cluster)[1]), "challenge": "1", "proof": ""}
    rng, tries = random.Random(0), 300
    with ThreadPoolExecutor(2) as pool:
        leader = pool.submit(meet, cards(cluster), (0,), 60.0, (KEY,) * 3)
        while tries:
            try:
                address = rollcall.split_address(cluster[0][1])
                with socket.create_connection(address, 10) as line:
                    line.sendall(malformed(rng, message))
                tries -= 1
            except ConnectionRefusedError:  # It does not listen yet.
                assert not leader.done()
                time.sleep(0.01)
            except OSError:  # It has hung up before the end.
                tries -= 1
        assert meet(cards(cluster), (1, 2), keys=(KEY,) * 3) == ["host:1"] * 2
        assert leader.result() == ["host:1"]
