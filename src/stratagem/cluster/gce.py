"""The cluster as an instance group of the Google Compute Engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stratagem.cluster.abstract import ClusterResolver
from stratagem.cluster.spec import ClusterSpec

_SCOPES = ("https://www.googleapis.com/auth/compute.readonly",)


class GCEClusterResolver(ClusterResolver):
    """A resolver that asks Compute Engine for the running instances of a group, at every call.

    Args:
        project: the project's name.
        zone: the zone of the instance group.
        instance_group: its name. All its instances are tasks of one job.
        port: the port that every task listens on.
        task_type: the name of that job; it cannot be changed.
        task_id: the index of this process in it, another one on each instance.
        rpc_layer: the protocol that `master` puts in front of an address.
        credentials: of Google's auth library; `"default"` for the application default ones.
        service: what `googleapiclient.discovery.build("compute", "v1")` gives; None: it is made.

    Raises:
        ImportError: the package google-api-python-client is not installed, and no service given.
    """

    def __init__(
        self,
        project: str,
        zone: str,
        instance_group: str,
        port: int,
        task_type: str = "worker",
        task_id: int = 0,
        rpc_layer: str | None = "grpc",
        credentials: Any = "default",
        service: Any = None,
    ) -> None:
        self._project = project
        self._zone = zone
        self._instance_group = instance_group
        self._port = port
        self._task_type: str = task_type
        self._task_id = task_id
        self._rpc_layer = rpc_layer
        self._service = (
            google_service("GCEClusterResolver", "compute", "v1", credentials, _SCOPES)
            if service is None
            else service
        )

    @property
    def task_type(self) -> str:
        """The job of this process, as it was given at the start."""
        return self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        raise RuntimeError(
            "GCEClusterResolver: expected task_type in the constructor, for it names the job of "
            f"all instances. Got {task_type!r} afterwards. Make another resolver."
        )

    def cluster_spec(self) -> ClusterSpec:
        """The tasks of the instances that run now, sorted by address.

        Raises:
            RuntimeError: none runs.
        """
        groups = self._service.instanceGroups()
        request = groups.listInstances(
            project=self._project,
            zone=self._zone,
            instanceGroup=self._instance_group,
            body={"instanceState": "RUNNING"},
            orderBy="name",
        )
        addresses: list[str] = []
        while request is not None:
            response = request.execute()
            # A page without instances has no items.
            addresses += [self._address(entry["instance"]) for entry in response.get("items", ())]
            request = groups.listInstances_next(
                previous_request=request, previous_response=response
            )
        if not addresses:
            raise RuntimeError(
                f"Expected running instances in the group {self._instance_group!r} (project "
                f"{self._project!r}, zone {self._zone!r}). Got none. Wait for them, or correct the "
                "names."
            )
        return ClusterSpec({self._task_type: sorted(addresses)})

    def _address(self, url: str) -> str:
        instance = url.rpartition("/")[2]
        request = self._service.instances().get(
            project=self._project, zone=self._zone, instance=instance
        )
        return f"{request.execute()['networkInterfaces'][0]['networkIP']}:{self._port}"


def google_service(
    asked_by: str, api: str, version: str, credentials: Any, scopes: Sequence[str], **options: Any
) -> Any:
    """A client of a Google Cloud API.

    Args:
        asked_by: the class that needs it, for the error.
        api: its name.
        version: of the API.
        credentials: of Google's auth library; `"default"` for the application default ones.
        scopes: what the default credentials are for.
        **options: passed on to `googleapiclient.discovery.build`.

    Raises:
        ImportError: the package google-api-python-client is not installed.
    """
    try:
        import google.auth
        from googleapiclient import discovery
    except ImportError as error:
        raise ImportError(
            f"{asked_by}: expected the package google-api-python-client. Got "
            f"{error}. Run pip install google-api-python-client, or pass service."
        ) from error
    if credentials == "default":
        credentials, _ = google.auth.default(scopes=scopes)
    return discovery.build(api, version, credentials=credentials, **options)
