"""A job's members and their service, as threads of one process, with no JAX service behind."""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
from collections.abc import Iterator

import jax
import pytest

from stratagem.cluster import regroup
from stratagem.cluster.channel import Channel, LocalStore
from stratagem.cluster.hosting import Service
from stratagem.cluster.member import Generation, Member
from stratagem.cluster.membership import Terms
from stratagem.cluster.service import main
from stratagem.errors import GroupChangedError, PeerTimeoutError

SECONDS = 20


class Hosted:
    def __init__(self) -> None:
        self.closed = False

    def shutdown(self) -> None:
        self.closed = True


class Cluster:
    """A service, and members that are made in this process."""

    def __init__(self, tasks: int):
        self.hosted: list[Hosted] = []
        self.ends: queue.Queue[tuple[str, str, bool]] = queue.Queue()
        self.members: list[Member] = []
        self.service = Service("127.0.0.1:0", tasks, self._host)
        self.service.start()

    def _host(self, host: str, tasks: int) -> tuple[int, Hosted]:
        self.hosted.append(Hosted())
        return 1000 + tasks, self.hosted[-1]

    def add(self, index: int, **terms: float) -> Member:
        task = f"worker {index}"
        member = Member.connect(
            self.service.address,
            task,
            index,
            Terms(**terms),
            SECONDS,
            lambda why, dump: self.ends.put((task, why, dump)),
        )
        self.members.append(member)
        return member

    def start(self, tasks: int, **terms: float) -> list[Member]:
        members = [self.add(i, **terms) for i in range(tasks)]
        for member in members:
            member.joined(member.await_change(SECONDS))
        return members


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster(2)
    yield made
    for member in made.members:
        member.close()
    made.service.close()


def kill(member: Member) -> None:
    """What the kernel does to the connection of a process that dies."""
    member._closed = True
    member._line.shutdown(2)


def test_members_meet_and_a_step_gives_its_result(cluster):
    first, second = cluster.start(2)
    assert first._current == Generation(
        0, ("worker 0", "worker 1"), "127.0.0.1:1002", "all tasks are there"
    )
    assert second.run(lambda: jax.numpy.arange(3).sum(), "a sum") == 3
    assert (first.finished, second.finished) == (0, 1)


def test_an_error_of_the_step_is_its_error(cluster):
    first, _ = cluster.start(2)
    with pytest.raises(ZeroDivisionError):
        first.run(lambda: 1 / 0, "a division")
    assert first.run(lambda: first.run(lambda: 2, "inside"), "outside") == 2


def test_a_stuck_step_is_left_behind_when_a_peer_dies(cluster):
    first, second = cluster.start(2, min_workers=1)
    stuck, inside = threading.Event(), threading.Event()

    def step() -> None:
        inside.set()
        stuck.wait()

    threading.Thread(target=lambda: (inside.wait(), kill(second))).start()
    with pytest.raises(GroupChangedError, match="worker 1 is lost: its connection closed"):
        first.run(step, "a collective")
    with pytest.raises(GroupChangedError, match=r"Now: worker 0 \(this is worker 0\)"):
        first.run(lambda: 1, "the next step")
    generation = first.await_change(SECONDS)
    assert generation.members == ("worker 0",)
    first.joined(generation)
    assert first.run(lambda: 5, "the step again") == 5
    stuck.set()


class Told(Exception):
    pass


def test_a_signal_reaches_a_program_whose_step_is_stuck(cluster):
    first, _ = cluster.start(2)
    stuck, inside = threading.Event(), threading.Event()

    def handler(number: int, frame: object) -> None:
        raise Told

    def step() -> None:
        inside.set()
        stuck.wait()

    def tell() -> None:
        inside.wait()
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        threading.Thread(target=tell).start()
        with pytest.raises(Told):
            first.run(step, "a collective")
    finally:
        signal.signal(signal.SIGUSR1, before)
    stuck.set()
    assert first.run(lambda: 1, "a step") == 1


