"""The private names of Keras and JAX that the package relies on are where and what they were.

When a new version moves one, this file says which; `_keras.py` and `_jax.py` say what for.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import jax
import keras
import numpy as np
import pytest

import stratagem
from stratagem import _jax, _keras, _orbax

SOURCE = Path(stratagem.__file__).parent


def parameters(function) -> list[str]:
    """Names of the parameters of Keras' own function, below our wrapper."""
    original = getattr(function, "_stratagem_original", function)
    return list(inspect.signature(original).parameters)


SIGNATURES = {
    (_keras.JAXTrainer, "train_step"): ["self", "state", "data"],
    (_keras.JAXTrainer, "test_step"): ["self", "state", "data"],
    (_keras.JAXTrainer, "predict_step"): ["self", "state", "data"],
    (_keras.JAXTrainer, "make_train_function"): ["self", "force"],
    (_keras.JAXTrainer, "make_test_function"): ["self", "force"],
    (_keras.JAXTrainer, "make_predict_function"): ["self", "force"],
    (_keras.JAXTrainer, "_get_metrics_result_or_logs"): ["self", "logs"],
    (_keras.JAXTrainer, "_make_function"): ["self", "step_function", "concatenate_outputs"],
    (_keras.JaxVariable, "assign"): ["self", "value"],
    (_keras.JaxVariable, "assign_add"): ["self", "value"],
    (_keras.JaxVariable, "assign_sub"): ["self", "value"],
    (_keras.JaxVariable, "_direct_assign"): ["self", "value"],
    (_keras.JaxVariable, "_convert_to_tensor"): ["self", "value", "dtype"],
    (_keras.JaxVariable, "_maybe_autocast"): ["self", "value"],
    (_keras.BatchNormalization, "_moments"): ["self", "inputs", "mask"],
    (_keras.loss_module, "reduce_values"): ["values", "sample_weight", "reduction"],
    (_keras.loss_module, "apply_mask"): ["sample_weight", "mask", "dtype", "reduction"],
    (_keras.BaseOptimizer, "apply"): ["self", "grads", "trainable_variables"],
    (_keras.BaseOptimizer, "stateless_apply"): [
        "self", "optimizer_variables", "grads", "trainable_variables",
    ],
    (_keras.LossScaleOptimizer, "apply"): ["self", "grads", "trainable_variables"],
    (_keras.LossScaleOptimizer, "stateless_apply"): [
        "self", "optimizer_variables", "grads", "trainable_variables",
    ],
    (_keras.SeedGenerator, "next"): ["self", "ordered"],
    (keras.Metric, "add_variable"): [
        "self", "shape", "initializer", "dtype", "aggregation", "name",
    ],
    (_keras.Layer, "_flatten_layers"): ["self", "include_self", "recursive"],
    (_keras.GeneratorDataAdapter, "__init__"): ["self", "generator"],
    (_keras.PyDatasetAdapter, "get_jax_iterator"): ["self"],
    (_keras.TorchDataLoaderAdapter, "get_jax_iterator"): ["self"],
    (_keras.backend, "compute_output_spec"): ["fn", "args", "kwargs"],
    (_keras.global_state, "get_global_attribute"): ["name", "default", "set_to_default"],
    (_keras.global_state, "set_global_attribute"): ["name", "value"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("owner", "name"), SIGNATURES, ids=lambda part: getattr(part, "__name__", part)
)
def test_the_signatures_are_those_that_the_bridge_calls(owner, name):
    found = parameters(getattr(owner, name))
    # Further parameters with defaults do not break the bridge; `add_variable` is passed through.
    assert found[: len(SIGNATURES[owner, name])] == SIGNATURES[owner, name]


def test_the_file_imports_nothing_that_is_not_used():
    tree = ast.parse((SOURCE / "_keras.py").read_text())
    imported = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("keras.")
        for alias in node.names
    }
    text = "\n".join(path.read_text() for path in SOURCE.rglob("*.py") if path.name != "_keras.py")
    own = (SOURCE / "_keras.py").read_text().rpartition("METRIC_CONTAINERS")[2]
    assert not {name for name in imported if f"_keras.{name}" not in text and name not in own}


def test_no_other_file_imports_private_names():
    for path in SOURCE.rglob("*.py"):
        if path.name in ("_keras.py", "_jax.py"):
            continue
        text = path.read_text()
        assert "keras.src import" not in text, path
        assert "from keras.src" not in text, path
        assert "jax._src" not in text, path


