"""How the findings of `stratagem doctor` are shown: as tables, or as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stratagem.cli import terminal
from stratagem.cluster.checks import Finding, Level
from stratagem.cluster.meeting import Meeting

_STYLES = {Level.FINE: "green", Level.LOOK: "yellow", Level.FAULT: "bold red"}
_MOST_IN_MATRIX = 12  # tasks


@dataclass(frozen=True)
class Diagnosis:
    """All that was found; `meeting` is None where the other tasks were not met."""

    findings: tuple[Finding, ...]
    meeting: Meeting | None = None

    @property
    def exit_code(self) -> int:
        """0 if all is fine, 1 if something must be done."""
        return int(any(finding.level is Level.FAULT for finding in self.findings))


def to_json(diagnosis: Diagnosis) -> str:
    """One object: `healthy`, `findings`, `meeting` (null where there was none)."""
    findings = [{**asdict(f), "level": f.level.value} for f in diagnosis.findings]
    met = None if diagnosis.meeting is None else asdict(diagnosis.meeting)
    shown = {"healthy": not diagnosis.exit_code, "findings": findings, "meeting": met}
    return json.dumps(shown, indent=2)


def show(diagnosis: Diagnosis, console: Console | None = None) -> None:
    """Prints tables: the other tasks, who reaches whom, and what was found."""
    console = console or terminal.console()
    if diagnosis.meeting is not None:
        console.print(_tasks(diagnosis.meeting))
        if 2 < len(diagnosis.meeting.card.cluster) <= _MOST_IN_MATRIX:
            console.print(_matrix(diagnosis.meeting))
    console.print(_findings(diagnosis))
    faults = sum(finding.level is Level.FAULT for finding in diagnosis.findings)
    console.print(
        Text(f"{faults} to be done", "bold red") if faults else Text("all is fine", "green")
    )


def _findings(diagnosis: Diagnosis) -> Table:
    table = Table("", "checked", "found", box=box.SIMPLE)
    for finding in diagnosis.findings:
        style = _STYLES[finding.level]
        found = Text(finding.found)  # As it is: rich would read what is in brackets.
        if finding.do:
            found.append(f"\n-> {finding.do}", "bold")
        table.add_row(Text(finding.level.value, style), Text(finding.what), found)
    return table


def _tasks(met: Meeting) -> Table:
    rates = any(link.megabytes_per_second is not None for link in met.links)
    table = Table("task", "address", "round trip", "clock", "devices", "versions", box=box.SIMPLE)
    if rates:
        table.add_column("bandwidth")
    for link in met.links:
        card = link.card
        if card is None:
            table.add_row(link.task, Text(link.address), Text("not reached", "bold red"))
            continue
        rate = link.megabytes_per_second
        row = [
            f"{link.milliseconds:.2f} ms",
            f"{link.clock_offset * 1e3:+.1f} ms",
            card.devices,
            "the same" if card.versions == met.card.versions else "differ",
            *([f"{rate:.0f} MB/s" if rate is not None else "no time"] if rates else []),
        ]
        table.add_row(link.task, Text(link.address), *map(Text, row))
    return table


def _matrix(met: Meeting) -> Table:
    """Milliseconds from each task to each; "-" where it is not reached, "?" if nobody said so."""
    names = [task for task, _ in met.card.cluster]
    table = Table("from \\ to, ms", *names, box=box.SIMPLE)
    for source in names:
        row = met.reach.get(source, {})
        cells = [row.get(to, "?") for to in names]
        shown = [
            ""
            if source == to
            else "-"
            if ms is None
            else ms
            if isinstance(ms, str)
            else f"{ms:.2f}"
            for to, ms in zip(names, cells, strict=True)
        ]
        table.add_row(source, *shown)
    return table
