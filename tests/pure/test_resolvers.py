"""What all resolvers do alike, and what the small ones do on their own."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import stratagem
from stratagem import cluster_resolver, config
from stratagem.cluster_resolver import (
    ClusterResolver,
    ClusterSpec,
    GCEClusterResolver,
    KubernetesClusterResolver,
    KubernetesExecutableLocation,
    SageMakerClusterResolver,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    UnionResolver,
)

ADDRESSES = ["10.0.0.1:2222", "10.0.0.2:2222"]
HOSTS = ["10.0.0.1", "10.0.0.2"]


# Stand-ins for the services that two resolvers ask.


@dataclass
class Pods:
    """As much of `kubernetes.client.CoreV1Api` as is asked: selector -> (name, phase, node)."""

    by_selector: dict[str, list[tuple[str, str, str]]]

    def list_pod_for_all_namespaces(self, *, label_selector: str) -> SimpleNamespace:
        pods = [
            SimpleNamespace(
                metadata=SimpleNamespace(name=name),
                status=SimpleNamespace(phase=phase, host_ip=host),
            )
            for name, phase, host in self.by_selector.get(label_selector, [])
        ]
        return SimpleNamespace(items=pods)


@dataclass
class Instances:
    """As much of Compute Engine's API as is asked: pages of (name, IP)."""

    pages: list[list[tuple[str, str]]]
    asked: dict[str, Any] = field(default_factory=dict)

    def instanceGroups(self) -> Instances:
        return self

    def instances(self) -> Instances:
        return self

    def listInstances(self, **asked: Any) -> SimpleNamespace:
        self.asked = asked
        return self._page(0)

    def listInstances_next(self, *, previous_request, previous_response) -> SimpleNamespace | None:
        following = previous_request.number + 1
        return self._page(following) if following < len(self.pages) else None

    def get(self, *, project: str, zone: str, instance: str) -> SimpleNamespace:
        ip = dict(sum(self.pages, []))[instance]
        return SimpleNamespace(execute=lambda: {"networkInterfaces": [{"networkIP": ip}]})

    def _page(self, number: int) -> SimpleNamespace:
        items = [
            {"instance": f"https://compute/zones/z/instances/{name}"}
            for name, _ in self.pages[number]
        ]
        response = {"items": items} if items else {}
        return SimpleNamespace(number=number, execute=lambda: response)


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
    pods = Pods({"app=w": [("b", "Running", HOSTS[1]), ("a", "Running", HOSTS[0])]})
    resolver = KubernetesClusterResolver({"worker": ["app=w"]}, 2222, override_client=pods)
    resolver.task_type, resolver.task_id = "worker", 1
    return resolver


def _gce() -> ClusterResolver:
    service = Instances([[("b", HOSTS[1])], [("a", HOSTS[0])]])
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


def _modules(monkeypatch, **modules: ModuleType | None) -> None:
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name.replace("__", "."), module)


