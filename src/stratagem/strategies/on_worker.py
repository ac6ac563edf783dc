"""What a dataset function finds on a worker in the place of its ParameterServerStrategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn


class OnWorker:
    """The strategy as a worker knows it: one that reads its own data, for one replica."""

    num_replicas_in_sync = 1

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[Any], Any], options: Any = None
    ) -> Callable[[Any], Any]:
        """The function, which the worker calls with an InputContext."""
        del options
        return dataset_fn

    experimental_distribute_datasets_from_function = distribute_datasets_from_function

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """The dataset, of which each worker reads all."""
        del options
        return dataset

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # what Python itself asks for
            raise AttributeError(name)
        raise AttributeError(
            f"Expected a dataset function that makes a dataset. Got one that uses strategy.{name} "
            "on a worker, where there is no coordinator. Take it out of the dataset function."
        )
