"""`stratagem doctor`: what it says about given facts, and about files that stand for them."""

from __future__ import annotations

import argparse
import errno
import io
import json
import re
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from stratagem.cli import checkup, diagnosis, doctor, machine
from stratagem.cli.machine import Chips, Devices, Package, Resources
from stratagem.cluster import TFConfigClusterResolver, checks, compare
from stratagem.cluster.checks import Level, Seat
from stratagem.cluster.line import NOBODY_LISTENS
from stratagem.cluster.meeting import Card, Link, Meeting
from stratagem.strategies import served_cluster

CLUSTER = (("worker 0", "a:1"), ("worker 1", "b:2"), ("worker 2", "c:3"))
SEAT = Seat("worker 0", CLUSTER)
VERSIONS = (("jax", "0.10.2"), ("python", "3.11.7"))
EXTRAS = ("cuda12", "cuda13", "rocm7-local", "tpu")


def faults(found):
    """`(found, do)` of what must be done."""
    return [(f.found, f.do) for f in found if f.level is Level.FAULT]


def said(found):
    """Level, text and advice of each finding, for regular expressions; all but fine ones advise."""
    assert all(bool(f.do) == (f.level is not Level.FINE) for f in found), found
    return "\n".join(f"{f.level.value} {f.what}: {f.found} -> {f.do}" for f in found)


class TestTFConfig:
    def test_without_it_the_machine_trains_alone(self):
        seat, found = checks.check_tf_config(None)
        assert seat is None
        assert said(found) == "fine TF_CONFIG: not set: this machine trains alone -> "

    def test_the_seat_is_this_task_among_those_that_train(self):
        jobs = {"ps": ["p:1"], "worker": ["w:1", "w:2"], "chief": ["c:1"], "evaluator": ["e:1"]}
        text = json.dumps({"cluster": jobs, "task": {"type": "worker", "index": 1}})
        seat, found = checks.check_tf_config(text)
        assert faults(found) == []
        assert seat.address == "w:2"
        assert [task for task, _ in seat.cluster] == ["chief 0", "worker 0", "worker 1", "ps 0"]
        assert seat.hosts == ("c", "w", "p")
        assert "worker 1" not in dict(seat.others)

    def test_all_faults_are_found_not_only_those_of_the_first_part(self):
        text = json.dumps(
            {
                "cluster": {"worker": ["a:1", "nonsense"]},
                "task": {"type": "wrker", "index": "one"},
                "rpc_layer": 7,
            }
        )
        seat, found = checks.check_tf_config(text)
        assert seat is None
        assert len(faults(found)) == 4
        assert re.search(r'"type"\]: expected one out of chief, .* Got \'wrker\'', said(found))
        assert re.search(r"worker 1 = 'nonsense'.*not of that form", said(found))
        assert re.search(r'"index"\]: expected a whole number', said(found))
        assert re.search(r'"rpc_layer"\]: expected a string', said(found))

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("{", "fault TF_CONFIG: TF_CONFIG: expected JSON"),
            (
                '{"cluster": {"worker": ["a:1"]}, "task": {"type": "wrker", "index": 0}}',
                r"[^\n]*expected one out of chief, [^\n]* Got 'wrker'[^\n]*$",
            ),
            ('{"tasks": 1}', r"look TF_CONFIG: no tasks under 'cluster'. It has 'tasks'"),
            (
                '{"cluster": {"worker": ["a:1", "b:1"]}}',
                "fault TF_CONFIG: expected the type and the index of this task",
            ),
            (
                '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 3}}',
                r'fault TF_CONFIG: TF_CONFIG\["task"\]\["index"\]: expected the index',
            ),
            (
                '{"cluster": {"worker": ["a:1"]}, "task": {"type": "evaluator", "index": 0}}',
                "fine TF_CONFIG: evaluator 0: takes no part in training",
            ),
            (
                '{"cluster": {"worker": ["localhost:1", "b:1"]},'
                ' "task": {"type": "worker", "index": 0}}',
                "look TF_CONFIG: .*expected addresses that every machine can reach",
            ),
        ],
    )
    def test_what_is_wrong_is_said(self, text, expected):
        assert re.match(expected, said(checks.check_tf_config(text)[1]))