class TestKubernetes:
    def test_pods_by_name_within_each_selector(self):
        pods = Pods(
            {
                "job-name=w": [("w-1", "Running", "10.0.0.2"), ("w-0", "Running", "10.0.0.3")],
                "job-name=v": [("v-0", "Running", "10.0.0.4")],
                "job-name=p": [("p-0", "Running", "10.0.0.5")],
            }
        )
        mapping = {"worker": ["job-name=w", "job-name=v"], "ps": ["job-name=p"]}
        resolver = KubernetesClusterResolver(mapping, override_client=pods)
        assert resolver.cluster_spec().as_dict() == {
            "worker": ["10.0.0.3:8470", "10.0.0.2:8470", "10.0.0.4:8470"],
            "ps": ["10.0.0.5:8470"],
        }
        assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == (None, None, "grpc")
        assert resolver.master() == ""

    def test_it_asks_anew(self):
        pods = Pods({"job-name=tensorflow": [("a", "Running", "10.0.0.1")]})
        resolver = KubernetesClusterResolver(override_client=pods)
        assert resolver.cluster_spec().num_tasks("worker") == 1
        pods.by_selector["job-name=tensorflow"].append(("b", "Running", "10.0.0.2"))
        assert resolver.cluster_spec().num_tasks("worker") == 2

    def test_pods_that_are_not_there(self):
        pods = Pods(
            {"a": [("a-0", "Pending", "h"), ("a-1", "Running", "h"), ("a-2", "Failed", "h")]}
        )
        resolver = KubernetesClusterResolver({"worker": ["a"], "ps": ["b"]}, override_client=pods)
        with pytest.raises(
            RuntimeError,
            match='Pod "a-0" is not running; phase: "Pending"; Pod "a-2" is not running; phase: '
            '"Failed"; No pod of job "ps" matches the label selector "b". Wait for the pods',
        ):
            resolver.cluster_spec()

    def test_two_pods_on_one_node(self):
        pods = Pods({"a": [("a-0", "Running", "10.0.0.1"), ("a-1", "Running", "10.0.0.1")]})
        with pytest.raises(RuntimeError, match="Pods a-0 and a-1 share the node 10.0.0.1, and so"):
            KubernetesClusterResolver({"worker": ["a"]}, override_client=pods).cluster_spec()

    @pytest.mark.parametrize("location", list(KubernetesExecutableLocation))
    def test_a_client_is_made(self, location, monkeypatch):
        loaded: list[str] = []
        package = ModuleType("kubernetes")
        package.config = SimpleNamespace(
            load_incluster_config=lambda: loaded.append("WITHIN_CLUSTER"),
            load_kube_config=lambda: loaded.append("OFF_CLUSTER"),
            ConfigException=RuntimeError,
        )
        package.client = SimpleNamespace(CoreV1Api=lambda: Pods({"a": [("a", "Running", "h")]}))
        _modules(monkeypatch, kubernetes=package)
        resolver = KubernetesClusterResolver({"worker": ["a"]}, executable_location=location)
        assert loaded == [location.name]
        assert resolver.cluster_spec().as_dict() == {"worker": ["h:8470"]}

    @pytest.mark.parametrize(
        ("location", "where"),
        [("WITHIN_CLUSTER", "the service account of a pod"), ("OFF_CLUSTER", "the kube config of")],
    )
    def test_no_credentials(self, location, where, monkeypatch):
        class ConfigException(Exception):
            pass

        def load() -> None:
            raise ConfigException("nothing there")

        package = ModuleType("kubernetes")
        package.client = None
        package.config = SimpleNamespace(
            load_incluster_config=load, load_kube_config=load, ConfigException=ConfigException
        )
        _modules(monkeypatch, kubernetes=package)
        with pytest.raises(
            RuntimeError, match=f"credentials in {where}.* Got: nothing there. Pass"
        ):
            KubernetesClusterResolver(executable_location=KubernetesExecutableLocation[location])

    def test_errors(self, monkeypatch):
        with pytest.raises(ValueError, match="executable_location: .* OFF_CLUSTER. Got 'inside'"):
            KubernetesClusterResolver(executable_location="inside")
        _modules(monkeypatch, kubernetes=None)
        with pytest.raises(ImportError, match="pip install kubernetes, or pass override_client"):
            KubernetesClusterResolver()


