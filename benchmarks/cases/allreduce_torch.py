"""The same all-reduce by torch.distributed's Gloo."""

from __future__ import annotations

from typing import Any

import measure
import pair
import problems
import torch
import torch.distributed as dist


def main() -> None:
    arguments = measure.options(("size", list(problems.SIZES)))
    with pair.partner() as rank:
        dist.init_process_group(
            "gloo", init_method=f"tcp://{pair.addresses()[0]}", rank=rank, world_size=pair.WORKERS
        )
        value = torch.full((problems.SIZES[arguments.size] // 4,), float(rank + 1))

        def step(x: Any) -> Any:
            total = x.clone()  # as a step that keeps its input
            dist.all_reduce(total)
            return total

        measure.loop(step, [value], arguments.steps, arguments.samples, lambda total: total)
        measure.say(loss=float(step(value)[0]), about={"torch": torch.__version__})
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
