"""Arrange a window on a mesh: parameters replicated, with the optimizer sharded, or sharded over the data axes."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxacc._accumulate import Evaluation, WindowSums, evaluate_window, window_sums
from jaxacc._contract import Objective
from jaxacc._split import check_window
from jaxacc._tree import PyTree, Trainable, is_trained, partition


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Layout:
    """How a training state lies on a mesh: the part of a `TrainState` that is no array.

    Attributes:
      mesh: the mesh, all its axes `Auto`.
      data_axes: the axes that split rows.
      params_specs: one `PartitionSpec` per leaf of the parameters, in the order of `jax.tree.leaves`.
      shard_optimizer: whether optimizer state and update are sharded over the data axes where params are not.
      trained: whether each of these leaves is trained.
    """

    mesh: Mesh
    data_axes: tuple[str, ...]
    params_specs: tuple[P, ...]
    shard_optimizer: bool
    trained: tuple[bool, ...]

    @property
    def replicas(self) -> int:
        """`D`, the product of the sizes of the data axes."""
        return math.prod(self.mesh.shape[axis] for axis in self.data_axes)

    @property
    def shards_params(self) -> bool:
        """Whether a parameter is sharded over a data axis (FSDP)."""
        return any(_axes_of(spec) & set(self.data_axes) for spec in self.params_specs)

    @property
    def is_manual(self) -> bool:
        """Whether each replica folds its own rows; otherwise the compiler arranges the one program.

        A single replica has nothing to reduce, and XLA refuses a partly manual reduction over one device.
        """
        return self.replicas > 1 and not self.shards_params

    def shardings(self, state: Any) -> Any:
        """The `NamedSharding` of every leaf of a `TrainState`, of arrays or of shapes (to compile without devices)."""
        replicated = self._named(P())
        everywhere = jax.tree.map(lambda _: replicated, state)
        opt_state = self._opt_shardings(state.params, state.opt_state)
        return everywhere._replace(params=self.params_shardings(state.params), opt_state=opt_state)

    def params_shardings(self, params: PyTree) -> PyTree:
        """The `NamedSharding` of every parameter."""
        return jax.tree.unflatten(jax.tree.structure(params), map(self._named, self.params_specs))

    def accumulator_shardings(self, params: PyTree, accumulator: Any) -> Any:
        """The `NamedSharding` of every leaf of an `Accumulator`: its leading axis over the replicas that fold on their own."""
        entries = self.data_axes if self.is_manual else None
        grads = [self._named(P(entries, *spec)) for _, _, spec in self._trainable(params)]
        grads = jax.tree.unflatten(jax.tree.structure(accumulator.grads), grads)
        return jax.tree.map(lambda _: self._named(P(entries)), accumulator)._replace(grads=grads)

    def unsharded(self, params: PyTree) -> tuple[str, ...]:
        """Leaves that `shard_optimizer` leaves whole, for want of a free dimension that `replicas` divides."""
        return tuple(
            jax.tree_util.keystr(path)
            for path, leaf, spec in self._trainable(params)
            if self._scattered_dimension(leaf.shape, spec) is None
        )

    def _named(self, spec: P) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    def _scattered_dimension(self, shape: tuple[int, ...], spec: P) -> int | None:
        """The largest dimension that the replicas divide and nothing shards yet."""
        if not self.shard_optimizer or self.replicas == 1:
            return None
        taken = {d for d, entry in enumerate(spec) if entry is not None}
        free = [d for d, size in enumerate(shape) if size % self.replicas == 0 and d not in taken]
        return max(free, key=lambda d: shape[d], default=None)

    def _update_spec(self, shape: tuple[int, ...], spec: P) -> P:
        """Where a leaf lies while it is updated: like the parameter, but scattered where the optimizer is sharded."""
        dimension = self._scattered_dimension(shape, spec)
        if dimension is None:
            return spec
        entries = [*spec, *[None] * (dimension + 1 - len(spec))]
        first, *more = self.data_axes
        entries[dimension] = self.data_axes if more else first
        return P(*entries)

    def _trainable(self, params: PyTree) -> list[tuple[Any, Any, P]]:
        """Path, leaf and spec of every leaf that is trained."""
        leaves = zip(jax.tree.leaves_with_path(params), self.params_specs, self.trained, strict=True)
        return [(path, leaf, spec) for (path, leaf), spec, trained in leaves if trained]

    def _opt_shardings(self, params: PyTree, opt_state: PyTree) -> PyTree:
        """A leaf that mirrors a parameter, by the end of its path and its shape, lies as that is updated."""
        mirrored = {tuple(path): (leaf.shape, spec) for path, leaf, spec in self._trainable(params)}

        def sharding(path: Any, leaf: Any) -> NamedSharding:
            ends = [mirrored.get(tuple(path[start:])) for start in range(len(path) + 1)]
            spec = next((end[1] for end in ends if end is not None and end[0] == np.shape(leaf)), P())
            return self._named(self._update_spec(np.shape(leaf), spec))

        return jax.tree_util.tree_map_with_path(sharding, opt_state)


def auto_mesh(mesh: Any, data_axes: tuple[str, ...]) -> Any:
    """The same devices (none, of an `AbstractMesh`) with every axis `Auto`, whatever the types of the axes were."""
    unknown = [axis for axis in data_axes if axis not in mesh.axis_names]
    if unknown or not data_axes:
        raise ValueError(
            f"data_axes={data_axes} must name axes of the mesh, which has {mesh.axis_names}. Pass those that split rows."
        )
    types = (AxisType.Auto,) * len(mesh.axis_names)
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=types)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=types)


def layout_of(
    params: PyTree, mesh: Mesh, data_axes: tuple[str, ...], params_specs: PyTree, shard_optimizer: bool, trainable: Trainable
) -> Layout:
    """The layout of parameters that are placed already, or that `params_specs` (a tree prefix) says where to place."""
    if params_specs is None:
        specs = [_spec_found(leaf, mesh) for leaf in jax.tree.leaves(params)]
    else:
        is_spec = lambda node: isinstance(node, P) or node is None
        spread = jax.tree.map(
            lambda spec, part: jax.tree.map(lambda _: spec or P(), part), params_specs, params, is_leaf=is_spec
        )
        specs = jax.tree.leaves(spread)
    specs = tuple(_normalized(spec, mesh) for spec in specs)
    layout = Layout(mesh, data_axes, specs, shard_optimizer, is_trained(params, trainable))
    if shard_optimizer and layout.shards_params:
        raise ValueError(
            f"shard_optimizer=True, but parameters are sharded over {data_axes} already, and the optimizer state with "
            "them. Leave shard_optimizer out, or replicate the parameters over the data axes."
        )
    return layout


def _spec_found(leaf: Any, mesh: Mesh) -> P:
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        same_axes = sharding.mesh.axis_names == mesh.axis_names
        if same_axes and np.array_equal(sharding.mesh.devices, mesh.devices):
            return sharding.spec
    return P()


def _normalized(spec: P, mesh: Mesh) -> P:
    """Without axes of size 1 and None at the end, as the compiler writes it: another spelling would be traced again."""

    def entry_of(entry: Any) -> Any:
        axes = entry if isinstance(entry, tuple) else (entry,)
        kept = tuple(axis for axis in axes if axis is not None and mesh.shape.get(axis) != 1)
        return kept if len(kept) > 1 else kept[0] if kept else None

    entries = [entry_of(entry) for entry in spec]
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)


def _axes_of(spec: P) -> set[str]:
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec if entry is not None]
    return {axis for entry in entries for axis in entry}


@contextlib.contextmanager
def on_mesh(layout: Layout | None) -> Iterator[None]:
    """Trace on the mesh of the layout, whatever mesh is current (an `Explicit` one would not mix with it)."""
    if layout is None:
        yield
    else:
        with jax.sharding.use_abstract_mesh(layout.mesh.abstract_mesh):
            yield


def build_on(layout: Layout | None, build: Callable[..., Any], params: PyTree, key: Any) -> Any:
    """`build(params, key)`, every leaf of the state made where it belongs."""
    if layout is None:
        return build(params, key)

    def build_here(params: PyTree, key: Any) -> Any:
        with on_mesh(layout):
            return build(params, key)

    params = jax.tree.map(_put, params, layout.params_shardings(params))
    key = jax.tree.map(lambda leaf: _put(leaf, layout._named(P())), key)
    shardings = layout.shardings(jax.eval_shape(build_here, params, key))
    return jax.jit(build_here, out_shardings=shardings)(params, key)


def _put(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """Place a leaf, also on devices of other processes if every process has all of it."""
    if sharding.is_fully_addressable or not getattr(leaf, "is_fully_addressable", True):
        return jax.device_put(leaf, sharding)
    leaf = jnp.asarray(leaf)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(_put(jax.random.key_data(leaf), sharding), impl=jax.random.key_impl(leaf))
    return jax.make_array_from_callback(leaf.shape, sharding, np.asarray(leaf).__getitem__)


def constrain_state(layout: Layout | None, state: Any) -> Any:
    """Keep every leaf where `init` placed it."""
    return state if layout is None else jax.lax.with_sharding_constraint(state, layout.shardings(state))


def constrain_window(layout: Layout | None, window: PyTree) -> PyTree:
    """Split the rows of a window over the replicas; `ValueError` where they do not divide."""
    if layout is None:
        return window
    _, rows = check_window(window)
    replicas = layout.replicas
    if rows % replicas:
        below = rows // replicas * replicas
        near = " or ".join(str(n) for n in (below, below + replicas) if n > 0)
        raise ValueError(
            f"the window has {rows} rows per microbatch index, which {replicas} replicas (mesh axes {layout.data_axes}) do "
            f"not divide. Use {near} rows, or fill up: split_batch(..., accumulation_steps=A, microbatch={below + replicas}, "
            "pad=True)."
        )
    sharding = layout._named(P(None, layout.data_axes))
    return jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, sharding), window)


def gather_rows(layout: Layout | None, leaf: jax.Array) -> jax.Array:
    """A (small) leaf of a window, whole on every device."""
    return leaf if layout is None else jax.lax.with_sharding_constraint(leaf, layout._named(P()))


def constrain_update(layout: Layout | None, params: PyTree, tree: PyTree) -> PyTree:
    """Put a tree like the trainable part of `params`, or its gradient, where the update happens."""
    if layout is None:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    shardings = [layout._named(layout._update_spec(leaf.shape, spec)) for _, leaf, spec in layout._trainable(params)]
    return jax.tree.unflatten(structure, map(jax.lax.with_sharding_constraint, leaves, shardings))


def sums_on(
    layout: Layout | None,
    objective: Objective,
    params: PyTree,
    state: PyTree,
    window: PyTree,
    key: Any,
    scale: jax.Array | None,
    *,
    reduction_dtype: Any,
    **options: Any,
) -> WindowSums:
    """`window_sums` over all replicas, the gradient where the update happens.

    Manual over the data axes, so that nothing is communicated before the one reduction at the end. Parameters that are
    sharded over a data axis have to be gathered for every microbatch instead, which is left to the compiler.
    """
    if layout is None or not layout.is_manual:
        summed = window_sums(objective, params, state, window, key, axes=(), scale=scale, **options)
        return summed._replace(grads=constrain_update(layout, params, summed.grads))
    reduce = reduction(layout, params, reduction_dtype)

    def on_replica(params: PyTree, state: PyTree, window: PyTree, key: Any, scale: Any) -> WindowSums:
        axes = layout.data_axes
        return window_sums(objective, params, state, window, key, axes=axes, scale=scale, reduce=reduce, **options)

    grads_specs = reduced_specs(layout, params, partition(params, objective.trainable)[0])
    in_specs = (P(), P(), P(None, layout.data_axes), P(), P())
    out_specs = WindowSums(P(), P(), P(), grads_specs)  # pyright: ignore[reportArgumentType] (specs of what it holds)
    summed = manual(layout, on_replica, in_specs, out_specs)(params, state, window, key, scale)
    return summed._replace(grads=constrain_update(layout, params, summed.grads))


def evaluate_on(layout: Layout | None, objective: Objective, params: PyTree, state: PyTree, window: PyTree) -> Evaluation:
    """`evaluate_window` over all replicas."""
    if layout is None or not layout.is_manual:
        return evaluate_window(objective, params, state, window)

    def on_replica(params: PyTree, state: PyTree, window: PyTree) -> Evaluation:
        return evaluate_window(objective, params, state, window, axes=layout.data_axes)

    return manual(layout, on_replica, (P(), P(), P(None, layout.data_axes)), P())(params, state, window)


def manual(layout: Layout, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`function` on every replica, with its own part of what the specs split."""
    axes = set(layout.data_axes)
    return jax.shard_map(function, mesh=layout.mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axes)


