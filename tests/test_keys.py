"""Randomness: distinct where it must be, and with row keys the same for every split."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import assert_trees_close, difference, host

import jaxacc

KEY = jax.random.key(7)
ROWS = 16


def batch():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(ROWS, 5)), rng.normal(size=ROWS)
    return {"x": x.astype(np.float32), "y": y.astype(np.float32)}


def dropped(key, row):
    return jnp.where(jax.random.bernoulli(key, 0.5, row.shape), 2 * row, 0)


def by_row(params, microbatch, keys):
    """A model with dropout in each row."""
    hidden = jnp.tanh(jax.vmap(dropped)(keys, microbatch["x"]) @ params["w"])
    error = jnp.square(jax.vmap(lambda key, row: dropped(jax.random.fold_in(key, 1), row))(keys, hidden) @ params["v"])
    return jaxacc.Mean(jnp.square(error - microbatch["y"]), jnp.ones_like(error))


PARAMS = {"w": jnp.linspace(-1, 1, 20).reshape(5, 4), "v": jnp.linspace(0.5, 1, 4)}


def the_big_batch():
    """One big batch, key `r` folded from the row's place in it, with plain JAX."""
    window_key = jax.random.fold_in(jax.random.fold_in(KEY, 0), 0)
    keys = jnp.stack([jax.random.fold_in(window_key, r) for r in range(ROWS)])
    mean = lambda params: jnp.mean(by_row(params, batch(), keys).total)
    return jax.value_and_grad(mean)(PARAMS)


@pytest.mark.parametrize(("steps", "replicas"), [(1, 1), (4, 1), (1, 4), (2, 2), (4, 4), (16, 1)])
def test_row_keys_do_not_depend_on_the_split(steps, replicas):
    """The gradient of a model with dropout is that of the big batch, for every (m, A, D)."""
    mesh = jax.make_mesh((replicas,), ("data",), devices=jax.devices()[:replicas])
    step = jaxacc.make_step(by_row, optax.sgd(1.0), row_keys=True, mesh=mesh)
    loss, grads = the_big_batch()
    state, info = step.update(step.init(PARAMS, key=KEY), jaxacc.split_batch(batch(), accumulation_steps=steps))
    assert float(info.loss) == pytest.approx(float(loss), rel=1e-5)
    moved = jax.tree.map(lambda before, after: before - after, PARAMS, host(state.params))
    assert_trees_close(moved, grads, rtol=1e-4, atol=1e-5)
    other = jaxacc.make_step(by_row, optax.sgd(1.0), row_keys=True)
    _, elsewhere = other.update(other.init(PARAMS, key=jax.random.key(8)), jaxacc.split_batch(batch(), accumulation_steps=4))
    assert abs(float(elsewhere.loss) - float(loss)) > 1e-2


def test_row_keys_follow_row_position():
    """Windows that were not cut by `split_batch` say where their rows were; padded, streamed or not."""
    loss, _ = the_big_batch()
    rows = [{name: leaf[r] for name, leaf in batch().items()} for r in range(ROWS)]
    (window,) = jaxacc.windows.windows(rows, microbatch=3, accumulation_steps=6, last="process")
    step = jaxacc.make_step(by_row, optax.sgd(1.0), row_keys=True)
    state, info = step.update(step.init(PARAMS, key=KEY), window)
    assert float(info.loss) == pytest.approx(float(loss), rel=1e-5)
    parts = [jax.tree.map(lambda leaf, a=a: leaf[a], window) for a in range(6)]
    state = step.init(PARAMS, key=KEY)
    accumulator = step.begin(state, parts[0])
    for part in reversed(parts):
        accumulator = step.add(accumulator, state, part)
    _, info = step.finish(accumulator, state)
    assert float(info.loss) == pytest.approx(float(loss), rel=1e-5)
    without = {name: leaf for name, leaf in parts[0].items() if name != "row_position"}
    with pytest.raises(ValueError, match="row_keys=True needs the leaf 'row_position' in a streamed microbatch"):
        step.begin(state, without)
    with pytest.raises(ValueError, match="row_position must hold one integer per row"):
        step.update(step.init(PARAMS, key=KEY), {**window, "row_position": window["row_position"] * 1.0})


@pytest.mark.parametrize("row_keys", [False, True])
def test_no_key_is_used_twice(row_keys):
    """Cases 177, 180, 181: between microbatches, replicas, windows; after a skipped window or an empty microbatch."""
    steps, replicas, rows = 4, 2, 2

    def loss_fn(params, microbatch, key):
        keys = key if row_keys else key[None]
        bits = jax.vmap(lambda k: jax.random.bits(k, (4,), jnp.uint32))(keys)
        count = bits.shape[0]
        place = microbatch["slot"][0]
        table = jnp.zeros((steps * replicas, rows, 4), jnp.uint32).at[place, :count].set(bits)
        flat = {str(i): jaxacc.Sum(value) for i, value in enumerate(table.reshape(-1))}
        return jaxacc.Mean(params * jnp.sum(microbatch["x"]), jnp.sum(microbatch["n"])), flat

    mesh = jax.make_mesh((replicas,), ("data",), devices=jax.devices()[:replicas])
    step = jaxacc.make_step(loss_fn, optax.sgd(0.0), has_aux=True, row_keys=row_keys, mesh=mesh)
    slot = jnp.repeat(jnp.arange(steps * replicas).reshape(steps, replicas), rows, axis=1)
    good = {"x": jnp.ones((steps, replicas * rows)), "n": jnp.ones((steps, replicas * rows), jnp.int32), "slot": slot}
    bad = {**good, "x": good["x"].at[0, 0].set(jnp.nan)}
    gap = {**good, "n": good["n"].at[1].set(0)}
    state, seen = step.init(jnp.float32(1), key=KEY), []
    for window in (good, bad, gap, good):
        state, info = step.update(state, window)
        bits = np.array([int(info.metrics[str(i)].value) for i in range(steps * replicas * rows * 4)]).reshape(-1, 4)
        seen += [tuple(row) for row in bits if row.any()]
    per_window = steps * replicas * (rows if row_keys else 1)
    lost = per_window // steps
    assert len(seen) == len(set(seen)) == 4 * per_window - lost


def test_the_same_key_gives_the_same_masks():
    """And windows of a state without key get none."""
    step = jaxacc.make_step(by_row, optax.sgd(1.0), row_keys=True)
    window = jaxacc.split_batch(batch(), accumulation_steps=4)
    runs = [host(step.update(step.init(PARAMS, key=KEY), window)[0].params) for _ in range(2)]
    assert difference(runs[0], runs[1]) == 0 < difference(runs[0], PARAMS)

    def keyless(params, microbatch, key):
        assert key is None
        return jaxacc.Mean(jnp.square(microbatch["x"] @ params["w"] @ params["v"]), jnp.ones(microbatch["x"].shape[0]))

    step = jaxacc.make_step(keyless, optax.sgd(1.0), row_keys=True)
    assert int(step.update(step.init(PARAMS), window)[1].outcome) == jaxacc.Outcome.APPLIED
