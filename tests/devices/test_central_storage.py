"""CentralStorageStrategy: where values live, what travels, and that results are those of one."""

from __future__ import annotations

import contextlib
import gc

import jax
import keras
import numpy as np
import pytest
from keras import layers

import stratagem
from stratagem.step.execute import Fit

random = np.random.default_rng(0)


def central(replicas: int = 2):
    """Replicas on CPU:1, CPU:2, ...; variables on CPU:0."""
    devices = [f"CPU:{i + 1}" for i in range(replicas)]
    return stratagem.experimental.CentralStorageStrategy(devices, "CPU:0")


def model_of(strategy, optimizer=None, words: int = 50):
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [keras.Input((2,), dtype="int32"), layers.Embedding(words, 4), layers.Flatten(),
             layers.Dense(3, "tanh"), layers.Dense(1)]
        )  # fmt: skip
        model.compile(optimizer or keras.optimizers.Adam(0.1), "mse")
    return model


def rank():
    """This replica's id plus one, as a tensor."""
    replica = stratagem.get_replica_context().replica_id_in_sync_group
    return keras.ops.cast(replica + 1, "float32")


def variable(strategy, aggregation: str, synchronization: str = "auto"):
    with strategy.scope():
        return keras.Variable(
            np.float32(10),
            trainable=False,
            aggregation=aggregation,
            synchronization=synchronization,
        )


def rows(count: int = 7):
    return random.integers(0, 50, (count, 2)).astype("int32"), random.normal(size=(count, 1))


class TestDevices:
    def test_by_default_the_accelerators_or_one_cpu(self):
        strategy = stratagem.experimental.CentralStorageStrategy()
        assert strategy.worker_devices == ("/device:CPU:0",)
        assert strategy.parameter_devices == ("/device:CPU:0",)

    def test_one_device_keeps_the_variables_itself_and_several_leave_them_to_the_host(self):
        make = stratagem.experimental.CentralStorageStrategy
        assert make(["CPU:3"]).parameter_devices == ("/device:CPU:3",)
        assert make(["CPU:3"], "CPU:5").parameter_devices == ("/device:CPU:5",)
        several = make(["CPU:3", "CPU:1"])
        assert several.parameter_devices == ("/device:CPU:0",)
        assert several.num_replicas_in_sync == 2
        assert "with variables on /device:CPU:0, computing on [/device:CPU:3, " in repr(several)

    def test_wrong_devices_are_refused(self):
        make = stratagem.experimental.CentralStorageStrategy
        with pytest.raises(TypeError, match=r"list of device strings.*compute_devices=\['CPU:1'\]"):
            make("CPU:1")
        with pytest.raises(ValueError, match=r"devices named more than once: \['CPU:1'\]"):
            make(["CPU:1", "CPU:1"])
        with pytest.raises(ValueError, match=r"no such devices: \['CPU:99'\]"):
            make(["CPU:1"], "CPU:99")

    def test_a_host_that_jax_does_not_have_is_missed(self, monkeypatch):
        monkeypatch.setattr(stratagem.config, "devices_of", lambda kind: [])
        with pytest.raises(ValueError, match="expected a CPU device to keep the variables on.*"):
            stratagem.experimental.CentralStorageStrategy(["CPU:1", "CPU:2"])


