"""A mesh gives what one device gives, with one reduction per window (laws 6 and 9; CASES section C)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import problems
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from problems import (
    LENGTH,
    assert_identical,
    assert_trees_close,
    difference,
    host,
    largest,
    linear_loss,
    lm_batch,
    lm_loss,
    lm_oracle,
)

import jaxacc
from benchmarks import layouts, topologies

COUNTS = (0, 0, 0, 0, 1, 7, 16, 3, 2, 9, 5, 0, 13, 8, 4, 11)  # with 4 or 8 replicas the first has no token
WEIGHTS = ("embed", "layers", "unused")


def mesh_of(shape=(2,), names=("data",), types=AxisType.Auto):
    return jax.make_mesh(shape, names, devices=jax.devices()[: np.prod(shape)], axis_types=(types,) * len(shape))


def lm_params(dtype=jnp.float32):
    """The problem in sizes that 8 divides, beside leaves that nothing divides."""
    return problems.lm_params(dtype=dtype, vocabulary=16, width=8)


def optimizer():
    """Keeps the gradient it was given; clips; decays."""
    return optax.chain(optax.trace(0.0), optax.clip_by_global_norm(0.05), optax.adamw(1e-2, weight_decay=0.1))


def batches():
    return [lm_batch(rows=16, seed=seed, counts=COUNTS) for seed in range(3)]


@functools.cache
def reference(dtype):
    """Three updates on big batches by plain Optax on one device, with the loss and the gradient of each."""
    params = lm_params(dtype)
    floats, tx = {name: params[name] for name in WEIGHTS}, optimizer()
    state, losses, grads = tx.init(floats), [], []
    oracle = jax.jit(lm_oracle)
    for batch in batches():
        loss, gradient = oracle({**params, **floats}, batch)
        gradient = {name: gradient[name] for name in WEIGHTS}
        updates, state = tx.update(gradient, state, floats)
        floats = optax.apply_updates(floats, updates)
        losses.append(float(loss))
        grads.append(host(gradient))
    return losses, grads, host(floats)


SHARDED = {"embed": P("data"), "layers": {"mix": P(None, None, "data")}, "unused": None, "table": P(), "absent": None}
TENSOR = {"embed": P(None, "model"), "layers": P(None, None, "model"), "unused": P(), "table": P(), "absent": None}
BOTH = {"embed": P("data", "model"), "layers": P(None, "data", "model"), "unused": P(), "table": P(), "absent": None}
GRID = ("data", "model")
LAYOUTS = {
    "replicated-1": (2, {"mesh": ((1,),)}),
    "replicated-2": (4, {"mesh": ((2,),)}),
    "replicated-4": (1, {"mesh": ((4,),)}),
    "replicated-4-explicit": (2, {"mesh": ((4,), ("data",), AxisType.Explicit)}),
    "replicated-8": (2, {"mesh": ((8,),)}),
    "optimizer-2": (4, {"mesh": ((2,),), "shard_optimizer": True}),
    "optimizer-8": (2, {"mesh": ((8,),), "shard_optimizer": True}),
    "optimizer-2x2": (2, {"mesh": ((2, 2), ("host", "data")), "data_axes": ("host", "data"), "shard_optimizer": True}),
    "fsdp-2": (4, {"mesh": ((2,),), "params_specs": SHARDED}),
    "fsdp-4-explicit": (1, {"mesh": ((4,), ("data",), AxisType.Explicit), "params_specs": SHARDED}),
    "tensor-2x2": (2, {"mesh": ((2, 2), GRID), "params_specs": TENSOR}),
    "tensor-4x2": (1, {"mesh": ((4, 2), GRID), "params_specs": TENSOR}),
    "tensor-optimizer-4x2": (2, {"mesh": ((4, 2), GRID), "params_specs": TENSOR, "shard_optimizer": True}),
    "tensor-fsdp-4x2": (2, {"mesh": ((4, 2), GRID), "params_specs": BOTH}),
}
FLOAT32 = ("replicated-8", "optimizer-2", "fsdp-2", "tensor-2x2")


def check_updates(name, dtype, loss_tolerance, tolerance):
    steps, options = LAYOUTS[name]
    options = {**options, "mesh": mesh_of(*options["mesh"])}
    replicas = options["mesh"].size // options["mesh"].shape.get("model", 1)
    traces, traced = [], None

    def loss_fn(params, microbatch, key):
        traces.append(microbatch["tokens"].shape)
        return lm_loss(params, microbatch, key)

    step = jaxacc.make_step(loss_fn, optimizer(), **options)
    state = step.init(lm_params(dtype), key=jax.random.key(0))
    places = jax.tree.map(lambda leaf: leaf.sharding, state)
    losses, grads, params = reference(dtype)
    for i, batch in enumerate(batches()):
        window = jaxacc.split_batch(batch, accumulation_steps=steps)
        state, info = step.update(state, jaxacc.place_window(window, options["mesh"], options.get("data_axes", ("data",))))
        assert info.outcome == jaxacc.Outcome.APPLIED
        np.testing.assert_allclose(info.loss, losses[i], rtol=loss_tolerance)
        np.testing.assert_allclose(info.grad_norm, optax.tree.norm(grads[i]), rtol=loss_tolerance)
        actual = {name: state.opt_state[0].trace[name] for name in WEIGHTS}
        assert_trees_close(actual, grads[i], rtol=loss_tolerance, atol=loss_tolerance * largest(grads[i]))
        traced = traced or len(traces)
    assert len(traces) == traced
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == places
    assert (int(info.examples), int(info.tokens)) == (16, sum(COUNTS))
    assert int(state.ledger.tokens) == 3 * sum(COUNTS)
    assert int(state.ledger.microbatches) == 3 * steps * replicas
    actual = {name: state.params[name] for name in WEIGHTS}
    assert difference(params, {name: lm_params(dtype)[name] for name in WEIGHTS}) > 1e-2
    assert_trees_close(actual, params, rtol=tolerance, atol=tolerance)
    if "data" not in name and "fsdp" not in name:
        assert traces[0] == (16 // steps // replicas, LENGTH)


@pytest.mark.parametrize("name", LAYOUTS)
def test_mesh_invariance_float64(name, x64):
    """Law 6: loss, gradient, norm and three clipped AdamW updates are the big batch's; one trace; every leaf stays put.

    Gradients to 1e-12, updates to 1e-10 (cases 53 to 57, 59, 61 to 63, 65, 68, 69, 72, 75, 137).
    """
    check_updates(name, jnp.float64, 1e-12, 1e-10)


@pytest.mark.parametrize("name", FLOAT32)
def test_mesh_invariance_float32(name):
    """The same in float32: gradients to 1e-5 of the largest entry, updates to 1e-4 (AdamW divides by tiny roots)."""
    check_updates(name, jnp.float32, 1e-5, 1e-4)


def test_planted_mistakes_would_be_noticed():
    """A second psum gives D times the gradient, a mean over replicas of means another one (cases 53, 65)."""
    params, batch = lm_params(), batches()[0]
    right = reference(jnp.float32)[1][0]
    window = jaxacc.split_batch(batch, accumulation_steps=2)

    def run(f):
        specs = {"in_specs": (P(), P(None, "data")), "out_specs": P()}
        return jax.jit(jax.shard_map(f, mesh=mesh_of((2,)), check_vma=False, **specs))(params, window)

    summed = lambda p, w: jax.lax.psum(jaxacc.accumulate(lm_loss, axis_name="data")(p, w).grads, "data")
    averaged = lambda p, w: jax.lax.pmean(jaxacc.accumulate(lm_loss, axis_name=())(p, w).grads, "data")
    harmless = lambda p, w: jax.lax.pmean(jaxacc.accumulate(lm_loss, axis_name="data")(p, w).grads, "data")
    np.testing.assert_allclose(run(summed)["embed"], 2 * right["embed"], rtol=1e-4, atol=1e-5)
    assert difference(run(averaged)["embed"], right["embed"]) > 1e-3
    np.testing.assert_allclose(run(harmless)["embed"], right["embed"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"shard_optimizer": True}, {"params_specs": SHARDED}], ids=["repl", "opt", "fsdp"])
def test_a_nonfinite_replica_skips_everywhere(options):
    """Law 5 on a mesh: a NaN on one replica, or no token anywhere, and nothing moves on any (cases 122, 137, 144)."""

    def loss_fn(params, microbatch, key):
        loss = lm_loss(params, microbatch, key)
        return jaxacc.Mean(loss.total + jnp.sum(params["embed"]) * jnp.sum(microbatch["poison"]), loss.weight)

    step = jaxacc.make_step(loss_fn, optimizer(), mesh=mesh_of((4,)), **options)
    clean = jaxacc.split_batch({**batches()[0], "poison": np.zeros(16, np.float32)}, accumulation_steps=2)
    state, _ = step.update(step.init(lm_params()), clean)
    before = host(state)
    broken = {**clean, "poison": clean["poison"].copy()}
    broken["poison"][1, 5] = np.nan
    state, info = step.update(state, broken)
    assert info.outcome == jaxacc.Outcome.SKIPPED_NONFINITE
    shards = [np.asarray(shard.data) for shard in state.params["unused"].addressable_shards]
    assert len(shards) == 4
    assert all(np.array_equal(shard, before.params["unused"]) for shard in shards)
    assert_identical((state.params, state.opt_state), (before.params, before.opt_state))
    state, info = step.update(state, {**clean, "mask": np.zeros_like(clean["mask"])})
    assert info.outcome == jaxacc.Outcome.SKIPPED_EMPTY
    assert_identical((state.params, state.opt_state), (before.params, before.opt_state))
    state, info = step.update(state, clean)
    assert info.outcome == jaxacc.Outcome.APPLIED
    assert difference(state.params["embed"], before.params["embed"]) > 1e-3
    assert (int(state.ledger.attempted), int(state.ledger.applied)) == (4, 2)


@functools.cache
def compiled(layout, steps):
    return layouts.compile_step(layout, steps, layouts.mesh_of(4))


@pytest.mark.parametrize("layout", ["replicated", "shard_optimizer"])
def test_one_reduction_per_window(layout):
    """Law 9: each gradient element crosses once, outside the loops, for A = 2 as for A = 32 (case 217).

    Beside it cross scalars, and the updated parameters where the optimizer is sharded: nothing of the batch.
    """
    payloads = []
    for steps in (2, 32):
        program, state = compiled(layout, steps)
        jaxacc.check_reduction(program, state.params, mesh=layouts.mesh_of(4))
        found = jaxacc.inspect_collectives(program, mesh=layouts.mesh_of(4))
        assert not any(c.in_loop for c in found)
        large = [(c.kind, c.bytes) for c in found if c.bytes > 64]
        gradient = layouts.gradient_bytes(state)
        if layout == "replicated":
            assert large == [("all-reduce", gradient + 4)]  # and the total of the loss
        else:
            assert sorted(large) == [("all-gather", gradient // 2)] * 2 + [("reduce-scatter", gradient // 2)] * 2
        payloads.append(large)
    assert payloads[0] == payloads[1]


@pytest.mark.parametrize("target", topologies.TARGETS)
def test_one_reduction_on_accelerators(target):
    """The same for a TPU v5e 2x4 and 8 H100s, where their compilers are installed; nothing runs."""
    reason = topologies.missing(target)
    if reason:
        pytest.skip(reason)
    output = topologies.run(target)
    assert "failed" not in output, output
    assert len(output.splitlines()) == len(layouts.LAYOUTS)


def test_sharded_parameters_cross_within_the_loops():
    """FSDP is another bargain, and `check_reduction` says so; the accumulators are sharded like the parameters."""
    program, state = compiled("FSDP", 2)
    with pytest.raises(ValueError, match="run inside a loop"):
        jaxacc.check_reduction(program, state.params, mesh=layouts.mesh_of(4))
    whole, _ = compiled("replicated", 2)
    saved = whole.memory_analysis().temp_size_in_bytes - program.memory_analysis().temp_size_in_bytes
    assert saved > layouts.gradient_bytes(state) / 2


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_work_is_divided(layout):
    """Flops per device within 10 % of a quarter of one device's for the same rows: no device computes for another."""
    alone, _ = layouts.compile_step("replicated", 2, None)
    assert compiled(layout, 2)[0].cost_analysis()["flops"] == pytest.approx(alone.cost_analysis()["flops"] / 4, rel=0.1)


