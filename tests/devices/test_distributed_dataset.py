"""What replicas are given: rows, devices, dtypes, specs, and the iterator's behaviour."""

from __future__ import annotations

import logging
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stratagem import context
from stratagem.data import (
    AutoShardPolicy,
    DistributedDataset,
    InputContext,
    InputOptions,
    InputReplicationMode,
    PerReplicaSpec,
    TensorSpec,
    ValueContext,
    batches,
    distribute_dataset,
    distribute_from_function,
    values_from_function,
    with_options,
)
from stratagem.errors import OutOfRangeError
from stratagem.values import PerReplica

POLICIES = list(AutoShardPolicy)


def mesh(replicas: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:replicas]), ("replica",))


def numbers(count: int, size: int, **kwargs):
    return batches(np.arange(count, dtype=np.int32), size, **kwargs)


def parts(value) -> list:
    """One list of rows a replica."""
    values = value.values if isinstance(value, PerReplica) else (value,)
    return [np.asarray(v).tolist() for v in values]


def steps(dataset: DistributedDataset) -> list:
    return [parts(element) for element in dataset]


# --- Rows: reference rows 32 to 34, R34, R01 ---


def test_row_32():
    dataset = distribute_dataset(numbers(7, 4), mesh=mesh(2))
    assert steps(dataset) == [[[0, 1], [2, 3]], [[4, 5], [6]]]


def test_row_33():
    dataset = distribute_dataset(numbers(5, 4), mesh=mesh(2))
    assert steps(dataset) == [[[0, 1], [2, 3]], [[4], []]]


@pytest.mark.parametrize(
    ("policy", "first"),
    [
        (AutoShardPolicy.AUTO, [[0, 1], [2, 3], []]),
        (AutoShardPolicy.DATA, [[0, 1], [2, 3], []]),
        (AutoShardPolicy.OFF, [[0, 1], [2], [3]]),
        (AutoShardPolicy.FILE, [[0, 1], [2], [3]]),
        (AutoShardPolicy.HINT, [[0, 1], [2], [3]]),
    ],
)
def test_row_34(policy, first):
    dataset = with_options(numbers(8, 4), auto_shard_policy=policy)
    assert next(iter(distribute_dataset(dataset, mesh=mesh(3)))).values[0].tolist() == first[0]
    assert steps(distribute_dataset(dataset, mesh=mesh(3)))[0] == first


def test_row_35_means_of_uneven_steps():
    dataset = distribute_dataset(numbers(5, 4), mesh=mesh(2))
    assert [np.mean(sum(step, [])) for step in steps(dataset)] == [1.5, 4.0]


@pytest.mark.parametrize("policy", POLICIES)
def test_r34_every_number_once_under_every_policy(policy):
    dataset = with_options(numbers(10, 3), auto_shard_policy=policy)
    assert steps(distribute_dataset(dataset, mesh=mesh(2))) == [
        [[0, 1], [2]], [[3, 4], [5]], [[6, 7], [8]], [[9], []],
    ]  # fmt: skip


