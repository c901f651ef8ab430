"""`step.begin`, `add` and `finish`: the update of a window whose microbatches are never together in memory."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from problems import (
    COUNTS,
    FOLDS,
    assert_identical,
    assert_trees_close,
    difference,
    host,
    lm_batch,
    lm_loss,
    lm_oracle,
    lm_params,
)

import jaxacc

TX = {"sgd": optax.sgd(0.5), "clipped adamw": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))}


def with_metrics(params, microbatch, key):
    loss = lm_loss(params, microbatch, key)
    noise = 0.0 if key is None else jax.random.uniform(key)
    return loss, {"longest": jaxacc.Max(jnp.sum(microbatch["mask"], 1)), "noise": jaxacc.Sum(noise), "again": loss}


def mesh_of(devices, model=1):
    return jax.make_mesh((devices, model), ("data", "model"), devices=jax.devices()[: devices * model])


def stream(step, state, window, between=lambda accumulator: accumulator):
    parts = [jax.tree.map(lambda leaf: leaf[i], window) for i in range(window["tokens"].shape[0])]
    accumulator = step.begin(state, parts[0])
    for part in parts:
        accumulator = between(step.add(accumulator, state, part))
    return step.finish(accumulator, state)


@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize("tx", TX)
def test_streaming_equals_the_window_and_the_big_batch(fold, tx, x64):
    """Three windows with a zero-weight microbatch: parameters, records and ledger agree, and a dropped microbatch does not."""
    params = lm_params(dtype=jnp.float64)
    step = jaxacc.make_step(with_metrics, TX[tx], has_aux=True, fold=fold)
    states = [step.init(params, key=jax.random.key(3)) for _ in range(3)]
    for seed in range(3):
        window = jaxacc.split_batch(lm_batch(seed=seed, counts=[*sorted(COUNTS[:-1]), 0]), accumulation_steps=8)
        states[0], by_window = step.update(states[0], window)
        states[1], streamed = stream(step, states[1], window)
        states[2], _ = stream(step, states[2], jax.tree.map(lambda leaf: leaf[:-2], window))
        assert_trees_close(streamed, by_window, rtol=1e-12)
    assert_trees_close(states[1].params, states[0].params, rtol=1e-10)
    assert [int(count) for count in states[1].ledger] == [int(count) for count in states[0].ledger]
    assert difference(states[2].params["embed"], states[0].params["embed"]) > 1e-4
    assert difference(states[0].params["embed"], params["embed"]) > 1e-3


def test_the_gradient_is_that_of_the_big_batch(x64):
    params, batch = lm_params(dtype=jnp.float64), lm_batch()
    step = jaxacc.make_step(lm_loss, optax.sgd(1.0))
    state, info = stream(step, step.init(params), jaxacc.split_batch(batch, accumulation_steps=4))
    loss, grads = lm_oracle(params, batch)
    np.testing.assert_allclose(info.loss, loss, rtol=1e-12)
    moved = jax.tree.map(lambda old, new: old - new, params["embed"], state.params["embed"])
    assert_trees_close(moved, grads["embed"], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("layout", ["replicated", "sharded optimizer", "fsdp", "tensor"])
def test_streaming_on_a_mesh(layout, x64):
    """Four replicas give one device's update; between adds every leaf is sharded, add moves nothing, finish once."""
    params, batch = lm_params(dtype=jnp.float64, vocabulary=12, width=8), lm_batch(rows=16)
    whole = {name: jax.P() for name in params}
    options = {
        "replicated": {},
        "sharded optimizer": {"shard_optimizer": True},
        "fsdp": {"params_specs": {**whole, "embed": jax.P("data")}},
        "tensor": {"params_specs": {**whole, "embed": jax.P(None, "model")}},
    }[layout]
    mesh = mesh_of(4, model=2 if layout == "tensor" else 1)
    one = jaxacc.make_step(lm_loss, TX["clipped adamw"])
    many = jaxacc.make_step(lm_loss, TX["clipped adamw"], mesh=mesh, **options)
    window = jaxacc.split_batch(batch, accumulation_steps=2)
    expected, by_window = one.update(one.init(params), window)
    state = many.init(params)
    first = jax.tree.map(lambda leaf: leaf[0], window)
    accumulator = many.begin(state, first)
    if layout != "fsdp":
        assert {leaf.shape[0] for leaf in jax.tree.leaves(accumulator)} == {4}
        assert {leaf.sharding.spec[0] for leaf in jax.tree.leaves(accumulator)} == {"data"}
        added = jaxacc.inspect_collectives(many.add.lower(accumulator, state, first).compile(), mesh=mesh)
        assert {axis for collective in added for axis in collective.axes} == ({"model"} if layout == "tensor" else set())
        assert bool(added) == (layout == "tensor")
        moved = jaxacc.inspect_collectives(many.finish.lower(accumulator, state).compile())
        assert moved
        assert not any(c.in_loop for c in moved)
    state, info = stream(many, state, window)
    np.testing.assert_allclose(info.loss, by_window.loss, rtol=1e-12)
    assert_trees_close(host(state.params), host(expected.params), rtol=1e-9, atol=1e-12)
    assert difference(host(state.params)["embed"], host(params)["embed"]) > 1e-3


