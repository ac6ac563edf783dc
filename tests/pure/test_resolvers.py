"""What all resolvers do alike, and what the simple ones do on their own."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

import stratagem
from stratagem import cluster_resolver, config
from stratagem.cluster_resolver import (
    ClusterResolver,
    ClusterSpec,
    GCEClusterResolver,
    KubernetesClusterResolver,
    SageMakerClusterResolver,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    UnionResolver,
)

ADDRESSES = ["10.0.0.1:2222", "10.0.0.2:2222"]
HOSTS = ["10.0.0.1", "10.0.0.2"]


def _simple() -> ClusterResolver:
    return SimpleClusterResolver(
        ClusterSpec({"worker": ADDRESSES}), task_type="worker", task_id=1, rpc_layer="grpc"
    )


def _tf_config() -> ClusterResolver:
    text = json.dumps(
        {"cluster": {"worker": ADDRESSES}, "task": {"type": "worker", "index": 1}}
        | {"rpc_layer": "grpc"}
    )
    return TFConfigClusterResolver(env={"TF_CONFIG": text})


def _slurm() -> ClusterResolver:
    env = {
        "SLURM_PROCID": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": ",".join(HOSTS),
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    }
    return SlurmClusterResolver(port_base=2222, gpus_per_node=0, env=env)


def _kubernetes() -> ClusterResolver:
    pods = [
        SimpleNamespace(
            metadata=SimpleNamespace(name=name),
            status=SimpleNamespace(phase="Running", host_ip=host),
        )
        for name, host in zip("ab", HOSTS, strict=True)
    ]
    client = SimpleNamespace(
        list_pod_for_all_namespaces=lambda label_selector: SimpleNamespace(items=pods[::-1])
    )
    resolver = KubernetesClusterResolver({"worker": ["app=w"]}, 2222, override_client=client)
    resolver.task_type, resolver.task_id = "worker", 1
    return resolver


def _gce() -> ClusterResolver:
    def get(instance: str, **_: str) -> SimpleNamespace:
        return SimpleNamespace(execute=lambda: {"networkInterfaces": [{"networkIP": instance}]})

    service = MagicMock()
    groups = service.instanceGroups.return_value
    groups.listInstances.return_value.execute.return_value = {
        "items": [{"instance": f"zones/z/instances/{host}"} for host in reversed(HOSTS)]
    }
    groups.listInstances_next.return_value = None
    service.instances.return_value.get = get
    return GCEClusterResolver("p", "z", "g", 2222, task_id=1, service=service)


def _sagemaker() -> ClusterResolver:
    env = {"SM_CURRENT_HOST": HOSTS[1], "SM_HOSTS": json.dumps(HOSTS)}
    return SageMakerClusterResolver(2222, rpc_layer="grpc", env=env)


def _union() -> ClusterResolver:
    second = SimpleClusterResolver(ClusterSpec({"worker": ADDRESSES[1:]}), task_type="ps")
    first = SimpleClusterResolver(
        ClusterSpec({"worker": ADDRESSES[:1]}), task_type="worker", task_id=1, rpc_layer="grpc"
    )
    return UnionResolver(first, second)


@pytest.mark.parametrize(
    "make", [_simple, _tf_config, _slurm, _kubernetes, _gce, _sagemaker, _union]
)
class TestEveryResolver:
    """Each resolver says that this process is worker 1 of two workers, over grpc."""

    def test_cluster(self, make: Callable[[], ClusterResolver]):
        resolver = make()
        assert isinstance(resolver, ClusterResolver)
        assert isinstance(resolver.cluster_spec(), ClusterSpec)
        assert resolver.cluster_spec().as_dict() == {"worker": ADDRESSES}
        assert resolver.cluster_spec() == resolver.cluster_spec()

    def test_task(self, make: Callable[[], ClusterResolver]):
        resolver = make()
        assert (resolver.task_type, resolver.task_id) == ("worker", 1)
        assert resolver.rpc_layer == "grpc"
        assert resolver.environment in ("", None)

    def test_master(self, make: Callable[[], ClusterResolver]):
        resolver = make()
        assert resolver.master("worker", 0) == f"grpc://{ADDRESSES[0]}"
        assert resolver.master("worker", 0, "http") == f"http://{ADDRESSES[0]}"
        assert resolver.master("worker", 0, "") == ADDRESSES[0]

    def test_settable(self, make: Callable[[], ClusterResolver]):
        resolver = make()
        resolver.task_id = 0
        resolver.rpc_layer = "http"
        assert resolver.task_id == 0
        assert resolver.master("worker", 1) == f"http://{ADDRESSES[1]}"
        if make is not _gce:
            resolver.task_type = "worker"
            assert resolver.task_type == "worker"

    def test_no_such_task(self, make: Callable[[], ClusterResolver]):
        with pytest.raises(ValueError, match=r"No task with index 2 in job 'worker'"):
            make().master("worker", 2)
        with pytest.raises(ValueError, match="No such job in cluster: 'ps'"):
            make().master("ps", 0)

    def test_accelerators(self, make: Callable[[], ClusterResolver], monkeypatch):
        monkeypatch.setattr(config, "list_devices", lambda: ["CPU:0", "GPU:0", "GPU:1"])
        counted = make().num_accelerators()
        told = {_simple: {}, _union: {}, _slurm: {"GPU": 0}}
        assert counted == told.get(make, {"GPU": 2})


# One that a user writes.


class _Own(ClusterResolver):
    def __init__(self, cluster: dict[str, Any]) -> None:
        self._cluster = cluster

    def cluster_spec(self) -> ClusterSpec:
        return ClusterSpec(self._cluster)


class TestOwnResolver:
    def test_what_it_need_not_say(self):
        resolver = _Own({"worker": ADDRESSES})
        assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == (None, None, None)
        assert resolver.master() == ""
        assert resolver.environment == ""
        resolver.task_type, resolver.task_id = "worker", 0
        assert resolver.master() == ADDRESSES[0]

    def test_it_must_say_the_cluster(self):
        with pytest.raises(TypeError, match="abstract method '?cluster_spec"):
            type("Empty", (ClusterResolver,), {})()

    def test_only_own_devices_can_be_counted(self, monkeypatch):
        monkeypatch.setattr(config, "list_devices", lambda: ["CPU:0", "TPU:0"])
        resolver = _Own({"worker": ADDRESSES})
        assert resolver.num_accelerators("worker", 1) == {"TPU": 1}
        resolver.task_type, resolver.task_id = "worker", 0
        assert resolver.num_accelerators("worker", 0)["TPU"] == 1
        assert resolver.num_accelerators()["GPU"] == 0
        with pytest.raises(ValueError, match=r"own task, \('worker', 0\)\. Got \('worker', 1\)"):
            resolver.num_accelerators("worker", 1)


class TestSimple:
    def test_master_and_numbers_are_what_was_given(self):
        spec = ClusterSpec({"worker": ADDRESSES})
        resolver = SimpleClusterResolver(
            spec, "m:1", environment="e", num_accelerators={"GPU": 8}, rpc_layer="grpc"
        )
        assert resolver.master() == "grpc://m:1"
        assert resolver.environment == "e"
        assert resolver.num_accelerators("worker", 5) == {"GPU": 8}
        assert SimpleClusterResolver(spec).master() == ""

    def test_errors(self):
        with pytest.raises(
            TypeError, match=r"expected a ClusterSpec\. Got \{'worker'.*ClusterSpec"
        ):
            SimpleClusterResolver({"worker": ADDRESSES})
        with pytest.raises(TypeError, match=r"master: expected a string\. Got None"):
            SimpleClusterResolver(ClusterSpec({}), None)


def _of(*clusters: dict[str, Any], **kwargs: Any) -> UnionResolver:
    resolvers = [
        SimpleClusterResolver(ClusterSpec(cluster), task_type="worker", task_id=1, rpc_layer="grpc")
        for cluster in clusters
    ]
    return UnionResolver(*resolvers, **kwargs)


class TestUnion:
    @pytest.mark.parametrize(
        ("clusters", "merged"),
        [
            ([{"worker": ["a:1"]}, {"ps": ["b:1"]}], {"worker": ["a:1"], "ps": ["b:1"]}),
            ([{"worker": ["b:1", "a:1"]}, {"worker": ["c:1"]}], {"worker": ["b:1", "a:1", "c:1"]}),
            (
                [{"worker": ["a:1", "b:1"]}, {"worker": {3: "c:1"}}],
                {"worker": {0: "a:1", 1: "b:1", 3: "c:1"}},
            ),
            ([{"worker": {1: "b:1"}}, {"worker": ["a:1"]}], {"worker": ["a:1", "b:1"]}),
        ],
    )
    def test_merge(self, clusters, merged):
        assert _of(*clusters).cluster_spec().as_dict() == merged

    def test_an_index_given_twice(self):
        union = _of({"worker": ["a:1", "b:1"]}, {"worker": {1: "c:1", 3: "d:1"}})
        with pytest.raises(KeyError, match=r"index of job 'worker'.* Got 1 \(b:1 and c:1\) twice"):
            union.cluster_spec()

    def test_a_task_that_two_list_is_one_task(self):
        # The way to state the accelerators of a cluster that TF_CONFIG describes.
        described = _tf_config()
        stated = SimpleClusterResolver(described.cluster_spec(), num_accelerators={"GPU": 1})
        union = UnionResolver(stated, described)
        assert union.cluster_spec().as_dict() == {"worker": ADDRESSES}
        assert union.num_accelerators() == {"GPU": 1}

    def test_the_rest_is_the_first_ones(self):
        union = _of({"worker": ["a:1"]}, {"ps": ["b:1"]})
        assert union.master() == "grpc://"  # A simple resolver without a master, as in TensorFlow.
        assert union.master(rpc_layer="x") == "x://"
        assert _of({}, rpc_layer="y").master() == "y://"

    def test_overrides(self):
        union = _of({"worker": ["a:1"]}, task_type="ps", task_id=0, rpc_layer="http")
        assert (union.task_type, union.task_id, union.rpc_layer) == ("ps", 0, "http")

    def test_errors(self):
        with pytest.raises(ValueError, match="at least one ClusterResolver"):
            UnionResolver()
        with pytest.raises(TypeError, match=r"ClusterResolvers only\. Got \[3, 'x'\]"):
            UnionResolver(_simple(), 3, "x")


class TestEnvironment:
    def test_it_is_live_and_cannot_be_written(self, monkeypatch):
        env = config.environment()
        monkeypatch.setenv("STRATAGEM_TEST", "1")
        assert env["STRATAGEM_TEST"] == "1"
        with pytest.raises(TypeError, match="does not support item assignment"):
            env["STRATAGEM_TEST"] = "2"

    def test_resolvers_read_it(self, monkeypatch):
        monkeypatch.setenv("SM_HOSTS", '["a", "b"]')
        monkeypatch.setenv("SM_CURRENT_HOST", "b")
        assert SageMakerClusterResolver().task_id == 1

    def test_visible_gpus_are_chosen_before_the_backend_starts(self, monkeypatch):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        monkeypatch.setattr(config._jax, "started_backends", lambda: [])
        config.set_visible_gpus("1")
        assert config.environment()["CUDA_VISIBLE_DEVICES"] == "1"
        monkeypatch.setattr(config._jax, "started_backends", lambda: ["cuda"])
        config.set_visible_gpus("1")
        with pytest.raises(
            RuntimeError, match=r"set_visible_gpus\('0'\): .* CUDA_VISIBLE_DEVICES=1"
        ):
            config.set_visible_gpus("0")


def test_public_names():
    names = {name for name in vars(cluster_resolver) if name[0].isupper()}
    assert names == {
        "ClusterResolver",
        "ClusterSpec",
        "GCEClusterResolver",
        "KubernetesClusterResolver",
        "KubernetesExecutableLocation",
        "SageMakerClusterResolver",
        "SimpleClusterResolver",
        "SlurmClusterResolver",
        "TFConfigClusterResolver",
        "TPUClusterResolver",
        "UnionResolver",
    }
    assert stratagem.distribute.cluster_resolver is cluster_resolver


def test_resolvers_use_neither_jax_nor_keras():
    room = Path(stratagem.__file__).parent / "cluster"
    resolvers = [p for p in room.glob("*.py") if "(ClusterResolver)" in p.read_text()]
    files = [*resolvers, *(room / name for name in ("abstract.py", "roles.py", "spec.py"))]
    assert len(files) >= 10
    imported = {
        name.partition(".")[0]
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
    }
    assert "stratagem" in imported
    assert not imported & {"jax", "jaxlib", "keras", "numpy", "_jax", "_keras"}
