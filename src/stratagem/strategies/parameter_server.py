"""ParameterServerStrategy: variables on servers, steps on whichever worker is free."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from stratagem import config, context, variables
from stratagem.cluster import ClusterResolver, TFConfigClusterResolver, roles
from stratagem.cluster.keys import Key
from stratagem.data.dealt import DealtDataset
from stratagem.parameter_server import taking
from stratagem.parameter_server.client import Servers
from stratagem.parameter_server.keeper import Keeper
from stratagem.parameter_server.link import Link
from stratagem.parameter_server.partitioners import Partitioner
from stratagem.parameter_server.plan import Placement
from stratagem.step.flow import Home
from stratagem.strategies import leaving, remote, served_cluster, tallied
from stratagem.strategies.abstract import Strategy
from stratagem.strategies.on_worker import OnWorker
from stratagem.strategies.starts import start_of
from stratagem.transport.hub import Hub
from stratagem.transport.thread import HubThread

CONNECT_SECONDS = 300.0
_SECONDS = 60.0  # for a request to a server
STATE_DIR = "STRATAGEM_STATE_DIR"

ASYNCHRONOUS, SYNCHRONOUS, HYBRID = "asynchronous", "synchronous", "hybrid"

_log = logging.getLogger("stratagem")

# Set by the coordinator room: `(cluster, task type, index)` serves, and ends this process.
serve_task: list[Callable[[Any, str, int], NoReturn]] = []
# Likewise: `(strategy, fn)` runs a step on a worker and waits for it.
run_on_worker: list[Callable[..., Any]] = []
# Likewise: makes the coordinator of a strategy, which looks after its tasks.
begin: list[Callable[[Any], Any]] = []
# Likewise: opens the journal in a directory, for a job of some id if none is there to go on with.
open_record: list[Callable[[Path, str], Any]] = []
# Likewise: `(cluster, index)` starts a worker in a process beside this one.
start_beside: list[Callable[[Any, int], Any]] = []


@dataclasses.dataclass(frozen=True)
class Consistency:
    """How far workers may run ahead of each other.

    Args:
        mode: "asynchronous": each gradient is applied when it comes (TF's way). "synchronous": one
            update a round, of the gradients of all workers, which is the step of one device on
            their joint batch. "hybrid": tables that are looked up by row asynchronous, all else
            synchronous (Persia; Lian et al., KDD 2022); a table's gradient weighs as in a round, so
            that rows move no further with more workers.
        max_staleness: with "asynchronous", how many other updates may be applied between the read
            and the write of a step (bounded delay; Li et al., OSDI 2014); None for any number.
        backup_workers: with "synchronous", how many of a round's gradients it does not wait for;
            late ones are dropped (Chen et al., 2016, "Revisiting distributed synchronous SGD").
    """

    mode: str = ASYNCHRONOUS
    max_staleness: int | None = None
    backup_workers: int = 0

    def __post_init__(self) -> None:
        modes = (ASYNCHRONOUS, SYNCHRONOUS, HYBRID)
        if self.mode not in modes:
            raise ValueError(f"consistency: expected one of {modes}. Got {self.mode!r}.")
        if self.max_staleness is not None and (self.mode != ASYNCHRONOUS or self.max_staleness < 0):
            raise ValueError(
                "max_staleness: expected None or a count from 0 on, with consistency "
                f"'asynchronous'. Got {self.max_staleness!r} with {self.mode!r}."
            )
        if self.backup_workers < 0 or (self.backup_workers and self.mode != SYNCHRONOUS):
            raise ValueError(
                "backup_workers: expected 0, or more with consistency 'synchronous'. Got "
                f"{self.backup_workers!r} with {self.mode!r}."
            )


class ParameterServerStrategy(Strategy):
    """Training with variables on parameter servers (ps tasks) and steps on workers.

    The program with this strategy is the coordinator. It alone has user code: workers and servers
    run a generic program, `stratagem serve` or `stratagem.distribute.Server(...).join()`. In a
    task of type worker or ps, making this object serves the job and then ends the process, so that
    one script can be started for all tasks.

    Variables made in its scope live on the servers, round robin; a partitioner divides large ones
    by rows. A step that gathers rows of a variable (Embedding, ops.take, embedding_lookup) reads
    and updates those rows alone: the optimizer's update of a table sees only the rows that the
    batch has touched (for SGD and Adagrad without momentum or weight decay that is the same as
    the dense update; Adam and others become their "lazy" forms).

    With a state_dir, the same program, started again after the loss of its process, goes on: the
    variables keep their values, and batches of `fit` and of distributed datasets that are finished
    are not trained again. Other closures are the program's own affair: it schedules them again.

    Use it through Keras `fit`, or with `stratagem.coordinator.ClusterCoordinator`.

    Args:
        cluster_resolver: gives the cluster; None for that of TF_CONFIG.
        variable_partitioner: one of `stratagem.experimental.partitioners`, or None.
        consistency: "asynchronous", "synchronous" or "hybrid"; see `Consistency`.
        max_staleness: see `Consistency`.
        backup_workers: see `Consistency`.
        late_gradients: "keep" applies a late gradient as it is; "divide" divides gradients by how
            many other updates came between the read and the write of a step (Zhang et al.,
            "Staleness-aware async-SGD", IJCAI 2016, for SGD; optimizers that scale gradients by
            their size undo it in part). A worker takes the count of its last step.
        replication: 2 keeps each shard on two servers, so that the loss of one loses nothing.
        state_dir: where snapshots and the journal go; None for STRATAGEM_STATE_DIR, which
            `stratagem run` sets; "" for none. Without it a lost server cannot be restored (but see
            replication).
        snapshot_seconds: between snapshots.
        connect_seconds: how long to wait for the servers.

    Raises:
        ValueError: the cluster has no workers or no ps, or an argument is wrong.
        PeerTimeoutError, JobMismatchError: a server is not there in time, or another job has it.
    """

    served = True
    coordinator: Any = None  # the one ClusterCoordinator of it, once there is one

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        variable_partitioner: Partitioner | None = None,
        *,
        consistency: str = ASYNCHRONOUS,
        max_staleness: int | None = None,
        backup_workers: int = 0,
        late_gradients: str = "keep",
        replication: int = 1,
        state_dir: str | os.PathLike[str] | None = None,
        snapshot_seconds: float = 600.0,
        connect_seconds: float = CONNECT_SECONDS,
    ):
        resolver = TFConfigClusterResolver() if cluster_resolver is None else cluster_resolver
        self._resolver = resolver
        self.consistency = Consistency(consistency, max_staleness, backup_workers)
        if late_gradients not in ("keep", "divide"):
            raise ValueError(
                f"late_gradients: expected 'keep' or 'divide'. Got {late_gradients!r}."
            )
        self.late_gradients = late_gradients
        cluster = resolver.cluster_spec()
        served_cluster.check(cluster, resolver)
        coordinates = served_cluster.coordinates(cluster, resolver)
        if resolver.task_type in roles.SERVING and not coordinates:
            serve_task[0](cluster, resolver.task_type, int(resolver.task_id or 0))
        self.workers = served_cluster.tasks(cluster, "worker")
        self.servers = served_cluster.tasks(cluster, "ps")
        given = config.environment().get(STATE_DIR) if state_dir is None else state_dir
        self.state_dir = given or None
        self.snapshot_seconds = snapshot_seconds
        self.replication = replication
        if replication not in (1, 2) or replication > len(self.servers):
            raise ValueError(
                f"replication: expected 1, or 2 with at least two ps tasks. Got {replication} with "
                f"{len(self.servers)}. Add a ps, or leave it out."
            )
        super().__init__(config.resolve_devices(None)[:1])
        self.job_id = secrets.token_hex(8)
        self._beside: Any = None
        if coordinates:
            self._beside = start_beside[0](cluster, 0)
        self.record: Any = None
        self._left = False
        self.fits = 0  # calls of Keras' fit
        self.unfinished: str | None = None  # the epoch at work, as the journal names it
        if self.state_dir is not None:
            self.record = open_record[0](Path(self.state_dir), self.job_id)
            self.job_id = self.record.job
        self._connect(variable_partitioner, connect_seconds)
        self._program = leaving.Program(keeps=self.record is not None)
        atexit.register(self._at_exit)
        begin[0](self)
        _log.info(
            "Coordinator of %d workers and %d parameter servers, %s",
            len(self.workers), len(self.servers), consistency,
        )  # fmt: skip

    def _connect(self, partitioner: Partitioner | None, seconds: float) -> None:
        """Connects to the servers, and begins the job there, or goes on with it."""
        key = Key.always(config.environment())

        def make(hub: Hub) -> Servers:
            peers = [hub.connect(address, name) for name, address in self.servers]
            return Servers(hub, peers, self.job_id, hub.incarnation, seconds)

        asking = HubThread(lambda: Hub("coordinator", key), "stratagem-variables")
        self._threads = [asking]
        try:
            servers = asking.do(make, "servers to be connected", seconds)
            servers.replicated = self.replication > 1
            resumed = None if self.record is None else self.record.resumed
            hello = functools.partial(served_cluster.hello, asking, servers, resumed is None)
            self.told = taking.take(asking, servers, hello, seconds)
            servers.seconds = _SECONDS
            thread = HubThread(lambda: Hub("coordinator", key), "stratagem-coordinator")
            self._threads.insert(0, thread)
            directory = None if self.state_dir is None else Path(self.state_dir)
            written = max((n for said in self.told for n in said["snapshots"]), default=0)
            complete = None if resumed is None else resumed.snapshot or None
            keeper = Keeper(
                servers, directory, servers.replicated, complete, written, self._note_snapshot
            )
            placement = Placement(len(self.servers), partitioner)
            self.link = Link(thread, asking, servers, placement, keeper)
        except BaseException:
            self._disconnect()
            raise

    def _note_snapshot(self, number: int | None) -> None:
        if self.record is not None and number is None:
            self.record.asked()
        elif self.record is not None:
            self.record.snapshot(number)

    def _disconnect(self) -> None:
        for thread in self._threads:
            thread.close()
        if self.record is not None:
            self.record.close()
        if self._beside is not None:
            self._beside.close()

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """Gives the cluster."""
        return self._resolver

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """Names of the servers' devices."""
        return tuple(f"/job:ps/replica:0/task:{i}/device:CPU:0" for i in range(len(self.servers)))

    def close(self, stop_tasks: bool = False) -> None:
        """Ends the job: what is unfinished is cancelled, and what is asked for later an error.

        The end of the program does this, too, and stops the tasks; but where the program fails, the
        tasks stay, and the same program, started again, goes on. SystemExit (`sys.exit`) may mean
        either: then all that servers have is saved before the tasks stop, and it can go on;
        `stratagem run`, which sees the exit code, notes that it is done where that is 0.

        Args:
            stop_tasks: whether workers and servers end, or wait for another coordinator.
        """
        self._leave(finished=True, stop_tasks=stop_tasks)

    def _at_exit(self) -> None:
        how, kept = self._program.how, True
        if how != leaving.RETURNED and self.record is not None:
            kept = leaving.keep(self.link, self.record)
            if how == leaving.EXITED:
                self.record.perhaps()
        finished = how == leaving.RETURNED
        self._leave(finished, stop_tasks=finished or (how == leaving.EXITED and kept))

    def _leave(self, finished: bool, stop_tasks: bool) -> None:
        atexit.unregister(self._at_exit)
        if self._left:
            return
        self._left = True
        try:
            if self.record is not None and finished:
                self.record.end()  # first: whoever is started again must not miss what servers had
            if self.coordinator is not None:
                self.coordinator.dispatcher.close(stop_tasks)
            if not stop_tasks:
                self._threads[-1].submit(lambda hub: taking.leave(self.link.servers))
        finally:
            self._program.close()
            self._disconnect()

    # Variables.

    def initialize(self, variable: Any, initializer: Callable[..., Any]) -> bool:
        """Makes a new variable on the servers without its value here; False for a small one.

        Called by the Keras bridge, for variables that an initializer draws.
        """
        shape, dtype = tuple(variable.shape), np.dtype(variable.dtype)
        if variables.is_on_read(variable) or dtype.itemsize * np.prod(shape) <= remote.WHOLE_BYTES:
            return False
        start = start_of(initializer, shape, dtype)
        if start is None:
            remote.refuse_whole(variable, initializer)
            return False
        self._make(variable, start)
        return True

    def take(self, variable: Any) -> None:
        """Moves a variable, with its value, to the servers. Metrics stay: closures add to them."""
        if remote.is_remote(variable) or variable.__dict__.get("_value") is None:
            return  # made there, or not made yet
        if variables.is_on_read(variable):
            variable._value = self.place(variable._value)
            tallied.make_tallied(variable)
        else:
            self._make(variable, np.asarray(variable._value))

    def _make(self, variable: Any, start: Any) -> None:
        shape, dtype = tuple(variable.shape), variable.dtype
        spec = self.link.create(
            variable.path, shape, dtype, start, remote.beside(shape), remote.current_policy()
        )
        remote.make_remote(variable, spec, self.link)

    def home_of(self, variable: Any) -> Home:
        """Where the rows of a variable live, for cutting programs."""
        spec = variable.remote_spec
        servers = 0 if spec.dynamic is None else len(spec.shards)
        return Home(spec.vid, spec.shards, len(spec.shards) > 1, servers)

    # Steps.

    def run(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Any = None,
        options: Any = None,
    ) -> Any:  # fmt: skip
        """In a scheduled function, calls `fn` as part of it. Elsewhere, runs it on a worker.

        Elsewhere it waits for the result; to keep the workers busy, use
        `ClusterCoordinator.schedule`.
        """
        if context.current().trace is not None:
            return super().run(fn, args, kwargs, options)
        return run_on_worker[0](self, fn, tuple(args), kwargs or {})

    def reduce(self, reduce_op: Any, value: Any, axis: Any) -> Any:
        """As of other strategies, for the one replica of a step. Meant for scheduled functions."""
        if context.current().trace is None:
            _warn_unscheduled("reduce")
        return super().reduce(reduce_op, value, axis)

    def call_function(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """`stratagem.function` outside of `schedule`: on a worker, waiting for the result."""
        return run_on_worker[0](self, fn, args, kwargs)

    def lower(self, fn: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Not available: a step is several programs, one for each part."""
        raise NotImplementedError(
            "Expected a synchronous strategy to lower a step as one program. Got "
            f"{self!r}, which cuts it into parts for workers and servers. Lower it with "
            "stratagem.OneDeviceStrategy."
        )

    # Data.

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """A dataset whose batches are dealt to closures, each once, whoever runs them.

        `coordinator.create_per_worker_dataset` takes it, and so does `iter`: an iterator of it is
        an argument of `schedule`.
        """
        del options
        return DealtDataset(dataset)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[Any], Any], options: Any = None
    ) -> Any:
        """For `create_per_worker_dataset`: each worker calls `dataset_fn(InputContext)`."""
        del options
        return dataset_fn

    experimental_distribute_datasets_from_function = distribute_datasets_from_function

    def __reduce__(self) -> Any:
        """In a dataset function that goes to a worker, what it finds there in its place."""
        return OnWorker, ()

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} of {len(self.workers)} workers and {len(self.servers)} ps, "
            f"{self.consistency.mode}, made at {self._made_at}>"
        )


@functools.cache
def _warn_unscheduled(method: str) -> None:
    _log.warning(
        "strategy.%s of a ParameterServerStrategy was called outside of a scheduled function: the "
        "coordinator computes it, and workers wait meanwhile. Call it in a function that you pass "
        "to ClusterCoordinator.schedule.",
        method,
    )
