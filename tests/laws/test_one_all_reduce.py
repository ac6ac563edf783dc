"""Law 3: what the replicas of a step tell each other travels in one all-reduce."""

from __future__ import annotations

import re
from typing import Any

import jax
import keras
import numpy as np
import pytest

import stratagem
from conformance.table import rehearsed_tpu

ROWS, FEATURES = 8, 5


@pytest.fixture(scope="module", params=["mirrored", "tpu"])
def strategy(request):
    if request.param == "tpu":
        return rehearsed_tpu(2)
    return stratagem.MirroredStrategy(["cpu:0", "cpu:1"])


def build(**batch_norm: Any) -> keras.Model:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(6, activation="relu"),
            keras.layers.BatchNormalization(**batch_norm),
            keras.layers.Dense(3),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    metrics = ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)]
    model.compile(keras.optimizers.Adam(), loss, metrics=metrics)
    return model


def batch(rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, FEATURES)).astype("float32"), rng.integers(0, 3, rows)


def count(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text))


KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"


def collectives(lowered: jax.stages.Lowered) -> list[str]:
    """The collectives of the compiled program, each once (start and done are one)."""
    return sorted(re.findall(rf" = .*? ({KINDS})(?:-start)?\(", lowered.compile().as_text()))


def dots(lowered: jax.stages.Lowered) -> int:
    return count(r"stablehlo\.dot_general", lowered.as_text())


def custom_loop(strategy: Any, model: keras.Model) -> Any:
    with strategy.scope():
        loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
        accuracy = keras.metrics.SparseCategoricalAccuracy()

    def replica_step(x: Any, y: Any) -> Any:
        with stratagem.GradientTape() as tape:
            logits = model(x, training=True)
            loss = stratagem.nn.compute_average_loss(loss_fn(y, logits))
        grads = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        accuracy.update_state(y, logits)
        return loss

    return replica_step


def split(x: np.ndarray, sizes: tuple[int, int] = (ROWS // 2, ROWS // 2)) -> stratagem.PerReplica:
    return stratagem.PerReplica([x[: sizes[0]], x[sizes[0] : sum(sizes)]])


def hand_written_dots(model: keras.Model) -> int:
    """Dots of the program that `jax.value_and_grad` makes of the same model and loss."""
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def loss(trainable: Any, rest: Any, x: Any, y: Any) -> Any:
        logits, rest = model.stateless_call(trainable, rest, x, training=True)
        return loss_fn(y, logits), rest

    state = (
        [v.value for v in vs] for vs in (model.trainable_variables, model.non_trainable_variables)
    )
    x, y = batch(ROWS // 2)
    return dots(jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(*state, x, y))


def model_step(strategy: Any, model: keras.Model, rows: int = ROWS) -> jax.stages.Lowered:
    """The program of one training step of `fit`."""
    x, y = batch(rows)
    return strategy.lower(model.train_step, ((x, y, None),))


def test_the_counters_count():
    """Three sums that wait for each other are three all-reduces, and XLA joins none of them."""
    strategy = stratagem.MirroredStrategy(["cpu:0", "cpu:1"])

    def chain(own: Any) -> Any:
        x = own
        for _ in range(3):
            total = stratagem.get_replica_context().all_reduce("SUM", jax.numpy.dot(x, x))
            x = own + jax.numpy.sin(total)
        return x

    lowered = strategy.lower(chain, (split(np.ones((4, 2), "float32"), (2, 2)),))
    assert collectives(lowered) == ["all-reduce"] * 3
    assert dots(lowered) == 3


@pytest.mark.parametrize("rows", [ROWS, ROWS - 1])
def test_fit(strategy, rows):
    with strategy.scope():
        model = build()
    assert collectives(model_step(strategy, model, rows)) == ["all-reduce"]


def test_fit_runs_the_forward_pass_once(strategy):
    with strategy.scope():
        model = build()
    assert dots(model_step(strategy, model)) == hand_written_dots(model)


def test_synchronized_batch_norm_needs_two_more(strategy):
    """Its statistics are needed before the pass can go on, forward and backward."""
    kinds = ["all-gather", "all-reduce", "all-reduce"]
    with strategy.scope():
        model = build(synchronized=True)
    assert collectives(model_step(strategy, model)) == kinds


def test_run(strategy):
    with strategy.scope():
        model = build()
    step = custom_loop(strategy, model)
    x, y = batch()
    lowered = strategy.lower(step, (split(x), split(y)))
    assert collectives(lowered) == ["all-reduce"]
    assert dots(lowered) == hand_written_dots(model)


@pytest.mark.parametrize("rows", [ROWS, ROWS - 1])
def test_run_and_reduce_in_one_function(strategy, rows):
    with strategy.scope():
        model = build()
    step = custom_loop(strategy, model)

    def whole(x: Any, y: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(step, args=(x, y)), axis=None)

    x, y = batch(rows)
    sizes = (ROWS // 2, rows - ROWS // 2)
    lowered = stratagem.function(whole, strategy=strategy).lower(split(x, sizes), split(y, sizes))
    assert collectives(lowered) == ["all-reduce"]
    if rows == ROWS:
        assert dots(lowered) == hand_written_dots(model)


def test_gradient_accumulation_and_loss_scale(strategy):
    """What an optimizer does with the gradients afterwards needs no traffic."""
    with strategy.scope():
        model = build()
        adam = keras.optimizers.Adam(gradient_accumulation_steps=2, global_clipnorm=1.0)
        model.compile(keras.optimizers.LossScaleOptimizer(adam), model.loss, metrics=["accuracy"])
    assert collectives(model_step(strategy, model)) == ["all-reduce"]


def test_evaluate_and_predict(strategy):
    with strategy.scope():
        model = build()
    x, y = batch()
    assert collectives(strategy.lower(model.test_step, ((x, y, None),))) == ["all-reduce"]
    assert collectives(strategy.lower(model.predict_step, ((x,),))) == []


def test_what_is_the_same_everywhere_is_not_sent(strategy):
    def replica(x: Any) -> Any:
        context = stratagem.get_replica_context()
        return context.all_reduce("SUM", context.all_reduce("MEAN", x) + 1)

    once = split(np.arange(4, dtype="float32"), (2, 2))
    assert collectives(strategy.lower(replica, (once,))) == ["all-reduce"]
    np.testing.assert_array_equal(strategy.run(replica, (once,)).values[1], [4, 6])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_one_for_each_dtype(strategy, dtype):
    def replica(x: Any) -> Any:
        context = stratagem.get_replica_context()
        return context.all_reduce("SUM", [x, x * 2, x.astype(dtype), x.astype(dtype) + 1])

    lowered = strategy.lower(replica, (split(np.ones(4, "float32"), (2, 2)),))
    assert len(collectives(lowered)) <= (1 if dtype == "float32" else 2)
