"""Who takes part in a job: the tasks, their addresses, and which of them this process is."""

from __future__ import annotations

from stratagem.cluster.abstract import ClusterResolver as ClusterResolver
from stratagem.cluster.gce import GCEClusterResolver as GCEClusterResolver
from stratagem.cluster.kubernetes import KubernetesClusterResolver as KubernetesClusterResolver
from stratagem.cluster.kubernetes import (
    KubernetesExecutableLocation as KubernetesExecutableLocation,
)
from stratagem.cluster.sagemaker import SageMakerClusterResolver as SageMakerClusterResolver
from stratagem.cluster.simple import SimpleClusterResolver as SimpleClusterResolver
from stratagem.cluster.slurm import SlurmClusterResolver as SlurmClusterResolver
from stratagem.cluster.spec import ClusterSpec as ClusterSpec
from stratagem.cluster.tf_config import TFConfigClusterResolver as TFConfigClusterResolver
from stratagem.cluster.tpu import TPUClusterResolver as TPUClusterResolver
from stratagem.cluster.union import UnionResolver as UnionResolver