class TestAddresses:
    def test_names_without_an_address(self):
        resolved = {"a": ("10.0.0.1",), "b": "the host name 'b' is unknown", "c": ("10.0.0.3",)}
        expected = r"fault host names: b \(worker 1\): the host name 'b' is unknown -> Correct"
        assert re.fullmatch(expected + ".*", said(checks.check_names(SEAT, resolved)))

    def test_an_own_name_that_only_this_machine_can_reach(self):
        resolved = {"a": ("127.0.1.1",), "b": ("10.0.0.2",), "c": ("10.0.0.3",)}
        (finding,) = checks.check_names(SEAT, resolved)
        assert "a, this machine, is 127.0.1.1 here, where others cannot reach it" in finding.found
        assert "out of /etc/hosts" in finding.do

    def test_a_cluster_on_one_machine_may_be_on_loopback(self):
        (finding,) = checks.check_names(SEAT, dict.fromkeys("abc", ("127.0.0.1",)))
        assert finding.level is Level.FINE

    @pytest.mark.parametrize(
        ("error", "expected"),
        [
            (None, "fine own address: a:1 (worker 0) is this machine's, and the port is free"),
            (errno.EADDRINUSE, "fault own address: a:1 (worker 0): the port is in use, by python"),
            (errno.EADDRNOTAVAIL, "fault own address: a:1 (worker 0): this machine has no such"),
            (errno.EACCES, "fault own address: a:1 (worker 0): no: ports below 1024"),
        ],
    )
    def test_own_address(self, error, expected):
        error = error and OSError(error, "no")
        assert said([checks.check_own_address(SEAT, error, "python")]).startswith(expected)

    def test_a_key_keeps_strangers_out(self):
        far = {"a": ("10.0.0.1",), "b": "unknown"}
        (finding,) = checks.check_key({}, far)
        assert said([finding]).startswith("look key: no STRATAGEM_CLUSTER_KEY: what reaches the")
        assert checks.check_key({}, {"a": ("127.0.0.1",)}) == []
        (finding,) = checks.check_key({"STRATAGEM_CLUSTER_KEY": "short"}, far)
        assert "fault key: STRATAGEM_CLUSTER_KEY: expected at least 16" in said([finding])
        (finding,) = checks.check_key({"STRATAGEM_CLUSTER_KEY": "x" * 16}, far)
        assert finding.level is Level.FINE

    def test_parameter_servers_insist_on_a_key(self, tmp_path):
        far, near = {"a": ("10.0.0.1",)}, {"a": ("127.0.0.1",)}
        (finding,) = checks.check_key({}, far, served=True)
        assert said([finding]).startswith("fault key: no STRATAGEM_CLUSTER_KEY: workers and serv")
        assert checks.check_key({}, near, served=True) == []
        (file := tmp_path / "key").write_text("k" * 16)
        file.chmod(0o600)
        (finding,) = checks.check_key({"STRATAGEM_CLUSTER_KEY_FILE": str(file)}, far, served=True)
        assert said([finding]) == "fine key: STRATAGEM_CLUSTER_KEY_FILE is set -> "

    def test_what_a_cluster_with_parameter_servers_needs(self):
        assert checks.check_serving(SEAT) == []
        seat = Seat("ps 0", (("ps 0", "a:1"), ("ps 1", "b:1")))
        assert said(checks.check_serving(seat)).startswith(
            "fault parameter servers: no worker in the cluster -> Add the addresses of workers"
        )
        headless = replace(seat, cluster=(*seat.cluster, ("worker 1", "c:1")))
        assert said(checks.check_serving(headless)).startswith(
            "fault parameter servers: 1 worker and 2 servers, but neither a chief nor worker 0 -> "
        )
        whole = replace(seat, cluster=(*seat.cluster, *CLUSTER, ("chief 0", "d:4")))
        (finding,) = checks.check_serving(whole)
        assert finding.found == "3 workers and 2 servers, which the chief coordinates"

    def test_worker_0_coordinates_where_there_is_no_chief(self):
        tasks = {"worker": ["a:1", "b:1"], "ps": ["c:1"]}
        text = json.dumps({"cluster": tasks, "task": {"type": "worker", "index": 0}})
        seat, _ = checks.check_tf_config(text)
        (finding,) = checks.check_serving(seat)
        assert finding.level is Level.FINE
        assert "2 workers and 1 server; no chief, so the program of worker 0" in finding.found
        # As ParameterServerStrategy has it.
        resolver = TFConfigClusterResolver(env={"TF_CONFIG": text})
        assert served_cluster.coordinates(resolver.cluster_spec(), resolver)

    def test_encryption(self):
        assert checks.check_encryption(True, "27.1").found.startswith("pyzmq 27.1 has CURVE")
        finding = checks.check_encryption(False, "27.1")
        assert said([finding]).startswith("look encryption: pyzmq 27.1 is built without CURVE")

    def test_proxies_that_tasks_may_be_sent_through(self):
        proxy = {"https_proxy": "http://proxy:1"}
        (finding,) = checks.check_proxies(proxy, SEAT)
        assert finding.found == "https_proxy may keep this task from a, b, c"
        assert finding.do.endswith("no_proxy=a,b,c")
        (finding,) = checks.check_proxies({**proxy, "no_proxy": "a, b"}, SEAT)
        assert finding.found == "https_proxy may keep this task from c"
        (finding,) = checks.check_proxies({**proxy, "NO_PROXY": "a,b,c"}, SEAT)
        assert finding.level is Level.FINE
        assert checks.check_proxies({"no_proxy": "a"}, SEAT) == []


