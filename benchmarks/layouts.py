"""What each layout of a training state moves per window and holds per device, from the compiler.

python -m benchmarks.layouts

Four fake CPU devices, four microbatches, AdamW; nothing is run. Bytes are in gradient trees.
"""

import jax
import optax
from jax.sharding import PartitionSpec as P

import jaxacc
from benchmarks import model

LAYERS, WIDTH, ROWS = 4, 64, 8
LAYOUTS = {
    "replicated": {},
    "shard_optimizer": {"shard_optimizer": True},
    "FSDP": {"params_specs": {"up": P(None, None, "data"), "down": P(None, None, "data")}},
}


def mesh_of(replicas, devices=None):
    """A mesh with one axis, `data`."""
    devices = jax.devices()[:replicas] if devices is None else devices
    return jax.make_mesh((replicas,), ("data",), devices=devices, axis_types=(jax.sharding.AxisType.Auto,))


def compile_step(layout, steps, mesh, tx=None):
    """The step, compiled for `ROWS` rows per microbatch and replica of `mesh`, or for one device (None) and its layout."""
    options = {} if mesh is None else {"mesh": mesh, **LAYOUTS[layout]}
    step = jaxacc.make_step(model.loss_fn, tx or optax.adamw(1e-3), **options)
    params = jax.eval_shape(lambda key: model.init_params(key, LAYERS, WIDTH), jax.random.key(0))
    state = jax.eval_shape(step.init, params)
    window = model.make_window(steps, ROWS * (4 if mesh is None else mesh.size), width=WIDTH)
    if mesh is None:
        return step.update.lower(state, window).compile(), state
    rows = jax.sharding.NamedSharding(mesh, P(None, "data"))
    state = with_shardings(state, state.layout.shardings(state))
    return step.update.lower(state, with_shardings(window, jax.tree.map(lambda _: rows, window))).compile(), state


def with_shardings(tree, shardings):
    """The shapes of a tree, to be placed."""
    return jax.tree.map(lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s), tree, shardings)


def gradient_bytes(state):
    """One gradient tree."""
    return sum(leaf.size * 4 for leaf in jax.tree.leaves(state.params))


def row_of(layout, steps, mesh):
    """Bytes moved per window, those in the loops once per microbatch and layer, and bytes held, in gradient trees."""
    compiled, state = compile_step(layout, steps, mesh)
    collectives = jaxacc.inspect_collectives(compiled, mesh=mesh)
    total = lambda kinds, in_loop: sum(c.bytes for c in collectives if c.kind in kinds and c.in_loop == in_loop)
    memory = compiled.memory_analysis()
    values = (
        total(("all-reduce", "reduce-scatter"), False),
        total(("all-gather",), False),
        sum(c.bytes for c in collectives if c.in_loop) * steps * LAYERS,
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
    )
    return [value / gradient_bytes(state) for value in values]


def main(steps=4, replicas=4):
    """Print the table."""
    jax.config.update("jax_num_cpu_devices", replicas)
    mesh = mesh_of(replicas)
    print(f"jax {jax.__version__}, {mesh.size} {mesh.devices.flat[0].device_kind} devices, A = {steps}, AdamW, gradient trees")
    print(f"{'layout':<17}{'reduced':>10}{'gathered':>10}{'in loops':>10}{'arguments':>11}{'temp':>8}")
    for layout in LAYOUTS:
        reduced, gathered, looping, arguments, temp = row_of(layout, steps, mesh)
        print(f"{layout:<17}{reduced:>10.3f}{gathered:>10.3f}{looping:>10.3f}{arguments:>11.3f}{temp:>8.3f}")


if __name__ == "__main__":
    main()
