"""What a caller may choose about input: shard policy, replication mode, and the contexts."""

from __future__ import annotations

import dataclasses
import enum
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

from stratagem.data.split import RebatchRule


class AutoShardPolicy(enum.IntEnum):
    """How a dataset is divided between *workers*. Values are those of `tf.data`.

    On one worker there is nothing to divide; the policy then only chooses the rebatch rule, that
    is, how the rows of a batch are dealt to the replicas (see `rebatch_rule`).

    OFF: every worker takes all rows of its own dataset. AUTO: as FILE for `from_files` with files
    enough, else as DATA. FILE: each worker reads its own files of `from_files`. DATA: all workers
    see the same global batches and take their rows. HINT: refused with several workers.
    """

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3


class InputReplicationMode(enum.Enum):
    """Whether a dataset function is called once per worker or once per replica."""

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


@dataclasses.dataclass(frozen=True)
class DistributeOptions:
    """What a dataset says about its own distribution.

    Args:
        auto_shard_policy: how workers share the dataset.
    """

    auto_shard_policy: AutoShardPolicy = AutoShardPolicy.AUTO


@dataclasses.dataclass(frozen=True)
class DatasetWithOptions:
    """A dataset together with its options. Made by `with_options`; iterates as the dataset."""

    dataset: Any
    options: DistributeOptions

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)


def with_options(dataset: Any, *, auto_shard_policy: AutoShardPolicy) -> DatasetWithOptions:
    """Attaches a shard policy to any dataset, as `tf.data.Dataset.with_options` does to its own.

    Args:
        dataset: anything `experimental_distribute_dataset` accepts. It is not changed.
        auto_shard_policy: how workers share the dataset. It wins over the dataset's own policy.

    Returns:
        The dataset with its policy, to be passed in place of the dataset.
    """
    if isinstance(dataset, DatasetWithOptions):
        dataset = dataset.dataset
    return DatasetWithOptions(dataset, DistributeOptions(AutoShardPolicy(auto_shard_policy)))


def rebatch_rule(policy: AutoShardPolicy) -> RebatchRule:
    """CEIL for AUTO and DATA, EVEN for OFF, FILE and HINT (measured on TF 2.21)."""
    if policy in (AutoShardPolicy.AUTO, AutoShardPolicy.DATA):
        return RebatchRule.CEIL
    return RebatchRule.EVEN


@dataclasses.dataclass(frozen=True)
class InputContext:
    """Tells a dataset function which part of the input it is asked for.

    Args:
        num_input_pipelines: how many times the function is called in the whole job.
        input_pipeline_id: which of these calls this is, from 0.
        num_replicas_in_sync: replicas of the whole job.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Returns `global_batch_size / num_replicas_in_sync`.

        Raises:
            ValueError: the batch size is not divisible.
        """
        size, rest = divmod(global_batch_size, self.num_replicas_in_sync)
        if rest:
            raise ValueError(
                "Expected a global batch size that the replicas divide. Got "
                f"global_batch_size={global_batch_size} for "
                f"num_replicas_in_sync={self.num_replicas_in_sync}. Use a multiple of it, or "
                "experimental_distribute_dataset, which splits any batch."
            )
        return size


@dataclasses.dataclass(frozen=True)
class ValueContext:
    """Tells a value function which replica it is asked for.

    Args:
        replica_id_in_sync_group: the replica, from 0.
        num_replicas_in_sync: replicas of the whole job.
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1


class InputOptions(
    namedtuple(
        "InputOptions",
        (
            "experimental_fetch_to_device",
            "experimental_replication_mode",
            "experimental_place_dataset_on_device",
            "experimental_per_replica_buffer_size",
        ),
    )
):
    """How a distributed dataset is fed. Names and defaults are TF's.

    Args:
        experimental_fetch_to_device: put batches on the replicas' devices (None means True); with
            False they stay NumPy arrays on the host.
        experimental_replication_mode: call a dataset function per worker or per replica.
        experimental_place_dataset_on_device: make and iterate each replica's dataset with that
            replica's device as JAX's default; needs PER_REPLICA and no fetching.
        experimental_per_replica_buffer_size: accepted, at least 1. It changes nothing: JAX copies
            to the device while the previous step runs, so there is no buffer to size.
    """

    __slots__ = ()

    def __new__(
        cls,
        experimental_fetch_to_device: bool | None = None,
        experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER,
        experimental_place_dataset_on_device: bool = False,
        experimental_per_replica_buffer_size: int = 1,
    ) -> InputOptions:
        fetch = True if experimental_fetch_to_device is None else experimental_fetch_to_device
        return super().__new__(
            cls,
            fetch,
            experimental_replication_mode,
            experimental_place_dataset_on_device,
            experimental_per_replica_buffer_size,
        )


def check_input_options(options: InputOptions, *, from_function: bool) -> None:
    """Refuses combinations that mean nothing.

    Args:
        options: what the caller asked for.
        from_function: whether the input comes from a dataset function.

    Raises:
        TypeError: not InputOptions.
        NotImplementedError: PER_REPLICA without a dataset function, as in TF.
        ValueError: options that contradict each other.
    """
    if not isinstance(options, InputOptions):
        raise TypeError(
            f"Expected options of type InputOptions. Got {type(options).__name__}. A shard policy "
            "belongs to the dataset: stratagem.data.with_options(dataset, auto_shard_policy=...)."
        )
    per_replica = options.experimental_replication_mode is InputReplicationMode.PER_REPLICA
    if per_replica and not from_function:
        raise NotImplementedError(
            "Expected InputReplicationMode.PER_WORKER: one dataset object cannot be opened once "
            "per replica. Got PER_REPLICA. Use distribute_datasets_from_function."
        )
    problems = []
    if options.experimental_place_dataset_on_device:
        if not per_replica:
            problems.append("experimental_replication_mode is not PER_REPLICA")
        if options.experimental_fetch_to_device:
            problems.append("experimental_fetch_to_device is not False")
        if problems:
            problems = [f"with experimental_place_dataset_on_device=True, {p}" for p in problems]
    if options.experimental_per_replica_buffer_size < 1:
        problems.append(
            "experimental_per_replica_buffer_size="
            f"{options.experimental_per_replica_buffer_size} is less than 1"
        )
    if problems:
        raise ValueError(
            f"Expected InputOptions that fit together. Got: {'; '.join(problems)}. "
            "Leave these options at their defaults, or set the others to match."
        )
