"""The transport between real processes: strangers, restarts, stops, cuts, shared memory."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest
import zmq

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE)]

import networks

from stratagem.cluster.keys import Key
from stratagem.errors import MalformedMessageError, PeerLostError, PeerTimeoutError
from stratagem.transport import curve
from stratagem.transport.hub import Hub
from stratagem.transport.message import REQUEST, Message, Prefix, pack
from stratagem.transport.outgoing import Peer

pytestmark = pytest.mark.processes
SECRET = "a secret of sixteen characters"
SECONDS = 60.0


class Program:
    """A process that runs one of the programs, and the lines it prints."""

    def __init__(self, name: str, *arguments: str, before: Sequence[str] = ()) -> None:
        path = str(HERE / "programs" / f"{name}.py")
        self.process = subprocess.Popen(
            [*before, sys.executable, path, *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.lines: list[str] = []

    def line(self, begins: str) -> str:
        """The rest of the next line that begins so."""
        for text in self.process.stdout:
            self.lines.append(text)
            if text.startswith(begins):
                return text.removeprefix(begins).strip()
        raise AssertionError(f"the program ended: {''.join(self.lines)}")

    def end(self) -> str:
        """Ends it; gives what it printed."""
        self.process.kill()
        self.lines.extend(self.process.stdout)
        self.process.stdout.close()
        self.process.wait()
        return "".join(self.lines)


@contextlib.contextmanager
def running(name: str, *arguments: str, before: Sequence[str] = ()) -> Iterator[Program]:
    program = Program(name, *arguments, before=before)
    try:
        yield program
    finally:
        program.end()


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub("worker 0", Key(SECRET)) as hub:
        yield hub


def share(hub: Hub, peer: Peer) -> None:
    """Waits until both ends share memory."""
    deadline = time.monotonic() + SECONDS
    while not peer.shares.usable:
        assert time.monotonic() < deadline
        hub.call(peer, "look", seconds=SECONDS)
        hub.turn(0.05)
    hub.call(peer, "look", seconds=SECONDS)


def test_large_arrays_go_through_memory_that_nobody_leaves_behind(hub):
    before = set(os.listdir("/dev/shm"))
    with running("served", "127.0.0.1:0", SECRET) as server:
        peer = hub.connect(server.line("LISTENS"), "ps 0")
        share(hub, peer)
        unused = psutil.Process(server.process.pid).memory_info().shared
        ones = hub.allocate(peer, (1 << 20,), np.float32)
        ones[:] = 1.0
        sums = hub.call(peer, "look", {}, [ones, np.ones(1 << 20, np.int8)], seconds=SECONDS)
        assert sums.fields["sums"] == [float(1 << 20)] * 2
        del ones
        assert peer.shares.blocks == 0  # the views at the server are dead
        views = [
            hub.call(peer, "fill", {"size": 7 << 20}, seconds=SECONDS).arrays[0] for _ in range(8)
        ]
        first = views[0]
        views.clear()
        for _ in range(30):  # what is alive here is not written again
            hub.call(peer, "fill", {"size": 1 << 20}, seconds=SECONDS)
        assert (first == 7).all()
        assert not first.flags.writeable
        used = psutil.Process(server.process.pid).memory_info().shared - unused
        assert used < 80 << 20
        server.process.kill()
        server.process.wait()
        assert (first == 7).all()
    assert set(os.listdir("/dev/shm")) == before


def test_who_has_another_key_is_refused_and_logged(hub, caplog):
    listener = Hub("ps 0", Key(SECRET))
    address = listener.listen("127.0.0.1:0", lambda _: Message())
    with listener, Hub("stranger", Key("another secret of the same")) as stranger:
        peer = stranger.connect(address, "ps 0")
        ticket = peer.post("look", seconds=1.5)
        end = time.monotonic() + 5
        while not ticket.done and time.monotonic() < end:
            listener.turn(0.02)
            stranger.turn(0.02)
        with pytest.raises(PeerTimeoutError, match="never heard: .*another STRATAGEM_CLUSTER_KEY"):
            ticket.result()
    refusals = [m for m in caplog.messages if m.startswith("ps 0 refused a connection from")]
    assert 1 <= len(refusals) <= 5  # though it tries more often
    assert refusals[0].startswith("ps 0 refused a connection from 127.0.0.1:")
    assert "it has another key, or none" in refusals[0]


def test_who_knows_the_listeners_key_alone_is_refused(caplog):
    keys, other = curve.pairs(SECRET), curve.pairs("another secret of the same")
    with Hub("ps 0", Key(SECRET)) as listener, zmq.Context() as context:
        address = listener.listen("127.0.0.1:0", lambda _: Message())
        with context.socket(zmq.DEALER) as stranger:
            stranger.linger = 0
            stranger.curve_serverkey = keys.listener.public
            stranger.curve_publickey = other.connector.public
            stranger.curve_secretkey = other.connector.secret
            stranger.connect(f"tcp://{address}")
            end = time.monotonic() + 5
            while not caplog.messages and time.monotonic() < end:
                listener.turn(0.05)
    assert "refused a connection from 127.0.0.1: it has another key" in caplog.messages[0]


def test_without_a_key_of_the_job_only_this_machine_is_used(tmp_path):
    key = Key.always({"XDG_RUNTIME_DIR": str(tmp_path)})
    with Hub("ps 0", key) as hub:
        with pytest.raises(ValueError, match=r"to listen at 10.213.7.1:1, which is beyond this"):
            hub.listen("10.213.7.1:1", lambda _: None)
        with pytest.raises(ValueError, match=r"Expected STRATAGEM_CLUSTER_KEY \(or .*to connect"):
            hub.connect("10.213.7.1:1", "ps 1")
        hub.listen("127.0.0.1:0", lambda _: None)
    with pytest.raises(ValueError, match="Expected a key for the connections of ps 0"):
        Hub("ps 0")


def test_an_address_that_is_taken_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as taken, Hub("ps 0", Key(SECRET)) as hub:
        with pytest.raises(OSError, match="Expected an address of this machine that is free"):
            hub.listen(f"127.0.0.1:{taken.getsockname()[1]}", lambda _: None)
    with Hub("ps 1", Key(SECRET)) as hub:
        with pytest.raises(OSError, match="Expected the address of this machine. Got no.such.host"):
            hub.listen("no.such.host.invalid:1", lambda _: None)


def test_a_server_that_was_killed_and_restarted_is_lost_to_who_waits(hub):
    with running("served", "127.0.0.1:0", SECRET) as first:
        address = first.line("LISTENS")
        peer = hub.connect(address, "ps 0")
        share(hub, peer)
        ticket = peer.post("later", {}, [np.ones(1 << 20)], seconds=SECONDS)
        hub.turn(0.1)
        first.process.kill()
        first.process.wait()
    with running("served", address, SECRET) as second:
        second.line("LISTENS")
        with pytest.raises(PeerLostError, match="it was restarted"):
            hub.wait([ticket])
        share(hub, peer)
        sums = hub.call(peer, "look", {}, [np.ones(1 << 20)], seconds=SECONDS).fields["sums"]
        assert sums == [float(1 << 20)]


def test_a_stopped_server_costs_the_deadline_and_goes_on_later(hub):
    with running("served", "127.0.0.1:0", SECRET) as server:
        peer = hub.connect(server.line("LISTENS"), "ps 0")
        hub.call(peer, "look", seconds=SECONDS)
        server.process.send_signal(signal.SIGSTOP)
        with pytest.raises(PeerTimeoutError, match=r"to 'add' within 2.5 s .*silent for 2\.\d s"):
            hub.call(peer, "add", {"n": 1}, seconds=2.5)
        ticket = peer.post("add", {"n": 2}, seconds=SECONDS)
        server.process.send_signal(signal.SIGCONT)
        (answer,) = hub.wait([ticket])
        assert answer.fields["executed"][-1] == 2
        assert answer.fields["executed"] in ([2], [1, 2])


def test_a_cut_that_heals_after_3_s_executes_nothing_twice():
    if why := networks.missing():
        pytest.skip(why)
    with networks.Cable() as cable:
        before, address = cable.inside(), f"{cable.hosts[0]}:23456"
        with (
            running("served", address, SECRET, before=before[0]) as server,
            running("asks", address, SECRET, "100", "0.03", before=before[1]) as client,
        ):
            server.line("LISTENS")
            client.line("BEGINS")
            time.sleep(0.5)
            cable.cut()
            time.sleep(3)
            cable.mend()
            assert json.loads(client.line("RESULT")) == list(range(100))


def test_noise_and_hostile_messages_leave_a_server_as_it_was(caplog):
    """10,000 messages of one who has the key, and noise of one who has not."""
    caplog.set_level("WARNING")
    chance = random.Random(2)
    state = {"value": 1}

    def serve(request) -> Message:
        if request.method == "set":
            state["value"] = request.fields["value"]
        return Message("", dict(state))

    stop = threading.Event()
    with Hub("ps 0", Key(SECRET)) as server:
        host, port = server.listen("127.0.0.1:0", serve).split(":")

        def loop() -> None:
            while not stop.is_set():
                server.turn(0.05)

        thread = threading.Thread(target=loop)
        thread.start()
        try:
            for _ in range(100):
                with contextlib.suppress(OSError):
                    with socket.create_connection((host, int(port)), timeout=1) as line:
                        line.sendall(chance.randbytes(chance.randrange(1, 400)))
            _attack(f"tcp://{host}:{port}", chance)
            with Hub("worker 0", Key(SECRET)) as hub:
                peer = hub.connect(f"{host}:{port}", "ps 0")
                assert hub.call(peer, "get", seconds=SECONDS).fields == {"value": 1}
                hub.call(peer, "set", {"value": 2}, seconds=SECONDS)
                assert hub.call(peer, "get", seconds=SECONDS).fields == {"value": 2}
                with pytest.raises(MalformedMessageError, match="plain data"):
                    hub.call(peer, "set", {"value": object()}, seconds=SECONDS)
        finally:
            stop.set()
            thread.join()
    malformed = [m for m in caplog.messages if "got a malformed message" in m]
    assert 1 <= len(malformed) < 30
    assert 1 <= len([m for m in caplog.messages if "refused a connection" in m]) < 30


def _attack(endpoint: str, chance: random.Random) -> None:
    """Sends malformed requests over a connection that is let in."""
    keys = curve.pairs(SECRET)
    body, arrays, _ = pack(Message("get", {"a": [1, {"b": b"x"}]}, (np.arange(6),)))
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 5000
        socket.curve_serverkey = keys.listener.public
        socket.curve_publickey = keys.connector.public
        socket.curve_secretkey = keys.connector.secret
        socket.connect(endpoint)
        for i in range(10_000):
            prefix = Prefix(
                chance.choice([REQUEST, REQUEST, 2, 3, 4, 6, 9]),
                chance.choice([b"s" * 16, chance.randbytes(16)]),
                chance.choice([bytes(16), b"t" * 16]),
                chance.choice([i, 2**61, 2**63 + 1]),
                chance.choice([0, i, 2**61]),
                chance.choice([1.0, -1.0, float("nan"), 1e300]),
            )
            header = bytearray(prefix.pack() + body)
            for _ in range(chance.randrange(4)):
                header[chance.randrange(61, len(header))] = chance.randrange(256)
            if i % 7 == 0:
                del header[chance.randrange(len(header)) :]
            frames = [bytes(header), arrays[0].tobytes()][: chance.randrange(3)]
            if i % 11 == 0:
                frames = [chance.randbytes(chance.randrange(200)) for _ in range(3)]
            if frames:
                socket.send_multipart(frames)
