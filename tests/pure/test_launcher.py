"""What tasks are told, how they are spread over machines, and which options are refused."""

from __future__ import annotations

import argparse
import json
import re
import socket

import pytest

from stratagem.cli import run
from stratagem.cli.main import main
from stratagem.cluster import tf_config as parser
from stratagem.coordinator.journal import resume
from stratagem.coordinator.record import Record
from stratagem.launcher import hosts, local
from stratagem.launcher.abstract import (
    Job,
    LaunchError,
    Task,
    gpus_of,
    merged,
    python_command,
    task_environment,
)
from stratagem.launcher.serving import surroundings
from stratagem.recovery.policy import Limits

SCRIPT = __file__


def _options(*arguments: str) -> argparse.Namespace:
    top = argparse.ArgumentParser()
    run.add_to(top.add_subparsers())
    return top.parse_args(["run", *arguments])


def _job(*arguments: str) -> Job:
    return run.job_of(_options(*arguments, SCRIPT))


class TestTasks:
    def test_each_task_is_told_who_it_is(self):
        job = _job("--workers", "2", "--ps", "1", "--evaluator")
        plan = local.LocalExecutor({}).plan(job, 0)
        assert [str(task) for task in plan.own] == [
            "chief 0",
            "worker 0",
            "worker 1",
            "ps 0",
            "evaluator 0",
        ]
        assert len(set(plan.addresses.values())) == 5
        for task in plan.own:
            told = task_environment(job, task, plan.addresses, coordination=None)
            parsed = parser.parse(told["TF_CONFIG"])  # Refuses what is wrong.
            assert (parsed.task_type, parsed.task_id) == (task.type, task.index)
            assert parsed.cluster.num_tasks("worker") == 2
            assert told["STRATAGEM_ATTEMPT"] == "0"
            assert "STRATAGEM_COORDINATION" not in told
            assert "STRATAGEM_JOIN" not in told

    def test_without_chief_worker_0_is_the_chief(self):
        assert _job("--workers", "2").tasks() == [Task("worker", 0), Task("worker", 1)]

    def test_trainers_meet_at_a_service(self):
        plan = local.LocalExecutor({}).plan(job := _job("--workers", "2", "--evaluator"), 0)
        assert plan.hosts_service
        assert plan.coordination not in plan.addresses.values()
        for task, expected in (
            (Task("worker", 1), plan.coordination),
            (Task("evaluator", 0), None),
        ):
            told = task_environment(job, task, plan.addresses, coordination=plan.coordination)
            assert told.get("STRATAGEM_COORDINATION") == expected

    def test_alone_or_with_servers_nobody_meets(self):
        assert not _job().coordinated
        assert not _job("--workers", "2", "--ps", "1").coordinated
        assert _job("--chief").coordinated

    def test_attempts_limits_and_replacements_are_told(self):
        job = _job("--workers", "3", "--max-restarts", "1", "--min-workers", "2")
        told = task_environment(
            job, Task("worker", 1), {}, coordination="h:1", attempt=3, join=True
        )
        assert told["STRATAGEM_ATTEMPT"] == "3"
        assert told["STRATAGEM_JOIN"] == "1"
        assert told["STRATAGEM_MIN_WORKERS"] == "2"
        assert "STRATAGEM_WAIT_FOR_REPLACEMENT" not in told

    def test_rehearsal_is_a_default(self):
        job = _job("--devices-per-worker", "2")
        told = task_environment(job, Task("worker", 0), {}, coordination=None)
        assert merged({}, told)["STRATAGEM_REHEARSE"] == "cpu:2"
        assert merged({"STRATAGEM_REHEARSE": "gpu:4"}, told)["STRATAGEM_REHEARSE"] == "gpu:4"

    def test_an_outer_job_is_not_passed_on(self):
        outer = {"TF_CONFIG": "outer", "STRATAGEM_JOIN": "1", "STRATAGEM_ATTEMPT": "7", "A": "b"}
        told = task_environment(_job(), Task("worker", 0), {}, coordination=None)
        inner = merged(outer, told)
        assert "STRATAGEM_JOIN" not in inner
        assert inner["STRATAGEM_ATTEMPT"] == "0"
        assert json.loads(inner["TF_CONFIG"])["task"] == {"type": "worker", "index": 0}
        assert inner["A"] == "b"

    def test_gpus_are_shared_out(self):
        job = _job("--chief", "--workers", "2", "--evaluator", "--gpus-per-worker", "2")
        assert {str(task): gpus_of(job, task) for task in job.tasks()} == {
            "chief 0": "0,1",
            "worker 0": "2,3",
            "worker 1": "4,5",
            "evaluator 0": "",
        }
        assert gpus_of(job, Task("worker", 1), first=2) == "0,1"

    def test_with_servers_the_gpus_are_for_workers(self):
        job = _job("--workers", "2", "--ps", "1", "--gpus-per-worker", "1")
        assert {str(task): gpus_of(job, task) for task in job.tasks()} == {
            "chief 0": "",
            "worker 0": "0",
            "worker 1": "1",
            "ps 0": "",
        }