@pytest.mark.parametrize(
    ("tx", "least", "most"), [(optax.adamw(1e-3), 0.25, 0.27), (None, 0.25, 0.6)], ids=["adamw", "adafactor"]
)
def test_the_optimizer_state_is_divided(tx, least, most):
    """ZeRO-1 at D = 4: a quarter of adamw's state per device, of adafactor's less is saved; and leaves named that cannot."""
    params = {"w": jnp.ones((64, 32)), "b": jnp.ones(64), "odd": jnp.ones(3)}
    tx = tx or optax.adafactor(1e-3, min_dim_size_to_factor=16, momentum=None)
    step = jaxacc.make_step(linear_loss, tx, mesh=mesh_of((4,)), shard_optimizer=True)
    state = step.init(params)
    shard = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state.opt_state))
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(state.opt_state))
    assert least <= shard / total <= most
    assert state.layout.unsharded(state.params) == ("['odd']",)


def test_reduction_dtype():
    """bf16 on the wire is an explicit choice that shows in the result, and float32 sums arrive at the optimizer."""
    window = jaxacc.split_batch(batches()[0], accumulation_steps=2)
    norms = {}
    for dtype in (None, jnp.float32, jnp.bfloat16):
        step = jaxacc.make_step(lm_loss, optax.sgd(1.0), mesh=mesh_of((4,)), reduction_dtype=dtype)
        norms[dtype] = float(step.update(step.init(lm_params()), window)[1].grad_norm)
    assert norms[None] == norms[jnp.float32]
    assert 1e-6 < abs(norms[jnp.bfloat16] / norms[None] - 1) < 1e-2


