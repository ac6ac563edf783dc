"""TF_CONFIG: what is read, and what a wrong one is told. Values as TensorFlow 2.21 gave them."""

from __future__ import annotations

import json
import re
import warnings
from typing import Any

import pytest

from stratagem.cluster import roles
from stratagem.cluster_resolver import TFConfigClusterResolver

WORKERS = {"worker": ["w:1", "w:2"]}


def _resolver(tf_config: Any = None, **kwargs: Any) -> TFConfigClusterResolver:
    text = tf_config if isinstance(tf_config, str) else json.dumps(tf_config)
    return TFConfigClusterResolver(env={} if tf_config is None else {"TF_CONFIG": text}, **kwargs)


def _task(task_type: Any, index: Any, **cluster: Any) -> dict[str, Any]:
    return {"cluster": cluster or WORKERS, "task": {"type": task_type, "index": index}}


class TestReading:
    @pytest.mark.parametrize("tf_config", [None, "", " ", "{}"])
    def test_nothing(self, tf_config):
        resolver = _resolver(tf_config)
        assert resolver.cluster_spec().as_dict() == {}
        assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == (None, None, None)
        assert resolver.environment is None
        assert resolver.master() == ""

    def test_all_roles(self):
        cluster = {"chief": ["c:1"], "worker": ["w:1", "w:2"], "ps": ["p:1"], "evaluator": ["e:1"]}
        for job, addresses in cluster.items():
            for index, address in enumerate(addresses):
                resolver = _resolver(_task(job, index, **cluster))
                assert resolver.cluster_spec().as_dict() == cluster
                assert (resolver.task_type, resolver.task_id) == (job, index)
                assert resolver.master() == address

    def test_what_an_operator_writes_beside(self):
        # Kubeflow's TFJob: another field, and an evaluator that is no part of training.
        cluster = {"chief": ["j-chief-0.ns.svc:2222"], "evaluator": ["j-evaluator-0.ns.svc:2222"]}
        resolver = _resolver(_task("chief", 0, **cluster) | {"environment": "cloud"})
        training = roles.training_cluster(resolver.cluster_spec())
        assert training.as_dict() == {"chief": cluster["chief"]}

    def test_an_evaluator_may_be_missing_in_the_cluster(self):
        resolver = _resolver(_task("evaluator", 0))
        assert (resolver.task_type, resolver.task_id) == ("evaluator", 0)

    def test_an_index_in_digits(self):
        assert _resolver(_task("worker", "1")).task_id == 1

    def test_a_sparse_cluster(self):
        resolver = _resolver(_task("worker", 3, worker={"1": "w:1", "3": "w:3"}))
        assert resolver.cluster_spec().as_dict() == {"worker": {1: "w:1", 3: "w:3"}}
        assert resolver.master() == "w:3"

    def test_a_cluster_without_a_task(self):
        resolver = _resolver({"cluster": WORKERS})
        assert (resolver.task_type, resolver.task_id) == (None, None)
        assert resolver.master("worker", 0) == "w:1"

    def test_a_task_without_a_cluster(self):
        assert _resolver({"task": {"type": "worker", "index": 5}}).task_id == 5

    def test_a_cluster_of_one_task_has_no_master(self):
        assert _resolver(_task("worker", 0, worker=["w:1"])).master() == ""

    def test_master(self):
        resolver = _resolver(_task("worker", 1) | {"rpc_layer": "grpc"})
        assert resolver.master() == "grpc://w:2"
        assert resolver.master("worker", 0, "http") == "http://w:1"
        told = _resolver(_task("worker", 1) | {"rpc_layer": "grpc", "session_master": "m"})
        assert told.master() == "m"

    def test_arguments_come_first(self):
        resolver = _resolver(
            _task("worker", 1) | {"rpc_layer": "grpc"},
            task_type="worker",
            task_id=0,
            rpc_layer="http",
            environment="e",
        )
        assert (resolver.task_type, resolver.task_id) == ("worker", 0)
        assert (resolver.rpc_layer, resolver.environment) == ("http", "e")
        assert resolver.master() == "http://w:1"
        resolver.task_id = 1
        resolver.task_type = None
        assert resolver.master() == "http://w:2"

    def test_every_access_reads_anew(self, monkeypatch):
        resolver = TFConfigClusterResolver()
        monkeypatch.delenv("TF_CONFIG", raising=False)
        assert not resolver.cluster_spec()
        monkeypatch.setenv("TF_CONFIG", json.dumps(_task("worker", 0)))
        assert resolver.cluster_spec().num_tasks("worker") == 2
        assert resolver.task_id == 0
        monkeypatch.setenv("TF_CONFIG", json.dumps(_task("worker", 1)))
        assert resolver.task_id == 1


