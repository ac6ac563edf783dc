"""A job's members and their service, as threads of one process, with no JAX service behind."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import queue
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from stratagem.cluster import regroup, rollcall
from stratagem.cluster.channel import Channel, LocalStore
from stratagem.cluster.hosting import Service
from stratagem.cluster.keys import Key
from stratagem.cluster.member import Generation, Member
from stratagem.cluster.membership import Beat, Terms
from stratagem.cluster.messages import Hello, decode, encode
from stratagem.cluster.service import main
from stratagem.errors import GroupChangedError, JobMismatchError, PeerTimeoutError

sys.path.insert(0, str(Path(__file__).parents[1]))

from noise import malformed

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


def test_a_newcomer_that_is_admitted_is_announced_to_all_and_old_services_end_once_unused(cluster):
    first, second = cluster.start(2, min_workers=1)
    kill(second)
    first.joined(first.await_change(SECONDS))
    second = cluster.add(1, min_workers=1)
    with pytest.raises(PeerTimeoutError):
        second.await_change(0.1)
    first.admit()
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
    assert ends["worker 0"][1]  # where it waits is of use too
    assert (
        "(this is worker 0, in step 1 since the last change, training step 4"
        in (ends["worker 0"][0])
    )
    assert "(training step 4) to finish within 0.5 s" in ends["worker 0"][0]
    assert "Missing: worker 1 (has been outside of any step after step 0" in ends["worker 0"][0]


def test_a_service_that_is_gone_ends_its_members(cluster):
    cluster.start(2)
    cluster.service.close()
    why = cluster.ends.get(timeout=SECONDS)[1]
    assert "the job's coordination service at 127.0.0.1 is gone" in why


def test_a_service_that_says_nothing_ends_its_members():
    ends: queue.Queue[str] = queue.Queue()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"

        def welcome() -> None:
            line, _ = silent.accept()
            line.sendall(encode("challenge", "1") + encode("welcome", ""))
            lines.append(line)

        lines: list[socket.socket] = []
        thread = threading.Thread(target=welcome)
        thread.start()
        terms = Terms(silence_seconds=0.5)
        member = Member.connect(
            address, "worker 0", 0, terms, SECONDS, lambda why, _: ends.put(why)
        )
        assert "no sign of life from the job's coordination service" in ends.get(timeout=SECONDS)
        member.close()
        thread.join()
        lines[0].close()


def test_who_waits_long_for_a_step_is_told_who_is_late(cluster, caplog):
    first, _ = cluster.start(2, warn_seconds=0.1)
    release = threading.Event()
    thread = threading.Thread(target=lambda: first.run(release.wait, "training step 4"))
    thread.start()
    deadline = time.monotonic() + SECONDS
    while not caplog.records and time.monotonic() < deadline:
        time.sleep(0.02)
    release.set()
    thread.join()
    text = caplog.records[0].getMessage()
    assert "worker 0 has been in step 1 since the last change (training step 4) for" in text
    assert "Missing: worker 1" in text
    assert cluster.ends.empty()


def test_a_program_that_has_ended_explains_a_step_that_fails(cluster):
    first, second = cluster.start(2)
    second.close()

    def step() -> None:
        raise ValueError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer")

    with pytest.raises(ValueError, match="Gloo"):  # would have ended here
        first.run(step, "a train step of model 'm'")
    task, why, dump = cluster.ends.get(timeout=SECONDS)
    assert (task, dump) == ("worker 0", True)
    assert "Expected all processes to take part in a train step of model 'm'. worker 1:" in why
    assert "the program has ended. Every process must make the same calls" in why
    assert "It failed with: UNKNOWN: Gloo" in why


def test_a_program_that_fails_is_lost_and_says_why(cluster):
    first, second = cluster.start(2, min_workers=1)
    second.close("it has failed with ValueError: no such file")
    generation = first.await_change(SECONDS)
    assert generation.members == ("worker 0",)
    assert generation.why == "worker 1 is lost: it has failed with ValueError: no such file"


KEY, OTHER = "a key of the job " * 2, "another key " * 2


@pytest.mark.parametrize(
    ("service", "task", "fault"),
    [
        (KEY, KEY, ""),
        (KEY, "", "Got: worker 0 has no STRATAGEM_CLUSTER_KEY. Set the variable"),
        (KEY, OTHER, "Got: worker 0 has another STRATAGEM_CLUSTER_KEY"),
        ("", KEY, "Got: worker 0 has a STRATAGEM_CLUSTER_KEY, and this end has none"),
    ],
)
def test_a_task_and_its_service_have_one_key(service, task, fault):
    hosted = Service("127.0.0.1:0", 2, lambda *_: (1, Hosted()), Key(service))
    hosted.start()
    connect = functools.partial(
        Member.connect, hosted.address, "worker 0", 0, Terms(), SECONDS, key=Key(task)
    )
    try:
        if fault:
            with pytest.raises(JobMismatchError, match=fault):
                connect()
        else:
            connect().close()
    finally:
        hosted.close()


def test_a_service_that_has_not_the_key_is_not_believed():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def impostor() -> None:
            line, _ = server.accept()
            with line:
                line.sendall(encode("challenge", "1"))
                line.recv(1 << 16)
                line.sendall(encode("welcome", "0" * 64))

        thread = threading.Thread(target=impostor)
        thread.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(JobMismatchError, match="Got: the service has another STRATAGEM_CLUST"):
            Member.connect(address, "worker 0", 0, Terms(), SECONDS, key=Key(KEY))
        thread.join()


def test_a_service_whose_lines_do_not_end_is_not_listened_to():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def endless() -> None:
            line, _ = server.accept()
            time.sleep(0.1)  # A try has a second, however near its deadline.
            with line, contextlib.suppress(OSError):
                while True:
                    line.sendall(b"x" * 4096)

        thread = threading.Thread(target=endless)
        thread.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        fault = "Got ValueError: it says a line of more than 65536 bytes"
        with pytest.raises(PeerTimeoutError, match=fault):
            Member.connect(address, "worker 0", 0, Terms(), 0.0)
        thread.join()


def test_a_key_that_can_be_guessed_is_refused():
    with pytest.raises(ValueError, match="STRATAGEM_CLUSTER_KEY: expected at least 16 .* Got 3"):
        Key("abc")
    assert KEY not in repr(Key(KEY))


def test_strangers_are_hung_up_on(cluster):
    first, _ = cluster.start(2)
    for text in (b"GET / HTTP/1.1\r\n\r\n", b'{"kind": "beat", "said": {}}\n', b"[]\n"):
        host, _, port = cluster.service.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=SECONDS) as line:
            line.sendall(text)
            received = b""
            while data := line.recv(1 << 16):
                received += data
            assert json.loads(received)["kind"] == "challenge"  # and nothing more
    assert first.run(lambda: 1, "a step") == 1


def test_noise_of_all_kinds_leaves_the_service_up(cluster):
    first, _ = cluster.start(2, min_workers=1)
    hello = {"task": "worker 1", "rank": 1, "terms": dataclasses.asdict(Terms())}
    messages = [
        {"kind": "hello", "said": {"me": hello, "challenge": "1", "proof": ""}},
        {"kind": "beat", "said": dataclasses.asdict(Beat(1, True, 0.5, "a step"))},
        {"kind": "joined", "said": 0},
        {"kind": "bye", "said": None},
    ]
    rng = random.Random(0)
    lines = [malformed(rng, rng.choice(messages)) for _ in range(5000)]
    for line in lines:
        decode(line)
    host, port = rollcall.split_address(cluster.service.address)
    for line in lines[:300]:
        if isinstance(decode(line), Hello):
            continue  # who is let in without a key takes the place of a task
        with contextlib.suppress(OSError), socket.create_connection((host, port), 10) as noise:
            noise.sendall(line)
    assert first.run(lambda: 1, "a step") == 1
    assert cluster.service._thread.is_alive()
    assert cluster.ends.empty()


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


@pytest.mark.parametrize(("key", "warned"), [("", True), (KEY, False)])
def test_the_command_warns_where_it_listens_to_all_without_a_key(key, warned, capsys, monkeypatch):
    monkeypatch.setenv("STRATAGEM_CLUSTER_KEY", key)
    monkeypatch.setattr(Service, "serve", lambda self, _: self._listener.close())
    assert main(["0.0.0.0:0", "2"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("ready 0.0.0.0:")
    assert ("Listening at 0.0.0.0 without a key" in err) == warned


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
