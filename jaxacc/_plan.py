"""`plan`: choose the microbatch for an effective batch and a memory budget by compiling, before anything is allocated."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxacc._accumulate import zero_gradient
from jaxacc._bytes import parse_bytes, show_bytes
from jaxacc._compiler import Compiled, compile_for, compile_here
from jaxacc._contract import LossFn
from jaxacc._fit import check_lines, largest_that_fits, predict
from jaxacc._flops import matrix_flops
from jaxacc._inspect import Collective, Memory
from jaxacc._mesh import Layout, auto_mesh, layout_of
from jaxacc._search import Searchable, Setting, settings_of, show_setting, turn_on
from jaxacc._split import Split, solve_split
from jaxacc._step import Step, TrainState, make_step
from jaxacc._targets import Target, target_of
from jaxacc._tree import PyTree, partition

CPU_LABEL = "an estimate for any other device: real TPUs and GPUs were found to need temp memory 1.05 to 2.2 times off"
"""What figures of the CPU compiler are worth elsewhere."""

STATE_NOTE = (
    "the model has state: where it depends on the rows of a microbatch (batch statistics), the microbatch matters to it"
)
"""What a plan says of models whose result is not the same for every microbatch."""

ON_A_MESH = ("mesh", "data_axes", "params_specs", "shard_optimizer", "reduction_dtype")
"""Arguments of `make_step` that do not change what one device's state looks like."""


class Candidate(NamedTuple):
    """A microbatch that gives the effective batch exactly.

    Attributes:
      microbatch: its rows on one replica.
      accumulation_steps: microbatches per window.
      total: bytes on each device; None where the compiler itself ran out of memory.
      compiled: whether the total is the compiler's, or predicted from compiled neighbours.
      fits: whether the total is within the budget.
    """

    microbatch: int
    accumulation_steps: int
    total: int | None
    compiled: bool
    fits: bool