def card(index=0, **changes):
    own = {"task": f"worker {index}", "cluster": CLUSTER, "versions": VERSIONS, "devices": "1 CPU"}
    return Card(**{**own, "token": str(index), **changes})


def met(*links, callers=(), reach=None):
    """A meeting as worker 0 sees it; tasks without a link are fine."""
    given = {link.task: link for link in links}
    fine = {
        f"worker {i}": Link(f"worker {i}", CLUSTER[i][1], "", card(i), 0.1, 0.0) for i in (1, 2)
    }
    links = tuple({**fine, **given}.values())
    own = {link.task: None if link.problem else link.milliseconds for link in links}
    return Meeting(card(), links, callers, {"worker 0": own, **(reach or {})})


class TestMeeting:
    def test_all_is_well(self):
        (finding,) = compare.check_meeting(met())
        expected = "all 3 tasks reach each other and are alike; slowest round trip 0.10 ms"
        assert (finding.level, finding.found) == (Level.FINE, expected)

    @pytest.mark.parametrize(
        ("problem", "do"),
        [
            (NOBODY_LISTENS, "Run stratagem doctor --cluster there"),
            ("no answer within 5 s: a firewall", "let TCP pass"),
            ("something that is no stratagem doctor listens there", "End what listens there"),
            ("the host name 'c' is unknown", "Correct the name"),
            ("it has another STRATAGEM_CLUSTER_KEY", "Set STRATAGEM_CLUSTER_KEY to the same"),
        ],
    )
    def test_who_is_not_reached(self, problem, do):
        (finding,) = compare.check_meeting(met(Link("worker 2", "c:3", problem)))
        assert (finding.level, finding.found) == (Level.FAULT, f"worker 2 at c:3: {problem}")
        assert do in finding.do

    def test_connections_that_only_others_miss(self):
        row = {"worker 0": None, "worker 2": 0.2}
        (finding,) = compare.check_meeting(met(reach={"worker 1": row}))
        assert finding.found == "worker 1 does not reach worker 0"
        missing = Link("worker 2", "c:3", NOBODY_LISTENS)
        row = {"worker 0": 0.1, "worker 2": None}
        assert len(compare.check_meeting(met(missing, reach={"worker 1": row}))) == 1

    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            (
                {"cluster": CLUSTER[:2]},
                r"fault clusters: worker 1 has \[worker 0 at a:1, worker 1 at b:2\]\. This task ",
            ),
            (
                {"versions": (("jax", "0.9"), ("python", "3.11.7"))},
                r"fault versions: worker 1 has jax 0\.9, not 0\.10\.2 -> Install the same",
            ),
            (
                {"versions": (("jax", "0.10.2"), ("python", "3.12.1"))},
                r"look versions: worker 1 has python 3\.12\.1, not 3\.11\.7 ->",
            ),
            ({"devices": "2 CPU"}, "fault devices: worker 1 has 2 CPU. This task has 1 CPU ->"),
            (
                {"task": "worker 2"},
                "fault tasks: at b:2, which should be worker 1, is worker 2 -> Give every task",
            ),
            (
                {"task": "worker 0", "token": "0"},
                "fault tasks: b:2, which should be worker 1, leads to this task itself ->",
            ),
        ],
    )
    def test_what_differs(self, changes, expected):
        link = Link("worker 1", "b:2", "", card(1, **changes), 0.1, 0.0)
        assert re.match(expected, said(compare.check_meeting(met(link))))

    def test_servers_may_have_other_devices(self):
        cluster = (("chief 0", "a:1"), ("ps 0", "b:2"))
        own, server = (card(task=task, cluster=cluster, token=task) for task, _ in cluster)
        server = Card(server.task, cluster, VERSIONS, "8 CPU")
        found = Meeting(own, (Link("ps 0", "b:2", "", server, 0.1, 0.0),), (), {})
        assert [f.level for f in compare.check_meeting(found)] == [Level.FINE]

    @pytest.mark.parametrize(
        ("offset", "level"), [(0.4, "fine"), (-0.6, "look"), (6, "fault"), (-6, "fault")]
    )
    def test_clocks(self, offset, level):
        link = Link("worker 1", "b:2", "", card(1), 0.1, offset)
        text = said(compare.check_meeting(met(link)))
        assert text.startswith(f"{level} ")
        assert level == "fine" or f"worker 1's clock is {offset:+.2f} s off" in text

    def test_callers_that_should_not_be(self):
        found = compare.check_meeting(met(callers=(card(1), card(0, token="9"), card(7), card(0))))
        assert [f.found for f in found] == [
            "another machine is worker 0 too",
            "worker 7 has connected, which this task's cluster does not have",
        ]

    def test_peers(self):
        tried = {"worker 1": "", "worker 2": NOBODY_LISTENS, "worker 3": "no answer within 5 s"}
        found = compare.check_peers(tried, {task: "x:1" for task in tried})
        assert [f.level for f in found] == [Level.FINE, Level.FINE, Level.FAULT]
        assert "nothing listens at the port now" in found[1].found