def test_thirteen_rows_over_two_replicas():
    """Unequal rows: filled up with weight 0, exact, and counted as 13."""
    batch = lm_batch(rows=13, counts=COUNTS[3:])
    window = jaxacc.split_batch(batch, accumulation_steps=2, microbatch=8, pad=True)
    window["mask"] &= window["row_mask"][..., None]
    step = jaxacc.make_step(lm_loss, optimizer(), mesh=mesh_of((2,)))
    state, info = step.update(step.init(lm_params()), window)
    loss, grads = jax.jit(lm_oracle)(lm_params(), batch)
    np.testing.assert_allclose(info.loss, loss, rtol=1e-5)
    np.testing.assert_allclose(state.opt_state[0].trace["embed"], grads["embed"], rtol=1e-4, atol=1e-6)
    assert (int(info.examples), int(info.tokens)) == (13, batch["mask"].sum())
    assert int(state.ledger.microbatches) == 4


def test_microbatches_of_padding_are_not_counted():
    """Rows 0, 1, 2 of 8 are real: with A = 2 and 4 replicas they lie in two of eight microbatches."""
    step = jaxacc.make_step(linear_loss, optax.sgd(1.0), mesh=mesh_of((4,)), shard_optimizer=True)
    batch = {"x": np.ones((3, 4), np.float32), "n": np.ones(3, np.float32)}
    window = jaxacc.split_batch(batch, accumulation_steps=2, microbatch=8, pad=True)
    state, info = step.update(step.init(jnp.zeros(4)), window)
    np.testing.assert_array_equal(state.params, -1)
    assert (int(info.examples), int(state.ledger.microbatches), float(info.weight)) == (3, 2, 3)


