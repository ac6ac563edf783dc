"""The names TensorFlow keeps under tf.distribute.cluster_resolver, and tf.train.ClusterSpec."""

from __future__ import annotations

from stratagem.cluster import ClusterResolver as ClusterResolver
from stratagem.cluster import ClusterSpec as ClusterSpec
from stratagem.cluster import GCEClusterResolver as GCEClusterResolver
from stratagem.cluster import KubernetesClusterResolver as KubernetesClusterResolver
from stratagem.cluster import KubernetesExecutableLocation as KubernetesExecutableLocation
from stratagem.cluster import SageMakerClusterResolver as SageMakerClusterResolver
from stratagem.cluster import SimpleClusterResolver as SimpleClusterResolver
from stratagem.cluster import SlurmClusterResolver as SlurmClusterResolver
from stratagem.cluster import TFConfigClusterResolver as TFConfigClusterResolver
from stratagem.cluster import TPUClusterResolver as TPUClusterResolver
from stratagem.cluster import UnionResolver as UnionResolver