def reduced_specs(layout: Layout | None, params: PyTree, grads: PyTree) -> PyTree:
    """The spec of every gradient that `reduction` gives."""
    if layout is None:
        return P()
    specs = [P() if d is None else P(*[None] * d, layout.data_axes) for d in _reduced_dimensions(layout, params)]
    return jax.tree.unflatten(jax.tree.structure(grads), specs)


def _reduced_dimensions(layout: Layout, params: PyTree) -> list[int | None]:
    """The dimension along which the reduction scatters each gradient, None where it keeps it whole.

    A leaf that other axes shard is reduced whole and cut afterwards: a reduce-scatter would gather it over them first.
    """
    return [
        None if _axes_of(spec) else layout._scattered_dimension(leaf.shape, spec) for _, leaf, spec in layout._trainable(params)
    ]


def reduction(layout: Layout | None, params: PyTree, dtype: Any) -> Callable[..., Any]:
    """Sum the loss and every gradient over the replicas: one all-reduce, and one reduce-scatter per scattered leaf."""
    if layout is None or not layout.is_manual:
        return lambda totals, grads: (totals, grads)
    axes, dimensions = layout.data_axes, _reduced_dimensions(layout, params)

    def reduce(totals: PyTree, grads: PyTree) -> tuple[PyTree, PyTree]:
        leaves, structure = jax.tree.flatten(grads)
        sent = [leaf if dtype is None else leaf.astype(dtype) for leaf in leaves]
        whole = {i: leaf for i, leaf in enumerate(sent) if dimensions[i] is None}
        totals, whole = jax.lax.psum((totals, whole), axes)
        summed = [
            whole[i] if d is None else jax.lax.psum_scatter(sent[i], axes, scatter_dimension=d, tiled=True)
            for i, d in enumerate(dimensions)
        ]
        return totals, jax.tree.unflatten(structure, [s.astype(leaf.dtype) for s, leaf in zip(summed, leaves, strict=True)])

    return reduce