def test_duplicate_rows():
    """A row that two replicas hold is found; padding repeats ids and is not counted."""
    step = jaxacc.make_step(linear_loss, optax.sgd(1.0), mesh=mesh_of((4,)), check_row_ids=True)
    batch = {"x": np.ones((13, 2), np.float32), "n": np.ones(13, np.float32), "row_ids": np.arange(13) * 7}
    expected = {(): 0, ((0, 12),): 1, ((0, 5), (1, 5), (7, 12)): 3}
    for copies, count in expected.items():
        ids = batch["row_ids"].copy()
        for to, source in copies:
            ids[to] = ids[source]
        window = jaxacc.split_batch({**batch, "row_ids": ids}, accumulation_steps=2, microbatch=8, pad=True)
        _, info = step.update(step.init(jnp.zeros(2)), window)
        assert int(info.duplicate_rows) == count
    with pytest.raises(ValueError, match="needs the leaf 'row_ids'"):
        step.update(step.init(jnp.zeros(2)), jaxacc.split_batch({"x": batch["x"][:8], "n": batch["n"][:8]}, microbatch=4))


@pytest.mark.parametrize("options", [{}, {"params_specs": SHARDED}], ids=["repl", "fsdp"])
def test_evaluate(options):
    """Undivided means, sums and maxima are those of one device, and merge with them (cases 130, 247)."""

    def loss_fn(params, microbatch, key):
        assert key is None
        loss = lm_loss(params, microbatch, key)
        rows = jnp.sum(microbatch["mask"], axis=1)
        return loss, {"rows": jaxacc.Sum(rows > 0), "longest": jaxacc.Max(rows), "mean": jaxacc.Mean(rows * 1.0, rows > 0)}

    window = jaxacc.split_batch(batches()[0], accumulation_steps=2)
    means = []
    for placed in ({}, {"mesh": mesh_of((4,)), **options}):
        step = jaxacc.make_step(loss_fn, optax.sgd(1.0), has_aux=True, **placed)
        means.append(step.evaluate(step.init(lm_params(), key=jax.random.key(0)), window))
    assert_trees_close(means[1], means[0], rtol=1e-5)
    assert int(means[1].loss.weight) == sum(COUNTS)
    assert int(means[1].metrics["longest"].value) == 16


