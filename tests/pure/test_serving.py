"""The program of workers and servers: who it is, where it listens, when it leaves."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import threading

import pytest

from stratagem.cli import serve
from stratagem.cli.main import main
from stratagem.cluster.spec import ClusterSpec
from stratagem.coordinator import serving
from stratagem.coordinator.server import Server
from stratagem.launcher.local import free_ports

SECONDS = 30.0  # Longer than anything here takes.


class Dummy:
    """A program that does nothing until it is stopped."""

    made: list[Dummy] = []

    def __init__(self, cluster: ClusterSpec, index: int) -> None:
        self.cluster, self.index = cluster, index
        self.serves, self._stopped = threading.Event(), threading.Event()
        self.made.append(self)

    def serve(self) -> None:
        self.serves.set()
        if not self._stopped.wait(SECONDS):
            raise TimeoutError("nobody has stopped it")

    def stop(self) -> None:
        self._stopped.set()


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[Dummy]:
    monkeypatch.setattr(Dummy, "made", [])
    for kind in ("worker", "ps"):
        monkeypatch.setitem(serving.PROGRAMS, kind, Dummy)
    return Dummy.made


@pytest.fixture
def cluster() -> dict[str, list[str]]:
    ports = free_ports(4)
    first, *others = (f"127.0.0.1:{port}" for port in ports)
    return {"chief": [first], "worker": others[:1], "ps": others[1:]}


def _options(*arguments: str) -> argparse.Namespace:
    top = argparse.ArgumentParser()
    serve.add_to(top.add_subparsers())
    return top.parse_args(["serve", *arguments])


class TestWhichTask:
    def test_as_tf_config_says(self, cluster):
        text = json.dumps({"cluster": cluster, "task": {"type": "ps", "index": 1}})
        found = serve.task_of(_options(), {"TF_CONFIG": text})
        assert found == (ClusterSpec(cluster), "ps", 1)
        options = _options("--task-type", "worker", "--index", "0")
        assert serve.task_of(options, {"TF_CONFIG": text})[1:] == ("worker", 0)

    def test_as_the_options_say(self, cluster, tmp_path):
        file = tmp_path / "cluster.json"
        whole = {"cluster": cluster, "task": {"type": "ps", "index": 1}}
        for text in (json.dumps(cluster), json.dumps(whole)):
            file.write_text(text)
            for given in (text, str(file)):
                options = _options("--cluster", given, "--task-type", "ps", "--index", "0")
                assert serve.task_of(options, {}) == (ClusterSpec(cluster), "ps", 0)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ([], r"expected TF_CONFIG in the environment, or --cluster\. Got neither\. Give the"),
            (["--cluster", "{}"], r"Got no tasks in it\."),
            (["--cluster", "/no/file"], r"--cluster: .* Got '/no/file': No such file or directory"),
            (["--cluster", "{"], r"TF_CONFIG: expected JSON"),
            (["--cluster", '{"ps": ["a:1"]}'], r"Got None, None\. Give --task-type and --in"),
            (
                ["--cluster", '{"ps": ["a:1"]}', "--task-type", "ps"],
                r"expected the index of a 'ps' task, one out of \[0\]\. Got None\.",
            ),
            (
                ["--cluster", '{"ps": ["a:1"]}', "--task-type", "ps", "--index", "1"],
                r"task_id: expected the index of a 'ps' task, one out of \[0\]\. Got 1",
            ),
        ],
    )
    def test_what_is_missing_or_wrong(self, arguments, message, capsys, monkeypatch):
        monkeypatch.delenv("TF_CONFIG", raising=False)
        assert main(["serve", *arguments]) == 2
        assert re.search("stratagem serve: error: .*" + message, capsys.readouterr().err)


def test_a_key_that_is_refused(cluster, capsys, monkeypatch):
    monkeypatch.setenv("STRATAGEM_CLUSTER_KEY", "short")
    options = ["--cluster", json.dumps(cluster), "--task-type", "ps", "--index", "0"]
    assert main(["serve", *options]) == 2
    expected = "stratagem serve: error: STRATAGEM_CLUSTER_KEY: expected at least 16 characters."
    assert capsys.readouterr().err.startswith(expected)


class TestAddress:
    def test_it_is_that_of_the_task(self, cluster):
        assert serving.address_of(ClusterSpec(cluster), "ps", 1) == cluster["ps"][1]

    @pytest.mark.parametrize(
        ("task_type", "message"),
        [
            ("chief", r"expected worker or ps, .* Got 'chief', which coordinates the others by"),
            ("evaluator", r"Got 'evaluator', which evaluates checkpoints by your own program\. St"),
        ],
    )
    def test_a_task_with_a_program_of_its_own(self, cluster, task_type, message):
        cluster["evaluator"] = ["127.0.0.1:1"]
        with pytest.raises(ValueError, match=message):
            serving.address_of(ClusterSpec(cluster), task_type, 0)

    def test_a_cluster_without_servers(self):
        message = r"expected workers and parameter servers .* Got worker\. Add the addresses of ps"
        with pytest.raises(ValueError, match=message):
            serving.address_of(ClusterSpec({"worker": ["127.0.0.1:1"]}), "worker", 0)

    def test_a_port_in_use(self, cluster):
        host, port = cluster["ps"][0].split(":")
        with socket.create_server((host, int(port))):
            message = rf"cluster\.ps\[0\]: expected a port that is free.*Got {host}:{port}: Address"
            with pytest.raises(ValueError, match=message):
                serving.address_of(ClusterSpec(cluster), "ps", 0)

    def test_an_address_of_another_machine(self, cluster):
        cluster["ps"][0] = "203.0.113.1:2222"
        with pytest.raises(ValueError, match=r"cluster\.ps\[0\]: expected an address of this mach"):
            serving.address_of(ClusterSpec(cluster), "ps", 0)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_the_command(programs, cluster, signum, code, monkeypatch, capsys):
    text = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})
    monkeypatch.setenv("TF_CONFIG", text)
    before = signal.getsignal(signum)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signum))
    timer.start()
    looked, look = [], serving.address_of
    monkeypatch.setattr(serving, "address_of", lambda *task: looked.append(task) or look(*task))
    assert main(["serve"]) == code
    timer.join()
    assert looked == [(ClusterSpec(cluster), "worker", 0)]
    assert signal.getsignal(signum) == before
    (program,) = programs
    assert (program.cluster, program.index) == (ClusterSpec(cluster), 0)
    said = f"stratagem serve: worker 0 at {cluster['worker'][0]}\n"
    assert capsys.readouterr().err == said


def test_who_asks_twice_does_not_wait():
    came = []
    before = signal.signal(signal.SIGTERM, lambda *_: came.append("before"))
    try:
        leave = serving.Leave()
        with serving.called_by_signals(leave, (signal.SIGTERM,)) as signals:
            signal.raise_signal(signal.SIGTERM)
            assert (signals, came) == ([signal.SIGTERM], [])
            signal.raise_signal(signal.SIGTERM)
        assert came == ["before"]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_program_that_is_only_being_made_is_stopped_too():
    leave = serving.Leave()
    leave()
    program = Dummy(ClusterSpec({}), 0)
    leave.passes_to(program)
    program.serve()  # Returns at once.


class TestServer:
    def test_it_serves_in_a_thread_until_it_is_stopped(self, programs, cluster):
        server = Server(cluster, job_name="ps", task_index=1, protocol="grpc")
        assert server.target == f"grpc://{cluster['ps'][1]}"
        told = server.server_def
        assert (told.cluster, told.job_name, told.task_index) == (ClusterSpec(cluster), "ps", 1)
        server.start()  # Without effect.
        server.stop()
        server.join()
        (program,) = programs
        assert program.index == 1
        assert program.serves.is_set()

    def test_sigterm_ends_join(self, programs, cluster):
        server = Server(cluster, "worker", 0)
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM))
        timer.start()
        server.join()
        timer.join()

    def test_which_task_may_be_clear(self, programs, cluster):
        assert Server(cluster, "worker", start=False).server_def.task_index == 0
        server = Server(cluster, "ps", 1, start=False)
        assert Server(server.server_def, start=False).target == server.target
        server.stop()
        assert programs == []

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ((), r"job_name: expected worker or ps, since .* \(chief, worker, ps\)\. Got None"),
            (("ps",), r"task_index: expected one out of \[0, 1\], since the cluster has 2 tasks"),
            (("ps", 2), r"task_id: expected the index of a 'ps' task"),
            (("chief",), r"task_type: expected worker or ps"),
        ],
    )
    def test_which_task_is_not_clear(self, cluster, arguments, message):
        with pytest.raises(ValueError, match=message):
            Server(cluster, *arguments)

    def test_join_before_start(self, cluster):
        with pytest.raises(RuntimeError, match=r"Server.join: expected a server that was started"):
            Server(cluster, "ps", 0, start=False).join()

    def test_what_it_fails_with_is_raised_by_join(self, cluster, monkeypatch, caplog):
        def fails(*_: object) -> None:
            raise OSError("no such thing")

        monkeypatch.setitem(serving.PROGRAMS, "ps", fails)
        server = Server(cluster, "ps", 0)
        with pytest.raises(OSError, match="no such thing"):
            server.join()
        assert "ps 0 has failed." in caplog.text

    def test_a_config_is_ignored_with_a_warning(self, cluster):
        with pytest.warns(UserWarning, match=r"Server: expected no config, .* Got dict, which"):
            Server(cluster, "ps", 0, config={"threads": 1}, start=False)

    def test_one_that_does_not_leave(self, cluster, monkeypatch, caplog):
        class Stuck(Dummy):
            def stop(self) -> None:
                pass

        made: list[Dummy] = []
        monkeypatch.setattr(Dummy, "made", made)
        monkeypatch.setitem(serving.PROGRAMS, "ps", Stuck)
        monkeypatch.setattr("stratagem.coordinator.server._LEAVE_SECONDS", 0.1)
        server = Server(cluster, "ps", 0)
        server.stop()
        assert "Server.stop: expected ps 0 to leave within 0.1 s. It is still at" in caplog.text
        Dummy.stop(made[0])
        server.join()