def test_keras_variables_keep_their_value_and_dtype_in_the_slots_that_we_write():
    variable = keras.Variable(np.ones(2, "float32"))
    assert isinstance(variable, _keras.JaxVariable)
    assert isinstance(variable._value, jax.Array)
    assert variable._dtype == "float32"
    variable._value = jax.numpy.zeros(2)
    assert not variable.numpy().any()
    assert variable.synchronization == "auto"
    assert variable.aggregation == "none"


def test_models_inherit_the_trainer_that_the_bridge_wraps():
    assert issubclass(keras.Model, _keras.JAXTrainer)
    for name in ("fit", "evaluate", "predict", "train_on_batch", "make_train_function"):
        assert hasattr(getattr(keras.Model, name), "_stratagem_original"), name


def test_the_state_of_a_train_step_is_what_the_bridge_takes_apart():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x, y = np.ones((2, 2), "float32"), np.ones((2, 1), "float32")
    model.train_on_batch(x, y)
    state = model._get_jax_state(
        trainable_variables=True, non_trainable_variables=True, optimizer_variables=True,
        metrics_variables=True, purge_model_variables=False,
    )  # fmt: skip
    groups = (
        model.trainable_variables, model.non_trainable_variables, model.optimizer.variables,
        model.metrics_variables,
    )  # fmt: skip
    assert [len(part) for part in state] == [len(group) for group in groups]
    logs, new = model.train_step(state, (x, y))
    assert "loss" in logs
    assert [len(part) for part in new] == [len(group) for group in groups]
    outputs, non_trainable = model.predict_step(state[:2], (x,))
    assert outputs.shape == (2, 1)
    assert len(non_trainable) == len(model.non_trainable_variables)


def test_losses_and_shape_inference_are_looked_up_where_the_bridge_replaces_them():
    source = inspect.getsource(_keras.loss_module.reduce_weighted_values)
    assert "reduce_values(" in source
    assert "apply_mask(" in source
    assert hasattr(_keras.loss_module.reduce_values, "_stratagem_original")


def test_stateless_scopes_live_in_the_attribute_that_the_bridge_lifts():
    with keras.StatelessScope() as scope:
        assert _keras.in_stateless_scope()
        assert _keras.get_stateless_scope() is scope
        assert _keras.global_state.get_global_attribute("stateless_scope") is scope
        assert not _keras.in_symbolic_scope()


def test_shapes_are_inferred_in_a_scope_that_says_so():
    inside = []

    def asks(x):
        inside.append(_keras.in_symbolic_scope() and _keras.in_stateless_scope())
        return x

    _keras.backend.compute_output_spec(asks, keras.KerasTensor((2,)))
    assert inside == [True]


def test_masks_and_metric_containers():
    x = jax.numpy.ones(2)
    _keras.set_keras_mask(x, x > 0)
    assert _keras.get_keras_mask(x).all()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    assert isinstance(model._compile_metrics, _keras.METRIC_CONTAINERS)
    wrapper = keras.metrics.MeanMetricWrapper(keras.losses.mean_squared_error, scale=2)
    assert wrapper._fn is keras.losses.mean_squared_error
    assert wrapper._fn_kwargs == {"scale": 2}
    update = keras.metrics.AUC.update_state
    assert getattr(update, "_stratagem_original", update).__module__.startswith("keras.src.metrics")


def test_batch_normalization_has_its_reduction_axes_and_layers_mark_their_weights():
    layer = keras.layers.BatchNormalization(axis=1)
    layer.build((None, 3, 4))
    assert list(layer._reduction_axes) == [0, 2]
    assert hasattr(_keras.Layer.add_weight, "_stratagem_original")


def test_inputs_of_fit():
    assert hasattr(_keras.DataAdapter, "get_jax_iterator")
    names = {"num_batches", "batch_size", "has_partial_batch", "partial_batch_size"}
    assert names <= set(dir(_keras.DataAdapter))
    iterator = _keras.EpochIterator(x=np.ones((3, 1)), batch_size=2)
    assert iterator.steps_per_epoch is None
    assert callable(iterator._interrupted_warning)


def test_what_backups_need_of_inputs():
    iterator = _keras.JAXEpochIterator(x=np.ones((3, 1)), batch_size=2, steps_per_epoch=1)
    assert iterator.steps_per_execution == 1
    assert iterator.data_adapter.num_batches == 2
    assert (iterator._steps_seen, iterator._current_iterator) == (0, None)
    begin, end, source = next(iter(iterator))  # from `_enumerate_iterator`
    assert (begin, end) == (0, 0)
    assert jax.tree.leaves(next(source))[0].shape == (2, 1)
    assert iterator._current_iterator is source
    assert iterator._steps_seen == 1
    passes = inspect.getsource(_keras.EpochIterator._enumerate_iterator._stratagem_original)
    assert "iter(self._get_iterator())" in passes
    dataset = keras.utils.PyDataset()
    assert _keras.PyDatasetAdapter(dataset).py_dataset is dataset
    assert "get_jax_iterator" in vars(_keras.GrainDatasetAdapter)


