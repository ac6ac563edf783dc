"""Which values are not linear in gradients: their mean over parts of a batch is not the batch's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stratagem.step.flatten import Equation, is_arrival
from stratagem.step.flow import SAME, Flow
from stratagem.step.program import variables_of

_SUMS = SAME | {
    "add", "add_any", "sub", "neg", "convert_element_type", "reduce_sum", "cumsum", "transpose",
    "concatenate", "pad", "rev", "slice", "squeeze", "expand_dims", "split",
}  # fmt: skip
_PRODUCTS = {"mul", "dot_general"}
# Linear in the first operand, and where something is added at places, in that.
_BY_FIRST = {"div", "gather", "dynamic_slice", "scatter-add", "dynamic_update_slice"}


def not_linear(flow: Flow) -> dict[Any, str]:
    """Values made of gradients that are not linear in them, each with the operation that is not.

    Args:
        flow: of a program whose gradients have arrived.
    """
    found: dict[Any, str] = {}
    finite: set[Any] = set()  # whether gradients are finite, or made of that alone
    for eqn in flow.eqns:
        met = [v for v in variables_of(eqn.invars) if v in flow.met]
        if not met or is_arrival(eqn):
            continue
        name = eqn.primitive.name
        if name == "is_finite" or finite.issuperset(met):
            finite.update(eqn.outvars)
            continue
        of = [v for v in met if v not in finite]
        why = next((found[v] for v in of if v in found), None)
        if why is None and not is_linear(eqn, of):
            why = name
        if why is not None:
            found.update(dict.fromkeys(eqn.outvars, why))
    return found


def is_linear(eqn: Equation, met: Sequence[Any]) -> bool:
    """True for an equation that is linear in those of its operands that are made of gradients.

    Args:
        eqn: of a flattened program.
        met: those, each as often as it is one.
    """
    name = eqn.primitive.name
    if name in _SUMS:
        return True
    if name in _PRODUCTS:
        return len(met) <= 1
    if name in _BY_FIRST:
        updates = eqn.invars[2:3] if name == "scatter-add" else []
        return {*met} <= {v for v in [*eqn.invars[:1], *updates] if v in met}
    return name == "select_n" and eqn.invars[0] not in met