class Plan(NamedTuple):
    """How to run an effective batch within a memory budget. `str(plan)` is a table, `plan.to_dict()` JSON-able.

    Attributes:
      split: microbatch, accumulation steps and replicas, whose product is the effective batch.
      bytes: bytes on each device by part; their sum is `total`.
      budget: bytes that were allowed on each device.
      flops: floating-point operations of matrix products and convolutions per window, over all devices.
      collectives: those of the compiled step.
      candidates: the microbatches that were compiled, and those up to the chosen one whose memory follows, in ascending order.
      compiler: where the figures come from, and what they are worth.
      setting: what `search` turned on: `{"remat": "dots"}` for instance; empty where it fits without.
      savings: bytes that each of what `search` names saves on each device at the chosen microbatch; negative where it costs.
      notes: what to know before taking the microbatch.
    """

    split: Split
    bytes: dict[str, int]
    budget: int
    flops: int
    collectives: tuple[Collective, ...]
    candidates: tuple[Candidate, ...]
    compiler: str
    setting: Setting
    savings: dict[str, int]
    notes: tuple[str, ...]

    @property
    def total(self) -> int:
        """Bytes on each device while the step runs."""
        return sum(self.bytes.values())

    @property
    def headroom(self) -> int:
        """Bytes of the budget that are left."""
        return self.budget - self.total

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-able values."""
        return {
            **self.split._asdict(), "effective_batch": self.split.effective_batch, "bytes": dict(self.bytes),
            "total": self.total, "budget": self.budget, "headroom": self.headroom, "flops_per_window": self.flops,
            "collectives": [{**found._asdict(), "axes": list(found.axes)} for found in self.collectives],
            "candidates": [candidate._asdict() for candidate in self.candidates], "compiler": self.compiler,
            "setting": dict(self.setting), "savings": dict(self.savings), "notes": list(self.notes),
        }  # fmt: skip

    def __str__(self) -> str:
        m, steps, replicas = self.split
        sizes = {**self.bytes, "total": self.total, "budget": self.budget, "headroom": self.headroom}
        lines = [
            f"microbatch {m} x accumulation steps {steps} x replicas {replicas} = effective batch {self.split.effective_batch}",
            *(f"  {name:<28}{show_bytes(size):>12}" for name, size in sizes.items()),
            f"  {'flops per window':<28}{self.flops:>12.3g}",
            *(f"  {name:<28}{show_bytes(size):>12}" for name, size in _collected(self.collectives).items()),
            f"  {'candidates':<12}{'A':>8}{'bytes':>20}",
            *(f"  {c.microbatch:<12}{c.accumulation_steps:>8}{_told(c):>20}" for c in self.candidates if c.compiled),
            *([f"  turned on: {show_setting(self.setting)}"] if self.setting else []),
            *(f"  {f'saved by {name}':<28}{show_bytes(size):>12}" for name, size in self.savings.items()),
            *(f"note: {note}" for note in self.notes),
            f"figures: {self.compiler}",
        ]
        return "\n".join(lines)


def plan(
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    params_spec: PyTree,
    row_spec: PyTree,
    *,
    effective_batch: int,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None,
    target: str | None = None,
    budget: int | str | None = None,
    search: Sequence[Searchable] = (),
    key: Any = None,
    model_state: PyTree = None,
    on_candidate: Callable[[Candidate], None] | None = None,
    **step_options: Any,
) -> Plan:
    """Find the largest microbatch with which an effective batch fits into memory, without allocating anything.

    The step of `make_step` is compiled for a few of the microbatches `m` that divide the effective batch `B = m·A·D`; the
    memory of the smaller ones follows, as it is close to linear in `m`. What fits is what the compiler says:
    arguments + outputs - aliases + temp (+ code on TPUs) <= budget. The chosen one is always compiled.

    Args:
      loss_fn: as for `make_step`.
      tx: as for `make_step`.
      params_spec: the parameters, as arrays or `jax.ShapeDtypeStruct`s; with a `NamedSharding` they lie where that says.
      row_spec: one row: the tree of a microbatch, its leaves without the leading dimension. A step that will be given
        `row_mask` has it here, `jax.ShapeDtypeStruct((), bool)`.
      effective_batch: rows behind one update, `B`.
      mesh: as for `make_step`; for a `target` of which only the axes count, None is all its devices on the axis "data".
      target: devices to compile for that need not be here: TPU slices such as `"v5e:2x2"`, NVIDIA GPUs such as `"h100x8"`, or
        `"cpux8"` for an estimate. Each compilation runs in a process of its own, and its figures are kept on disk.
      budget: memory of one device in bytes, or as in `"20GiB"`; None is what the device says it has. Of a GPU as target it is
        the share that JAX takes by default, 75 %.
      search: what may be turned on where nothing fits without, tried in this order, one thing before two: `"remat"`, which is
        `jax.checkpoint(loss_fn, policy=...)` that keeps the `"dots"`
        (`jax.checkpoint_policies.dots_with_no_batch_dims_saveable`), then nothing (`"full"`); `"fold"`, the carry instead of
        what `fold="auto"` takes; `"shard_optimizer"`. `savings` says what each is worth.
      key: as for `Step.init`, an array or its shape.
      model_state: as for `Step.init`, arrays or shapes.
      on_candidate: called with every candidate once it is compiled.
      **step_options: the other arguments of `make_step`.

    Returns:
      The `Plan`.

    Raises:
      ValueError: an unknown target, or one whose compiler is not installed; an effective batch that the replicas do not
        divide (the message names the nearest that do), rows that `loss_fn` does not take, a budget that is unknown, or too
        small even for a single row.
      RuntimeError: the compiler for a target failed, for another reason than memory.

    >>> import jax, jax.numpy as jnp, jaxacc, optax
    >>> def loss_fn(params, microbatch, key):
    ...     error = jnp.mean((jnp.tanh(microbatch["x"] @ params) - 1) ** 2, axis=-1)
    ...     return jaxacc.Mean(error, jnp.ones_like(error))
    >>> row = {"x": jax.ShapeDtypeStruct((64,), jnp.float32)}
    >>> params = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    >>> plan = jaxacc.plan(loss_fn, optax.adam(1e-3), params, row, effective_batch=96, budget="1MB")
    >>> plan.split.effective_batch, plan.bytes["params"], plan.headroom > 0
    (96, 16384, True)
    """
    aim = None if target is None else target_of(target)
    if aim is not None and mesh is None and aim.devices > 1:
        mesh = jax.sharding.AbstractMesh((aim.devices,), ("data",))
    _check_devices(aim, mesh)

    def program_of(setting: Setting) -> _Program:
        loss, options = turn_on(setting, loss_fn, step_options)
        return _program(loss, tx, params_spec, row_spec, effective_batch, mesh, aim, key, model_state, options)

    plain = program_of({})
    settings = settings_of(search, step_options, plain.replicas)
    for setting in settings:
        program = program_of(setting) if setting else plain
        try:
            found = _fit(program, budget, step_options.get("accumulator_dtype"), on_candidate)
        except _TooLargeError as error:
            if setting == settings[-1]:
                tried = f" Tried: {'; '.join(map(show_setting, settings[1:]))}." if settings[1:] else ""
                raise ValueError(f"{error}{tried}") from error
        else:
            single = {show_setting(one): program_of(one) for one in settings if len(one) == 1}
            return found._replace(setting=setting, savings=_savings(plain, single, found.split.microbatch))
    raise AssertionError("nothing turned on is a setting")


class _TooLargeError(ValueError):
    """No microbatch fits, which another setting may change."""


def _savings(plain: _Program, others: dict[str, _Program], microbatch: int) -> dict[str, int]:
    """Bytes that each of the others takes less than the plain program, of those that can be compiled."""
    base = plain.compile(microbatch).memory if others else None
    found = {name: program.compile(microbatch).memory for name, program in others.items()} if base is not None else {}
    return {name: base.total - memory.total for name, memory in found.items() if base is not None and memory is not None}


def _fit(
    program: _Program, budget: int | str | None, accumulator_dtype: Any, on_candidate: Callable[[Candidate], None] | None
) -> Plan:
    """The largest microbatch with which a program fits."""
    allowed = _budget(budget, program.place)
    held = program.held(accumulator_dtype)
    _check_held(held, allowed, program.replicas)
    compiled: dict[int, Compiled] = {}

    def measure(microbatch: int) -> int | None:
        compiled[microbatch] = found = program.compile(microbatch)
        total = None if found.memory is None else found.memory.total
        if on_candidate is not None:
            on_candidate(program.candidate(microbatch, total, allowed, compiled=True))
        return total

    sizes = [d for d in range(1, program.rows + 1) if program.rows % d == 0]
    chosen, measured = largest_that_fits(sizes, measure, allowed)
    if chosen is None:
        raise _TooLargeError(_too_small(sizes[0], held, compiled[sizes[0]], allowed))
    smaller = [m for m in sizes if m <= chosen] if chosen < sizes[-1] else []
    check_lines(smaller, measure, measured)
    totals = {m: measured[m] if m in measured else predict(measured, m, whole=sizes[-1]) for m in sizes}
    return Plan(
        split=Split(chosen, program.rows // chosen, program.replicas), bytes=_parts(held, compiled[chosen]),
        budget=allowed, flops=program.flops(chosen), collectives=compiled[chosen].collectives,
        candidates=tuple(
            program.candidate(m, totals[m], allowed, compiled=m in measured)
            for m in sizes if m in measured or m in smaller
        ),
        compiler=program.place.label, setting={}, savings={},
        notes=() if program.state.model_state is None else (STATE_NOTE,),
    )  # fmt: skip


class _Place(NamedTuple):
    """Where the program is compiled for, and what it may take there by default."""

    platform: str
    limit: int | None
    label: str
    target: Target | None


def _place(target: Target | None, mesh: Any) -> _Place:
    """A target, or the devices of this process."""
    if target is not None:
        platform, limit, kind = target.platform, target.limit, target.name
    else:
        device = mesh.devices.flat[0] if mesh is not None else jax.devices()[0]
        platform, limit, kind = device.platform, device_limit(mesh), device.device_kind
    worth = f", {CPU_LABEL}" if platform == "cpu" else f" for {kind}"
    return _Place(platform, limit, f"{platform} compiler of jax {jax.__version__}{worth}", target)


def device_limit(mesh: jax.sharding.Mesh | None) -> int | None:
    """Bytes that every device of this process may give, of those on the mesh; None where they do not say."""
    devices = mesh.local_devices if mesh is not None else jax.devices()[:1]
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in devices]
    return min((limit for limit in limits if limit is not None), default=None)


def _check_devices(target: Target | None, mesh: Any) -> None:
    size = mesh.size if mesh is not None else 1
    if target is not None and size != target.devices:
        raise ValueError(
            f"target={target.name!r} has {target.devices} devices, the mesh {size}. Pass a mesh of as many (an "
            "AbstractMesh will do), or leave it out to have all of them on the axis 'data'."
        )


class _Program(NamedTuple):
    """The step on shapes: `rows` is what one replica sees in a window."""

    step: Step
    state: TrainState
    row: PyTree
    rows: int
    trainable: Any
    place: _Place

    @property
    def replicas(self) -> int:
        return self.state.layout.replicas if self.state.layout is not None else 1

    def window(self, microbatch: int) -> PyTree:
        """The shapes of a window, on the mesh."""
        layout, shape = self.state.layout, (self.rows // microbatch, microbatch * self.replicas)
        sharding = None if layout is None else NamedSharding(layout.mesh, P(None, layout.data_axes))
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((*shape, *leaf.shape), leaf.dtype, sharding=sharding), self.row)

    def compile(self, microbatch: int) -> Compiled:
        arguments = (self.state, self.window(microbatch))
        mesh: Any = self.state.layout.mesh if self.state.layout is not None else None
        if self.place.target is not None:
            return compile_for(self.place.target, self.step.update, arguments, mesh)
        return compile_here(self.step.update, arguments, mesh, self.place.platform)

    def flops(self, microbatch: int) -> int:
        return matrix_flops(jax.make_jaxpr(self.step.update)(self.state, self.window(microbatch)))

    def candidate(self, microbatch: int, total: int | None, budget: int, *, compiled: bool) -> Candidate:
        fits = total is not None and total <= budget
        return Candidate(microbatch, self.rows // microbatch, total, compiled, fits)

    def held(self, accumulator_dtype: Any) -> dict[str, int]:
        """Bytes on each device of what the program is given, and of the sum of gradients."""
        params, opt_state = _bytes_on_device(self.state.params), _bytes_on_device(self.state.opt_state)
        trained, _ = partition(self.state.params, self.trainable)
        sums = jax.eval_shape(lambda tree: zero_gradient(tree, accumulator_dtype), trained)
        place = lambda sum_, leaf: jax.ShapeDtypeStruct(sum_.shape, sum_.dtype, sharding=leaf.sharding)
        sums = jax.tree.map(place, sums, trained)
        inputs = _bytes_on_device(self.window(1))
        return {
            "params": params,
            "optimizer state": opt_state,
            "gradient accumulator": _bytes_on_device(sums),
            "inputs": inputs,
        }


def _program(
    loss_fn: LossFn, tx: optax.GradientTransformation, params: PyTree, row: PyTree, effective_batch: int,
    mesh: Any, target: Target | None, key: Any, model_state: PyTree, options: dict[str, Any],
) -> _Program:  # fmt: skip
    """Everything on shapes, checked by tracing with a single row."""
    options = {**options, "mesh": mesh}
    if mesh is not None and options.get("params_specs") is None:
        options["params_specs"] = jax.tree.map(lambda leaf: getattr(getattr(leaf, "sharding", None), "spec", P()), params)
    params, row, key, model_state = jax.eval_shape(lambda *trees: trees, params, row, key, model_state)

    step = make_step(loss_fn, tx, **options)
    local = make_step(loss_fn, tx, **{name: value for name, value in options.items() if name not in ON_A_MESH})
    state = jax.eval_shape(lambda p, k, s: local.init(p, key=k, model_state=s), params, key, model_state)
    if mesh is not None:
        state = state._replace(layout=_layout(params, mesh, options))
    if state.layout is not None:
        state = jax.tree.map(_placed, state, state.layout.shardings(state))
    replicas = state.layout.replicas if state.layout is not None else 1
    rows = solve_split(effective_batch=effective_batch, microbatch=1, replicas=replicas).accumulation_steps
    program = _Program(step, state, row, rows, options.get("trainable"), _place(target, mesh))
    checking = make_step(_naming_rows(loss_fn, row), tx, **options)
    jax.eval_shape(checking.update, state, program.window(1))
    return program


def _layout(params: PyTree, mesh: Any, options: dict[str, Any]) -> Layout:
    """What `Step.init` would give; that places arrays, for which there may be no devices."""
    axes = options.get("data_axes") or ("data",)
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    sharded, trainable = options.get("shard_optimizer", False), options.get("trainable")
    return layout_of(params, auto_mesh(mesh, axes), axes, options["params_specs"], sharded, trainable)


def _naming_rows(loss_fn: LossFn, row: PyTree) -> LossFn:
    """The loss, whose own errors name the leaves of the rows."""

    def checked(*args: Any) -> Any:
        try:
            return loss_fn(*args)
        except Exception as error:
            named = jax.tree.leaves_with_path(row)
            leaves = ", ".join(f"{jax.tree_util.keystr(path)} {leaf.dtype}{list(leaf.shape)}" for path, leaf in named)
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"
            raise ValueError(
                f"loss_fn failed on a microbatch of rows {leaves}: {reason.rstrip('.')}. Give row_spec the leaves that "
                "loss_fn reads, each of the shape and dtype of one row, without the leading dimension."
            ) from error

    return checked


def _placed(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _bytes_on_device(tree: PyTree) -> int:
    def size(leaf: Any) -> int:
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        return math.prod(shape) * leaf.dtype.itemsize

    return sum(map(size, jax.tree.leaves(tree)))


def _parts(held: dict[str, int], compiled: Compiled) -> dict[str, int]:
    """The compiler's total by part. The sum of gradients is temp memory; what no other part explains is `other`."""
    memory: Memory = compiled.memory  # pyright: ignore[reportAssignmentType] (asked only of what has been compiled)
    sums = min(held["gradient accumulator"], memory.temp)
    given = held["params"] + held["optimizer state"] + held["inputs"]
    return {
        "params": held["params"], "optimizer state": held["optimizer state"], "gradient accumulator": sums,
        "activations and other temp": memory.temp - sums, "inputs": held["inputs"],
        "other": memory.total - memory.temp - given,
    }  # fmt: skip