def test_what_backups_need_of_fit():
    fit = inspect.getsource(_keras.JAXTrainer.fit._stratagem_original)
    # The callbacks may say where it begins: this is not read before them.
    begin, first = fit.index("callbacks.on_train_begin()"), fit.index("self._initial_epoch or")
    assert begin < first < fit.index("self.reset_metrics()") < fit.index("callbacks.on_epoch_begin")
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    assert model._initial_epoch is None
    assert callable(model.jax_state_sync)


def test_the_global_seed_generator():
    generator = _keras.global_seed_generator()
    name = _keras.GLOBAL_SEED_GENERATOR
    assert _keras.global_state.get_global_attribute(name) is generator
    assert generator.state.shape == (2,)


def test_keras_as_tensorflow_shows_it():
    assert _keras.tf_keras.layers.Dense is keras.layers.Dense
    assert _keras.tf_keras.losses.Reduction.NONE == "none"


def test_jax_tells_which_backends_have_started():
    jax.devices()
    assert "cpu" in _jax.started_backends()
    assert _jax.cpu_pool_threads() is None or _jax.cpu_pool_threads() >= 1


def test_the_coordination_service_and_its_client_take_what_we_pass():
    service = _jax._jaxlib.get_distributed_runtime_service.__doc__
    client = _jax._jaxlib.get_distributed_runtime_client.__doc__
    for name in ("address", "num_nodes", "heartbeat_timeout", "shutdown_timeout", "recoverable"):
        assert f"{name}: " in service
    for name in (
        "address", "node_id", "init_timeout", "heartbeat_timeout", "shutdown_timeout",
        "shutdown_on_destruction", "use_compression",
    ):  # fmt: skip
        assert f"{name}: " in client
    methods = {
        "connect", "shutdown", "key_value_set_bytes", "blocking_key_value_get_bytes",
        "key_value_delete",
    }  # fmt: skip
    assert methods <= set(dir(_jax._jaxlib.DistributedRuntimeClient))
    assert hasattr(_jax._jaxlib.DistributedRuntimeService, "shutdown")
    fields = {"client", "process_id", "num_processes", "coordinator_address"}
    assert fields <= set(dir(_jax._distributed.global_state))


def test_gloo_can_be_told_where_to_listen():
    names = _jax._jaxlib.make_gloo_tcp_collectives.__doc__
    assert "distributed_client: " in names
    assert "hostname: " in names
    assert list(inspect.signature(_jax._xla_bridge.make_cpu_client).parameters) == ["collectives"]
    register = inspect.signature(_jax._xla_bridge.register_backend_factory).parameters
    assert list(register)[:4] == ["name", "factory", "priority", "fail_quietly"]
    assert jax.config.jax_cpu_collectives_implementation == "gloo"


def test_gloo_cannot_be_told_once_the_backend_has_started():
    jax.devices()
    with pytest.raises(RuntimeError, match="already initialized"):
        _jax.listen_at("127.0.0.1")


def test_backends_can_be_forgotten():
    # Not called here: the other tests of this process need their devices.
    assert list(inspect.signature(_jax._xla_bridge._clear_backends).parameters) == []
    assert callable(_jax._dispatch.runtime_tokens.clear)
    assert callable(jax.clear_caches)


def test_orbax_keeps_its_client_of_the_coordination_service():
    first = _orbax.get_signaling_client()
    assert _orbax.get_signaling_client() is first
    _orbax.forget_coordination_service()
    assert _orbax.get_signaling_client.cache_info().currsize == 0


def test_jax_can_name_compiled_programs_alike_and_write_them_from_any_process():
    assert list(inspect.signature(_jax._hash_accelerators).parameters) == [
        "hash_obj", "accelerators",
    ]  # fmt: skip
    names = ["cache_key", "compile_time_secs", "module_name", "backend", "executable"]
    found = list(inspect.signature(_jax._write_first).parameters)
    assert found in (names, [*names, "host_callbacks"])  # JAX 0.10 has the last
    put = _jax._compilation_cache.put_executable_and_time
    assert list(inspect.signature(put).parameters) == [
        "cache_key", "module_name", "executable", "backend", "compile_time",
    ]  # fmt: skip
    assert callable(_jax._cache_key._hash_accelerator_config)
