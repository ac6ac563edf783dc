"""Kubernetes: a JobSet manifest (jobset.x-k8s.io/v1alpha2), one replicated job for each task type.

Kubernetes places the pods and JobSet restarts the group; both know what the local supervisor does:
a pod that leaves with 42 restarts the group without counting, any other failure counts against
`--max-restarts`. The coordination service has a pod of its own. The job is done when the chief is,
or without one all workers are; then Kubernetes ends the others.

With parameter servers no loss ends the others: Kubernetes starts a lost pod again, under its old
name. Their key comes from a Secret, named after the JobSet, and what they save goes to a volume
that the user adds to the manifest.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stratagem.cluster.keys import VARIABLE as KEY
from stratagem.cluster.roles import SERVING, TRAINERS
from stratagem.launcher.abstract import (
    ATTEMPT,
    COORDINATION,
    REHEARSE,
    SERVICE_MODULE,
    STATE_DIR,
    TF_CONFIG,
    UNBUFFERED,
    Job,
    Launcher,
    LaunchError,
    tf_config_text,
    write_text,
)
from stratagem.recovery.policy import PREEMPTED

PORT = 2222  # Of every pod: each has an address of its own.
_INDEX = "STRATAGEM_TASK_INDEX"
_SERVICE = "coordination"
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
# Names of pods, which hold the job's, may have 63 characters: name-coordination-0-0-abcde.
_LONGEST_NAME = 40


class KubernetesLauncher(Launcher):
    """Writes the manifest.

    Args:
        image: the container image, with Python, this package and the program.
        name: of the JobSet.
        path: where the manifest is written; None for standard output.
        state: where pods find the volume for snapshots and the journal; None where there is none.
    """

    def __init__(
        self,
        image: str,
        name: str = "stratagem",
        path: Path | None = None,
        state: Path | None = None,
    ) -> None:
        self._image, self._name, self._path, self._state = image, name, path, state

    def launch(self, job: Job) -> int:
        if len(self._name) > _LONGEST_NAME or _NAME.fullmatch(self._name) is None:
            raise LaunchError(
                f"--name: expected at most {_LONGEST_NAME} lower-case letters, digits and '-', a "
                f"letter first, for Kubernetes makes host names of it. Got {self._name!r}."
            )
        write_text(to_yaml(manifest(job, self._image, self._name, self._state)), self._path)
        if job.servers:
            sys.stderr.write(
                "stratagem run: the pods wait for a Secret with their key. Once for each job: "
                f"openssl rand -hex 32 | kubectl create secret generic {_secret(self._name)} "
                f"--from-file={KEY}=/dev/stdin\n"
            )
        return 0


def manifest(job: Job, image: str, name: str, state: Path | None = None) -> dict[str, Any]:
    """The JobSet, as the JSON object that the API server takes."""
    cluster = {
        kind: [f"{_host(name, kind, index)}:{PORT}" for index in range(count)]
        for kind, count in job.counts().items()
    }
    jobs = [
        _replicated_job(kind, count, _task_container(job, kind, image, cluster, name, state), job)
        for kind, count in job.counts().items()
    ]
    if job.coordinated:
        service = ["python", "-m", SERVICE_MODULE, f"0.0.0.0:{PORT}", str(job.trainers)]
        container = {"name": _SERVICE, "image": image, "command": service, "ports": [_port()]}
        jobs.append(_replicated_job(_SERVICE, 1, container, job))
    # With servers the workers serve too, until the chief is done.
    decisive = ["chief"] if job.servers else [k for k in TRAINERS if k in job.counts()]
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            # Pods look for each other by name before all are ready.
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": decisive},
            "failurePolicy": _failure_policy(job),
            "replicatedJobs": jobs,
        },
    }


def to_yaml(manifest: Mapping[str, Any]) -> str:
    """The manifest as text.

    Raises:
        LaunchError: PyYAML is missing.
    """
    try:
        import yaml
    except ImportError as error:
        raise LaunchError(
            "--on kubernetes: expected the package PyYAML. Got none. Run pip install "
            "'stratagem[kubernetes]'."
        ) from error
    text: str = yaml.safe_dump(dict(manifest), sort_keys=False, width=1000)
    return text


def _failure_policy(job: Job) -> dict[str, Any]:
    if job.servers:  # Each pod is started again alone; see `_restarts`.
        return {"maxRestarts": 0}
    policy: dict[str, Any] = {"maxRestarts": job.limits.max_restarts}
    if job.limits.max_restarts:
        # The rule of `_replicated_job`: a pod has left with 42.
        policy["rules"] = [
            {
                "action": "RestartJobSetAndIgnoreMaxRestarts",
                "onJobFailureReasons": ["PodFailurePolicy"],
            }
        ]
    return policy


def _replicated_job(
    kind: str, count: int, container: Mapping[str, Any], job: Job
) -> dict[str, Any]:
    restarts = _restarts(job, kind)
    preempted = {
        "action": "Ignore" if restarts.get("backoffLimitPerIndex") else "FailJob",
        "onExitCodes": {
            "containerName": container["name"],
            "operator": "In",
            "values": [PREEMPTED],
        },
    }
    return {
        "name": kind,
        "replicas": 1,
        "template": {
            "spec": {
                "completionMode": "Indexed",
                "completions": count,
                "parallelism": count,
                **restarts,
                "podFailurePolicy": {"rules": [preempted]},
                "template": {
                    "spec": {
                        "restartPolicy": "Never",
                        "terminationGracePeriodSeconds": round(job.grace_seconds),
                        "containers": [dict(container)],
                    }
                },
            }
        },
    }


def _restarts(job: Job, kind: str) -> dict[str, int]:
    """How often Kubernetes starts a failed pod again, before its failure is that of the job."""
    if not job.servers:
        return {"backoffLimit": 0}  # A pod that fails fails the group, which JobSet restarts.
    limits = job.limits
    each = limits.task_restarts if kind in SERVING else limits.max_restarts
    return {"backoffLimitPerIndex": each, "maxFailedIndexes": 0}


def _task_container(
    job: Job,
    kind: str,
    image: str,
    cluster: Mapping[str, list[str]],
    name: str,
    state: Path | None,
) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": "task",
        "image": image,
        "command": ["python", *job.program_of(kind)],
        "env": _environment(job, kind, cluster, name, state),
        "ports": [_port()],
    }
    if job.gpus_per_worker is not None and job.computes(kind):
        container["resources"] = {"limits": {"nvidia.com/gpu": job.gpus_per_worker}}
    return container


def _environment(
    job: Job, kind: str, cluster: Mapping[str, list[str]], name: str, state: Path | None
) -> list[dict[str, Any]]:
    attempt = "jobset.sigs.k8s.io/restart-attempt"
    variables = [
        _field(_INDEX, "batch.kubernetes.io/job-completion-index"),
        _field(ATTEMPT, "batch.kubernetes.io/job-index-failure-count" if job.servers else attempt),
        # Kubernetes puts in the variables that stand above.
        {"name": TF_CONFIG, "value": tf_config_text(cluster, kind, f"$({_INDEX})")},
        {"name": UNBUFFERED, "value": "1"},
    ]
    if job.coordinated and kind in TRAINERS:
        address = f"{_host(name, _SERVICE, 0)}:{PORT}"
        variables.append({"name": COORDINATION, "value": address})
    if job.servers:
        reference = {"secretKeyRef": {"name": _secret(name), "key": KEY}}
        variables.append({"name": KEY, "valueFrom": reference})
    if state is not None:
        variables.append({"name": STATE_DIR, "value": str(state)})
    if job.devices_per_worker is not None:
        variables.append({"name": REHEARSE, "value": f"cpu:{job.devices_per_worker}"})
    return variables


def _host(name: str, kind: str, index: int) -> str:
    """The name that JobSet gives a pod: set, replicated job, its replica, pod; and a subdomain."""
    return f"{name}-{kind}-0-{index}.{name}"


def _secret(name: str) -> str:
    return f"{name}-key"


def _field(variable: str, annotation: str) -> dict[str, Any]:
    path = f"metadata.annotations['{annotation}']"
    return {"name": variable, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _port() -> dict[str, int]:
    return {"containerPort": PORT}
