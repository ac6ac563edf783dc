"""The cluster as the pods of a Kubernetes cluster."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

from stratagem.cluster.abstract import ClusterResolver
from stratagem.cluster.spec import ClusterSpec

_DEFAULT_PODS = {"worker": ["job-name=tensorflow"]}
_RUNNING = "Running"


class KubernetesExecutableLocation(enum.Enum):
    """Where this process runs, and so where it finds the credentials of the API server."""

    WITHIN_CLUSTER = 0
    OFF_CLUSTER = 1


class KubernetesClusterResolver(ClusterResolver):
    """A resolver that asks Kubernetes for the pods of each job, at every call.

    A task's address is the IP of its pod's node and one port for all, so a node runs one task.
    It does not know which task this process is: set `task_type` and `task_id`.

    Args:
        job_to_label_mapping: job name -> label selectors of its pods; None:
            `{"worker": ["job-name=tensorflow"]}`. Pods are sorted by name within a selector.
        tf_server_port: the port that every task listens on.
        rpc_layer: the protocol that `master` puts in front of an address.
        override_client: a `kubernetes.client.CoreV1Api` with credentials; None: one is made.
        executable_location: where to take credentials from if a client is made: the service
            account of this pod, or the kube config of this user.

    Raises:
        ImportError: the package kubernetes is not installed, and no client is given.
        RuntimeError: there are no credentials where `executable_location` says.
        ValueError: `executable_location` is none.
    """

    def __init__(
        self,
        job_to_label_mapping: Mapping[str, Sequence[str]] | None = None,
        tf_server_port: int = 8470,
        rpc_layer: str | None = "grpc",
        override_client: Any = None,
        executable_location: KubernetesExecutableLocation = (
            KubernetesExecutableLocation.WITHIN_CLUSTER
        ),
    ) -> None:
        if not isinstance(executable_location, KubernetesExecutableLocation):
            raise ValueError(
                "executable_location: expected a KubernetesExecutableLocation, WITHIN_CLUSTER or "
                f"OFF_CLUSTER. Got {executable_location!r}."
            )
        self._selectors = dict(job_to_label_mapping or _DEFAULT_PODS)
        self._port = tf_server_port
        self._rpc_layer = rpc_layer
        self._client = override_client or _client(executable_location)

    def cluster_spec(self) -> ClusterSpec:
        """The tasks of the pods there are now.

        Raises:
            RuntimeError: pods are not running or share a node, or selectors match none; all of
                them are named.
        """
        cluster: dict[str, list[str]] = {}
        pods_on: dict[str, list[str]] = {}
        faults: list[str] = []
        for job, selectors in self._selectors.items():
            cluster[job] = []
            for selector in selectors:
                pods = self._client.list_pod_for_all_namespaces(label_selector=selector).items
                if not pods:
                    faults.append(f'No pod of job "{job}" matches the label selector "{selector}"')
                for pod in sorted(pods, key=lambda pod: pod.metadata.name):
                    name, phase = pod.metadata.name, pod.status.phase
                    if phase != _RUNNING:
                        faults.append(f'Pod "{name}" is not running; phase: "{phase}"')
                        continue
                    cluster[job].append(f"{pod.status.host_ip}:{self._port}")
                    pods_on.setdefault(pod.status.host_ip, []).append(name)
        faults += [
            f"Pods {' and '.join(pods)} share the node {node}, and so an address"
            for node, pods in pods_on.items()
            if len(pods) > 1
        ]
        if faults:
            raise RuntimeError(
                "Expected every task to have a running pod, on a node of its own. Got: "
                f"{'; '.join(faults)}. Wait for the pods, correct job_to_label_mapping, or give "
                "the pods an anti-affinity."
            )
        return ClusterSpec(cluster)


def _client(location: KubernetesExecutableLocation) -> Any:
    try:
        from kubernetes import client, config
    except ImportError as error:
        raise ImportError(
            "KubernetesClusterResolver: expected the package kubernetes, the official client. Got "
            f"{error}. Run pip install kubernetes, or pass override_client."
        ) from error
    within = location is KubernetesExecutableLocation.WITHIN_CLUSTER
    try:
        config.load_incluster_config() if within else config.load_kube_config()
    except config.ConfigException as error:
        where = "the service account of a pod" if within else "the kube config of this user"
        raise RuntimeError(
            f"KubernetesClusterResolver: expected credentials in {where} ({location}). Got: "
            f"{error}. Pass the other executable_location, or override_client."
        ) from error
    return client.CoreV1Api()
