"""TPUClusterResolver: addresses, environments and the Cloud TPU API, on stand-ins."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from stratagem import config
from stratagem.cluster import runtime
from stratagem.cluster_resolver import SimpleClusterResolver, TPUClusterResolver

ALONE = "the TPUs of this machine alone"


class Api:
    """As much of the Cloud TPU API as is asked."""

    def __init__(self, **node: Any):
        self.node = node
        self.asked = ""

    def projects(self) -> Api:
        return self

    def locations(self) -> Api:
        return self

    def nodes(self) -> Api:
        return self

    def get(self, *, name: str) -> SimpleNamespace:
        self.asked = name
        return SimpleNamespace(execute=lambda: self.node)


READY = {
    "state": "READY",
    "acceleratorType": "v3-8",
    "networkEndpoints": [{"ipAddress": "10.0.0.2", "port": "8470"}, {"ipAddress": "10.0.0.3"}],
}


def resolver(tpu: str | None = None, /, **env: str) -> TPUClusterResolver:
    return TPUClusterResolver(tpu, env=env)


@pytest.mark.parametrize(
    ("tpu", "env", "found"),
    [
        ("local", {"TPU_WORKER_HOSTNAMES": "a,b"}, "tpu='local'"),
        (None, {}, "none of TPU_CONFIG, KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS, TPU_NAME, TPU_PROCESS_"),
        ("", {}, "none of TPU_CONFIG, "),
        (None, {"TPU_NAME": "local", "TPU_WORKER_HOSTNAMES": "a,b"}, "TPU_NAME=local"),
    ],
)
def test_this_machine_alone(tpu, env, found):
    r = resolver(tpu, **env)
    assert not r.cluster_spec()
    assert r.master() == r.get_master() == ""
    assert (r.task_type, r.task_id) == ("worker", 0)
    assert r.found.startswith(found)
    assert r.found.endswith(ALONE)
    assert r.join() is None


@pytest.mark.parametrize(
    ("tpu", "env", "addresses"),
    [
        ("grpc://10.0.0.2:8470", {}, ["10.0.0.2:8470"]),
        ("grpc://10.0.0.2", {}, ["10.0.0.2:8470"]),
        ("grpc://a:1,grpc://b:2", {}, ["a:1", "b:2"]),
        ("grpc://[::1]:9,[::2]", {}, ["[::1]:9", "[::2]:8470"]),
        (None, {"KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS": "grpc://10.0.0.2:8470"}, ["10.0.0.2:8470"]),
        (None, {"TPU_NAME": "grpc://10.0.0.9:8470"}, ["10.0.0.9:8470"]),
        (None, {"TPU_WORKER_HOSTNAMES": "t-0,t-1"}, ["t-0:8470", "t-1:8470"]),
        (None, {"TPU_WORKER_HOSTNAMES": "w:0:10.0.0.2,w:1:10.0.0.3"},
         ["10.0.0.2:8470", "10.0.0.3:8470"]),
        ("my-tpu", {"TPU_WORKER_HOSTNAMES": "t-0,t-1"}, ["t-0:8470", "t-1:8470"]),
        (None, {"TPU_NAME": "my-tpu", "TPU_WORKER_HOSTNAMES": "t-0"}, ["t-0:8470"]),
        (None, {"TPU_PROCESS_ADDRESSES": "a:8476,a:8477", "TPU_WORKER_HOSTNAMES": "t"},
         ["a:8570", "a:8571"]),
    ],
)  # fmt: skip
def test_addresses(tpu, env, addresses):
    r = resolver(tpu, **env)
    assert r.cluster_spec().as_dict() == {"worker": addresses}
    assert r.master() == f"grpc://{addresses[0]}"
    assert r.master("worker", len(addresses) - 1, "") == addresses[-1]


def test_the_first_of_the_variables_counts():
    env = {
        "TPU_CONFIG": json.dumps({"tpu_node_name": "grpc://one:1"}),
        "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS": "grpc://two:2",
        "TPU_NAME": "grpc://three:3",
        "TPU_WORKER_HOSTNAMES": "four",
    }
    for variable, address in zip([*env], ["one:1", "two:2", "three:3", "four:8470"], strict=True):
        assert resolver(**env).cluster_spec().as_dict() == {"worker": [address]}
        assert resolver(**env).found.startswith(f"{variable}=")
        del env[variable]
    assert resolver("grpc://own:5", TPU_NAME="grpc://three:3").master() == "grpc://own:5"


@pytest.mark.parametrize("variable", ["TPU_WORKER_ID", "CLOUD_TPU_TASK_ID"])
def test_which_host_this_is(variable, monkeypatch):
    r = resolver(**{"TPU_WORKER_HOSTNAMES": "t-0,t-1", variable: "1"})
    assert r.task_id == 1
    assert r.master() == "grpc://t-1:8470"
    joined = []
    monkeypatch.setattr(runtime, "join", lambda r: joined.append(r) or "the job")
    assert r.join() == "the job"
    assert joined[0].cluster_spec().as_dict() == {"worker": ["t-0:8470", "t-1:8470"]}
    assert (joined[0].task_type, joined[0].task_id) == ("worker", 1)


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ({}, "0 to 1. Got nothing"),
        ({"TPU_WORKER_ID": "2"}, "0 to 1. Got 2"),
    ],
)
def test_not_knowing_which_host_this_is(env, told):
    r = resolver("grpc://a:1,b:2", **env)
    with pytest.raises(ValueError, match=f"TPU_WORKER_ID: expected the place .* the 2 .*{told}"):
        r.join()


def test_a_coordinator():
    r = TPUClusterResolver("grpc://a:1", coordinator_address="c:9", job_name="tpu", env={})
    assert r.cluster_spec().as_dict() == {"tpu": ["a:1"], "coordinator": ["c:9"]}
    assert r.get_job_name() == "tpu"
    r = TPUClusterResolver("grpc://a:1", None, None, "worker", "boss", "c:9", env={})
    assert r.cluster_spec().as_dict() == {"worker": ["a:1"], "boss": ["c:9"]}
    with pytest.raises(ValueError, match="expected coordinator_address with coordinator_name. Got"):
        TPUClusterResolver("local", coordinator_name="boss", env={})


def test_a_name_is_asked_for():
    api = Api(**READY)
    r = TPUClusterResolver("my-tpu", "europe-west4-a", "mine", service=api, env={})
    assert r.cluster_spec().as_dict() == {"worker": ["10.0.0.2:8470", "10.0.0.3:8470"]}
    assert r.master() == "grpc://10.0.0.2:8470"
    assert r.accelerator_type == "v3-8"
    assert api.asked == "projects/mine/locations/europe-west4-a/nodes/my-tpu"


def test_tpu_config_knows_zone_and_project():
    node = {"tpu_node_name": "n", "zone": "z", "project": "p"}
    api = Api(state="READY", ipAddress="10.0.0.2", port="8470")
    r = TPUClusterResolver(service=api, env={"TPU_CONFIG": json.dumps(node)})
    assert r.cluster_spec().as_dict() == {"worker": ["10.0.0.2:8470"]}
    assert api.asked == "projects/p/locations/z/nodes/n"


def test_a_name_without_zone_and_project():
    told = (
        r"ask the Cloud TPU API for the TPU 'my-tpu', since this is no TPU VM .*"
        r"TPU_WORKER_HOSTNAMES are not set\). Got no zone and no project. Pass them; or pass "
        "tpu='local'"
    )
    with pytest.raises(ValueError, match=told):
        resolver("my-tpu")


def test_a_tpu_that_is_not_ready():
    api = Api(state="PREEMPTED")
    r = TPUClusterResolver("my-tpu", "z", "p", service=api, env={})
    with pytest.raises(RuntimeError, match="to be READY. Got state 'PREEMPTED'. Wait for it"):
        r.cluster_spec()


def test_the_client_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "googleapiclient", None)
    with pytest.raises(ImportError, match="TPUClusterResolver: expected the package google-api-py"):
        TPUClusterResolver("my-tpu", "z", "p", env={})


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"tpu_node_name": 3}'])
def test_a_malformed_tpu_config(text):
    with pytest.raises(ValueError, match="TPU_CONFIG: expected a JSON object with the string tpu_"):
        resolver(TPU_CONFIG=text)


def test_a_malformed_host_number():
    with pytest.raises(ValueError, match="TPU_WORKER_ID: expected the place of this host .* 'one'"):
        resolver(TPU_WORKER_HOSTNAMES="a,b", TPU_WORKER_ID="one")


def test_no_string():
    with pytest.raises(TypeError, match=r"tpu: expected None, '', 'local', .* Got \['a'\]"):
        TPUClusterResolver(["a"], env={})


def test_what_else_the_environment_says():
    assert resolver(TPU_ACCELERATOR_TYPE="v5litepod-8").accelerator_type == "v5litepod-8"
    assert resolver().accelerator_type is None


def test_it_reads_the_environment_of_the_process(monkeypatch):
    monkeypatch.setenv("TPU_NAME", "grpc://here:1")
    assert TPUClusterResolver().master() == "grpc://here:1"


def test_connecting_another_cluster():
    told = "experimental_connect_to_cluster: expected a TPUClusterResolver. Got .*SimpleCluster"
    with pytest.raises(TypeError, match=told):
        config.experimental_connect_to_cluster(
            SimpleClusterResolver(resolver("grpc://a:1").cluster_spec())
        )