# What is wrong: (TF_CONFIG, pattern of the error).
WRONG = {
    "not JSON": (
        "{'cluster': {}}",
        r"^TF_CONFIG: expected JSON, such as \{\"cluster\".* Got \"\{'cluster': \{\}\}\", which is "
        r"broken at line 1, column 2: .* Write it with json\.dumps\.$",
    ),
    "cut off, and long": ('{"a": "' + "x" * 999, r"x{190} \.\.\.', which is broken at line 1"),
    "no object": ("[1]", r"^TF_CONFIG: expected a JSON object, such as .* Got '\[1\]'"),
    "cluster is no object": ({"cluster": ["w:1"]}, r"TF_CONFIG\[\"cluster\"\]: .* Got \['w:1'\]"),
    "task is no object": ({"task": "worker"}, r"TF_CONFIG\[\"task\"\]: .* Got 'worker'. The whole"),
    "addresses in no list": (
        {"cluster": {"worker": "w:1"}},
        r"TF_CONFIG\[\"cluster\"\]: ClusterSpec: .*a list of addresses.* Got worker = 'w:1'",
    ),
    "port 0": (
        {"cluster": {"chief": ["localhost:0000"], "worker": ["localhost:1111"]}},
        r"TF_CONFIG\[\"cluster\"\]: .* Got chief 0 = 'localhost:0000' \(port 0 is not in 1 to",
    ),
    "an address twice": (
        {"cluster": {"chief": ["a:1"], "worker": ["b:1", "a:1"]}},
        r"TF_CONFIG\[\"cluster\"\]: .* chief 0 = 'a:1' and worker 1 = 'a:1' \(the same address\)",
    ),
    "unknown job": (
        {"cluster": {"trainer": ["a:1"]}},
        r"TF_CONFIG\[\"cluster\"\]: .* jobs out of chief, worker, ps, evaluator. Got 'trainer'",
    ),
    "master in the cluster": (
        _task("worker", 0, master=["a:1"], worker=["b:1"]),
        r"TF_CONFIG\[\"cluster\"\]: .* Got 'master'. 'master' is .* TensorFlow 1 .*: write 'chief'",
    ),
    "master as the task": (
        _task("master", 0),
        r"TF_CONFIG\[\"task\"\]\[\"type\"\]: .* Got 'master'. .*: write 'chief'",
    ),
    "unknown task type": (
        _task("Worker", 0),
        r"TF_CONFIG\[\"task\"\]\[\"type\"\]: expected one out of chief, worker, .* Got 'Worker'",
    ),
    "a task that is not in the cluster": (
        _task("chief", 0),
        r"TF_CONFIG\[\"task\"\]\[\"type\"\]: .* job of the cluster \(worker\). Got 'chief'. .* "
        r"address to TF_CONFIG\[\"cluster\"\]",
    ),
    "index out of range": (
        _task("worker", 2),
        r"TF_CONFIG\[\"task\"\]\[\"index\"\]: .* one out of \[0, 1\]. Got 2. Indices count from 0",
    ),
    "no index": (
        {"cluster": WORKERS, "task": {"type": "worker"}},
        r"TF_CONFIG\[\"task\"\]\[\"index\"\]: .* one out of \[0, 1\]. Got None",
    ),
    "an index of another kind": (
        _task("worker", 0.5),
        r"TF_CONFIG\[\"task\"\]\[\"index\"\]: expected a whole number, .* Got 0.5",
    ),
    "true for an index": (_task("worker", True), "expected a whole number, .* Got True"),
    "a type of another kind": (
        _task(1, 0),
        r"TF_CONFIG\[\"task\"\]\[\"type\"\]: expected a string. Got 1",
    ),
    "an rpc_layer of another kind": (
        {"rpc_layer": 1},
        r"TF_CONFIG\[\"rpc_layer\"\]: expected a string. Got 1",
    ),
    "more than one chief": (
        _task("chief", 0, chief=["a:1", "b:1"]),
        r"TF_CONFIG\[\"cluster\"\]: expected at most one 'chief'. Got 2: a:1, b:1. Make the others",
    ),
    "more than one evaluator": (
        _task("worker", 0, worker=["w:1"], evaluator=["a:1", "b:1"]),
        r"TF_CONFIG\[\"cluster\"\]: expected at most one 'evaluator'. Got 2: a:1, b:1",
    ),
}


class TestWrong:
    @pytest.mark.parametrize("case", WRONG)
    def test_every_access_says_what(self, case):
        tf_config, pattern = WRONG[case]
        resolver = _resolver(tf_config)
        for ask in (resolver.cluster_spec, resolver.master, lambda: resolver.task_type):
            with pytest.raises(ValueError, match=pattern):
                ask()

    def test_all_of_it(self):
        wrong = _task("worker", 7, master=["a:1"], chief=["b:1", "c:1"], worker=["d:1"])
        with pytest.raises(
            ValueError, match=r"(?s)Got 'master'.*one 'chief'.*\[\"index\"\]: .*Got 7"
        ):
            _resolver(wrong).cluster_spec()

    def test_an_argument_is_named_instead_of_the_field(self):
        with pytest.raises(ValueError, match=r"^task_id: .* one out of \[0, 1\]. Got 9"):
            _resolver(_task("worker", 0), task_id=9).cluster_spec()
        with pytest.raises(ValueError, match=r"^task_type: .* Got 'boss'"):
            _resolver(_task("worker", 0), task_type="boss").cluster_spec()

    def test_a_master_of_nobody(self):
        with pytest.raises(
            RuntimeError, match=r"TF_CONFIG\[\"task\"\]: expected the type and index"
        ):
            _resolver({"cluster": WORKERS}).master()

    def test_loopback_beside_other_machines(self):
        resolver = _resolver({"cluster": {"chief": ["localhost:1"], "worker": ["w:1"]}})
        said = re.escape("Got chief 0 = 'localhost:1', which only that machine itself can, beside")
        with pytest.warns(UserWarning, match=said) as caught:
            resolver.cluster_spec()
        assert caught[0].filename == __file__

    def test_loopback_alone(self):
        with warnings.catch_warnings(action="error"):
            _resolver({"cluster": {"worker": ["localhost:1", "localhost:2"]}}).cluster_spec()
