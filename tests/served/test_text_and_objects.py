"""Datasets and arguments that no program can take, and dataset functions that cannot be sent."""

from __future__ import annotations

import jax.numpy as jnp
import keras
import numpy as np
import pytest

from stratagem.coordinator import ClusterCoordinator


def yields(*elements):
    return lambda: list(elements)


@pytest.mark.parametrize(
    ("dataset_fn", "error", "text"),
    [
        (lambda: None, TypeError, r"dataset_fn: expected a function that returns.*Got NoneType fr"),
        (lambda: {"x": [1]}, TypeError, "dataset_fn: .*Got dict from .*one batch alone in a list"),
        (yields(np.array(["a"])), TypeError, "Got batch of dtype <U1 in element 0.*StringLookup"),
        (yields({"x": object()}), TypeError, r"Got batch\['x'\] of type builtins.object in elem"),
        (yields(None), ValueError, "at least one array. Got None as element 0"),
    ],
)
def test_datasets_that_are_none(served, dataset_fn, error, text):
    coordinator = ClusterCoordinator(served(1, 1))
    with pytest.raises(error, match=text) as caught:
        iter(coordinator.create_per_worker_dataset(dataset_fn))
    assert "The dataset function ran on: worker 0 at" in caught.value.__notes__[-1]


def test_a_later_element_of_text(served):
    coordinator = ClusterCoordinator(served(1, 1))
    iterator = iter(coordinator.create_per_worker_dataset([np.ones(1), np.array(["a"])]))
    coordinator.schedule(lambda it: next(it), (iterator,)).fetch()
    with pytest.raises(TypeError, match="dtype <U1 in element 1 of the dataset"):
        coordinator.schedule(lambda it: next(it), (iterator,)).fetch()
    with pytest.raises(TypeError, match="dtype <U1 in element 1"):
        coordinator.join()


def test_dataset_functions_that_cannot_be_sent(served):
    strategy = served(1, 1)
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        variable = keras.Variable(1.0, name="count")
    helper = lambda: variable.numpy()  # noqa: E731
    for dataset_fn in (lambda: [variable.numpy()], lambda: [helper()]):
        with pytest.raises(
            TypeError, match=r"dataset_fn: .*which needs 'variable' \(RemoteVariable 'count'\): .*p"
        ):
            coordinator.create_per_worker_dataset(dataset_fn)
    with pytest.raises(TypeError, match="Got a generator: cannot pickle.*in the function"):
        coordinator.create_per_worker_dataset(x for x in [1])


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        (
            (np.array(["a"]),),
            {},
            r"args\[0\]: expected numbers or booleans. Got an array of dtype <U1",
        ),
        ((1, [np.array([{}])]), {}, r"args\[1\]\[0\]: .*dtype object. Turn it into numbers"),
        (
            (),
            {"k": np.array(["2020"], "datetime64[D]")},
            r"kwargs\['k'\]: .*datetime64\[D\].*times",
        ),
    ],
)
def test_arguments_that_are_no_numbers(served, args, kwargs, text):
    coordinator = ClusterCoordinator(served(1, 1))
    with pytest.raises(TypeError, match=text):
        coordinator.schedule(lambda *a, **k: jnp.ones(()), args, kwargs)
    strategy = coordinator.strategy
    dealt = iter(strategy.experimental_distribute_dataset([{"x": np.array(["a"])}]))
    with pytest.raises(TypeError, match=r"args\[0\].batch\['x'\]: expected numbers"):
        coordinator.schedule(lambda it: next(it), (dealt,))
    held = jnp.ones(2, jnp.bfloat16)
    assert coordinator.schedule(lambda x: x[0] + 1, (np.asarray(held),)).fetch() == 2
