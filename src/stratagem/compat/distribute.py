"""tf.distribute: the package's own names, looked up when they are asked for."""

from __future__ import annotations

from typing import Any

import stratagem
from stratagem import train
from stratagem.compat.namespace import MISSING, Namespace, first_of

_EXPERIMENTAL = (  # strategies that TensorFlow keeps in both places, or moved
    "CentralStorageStrategy",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "TPUStrategy",
)


def _part(*path: str) -> Any:
    """A lookup in a module of the package that this version may not have."""

    def look_up(name: str) -> Any:
        module: Any = stratagem
        for part in path:
            module = getattr(module, part, MISSING)
            if module is MISSING:
                return MISSING
        return first_of(module)(name)

    return look_up


def _experimental(name: str) -> Any:
    found = _part("experimental")(name)
    if found is MISSING and name in _EXPERIMENTAL:
        return first_of(stratagem)(name)
    return found


NAMESPACE = Namespace(
    "distribute",
    {
        "experimental": Namespace(
            "distribute.experimental",
            {
                "coordinator": Namespace(
                    "distribute.experimental.coordinator", {}, _part("coordinator")
                ),
                "partitioners": Namespace(
                    "distribute.experimental.partitioners",
                    {},
                    _part("experimental", "partitioners"),
                ),
            },
            elsewhere=_experimental,
        ),
        "coordinator": Namespace("distribute.coordinator", {}, _part("coordinator")),
        "cluster_resolver": stratagem.cluster_resolver,
    },
    elsewhere=first_of(stratagem),
)

TPU = Namespace(
    "tpu",
    {"experimental": Namespace("tpu.experimental", {}, _part("tpu", "experimental"))},
    elsewhere=_part("tpu"),
)
TYPES = Namespace(
    "types",
    {
        "experimental": Namespace(
            "types.experimental",
            {
                "distributed": Namespace(
                    "types.experimental.distributed",
                    {"PerReplica": stratagem.PerReplica, "Mirrored": stratagem.Mirrored},
                )
            },
        )
    },
)
TRAIN = Namespace(
    "train",
    {"ClusterSpec": stratagem.cluster_resolver.ClusterSpec},
    elsewhere=first_of(train),
)
ERRORS = Namespace("errors", {}, elsewhere=_part("errors"))


def add_to(keras: Any) -> None:
    """Gives `tf.keras` the names that Keras 2 has for parameter servers, and Keras 3 has not.

    Args:
        keras: the namespace of Keras 3 for programs of TensorFlow.
    """
    utils = stratagem.utils
    keras.utils.experimental = Namespace(
        "keras.utils.experimental", {"DatasetCreator": utils.DatasetCreator}
    )
    keras.utils.SidecarEvaluator = utils.SidecarEvaluator
    keras.callbacks.SidecarEvaluatorModelExport = utils.SidecarEvaluatorModelExport
