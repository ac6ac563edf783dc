"""Records the demo's step, and the reports that are made of it."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from stratagem.cli import plan, plan_show
from stratagem.planning import machines, predict, topology

HERE = Path(__file__).parent
KNOWN = machines.load()

wanted = plan.Config(
    "examples/digits_mirrored.py", False, (), "gpu", "h100:8x8", 32, json=False, plot=None
)
program = plan.trace(wanted, topology.parse(wanted.topology, KNOWN))
(HERE / "demo.json").write_text(program.to_json() + "\n")
for text in ("v5e:8x8", "h100:8x8"):
    out = io.StringIO()
    made = predict.plan(program, topology.parse(text, KNOWN))
    plan_show.show(made, Console(file=out, width=110))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    (HERE / f"demo_{text.partition(':')[0]}.txt").write_text("\n".join(lines) + "\n")