@pytest.mark.parametrize("kind", [jax.errors.JaxRuntimeError, ValueError])
def test_a_failed_step_waits_for_the_news_that_explains_it(cluster, kind):
    first, second = cluster.start(2, min_workers=1)

    def step() -> None:
        kill(second)
        raise kind("UNKNOWN: Gloo all-reduce failed: Connection closed by peer")

    with pytest.raises(GroupChangedError, match="worker 1 is lost"):
        first.run(step, "a collective")


def test_a_newcomer_is_announced_to_all_and_old_services_end_once_unused(cluster):
    first, second = cluster.start(2, min_workers=1)
    kill(second)
    first.joined(first.await_change(SECONDS))
    second = cluster.add(1, min_workers=1)
    generations = [m.await_change(SECONDS) for m in (first, second)]
    assert generations[0] == generations[1]
    assert generations[0].members == ("worker 0", "worker 1")
    assert not cluster.hosted[2].closed
    for member in (first, second):
        member.joined(generations[0])
    cluster.service.close()
    assert [hosted.closed for hosted in cluster.hosted] == [True, True, True]


def test_a_loss_that_is_not_allowed_ends_the_others_with_the_reason(cluster):
    _, second = cluster.start(2)
    kill(second)
    task, why, dump = cluster.ends.get(timeout=SECONDS)
    assert (task, dump) == ("worker 0", False)
    assert why.startswith("worker 1 is lost: its connection closed; the job may not go on")


def test_a_step_that_some_do_not_come_to_ends_all_and_shows_those(cluster):
    first, _ = cluster.start(2, stall_seconds=0.5)
    release = threading.Event()
    thread = threading.Thread(target=lambda: first.run(release.wait, "training step 4"))
    thread.start()
    ends = {
        task: (why, dump) for task, why, dump in (cluster.ends.get(timeout=SECONDS) for _ in "12")
    }
    release.set()
    thread.join()
    assert ends["worker 1"][1]
    assert not ends["worker 0"][1]
    assert "(training step 4) to finish within 0.5 s" in ends["worker 0"][0]
    assert "Missing: worker 1 (has been outside of any step after step 0" in ends["worker 0"][0]


def test_a_service_that_is_gone_ends_its_members(cluster):
    cluster.start(2)
    cluster.service.close()
    assert "the job's coordination service is gone" in cluster.ends.get(timeout=SECONDS)[1]


def test_strangers_are_hung_up_on(cluster):
    first, _ = cluster.start(2)
    for text in (b"GET / HTTP/1.1\r\n\r\n", b'{"kind": "beat", "said": {}}\n', b"[]\n"):
        host, _, port = cluster.service.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=SECONDS) as line:
            line.sendall(text)
            assert line.recv(1) == b""
    assert first.run(lambda: 1, "a step") == 1


def test_who_is_missing_at_the_start_is_an_error(cluster):
    member = cluster.add(0)
    with pytest.raises(PeerTimeoutError, match="Not all have said hello"):
        member.await_change(0.1)


def test_no_service_is_an_error():
    with pytest.raises(PeerTimeoutError, match=r"coordination service at 127.0.0.1:1 within 0.1 s"):
        Member.connect("127.0.0.1:1", "worker 0", 0, Terms(), 0.1)


@pytest.mark.parametrize("arguments", [[], ["127.0.0.1:0"], ["127.0.0.1:0", "0"], ["x", "2", "3"]])
def test_the_command_says_what_it_expects(arguments, capsys):
    assert main(arguments) == 2
    assert "expected HOST:PORT TASKS, such as 127.0.0.1:0 2" in capsys.readouterr().err


def test_the_command_names_an_address_that_cannot_be_listened_at(capsys):
    assert main(["192.0.2.1:0", "2"]) == 1
    assert "cannot listen at 192.0.2.1:0" in capsys.readouterr().err


def test_all_agree_on_where_to_go_on_from():
    store = LocalStore()
    names = ["worker 0", "worker 1", "worker 2"]
    found: dict[int, regroup.Progress] = {}

    def one(rank: int, finished: int | None) -> None:
        stream = Channel(store, rank, names, SECONDS, "g1").stream("recover")
        found[rank] = regroup.agree(stream, finished)

    threads = [threading.Thread(target=one, args=pair) for pair in enumerate([4, 3, None])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(3), regroup.Progress(3, 1, (2,)))