def test_keys_differ_between_replicas():
    """Case 180: every replica draws its own randomness."""

    def loss_fn(params, microbatch, key):
        noise = jax.random.uniform(key)
        ones = jnp.ones(microbatch["x"].shape[0])
        return jaxacc.Mean(ones * noise * params, ones), {"most": jaxacc.Max(noise), "least": jaxacc.Max(-noise)}

    step = jaxacc.make_step(loss_fn, optax.sgd(0.0), has_aux=True, mesh=mesh_of((2,)))
    _, info = step.update(step.init(jnp.float32(1), key=jax.random.key(0)), {"x": jnp.ones((1, 2))})
    most, least = float(info.metrics["most"].value), -float(info.metrics["least"].value)
    assert most - least > 1e-3
    assert float(info.loss) == pytest.approx((most + least) / 2)


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit])
def test_scan_outer_jit_and_a_current_mesh(types):
    """The state carries its layout through scan, an outer jit and a mesh that is current, Auto or Explicit."""
    mesh = mesh_of((2,), types=types)
    step = jaxacc.make_step(lm_loss, optimizer(), mesh=mesh, shard_optimizer=True)
    windows = [jaxacc.split_batch(batch, accumulation_steps=2) for batch in batches()]
    _, _, expected = reference(jnp.float32)
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *windows)
    scanned, infos = jax.lax.scan(step.update, step.init(lm_params()), stacked)
    assert infos.loss.shape == (3,)
    with jax.set_mesh(mesh):
        state = step.init(lm_params())
        outer = jax.jit(step.update)
        for window in windows:
            state, info = outer(state, jax.device_put(window, NamedSharding(mesh, P(None, "data"))))
            assert int(info.outcome) == jaxacc.Outcome.APPLIED
    for final in (scanned, state):
        assert_trees_close({name: final.params[name] for name in WEIGHTS}, expected, rtol=1e-4, atol=1e-4)
        assert final.opt_state[0].trace["embed"].sharding.spec == P("data")


