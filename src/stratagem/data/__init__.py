"""Distributing datasets: shard policies, splitting batches, and putting them on devices."""

from __future__ import annotations

from stratagem.data.distributed_dataset import DistributedDataset as DistributedDataset
from stratagem.data.distributed_dataset import DistributedIterator as DistributedIterator
from stratagem.data.distributed_dataset import OptionalElement as OptionalElement
from stratagem.data.distributed_dataset import WorkerInput as WorkerInput
from stratagem.data.files import FileBatches as FileBatches
from stratagem.data.files import from_files as from_files
from stratagem.data.from_dataset import distribute_dataset as distribute_dataset
from stratagem.data.from_function import distribute_from_function as distribute_from_function
from stratagem.data.from_function import values_from_function as values_from_function
from stratagem.data.policy import AutoShardPolicy as AutoShardPolicy
from stratagem.data.policy import DatasetWithOptions as DatasetWithOptions
from stratagem.data.policy import DistributeOptions as DistributeOptions
from stratagem.data.policy import InputContext as InputContext
from stratagem.data.policy import InputOptions as InputOptions
from stratagem.data.policy import InputReplicationMode as InputReplicationMode
from stratagem.data.policy import ValueContext as ValueContext
from stratagem.data.policy import with_options as with_options
from stratagem.data.row_batches import RowBatches as RowBatches
from stratagem.data.row_batches import batches as batches
from stratagem.data.spec import PerReplicaSpec as PerReplicaSpec
from stratagem.data.spec import TensorSpec as TensorSpec
from stratagem.data.split import RebatchRule as RebatchRule
from stratagem.data.split import even_pattern as even_pattern
from stratagem.data.split import split_rows as split_rows
