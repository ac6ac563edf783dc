"""Several small requests, or answers, as the fields and arrays of one message.

Each has fields of its own, with the number of its `arrays`, which follow each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from stratagem.transport.bundles import MOST_BYTES

_ARRAYS = 16  # of one: a message may hold some thousand


def are_small(arrays: Sequence[np.ndarray]) -> bool:
    """Whether something with these arrays may travel with others."""
    return len(arrays) <= _ARRAYS and sum(array.nbytes for array in arrays) <= MOST_BYTES


def join(
    parts: Iterable[tuple[Mapping[str, Any], Sequence[np.ndarray]]],
) -> tuple[list[dict[str, Any]], list[np.ndarray]]:
    """The fields of each, and the arrays of all."""
    each: list[dict[str, Any]] = []
    arrays: list[np.ndarray] = []
    for fields, mine in parts:
        each.append({**fields, "arrays": len(mine)})
        arrays.extend(mine)
    return each, arrays


def split(
    each: Sequence[Mapping[str, Any]], arrays: tuple[np.ndarray, ...]
) -> Iterator[tuple[Mapping[str, Any], tuple[np.ndarray, ...]]]:
    """The fields and arrays of each; of another task of the job, so they are not checked."""
    at = 0
    for fields in each:
        end = at + fields["arrays"]
        yield fields, arrays[at:end]
        at = end