def _budget(budget: int | str | None, place: _Place) -> int:
    if budget is not None:
        return parse_bytes(budget)
    if place.limit is None:
        raise ValueError(
            f"budget=None, and {place.platform} devices do not say how much memory they have. State budget='8GiB'."
        )
    return place.limit


def _check_held(held: dict[str, int], budget: int, replicas: int) -> None:
    params, opt_state = held["params"], held["optimizer state"]
    if params + opt_state <= budget:
        return
    sharded = f"over the {replicas} replicas" if replicas > 1 else "over the replicas of a mesh"
    raise _TooLargeError(
        f"params ({show_bytes(params)}) and optimizer state ({show_bytes(opt_state)}) take {show_bytes(params + opt_state)} of "
        f"every device, more than the budget of {show_bytes(budget)}: accumulation cannot help. What can: shard_optimizer=True "
        f"{sharded}, params_specs that shard the parameters too (FSDP), bfloat16 optimizer state, or trainable= for a subset."
    )


def _too_small(rows: int, held: dict[str, int], compiled: Compiled, budget: int) -> str:
    help_ = (
        "What can help: jax.checkpoint around layers for activations, shard_optimizer=True or params_specs over a mesh for "
        "state, streaming with step.add for inputs."
    )
    if compiled.memory is None:
        return f"microbatches of {rows} row, the smallest, do not fit the device: {compiled.refusal.rstrip('.')}. {help_}"
    parts = _parts(held, compiled)
    told = ", ".join(f"{name} {show_bytes(size)}" for name, size in parts.items())
    return (
        f"microbatches of {rows} row, the smallest, take {show_bytes(sum(parts.values()))} of every device, more than the "
        f"budget of {show_bytes(budget)}: {told}. {help_}"
    )


def _collected(collectives: tuple[Collective, ...]) -> dict[str, int]:
    """Bytes of the collectives by kind and place."""
    names = [f"{found.kind} {'in loops' if found.in_loop else 'once per window'}" for found in collectives]
    return {name: sum(c.bytes for c, n in zip(collectives, names, strict=True) if n == name) for name in dict.fromkeys(names)}


def _told(candidate: Candidate) -> str:
    total = "out of memory" if candidate.total is None else show_bytes(candidate.total)
    return f"{total} {'fits' if candidate.fits else 'too large'}"