@settings(max_examples=30)
@given(st.integers(1, 30), st.integers(1, 12), st.integers(1, 8), st.sampled_from(POLICIES))
def test_every_row_once_and_in_order(rows, size, replicas, policy):
    dataset = with_options(numbers(rows, size), auto_shard_policy=policy)
    got = steps(distribute_dataset(dataset, mesh=mesh(replicas)))
    assert [r for step in got for part in step for r in part] == list(range(rows))
    for step in got:
        share = -(-sum(map(len, step)) // replicas)
        assert len(step) == replicas
        assert max(map(len, step)) <= share


def test_smaller_last_batch_under_off_is_dealt_evenly():
    # On purpose not as TF, which gives [4, 5] and []: no replica gets more than ceil(rows / N).
    dataset = with_options(numbers(6, 4), auto_shard_policy=AutoShardPolicy.OFF)
    assert steps(distribute_dataset(dataset, mesh=mesh(2)))[-1] == [[4], [5]]


# --- Placement ---


@pytest.mark.parametrize("shape", [(8,), (8, 3), (4096, 7), (0 + 8, 33, 33)])
def test_even_parts_are_one_array_laid_out_over_the_replicas(shape):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    m = mesh(4)
    (value,) = distribute_dataset([x], mesh=m)
    assert value.stacked.shape == (4, shape[0] // 4, *shape[1:])
    assert value.stacked.sharding == NamedSharding(m, PartitionSpec("replica"))
    np.testing.assert_array_equal(np.asarray(value.stacked).reshape(shape), x)
    for part, device in zip(value.values, jax.devices(), strict=False):
        assert part.devices() == {device}


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_uneven_and_empty_parts_lie_on_their_devices(make):
    x = make(np.arange(20, dtype=np.float32).reshape(5, 4))
    (value,) = distribute_dataset([x], mesh=mesh(4))
    assert value.stacked is None
    assert [part.shape for part in value.values] == [(2, 4), (2, 4), (1, 4), (0, 4)]
    assert [part.devices() for part in value.values] == [{d} for d in jax.devices()[:4]]
    np.testing.assert_array_equal(np.concatenate([np.asarray(p) for p in value.values]), x)


def test_jax_arrays_stay_arrays():
    (value,) = distribute_dataset([jnp.arange(8)], mesh=mesh(2))
    assert value.stacked.shape == (2, 4)
    (plain,) = distribute_dataset([jnp.arange(8)], mesh=mesh(1))
    assert isinstance(plain, jax.Array)


def test_one_replica_sees_plain_arrays_on_its_device():
    m = Mesh(np.array(jax.devices()[3:4]), ("replica",))
    x, y = next(iter(distribute_dataset([(np.ones((4, 2)), np.arange(4))], mesh=m)))
    assert isinstance(x, jax.Array)
    assert x.devices() == y.devices() == {jax.devices()[3]}


@pytest.mark.parametrize("shape", [(8, 4), (512, 256)])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_reused_buffer_does_not_change_batches_handed_out(shape, replicas):
    buffer = np.zeros(shape, np.float32)

    def reuse():
        for value in range(3):
            buffer[:] = value
            yield buffer

    got = list(distribute_dataset(reuse, mesh=mesh(replicas)))
    for value, element in enumerate(got):
        for part in parts(element):
            assert np.all(np.asarray(part) == value)


@pytest.mark.parametrize(
    ("given_dtype", "held"),
    [
        (np.float64, np.float32), (np.int64, np.int32), (np.uint64, np.uint32),
        (np.complex128, np.complex64), (np.uint8, np.uint8), (np.bool_, np.bool_),
        (np.float16, np.float16), (jnp.bfloat16, jnp.bfloat16), (np.int8, np.int8),
    ],
)  # fmt: skip
@pytest.mark.parametrize("rows", [4, 3])
def test_dtypes(given_dtype, held, rows):
    (value,) = distribute_dataset([np.ones((rows, 2), given_dtype)], mesh=mesh(2))
    assert [part.dtype for part in value.values] == [held, held]


def test_integers_that_do_not_fit_are_an_error():
    dataset = distribute_dataset([np.array([1, 2**40])], mesh=mesh(2))
    with pytest.raises(ValueError, match=r"fit int32.*between 1 and 1099511627776 of dtype int64"):
        next(iter(dataset))


def test_without_fetching_parts_stay_on_the_host():
    options = InputOptions(experimental_fetch_to_device=False)
    for rows in (4, 3):
        (value,) = distribute_dataset([jnp.ones((rows, 2))], mesh=mesh(2), options=options)
        assert all(isinstance(part, np.ndarray) for part in value.values)


def test_structures_are_kept():
    batch = {"x": (np.ones((4, 2)), None), "y": [np.arange(4)]}
    (got,) = distribute_dataset([batch], mesh=mesh(2))
    assert got["x"][1] is None
    assert parts(got["y"][0]) == [[0, 1], [2, 3]]


def test_mesh_with_other_axes():
    with pytest.raises(ValueError, match=r"one axis 'replica'. Got axes \('data',\)"):
        distribute_dataset([], mesh=Mesh(np.array(jax.devices()[:2]), ("data",)))


# --- Iteration: reference row 38 ---


def test_row_38_past_the_end():
    iterator = iter(distribute_dataset(numbers(4, 4), mesh=mesh(2)))
    assert iterator.get_next_as_optional().has_value() is True
    with pytest.raises(OutOfRangeError, match="end of the dataset after 1 steps"):
        iterator.get_next()
    with pytest.raises(StopIteration):
        next(iterator)
    end = iterator.get_next_as_optional()
    assert end.has_value() is False
    with pytest.raises(OutOfRangeError, match="has_value"):
        end.get_value()


def test_optional_value_and_get_next():
    iterator = iter(distribute_dataset(numbers(8, 4), mesh=mesh(2)))
    assert parts(iterator.get_next_as_optional().get_value()) == [[0, 1], [2, 3]]
    assert parts(iterator.get_next()) == [[4, 5], [6, 7]]


def test_iterated_again_it_starts_again():
    dataset = distribute_dataset(numbers(7, 4), mesh=mesh(2))
    assert steps(dataset) == steps(dataset)


def test_a_generator_is_read_once():
    dataset = distribute_dataset((np.arange(4) for _ in range(2)), mesh=mesh(2))
    assert len(steps(dataset)) == 2
    with pytest.raises(RuntimeError, match="Got a generator, which gives its elements once"):
        iter(dataset)


def test_reduce_and_no_len():
    dataset = distribute_dataset(numbers(7, 4), mesh=mesh(2))
    assert dataset.reduce(0, lambda total, element: total + sum(map(sum, parts(element)))) == 21
    with pytest.raises(TypeError, match="len"):
        len(dataset)


@pytest.mark.parametrize(
    ("dataset", "steps_known"),
    [
        (numbers(7, 4), 2),
        (numbers(7, 4, drop_remainder=True), 1),
        ([np.ones(2)] * 3, 3),
        (lambda: iter([np.ones(2)]), None),
        ((np.ones(2) for _ in range(3)), None),
    ],
)
def test_cardinality(dataset, steps_known):
    assert distribute_dataset(dataset, mesh=mesh(2)).cardinality == steps_known


def test_unknown_length_is_run_to_the_end():  # R39
    def unknown():
        yield from numbers(10, 2)

    assert len(steps(distribute_dataset(unknown, mesh=mesh(2)))) == 5


def test_reading_inside_a_compiled_function_is_an_error():
    iterator = iter(distribute_dataset(numbers(4, 4), mesh=mesh(2)))
    frame = context.Frame(strategy=None, trace=object())
    with context.entered(frame), pytest.raises(ValueError, match="outside compiled functions"):
        next(iterator)


# --- Specs ---


def test_element_spec():
    dataset = distribute_dataset([(np.ones((4, 3)), np.arange(4))], mesh=mesh(2))
    x = PerReplicaSpec((TensorSpec((None, 3), np.dtype("float32")),) * 2)
    y = PerReplicaSpec((TensorSpec((None,), np.dtype("int32")),) * 2)
    assert dataset.element_spec == (x, y)
    assert iter(dataset).element_spec == (x, y)


@pytest.mark.parametrize(("size", "replicas", "rows"), [(4, 2, 2), (3, 2, None), (3, 1, 3)])
def test_element_spec_knows_static_rows_that_divide(size, replicas, rows):
    dataset = distribute_dataset(numbers(12, size, drop_remainder=True), mesh=mesh(replicas))
    spec = dataset.element_spec
    leaf = TensorSpec((rows,), np.dtype("int32"))
    assert spec == (leaf if replicas == 1 else PerReplicaSpec((leaf,) * replicas))


def test_element_spec_of_a_generator_takes_nothing_away():
    dataset = distribute_dataset((np.arange(4) for _ in range(2)), mesh=mesh(2))
    assert dataset.element_spec.values[0].shape == (None,)
    assert len(steps(dataset)) == 2
    assert dataset.element_spec.values[0].shape == (None,)


def test_element_spec_of_a_generator_that_was_read():
    dataset = distribute_dataset((np.arange(4) for _ in range(2)), mesh=mesh(2))
    list(dataset)
    with pytest.raises(RuntimeError, match="was iterated before"):
        _ = dataset.element_spec


# --- Telling what was done: R37, U18 ---


def test_describe():
    data = with_options(numbers(7, 4), auto_shard_policy=AutoShardPolicy.DATA)
    dataset = distribute_dataset(data, mesh=mesh(2))
    assert dataset.describe()[0].rows == 0
    list(dataset)
    (worker,) = dataset.describe()
    assert worker.policy is AutoShardPolicy.DATA
    assert (worker.worker, worker.steps, worker.rows) == (0, 2, 7)
    assert worker.rows_per_replica == (4, 3)
    assert worker.first_rows == (0, 1, 2, 3)
    assert "CEIL" in worker.how
    next(iter(dataset))
    assert dataset.describe()[0].rows == 4


def test_describe_tells_rows_of_more_dimensions_apart():
    dataset = distribute_dataset([np.eye(8)], mesh=mesh(2))
    list(dataset)
    first = dataset.describe()[0].first_rows
    assert len(set(first)) == len(first) == 5


def test_one_log_line(caplog):
    caplog.set_level(logging.INFO, logger="stratagem")
    dataset = distribute_dataset(numbers(7, 3), mesh=mesh(2))
    list(dataset)
    list(dataset)
    (record,) = [r for r in caplog.records if r.name == "stratagem"]
    assert record.getMessage() == (
        "Input: policy AUTO, rows of each batch split by rule CEIL; 1 worker, 2 replicas; "
        "first batch of 3 rows dealt as 2+1."
    )


# --- From functions: reference rows 36 and 39, section 2.5 ---


def from_function(make, replicas=2, **options) -> DistributedDataset:
    return distribute_from_function(
        lambda _: make(), mesh=mesh(replicas), options=InputOptions(**options)
    )


def test_row_36():
    dataset = from_function(lambda: numbers(6, 2))
    assert steps(dataset) == [[[0, 1], [2, 3]], [[4, 5], []]]
    assert steps(dataset) == [[[0, 1], [2, 3]], [[4, 5], []]]
    assert dataset.cardinality == 2


def test_row_36_static_shapes_drop_the_odd_batch_and_say_so(caplog):
    dataset = from_function(lambda: numbers(6, 2, drop_remainder=True))
    assert steps(dataset) == [[[0, 1], [2, 3]]]
    assert dataset.cardinality == 1
    assert "the last 1 element of the dataset function went unused" in caplog.text


def test_elements_without_rows_are_dealt_and_the_odd_one_dropped(caplog):
    assert steps(from_function(lambda: range(4))) == [[0, 1], [2, 3]]
    assert not caplog.text
    odd = from_function(lambda: range(3))
    assert steps(odd) == [[0, 1]]
    assert odd.cardinality is None
    assert "went unused" in caplog.text


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@pytest.mark.parametrize("rows", [(2, 2, 2), (2, 1, 3)])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_elements_of_any_rows(make, rows, replicas):
    elements = [make(np.full((n, 2), i, np.float32)) for i, n in enumerate(rows)]
    got = steps(from_function(lambda: elements, replicas))
    flat = [part for step in got for part in step if part]
    assert flat == [np.asarray(e).tolist() for e in elements]
    assert all(len(step) == replicas for step in got)


def test_equal_elements_are_one_array():
    (value,) = from_function(lambda: numbers(4, 2))
    assert value.stacked.shape == (2, 2)
    (value,) = from_function(lambda: [jnp.arange(2), jnp.arange(2)])
    assert value.stacked.shape == (2, 2)


def test_function_is_called_once_with_its_context():
    seen = []

    def make(input_context):
        seen.append(input_context)
        return numbers(8, input_context.get_per_replica_batch_size(4))

    dataset = distribute_from_function(make, mesh=mesh(2))
    assert steps(dataset) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert seen == [InputContext(1, 0, 2)]


def test_per_replica_function_is_called_for_each():
    seen = []

    def make(input_context):
        seen.append(input_context)
        return numbers(2 + 2 * input_context.input_pipeline_id, 2)

    options = InputOptions(experimental_replication_mode=InputReplicationMode.PER_REPLICA)
    dataset = distribute_from_function(make, mesh=mesh(2), options=options)
    assert steps(dataset) == [[[0, 1], [0, 1]], [[], [2, 3]]]
    assert seen == [InputContext(2, 0, 2), InputContext(2, 1, 2)]
    assert dataset.cardinality == 2


def test_dataset_on_the_device_of_its_replica():
    options = InputOptions(False, InputReplicationMode.PER_REPLICA, True)

    def make(_):
        return lambda: (jnp.full((2,), i).devices() and np.full((2,), _where()) for i in range(2))

    def _where():
        (device,) = jnp.zeros(1).devices()
        return device.id

    dataset = distribute_from_function(make, mesh=mesh(2), options=options)
    assert steps(dataset)[0] == [[0, 0], [1, 1]]


def test_from_function_spec_and_description(caplog):
    caplog.set_level(logging.INFO, logger="stratagem")
    dataset = from_function(lambda: [np.ones((2, 3)), np.ones((1, 3))])
    assert dataset.element_spec.values[1] == TensorSpec((None, 3), np.dtype("float32"))
    list(dataset)
    (worker,) = dataset.describe()
    assert (worker.rows_per_replica, worker.steps) == ((2, 1), 1)
    assert len(worker.first_rows) == 2
    list(dataset)
    assert dataset.describe() == (worker,)
    assert "first batch of 3 rows dealt as 2+1" in caplog.text
    static = from_function(lambda: numbers(8, 3, drop_remainder=True))
    assert static.element_spec.values[0].shape == (3,)


def test_endless_and_unknown_cardinality_from_a_function():
    assert from_function(lambda: (np.ones(1) for _ in range(2))).cardinality is None
    grain = pytest.importorskip("grain", reason="Grain datasets are optional")
    endless = grain.MapDataset.range(4).batch(2).repeat()
    assert from_function(lambda: endless).cardinality == math.inf
    assert distribute_dataset(endless, mesh=mesh(2)).cardinality == math.inf


def test_from_function_errors():
    with pytest.raises(TypeError, match="takes an InputContext.*Got list"):
        distribute_from_function([], mesh=mesh(2))
    with pytest.raises(ValueError, match="Got an empty dataset"):
        list(from_function(list))
    with pytest.raises(ValueError, match=r"structure of the first.*at element 1"):
        list(from_function(lambda: [np.ones(2), (np.ones(2),)]))


def test_row_39_values_from_function():
    def ten(c: ValueContext):
        return c.replica_id_in_sync_group * 10 + c.num_replicas_in_sync

    assert values_from_function(ten, 2).values == (2, 12)
    constant = values_from_function(lambda _: 5, 2)
    assert isinstance(constant, PerReplica)
    assert constant.values == (5, 5)
    assert values_from_function(lambda _: 5, 1) == 5
