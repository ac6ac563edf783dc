"""Models enter and leave a strategy: scopes, saving, loading, and going on from there."""

from __future__ import annotations

import pickle

import keras
import numpy as np
import pytest
from keras import layers

import stratagem
from stratagem import variables
from stratagem.errors import StrategyMismatchError

random = np.random.default_rng(0)
X = random.normal(size=(10, 3)).astype("float32")
Y = random.normal(size=(10, 2)).astype("float32")
ONCE = {"batch_size": 4, "shuffle": False, "verbose": 0}


def strategy(replicas: int = 2):
    return stratagem.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])


def make(compiled: bool = True):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), layers.Dense(4, "tanh"), layers.Dense(2)])
    if compiled:
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


@pytest.fixture(scope="module")
def uninterrupted():
    """Weights and optimizer state after two plain epochs."""
    model = make()
    model.fit(X, Y, epochs=2, **ONCE)
    return state(model)


def state(model):
    return [v.numpy() for v in (*model.variables, *model.optimizer.variables)]


def same(got, want):
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=2e-6)


def belongs(model, owner) -> bool:
    every = (*model.variables, *model.optimizer.variables)
    return all(variables.home(v).strategy is owner for v in every)


def test_g12_a_model_built_and_compiled_outside_moves_in_at_fit(uninterrupted):
    model, two = make(), strategy()
    with two.scope():
        model.fit(X, Y, epochs=2, **ONCE)
    same(state(model), uninterrupted)
    assert belongs(model, two)
    model.evaluate(X, Y, verbose=0)  # and stays there


def test_a_model_trained_outside_goes_on_inside_and_keeps_its_optimizer(uninterrupted):
    model, two = make(), strategy(3)
    model.fit(X, Y, epochs=1, **ONCE)
    model.predict(X, verbose=0)
    with two.scope():
        model.fit(X, Y, initial_epoch=1, epochs=2, **ONCE)
        predictions = model.predict(X, verbose=0)
    same(state(model), uninterrupted)
    assert belongs(model, two)  # it did not go on with the step that Keras compiled before
    np.testing.assert_allclose(predictions, np.asarray(model(X)), rtol=1e-5, atol=1e-6)


def test_built_inside_and_compiled_outside(uninterrupted):
    two = strategy()
    with two.scope():
        model = make(compiled=False)
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    model.fit(X, Y, epochs=2, **ONCE)
    same(state(model), uninterrupted)
    assert belongs(model, two)


def test_fit_inside_the_scope_and_an_optimizer_that_already_has_its_slots(uninterrupted):
    two = strategy()
    with two.scope():
        model = make()
        model.optimizer.build(model.trainable_variables)
        model.fit(X, Y, epochs=2, **ONCE)
    same(state(model), uninterrupted)


def test_an_unbuilt_model_is_built_from_its_first_batch():
    def unbuilt():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([layers.Dense(4, "tanh"), layers.Dense(2)])
        model.compile(keras.optimizers.Adam(0.01), "mse")
        return model

    plain, two = unbuilt(), strategy()
    plain.fit(X, Y, **ONCE)
    with two.scope():
        model = unbuilt()
    keras.utils.set_random_seed(1)
    # Weights that fit creates belong to the strategy whose scope is current, so fit is in it.
    with two.scope():
        model.fit(X, Y, **ONCE)
    assert belongs(model, two)
    assert len(model.get_weights()) == 4


def test_an_unbuilt_model_remembers_the_scope_that_compiled_it():
    two = strategy()
    with two.scope():
        model = keras.Sequential([layers.Dense(2)])
        model.compile("adam", "mse")
    model.fit(X, Y, **ONCE)
    assert belongs(model, two)


