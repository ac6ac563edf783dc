"""Elements that are kept while their source makes further ones, which may refill its buffers."""

from __future__ import annotations

import sys
from typing import Any

import jax
import numpy as np


def owned(element: Any) -> Any:
    """A structure with copies of the arrays in it; what cannot change stays as it is."""
    return jax.tree.map(owned_array, element)


def owned_array(leaf: Any) -> Any:
    """A copy of a NumPy array or a torch tensor; anything else itself."""
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(leaf, torch.Tensor):
        return leaf.detach().clone()
    return leaf