def test_saved_inside_a_window(tmp_path):
    """Saved after microbatch 2 of 4 by plain Orbax and restored: bit-equal, dropout keys included."""
    step = jaxacc.make_step(with_metrics, TX["clipped adamw"], has_aux=True)
    window = jaxacc.split_batch(lm_batch(), accumulation_steps=4)
    straight, info = stream(step, step.init(lm_params(), key=jax.random.key(0)), window)
    checkpointer, count = ocp.StandardCheckpointer(), 0

    def save_and_restore(accumulator):
        nonlocal count
        count += 1
        if count != 2:
            return accumulator
        checkpointer.save(tmp_path / "window", accumulator)
        checkpointer.wait_until_finished()
        return checkpointer.restore(tmp_path / "window", jax.tree.map(ocp.utils.to_shape_dtype_struct, accumulator))

    resumed, again = stream(step, step.init(lm_params(), key=jax.random.key(0)), window, save_and_restore)
    assert count == 4
    assert_identical((resumed.params, resumed.opt_state, again), (straight.params, straight.opt_state, info))


@pytest.mark.parametrize(("before", "after"), [(4, 1), (1, 4), (4, 2)])
def test_continued_on_another_mesh(before, after, x64):
    """Sums of D replicas go on with another D: loss, metrics, counts and update are the window's."""
    params, window = lm_params(dtype=jnp.float64), jaxacc.split_batch(lm_batch(rows=16), accumulation_steps=4)
    meshes = [mesh_of(devices) if devices > 1 else None for devices in (before, after)]
    steps = [jaxacc.make_step(with_metrics, TX["sgd"], has_aux=True, mesh=mesh) for mesh in meshes]
    expected, by_window = steps[1].update(steps[1].init(params), window)
    states = [step.init(params) for step in steps]
    parts = [jax.tree.map(lambda leaf, i=i: leaf[i], window) for i in range(4)]
    accumulator = steps[0].begin(states[0], parts[0])
    for part in parts[:2]:
        accumulator = steps[0].add(accumulator, states[0], part)
    accumulator = host(accumulator)
    with pytest.raises(ValueError, match=f"sums of {before} replicas, and the step has {after}"):
        steps[1].add(accumulator, states[1], parts[2])
    accumulator = steps[1].begin(states[1], parts[2], accumulator)
    for part in parts[2:]:
        accumulator = steps[1].add(accumulator, states[1], part)
    state, info = steps[1].finish(accumulator, states[1])
    assert_trees_close(host(info), host(by_window), rtol=1e-12, atol=1e-15)
    assert_trees_close(host(state.params), host(expected.params), rtol=1e-10)
    assert [int(count) for count in state.ledger][1:] == [int(count) for count in expected.ledger][1:]
    assert int(state.ledger.microbatches) == 2 * (before + after)


def test_a_thousand_microbatches_in_constant_memory():
    """Between adds the same bytes are alive after 10 and after 1,000 microbatches, from one compilation."""
    traces = 0

    def loss_fn(params, microbatch, key):
        nonlocal traces
        traces += 1
        return lm_loss(params, microbatch, key)

    step = jaxacc.make_step(loss_fn, TX["sgd"])
    state = step.init(lm_params())
    batch = lm_batch()
    accumulator = step.begin(state, batch)
    alive, traced = {}, 0
    for count in range(1, 1001):
        accumulator = step.add(accumulator, state, batch)
        if count in (10, 1000):
            jax.block_until_ready(accumulator)
            alive[count] = sum(leaf.nbytes for leaf in jax.live_arrays())
        traced = traced or traces
    assert alive[1000] == alive[10]
    assert traces == traced
    state, info = step.finish(accumulator, state)
    assert int(info.weight) == 1000 * sum(COUNTS)
    assert int(state.ledger.microbatches) == 1000


def test_the_sums_are_added_to_where_they_are():
    """The accumulator is donated and reused; on scanned layers no second gradient tree exists where the fold is in place."""
    width, layers = 128, 16

    def loss_fn(params, microbatch, key):
        body = jax.checkpoint(lambda h, w: (h + jnp.tanh(h @ w), None))
        h, _ = jax.lax.scan(body, microbatch["x"], params)
        return jaxacc.Mean(jnp.sum(h**2, axis=1), jnp.ones(h.shape[0]))

    for fold, most in [("carry", 1.3), *([("in_place", 0.35)] if "in_place" in FOLDS else [])]:
        step = jaxacc.make_step(loss_fn, optax.sgd(1e-3), fold=fold)
        state, microbatch = step.init(jnp.zeros((layers, width, width))), {"x": jnp.ones((4, width))}
        memory = step.add.lower(step.begin(state, microbatch), state, microbatch).compile().memory_analysis()
        tree = 4 * layers * width**2
        assert memory.alias_size_in_bytes >= tree
        assert memory.temp_size_in_bytes / tree < most, fold


def test_a_window_that_is_skipped_moves_nothing():
    step = jaxacc.make_step(lm_loss, TX["clipped adamw"])
    state = step.init(lm_params())
    before = host((state.params, state.opt_state))
    window = jaxacc.split_batch(lm_batch(), accumulation_steps=4)
    empty = {**window, "mask": np.zeros_like(window["mask"])}
    state, info = stream(step, state, empty)
    assert info.outcome == jaxacc.Outcome.SKIPPED_EMPTY
    accumulator = step.begin(state, {name: leaf[0] for name, leaf in window.items()})
    state, info = step.finish(accumulator, state)
    assert info.outcome == jaxacc.Outcome.SKIPPED_EMPTY
    assert_identical((state.params, state.opt_state), before)
    state, info = stream(step, state, window)
    assert info.outcome == jaxacc.Outcome.APPLIED
    assert [int(state.ledger.attempted), int(state.ledger.applied)] == [3, 1]


def test_row_ids_cannot_be_compared():
    step = jaxacc.make_step(lm_loss, TX["sgd"], check_row_ids=True)
    with pytest.raises(ValueError, match="check_row_ids"):
        step.begin(step.init(lm_params()), {**lm_batch(), "row_ids": np.arange(8)})