class TestHosts:
    def test_shares(self):
        job = Job(("t.py",), workers=5, servers=1, chief=True, evaluator=True)
        spread = [[str(task) for task in share] for share in hosts.shares(job, 2)]
        assert spread == [
            ["chief 0", "worker 0", "worker 1", "worker 2", "ps 0", "evaluator 0"],
            ["worker 3", "worker 4"],
        ]

    def test_all_machines_work_out_the_same_cluster(self):
        (port,) = local.free_ports(1)
        job = Job(("t.py",), workers=4, limits=Limits(max_restarts=1))
        machines = hosts.parse_hosts(f"a:{port},b:{port}")
        plans = [hosts.HostsExecutor(machines, index, {}).plan(job, 0) for index in (0, 1)]
        assert plans[0].addresses == plans[1].addresses
        assert plans[0].coordination == plans[1].coordination == f"a:{port}"
        assert [plan.hosts_service for plan in plans] == [True, False]
        assert [task for plan in plans for task in plan.own] == job.tasks()
        assert sorted(plans[0].addresses.values()) == [
            f"{host}:{port + 2 + place}" for host in "ab" for place in (0, 1)
        ]

    def test_attempts_do_not_meet(self):
        (port,) = local.free_ports(1)
        executor = hosts.HostsExecutor(hosts.parse_hosts(f"a:{port},b"), 1, {})
        job = Job(("t.py",), workers=2, limits=Limits(max_restarts=1))
        assert [executor.plan(job, attempt).coordination for attempt in (0, 1, 2)] == [
            f"a:{port}",
            f"a:{port + 1}",
            f"a:{port}",
        ]

    def test_this_machine_is_found(self):
        assert hosts.own_index([hosts.Host("203.0.113.1", 1), hosts.Host("localhost", 2)]) == 1

    @pytest.mark.parametrize(
        ("text", "found"),
        [
            ("203.0.113.1,203.0.113.2", "none of them"),
            ("localhost,127.0.0.1", "localhost, 127.0.0.1"),
        ],
    )
    def test_this_machine_is_not_found(self, text, found):
        with pytest.raises(LaunchError, match=f"one of the machines to be this .*Got {found} out"):
            hosts.own_index(hosts.parse_hosts(text))

    def test_default_port(self):
        found = hosts.parse_hosts("a, [2001:db8::1]:5")
        assert found == [hosts.Host("a", 2222), hosts.Host("[2001:db8::1]", 5)]

    def test_all_malformed_hosts_are_named(self):
        with pytest.raises(LaunchError) as caught:
            hosts.parse_hosts("a:0,,b c,d,D:1,127.0.0.1")
        for fault in (
            "'a:0' (port 0 is not in 1 to 65535)",
            "'' (not of that form)",
            "'b c' (not of that form)",
            "'D:1' (named twice: one share",
            "'127.0.0.1' (which only that machine itself can reach)",
        ):
            assert fault in str(caught.value)

    def test_ports_that_are_taken(self):
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            port = other.getsockname()[1]
            executor = hosts.HostsExecutor([hosts.Host("a", port - 1)], 0, {})
            with pytest.raises(LaunchError, match=rf"to be free\. Taken, .*: {port}\b.*End what"):
                executor.plan(Job(("t.py",), workers=1), 0)
        with pytest.raises(LaunchError, match=r"Taken, or above 65535: 65536\."):
            hosts.HostsExecutor([hosts.Host("a", 65535)], 0, {}).plan(Job(("t.py",)), 0)


