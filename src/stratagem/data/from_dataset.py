"""Chooses how a dataset is shared between workers, and distributes it so."""

from __future__ import annotations

import functools
from typing import Any

from jax.sharding import Mesh

from stratagem.cluster.runtime import Job
from stratagem.data.adapt import Source, adapt
from stratagem.data.deal_feed import DealFeed
from stratagem.data.distributed_dataset import DistributedDataset, Feed
from stratagem.data.file_feed import FileFeed
from stratagem.data.files import FileBatches
from stratagem.data.pieces import pieces
from stratagem.data.placement import Placement
from stratagem.data.policy import (
    AutoShardPolicy,
    DatasetWithOptions,
    InputOptions,
    check_input_options,
)
from stratagem.data.split_feed import SplitFeed
from stratagem.data.workers import Workers


def distribute_dataset(
    dataset: Any, *, mesh: Mesh, options: InputOptions | None = None, job: Job | None = None
) -> DistributedDataset:
    """Distributes a dataset of global batches: `Strategy.experimental_distribute_dataset`.

    With several processes, by shard policy:
    - AUTO, DATA: every process iterates the same global batches and takes the rows of its
      replicas; of `batches` it reads no others.
    - FILE, and AUTO for `from_files` with at least as many files as workers: each worker reads its
      own files. The global batches are the same as with any other number of workers.
    - OFF: each process takes all rows of its own dataset, in pieces of one replica's size.

    Args:
        dataset: iterable of batches `[rows, ...]`, or of structures of them, of any library; a
            function without arguments that returns one; with `with_options` it has a policy.
        mesh: the replicas' devices, one axis "replica".
        options: how to feed.
        job: the processes that train together; None for one alone. Every process calls this, and
            iterates the result alike.

    Returns:
        A dataset whose elements have the same structure, each leaf a `PerReplica` (with one
        replica a plain array). Every row is given once (OFF: once by each worker).

    Raises:
        TypeError: no iterable of batches.
        ValueError: the dataset is distributed already; or FILE without files, with fewer files
            than workers, or with fewer read at once.
        NotImplementedError: PER_REPLICA, which needs `distribute_from_function`; HINT with several
            processes.
        JobMismatchError: at the first batch of a pass, when the processes see other batches.
    """
    options = InputOptions() if options is None else options
    check_input_options(options, from_function=False)
    if isinstance(dataset, DistributedDataset):
        raise ValueError(
            "Expected a dataset that is not distributed yet. Got a DistributedDataset. Iterate it "
            "as it is, or distribute the dataset that it was made from."
        )
    source = adapt(dataset)
    bare = dataset.dataset if isinstance(dataset, DatasetWithOptions) else dataset
    files = bare if isinstance(bare, FileBatches) else None
    placement = Placement(mesh, to_device=options.experimental_fetch_to_device)
    return DistributedDataset(_feed(source, files, placement, Workers(job)))


def _feed(
    source: Source, files: FileBatches | None, placement: Placement, workers: Workers
) -> Feed:
    policy = AutoShardPolicy.AUTO if source.policy is None else source.policy
    note = ""
    if files is not None:
        policy, note = _policy_of_files(policy, files, workers.count)
    if workers.count == 1:
        return _split(source, files, placement, workers, policy, note)
    if policy is AutoShardPolicy.HINT:
        raise NotImplementedError(
            "Expected AUTO, FILE, DATA or OFF for several workers. Got HINT, which rewrites "
            "shard(SHARD_HINT, SHARD_HINT) inside a tf.data graph. Use "
            "strategy.distribute_datasets_from_function(fn): its InputContext has the numbers to "
            "shard with."
        )
    if policy is AutoShardPolicy.OFF:
        return DealFeed([pieces(source, placement.num_replicas, workers)], placement, workers)
    if policy is AutoShardPolicy.FILE:
        if files is None:
            raise ValueError(
                f"Expected a dataset made of files for policy FILE. Got {source.kind}. Use "
                "stratagem.data.from_files(files, reader, batch_size), or policy DATA, which "
                "shares the rows of any dataset."
            )
        return FileFeed(files, placement, workers, note, functools.partial(_feed, source, files))
    return _split(source, files, placement, workers, policy, note)


def _split(
    source: Source,
    files: FileBatches | None,
    placement: Placement,
    workers: Workers,
    policy: AutoShardPolicy,
    note: str,
) -> SplitFeed:
    feed = SplitFeed(source, placement, workers, policy, note)
    if files is not None:  # for other workers another policy may be right
        feed.choose = functools.partial(_feed, source, files)
    return feed


def _policy_of_files(
    policy: AutoShardPolicy, files: FileBatches, workers: int
) -> tuple[AutoShardPolicy, str]:
    """The policy that is taken, and what the log says of it."""
    count, at_once = len(files.files), files.interleave
    note = f"{count} file{'' if count == 1 else 's'}, "
    problem = None
    if count < workers:
        problem = f"{count} file{'' if count == 1 else 's'} for {workers} workers"
    elif at_once < workers:
        problem = f"interleave={at_once} files at once for {workers} workers"
    if policy is AutoShardPolicy.FILE and problem:
        raise ValueError(
            f"Expected at least one file for each worker to read at any time. Got {problem}. Use "
            "policy AUTO or DATA, which share rows, or more files (and a larger interleave)."
        )
    if policy is AutoShardPolicy.AUTO:
        policy = AutoShardPolicy.DATA if problem else AutoShardPolicy.FILE
        note = f"chosen by AUTO for {problem or note.removesuffix(', ')}, "
    return policy, note
