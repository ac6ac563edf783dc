"""A Keras model's step, and its state in the order in which Keras' JAX trainer hands it over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stratagem import context


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


def traced_step(model: Any, kind: str, groups: Sequence[Sequence[Any]], batch: Any) -> Any:
    """The model's own step while it is traced: its state is taken from and given to the program.

    Args:
        model: as of `state_groups`.
        kind: likewise.
        groups: what that gave.
        batch: for the step.

    Returns:
        The step's logs, or predictions.
    """
    scope = context.current().trace.scope
    before = [[scope.local_value(v) for v in group] for group in groups]
    results, after = getattr(model, f"{kind}_step")(tuple(before), batch)
    if kind == "predict":  # gives back the non-trainable variables alone
        after = (before[0], after)
    for group, olds, news in zip(groups, before, after, strict=True):
        for variable, old, new in zip(group, olds, news, strict=True):
            if new is not old:
                scope.add_update((variable, new))
    return results
