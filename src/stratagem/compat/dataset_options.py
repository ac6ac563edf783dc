"""tf.data.Options and what belongs to it."""

from __future__ import annotations

import copy
from typing import Any

from stratagem.data import AutoShardPolicy

AUTOTUNE = -1
INFINITE_CARDINALITY = -1
UNKNOWN_CARDINALITY = -2


class DistributeOptions:
    """How a dataset is divided between workers (tf.data.experimental.DistributeOptions)."""

    def __init__(self) -> None:
        self._policy: AutoShardPolicy | None = None
        self.num_devices: int | None = None

    @property
    def auto_shard_policy(self) -> AutoShardPolicy:
        """OFF, AUTO (unless said), FILE, DATA or HINT."""
        return AutoShardPolicy.AUTO if self._policy is None else self._policy

    @auto_shard_policy.setter
    def auto_shard_policy(self, policy: Any) -> None:
        self._policy = AutoShardPolicy(policy)


class Options:
    """What a dataset says about itself (tf.data.Options).

    `experimental_distribute.auto_shard_policy` is obeyed. `deterministic`, `autotune`, `threading`
    and `experimental_optimization` tune TensorFlow's engine: they take anything and change nothing,
    since elements always come in one order here.
    """

    def __init__(self) -> None:
        self.experimental_distribute = DistributeOptions()
        self.deterministic: bool | None = None
        self.autotune = _Accepted()
        self.threading = _Accepted()
        self.experimental_optimization = _Accepted()

    def merge(self, other: Options) -> Options:
        """These options, with those that the other one sets in their place."""
        merged = copy.deepcopy(self)
        theirs = other.experimental_distribute
        if theirs._policy is not None:
            merged.experimental_distribute.auto_shard_policy = theirs._policy
        return merged

    def __setattr__(self, name: str, value: Any) -> None:
        known = ("experimental_distribute", "deterministic", "autotune", "threading")
        if name not in (*known, "experimental_optimization"):
            raise AttributeError(
                f"Expected an option of tf.data.Options, {', '.join(known)} or "
                f"experimental_optimization. Got {name!r}. Leave it out."
            )
        super().__setattr__(name, value)


class _Accepted:
    """Options that change nothing here."""