class TestMachine:
    def test_versions(self):
        found = checkup.check_versions(
            [
                Package("python", ">=3.11", "stratagem", "3.11.7"),
                Package("jax", "<0.13,>=0.10", "stratagem", "0.13.1"),
                Package("jaxlib", "<=0.10.2", "jax", None),
            ]
        )
        assert faults(found) == [
            ("jax 0.13.1; stratagem supports <0.13,>=0.10", 'pip install "jax<0.13,>=0.10"'),
            ("jaxlib is not installed", 'pip install "jaxlib<=0.10.2"'),
        ]
        assert found[-1].found == "python 3.11.7"
        (old,) = checkup.check_versions([Package("python", ">=3.11", "stratagem", "3.10.1")])
        assert old.do == "Make an environment of Python >=3.11, and install there."

    def test_the_packages_of_this_environment_are_supported(self):
        packages = machine.packages()
        names = {package.name for package in packages}
        assert names >= {"python", "stratagem", "jax", "jaxlib", "keras", "numpy"}
        assert [f.level for f in checkup.check_versions(packages)] == [Level.FINE]

    def test_devices(self):
        devices = Devices(("CPU:0", "GPU:0", "GPU:1"), "jax")
        found = checkup.check_devices(devices, {"STRATAGEM_REHEARSE": "gpu:2"})
        assert faults(found) == []
        assert found[0].found == (
            "1 CPU, 2 GPU. STRATAGEM_REHEARSE=gpu:2: these stand for real ones"
        )
        broken = Devices((), "torch", "no", "line 1\nline 2")
        (devices, _), (keras, do) = faults(checkup.check_devices(broken, {}))
        assert devices == "no; line 1 / line 2"
        assert keras == "expected the JAX backend. Got 'torch'"
        assert "KERAS_BACKEND=jax" in do

    @pytest.mark.parametrize(
        ("chip", "do"),
        [
            (Chips("NVIDIA", 2, "H100", "580.1"), 'pip install "jax[cuda13]"'),
            (Chips("NVIDIA", 2, "H100", "550.1"), 'pip install "jax[cuda12]"'),
            (Chips("NVIDIA", 2), 'pip install "jax[cuda13]"'),
            (Chips("NVIDIA", 2, "K80", "470.1"), "Install a driver of version 525 or newer"),
            (Chips("AMD", 1), 'pip install "jax[rocm7-local]"'),
            (Chips("TPU", 4), 'pip install "stratagem[tpu]"'),
        ],
    )
    def test_accelerators_that_jax_cannot_use(self, chip, do):
        devices = Devices(("CPU:0",), "jax", "", "not installed")
        ((found, advice),) = faults(checkup.check_chips([chip], devices, {}, EXTRAS, {}))
        assert "; JAX can use 0 of them: not installed" in found
        assert advice.startswith(do)

    def test_accelerators_that_jax_cannot_use_though_it_has_what_it_takes(self):
        plugins = {"libtpu": "0.1", "jax-cuda12-plugin": "0.9.0"}
        chip = Chips("NVIDIA", 2, "H100", "580.1")
        found = checkup.check_chips([chip], Devices(("CPU:0",), "jax"), {}, EXTRAS, plugins)
        ((_, advice),) = faults(found)
        assert advice.startswith("jax-cuda12-plugin 0.9.0 is installed: read what JAX says")

    @pytest.mark.parametrize(
        ("environment", "names", "level", "text"),
        [
            ({}, ("CPU:0", "GPU:0", "GPU:1"), Level.FINE, "JAX uses all"),
            ({}, ("CPU:0", "GPU:0"), Level.FAULT, "JAX can use 1 of them"),
            ({"CUDA_VISIBLE_DEVICES": "1"}, ("GPU:0",), Level.LOOK, "CUDA_VISIBLE_DEVICES=1 is in"),
            ({"CUDA_VISIBLE_DEVICES": ""}, (), Level.LOOK, "CUDA_VISIBLE_DEVICES= is in force"),
            ({"CUDA_VISIBLE_DEVICES": "0,1"}, (), Level.FAULT, "JAX can use 0 of them"),
            ({"JAX_PLATFORMS": "cpu"}, (), Level.LOOK, "JAX_PLATFORMS=cpu is in force"),
            ({"JAX_PLATFORMS": "cuda,cpu"}, (), Level.FAULT, "JAX can use 0 of them"),
            ({"STRATAGEM_REHEARSE": "gpu:2"}, ("GPU:0", "GPU:1"), Level.LOOK, "is in force"),
        ],
    )
    def test_accelerators_that_are_hidden(self, environment, names, level, text):
        chip = Chips("NVIDIA", 2, "H100", "580.1")
        (finding,) = checkup.check_chips([chip], Devices(names, "jax"), environment, EXTRAS, {})
        assert finding.level is level
        assert text in finding.found

    def test_a_driver_that_complains(self):
        for count, level in ((1, Level.FAULT), (0, Level.LOOK)):
            chip = Chips("NVIDIA", count, problem="it cannot talk to the driver")
            (finding,) = checkup.check_chips([chip], Devices(), {}, EXTRAS, {})
            assert (finding.level, finding.found) == (level, "it cannot talk to the driver")

    def test_resources(self):
        found = checkup.check_resources(Resources(8, 4, 1.5, 16 << 30, 1 << 29))
        assert (
            said(found)
            .splitlines()[0]
            .startswith(
                "look cores: 4 of 8 cores for this process, but its container may use 1.5 ->"
            )
        )
        assert "look memory: 0.5 of 16.0 GiB available ->" in said(found)
        found = checkup.check_resources(Resources(8, 8, 8.0, 16 << 30, 8 << 30))
        assert [f.level for f in found] == [Level.FINE, Level.FINE]

    def test_environment_without_secrets_and_with_misspelt_names(self):
        found = checkup.check_environment(
            {"STRATAGEM_CLUSTER_KEY": "secret", "STRATAGEM_REHERSE": "gpu:2", "HOME": "/"}
        )
        assert found[0].found == "STRATAGEM_REHERSE is read by nobody"
        assert found[0].do == "Did you mean STRATAGEM_REHEARSE?"
        assert found[1].found == "STRATAGEM_CLUSTER_KEY=(set)"

    def test_every_variable_that_is_read_is_known(self):
        package = Path(checkup.__file__).parents[1]
        text = "".join(path.read_text() for path in package.rglob("*.py"))
        names = set(re.findall(r'"(STRATAGEM_[A-Z_]+)"', text))
        assert names <= set(checkup.KNOWN), "add them to KNOWN in cli/checkup.py"