def place_window(window: PyTree, mesh: Mesh, data_axes: str | tuple[str, ...] = ("data",)) -> PyTree:
    """Place a window on a mesh, every process giving its own rows.

    Process `p` of `N` holds leaves `(A, m·D/N, ...)`; together they are global arrays `(A, m·D, ...)`, of which no row
    leaves the process that gave it. `A` and `m` must be the same in every process: fill short ones up with
    `split_batch(..., accumulation_steps=A, microbatch=rows, pad=True)`, whose padding has weight 0.

    Args:
      window: a tree of arrays `(A, rows, ...)`, with this process's rows.
      mesh: the mesh of `make_step`.
      data_axes: the axes that split rows.

    Returns:
      The window with its second dimension split over `data_axes`.

    Raises:
      ValueError: an unknown axis, or rows that the replicas of this process do not divide.

    >>> import jax, jaxacc, numpy as np
    >>> mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    >>> window = jaxacc.split_batch({"x": np.arange(8.0)}, accumulation_steps=4)
    >>> jaxacc.place_window(window, mesh)["x"].shape
    (4, 2)
    """
    axes = (data_axes,) if isinstance(data_axes, str) else data_axes
    sharding = NamedSharding(auto_mesh(mesh, axes), P(None, axes))
    _, rows = check_window(window)
    local = len({index[1].start for index in sharding.addressable_devices_indices_map((1, mesh.size)).values() if index})
    if rows % local:
        raise ValueError(
            f"this process holds {rows} rows per microbatch index for its {local} replicas, which do not divide them. "
            f"Fill up: split_batch(..., accumulation_steps=A, microbatch={-(-rows // local) * local}, pad=True)."
        )
    return jax.tree.map(lambda leaf: jax.make_array_from_process_local_data(sharding, leaf), window)
