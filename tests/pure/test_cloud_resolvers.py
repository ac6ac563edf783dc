"""The resolvers that ask a cloud: Kubernetes, Compute Engine and SageMaker, on stand-ins."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from stratagem.cluster_resolver import (
    GCEClusterResolver,
    KubernetesClusterResolver,
    KubernetesExecutableLocation,
    SageMakerClusterResolver,
)


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
