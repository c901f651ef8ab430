"""Collectives read from a compiled program: what crosses between devices, how much, and whether inside a loop."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxacc._tree import PyTree, is_inexact

KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "ragged-all-to-all", "collective-permute")
REDUCTIONS = ("all-reduce", "reduce-scatter")
SCALAR_BYTES = 4096
"""Weights, counts, norms and the like: everything up to this payload is no gradient."""

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")
_CALLEES = re.compile(
    r"(to_apply|body|condition|calls|branch_computations|called_computations|true_computation|false_computation)"
    r"=(\{[^}]*\}|%?[\w.\-]+)"
)
_SHAPE = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_GROUPS = re.compile(r"replica_groups=(\{\{.*?\}\}|\{\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?|mesh\[[^\]]*\] \{[^}]*\})")


class Collective(NamedTuple):
    """One collective instruction of a compiled program.

    Attributes:
      kind: "all-reduce", "reduce-scatter", "all-gather", "all-to-all", "ragged-all-to-all" or "collective-permute".
      bytes: payload per device, counted unscattered: what goes into a reduction, what comes out of a gather.
      in_loop: whether it runs inside a loop (of microbatches, of layers), so possibly many times.
      axes: the mesh axes it crosses, if a mesh was given, else ().
      name: the instruction's name.
    """

    kind: str
    bytes: int
    in_loop: bool
    axes: tuple[str, ...]
    name: str


def inspect_collectives(compiled: Any, *, mesh: jax.sharding.Mesh | None = None) -> list[Collective]:
    """List the collectives of a compiled program.

    Args:
      compiled: what `jax.jit(f).lower(...).compile()` returns, or the text of an HLO module.
      mesh: the mesh the program runs on, to name the axes that every collective crosses.

    Returns:
      One `Collective` per instruction. Asynchronous pairs count once.

    >>> import jax, jax.numpy as jnp, jaxacc
    >>> mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    >>> spec = jax.sharding.PartitionSpec("data")
    >>> total = jax.shard_map(lambda x: jax.lax.psum(x.sum(), "data"), mesh=mesh, in_specs=spec, out_specs=spec.__class__())
    >>> sharding = jax.sharding.NamedSharding(mesh, spec)
    >>> compiled = jax.jit(total).lower(jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)).compile()
    >>> [(c.kind, c.bytes, c.in_loop, c.axes) for c in jaxacc.inspect_collectives(compiled, mesh=mesh)]
    [('all-reduce', 4, False, ('data',))]
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    computations = _computations(text)
    looping = _reachable_from_loops(computations)
    found = []
    for computation, lines in computations.items():
        for line in lines:
            collective = _parse(line, computation, computation in looping, mesh)
            if collective is not None:
                found.append(collective)
    return found


def check_reduction(compiled: Any, params: PyTree, *, mesh: jax.sharding.Mesh, data_axes: tuple[str, ...] = ("data",)) -> None:
    """Raise unless a step reduces its gradient over the data axes exactly once, outside every loop.

    For replicated parameters, the optimizer sharded or not: one window moves every gradient element over the data axes
    once, whatever A; what else crosses them is scalars, and nothing crosses them inside a loop.

    Args:
      compiled: the compiled step.
      params: the parameters (arrays or shapes), float32 sums assumed for leaves of up to 32 bits.
      mesh: the mesh of the step.
      data_axes: the axes that split rows.

    Raises:
      ValueError: naming the collectives that are too many or missing.
    """
    crossing = [c for c in inspect_collectives(compiled, mesh=mesh) if set(c.axes) & set(data_axes)]
    looping = [c for c in crossing if c.in_loop]
    if looping:
        raise ValueError(f"collectives over {data_axes} run inside a loop: {looping}. They should run once per window.")
    reduced = sum(c.bytes for c in crossing if c.kind in REDUCTIONS)
    expected = sum(leaf.size * max(4, leaf.dtype.itemsize) for leaf in jax.tree.leaves(params) if is_inexact(leaf))
    if not expected <= reduced <= expected + SCALAR_BYTES:
        raise ValueError(
            f"{reduced} bytes are reduced over {data_axes} where one reduction of the gradient takes {expected} (and up "
            f"to {SCALAR_BYTES} for scalars): {crossing}."
        )