class TestPlaces:
    def test_between_steps_the_compute_devices_hold_no_variable(self):
        strategy = central()
        computing = jax.devices("cpu")[1:3]
        model = model_of(strategy)
        x, y = rows()
        model.fit(x, y, batch_size=4, verbose=0)  # what programs keep for themselves is made once
        model.predict(x, verbose=0)
        before = {id(array): array for array in jax.live_arrays()}
        model.fit(x, y, batch_size=4, epochs=2, verbose=0)
        model.predict(x, verbose=0)
        gc.collect()
        every = [*model.variables, *model.optimizer.variables]
        assert {str(v.value.sharding) for v in every} == {str(strategy.home)}
        assert not {v.value.device for v in every} & set(computing)
        new = [a for a in jax.live_arrays() if id(a) not in before]
        shapes = {tuple(v.shape) for v in every if v.shape}
        left = [a.shape for a in new if a.devices() & set(computing) and a.shape in shapes]
        assert left == []

    def test_only_what_the_replicas_read_is_sent_to_them(self):
        """Adam has two slots a weight, and the counters; none is among the inputs."""
        strategy = central()
        model = model_of(strategy)
        lowered = strategy.lower(model.train_step, ((np.ones((4, 2), "int32"), np.ones((4, 1))),))
        given, kept, arguments = lowered.in_avals[0]
        assert given == []
        shapes = sorted(tuple(a.shape) for a in kept)
        weights = sorted(tuple(v.shape) for v in model.trainable_variables)
        assert [s for s in shapes if s] == weights
        assert len(arguments) == 2
        assert len(shapes) <= len(weights) + len(model.metrics_variables)

    @pytest.mark.parametrize("replicas", [1, 2])
    @pytest.mark.parametrize("count", [4, 3])
    def test_a_custom_loop_sends_the_same(self, replicas, count):
        strategy = central(replicas)
        model = model_of(strategy)
        model.optimizer.build(model.trainable_variables)

        def step(x, y):
            with stratagem.GradientTape() as tape:
                loss = stratagem.nn.compute_average_loss((model(x) - y) ** 2)
            grads = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
            return loss

        x, y = rows(count)
        (batch,) = strategy.experimental_distribute_dataset([(x, y.astype("float32"))])
        compiled, _ = strategy.executor.prepare(step, batch, {})
        sent = {v.path for v in compiled.function.reads_variables}
        assert sent == {v.path for v in model.trainable_variables}
        before = model.get_weights()
        strategy.run(step, batch)
        after = model.get_weights()
        assert all(np.any(a != b) for a, b in zip(after[1:], before[1:], strict=True))

    def test_predictions_need_no_update_and_no_metric(self):
        strategy = central()
        model = model_of(strategy)
        fit = Fit((2, 2), rows_out=True)
        rows_of_two = stratagem.PerReplica([np.ones((2, 2), "int32")] * 2)
        compiled, _ = strategy.executor.prepare(lambda x: model(x), (rows_of_two,), {}, fit)
        assert compiled.function.parts.keeps == []

    def test_what_is_reduced_is_where_the_variables_are(self):
        strategy = central()
        var = variable(strategy, "sum")
        total = strategy.reduce("SUM", strategy.run(rank), axis=None)
        assert total.sharding == strategy.home
        assert float(total + var.value) == 13.0


class TestOnRead:
    """One value, not a component a replica."""

    @pytest.mark.parametrize("method", ["assign", "assign_add", "assign_sub"])
    @pytest.mark.parametrize("aggregation", ["sum", "mean", "only_first_replica"])
    def test_it_is_written_as_on_write(self, aggregation, method):
        strategy = central()
        values = []
        for synchronization in ("on_write", "on_read"):
            var = variable(strategy, aggregation, synchronization)

            def step(var=var):
                getattr(var, method)(rank())
                return var.value

            read = [float(v) for v in strategy.run(step).values]
            values.append((read, float(var.value)))
        assert values[0] == values[1]

    @pytest.mark.parametrize("aggregation", ["none", "sum", "mean", "only_first_replica"])
    def test_it_is_added_to_from_outside(self, aggregation):
        strategy = central()
        var = variable(strategy, aggregation, "on_read")
        var.assign_add(2.0)
        strategy.extended.update(var, lambda v: v.assign_add(3.0))

        def merge(merging):
            merging.extended.update(var, lambda v: v.assign_add(4.0))
            var.assign_add(5.0)
            return var.value

        read = strategy.run(lambda: stratagem.get_replica_context().merge_call(merge))
        assert float(var.value) == 24.0
        assert float(read.values[0]) == 24.0

    def test_a_read_of_all_replicas_after_the_last_write_is_the_value(self):
        strategy = central()
        var = variable(strategy, "sum", "on_read")

        def step():
            context = stratagem.get_replica_context()
            first = context.merge_call(lambda s: var.value)
            var.assign_add(rank())
            middle = context.merge_call(lambda s: var.value)
            var.assign_add(rank())
            return first, middle, context.merge_call(lambda s: var.value)

        first, middle, last = strategy.run(step)
        assert [float(v.values[1]) for v in (first, middle, last)] == [10.0, 13.0, 16.0]
        assert float(var.value) == 16.0

    def test_metrics_of_a_custom_loop_count_all_rows(self):
        strategy = central()
        with strategy.scope():
            mean, error = keras.metrics.Mean(), keras.metrics.MeanSquaredError()
        parts = stratagem.PerReplica([np.float32([1, 2, 6]), np.float32([7])])

        def step(x):
            mean.update_state(x)
            error.update_state(x, x + 1)

        for _ in range(2):
            strategy.run(step, (parts,))
        assert float(mean.result()) == 4.0
        assert float(error.result()) == 1.0

    def test_a_program_of_several_runs_reads_what_they_wrote(self):
        strategy = central()
        var = variable(strategy, "none")
        with strategy.scope():
            mean = keras.metrics.Mean()

        @stratagem.function
        def twice(parts):
            def step(x):
                mean.update_state(x)
                return x * var.value

            for _ in range(2):
                var.assign_add(strategy.reduce("SUM", strategy.run(step, (parts,)), axis=None))
            return mean.result()

        mean_of_all = twice(stratagem.PerReplica([np.float32(1), np.float32(2)]))
        assert float(var.value) == 160.0  # 10 + 3 * 10, then 40 + 3 * 40
        assert float(mean_of_all) == float(mean.result()) == 1.5


