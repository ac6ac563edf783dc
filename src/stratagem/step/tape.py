"""Stage 3: GradientTape. What was recorded between `__enter__` and `gradient` is differentiated.

While a step is traced, `__enter__` gives each watched variable's value a marker, and `gradient`
leaves a placeholder. `resolve` then cuts the equations between them out of the program,
differentiates that slice with `jax.vjp`, and puts the slice's forward values in place of the
originals, so that the forward pass runs once. (Reverse-mode differentiation of a recorded tape:
Griewank and Walther, Evaluating Derivatives, 2008, section 3.2.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import keras
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, jaxprs_in_params

from stratagem import context, variables
from stratagem.step import primitives
from stratagem.step.invariance import contains
from stratagem.step.program import bind, read_all, write_all
from stratagem.step.trace import Facts, Program

_PLACEHOLDERS = (primitives.tape_start_p, primitives.gradient_p)


class GradientTape:
    """Records the operations of a traced step for automatic differentiation.

    Use it inside a function that `strategy.run` or `stratagem.function` traces.

    Args:
        persistent: allow several `gradient` calls.
        watch_accessed_variables: watch every trainable variable that the step touches.
    """

    def __init__(self, persistent: bool = False, watch_accessed_variables: bool = True):
        self._persistent = persistent
        self._watch_accessed = watch_accessed_variables
        self._trace: Any = None
        self._start: Any = None
        self._key = -1
        self._calls = 0
        self._watched: dict[int, Any] = {}
        self._told: list[Any] = []
        self._reads = slice(0, 0)  # those of the step that are made in the tape

    def __enter__(self) -> GradientTape:
        trace = context.current().trace
        if trace is None:
            raise RuntimeError(
                "Expected GradientTape inside a function that Stratagem traces. Got it in plain "
                "Python. Call the code with strategy.run(fn), decorate it with "
                "@stratagem.function, or use stratagem.value_and_grad(fn, variables)."
            )
        self._trace = trace
        self._reads = slice(len(trace.scope.reads), None)
        self._key = trace.tapes
        trace.tapes += 1
        self._start = primitives.tape_start_p.bind(key=self._key)
        if self._watch_accessed:
            for variable in list(trace.facts.variables.values()):
                if variable.trainable:
                    self._watch_variable(variable)
        return self

    def __exit__(self, *_: Any) -> None:
        self._reads = slice(self._reads.start, len(self._trace.scope.reads))

    def reset(self) -> None:
        """Forgets what was recorded and watched, as if the `with` block began here."""
        if self._trace is None or self._reads.stop is not None:
            raise RuntimeError(
                "Expected tape.reset in the `with` block of the tape. Got it outside. Make a new "
                "GradientTape there."
            )
        self._watched.clear()
        self._told.clear()
        self.__enter__()

    def watched_variables(self) -> tuple[Any, ...]:
        """The variables that `watch` was told of, and trainable ones that were read in the tape."""
        found = {id(v): v for v in self._told}
        if self._watch_accessed and self._trace is not None:
            read = self._trace.scope.reads[self._reads]
            found.update((id(v), v) for v in read if v.trainable)
        return tuple(found.values())

    def watch(self, tensor: Any) -> None:
        """Records a variable that is not trainable, or that was not watched on entry.

        A tensor needs no watching: any tensor used in the tape can be a source.
        """
        leaves = jax.tree.leaves(tensor, is_leaf=_is_variable)
        variables.refuse_shards(leaves)
        for leaf in leaves:
            if not _is_variable(leaf):
                continue
            self._told.append(leaf)
            if id(leaf) not in self._watched:
                self._watch_variable(leaf)

    def _watch_variable(self, variable: Any) -> None:
        scope = self._trace.scope
        value = scope.local_value(variable)
        if _is_real(value):
            marked = primitives.mark_p.bind(value, kind="watch", key=(self._key, id(variable)))
            scope.state_mapping[id(variable)] = marked
            self._watched[id(variable)] = marked

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: str = "none",
    ) -> Any:
        """The derivative of the sum of `target` with respect to each source.

        Args:
            target: tensor or structure of tensors computed inside the tape.
            sources: structure of variables and tensors.
            output_gradients: weights of the target's elements, shaped like target.
            unconnected_gradients: "none" gives None, "zero" zeros, where target does not depend
                on the source.

        Returns:
            The structure of `sources`, with a tensor (or None) of each source's shape.
        """
        if self._trace is None or context.current().trace is not self._trace:
            raise RuntimeError(
                "Expected tape.gradient in the traced call that entered the tape. Got it "
                "elsewhere. Compute the gradient inside the same function as the forward pass."
            )
        if unconnected_gradients not in ("none", "zero"):
            raise ValueError(
                "Expected unconnected_gradients of 'none' or 'zero'. Got "
                f"{unconnected_gradients!r}."
            )
        if self._calls and not self._persistent:
            raise RuntimeError(
                "Expected one gradient call on a tape. Got a second one. Create it with "
                "GradientTape(persistent=True)."
            )
        self._calls += 1
        targets = [jnp.asarray(t) for t in jax.tree.leaves(target, is_leaf=_is_variable)]
        leaves, tree = jax.tree.flatten(sources, is_leaf=_is_variable)
        variables.refuse_shards(leaves)
        values = [self._source(leaf) for leaf in leaves]
        weights = [jnp.asarray(w) for w in jax.tree.leaves(output_gradients)]
        _check_targets(targets, None if output_gradients is None else weights)
        trace = self._trace
        call = trace.gradients
        trace.gradients += 1
        grads = primitives.gradient_p.bind(
            self._start,
            *targets,
            *values,
            *weights,
            call=call,
            targets=len(targets),
            sources=len(values),
        )
        if unconnected_gradients == "none":
            grads = [None if trace.is_unconnected(call, i) else g for i, g in enumerate(grads)]
        return jax.tree.unflatten(tree, grads)

    def jacobian(self, *_: Any, **__: Any) -> NoReturn:
        """Not available: see the error."""
        raise NotImplementedError(_not_available("jacobian", "jax.jacobian(fn)(variable.value)"))

    def batch_jacobian(self, *_: Any, **__: Any) -> NoReturn:
        """Not available: see the error."""
        raise NotImplementedError(
            _not_available("batch_jacobian", "jax.vmap(jax.jacobian(fn))(batch)")
        )

    def stop_recording(self) -> NoReturn:
        """Not available: see the error."""
        raise NotImplementedError(
            "Expected a tape that records all of its `with` block. Got tape.stop_recording. "
            "Compute what shall not be recorded before or after the block, or pass it through "
            "jax.lax.stop_gradient."
        )

    def _source(self, leaf: Any) -> Any:
        if not _is_variable(leaf):
            return jnp.asarray(leaf)
        if id(leaf) in self._watched:
            return self._watched[id(leaf)]
        # Not watched (or met first in this attempt at the trace): a name that nothing else uses.
        value = self._trace.scope.local_value(leaf)
        return primitives.mark_p.bind(value, kind="unwatched", key=self._key)


def value_and_grad(
    fn: Callable[..., Any], variables: Sequence[Any], has_aux: bool = False
) -> Callable[..., Any]:
    """A function that returns `(fn(...), gradients)`, for those who prefer functions to tapes.

    Args:
        fn: returns a scalar loss, or `(loss, aux)` with `has_aux`.
        variables: Keras variables to differentiate by.
        has_aux: fn also returns values that are not differentiated.

    Returns:
        A function for use inside `strategy.run` or `stratagem.function`.
    """

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with GradientTape() as tape:
            result = fn(*args, **kwargs)
        loss = result[0] if has_aux else result
        return result, tape.gradient(loss, list(variables))

    return wrapped


def _not_available(method: str, instead: str) -> str:
    return (
        f"Expected tape.gradient, the derivative of a sum. Got tape.{method}, which has one for "
        f"each element. Use {instead}, with the computation as a function fn of tensors."
    )


def _check_targets(targets: Sequence[jax.Array], weights: Sequence[jax.Array] | None) -> None:
    wrong = [f"target {i}: {t.dtype}" for i, t in enumerate(targets) if not _is_real(t)]
    if wrong or not targets:
        raise ValueError(
            f"Expected float tensors to differentiate. Got {', '.join(wrong) or 'no target'}. "
            "Pass the loss, or cast it to a float dtype inside the tape."
        )
    if weights is None:
        return
    if len(weights) != len(targets):
        raise ValueError(
            f"Expected one output gradient a target, {len(targets)}. Got {len(weights)}."
        )
    wrong = [
        f"target {i}: shape {t.shape}, output gradient {w.shape}"
        for i, (t, w) in enumerate(zip(targets, weights, strict=True))
        if w.shape not in ((), t.shape)
    ]
    if wrong:
        raise ValueError(
            "Expected output gradients shaped like the targets, or scalars. Got "
            + ", ".join(wrong)
            + "."
        )


def _is_real(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jnp.inexact)


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, keras.Variable)


def resolve(program: Program, facts: Facts) -> Program:
    """Replaces each `gradient` placeholder of a program by the derivative that it stands for."""
    closed = program.jaxpr
    while True:
        calls = [i for i, e in enumerate(closed.jaxpr.eqns) if e.primitive is primitives.gradient_p]
        if not calls:
            break
        _note_unconnected(closed, calls[0], facts, program.rows.index)
        closed = _differentiate(closed, calls[0])
    _refuse_nested(closed)
    program.jaxpr = closed
    return program


def _slice(eqns: Sequence[JaxprEqn], call: int) -> list[int]:
    """The equations on a path from a source to a target of `eqns[call]`, in order."""
    start, targets, sources, _ = _operands(eqns[call])
    begin = next(i for i, e in enumerate(eqns) if start in e.outvars)
    recorded = range(begin + 1, call)
    reached = {s for s in sources if not isinstance(s, Literal)}
    forward = set()
    for i in recorded:
        if any(v in reached for v in eqns[i].invars if not isinstance(v, Literal)):
            reached.update(eqns[i].outvars)
            forward.add(i)
    needed = {t for t in targets if not isinstance(t, Literal)}
    inside = []
    for i in reversed(recorded):
        if i in forward and any(v in needed for v in eqns[i].outvars):
            needed.update(v for v in eqns[i].invars if not isinstance(v, Literal))
            inside.append(i)
    return inside[::-1]


def _operands(gradient: JaxprEqn) -> tuple[Any, list[Any], list[Any], list[Any]]:
    """Start marker, targets, sources and output gradients of a placeholder."""
    targets, sources = gradient.params["targets"], gradient.params["sources"]
    atoms = gradient.invars
    stop = 1 + targets + sources
    return atoms[0], atoms[1 : 1 + targets], atoms[1 + targets : stop], atoms[stop:]


def _note_unconnected(closed: ClosedJaxpr, call: int, facts: Facts, row_class: int) -> None:
    eqns = closed.jaxpr.eqns
    _, targets, sources, _ = _operands(eqns[call])
    used = {v for i in _slice(eqns, call) for v in eqns[i].invars if not isinstance(v, Literal)}
    used.update(t for t in targets if not isinstance(t, Literal))
    for i, source in enumerate(sources):
        if isinstance(source, Literal) or source not in used or not _is_real(source.aval):
            classes = facts.unconnected.setdefault((eqns[call].params["call"], i), set())
            if row_class not in classes:
                classes.add(row_class)
                facts.dirty = True


def _differentiate(closed: ClosedJaxpr, call: int) -> ClosedJaxpr:
    """The program with its placeholder `call` replaced by the derivative's equations."""
    jaxpr, eqns = closed.jaxpr, closed.jaxpr.eqns
    _, targets, sources, weights = _operands(eqns[call])
    inside = _slice(eqns, call)
    made = [v for i in inside for v in eqns[i].outvars]
    real = (s for s in sources if not isinstance(s, Literal) and _is_real(s.aval))
    distinct = list(dict.fromkeys(real))
    outer = [s for s in distinct if s not in made]
    inner = [s for s in distinct if s in made]

    def program(*args: Any) -> list[Any]:
        env: dict[Any, Any] = {}
        write_all(env, jaxpr.constvars, closed.consts)
        write_all(env, jaxpr.invars, args)
        waiting = [i for i in range(call) if i not in inside]
        waiting = _run_what_can(env, eqns, waiting)

        def forward(outer_values: list[Any], shifts: list[Any]) -> tuple[list[Any], list[Any]]:
            local = dict(env)
            write_all(local, outer, outer_values)
            shift = dict(zip(inner, shifts, strict=True))
            for i in inside:
                write_all(local, eqns[i].outvars, bind(eqns[i], read_all(local, eqns[i].invars)))
                for var in eqns[i].outvars:
                    if var in shift:  # by a value made on the way: by a zero that is added to it
                        local[var] = local[var] + shift[var]
            return read_all(local, targets), read_all(local, made)

        zeros = [jnp.zeros(s.aval.shape, s.aval.dtype) for s in inner]
        values, pull, fresh = jax.vjp(forward, read_all(env, outer), zeros, has_aux=True)
        write_all(env, made, fresh)
        _run_what_can(env, eqns, waiting)
        seeds = [jnp.ones_like(v) for v in values]
        if weights:
            seeds = [
                jnp.broadcast_to(w, jnp.shape(v)).astype(jnp.asarray(v).dtype)
                for w, v in zip(read_all(env, weights), values, strict=True)
            ]
        outer_grads, inner_grads = pull(seeds)
        grads = dict(zip([*outer, *inner], [*outer_grads, *inner_grads], strict=True))
        for out, source in zip(eqns[call].outvars, sources, strict=True):
            zero = jnp.zeros(out.aval.shape, out.aval.dtype)
            env[out] = zero if isinstance(source, Literal) else grads.get(source, zero)
        _run_what_can(env, eqns, list(range(call + 1, len(eqns))))
        return read_all(env, jaxpr.outvars)

    return jax.make_jaxpr(program)(*closed.in_avals)


def _run_what_can(env: dict[Any, Any], eqns: Sequence[JaxprEqn], which: list[int]) -> list[int]:
    """Runs, in order, the equations whose inputs are there; returns those that must wait."""
    waiting = []
    for i in which:
        if all(isinstance(v, Literal) or v in env for v in eqns[i].invars):
            write_all(env, eqns[i].outvars, bind(eqns[i], read_all(env, eqns[i].invars)))
        else:
            waiting.append(i)
    return waiting


def _refuse_nested(closed: ClosedJaxpr) -> None:
    for eqn in closed.jaxpr.eqns:
        if any(contains(inner, _PLACEHOLDERS) for inner in jaxprs_in_params(eqn.params)):
            raise RuntimeError(
                f"Expected GradientTape at the top level of a step. Got one inside "
                f"{eqn.primitive.name!r} (jax.jit, a loop or a branch). Use jax.grad or "
                "jax.value_and_grad there, or move the tape out."
            )