class TestFacts:
    def put(self, root, **files):
        for name, text in files.items():
            path = root / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def test_limits_of_a_container(self, tmp_path):
        self.put(tmp_path, proc__meminfo="MemTotal: 4096 kB\nMemAvailable: 4000 kB\nHuge: 0\n")
        assert machine.resources(tmp_path).quota is None
        assert machine.resources(tmp_path).memory == 4 << 20
        group = tmp_path / "sys/fs/cgroup"
        group.mkdir(parents=True)
        (group / "cpu.max").write_text("150000 100000\n")
        (group / "memory.max").write_text("2097152\n")
        (group / "memory.current").write_text("1048576\n")
        (group / "memory.stat").write_text("anon 1\ninactive_file 1024\n")
        found = machine.resources(tmp_path)
        assert (found.quota, found.memory, found.available) == (1.5, 2 << 20, (1 << 20) + 1024)
        (group / "cpu.max").write_text("max 100000\n")
        assert machine.resources(tmp_path).quota is None

    def test_accelerators(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PATH", str(tmp_path))
        assert machine.chips(tmp_path) == []
        for name in ("nvidia0", "nvidia1", "nvidiactl"):
            self.put(tmp_path, **{f"dev__{name}": ""})
        nodes, cards = "sys__class__kfd__kfd__topology__nodes__", "sys__bus__pci__devices__"
        self.put(tmp_path, **{f"{nodes}0__gpu_id": "0", f"{nodes}1__gpu_id": "77"})
        self.put(tmp_path, **{f"{cards}0__vendor": "0x1ae0", f"{cards}0__device": "0x0063"})
        self.put(tmp_path, **{f"{cards}1__vendor": "0x1ae0", f"{cards}1__device": "0x0042"})
        assert machine.chips(tmp_path) == [Chips("NVIDIA", 2), Chips("AMD", 1), Chips("TPU", 1)]

    @pytest.mark.parametrize(
        ("script", "expected"),
        [
            (
                "print('NVIDIA H100, 80GB, 580.65\\nNVIDIA H100, 80GB, 580.65')",
                Chips("NVIDIA", 2, "NVIDIA H100, 80GB", "580.65"),
            ),
            ("print('no driver'); raise SystemExit(9)", Chips("NVIDIA", 0, problem="no driver")),
        ],
    )
    def test_the_tool_of_the_nvidia_driver(self, tmp_path, monkeypatch, script, expected):
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!{sys.executable} -S\n{script}\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        assert machine.chips(tmp_path) == [expected]

    def test_who_listens_at_a_port(self, tmp_path):
        row = "0: 0100007F:{:04X} 00000000:0000 {} 0:0 0:0 0 0 0 {} 1"
        lines = ["header", row.format(2222, "0A", 77), row.format(2223, "01", 78)]
        self.put(tmp_path, net__tcp="\n".join(lines), **{"12__comm": "python\n"})
        (tmp_path / "12/fd").mkdir()
        (tmp_path / "12/fd/3").symlink_to("socket:[77]")
        (tmp_path / "12/fd/4").symlink_to("socket:[78]")
        assert machine.port_holder(2222, tmp_path) == "python (process 12)"
        assert machine.port_holder(2223, tmp_path) is None


def options(*arguments):
    top = argparse.ArgumentParser()
    doctor.add_to(top.add_subparsers())
    return top.parse_args(["doctor", *arguments])


@pytest.fixture
def healthy(monkeypatch):
    """A machine that is fine, so that no process is started to look at it."""
    monkeypatch.setattr(machine, "devices", lambda env: Devices(("CPU:0",), "jax"))
    monkeypatch.setattr(machine, "chips", lambda: [])
    monkeypatch.setattr(machine, "resources", lambda: Resources(2, 2, None, 1 << 34, 1 << 33))
    monkeypatch.delenv("TF_CONFIG", raising=False)


class TestCommand:
    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            (["--seconds", "0"], "--seconds: expected more than 0, and at most 3600. Got 0."),
            (["--bandwidth"], "--bandwidth: expected --cluster with it"),
            (["--host-index", "1"], "--host-index: expected --hosts with it"),
        ],
    )
    def test_options_that_do_not_fit(self, arguments, text, capsys):
        assert doctor.doctor(options(*arguments)) == 2
        assert f"stratagem doctor: error: {text}" in capsys.readouterr().err

    def test_a_machine_that_is_fine(self, healthy, capsys):
        assert doctor.doctor(options("--json")) == 0
        read = json.loads(capsys.readouterr().out)
        assert read["healthy"] is True
        assert read["meeting"] is None
        assert {f["level"] for f in read["findings"]} == {"fine"}

    def test_nobody_to_meet(self, healthy, capsys):
        assert doctor.doctor(options("--cluster", "--json")) == 1
        (fault,) = [
            f for f in json.loads(capsys.readouterr().out)["findings"] if f["level"] == "fault"
        ]
        assert fault["found"] == "this is no task that others train with"
        assert "Set TF_CONFIG" in fault["do"]

    def test_an_own_port_that_is_taken_is_said_with_its_holder(self, healthy, monkeypatch):
        monkeypatch.setattr(doctor, "listen", _refuse)
        monkeypatch.setattr(machine, "port_holder", lambda port: f"python at {port}")
        self.tell(monkeypatch, [2222, 2223])
        found = doctor.examine(doctor.Config(False, False, False, 1.0, False, None, None))
        ((fault, _),) = faults(found.findings)
        assert fault == "127.0.0.1:2222 (worker 0): the port is in use, by python at 2222"
        assert found.exit_code == 1

    def test_a_wrong_tf_config_is_one_fault(self, healthy, monkeypatch):
        monkeypatch.setenv("TF_CONFIG", "{")
        found = doctor.examine(doctor.Config(True, True, False, 1.0, False, None, None))
        assert [f.what for f in found.findings if f.level is Level.FAULT] == ["TF_CONFIG"]

    @pytest.mark.parametrize(
        ("hosts", "index", "text"),
        [
            ("a:1,a:2", None, "named twice"),
            ("127.0.0.1:2222", 4, "--host-index: expected 0 to 0. Got 4"),
        ],
    )
    def test_hosts_that_are_wrong(self, healthy, hosts, index, text):
        found = doctor.examine(doctor.Config(False, False, False, 1.0, False, hosts, index))
        assert any(text in fault for fault, _ in faults(found.findings))

    def test_hosts_are_a_cluster(self, healthy):
        wanted = doctor.Config(False, False, False, 1.0, False, "127.0.0.1:2222", None)
        found = doctor.examine(wanted).findings
        assert [f.found for f in found if f.what == "--hosts"] == [
            "this is 127.0.0.1, number 0 of 1 from 0"
        ]
        assert any(f.what == "own address" for f in found)

    def test_peers(self, healthy, monkeypatch):
        self.tell(monkeypatch, ports := self.free_ports(2))
        found = doctor.examine(doctor.Config(True, False, False, 1.0, False, None, None))
        assert [f.found for f in found.findings if f.what == "peers"] == [
            f"worker 1 at 127.0.0.1:{ports[1]}: the machine can be reached; nothing listens at the "
            "port now"
        ]
        assert found.exit_code == 0

    def test_a_cluster_where_nobody_else_is(self, healthy, monkeypatch, capsys):
        self.tell(monkeypatch, ports := self.free_ports(2))
        assert doctor.doctor(options("--cluster", "--seconds", "0.5")) == 1
        shown = re.sub(r"\s+", " ", capsys.readouterr().out)
        assert f"worker 1 127.0.0.1:{ports[1]} not reached" in shown
        assert "reach worker 1 at" in shown
        assert "1 to be done" in shown

    @pytest.mark.parametrize(
        ("key", "text"),
        [
            ("short", "not met, without a key"),
            ("", "not met, since this task cannot listen at 127.0.0.1:"),
        ],
    )
    def test_a_cluster_that_cannot_be_met(self, healthy, monkeypatch, key, text):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            self.tell(monkeypatch, [taken.getsockname()[1], *self.free_ports(1)])
            monkeypatch.setenv("STRATAGEM_CLUSTER_KEY", key)
            found = doctor.examine(doctor.Config(False, True, False, 0.5, False, None, None))
        assert [f for f, _ in faults(found.findings) if f.startswith(text)]
        assert found.meeting is None

    def free_ports(self, count):
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
        try:
            return [s.getsockname()[1] for s in sockets]
        finally:
            for s in sockets:
                s.close()

    def tell(self, monkeypatch, ports):
        tasks = {"worker": [f"127.0.0.1:{port}" for port in ports]}
        text = json.dumps({"cluster": tasks, "task": {"type": "worker", "index": 0}})
        monkeypatch.setenv("TF_CONFIG", text)

    def test_tables(self):
        missing = Link("worker 2", "c:3", NOBODY_LISTENS)
        there = Link("worker 1", "b:2", "", card(1), 0.25, -0.0012, 800.0)
        found = met(there, missing, reach={"worker 1": {"worker 0": 0.5}})
        shown = io.StringIO()
        diagnosis.show(
            diagnosis.Diagnosis(tuple(compare.check_meeting(found)), found),
            Console(file=shown, width=120, color_system=None),
        )
        rows = [re.split(r"\s{2,}", line.strip()) for line in shown.getvalue().splitlines()]
        assert ["worker 1", "b:2", "0.25 ms", "-1.2 ms", "1 CPU", "the same", "800 MB/s"] in rows
        assert ["worker 2", "c:3", "not reached"] in rows
        assert ["worker 0", "0.25", "-"] in rows
        assert ["worker 1", "0.50", "?"] in rows
        assert ["1 to be done"] in rows
        assert "-> Run stratagem doctor --cluster there at the same time" in shown.getvalue()


def _refuse(address):
    raise OSError(errno.EADDRINUSE, "in use")