class TestGCE:
    def test_instances_of_all_pages(self):
        service = Instances([[("b", "10.0.0.2"), ("c", "10.0.0.3")], [], [("a", "10.0.0.1")]])
        resolver = GCEClusterResolver("p", "z", "g", 8470, task_type="ps", service=service)
        assert resolver.cluster_spec().as_dict() == {
            "ps": ["10.0.0.1:8470", "10.0.0.2:8470", "10.0.0.3:8470"]
        }
        assert service.asked == {
            "project": "p",
            "zone": "z",
            "instanceGroup": "g",
            "body": {"instanceState": "RUNNING"},
            "orderBy": "name",
        }
        assert resolver.task_id == 0

    def test_a_service_is_made(self, monkeypatch):
        built: list[Any] = []

        def build(*args: str, credentials: Any) -> Instances:
            built.append((*args, credentials))
            return Instances([[("a", "10.0.0.1")]])

        google, auth, client = (ModuleType(n) for n in ("google", "google.auth", "googleapiclient"))
        google.auth, google.__path__ = auth, []
        auth.default = lambda scopes: ("mine", "p")
        client.discovery = SimpleNamespace(build=build)
        _modules(monkeypatch, google=google, google__auth=auth, googleapiclient=client)
        GCEClusterResolver("p", "z", "g", 1)
        GCEClusterResolver("p", "z", "g", 1, credentials="given")
        assert built == [("compute", "v1", "mine"), ("compute", "v1", "given")]

    def test_errors(self, monkeypatch):
        service = Instances([[]])
        resolver = GCEClusterResolver("p", "z", "g", 1, service=service)
        with pytest.raises(RuntimeError, match=r"running instances in the group 'g' .* Got none"):
            resolver.cluster_spec()
        with pytest.raises(
            RuntimeError, match="task_type in the constructor.* Got 'ps' afterwards"
        ):
            resolver.task_type = "ps"
        _modules(monkeypatch, googleapiclient=None)
        with pytest.raises(ImportError, match="google-api-python-client.* or pass service"):
            GCEClusterResolver("p", "z", "g", 1)


class TestSageMaker:
    def test_hosts_are_sorted_workers(self):
        env = {"SM_CURRENT_HOST": "algo-2", "SM_HOSTS": '["algo-2", "algo-1"]'}
        resolver = SageMakerClusterResolver(env=env)
        assert resolver.cluster_spec().as_dict() == {"worker": ["algo-1:2223", "algo-2:2223"]}
        assert (resolver.task_type, resolver.task_id) == ("worker", 1)
        assert resolver.master() == "algo-2:2223"
        env["SM_CURRENT_HOST"] = "algo-1"
        assert resolver.task_id == 0

    @pytest.mark.parametrize(("hosts", "task"), [('["algo-1"]', ("worker", 0)), ("", (None, None))])
    def test_at_most_one_host(self, hosts, task):
        resolver = SageMakerClusterResolver(env={"SM_CURRENT_HOST": "algo-1", "SM_HOSTS": hosts})
        assert (resolver.task_type, resolver.task_id) == task
        assert resolver.master() == ""

    def test_overrides(self):
        resolver = SageMakerClusterResolver(task_type="ps", task_id=3, environment="e", env={})
        assert (resolver.task_type, resolver.task_id, resolver.environment) == ("ps", 3, "e")
        resolver.task_type = "worker"
        assert resolver.task_type == "worker"

    @pytest.mark.parametrize(
        ("env", "error", "what"),
        [
            ({}, RuntimeError, "Got no SM_CURRENT_HOST and no SM_HOSTS. Start"),
            (
                {"SM_HOSTS": "[]"},
                RuntimeError,
                "Not a SageMaker env.* Got no SM_CURRENT_HOST. Start",
            ),
            ({"SM_HOSTS": "a", "SM_CURRENT_HOST": "a"}, ValueError, "a JSON list .* Got 'a'"),
            (
                {"SM_HOSTS": "[1]", "SM_CURRENT_HOST": "a"},
                ValueError,
                r"a JSON list .* Got '\[1\]'",
            ),
            (
                {"SM_HOSTS": '["b", "a"]', "SM_CURRENT_HOST": "c"},
                ValueError,
                r"SM_CURRENT_HOST: expected one of the hosts in SM_HOSTS, \['a', 'b'\]. Got 'c'",
            ),
        ],
    )
    def test_errors(self, env, error, what):
        resolver = SageMakerClusterResolver(env=env)
        for ask in (resolver.cluster_spec, resolver.master, lambda: resolver.task_id):
            with pytest.raises(error, match=what):
                ask()


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
        "UnionResolver",
    }
    assert stratagem.distribute.cluster_resolver is cluster_resolver


def test_the_room_uses_neither_jax_nor_keras():
    room = Path(stratagem.__file__).parent / "cluster"
    imported = {
        name.partition(".")[0]
        for path in room.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
    }
    assert "stratagem" in imported
    assert not imported & {"jax", "jaxlib", "keras", "numpy", "_jax", "_keras"}