class TestLayers:
    def test_r76_convolutions_embeddings_and_attention(self):
        def make():
            keras.utils.set_random_seed(1)
            ids = keras.Input((5,), dtype="int32")
            x = layers.Embedding(9, 4)(ids)
            x = layers.Add()([x, layers.MultiHeadAttention(2, 3)(x, x)])
            x = layers.Conv1D(3, 2, activation="relu")(x)
            x = layers.SpectralNormalization(layers.Dense(3))(layers.Flatten()(x))
            return keras.Model(ids, layers.Dense(2)(x))

        ids = random.integers(0, 9, (7, 5)).astype("int32")
        y = random.normal(size=(7, 2)).astype("float32")
        options = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}
        results = []
        for scope in (contextlib.nullcontext(), central(3).scope()):
            with scope:
                model = make()
                model.compile(keras.optimizers.SGD(0.1), "mse")
            loss = model.fit(ids, y, **options).history["loss"]
            results.append([loss, model.predict(ids, verbose=0), *model.get_weights()[:-1]])
        for got, want in zip(*results, strict=True):
            np.testing.assert_allclose(got, want, rtol=5e-5, atol=2e-6)

    @pytest.mark.parametrize("replicas", [1, 2])
    def test_an_optimizer_with_every_feature_equals_one_device(self, replicas):
        """Clipping, decay, moving averages and accumulation are all the update's."""

        def optimizer():
            return keras.optimizers.AdamW(
                0.05, epsilon=0.1, global_clipnorm=0.5, use_ema=True, ema_overwrite_frequency=2,
                gradient_accumulation_steps=2,
            )  # fmt: skip

        x, y = rows(9)
        expected = model_of(stratagem.OneDeviceStrategy("CPU:0"), optimizer())
        model = model_of(central(replicas), optimizer())
        options = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}
        want = expected.fit(x, y, **options).history["loss"]
        np.testing.assert_allclose(model.fit(x, y, **options).history["loss"], want, rtol=1e-5)
        for a, b in zip(model.get_weights(), expected.get_weights(), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)

    def test_a_replica_that_diverges_is_named(self):
        model = model_of(central())
        x, y = rows(4)
        y[3] = np.nan
        with (
            stratagem.debug.check_numerics(),
            pytest.raises(stratagem.errors.DivergedError, match="replica 1: array argument 1"),
        ):
            model.fit(x, y, batch_size=4, shuffle=False, verbose=0)

    def test_a_model_that_was_built_outside_comes_in(self, tmp_path):
        model = model_of(stratagem.get_strategy())
        path = tmp_path / "model.keras"
        strategy = central()
        x, y = rows()
        with strategy.scope():
            model.fit(x, y, batch_size=4, verbose=0)
        model.save(path)
        again = keras.models.load_model(path)
        np.testing.assert_allclose(
            again.predict(x, verbose=0), model.predict(x, verbose=0), rtol=1e-5
        )
