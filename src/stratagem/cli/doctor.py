"""`stratagem doctor`: checks this machine and its cluster, and says what to do."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import zmq

from stratagem import config
from stratagem.cli import checkup, machine
from stratagem.cli.diagnosis import Diagnosis, show, to_json
from stratagem.cli.machine import Devices, Package
from stratagem.cluster import checks, compare, meeting
from stratagem.cluster.checks import Finding, Level, Seat
from stratagem.cluster.keys import Key
from stratagem.cluster.rollcall import listen, split_address
from stratagem.launcher.abstract import LaunchError
from stratagem.launcher.hosts import own_index, parse_hosts

_USAGE_ERROR = 2  # As argparse exits.
_NAME_SECONDS = 10.0
_PEER_SECONDS = 5.0
_DESCRIPTION = """\
Checks this machine, and the cluster that TF_CONFIG describes, and says what to do.

  stratagem doctor             this machine, TF_CONFIG, its own address and port
  stratagem doctor --peers     and whether the other tasks' machines answer
  stratagem doctor --cluster   on all machines at about the same time: who reaches whom, round
                               trips, clocks, and versions, devices and clusters that differ
"""
_EPILOG = "The exit code is 0 if all is fine, 1 if something must be done, 2 for wrong options."


@dataclass(frozen=True)
class Config:
    """What is to be checked.

    Args:
        peers: connect once to every other task.
        cluster: meet the other tasks, which do the same.
        bandwidth: measure it too.
        seconds: how long to try to reach all.
        json: print JSON instead of tables.
        hosts: of `stratagem run --hosts`, instead of TF_CONFIG.
        host_index: which of them this is; None to find out.
    """

    peers: bool
    cluster: bool
    bandwidth: bool
    seconds: float
    json: bool
    hosts: str | None
    host_index: int | None


def add_to(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "doctor",
        help="check a machine and a cluster",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(act=doctor)
    parser.add_argument("--peers", action="store_true", help="try to connect to the other tasks")
    parser.add_argument(
        "--cluster", action="store_true", help="meet the other tasks, which must do it too"
    )
    parser.add_argument(
        "--seconds", type=float, default=30.0, metavar="S", help="--cluster: wait for them (30)"
    )
    parser.add_argument(
        "--bandwidth", action="store_true", help="--cluster: send 32 MiB to each, and time it"
    )
    parser.add_argument(
        "--hosts",
        metavar="HOST[:PORT],...",
        help="a cluster of one task on each of these machines, instead of TF_CONFIG",
    )
    parser.add_argument(
        "--host-index", type=int, metavar="I", help="which of --hosts this machine is"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def doctor(options: argparse.Namespace) -> int:
    """Runs the parsed command; returns its exit code."""
    wanted = Config(
        options.peers,
        options.cluster,
        options.bandwidth,
        options.seconds,
        options.json,
        options.hosts,
        options.host_index,
    )
    if found := faults(wanted):
        for fault in found:
            print(f"stratagem doctor: error: {fault}", file=sys.stderr)
        return _USAGE_ERROR
    diagnosis = examine(wanted)
    if wanted.json:
        print(to_json(diagnosis))
    else:
        show(diagnosis)
    return diagnosis.exit_code


def faults(wanted: Config) -> list[str]:
    """A sentence for each fault of the options."""
    found = []
    if not 0 < wanted.seconds <= 3600:
        found.append(f"--seconds: expected more than 0, and at most 3600. Got {wanted.seconds:g}.")
    if wanted.bandwidth and not wanted.cluster:
        found.append("--bandwidth: expected --cluster with it, for both ends measure. Got none.")
    if wanted.host_index is not None and wanted.hosts is None:
        found.append("--host-index: expected --hosts with it, that it points into. Got none.")
    return found


def examine(wanted: Config) -> Diagnosis:
    """Does all checks that are wanted, one after the other; each has a deadline."""
    packages = machine.packages()
    devices = machine.devices(config.environment())
    seat, told = _seat(wanted)
    found = [*_machine(packages, devices), *told]
    if seat is None:
        wrong = any(finding.level is Level.FAULT for finding in told)
        return Diagnosis((*found, *([] if wrong else _nobody(wanted))))
    found += _place(seat)
    if wanted.peers:
        tried = meeting.try_peers(seat.others, _PEER_SECONDS)
        found += compare.check_peers(tried, dict(seat.others))
    if not wanted.cluster:
        return Diagnosis(tuple(found))
    versions = tuple((p.name, p.installed) for p in packages if p.installed is not None)
    card = meeting.Card(seat.task, seat.cluster, versions, checkup.describe(devices.names))
    try:
        key = Key.of(config.environment())
        met = meeting.meet(card, wanted.seconds, wanted.bandwidth, key)
    except ValueError:  # The key, which `check_key` has found.
        do = "Correct the key first; see above."
        return Diagnosis((*found, Finding(Level.FAULT, "cluster", "not met, without a key", do)))
    except OSError as error:
        do = "Correct this task's own address first; see above."
        text = f"not met, since this task cannot listen at {seat.address}: {error.strerror}"
        return Diagnosis((*found, Finding(Level.FAULT, "cluster", text, do)))
    return Diagnosis((*found, *compare.check_meeting(met)), met)


def _machine(packages: Sequence[Package], devices: Devices) -> list[Finding]:
    environment = config.environment()
    chips, extras, plugins = machine.chips(), machine.extras("jax"), machine.plugins()
    return [
        *checkup.check_versions(packages),
        *checkup.check_devices(devices, environment),
        *checkup.check_chips(chips, devices, environment, extras, plugins),
        *checkup.check_resources(machine.resources()),
        checks.check_encryption(zmq.has("curve"), zmq.__version__),
        Finding(Level.FINE, "clock", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())),
        *checkup.check_environment(environment),
    ]


def _seat(wanted: Config) -> tuple[Seat | None, list[Finding]]:
    """This task's place in its cluster, from TF_CONFIG or --hosts, and what is wrong with that."""
    if wanted.hosts is None:
        return checks.check_tf_config(config.environment().get("TF_CONFIG"))
    what, index = "--hosts", wanted.host_index
    try:
        hosts = parse_hosts(wanted.hosts)
        index = own_index(hosts) if index is None else index
    except LaunchError as error:
        return None, [Finding(Level.FAULT, what, str(error), "Correct it, on all machines alike.")]
    if not 0 <= index < len(hosts):
        text = f"--host-index: expected 0 to {len(hosts) - 1}. Got {index}"
        return None, [Finding(Level.FAULT, what, text, "Give this machine's place in --hosts.")]
    tasks = tuple((f"worker {i}", f"{host.name}:{host.port}") for i, host in enumerate(hosts))
    text = f"this is {hosts[index].name}, number {index} of {len(hosts)} from 0"
    return Seat(f"worker {index}", tasks), [Finding(Level.FINE, what, text)]


def _place(seat: Seat) -> list[Finding]:
    """The names of the cluster's hosts, this task's own address, and what is in the way."""
    resolved = meeting.resolve_all(seat.hosts, _NAME_SECONDS)
    found = checks.check_names(seat, resolved)
    host, port = split_address(seat.address)
    if not isinstance(resolved[host], str):  # Else that is said already.
        found.append(_own_address(seat, port))
    environment = config.environment()
    found += checks.check_key(environment, resolved, seat.served)
    found += checks.check_serving(seat)
    return found + checks.check_proxies(environment, seat)


def _own_address(seat: Seat, port: int) -> Finding:
    try:
        listen(seat.address).close()
    except OSError as error:
        return checks.check_own_address(seat, error, machine.port_holder(port))
    return checks.check_own_address(seat, None, None)


def _nobody(wanted: Config) -> list[Finding]:
    if not (wanted.peers or wanted.cluster):
        return []
    do = "Set TF_CONFIG as the task that trains here gets it, or give --hosts, and run it again."
    return [Finding(Level.FAULT, "cluster", "this is no task that others train with", do)]
