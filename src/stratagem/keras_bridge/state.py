"""The state of a Keras model in the order in which Keras' JAX trainer hands it to a step."""

from __future__ import annotations

from typing import Any


def state_groups(model: Any, kind: str) -> list[list[Any]]:
    """The variables behind the lists of a step's state.

    Args:
        model: compiled and built.
        kind: "train", "test" or "predict".
    """
    groups = [model.trainable_variables, model.non_trainable_variables]
    if kind == "train":
        groups.append(model.optimizer.variables)
    if kind != "predict":
        groups.append(model.metrics_variables)
    return [list(group) for group in groups]
