"""The loops over single rows, compiled by Numba at their first use.

NumPy takes rows out and puts rows back at the speed of memory, but each sum or product over them is
one more pass, and its own additions at places that may repeat (`np.add.at`) go element by element.
Sums are added in the order of their terms, and products are rounded before they are added, as NumPy
does it: with the same bits. Nobody checks row numbers in here; callers do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

DTYPES = ("float32", "float64")
"""Of the rows that these can add up."""


def add_multiples(
    out: np.ndarray, places: np.ndarray, factor: np.generic, rows: np.ndarray
) -> None:  # fmt: skip
    """`out[places[i]] += factor * rows[i]` for each i.

    Args:
        out: `[n, *row]`, C-contiguous, of `DTYPES`.
        places: integers `[k]` from 0 to n - 1.
        factor: of the dtype of `out`.
        rows: `[k, *row]`, C-contiguous, of the dtype of `out`.
    """
    if rows.size:
        _compiled(_add_multiples)(_flat(out), places, factor, _flat(rows))


def add_bags(out: np.ndarray, places: np.ndarray, bounds: np.ndarray, rows: np.ndarray) -> None:
    """`out[places[k]] += rows[i]` for each bag i, and each k from `bounds[i]` to `bounds[i + 1]`.

    Args:
        out: `[n, *row]`, C-contiguous, of `DTYPES`.
        places: integers from 0 to n - 1.
        bounds: integers `[bags + 1]`, ascending, the last one at most `len(places)`.
        rows: `[bags, *row]`, C-contiguous, of the dtype of `out`.
    """
    if rows.size and places.size:
        _compiled(_add_bags)(_flat(out), places, bounds, _flat(rows))


def sum_bags(out: np.ndarray, places: np.ndarray, bounds: np.ndarray, rows: np.ndarray) -> None:
    """`out[i]` = the sum of `rows[places[k]]` over each k of bag i; zero without any.

    Args:
        out: `[bags, *row]`, C-contiguous, of `DTYPES`.
        places: integers from 0 to n - 1.
        bounds: as of `add_bags`.
        rows: `[n, *row]`, C-contiguous, of the dtype of `out`.
    """
    if out.size and rows.size:
        _compiled(_sum_bags)(_flat(out), places, bounds, _flat(rows))
    else:
        out[...] = 0


def cut_bags(
    places: np.ndarray, bounds: np.ndarray, start: int, stop: int,
    out: np.ndarray, out_bounds: np.ndarray,
) -> int:  # fmt: skip
    """Writes those places of bags that are from `start` to below `stop`, counted from there.

    Args:
        places: int32.
        bounds: as of `add_bags`, int32.
        start: of what is kept.
        stop: of it.
        out: int32, as many as places; written as far as there are any.
        out_bounds: int32, as many as bounds; written.

    Returns:
        How many are kept.
    """
    return int(_compiled(_cut_bags)(places, bounds, start, stop, out, out_bounds))


def rank(
    numbers: np.ndarray, words: np.ndarray, before: np.ndarray, found: np.ndarray, where: np.ndarray
) -> int:  # fmt: skip
    """Sorts distinct numbers into `found`, says where each is there, and gives how many they are.

    A number is a bit; its place is how many bits are set before it. (Jacobson 1989,
    "Space-efficient static trees and graphs", section 3: rank.)

    Args:
        numbers: integers `[n]`, from 0 to below `64 * len(words)`.
        words: uint64, zeros; and again afterwards.
        before: int32, as many as words; overwritten.
        found: int64 `[n]`, written as far as there are distinct numbers.
        where: int32 `[n]`, written.
    """
    return int(_compiled(_rank)(numbers, words, before, found, where))


def _flat(rows: np.ndarray) -> np.ndarray:
    return rows.reshape(len(rows), -1)


@functools.cache
def _compiled(loop: Callable[..., Any]) -> Callable[..., Any]:
    import numba

    try:
        return numba.njit(nogil=True, cache=True)(loop)
    except RuntimeError:  # there is no directory to keep what was compiled in
        return numba.njit(nogil=True)(loop)


def _add_multiples(out: Any, places: Any, factor: Any, rows: Any) -> None:
    for i in range(places.size):
        place = places[i]
        for j in range(rows.shape[1]):
            out[place, j] += factor * rows[i, j]


def _add_bags(out: Any, places: Any, bounds: Any, rows: Any) -> None:
    for i in range(rows.shape[0]):
        for k in range(bounds[i], bounds[i + 1]):
            place = places[k]
            for j in range(rows.shape[1]):
                out[place, j] += rows[i, j]


def _sum_bags(out: Any, places: Any, bounds: Any, rows: Any) -> None:
    for i in range(out.shape[0]):
        first, last = bounds[i], bounds[i + 1]
        if first == last:
            out[i] = 0
            continue
        place = places[first]
        for j in range(rows.shape[1]):
            out[i, j] = rows[place, j]
        for k in range(first + 1, last):
            place = places[k]
            for j in range(rows.shape[1]):
                out[i, j] += rows[place, j]


def _cut_bags(places: Any, bounds: Any, start: Any, stop: Any, out: Any, out_bounds: Any) -> Any:
    count = 0
    out_bounds[0] = 0
    for i in range(bounds.size - 1):
        for k in range(bounds[i], bounds[i + 1]):
            if start <= places[k] < stop:
                out[count] = places[k] - start
                count += 1
        out_bounds[i + 1] = count
    return count


def _rank(numbers: Any, words: Any, before: Any, found: Any, where: Any) -> Any:
    one, six, last = np.uint64(1), np.uint64(6), np.uint64(63)

    def ones(bits: Any) -> Any:  # Warren, "Hacker's Delight", section 5-1
        bits -= (bits >> np.uint64(1)) & np.uint64(0x5555555555555555)
        pairs = np.uint64(0x3333333333333333)
        bits = (bits & pairs) + ((bits >> np.uint64(2)) & pairs)
        bits = (bits + (bits >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
        return np.int64((bits * np.uint64(0x0101010101010101)) >> np.uint64(56))

    for i in range(numbers.size):
        number = np.uint64(numbers[i])
        words[number >> six] |= one << (number & last)
    count = 0
    for w in range(words.size):
        before[w] = count
        count += ones(words[w])
    for i in range(numbers.size):
        number = np.uint64(numbers[i])
        lower = (one << (number & last)) - one
        place = before[number >> six] + ones(words[number >> six] & lower)
        where[i] = place
        found[place] = numbers[i]
    words[:] = 0
    return count