class TestSurroundings:
    KEY = {"STRATAGEM_CLUSTER_KEY": "k" * 16}

    def test_a_job_gets_a_key_of_its_own(self):
        keys = set()
        for _ in range(2):
            with surroundings({"A": "b"}, None, print) as around:
                keys.add(around.environment["STRATAGEM_CLUSTER_KEY"])
                assert around.environment["A"] == "b"
        assert len(keys) == 2
        assert all(len(key) == 64 for key in keys)

    @pytest.mark.parametrize("variable", ["STRATAGEM_CLUSTER_KEY", "STRATAGEM_CLUSTER_KEY_FILE"])
    def test_the_users_key_is_kept(self, variable, tmp_path):
        (file := tmp_path / "key").write_text("k" * 16)
        file.chmod(0o600)
        given = {variable: str(file) if variable.endswith("FILE") else "k" * 16}
        with surroundings(given, tmp_path, print, machines=2) as around:
            told = dict(around.environment)
        assert told.pop("STRATAGEM_STATE_DIR") == str(tmp_path)
        assert told == given

    def test_keys_that_are_refused(self, tmp_path):
        with pytest.raises(LaunchError, match=r"--hosts with --ps: expected STRATAGEM_CLUSTER_KEY"):
            with surroundings({}, tmp_path, print, machines=2):
                pass
        with pytest.raises(LaunchError, match=r"expected at least 16 characters"):
            with surroundings({"STRATAGEM_CLUSTER_KEY": "short"}, tmp_path, print):
                pass

    @pytest.mark.parametrize(
        ("wrote", "succeeded", "kept"),
        [(True, True, False), (True, False, True), (False, False, False)],
    )
    def test_a_temporary_directory(self, wrote, succeeded, kept, tmp_path, monkeypatch):
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        said = []
        with surroundings(self.KEY, None, said.append) as around:
            (directory,) = tmp_path.iterdir()
            assert around.environment["STRATAGEM_STATE_DIR"] == str(directory)
            if wrote:
                (directory / "journal").write_text("")
            around.succeeded = succeeded
        assert directory.exists() == kept
        expected = f"kept what the job had saved; go on from it with --state-dir {directory}"
        assert said == [expected] * kept

    def test_a_given_directory_is_kept(self, tmp_path):
        for environment, given in (
            ({}, tmp_path / "a" / "b"),
            ({"STRATAGEM_STATE_DIR": str(tmp_path / "c")}, None),
        ):
            with surroundings({**self.KEY, **environment}, given, print) as around:
                around.succeeded = True
        assert (tmp_path / "a" / "b").is_dir()
        assert (tmp_path / "c").is_dir()

    def test_the_journal_of_a_job_that_has_succeeded_says_so(self, tmp_path):
        def left_by_exit(directory, succeeded):
            record, said = Record(directory, "job"), []
            record.used(0)
            record.perhaps()
            with surroundings(self.KEY, directory, said.append) as around:
                record.close()
                around.succeeded = succeeded
            return resume(directory / "journal").ended, said

        assert left_by_exit(tmp_path / "a", True) == (True, [])
        assert left_by_exit(tmp_path / "b", False) == (False, [])

    def test_a_journal_that_cannot_be_written_is_said(self, tmp_path):
        said = []
        (tmp_path / "journal").write_text("x" * 2000)
        with surroundings(self.KEY, tmp_path, said.append) as around:
            around.succeeded = True
        assert said[0].startswith(
            "could not note that the job is done, and its program would go on with it: Expected"
        )

    def test_a_directory_that_cannot_be_made(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(LaunchError, match=r"--state-dir: expected a directory, or a place"):
            with surroundings(self.KEY, tmp_path / "file" / "below", print):
                pass


class TestCommand:
    def test_what_is_after_the_script_belongs_to_it(self):
        job = run.job_of(_options("--workers", "2", "train.py", "--workers", "9", "-m", "x"))
        assert job.program == ("train.py", "--workers", "9", "-m", "x")
        assert job.workers == 2

    def test_a_module(self):
        job = run.job_of(_options("--workers", "2", "-m", "package.train", "--on", "x"))
        assert job.program == ("-m", "package.train", "--on", "x")

    def test_servers_bring_a_chief(self):
        assert [str(t) for t in _job("--ps", "1").tasks()] == ["chief 0", "worker 0", "ps 0"]

    def test_with_servers_only_the_chief_and_the_evaluator_run_the_script(self):
        job = _job("--ps", "2", "--evaluator")
        commands = {task.type: python_command(job, task)[1:] for task in job.tasks()}
        serve = ["-m", "stratagem.cli", "serve"]
        program = [SCRIPT]
        assert commands == {"chief": program, "worker": serve, "ps": serve, "evaluator": program}
        assert python_command(_job(), Task("worker", 0))[1:] == program

    def test_restarts_with_servers(self):
        assert _job("--ps", "1").limits == Limits(max_restarts=0, task_restarts=3)
        given = _job("--ps", "1", "--max-restarts", "0").limits
        assert given == Limits(max_restarts=0, task_restarts=0)
        given = _job("--ps", "1", "--max-restarts", "9").limits
        assert given == Limits(max_restarts=9, task_restarts=9)

    def test_limits(self):
        job = _job(
            *("--max-restarts", "3", "--workers", "3", "--min-workers", "2"),
            *("--wait-for-replacement", "1.5"),
        )
        assert job.limits == Limits(3, 2, 1.5, 3)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["nowhere.py"], r"expected a Python file to run\. Got 'nowhere.py', no such file in"),
            (["tests"], r"Got 'tests', a directory"),
            (["--workers", "0", SCRIPT], r"--workers: expected at least 1\. Got 0\."),
            (["--ps", "-1", SCRIPT], r"--ps: expected at least 0\. Got -1\."),
            (["--devices-per-worker", "0", SCRIPT], r"--devices-per-worker: expected at least 1"),
            (
                ["--devices-per-worker", "1", "--gpus-per-worker", "1", SCRIPT],
                r"Got both\. Leave one out",
            ),
            (["--min-workers", "3", SCRIPT], r"--min-workers: expected 1 to 1, .*Got 3"),
            (
                ["--wait-for-replacement", "3", SCRIPT],
                r"expected --min-workers with it.*\n.*expected --max-restarts of at least 1",
            ),
            (["--ps", "1", "--min-workers", "1", SCRIPT], r"expected no parameter servers"),
            (
                ["--image", "i", SCRIPT],
                r"--image: expected --on kubernetes with it\. Got --on local",
            ),
            (["--output", "o", SCRIPT], r"--output: expected --on slurm or kubernetes with it"),
            (["--on", "kubernetes", SCRIPT], r"--on kubernetes: expected --image"),
            (["--on", "ray", "--hosts", "a", SCRIPT], r"--hosts: expected --on local with it"),
            (["--host-index", "0", SCRIPT], r"--host-index: expected --hosts with it"),
            (
                ["--hosts", "a,b", "--host-index", "2", "--workers", "2", SCRIPT],
                r"--host-index: expected 0 to 1, .* Got 2",
            ),
            (
                ["--hosts", "a,b", SCRIPT],
                r"--workers: expected at least one for each of the 2 mach",
            ),
            (["--hosts", "a,a", "--workers", "2", SCRIPT], r"'a' \(named twice"),
            (["--state-dir", "d", SCRIPT], r"--state-dir: expected --ps with it"),
            (["--on", "ray", "--ps", "1", SCRIPT], r"--on ray with --ps: expected --state-dir"),
            (
                ["--on", "kubernetes", "--image", "i", "--ps", "1", "--state-dir", "d", SCRIPT],
                r"--state-dir: expected a path from the root.*Got d\.",
            ),
            (
                ["--hosts", "a,b", "--workers", "2", "--min-workers", "1", SCRIPT],
                r"--min-workers: expected one machine, or an engine",
            ),
        ],
    )
    def test_refused(self, arguments, message, capsys):
        assert main(["run", *arguments]) == 2
        assert re.search(message, capsys.readouterr().err)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["run", "--on", "mesos", SCRIPT], "invalid choice: 'mesos' (choose from"),
            (["run", "--worker", "2", SCRIPT], "unrecognized arguments: --worker"),
            (["run"], "the following arguments are required: SCRIPT"),
            ([], "the following arguments are required: COMMAND"),
            (["run", "--workers", "two", SCRIPT], "invalid int value: 'two'"),
        ],
    )
    def test_not_parsed(self, arguments, message, capsys):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
        assert message in capsys.readouterr().err

    def test_help(self, capsys):
        with pytest.raises(SystemExit) as caught:
            main(["run", "--help"])
        assert caught.value.code == 0
        shown = capsys.readouterr().out
        assert "stratagem run --workers 2 train.py --epochs 3" in shown
        assert max(map(len, shown.splitlines())) <= 100
