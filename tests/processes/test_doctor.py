"""`stratagem doctor` as a command: on this machine, and on the tasks of a cluster at once."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

# Longer than anything here takes on a busy machine; nothing waits for so long if all is well.
DEADLINE = 100.0
# The tasks start at the same time, and each first looks at its own machine.
MEETING = "8"


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


def start(*arguments, tasks=None, index=0, **variables):
    """A doctor, of a cluster if there are tasks."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("STRATAGEM_", "JAX_", "XLA_", "TF_CONFIG", "NPROC"))
    }
    if tasks is not None:
        task = {"type": "worker", "index": index}
        environment["TF_CONFIG"] = json.dumps({"cluster": {"worker": tasks}, "task": task})
    return subprocess.Popen(
        [sys.executable, "-m", "stratagem.cli", "doctor", *arguments],
        env={**environment, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process):
    try:
        out, err = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
    assert err == ""
    return process.returncode, out


def test_a_machine_with_a_broken_jax_is_told_what_jax_says():
    code, out = ended(start("--json", XLA_FLAGS="--xla_no_such_flag=1"))
    assert code == 1
    found = json.loads(out)["findings"]
    (fault,) = [f for f in found if f["level"] == "fault"]
    assert fault["what"] == "devices"
    assert "the process that starts JAX ends with " in fault["found"]
    assert "xla_no_such_flag" in fault["found"]
    assert "XLA_FLAGS" in fault["do"]
    assert [f["found"] for f in found if f["what"] == "environment"][0].endswith(
        "XLA_FLAGS=--xla_no_such_flag=1"
    )


def test_a_cluster_with_one_missing_and_one_of_another_cluster():
    tasks = [f"127.0.0.1:{port}" for port in free_ports(3)]
    doctors = [
        start("--cluster", "--seconds", MEETING, "--json", tasks=tasks),
        start(
            *("--cluster", "--seconds", MEETING),
            tasks=tasks[:2],
            index=1,
            STRATAGEM_REHEARSE="cpu:2",
        ),
    ]
    try:
        (code, out), (other_code, table) = map(ended, doctors)
    finally:
        for process in doctors:
            process.kill()
    assert (code, other_code) == (1, 1)
    read = json.loads(out)
    todo = {f["found"]: f["do"] for f in read["findings"] if f["level"] == "fault"}
    shown = [
        "[" + ", ".join(f"worker {i} at {a}" for i, a in enumerate(seen)) + "]"
        for seen in (tasks[:2], tasks)
    ]
    assert sorted(todo) == sorted(
        [
            f"worker 2 at {tasks[2]}: the machine refuses: nothing listens there",
            f"worker 1 has {shown[0]}. This task has {shown[1]}",
            "worker 1 has 2 CPU. This task has 1 CPU",
        ]
    )
    assert all(todo.values())
    met = read["meeting"]
    assert met["reach"]["worker 0"]["worker 1"] > 0
    assert met["reach"]["worker 0"]["worker 2"] is None
    assert met["reach"]["worker 1"]["worker 0"] > 0
    # The other one reaches all of its own cluster, and sees that this is not that of the others.
    table = re.sub(r"\s+", " ", table)
    assert re.search(rf"worker 0 {tasks[0]} [0-9.]+ ms [-+][0-9.]+ ms 1 CPU the same", table)
    assert f"worker 0 has {shown[1]}. This task has {shown[0]}" in table
    assert "2 to be done" in table
