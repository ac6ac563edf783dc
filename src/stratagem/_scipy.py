"""The private names of SciPy that Stratagem uses, and what it needs of each.

A test (tests/devices/test_private_names.py) fails when a new version of SciPy moves or changes one
of them.
"""

from __future__ import annotations

import numpy as np

# The public product `matrix @ rows` makes a new array for its result. Needed: the kernel beneath
# it, which adds to an array that is there: `(rows of out, columns, row size, bounds, places,
# factors, rows, out)`. Its arrays of integers have one dtype, all others another.
from scipy.sparse._sparsetools import csc_matvecs


def add_multiples(
    out: np.ndarray, places: np.ndarray, factor: np.generic, rows: np.ndarray
) -> None:  # fmt: skip
    """`out[places[i]] += factor * rows[i]`, one after the other, in one pass.

    The product is rounded before it is added, as NumPy does it.

    Args:
        out: `[n, *row]`, C-contiguous, float32 or float64.
        places: int64 `[k]`, each from 0 to n - 1: nobody checks that here.
        factor: of the dtype of `out`.
        rows: `[k, *row]`, C-contiguous, of the dtype of `out`.
    """
    count = len(places)
    if not rows.size:
        return
    csc_matvecs(
        len(out), count, rows.size // count, np.arange(count + 1), places,
        np.full(count, factor), rows.reshape(-1), out.reshape(-1),
    )  # fmt: skip