def test_predict_without_compile():
    two = strategy()
    with two.scope():
        model = make(compiled=False)
    want = make(compiled=False).predict(X, verbose=0)
    np.testing.assert_allclose(model.predict(X, verbose=0), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_saved_model_is_plain_and_goes_on_anywhere(tmp_path, uninterrupted, replicas):
    with strategy(2).scope():
        model = make()
    model.fit(X, Y, epochs=1, **ONCE)
    model.save(tmp_path / "model.keras")
    plain = keras.models.load_model(tmp_path / "model.keras")
    assert all(variables.home(v) is None for v in plain.variables)
    plain.fit(X, Y, **ONCE)
    same(state(plain), uninterrupted)
    with strategy(replicas).scope():
        other = keras.models.load_model(tmp_path / "model.keras")
    other.fit(X, Y, **ONCE)
    same(state(other), uninterrupted)


def test_r28_load_weights_outside_the_scope_and_go_on(tmp_path, uninterrupted):
    plain = make()
    plain.fit(X, Y, epochs=1, **ONCE)
    plain.save_weights(tmp_path / "w.weights.h5")
    two = strategy()
    with two.scope():
        model = make()
        model.optimizer.build(model.trainable_variables)  # as in plain Keras: slots to load into
    model.load_weights(tmp_path / "w.weights.h5")
    model.fit(X, Y, **ONCE)
    assert belongs(model, two)
    same(state(model), uninterrupted)  # with the iteration and the slots that came along


def test_r57_adam_s_iteration_and_slots_come_back(tmp_path):
    x, y = np.ones((5, 1), "float32"), np.zeros((5, 1), "float32")

    def build():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((1,)), layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.1), "mse")
        return model

    with strategy().scope():
        model = build()
    model.fit(x, y, epochs=3, **ONCE)
    model.save_weights(tmp_path / "w.weights.h5")
    with strategy().scope():
        other = build()
    other.optimizer.build(other.trainable_variables)
    other.load_weights(tmp_path / "w.weights.h5")
    slots = [v for v in other.optimizer.variables if "learning_rate" not in v.path]
    assert len(slots) == 5
    same(state(other), state(model))
    model.fit(x, y, **ONCE)
    other.fit(x, y, **ONCE)
    for mine, theirs in zip(state(other), state(model), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_set_weights_export_and_clone():
    with strategy().scope():
        model = make()
    weights = [w + 1 for w in model.get_weights()]
    model.set_weights(weights)
    same(model.get_weights(), weights)
    clone = keras.models.clone_model(model)
    assert all(variables.home(v) is None for v in clone.variables)
    clone.set_weights(weights)
    want = clone.predict(X, verbose=0)
    np.testing.assert_allclose(model.predict(X, verbose=0), want, rtol=1e-5, atol=1e-6)


def test_a_pickled_model_is_plain():
    with strategy().scope():
        model = make()
    model.fit(X, Y, **ONCE)
    copied = pickle.loads(pickle.dumps(model))
    assert all(variables.home(v) is None for v in copied.variables)
    same(copied.get_weights(), model.get_weights())


def test_a_model_can_be_called_plainly_outside_steps():
    with strategy().scope():
        model = make()
        inside = np.asarray(model(X))
    np.testing.assert_allclose(np.asarray(model(X)), inside, rtol=1e-6)
    np.testing.assert_allclose(make()(X), inside, rtol=1e-5, atol=1e-6)


def test_r27_two_strategies_in_one_model_are_named_with_what_to_do():
    first, second = strategy(), strategy()
    with first.scope():
        model = make()
    text = (
        r"(?s)Expected model 'sequential.*' and its optimizer in one strategy. Got 2:.*"
        r"<MirroredStrategy on \[/device:CPU:0, /device:CPU:1\] made at .*test_fit_saving.py:\d+>"
        r".*variable.*the current scope.*reuse that strategy object"
    )
    with second.scope(), pytest.raises(StrategyMismatchError, match=text):
        model.fit(X, Y, verbose=0)


def test_r27_an_optimizer_of_another_strategy_is_refused():
    first, second = strategy(), strategy()
    with first.scope():
        model = make(compiled=False)
    with second.scope():
        optimizer = keras.optimizers.Adam(0.1)
    model.compile(optimizer, "mse")
    with pytest.raises(StrategyMismatchError, match=r"(?s)its optimizer in one strategy. Got 2"):
        model.fit(X, Y, verbose=0)


@pytest.mark.parametrize("strategies", [1, 2])
def test_r58_backup_and_restore_resumes_at_the_epoch_it_lost(tmp_path, strategies):
    x, y = np.ones((5, 20), "float32"), np.zeros((5, 1), "float32")
    many = [strategy() for _ in range(strategies)]

    class Stop(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 4:
                raise KeyboardInterrupt

    def build(owner):
        with owner.scope():
            model = keras.Sequential([layers.Dense(1)])  # built from the first batch
            model.compile("sgd", "mse")
        return model

    backup = tmp_path / "backup"
    model = build(many[0])
    calls = [keras.callbacks.BackupAndRestore(backup), Stop()]
    with pytest.raises(KeyboardInterrupt):
        model.fit(x, y, epochs=10, callbacks=calls, verbose=0)
    again = build(many[-1])
    history = again.fit(
        x, y, epochs=10, callbacks=[keras.callbacks.BackupAndRestore(backup)], verbose=0
    )
    assert history.epoch == [4, 5, 6, 7, 8, 9]
    assert len(history.history["loss"]) == 6
