"""Row programs: elementwise updates as data, in chunks, of all rows or of some."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.parameter_server import block, rows
from stratagem.parameter_server.elementwise import OPERATIONS
from stratagem.parameter_server.rows import Literal, RowProgram, Step
from stratagem.parameter_server.whole import WholeProgram, program_of

random = np.random.default_rng(0)
F32 = "float32"
# Momentum: m' = 0.9 m + g; w' = w - rate * m'.
MOMENTUM = RowProgram(
    2,
    ("scalar", "rows"),
    (
        Step("mul", (1, Literal(0.9, F32))),
        Step("add", (4, 3)),
        Step("mul", (2, 5)),
        Step("sub", (0, 6)),
    ),
    (7, 5),
)


def values(*shape):
    return random.normal(size=shape).astype(F32)


def momentum(w, m, rate, g):
    m = np.float32(0.9) * m + g
    return w - rate * m, m


@given(st.integers(1, 40), st.sampled_from([1, 7, 64, 1000]))
def test_chunks_change_nothing(count, chunk):
    w, m, g = values(count, 3), values(count, 3), values(count, 3)
    rate = np.asarray(0.1, F32)
    old, rows._CHUNK = rows._CHUNK, chunk
    try:
        got = MOMENTUM.run([w, m], [rate, g])
    finally:
        rows._CHUNK = old
    for a, b in zip(got, momentum(w, m, rate, g), strict=True):
        np.testing.assert_array_equal(a, b)


@given(st.lists(st.integers(0, 19), unique=True), st.sampled_from([1, 6, 1000]))
def test_some_rows(which, chunk):
    w, m = values(20, 3), values(20, 3)
    which = np.asarray(sorted(which), np.int64)
    g, rate = values(len(which), 3), np.asarray(0.1, F32)
    want = w.copy(), m.copy()
    want[0][which], want[1][which] = momentum(w[which], m[which], rate, g)
    old, rows._CHUNK = rows._CHUNK, chunk
    try:
        block.update(MOMENTUM, [block.Block(w), block.Block(m)], which, [rate, g])
    finally:
        rows._CHUNK = old
    np.testing.assert_array_equal(w, want[0])
    np.testing.assert_array_equal(m, want[1])


SGD = RowProgram(1, ("scalar", "rows"), (Step("mul", (2, 1)), Step("sub", (0, 3))), (4,))
AXPYS = {
    "sgd": SGD,
    "the rate first": RowProgram(
        1, ("rows", "scalar"), (Step("mul", (2, 1)), Step("sub", (0, 3))), (4,)
    ),
    "a number": RowProgram(
        1, ("rows",), (Step("mul", (Literal(0.3, F32), 1)), Step("add", (2, 0))), (3,)
    ),
    "by nothing": RowProgram(1, ("rows",), (Step("add_any", (0, 1)),), (2,)),
    "beside one that is read": RowProgram(
        2, ("scalar", "rows"), (Step("mul", (2, 3)), Step("sub", (1, 4))), (None, 5)
    ),
}  # fmt: skip
NO_AXPYS = {
    "momentum": MOMENTUM,
    "from rows": RowProgram(1, ("rows",), (Step("sub", (1, 0)),), (2,)),
    "a product of the old": RowProgram(1, ("rows",), (Step("mul", (0, 1)),), (2,)),
    "of the old": RowProgram(
        1, ("scalar", "rows"), (Step("mul", (0, 1)), Step("sub", (0, 3))), (4,)
    ),
    "the square": RowProgram(1, ("rows",), (Step("mul", (1, 1)), Step("sub", (0, 2))), (3,)),
    "by a scalar": RowProgram(1, ("scalar",), (Step("sub", (0, 1)),), (2,)),
    "of another member": RowProgram(2, ("rows",), (Step("sub", (1, 2)),), (3, None)),
    "both": RowProgram(2, ("rows",), (Step("sub", (0, 2)),), (3, 2)),
    "not the last": RowProgram(1, ("rows",), (Step("sub", (0, 1)), Step("neg", (1,))), (3,)),
}  # fmt: skip


@pytest.mark.parametrize("name", AXPYS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("row", [(), (3,), (2, 2), (0,)])
@pytest.mark.parametrize("count", [0, 5])
def test_one_pass_is_the_program(name, dtype, row, count):
    program = AXPYS[name]
    which = np.asarray([1, 2, 11, 15, 19], np.int64)[:count]
    state = [(10 * random.normal(size=(20, *row))).astype(dtype) for _ in range(program.members)]
    handed = [
        (10 * random.normal(size=(count, *row) if kind == "rows" else ())).astype(dtype)
        for kind in program.handed
    ]
    if row == (3,) and count:
        state[-1][[1, 2]] = [[np.nan, np.inf, -0.0], [-np.inf, 0.0, 1.0]]
    want = [x.copy() for x in state]
    for old, new in zip(want, program.run([x[which] for x in want], handed), strict=True):
        old[which] = new
    blocks = [block.Block(x) for x in state]
    kept = blocks[-1].whole(1 << 20)
    block.update(program, blocks, which, handed)
    np.testing.assert_array_equal(state, want)
    assert program.axpy is not None
    fits = dtype in ("float32", "float64") and (name != "a number" or dtype == F32)
    assert program.axpy.run(blocks, which, handed) == fits
    if fits:
        assert blocks[-1].whole(1 << 20) is not kept


@pytest.mark.parametrize("name", NO_AXPYS)
def test_other_updates_are_run_as_programs(name):
    assert NO_AXPYS[name].axpy is None


@st.composite
def programs(draw):
    """Any program of a few steps, with outputs that are old, handed and new values."""
    members, handed = draw(st.integers(1, 3)), draw(st.integers(0, 2))
    count, steps = members + handed, []
    for _ in range(draw(st.integers(0, 5))):
        name = draw(st.sampled_from(["add", "mul", "square", "clamp"]))
        some = [st.integers(0, count - 1)] * OPERATIONS[name].operands
        steps.append(Step(name, draw(st.tuples(*some))))
        count += 1
    outputs = draw(st.tuples(*[st.none() | st.integers(0, count - 1)] * members))
    return RowProgram(members, ("rows",) * handed, tuple(steps), outputs)


@given(programs())
def test_what_is_overwritten_is_needed_by_nothing(program):
    state = [values(7) for _ in range(program.members)]
    handed = [values(7) for _ in program.handed]
    known = [*state, *handed]
    for step in program.steps:
        known.append(OPERATIONS[step.name].run(None, *[known[o] for o in step.operands]))
    want = [old if o is None else known[o] for old, o in zip(state, program.outputs, strict=True)]
    small, rows._SMALL = rows._SMALL, 1
    try:
        for _ in range(2):  # the second time the results' dtypes are known
            got = [x.copy() for x in state]
            program.update(got, handed)
            np.testing.assert_array_equal(got, want)
    finally:
        rows._SMALL = small


def test_halves_of_the_rows_are_the_whole():
    w, m, g, rate = values(11, 5), values(11, 5), values(11, 5), np.asarray(0.3, F32)
    want = MOMENTUM.run([w, m], [rate, g])
    parts = [MOMENTUM.run([w[s], m[s]], [rate, g[s]]) for s in (slice(0, 6), slice(6, 11))]
    for i in range(2):
        np.testing.assert_array_equal(np.concatenate([p[i] for p in parts]), want[i])


def test_state_is_kept_by_run_and_shared_by_nothing():
    w, m, g = values(4), values(4), values(4)
    before = w.copy(), m.copy()
    swap = RowProgram(2, (), (), (1, 0))
    got = swap.run([w, m], [])
    np.testing.assert_array_equal(got[0], before[1])
    np.testing.assert_array_equal(got[1], before[0])
    np.testing.assert_array_equal(w, before[0])
    swap.update([w, m], [])
    np.testing.assert_array_equal(w, before[1])
    np.testing.assert_array_equal(m, before[0])
    read_only = RowProgram(2, ("rows",), (), (2, None))
    assert read_only.run([w, m], [g])[1] is m


def test_scalars_and_constants():
    count = RowProgram(1, ("scalar",), (Step("add", (0, 1)),), (2,))
    (new,) = count.run([np.asarray(3, "int32")], [np.asarray(1, "int32")])
    assert (new.shape, new.dtype, new) == ((), np.int32, 4)
    fill = RowProgram(2, ("scalar",), (), (Literal(1.5, F32), 2))
    a, b = fill.run([values(3), values(3)], [np.asarray(2, F32)])
    assert [a.tolist(), b.tolist()] == [[1.5] * 3, [2] * 3]


def test_bfloat16_stays_bfloat16():
    x = values(5).astype(ml_dtypes.bfloat16)
    half = Literal(0.5, "bfloat16")
    program = RowProgram(
        1, ("scalar",), (Step("mul", (0, half)), Step("sqrt", (2,)), Step("sub", (3, 1))), (4,)
    )
    (got,) = program.run([np.abs(x)], [np.asarray(1, ml_dtypes.bfloat16)])
    assert got.dtype == ml_dtypes.bfloat16
    want = np.sqrt(np.abs(x).astype(F32) / 2) - 1
    np.testing.assert_allclose(got.astype(F32), want, atol=0.02)


PARAMETERS = {"convert_element_type": "int32", "integer_pow": 3, "round": 1}


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_with_and_without_an_array_for_the_result(name):
    operation = OPERATIONS[name]
    x = [np.abs(values(6)) + np.float32(0.5) for _ in range(operation.operands)]
    if name in ("and", "or", "xor", "not"):
        x = [v > 1 for v in x]
    if name == "select_n":
        x[0] = x[0] > 1
    given = {operation.parameter: PARAMETERS[name]} if operation.parameter else {}
    made = operation.run(None, *x, **given)
    given_out = operation.run(np.empty(6, made.dtype), *x, **given)
    np.testing.assert_array_equal(made, given_out)


def test_division_of_integers_rounds_to_zero():
    x, y = np.asarray([7, -7, 7, -7], "int32"), np.asarray([2, 2, -2, -2], "int32")
    assert OPERATIONS["div"].run(None, x, y).tolist() == [3, -3, -3, 3]


def test_negative_powers_and_ties():
    assert OPERATIONS["integer_pow"].run(None, np.asarray([2.0]), y=-2).tolist() == [0.25]
    assert OPERATIONS["round"].run(None, np.asarray([0.5, -1.5]), method=0).tolist() == [1, -2]
    assert OPERATIONS["round"].run(None, np.asarray([0.5, -1.5]), method=1).tolist() == [0, -2]


def test_there_and_back():
    again = RowProgram.from_wire(MOMENTUM.to_wire())
    assert again == MOMENTUM
    assert program_of(MOMENTUM.to_wire()) == MOMENTUM
    whole = WholeProgram(2, ("whole",), (True, False), b"program")
    assert program_of(whole.to_wire()) == whole


def wire(**changes):
    return {**MOMENTUM.to_wire(), **changes}


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (None, "Got None"),
        ({"kind": "rows"}, "Got {'kind'"),
        (wire(members=0), "a number 0"),
        (wire(members=True), "a number True"),
        (wire(handed=["eval"]), "kinds"),
        (wire(handed=3), "Got 3"),
        (wire(steps=[["__import__", [0, 1], None]]), "unknown operation '__import__'"),
        (wire(steps=[["lambda", [0], None]]), "unknown operation"),
        (wire(steps=[[["add"], [0, 1], None]]), "unknown operation"),
        (wire(steps=[["add", [0], None]]), "1 operands of 'add'"),
        (wire(steps=[["add", [0, 4], None]]), "a number 4"),
        (wire(steps=[["add", [0, -1], None]]), "a number -1"),
        (wire(steps=[["add", [0, "x"], None]]), "an operand 'x'"),
        (wire(steps=[["add", [0, ["object", 1]], None]]), "an operand"),
        (wire(steps=[["add", [0, ["int8", 10**9]], None]]), "the number"),
        (wire(steps=[["add", [0, 1], 3]]), "parameter 3 of 'add'"),
        (wire(steps=[["integer_pow", [0], 10**9]]), "parameter 1000000000"),
        (wire(steps=[["convert_element_type", [0], "object"]]), "parameter 'object'"),
        (wire(steps=["add"]), "a step 'add'"),
        (wire(outputs=[0]), "1 outputs for 2 members"),
        (wire(outputs=[0, 99]), "a number 99"),
    ],
)
def test_what_is_no_program_is_refused(data, text):
    with pytest.raises(ValueError, match="Expected a row program. Got") as error:
        RowProgram.from_wire(data)
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"handed": -1}, "-1 handed values"),
        ({"written": []}, "members"),
        ({"written": [1]}, "other types"),
        ({"program": "text"}, "other types"),
        ({"more": 1}, "Got {"),
    ],
)
def test_what_is_no_whole_program_is_refused(changes, text):
    data = {**WholeProgram(1, (), (True,), b"").to_wire(), **changes}
    with pytest.raises(ValueError, match="Expected an update of a unit. Got") as error:
        program_of(data)
    assert text in str(error.value)


def test_wrong_arrays_are_refused():
    w, m, g, rate = values(4, 2), values(4, 2), values(4, 2), np.asarray(0.1, F32)
    with pytest.raises(ValueError, match="Expected 2 arrays of state and 2 handed values. Got 1"):
        MOMENTUM.run([w], [rate, g])
    with pytest.raises(ValueError, match="Expected state and handed values of shapes"):
        MOMENTUM.update([w, m], [rate, g[:3]])
    with pytest.raises(ValueError, match="Expected C-contiguous arrays"):
        MOMENTUM.update([w, m], [rate, g.T.copy().T])


def test_numbers_that_are_no_numbers_raise_no_warning():
    program = RowProgram(1, (), (Step("sqrt", (0,)), Step("log", (1,))), (2,))
    (got,) = program.run([np.asarray([-1.0, 0.0], F32)], [])
    assert math.isnan(got[0])
    assert got[1] == -math.inf
