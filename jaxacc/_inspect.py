"""Read from a compiled program: its memory, and what crosses between devices, how much, and whether inside a loop."""

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
"""What weights, counts, norms and metrics may add to the payload of the gradient."""

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")
_CALLEES = re.compile(
    r"(to_apply|body|condition|calls|branch_computations|called_computations|true_computation|false_computation)"
    r"=(\{[^}]*\}|%?[\w.\-]+)"
)
_SHAPE = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_GROUPS = re.compile(
    r"(?:replica_groups|source_target_pairs)="
    r"(\{\{.*?\}\}|\{\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?|mesh\[[^\]]*\] \{[^}]*\})"
)


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


class Memory(NamedTuple):
    """Bytes of a compiled program on each device."""

    arguments: int
    outputs: int
    aliases: int
    temp: int
    code: int

    @property
    def total(self) -> int:
        """What has to fit: results that take the place of donated arguments count once."""
        return self.arguments + self.outputs - self.aliases + self.temp + self.code


def memory_of(compiled: Any, *, platform: str) -> Memory:
    """The compiler's figures. The program itself lies in the device's memory on TPUs only."""
    found = compiled.memory_analysis()
    return Memory(
        found.argument_size_in_bytes, found.output_size_in_bytes, found.alias_size_in_bytes, found.temp_size_in_bytes,
        found.generated_code_size_in_bytes if platform == "tpu" else 0,
    )  # fmt: skip


def inspect_collectives(compiled: Any, *, mesh: jax.sharding.Mesh | None = None) -> list[Collective]:
    """List the collectives of a compiled program.

    Args:
      compiled: what `jax.jit(f).lower(...).compile()` returns, or the text of an HLO module.
      mesh: the mesh the program runs on, to name the axes that every collective crosses.

    Returns:
      One `Collective` per instruction. Asynchronous pairs count once.

    Raises:
      ValueError: for anything else than a compiled program.

    >>> import jaxacc
    >>> hlo = '''
    ... ENTRY %main (x: f32[8]) -> f32[8] {
    ...   %x = f32[8]{0} parameter(0)
    ...   ROOT %total = f32[8]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
    ... }
    ... '''
    >>> jaxacc.inspect_collectives(hlo)
    [Collective(kind='all-reduce', bytes=32, in_loop=False, axes=(), name='total')]
    """
    text = compiled.as_text() if hasattr(compiled, "as_text") else compiled
    computations = _computations(text) if isinstance(text, str) else {}
    if not computations:
        raise ValueError(
            f"a {type(compiled).__name__} without HLO computations was given. Pass a compiled program, "
            "jax.jit(f).lower(...).compile(), or its text."
        )
    looping = _reachable_from_loops(computations)
    partitions = re.search(r"num_partitions=(\d+)", text)
    devices = mesh.size if mesh is not None else int(partitions.group(1)) if partitions else 1
    found = [
        _parse(line, computation, computation in looping, mesh, devices)
        for computation, lines in computations.items()
        for line in lines
    ]
    return [collective for collective in found if collective is not None]