def test_parameters_stay_where_they_are_found():
    """Without `params_specs` the arrays given to `init` say how they lie, on the mesh or on an Explicit copy of it."""
    auto, explicit = mesh_of((2, 2), GRID), mesh_of((2, 2), GRID, AxisType.Explicit)
    params = {"w": jax.device_put(jnp.ones((4, 4)), NamedSharding(explicit, P(None, "model"))), "b": jnp.ones(4)}
    step = jaxacc.make_step(linear_loss, optax.adam(0.1), mesh=auto)
    state = step.init(params)
    assert [leaf.sharding.spec for leaf in jax.tree.leaves(state.params)] == [P(), P(None, "model")]
    assert state.opt_state[0].mu["w"].sharding.spec == P(None, "model")
    assert {leaf.sharding.mesh for leaf in jax.tree.leaves(state)} == {auto}
    assert all(leaf.committed for leaf in jax.tree.leaves(state))
    step.init(params)  # what was given is still there
    assert largest(params) == 1


def test_place_window():
    """Rows go where the step wants them, and splitting a batch that is placed already moves none (case 215)."""
    mesh = mesh_of((4,))
    window = jaxacc.place_window(jaxacc.split_batch(batches()[0], accumulation_steps=2), mesh, "data")
    assert window["tokens"].sharding.spec == P(None, "data")
    batch = jax.ShapeDtypeStruct((16, LENGTH), jnp.int32, sharding=NamedSharding(mesh, P("data")))
    split = jax.jit(lambda leaf: jaxacc.split_batch(leaf, accumulation_steps=2)).lower(batch).compile()
    assert jaxacc.inspect_collectives(split) == []
    with pytest.raises(ValueError, match=r"holds 6 rows .* its 4 replicas.*microbatch=8, pad=True"):
        jaxacc.place_window({"x": np.ones((2, 6))}, mesh)


def run_one(window, **options):
    step = jaxacc.make_step(linear_loss, optax.sgd(1.0), **options)
    return step.update(step.init(jnp.ones(3)), window)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data_axes": ("batch",)}, r"data_axes=\('batch',\) must name axes of the mesh, which has \('data',\)"),
        ({"data_axes": ()}, "must name axes of the mesh"),
        ({"mesh": None, "data_axes": ("data",)}, "mesh is None"),
        ({"mesh": None, "shard_optimizer": True}, "mesh is None"),
        ({"shard_optimizer": True, "params_specs": P("data")}, "sharded over .* already"),
        ({"params_specs": P(None)}, "8 rows per microbatch index, which 3 replicas"),
    ],
)
def test_what_cannot_be_arranged(options, message):
    """What was given, the rule, the remedy."""
    window = {"x": np.ones((2, 8, 3), np.float32), "n": np.ones((2, 8), np.float32)}
    with pytest.raises(ValueError, match=message):
        run_one(window, **{"mesh": mesh_of((3,)), **options})


def test_a_state_of_another_place():
    """A state that was made for one device, or by hand, does not silently run without the mesh."""
    window = {"x": np.ones((2, 8, 3), np.float32), "n": np.ones((2, 8), np.float32)}
    alone, meshed = (jaxacc.make_step(linear_loss, optax.sgd(1.0), mesh=mesh) for mesh in (None, mesh_of((2,))))
    with pytest.raises(ValueError, match=r"lies on one device.*state\._replace\(layout"):
        meshed.update(alone.init(jnp.ones(3)), window)
    with pytest.raises(ValueError, match="made for one device"):
        alone.evaluate(meshed.init(jnp.ones(3)), window)


def test_strict_promotion(strict):
    """The whole step on a mesh under strict promotion of ranks and dtypes, with plain SGD."""

    def loss_fn(params, microbatch, key):
        total = microbatch["x"] @ params
        return jaxacc.Mean(total, jnp.ones_like(total, jnp.int32))

    step = jaxacc.make_step(loss_fn, optax.sgd(1.0), mesh=mesh_of((2,)), shard_optimizer=True, check_row_ids=True)
    batch = {"x": jnp.ones((7, 2)), "row_ids": jnp.arange(7)}
    state, info = step.update(
        step.init(jnp.ones(2), key=jax.random.key(0)), jaxacc.split_batch(batch, accumulation_steps=4, microbatch=2, pad=True)
    )
    assert (int(info.tokens), int(info.duplicate_rows)) == (7, 0)
    assert largest(state.params) == pytest.approx(0, abs=1e-6)