def _computations(text: str) -> dict[str, list[str]]:
    computations: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        if header:
            lines = computations.setdefault(header.group(1), [])
        elif _INSTRUCTION.match(line):
            lines.append(line)
    return computations


def _reachable_from_loops(computations: dict[str, list[str]]) -> set[str]:
    callees = {name: list(_calls(lines)) for name, lines in computations.items()}
    pending = [callee for calls in callees.values() for role, callee in calls if role in ("body", "condition")]
    looping: set[str] = set()
    while pending:
        name = pending.pop()
        if name not in looping:
            looping.add(name)
            pending.extend(callee for _, callee in callees.get(name, []))
    return looping


def _calls(lines: list[str]) -> Iterator[tuple[str, str]]:
    for line in lines:
        for role, names in _CALLEES.findall(line):
            yield from ((role, name) for name in re.findall(r"[\w.\-]+", names))


def _parse(line: str, computation: str, in_loop: bool, mesh: jax.sharding.Mesh | None) -> Collective | None:
    match = _INSTRUCTION.match(line)
    assert match is not None
    shape, opcode = _shape_and_opcode(line[match.end() :])
    started = opcode.endswith("-start")
    kind = opcode.removesuffix("-start")
    if kind not in KINDS:
        return None
    groups = _replica_groups(line)
    sizes = [_bytes(*found) for found in _SHAPE.findall(shape)]
    if started and kind == "all-gather":
        sizes = sizes[len(sizes) // 2 :]  # operands, then results
    elif started and kind == "collective-permute":
        sizes = sizes[1:2]
    scattered = groups.shape[1] if kind == "reduce-scatter" and groups is not None else 1
    if kind == "all-reduce" and "all-reduce-scatter" in computation:  # how the TPU compiler fuses a reduce-scatter
        kind = "reduce-scatter"
    return Collective(kind, sum(sizes) * scattered, in_loop, _axes(groups, mesh), match.group(1))


def _shape_and_opcode(rest: str) -> tuple[str, str]:
    """Split `f32[2]{0} all-reduce(...)` or `(f32[2], s32[]) all-reduce-start(...)` after the equals sign."""
    end = 0
    if rest.startswith("("):
        depth = 0
        for end, character in enumerate(rest):
            depth += (character == "(") - (character == ")")
            if depth == 0:
                break
    opcode = re.search(r" ([a-z][\w\-]*)\(", rest[end:])
    return (rest[: end + opcode.start()], opcode.group(1)) if opcode else (rest, "")


def _bytes(dtype: str, dims: str) -> int:
    bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
    return math.prod(int(d) for d in dims.split(",") if d) * bits // 8


def _replica_groups(line: str) -> np.ndarray | None:
    """Device indices, one row per group; None where the program does not say."""
    match = _GROUPS.search(line)
    text = match.group(1) if match else "{}"
    if text.startswith("{{"):
        return np.array([[int(i) for i in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", text)])
    if text.startswith("mesh"):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", text)}
        crossed = re.findall(r"'([^']+)'", text[text.index("]") :])
        kept = [name for name in sizes if name not in crossed]
        order = [list(sizes).index(name) for name in (*kept, *crossed)]
        ids = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values())).transpose(order)
        return ids.reshape(-1, math.prod(sizes[name] for name in crossed))
    if text.startswith("["):
        numbers = [[int(i) for i in part.split(",")] for part in re.findall(r"[\[(]([\d,]+)[\])]", text)]
        ids = np.arange(math.prod(numbers[1])).reshape(numbers[1])
        return (ids.transpose(numbers[2]) if len(numbers) > 2 else ids).reshape(numbers[0])
    return None


def _axes(groups: np.ndarray | None, mesh: jax.sharding.Mesh | None) -> tuple[str, ...]:
    if mesh is None:
        return ()
    if groups is None:
        return tuple(mesh.axis_names)
    coordinates = np.stack(np.unravel_index(groups[0], mesh.devices.shape), axis=-1)
    return tuple(name for i, name in enumerate(mesh.axis_names) if len(set(coordinates[:, i])) > 1)
