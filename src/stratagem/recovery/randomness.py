"""The random state of a process that is no variable of a model: Python's, NumPy's and Keras' own.

Keras shuffles arrays with NumPy's global generator and PyDatasets with Python's, and draws the
numbers of unseeded `keras.random` calls from one global seed generator.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from stratagem import _keras


def get_state() -> dict[str, Any]:
    """The state of the process's generators, as JSON can hold it."""
    version, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=False)
    generator = _keras.global_state.get_global_attribute(_keras.GLOBAL_SEED_GENERATOR)
    return {
        "python": [version, list(words), gauss],
        "numpy": {
            **numpy_state,
            "state": {k: _plain(v) for k, v in numpy_state["state"].items()},
        },
        "keras": None if generator is None else np.asarray(generator.state.value).tolist(),
    }


def set_state(state: dict[str, Any]) -> None:
    """Puts `get_state()` back."""
    if state["keras"] is not None:
        # Made, where there is none yet, from Python's generator: so this comes first.
        _keras.global_seed_generator().state.assign(np.asarray(state["keras"]))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    inner = state["numpy"]["state"]
    np.random.set_state({**state["numpy"], "state": {k: _array(v) for k, v in inner.items()}})


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def _array(value: Any) -> Any:
    return np.asarray(value, np.uint32) if isinstance(value, list) else value
