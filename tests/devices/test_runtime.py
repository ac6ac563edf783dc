"""Which of a job's tasks this process is; `cluster/runtime.py` without other processes."""

from __future__ import annotations

import pytest

from stratagem import _jax
from stratagem.cluster import ClusterSpec, SimpleClusterResolver, runtime
from stratagem.cluster.membership import Terms


class Asked(Exception):
    """What a process would join as."""


def rank(monkeypatch, cluster: dict, task_type: str, task_id: int) -> int:
    def ask(addresses, task, rank, *_):
        raise Asked(task, rank, list(addresses))

    monkeypatch.setattr(runtime, "_join", ask)
    monkeypatch.setattr(_jax, "started_backends", lambda: ())
    spec = ClusterSpec(cluster)
    resolver = SimpleClusterResolver(spec, task_type=task_type, task_id=task_id)
    with pytest.raises(Asked) as asked:
        runtime.join(resolver)
    task, found, tasks = asked.value.args
    assert tasks[found] == task == f"{task_type} {task_id}"
    return found


@pytest.mark.parametrize(
    ("cluster", "tasks"),
    [
        ({"worker": ["a:1", "b:1"]}, [("worker", 0), ("worker", 1)]),
        ({"worker": {1: "a:1", 2: "b:1"}}, [("worker", 1), ("worker", 2)]),
        ({"worker": {3: "b:1"}, "chief": ["a:1"]}, [("chief", 0), ("worker", 3)]),
    ],
)
def test_ranks_count_the_tasks_that_there_are(monkeypatch, cluster, tasks):
    assert [rank(monkeypatch, cluster, *task) for task in tasks] == [0, 1]


def test_a_ps_does_not_train(monkeypatch):
    monkeypatch.setattr(_jax, "started_backends", lambda: ())
    cluster = ClusterSpec({"worker": ["a:1", "b:1"], "ps": ["c:1"]})
    with pytest.raises(ValueError, match="expected the task type chief, worker or evaluator"):
        runtime.join(SimpleClusterResolver(cluster, task_type="ps", task_id=0))


def test_the_first_process_of_each_machine_writes_what_is_compiled():
    job = object.__new__(runtime.Job)
    job.terms = Terms(min_workers=2)
    hosts = ["a", "b", "a", "[::1]", "b"]
    job.tasks = tuple((f"worker {i}", f"{host}:{i}") for i, host in enumerate(hosts))
    found = []
    for job.rank in range(len(hosts)):
        found.append(job.is_first_here)
    assert found == [True, True, False, True, False]


@pytest.mark.parametrize(("least", "size", "may"), [(None, 3, False), (2, 3, True), (2, 2, False),
                                                    (0, 2, True), (0, 1, False)])  # fmt: skip
def test_a_job_may_shrink_to_what_the_user_allows(least, size, may):
    job = object.__new__(runtime.Job)
    job.terms = Terms(min_workers=least)
    job.tasks = (("worker", "a:1"),) * size
    assert job.may_shrink is may
