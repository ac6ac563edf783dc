"""What a meeting of all tasks has brought to light, as findings: pure."""

from __future__ import annotations

from collections.abc import Iterator

from stratagem.cluster.checks import Finding, Level
from stratagem.cluster.keys import VARIABLE
from stratagem.cluster.line import NOBODY_LISTENS
from stratagem.cluster.meeting import Card, Link, Meeting
from stratagem.cluster.roles import TRAINERS
from stratagem.cluster.rollcall import MAX_CLOCK_SKEW

_LOOK_SECONDS = 0.5  # of clocks that differ: logs get hard to compare


def check_peers(tried: dict[str, str], addresses: dict[str, str]) -> list[Finding]:
    """Whether the machines of other tasks answer, whatever runs there.

    Args:
        tried: task -> "" or why there was no connection; see `meeting.try_peers`.
        addresses: of these tasks.
    """
    found = []
    for task, problem in tried.items():
        where = f"{task} at {addresses[task]}"
        if not problem:
            found.append(Finding(Level.FINE, "peers", f"{where}: connected"))
        elif problem == NOBODY_LISTENS:
            text = f"{where}: the machine can be reached; nothing listens at the port now"
            found.append(Finding(Level.FINE, "peers", text))
        else:
            found.append(
                Finding(Level.FAULT, "peers", f"{where}: {problem}", _how_to_reach(problem))
            )
    return found


def check_meeting(met: Meeting) -> list[Finding]:
    """Who does not reach whom, and in what the tasks differ; one finding if all is well."""
    found = [
        *(f for link in met.links if link.problem for f in _unreached(link)),
        *_one_way(met),
        *(f for link in met.links if link.card for f in _who_is_there(met.card, link)),
        *_callers(met),
        *(f for card in _cards(met).values() for f in _differences(met.card, card)),
        *(f for link in met.links if not link.problem for f in _clock(link)),
    ]
    if found:
        return found
    count = len(met.card.cluster)
    slowest = max((ms for row in met.reach.values() for ms in row.values() if ms), default=0.0)
    text = f"all {count} tasks reach each other and are alike; slowest round trip {slowest:.2f} ms"
    return [Finding(Level.FINE, "cluster", text)]


def _cards(met: Meeting) -> dict[str, Card]:
    """What each other task said of itself, here or there."""
    cards = [*met.callers, *(link.card for link in met.links if link.card)]
    return {card.task: card for card in cards if card.token != met.card.token}


def _unreached(link: Link) -> Iterator[Finding]:
    text = f"{link.task} at {link.address}: {link.problem}"
    yield Finding(Level.FAULT, "reach", text, _how_to_reach(link.problem))


def _how_to_reach(problem: str) -> str:
    if problem == NOBODY_LISTENS:
        return (
            "Run stratagem doctor --cluster there at the same time; if it runs, the address is "
            "not the one where it listens: correct it, or forward the port."
        )
    if VARIABLE in problem:
        return f"Set {VARIABLE} to the same secret on all tasks, or on none."
    if "stratagem doctor" in problem or "another program" in problem:
        return "End what listens there (a job that runs?), or give that task another port."
    if "host name" in problem:
        return "Correct the name, or add it to the name service or /etc/hosts; or write its IP."
    return (
        "See that the machine is on and the address right; let TCP pass between all machines of "
        "the cluster, at all ports from 1024 on (firewall, security group, network policy)."
    )


def _one_way(met: Meeting) -> Iterator[Finding]:
    """Connections that others miss. (A task that this one misses too is named already.)"""
    missed = {link.task for link in met.links if link.problem}
    for source, row in met.reach.items():
        lost = [to for to, ms in row.items() if ms is None and to not in missed]
        if source != met.card.task and lost:
            do = f"Let TCP pass from the machine of {source} to these; see what {source} reports."
            yield Finding(Level.FAULT, "reach", f"{source} does not reach {', '.join(lost)}", do)


def _who_is_there(own: Card, link: Link) -> Iterator[Finding]:
    card = link.card
    if card is None or card.task == link.task:
        return
    text = f"at {link.address}, which should be {link.task}, is {card.task}"
    do = "Give every task its own index, and the address of its own machine."
    if card.token == own.token:
        text = f"{link.address}, which should be {link.task}, leads to this task itself"
        do = "Correct the address: it is another name of this machine."
    yield Finding(Level.FAULT, "tasks", text, do)


def _callers(met: Meeting) -> Iterator[Finding]:
    names = [name for name, _ in met.card.cluster]
    others = {card.token: card.task for card in met.callers if card.token != met.card.token}
    for task in sorted(set(others.values())):
        if task == met.card.task:
            do = "Give every task its own type and index in TF_CONFIG."
            yield Finding(Level.FAULT, "tasks", f"another machine is {task} too", do)
        elif task not in names:
            do = "Start every task with the same cluster."
            text = f"{task} has connected, which this task's cluster does not have"
            yield Finding(Level.FAULT, "tasks", text, do)


def _differences(own: Card, card: Card) -> Iterator[Finding]:
    if card.cluster != own.cluster:
        text = f"{card.task} has {_show(card)}. This task has {_show(own)}"
        do = "Start every task with the same cluster; only the task's type and index differ."
        yield Finding(Level.FAULT, "clusters", text, do)
    ours, theirs = dict(own.versions), dict(card.versions)
    unlike = [
        f"{name} {theirs.get(name, 'missing')}, not {ours.get(name, 'missing')}"
        for name in sorted({*ours, *theirs})
        if ours.get(name) != theirs.get(name)
    ]
    if unlike:
        # A job refuses other versions of most, and another Python may work.
        level = Level.LOOK if all(u.startswith("python ") for u in unlike) else Level.FAULT
        do = "Install the same versions on all machines, or use one container image."
        yield Finding(level, "versions", f"{card.task} has {'; '.join(unlike)}", do)
    if card.devices != own.devices and _trains(card) and _trains(own):
        text = f"{card.task} has {card.devices}. This task has {own.devices}"
        do = "Give every task as many of the same kind (CUDA_VISIBLE_DEVICES, STRATAGEM_REHEARSE)."
        yield Finding(Level.FAULT, "devices", text, do)


def _clock(link: Link) -> Iterator[Finding]:
    off = abs(link.clock_offset)
    if off > _LOOK_SECONDS + link.milliseconds / 2e3:
        level = Level.FAULT if off > MAX_CLOCK_SKEW else Level.LOOK
        text = f"{link.task}'s clock is {link.clock_offset:+.2f} s off this machine's"
        do = "Let NTP set the clocks on both (`timedatectl set-ntp true`, or chrony)."
        yield Finding(level, "clocks", text, do)


def _trains(card: Card) -> bool:
    return card.task.partition(" ")[0] in TRAINERS


def _show(card: Card) -> str:
    return "[" + ", ".join(f"{task} at {address}" for task, address in card.cluster) + "]"
