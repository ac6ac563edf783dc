"""The tasks of a cluster, their addresses, and their roles; values as TensorFlow 2.21 gave them."""

from __future__ import annotations

import pytest

from stratagem.cluster import ClusterSpec, roles
from stratagem.cluster.spec import loopback_tasks, one_task

DENSE = {"worker": ["w:1", "w:2"], "ps": ["p:1"]}
SPARSE = {"worker": {3: "w:4", 1: "w:2"}}


class TestClusterSpec:
    def test_lists(self):
        spec = ClusterSpec(DENSE)
        assert spec.jobs == ["worker", "ps"]
        assert spec.num_tasks("worker") == 2
        assert spec.task_indices("worker") == [0, 1]
        assert spec.task_address("worker", 1) == "w:2"
        assert spec.job_tasks("worker") == ["w:1", "w:2"]
        assert spec.as_dict() == DENSE

    def test_a_dict_may_leave_indices_out(self):
        spec = ClusterSpec(SPARSE)
        assert spec.num_tasks("worker") == 2
        assert spec.task_indices("worker") == [1, 3]
        assert spec.job_tasks("worker") == [None, "w:2", None, "w:4"]
        assert spec.as_dict() == {"worker": {1: "w:2", 3: "w:4"}}

    def test_a_dict_without_gaps_is_a_list(self):
        assert ClusterSpec({"worker": {1: "w:2", 0: "w:1"}}).as_dict() == {"worker": ["w:1", "w:2"]}

    def test_indices_may_be_digits_as_in_json(self):
        assert ClusterSpec({"worker": {"1": "w:2"}}).task_indices("worker") == [1]

    def test_another_spec(self):
        assert ClusterSpec(ClusterSpec(SPARSE)).as_dict() == ClusterSpec(SPARSE).as_dict()

    def test_truth_is_being_there(self):
        assert not ClusterSpec({})
        assert ClusterSpec({}).as_dict() == {}
        assert ClusterSpec(DENSE)

    def test_a_job_without_tasks(self):
        spec = ClusterSpec({"worker": []})
        assert spec
        assert spec.as_dict() == {"worker": {}}
        assert spec.job_tasks("worker") == []

    def test_equality_and_hash(self):
        spec = ClusterSpec(DENSE)
        assert spec == ClusterSpec({"ps": {0: "p:1"}, "worker": {"0": "w:1", "1": "w:2"}})
        assert spec == {"worker": {0: "w:1", 1: "w:2"}, "ps": {0: "p:1"}}
        assert spec != ClusterSpec(SPARSE)
        assert spec != "worker"
        assert len({spec, ClusterSpec(dict(reversed(DENSE.items())))}) == 1

    def test_repr(self):
        assert repr(ClusterSpec(DENSE)) == "ClusterSpec({'ps': ['p:1'], 'worker': ['w:1', 'w:2']})"

    def test_what_goes_in_or_comes_out_cannot_change_it(self):
        given = {"worker": {0: "w:1"}}
        spec = ClusterSpec(given)
        given["worker"][1] = "w:2"
        spec.as_dict()["worker"].append("w:3")
        assert spec.as_dict() == {"worker": ["w:1"]}

    @pytest.mark.parametrize(
        "address",
        ["h:1", "h:65535", "10.0.0.1:2222", "[::1]:80", "a.b-c_d.example:8470", "localhost:1"],
    )
    def test_good_addresses(self, address):
        assert ClusterSpec({"worker": [address]}).job_tasks("worker") == [address]

    @pytest.mark.parametrize(
        ("address", "why"),
        [
            ("localhost:0000", r"port 0 is not in 1 to 65535"),
            ("h:65536", r"port 65536 is not in 1 to 65535"),
            ("h", "not of that form"),
            (":1", "not of that form"),
            ("h:", "not of that form"),
            ("h:x", "not of that form"),
            ("h :1", "not of that form"),
            ("::1:80", "not of that form"),
            ("grpc://h:1", "leave out what is before '//'"),
        ],
    )
    def test_bad_addresses(self, address, why):
        with pytest.raises(ValueError, match=rf"Got worker 0 = '{address}' \({why}\)\. Give each"):
            ClusterSpec({"worker": [address]})

    @pytest.mark.parametrize(
        ("first", "second"),
        [("h:1", "h:1"), ("h:1", "H:01"), ("localhost:1", "127.0.0.1:1")],
    )
    def test_one_address_twice(self, first, second):
        with pytest.raises(
            ValueError, match=rf"Got worker 0 = '{first}' and ps 0 = '{second}' \(the same address"
        ):
            ClusterSpec({"worker": [first], "ps": [second]})

    def test_all_bad_addresses_are_named(self):
        with pytest.raises(ValueError, match=r"worker 0 .*; worker 2 .*; worker 1 .* and ps 0 "):
            ClusterSpec({"worker": ["h:0", "h:1", "h"], "ps": ["h:1"]})

    @pytest.mark.parametrize(
        ("cluster", "what"),
        [
            (None, r"expected a dict from job names .* or a ClusterSpec\. Got None"),
            (["h:1"], r"Got \['h:1'\]"),
            ({"worker": "h:1"}, "a list of addresses or a dict .* Got worker = 'h:1'"),
            ({"worker": ["h:1", 2], 3: []}, "Got the job name 3; worker 1 = 2"),
            ({"worker": {0: None}, "ps": 5}, "Got worker 0 = None; ps = 5"),
        ],
    )
    def test_wrong_types(self, cluster, what):
        with pytest.raises(TypeError, match=what):
            ClusterSpec(cluster)

    @pytest.mark.parametrize(
        ("tasks", "bad"),
        [({-1: "h:1", "x": "h:2", 0: "h:3"}, "-1, 'x'"), ({0: "h:1", "0": "h:2"}, "0")],
    )
    def test_bad_indices(self, tasks, bad):
        with pytest.raises(
            ValueError, match=rf"task indices .* in job 'ps', each once\. Got \[{bad}\]"
        ):
            ClusterSpec({"ps": tasks})

    @pytest.mark.parametrize("method", ["num_tasks", "task_indices", "job_tasks"])
    def test_no_such_job(self, method):
        with pytest.raises(
            ValueError, match=r"No such job .*'chief'; its jobs are \['worker', 'ps"
        ):
            getattr(ClusterSpec(DENSE), method)("chief")

    def test_no_such_task(self):
        with pytest.raises(ValueError, match="No such job in cluster: 'chief'"):
            ClusterSpec(DENSE).task_address("chief", 0)
        with pytest.raises(ValueError, match=r"index 2 in job 'worker'; its tasks are \[0, 1\]"):
            ClusterSpec(DENSE).task_address("worker", 2)

    def test_one_task(self):
        alone = [{}, {"worker": []}, {"worker": ["h:1"]}, {"ps": {3: "h:1"}}]
        assert all(one_task(ClusterSpec(cluster)) for cluster in alone)
        assert not one_task(ClusterSpec({"worker": ["h:1"], "ps": ["h:2"]}))
        assert not one_task(ClusterSpec({"worker": ["h:1", "h:2"]}))

    def test_loopback_tasks_of_a_cluster_that_spans_machines(self):
        local = ["localhost:1", "127.0.0.2:2", "[::1]:3"]
        assert loopback_tasks(ClusterSpec({"worker": local})) == []
        assert loopback_tasks(ClusterSpec({"worker": ["a:1", "b:1"]})) == []
        assert loopback_tasks(ClusterSpec({"worker": local, "ps": ["a:1"]})) == [
            "worker 0 = 'localhost:1'",
            "worker 1 = '127.0.0.2:2'",
            "worker 2 = '[::1]:3'",
        ]