def check_reduction(compiled: Any, params: PyTree, *, mesh: jax.sharding.Mesh, data_axes: tuple[str, ...] = ("data",)) -> None:
    """Raise unless a step reduces its gradient over the data axes exactly once, outside every loop.

    For replicated parameters, the optimizer sharded or not: one window moves every gradient element over the data axes
    once, whatever A; what else crosses them is scalars, and nothing crosses them inside a loop.

    Args:
      compiled: the compiled step.
      params: the parameters, arrays or shapes; float32 sums are assumed for leaves of up to 32 bits. Of a leaf that
        is sharded over other axes, its shard is reduced.
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
    expected = sum(map(_gradient_bytes, filter(is_inexact, jax.tree.leaves(params))))
    # Less than the gradient itself, so that a second reduction of it never passes for scalars.
    slack = min(SCALAR_BYTES, max(32, expected - 1))
    if not expected <= reduced <= expected + slack:
        raise ValueError(
            f"{reduced} bytes are reduced over {data_axes} where one reduction of the gradient takes {expected} (and up "
            f"to {slack} for scalars): {crossing}."
        )


def _gradient_bytes(leaf: Any) -> int:
    sharding = getattr(leaf, "sharding", None)
    shape = sharding.shard_shape(leaf.shape) if sharding is not None else leaf.shape
    return math.prod(shape) * max(4, leaf.dtype.itemsize)


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


def _parse(line: str, computation: str, in_loop: bool, mesh: jax.sharding.Mesh | None, devices: int) -> Collective | None:
    match = _INSTRUCTION.match(line)
    assert match is not None
    shape, opcode = _shape_and_opcode(line[match.end() :])
    kind = opcode.removesuffix("-start")
    if kind not in KINDS:
        return None
    if opcode.endswith("-start") and (kind != "all-reduce" or shape.startswith("((")):
        shape = _elements(shape)[1]  # (operands, results, ...), but an all-reduce may have its results alone
    groups = _groups(line, devices)
    size = sum(_bytes(*found) for found in _SHAPE.findall(shape))
    if kind == "reduce-scatter":
        size *= groups.shape[1]
    if kind == "all-reduce" and "all-reduce-scatter" in computation:  # how the TPU compiler fuses a reduce-scatter
        kind = "reduce-scatter"
    return Collective(kind, size, in_loop, _axes(groups, mesh), match.group(1))


def _shape_and_opcode(rest: str) -> tuple[str, str]:
    """Split `f32[2]{0} all-reduce(...)` or `(f32[2], s32[]) all-reduce-start(...)` after the equals sign."""
    end = len(_balanced(rest)) if rest.startswith("(") else 0
    opcode = re.search(r" ([a-z][\w\-]*)\(", rest[end:])
    return (rest[: end + opcode.start()], opcode.group(1)) if opcode else (rest, "")


def _balanced(text: str) -> str:
    """The beginning of `text` up to where its first parenthesis closes."""
    depth = 0
    for end, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return text[: end + 1]
    return text


def _elements(shape: str) -> list[str]:
    """The elements of a tuple shape, `(f32[8]{0}, (f32[2], s32[]))`."""
    depth, elements = 0, [""]
    for character in shape.strip()[1:-1]:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            elements.append("")
        else:
            elements[-1] += character
    return elements


def _bytes(dtype: str, dims: str) -> int:
    bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
    return math.prod(int(d) for d in dims.split(",") if d) * bits // 8


def _groups(line: str, devices: int) -> np.ndarray:
    """Device indices that exchange data, one row per group; all in one group where the program names none."""
    match = _GROUPS.search(line)
    text = match.group(1) if match else "{}"
    if text.startswith("{{"):
        return np.array([[int(i) for i in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", text)])
    if text.startswith("mesh"):
        return _mesh_groups(text)
    if text.startswith("["):
        numbers = [[int(i) for i in part.split(",")] for part in re.findall(r"[\[(]([\d,]+)[\])]", text)]
        ids = np.arange(math.prod(numbers[1])).reshape(numbers[1])
        return (ids.transpose(numbers[2]) if len(numbers) > 2 else ids).reshape(numbers[0])
    return np.arange(devices)[None]


def _mesh_groups(text: str) -> np.ndarray:
    """Groups written as `mesh['a'=4,'b'=2] {'a'}`: one per coordinate of the axes that are not crossed."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", text)}
    crossed = re.findall(r"'([^']+)'", text[text.index("]") :])
    kept = [name for name in sizes if name not in crossed]
    order = [list(sizes).index(name) for name in (*kept, *crossed)]
    ids = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values())).transpose(order)
    return ids.reshape(-1, math.prod(sizes[name] for name in crossed))


def _axes(groups: np.ndarray, mesh: jax.sharding.Mesh | None) -> tuple[str, ...]:
    if mesh is None:
        return ()
    coordinates = np.unravel_index(groups, mesh.devices.shape)
    return tuple(name for name, at in zip(mesh.axis_names, coordinates, strict=True) if np.any(at != at[:, :1]))
