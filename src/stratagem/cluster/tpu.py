"""The hosts of a TPU slice, from an address, the environment or the Cloud TPU API."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from stratagem import config
from stratagem.cluster import runtime, tpu_metadata
from stratagem.cluster.abstract import ClusterResolver
from stratagem.cluster.gce import google_service
from stratagem.cluster.simple import SimpleClusterResolver
from stratagem.cluster.spec import ClusterSpec
from stratagem.tpu.experimental import initialize_tpu_system

_NODE = "TPU_CONFIG"  # Cloud TPU nodes: JSON with tpu_node_name, project and zone
_ENDPOINTS = "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS"  # GKE with TPU nodes
_NAME = "TPU_NAME"
# TPU VMs, also those of GKE: what libtpu itself reads, the first before the second.
_HOSTS = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")
_HOST_NUMBER = ("TPU_WORKER_ID", "CLOUD_TPU_TASK_ID")
_TYPE = "TPU_ACCELERATOR_TYPE"

_LOCAL = "local"
_LAYER = "grpc"
_PORT = "8470"
_OWN_PORT = 8570  # the first for processes that share a host
_SCOPES = ("https://www.googleapis.com/auth/cloud-platform",)


class TPUClusterResolver(ClusterResolver):
    """A resolver for the hosts that drive the chips of one TPU slice.

    JAX drives the chips of the machine that a process runs on, so the program runs on every host
    of the slice; nothing connects to an address from elsewhere.

    Args:
        tpu: `"local"`, the TPUs of this machine; `"grpc://host:port"`, several with commas; or a
            name, which means this slice on a TPU VM, and is asked of the Cloud TPU API elsewhere.
            None or `""` looks for TPU_CONFIG, KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS, TPU_NAME,
            TPU_PROCESS_ADDRESSES and TPU_WORKER_HOSTNAMES, in this order, then asks the metadata
            server of a Cloud TPU VM; else it is `"local"`.
        zone: of the named TPU.
        project: of the named TPU.
        job_name: the job of the hosts.
        coordinator_name: the job of a coordinator that is to be in `cluster_spec` too; None:
            `"coordinator"`.
        coordinator_address: its address; None for no coordinator.
        credentials: of Google's auth library; `"default"` for the application default ones.
        service: what `googleapiclient.discovery.build("tpu", "v1")` gives; None: it is made.
        discovery_url: where the API describes itself, `"file://..."` for a local copy.
        env: the environment variables; None for those of this process.

    Raises:
        TypeError: `tpu` is no string.
        ValueError: a variable is malformed; a coordinator has a name and no address; or a name is
            to be asked for without zone and project.
        ImportError: a name is to be asked for without google-api-python-client and without service.
    """

    def __init__(
        self,
        tpu: str | None = None,
        zone: str | None = None,
        project: str | None = None,
        job_name: str = "worker",
        coordinator_name: str | None = None,
        coordinator_address: str | None = None,
        credentials: Any = "default",
        service: Any = None,
        discovery_url: str | None = None,
        *,
        env: Mapping[str, str] | None = None,
    ) -> None:
        if tpu is not None and not isinstance(tpu, str):
            raise TypeError(
                "tpu: expected None, '', 'local', the name of a TPU or 'grpc://host:port'. Got "
                f"{tpu!r}."
            )
        if coordinator_name and not coordinator_address:
            raise ValueError(
                "TPUClusterResolver: expected coordinator_address with coordinator_name. Got the "
                f"name {coordinator_name!r} alone."
            )
        self._env = config.environment() if env is None else env
        self._coordinator = (
            {coordinator_name or "coordinator": [coordinator_address]}
            if coordinator_address
            else {}
        )
        self._task_type: str = job_name
        self._rpc_layer = _LAYER
        self._place = _find(tpu, self._env)
        self._node: _Node | None = None
        if self._place.name:
            name = _full_name(self._place, zone, project)
            options = {"discoveryServiceUrl": discovery_url} if discovery_url else {}
            self._node = _Node(name, service or google_service(
                type(self).__name__, "tpu", "v1", credentials, _SCOPES, **options
            ))  # fmt: skip
        self._task_id = self._place.number

    @staticmethod
    def connect(
        tpu: str | None = None, zone: str | None = None, project: str | None = None
    ) -> TPUClusterResolver:
        """A resolver, after this process has joined its slice and found its cores.

        Raises:
            RuntimeError: there are no TPUs in this process. For other errors see the constructor.
        """
        resolver = TPUClusterResolver(tpu, zone, project)
        resolver.join()
        initialize_tpu_system(resolver)
        return resolver

    def cluster_spec(self) -> ClusterSpec:
        """The hosts as tasks of one job; empty for the TPUs of this machine alone.

        Raises:
            RuntimeError: the API says that the named TPU is not ready.
        """
        hosts = self._hosts()
        return ClusterSpec({self._task_type: hosts} | self._coordinator if hosts else {})

    def _hosts(self) -> list[str]:
        return list(self._place.hosts) if self._node is None else self._node.endpoints()

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """The address of a host, this one by default; `""` for the TPUs of this machine alone."""
        return super().master(task_type, task_id, rpc_layer) if self._hosts() else ""

    def get_master(self) -> str:
        """`master()`."""
        return self.master()

    def get_job_name(self) -> str:
        """The job of the hosts."""
        return self._task_type

    def join(self) -> runtime.Job | None:
        """Joins the job of the slice's hosts; every host calls it, before it uses JAX.

        It is what `experimental_connect_to_cluster` does, and TPUStrategy where that was not
        called. A second call gives the same job.

        Returns:
            The job; None for one host.

        Raises:
            ValueError: the environment does not say which of several hosts this is.
            For other errors see `runtime.join`.
        """
        return runtime.join(self.workers())

    def workers(self) -> ClusterResolver:
        """The slice as a job that trains: a worker for each of several hosts, else no task.

        Raises:
            ValueError: as `join`.
        """
        hosts, place = self._hosts(), self._place
        if len(hosts) < 2:
            return SimpleClusterResolver(ClusterSpec({}))
        if not (place.numbered and place.number < len(hosts)):
            raise ValueError(
                f"{_HOST_NUMBER[0]}: expected the place of this host among the {len(hosts)} of the "
                f"slice, 0 to {len(hosts) - 1}. Got {place.number if place.numbered else 'nothing'}"
                ". TPU VMs set it; set it on each host of your own."
            )
        return SimpleClusterResolver(ClusterSpec({"worker": hosts}), "", "worker", place.number)

    @property
    def accelerator_type(self) -> str | None:
        """The like of `"v5litepod-8"`, as a TPU VM or the API says it; None where neither does."""
        if self._node is not None:
            return self._node.accelerator_type()
        return self._env.get(_TYPE, self._place.accelerator)

    @property
    def found(self) -> str:
        """Where the hosts come from, for error texts."""
        return self._place.how


@dataclasses.dataclass(frozen=True)
class _Place:
    """What is known about a slice without asking anyone.

    Attributes:
        how: where it is from, in words.
        hosts: addresses with ports.
        name: of the TPU to ask the API for, else "".
        number: the place of this host among the hosts; 0 unless `numbered`.
        accelerator: type of the slice, where that is said with the rest.
    """

    how: str
    hosts: tuple[str, ...] = ()
    name: str = ""
    zone: str | None = None
    project: str | None = None
    number: int = 0
    numbered: bool = False
    accelerator: str | None = None


def _find(tpu: str | None, env: Mapping[str, str]) -> _Place:
    if tpu:
        return _named(tpu, f"tpu={tpu!r}", env)
    if _NODE in env:
        node = _json(env[_NODE])
        return _named(
            node["tpu_node_name"], f"{_NODE}={env[_NODE]}", env, node.get("zone"),
            node.get("project"),
        )  # fmt: skip
    for variable in (_ENDPOINTS, _NAME):
        if env.get(variable):
            return _named(env[variable], f"{variable}={env[variable]}", env)
    if vm := _vm(env):
        return vm
    none = ", ".join((_NODE, _ENDPOINTS, _NAME, *_HOSTS))
    return _Place(f"none of {none} in the environment, so the TPUs of this machine alone")


def _named(
    tpu: str, how: str, env: Mapping[str, str], zone: str | None = None, project: str | None = None
) -> _Place:
    if tpu == _LOCAL:
        return _Place(f"{how}, the TPUs of this machine alone")
    if tpu.startswith(f"{_LAYER}://"):
        hosts = tuple(_address(e.strip().removeprefix(f"{_LAYER}://")) for e in tpu.split(","))
        return _Place(how, hosts, **_number(env))
    if vm := _vm(env):
        return dataclasses.replace(vm, how=f"{how}, on a TPU VM with {vm.how}")
    return _Place(how, name=tpu, zone=zone, project=project, **_number(env))


def _vm(env: Mapping[str, str]) -> _Place | None:
    """The slice of the TPU VM that this is, else None."""
    for variable in _HOSTS:
        if text := env.get(variable, "").strip():
            names = [host.strip() for host in text.split(",")]
            if variable == _HOSTS[0]:  # the ports there are libtpu's
                names = [f"{n.rpartition(':')[0]}:{_OWN_PORT + i}" for i, n in enumerate(names)]
            hosts = tuple(map(_address, names))
            return _Place(f"{variable}={text}", hosts, **_number(env))
    said = tpu_metadata.read(env)
    if text := said.get(tpu_metadata.ENDPOINTS, ""):
        hosts = tuple(_address(host.strip()) for host in text.split(","))
        how = f"{tpu_metadata.ENDPOINTS}={text} of the metadata server"
        number = _number(said, (tpu_metadata.NUMBER,))
        return _Place(how, hosts, accelerator=said.get(tpu_metadata.TYPE), **number)
    return None


def _address(text: str) -> str:
    """`"host:port"` of a host, an address, or the `name:id:ip` of older TPU VMs."""
    parts = text.split(":")
    if len(parts) == 3 and "[" not in text:
        return f"{parts[2]}:{_PORT}"
    return text if ":" in text.rpartition("]")[2] else f"{text}:{_PORT}"


def _number(said: Mapping[str, str], names: Sequence[str] = _HOST_NUMBER) -> dict[str, Any]:
    for variable in names:
        if text := said.get(variable, "").strip():
            if not text.isdecimal():
                raise ValueError(
                    f"{variable}: expected the place of this host in the slice, counted from 0. "
                    f"Got {text!r}."
                )
            return {"number": int(text), "numbered": True}
    return {}


def _json(text: str) -> dict[str, Any]:
    try:
        node = json.loads(text)
    except json.JSONDecodeError:
        node = None
    if not isinstance(node, dict) or not isinstance(node.get("tpu_node_name"), str):
        raise ValueError(
            f"{_NODE}: expected a JSON object with the string tpu_node_name, and maybe project "
            f"and zone. Got {text!r}."
        )
    return node


def _full_name(place: _Place, zone: str | None, project: str | None) -> str:
    zone, project = zone or place.zone, project or place.project
    missing = [what for what, value in (("zone", zone), ("project", project)) if not value]
    if missing:
        raise ValueError(
            "TPUClusterResolver: expected zone and project to ask the Cloud TPU API for the TPU "
            f"{place.name!r}, since this is no TPU VM ({' and '.join(_HOSTS)} are not set). Got no "
            f"{' and no '.join(missing)}. Pass them; or pass tpu='local' for the TPUs of this "
            "machine."
        )
    return f"projects/{project}/locations/{zone}/nodes/{place.name}"


class _Node:
    """A TPU that the Cloud TPU API knows by its full name."""

    def __init__(self, name: str, service: Any):
        self._name = name
        self._service = service

    def endpoints(self) -> list[str]:
        """The hosts' addresses.

        Raises:
            RuntimeError: it is not ready.
        """
        node = self._ask()
        if node.get("state") != "READY":
            raise RuntimeError(
                f"Expected TPU {self._name!r} to be READY. Got state {node.get('state')!r}. Wait "
                "for it, or make it anew if it was preempted."
            )
        endpoints = node.get("networkEndpoints") or [node]
        return [f"{e['ipAddress']}:{e.get('port', _PORT)}" for e in endpoints]

    def accelerator_type(self) -> str | None:
        return self._ask().get("acceleratorType")

    def _ask(self) -> dict[str, Any]:
        nodes = self._service.projects().locations().nodes()
        return nodes.get(name=self._name).execute()