WITH_CHIEF = {"chief": ["c:1"], "worker": ["w:1", "w:2"], "ps": ["p:1"]}
WORKERS = {"worker": ["w:1", "w:2"]}
WITH_EVALUATOR = {"chief": ["c:1"], "worker": ["w:1"], "evaluator": ["e:1"]}
CHIEF, WORKER = "/job:chief/replica:0/task:0", "/job:worker/replica:0/task:0"


class TestRoles:
    @pytest.mark.parametrize(
        ("cluster", "task", "is_chief", "number", "count", "leader"),
        [
            (WITH_CHIEF, ("chief", 0), True, 0, 3, CHIEF),
            (WITH_CHIEF, ("worker", 0), False, 1, 3, CHIEF),
            (WITH_CHIEF, ("worker", 1), False, 2, 3, CHIEF),
            (WITH_CHIEF, ("evaluator", 0), True, 0, 1, ""),
            (WORKERS, ("worker", 0), True, 0, 2, WORKER),
            (WORKERS, ("worker", 1), False, 1, 2, WORKER),
            (WITH_EVALUATOR, ("worker", 0), False, 1, 2, CHIEF),
            (WITH_EVALUATOR, ("evaluator", 0), True, 0, 1, ""),
            ({"worker": {1: "w:1"}}, ("worker", 1), False, 1, 1, WORKER),
        ],
    )
    def test_tasks_that_train(self, cluster, task, is_chief, number, count, leader):
        for form in (cluster, ClusterSpec(cluster)):
            assert roles.is_chief(form, *task) is is_chief
            assert roles.id_in_cluster(form, *task) == number
            assert roles.worker_count(form, task[0]) == count
            assert roles.collective_leader(form, *task) == leader

    def test_a_ps_is_no_chief_but_has_a_leader(self):
        assert not roles.is_chief(WITH_CHIEF, "ps", 0)
        assert roles.collective_leader(WITH_CHIEF, "ps", 0) == CHIEF

    def test_a_process_that_is_no_task(self):
        assert not roles.is_chief(WORKERS, None, None)
        assert roles.collective_leader(WORKERS, None, None) == WORKER

    def test_without_a_cluster(self):
        assert roles.collective_leader({}, None, None) == ""
        assert roles.coordination_leader({}) == ""

    @pytest.mark.parametrize(
        ("cluster", "leader"),
        [
            (WITH_CHIEF, "/job:ps/replica:0/task:0"),
            (WITH_EVALUATOR, CHIEF),
            (WORKERS, WORKER),
            ({"ps": ["p:1"]}, "/job:ps/replica:0/task:0"),
        ],
    )
    def test_coordination_leader(self, cluster, leader):
        assert roles.coordination_leader(cluster) == leader

    def test_nobody_waits_for_the_evaluator(self):
        training = roles.training_cluster(WITH_EVALUATOR)
        assert training.as_dict() == {"chief": ["c:1"], "worker": ["w:1"]}
        assert roles.training_cluster(WITH_CHIEF) == ClusterSpec(WITH_CHIEF)

    @pytest.mark.parametrize(
        ("cluster", "task", "what"),
        [
            (
                {"job1": ["a:1"]},
                (None, None),
                "jobs out of chief, worker, ps, evaluator. Got 'job1'",
            ),
            ({"master": ["a:1"]}, (None, None), "Got 'master'.*TensorFlow 1.*write 'chief'"),
            (WORKERS, ("master", 0), "task_type: .* Got 'master'.*write 'chief'"),
            (WORKERS, ("boss", 0), "task_type: expected one out of chief, .* Got 'boss'"),
            (
                WORKERS,
                ("chief", 0),
                r"a job of the cluster \(worker\). Got 'chief'. .* add the task",
            ),
            ({}, ("worker", 0), r"a job of the cluster \(none\). Got 'worker'"),
            (WORKERS, ("worker", 2), r"task_id: .* a 'worker' task, one out of \[0, 1\]. Got 2"),
            (WORKERS, ("worker", -1), "Got -1"),
            (WORKERS, ("worker", None), "Got None"),
            (WORKERS, ("evaluator", 1), r"a 'evaluator' task, one out of \[0\]. Got 1"),
            (
                {"chief": ["a:1", "b:1"]},
                ("chief", 0),
                "at most one 'chief'. Got 2: a:1, b:1. Make the others workers",
            ),
            (
                {"worker": ["w:1"], "evaluator": ["a:1", "b:1"]},
                ("worker", 0),
                "at most one 'evaluator'. Got 2: a:1, b:1. Leave the others out",
            ),
        ],
    )
    def test_what_no_strategy_can_use(self, cluster, task, what):
        for check in (roles.validate, roles.is_chief, roles.id_in_cluster):
            with pytest.raises(ValueError, match=what):
                check(cluster, *task)

    def test_all_faults_are_named(self):
        cluster = {"master": ["a:1"], "chief": ["b:1", "c:1"]}
        with pytest.raises(ValueError, match=r"(?s)'master'.*at most one 'chief'.*Got 'boss'"):
            roles.validate(cluster, "boss", 0)

    @pytest.mark.parametrize("task_type", ["ps", None])
    def test_a_ps_is_not_counted(self, task_type):
        with pytest.raises(
            ValueError, match=f"id_in_cluster: .* Got {task_type!r}. Only tasks that"
        ):
            roles.id_in_cluster(WITH_CHIEF, task_type, 0)
        with pytest.raises(
            ValueError, match=f"worker_count: .* Got {task_type!r}. Only tasks that"
        ):
            roles.worker_count(WITH_CHIEF, task_type)

    def test_nobody_to_lead(self):
        ps, evaluator = {"ps": ["p:1"]}, {"evaluator": ["e:1"]}
        with pytest.raises(ValueError, match="a task out of chief, worker to lead.* Got only ps"):
            roles.collective_leader(ps, "ps", 0)
        with pytest.raises(ValueError, match="out of ps, chief, worker to lead.* only evaluator"):
            roles.coordination_leader(evaluator)
