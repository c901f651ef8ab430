"""`make_step`: one update per window, equal to the big batch's, or nothing at all (laws 4, 5, 7 and 10)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import (
    COUNTS,
    FOLDS,
    assert_identical,
    assert_trees_close,
    big_batch_updates,
    difference,
    host,
    largest,
    linear_loss,
    lm_batch,
    lm_loss,
    lm_oracle,
    lm_params,
)

import jaxacc

OPTIMIZERS = {
    "sgd": lambda: optax.sgd(1.0),
    "sgd_decay": lambda: optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.5, momentum=0.9)),
    "adam_large_eps": lambda: optax.adam(0.1, eps=0.1),
    "adamw": lambda: optax.adamw(1e-2, weight_decay=0.1),
    "clip_schedule": lambda: optax.chain(
        optax.clip_by_global_norm(0.05), optax.adamw(optax.linear_schedule(0.1, 0.0, 4), weight_decay=0.1)
    ),
    "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=4),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(0.1),
    "zero_nans": lambda: optax.chain(optax.zero_nans(), optax.adam(0.1)),
}


@functools.cache
def step_of(optimizer, fold="auto"):
    return jaxacc.make_step(lm_loss, OPTIMIZERS[optimizer](), fold=fold)


@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_updates_equal_the_big_batch(optimizer, fold, x64):
    """Law 4: three updates, float64 to 1e-10, for optimizers that would each show another mistake.

    SGD shows a wrong scale, decay and momentum show updates per microbatch, clipping and schedules show their place,
    Adam's bias correction shows its counter (cases 35, 41, 94 to 99, 101, 112, 124, 174).
    """
    params = lm_params(dtype=jnp.float64)
    batches = [lm_batch(seed=seed) for seed in range(3)]
    expected = big_batch_updates(params, batches, OPTIMIZERS[optimizer]())
    step = step_of(optimizer, fold)
    state = step.init(params)
    for batch in batches:
        state, info = step.update(state, jaxacc.split_batch(batch, accumulation_steps=4))
        assert info.outcome == jaxacc.Outcome.APPLIED
    actual = {name: state.params[name] for name in expected}
    assert difference(expected, {name: params[name] for name in expected}) > 1e-3
    assert_trees_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_the_wrong_updates_would_be_noticed(x64):
    """The planted mistakes that the equality above must catch: dropped microbatch, mean of means, sum for mean."""
    params, batch = lm_params(dtype=jnp.float64), lm_batch()
    tx = OPTIMIZERS["sgd"]()
    right = big_batch_updates(params, [batch], tx)
    window = jaxacc.split_batch(batch, accumulation_steps=4)
    dropped = jax.tree.map(lambda leaf: leaf[:3].reshape(-1, *leaf.shape[2:]), window)
    assert difference(big_batch_updates(params, [dropped], tx), right) > 1e-3
    means = [lm_oracle(params, jax.tree.map(lambda leaf, a=a: leaf[a], window))[1]["embed"] for a in range(4)]
    assert float(jnp.max(jnp.abs(params["embed"] - sum(means) / 4 - right["embed"]))) > 1e-3
    summed = lm_oracle(params, batch)[1]["embed"] * sum(COUNTS)
    assert float(jnp.max(jnp.abs(params["embed"] - summed - right["embed"]))) > 1e-3


@pytest.mark.parametrize("fold", FOLDS)
def test_clipping_sees_the_whole_window(fold):
    """Gradients [3, 0] and [0, 0.1] with clip 1; [2, 0] and [0, 2] (cases 112, 114, 119)."""
    step = jaxacc.make_step(linear_loss, optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)), fold=fold)
    for grads, clipped in [
        ([[6.0, 0], [0, 0.2]], [0.99945, 0.03331]),
        ([[2.0, 0], [0, 2]], [0.70711, 0.70711]),
        ([[0.2, 0], [0, 0.2]], [0.1, 0.1]),
    ]:
        window = {"x": jnp.array(grads)[:, None], "n": jnp.ones((2, 1))}
        state, info = step.update(step.init(jnp.zeros(2)), window)
        np.testing.assert_allclose(-state.params, clipped, rtol=1e-3)
        assert float(info.grad_norm) == pytest.approx(np.linalg.norm(np.mean(grads, 0)))


def test_bfloat16_parameters():
    """bf16 parameters: the sum reaches the optimizer in float32, leaves keep their dtypes (cases 6, 201, 202)."""
    seen = []

    def look(updates, state, params=None):
        seen.extend(leaf.dtype for leaf in jax.tree.leaves(updates))
        return updates, state

    for inner in (optax.adafactor(1e-2, min_dim_size_to_factor=4), optax.adamw(1e-2), optax.contrib.schedule_free_adamw(1e-2)):
        tx = optax.chain(optax.GradientTransformation(lambda params: optax.EmptyState(), look), inner)
        step = jaxacc.make_step(lm_loss, tx)
        state = step.init(lm_params(dtype=jnp.bfloat16))
        before = host(state)
        for _ in range(2):
            state, _ = step.update(state, jaxacc.split_batch(lm_batch(), accumulation_steps=4))
        assert set(seen) == {jnp.dtype(jnp.float32)}
        assert [leaf.dtype for leaf in jax.tree.leaves(state)] == [leaf.dtype for leaf in jax.tree.leaves(before)]
        assert np.any(np.asarray(state.params["embed"]) != before.params["embed"])
        assert step.update._cache_size() == 1


@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_nonfinite_microbatch_skips_the_window(fold, poison):
    """Law 5: NaN or inf at every index of a window: nothing moves, bit for bit, and the next window is right.

    (Cases 122, 127, 129, 130, 132, 134.)
    """

    def loss_fn(params, microbatch, key):
        loss = lm_loss(params, microbatch, key)
        return jaxacc.Mean(loss.total + jnp.sum(params["embed"]) * jnp.sum(microbatch["poison"]), loss.weight)

    step = jaxacc.make_step(loss_fn, OPTIMIZERS["clip_schedule"](), fold=fold)
    clean = jaxacc.split_batch({**lm_batch(counts=(4,)), "poison": np.zeros(8, np.float32)}, accumulation_steps=4)
    warm, _ = step.update(step.init(lm_params()), clean)
    right, _ = step.update(step.init(warm.params)._replace(opt_state=jax.tree.map(jnp.copy, warm.opt_state)), clean)
    for index in range(4):
        broken = {**clean, "poison": clean["poison"].copy()}
        broken["poison"][index, 1] = poison
        state = jax.tree.map(jnp.copy, warm)
        state, info = step.update(state, broken)
        assert info.outcome == jaxacc.Outcome.SKIPPED_NONFINITE
        assert not np.isfinite(info.loss)
        assert_identical((state.params, state.opt_state), (warm.params, warm.opt_state))
        assert (int(state.ledger.attempted), int(state.ledger.applied)) == (2, 1)
        state, info = step.update(state, clean)
        assert info.outcome == jaxacc.Outcome.APPLIED
        assert_identical((state.params, state.opt_state), (right.params, right.opt_state))
    assert difference(right.params["embed"], warm.params["embed"]) > 1e-3


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("broken", ["loss", "weight", "nan_weight", "negative_weight", "gradient"])
def test_each_number_that_is_not_finite_skips_the_window(broken, steps):
    """A loss alone, a weight alone (inf gives a loss and gradient of 0) and a gradient alone: each is enough to skip.

    A negative total weight would turn the descent around, so it is skipped as well.
    """
    weights = {"weight": jnp.inf, "nan_weight": jnp.nan, "negative_weight": -9.0}

    def loss_fn(params, microbatch, key):
        total = microbatch["x"] * (params + jnp.where(microbatch["bad"] & (broken == "loss"), jnp.nan, 0.0))
        if broken == "gradient":  # sqrt at 0: the value is 0, the slope infinite (and not NaN)
            total += jnp.sqrt(jnp.where(microbatch["bad"], params - jax.lax.stop_gradient(params), 1.0))
        return jaxacc.Mean(total, jnp.where(microbatch["bad"], weights.get(broken, 1.0), 1.0))

    step = jaxacc.make_step(loss_fn, optax.sgd(0.1, momentum=0.9))
    good = {"x": jnp.ones((steps, 2)), "bad": jnp.zeros((steps, 2), bool)}
    state, info = step.update(step.init(jnp.float32(1)), good)
    assert info.outcome == jaxacc.Outcome.APPLIED
    before = host(state)
    state, info = step.update(state, {**good, "bad": good["bad"].at[-1, 0].set(True)})
    assert info.outcome == jaxacc.Outcome.SKIPPED_NONFINITE
    assert bool(jnp.isfinite(info.loss)) == (broken not in ("loss", "nan_weight"))
    assert bool(jnp.isfinite(info.grad_norm)) == (broken not in ("gradient", "nan_weight"))
    assert_identical((state.params, state.opt_state), (before.params, before.opt_state))
    assert float(state.params) < 1


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("fold", FOLDS)
def test_an_empty_window_is_skipped(fold, steps):
    """A window without weight: SKIPPED_EMPTY, nothing moves, not even by decay or momentum (cases 139, 140, 143)."""
    step = step_of("sgd_decay", fold)
    full = jaxacc.split_batch(lm_batch(), accumulation_steps=steps)
    state, _ = step.update(step.init(lm_params()), full)
    before = host(state)
    state, info = step.update(state, jaxacc.split_batch(lm_batch(counts=(0,)), accumulation_steps=steps))
    assert info.outcome == jaxacc.Outcome.SKIPPED_EMPTY
    assert (float(info.loss), float(info.weight), float(info.grad_norm)) == (0, 0, 0)
    assert_identical((state.params, state.opt_state), (before.params, before.opt_state))
    assert (int(state.ledger.attempted), int(state.ledger.applied)) == (2, 1)


def test_schedules_follow_applied_updates():
    """Linear 0 to 1 over 4 updates with A = 2: 0, .25, .5, .75, and a skipped window takes no tick (cases 94 to 96, 107)."""
    step = jaxacc.make_step(linear_loss, optax.sgd(optax.linear_schedule(0.0, 1.0, 4)))
    good = {"x": jnp.ones((2, 1, 1)), "n": jnp.ones((2, 1))}
    state = step.init(jnp.zeros(1))
    moved, previous = [], 0.0
    for window in (good, good, {**good, "x": good["x"] * jnp.nan}, good, good):
        state, _ = step.update(state, window)
        moved.append(previous - float(state.params[0]))
        previous = float(state.params[0])
    assert moved == [0, 0.25, 0, 0.5, 0.75]
    assert (int(state.ledger.attempted), int(state.ledger.applied), int(state.ledger.microbatches)) == (5, 4, 10)


def test_ledger_and_info_count_rows_and_tokens():
    """One record per window, of the whole window, padding excluded (cases 51, 236, 237, 239, 242, 243)."""
    step = step_of("adamw")
    state = step.init(lm_params())
    for rows in (8, 5):
        batch = lm_batch(rows=rows)
        window = jaxacc.split_batch({**batch, "row_mask": np.ones(rows, bool)}, accumulation_steps=4, pad=True)
        window["mask"] &= window["row_mask"][..., None]
        state, info = step.update(state, window)
        assert int(info.examples) == rows
        assert int(info.tokens) == batch["mask"].sum() == int(info.weight)
    assert int(state.ledger.examples) == 13
    assert int(state.ledger.tokens) == sum(COUNTS) + sum(COUNTS[:5])
    assert int(state.ledger.microbatches) == 8


def test_microbatches_of_padding_are_not_counted():
    """A window whose tail is padding holds fewer microbatches."""
    window = {"x": jnp.ones((4, 2, 1)), "n": jnp.ones((4, 2)), "row_mask": np.array([[1, 1], [1, 0], [0, 0], [0, 0]], bool)}
    step = jaxacc.make_step(linear_loss, optax.sgd(1.0))
    state, info = step.update(step.init(jnp.zeros(1)), window)
    assert (int(info.examples), int(state.ledger.microbatches), float(info.weight)) == (3, 2, 3)
    assert int(info.tokens) == 0  # a float weight is no token count


def test_declared_tokens():
    """The metric `Sum` named tokens takes precedence over the weight."""

    def loss_fn(params, microbatch, key):
        return linear_loss(params, microbatch, key), {"tokens": jaxacc.Sum(microbatch["n"].astype(jnp.int32) * 7)}

    step = jaxacc.make_step(loss_fn, optax.sgd(1.0), has_aux=True)
    state, info = step.update(step.init(jnp.zeros(1)), {"x": jnp.ones((2, 3, 1)), "n": jnp.ones((2, 3))})
    assert int(info.tokens) == int(state.ledger.tokens) == 42


def test_declared_tokens_must_be_integers():
    """Float tokens cannot be counted exactly: the error says so, not that float32 is no integer type."""

    def loss_fn(params, microbatch, key):
        return linear_loss(params, microbatch, key), {"tokens": jaxacc.Sum(microbatch["n"])}

    step = jaxacc.make_step(loss_fn, optax.sgd(1.0), has_aux=True)
    with pytest.raises(ValueError, match=r'Sum named "tokens" is float32.*Sum integers'):
        step.update(step.init(jnp.zeros(1)), {"x": jnp.ones((2, 3, 1)), "n": jnp.ones((2, 3))})


def test_token_counts_beyond_2_to_31():
    """Law 10: the ledger counts past int32 while every window fits in it."""
    step = jaxacc.make_step(linear_loss, optax.sgd(1.0))
    state = step.init(jnp.zeros(1))
    window = {"x": jnp.ones((2, 1, 1)), "n": jnp.full((2, 1), 2**30 - 1, jnp.int32)}
    for _ in range(5):
        state, _ = step.update(state, window)
    assert int(state.ledger.tokens) == 10 * (2**30 - 1) > 2**31


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("params", [{}, {"table": np.arange(3), "absent": None}], ids=["empty", "frozen"])
def test_parameters_without_a_floating_leaf(params, steps):
    """Nothing to train is no failure: the window is applied and counted, and what is frozen stays."""
    step = jaxacc.make_step(lambda p, mb, key: jaxacc.Mean(mb["x"], jnp.ones(2, jnp.int32)), optax.adamw(0.1))
    state = step.init(params)
    for _ in range(2):
        state, info = step.update(state, {"x": jnp.full((steps, 2), 3.0)})
    assert info.outcome == jaxacc.Outcome.APPLIED
    assert (float(info.loss), float(info.grad_norm)) == (3, 0)
    assert (int(state.ledger.applied), int(state.ledger.tokens)) == (2, 4 * steps)
    assert step.update._cache_size() == 1
    assert jax.tree.structure(state.params) == jax.tree.structure(params)


def test_init_copies():
    """The caller's arrays stay valid after the state is donated, also where the optimizer keeps the parameters."""
    params = lm_params()
    key = jax.random.key(0)
    step = step_of("schedule_free")
    state = step.init(params, key=key)
    step.update(state, jaxacc.split_batch(lm_batch(), accumulation_steps=4))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((params, key)))
    assert largest(params["embed"]) > 0


def test_init_takes_numpy_and_python_numbers():
    """Parameters may be NumPy arrays or Python numbers; one compilation serves all windows."""
    step = jaxacc.make_step(lambda p, mb, key: linear_loss(p["w"] * p["s"], mb, key), optax.sgd(0.1))
    state = step.init({"w": np.ones(2), "s": 1.0})
    for _ in range(3):
        state, _ = step.update(state, {"x": jnp.ones((2, 1, 2)), "n": jnp.ones((2, 1))})
    assert step.update._cache_size() == 1
    assert float(state.params["s"]) < 1


def test_compiled_once_for_full_short_and_broken_windows():
    """One trace for many windows of one shape (case 20 of a run: no recompilation when data gets ragged)."""
    traces = []

    def loss_fn(params, microbatch, key):
        traces.append(1)
        return lm_loss(params, microbatch, key)

    step = jaxacc.make_step(loss_fn, OPTIMIZERS["adamw"]())
    state = step.init(lm_params(), key=jax.random.key(0))
    state, _ = step.update(state, jaxacc.split_batch(lm_batch(), accumulation_steps=4))
    first = len(traces)
    for counts in ((16,), (0,), (1, 0), COUNTS):
        state, _ = step.update(state, jaxacc.split_batch(lm_batch(counts=counts), accumulation_steps=4))
    assert len(traces) == first
    assert step.update._cache_size() == 1


def test_scan_outer_jit_and_lower():
    """`jax.lax.scan(step.update, state, windows)`, an outer jit and `.lower` work and agree with the plain loop."""
    step = step_of("adamw")
    windows = [jaxacc.split_batch(lm_batch(seed=seed), accumulation_steps=2) for seed in range(3)]
    state, infos = step.init(lm_params(), key=jax.random.key(1)), []
    for window in windows:
        state, info = step.update(state, window)
        infos.append(info)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *windows)
    scanned, scan_infos = jax.lax.scan(step.update, step.init(lm_params(), key=jax.random.key(1)), stacked)
    assert_trees_close(scanned.params, state.params, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(scan_infos.loss, [info.loss for info in infos], rtol=1e-5)
    assert int(scanned.ledger.tokens) == int(state.ledger.tokens) == 3 * sum(COUNTS)
    outer, _ = jax.jit(step.update)(step.init(lm_params(), key=jax.random.key(1)), windows[0])
    assert int(outer.ledger.applied) == 1
    assert "while" in step.update.lower(outer, windows[0]).as_text()


def test_keys_of_windows_differ_even_after_a_skipped_one():
    """Two updates draw differently, a skipped window uses up its key (case 181)."""

    def loss_fn(params, microbatch, key):
        noise = jax.random.uniform(key, (1,))
        return jaxacc.Mean(noise * microbatch["x"] * params, jnp.ones(1)), {"draw": jaxacc.Max(noise)}

    step = jaxacc.make_step(loss_fn, optax.sgd(0.0), has_aux=True)
    state, draws = step.init(jnp.float32(1), key=jax.random.key(0)), []
    for value in (1.0, jnp.nan, 1.0, 1.0):
        state, info = step.update(state, {"x": jnp.full((1, 1), value)})
        draws.append(float(info.metrics["draw"].value))
    assert len(set(draws)) == 4


def test_evaluate_merges_exactly_and_agrees_with_training():
    """Ragged windows merge to one batch's mean; at learning rate 0 train and eval loss agree (cases 4, 34, 49, 245, 246)."""
    step = jaxacc.make_step(lm_loss, optax.sgd(0.0))
    state = step.init(lm_params(), key=jax.random.key(0))
    parts = [lm_batch(seed=0, counts=(1, 2)), lm_batch(seed=1, counts=(16,)), lm_batch(seed=2, counts=(0, 3, 9, 0))]
    means = [step.evaluate(state, jaxacc.split_batch(part, accumulation_steps=4)).loss for part in parts]
    merged = functools.reduce(jaxacc.merge, means)
    whole = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
    expected, _ = lm_oracle(lm_params(), whole)
    np.testing.assert_allclose(merged.value, expected, rtol=1e-5)
    assert abs(np.mean([mean.value for mean in means]) - expected) > 1e-2
    train = step.update(state, jaxacc.split_batch(whole, accumulation_steps=6))[1]
    np.testing.assert_allclose(train.loss, merged.value, rtol=1e-5)
    assert int(train.weight) == int(merged.weight)


@pytest.mark.parametrize("steps", [1, 4])
def test_evaluate_has_no_randomness_and_no_poison(steps):
    """`evaluate` passes key=None, and a microbatch of weight 0 is inert there too."""

    def loss_fn(params, microbatch, key):
        assert key is None
        weight = jnp.sum(microbatch["n"])
        return jaxacc.Mean(jnp.where(weight > 0, jnp.sum(microbatch["x"] @ params), jnp.nan), weight), {"rows": jaxacc.Sum(1)}

    step = jaxacc.make_step(loss_fn, optax.sgd(1.0), has_aux=True)
    state = step.init(jnp.ones(1), key=jax.random.key(0))
    window = {"x": jnp.ones((steps, 1, 1)), "n": jnp.ones((steps, 1)).at[-1].set(0)}
    result = step.evaluate(state, window)
    assert float(result.loss.value) == (1 if steps > 1 else 0)
    assert int(result.metrics["rows"].value) == steps - 1
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("steps", [1, 2, 8])
def test_a_constant_loss_is_logged_as_it_is(steps):
    """Cases 24, 25, 32, 33: a loss of 4 is logged as 4 for every A, and the gradient norm does not depend on A."""
    step = jaxacc.make_step(lambda p, mb, key: jaxacc.Mean(4.0 * mb["x"] * p, jnp.ones_like(mb["x"])), optax.sgd(0.0))
    _, info = step.update(step.init(jnp.float32(1)), {"x": jnp.ones((steps, 8 // steps))})
    assert float(info.loss) == 4
    assert float(info.grad_norm) == 4


def test_extra_arguments_reach_the_optimizer():
    """`tx` receives params, value and grad once per window."""
    calls = []

    def update(updates, state, params=None, *, value, grad, **extra):
        calls.append((jax.tree.structure(params) == jax.tree.structure(grad), value.shape, tuple(extra)))
        return jax.tree.map(lambda g: -value * g, grad), state

    step = jaxacc.make_step(linear_loss, optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update))
    state, _ = step.update(step.init(jnp.ones(1)), {"x": jnp.full((2, 1, 1), 3.0), "n": jnp.ones((2, 1))})
    assert float(state.params[0]) == 1 - 3 * 3
    assert set(calls) == {(True, (), ())}


def test_optimizer_states_of_python_numbers():
    """A state that `tx` returns as Python numbers is an array of the old dtype afterwards; one compilation."""
    tx = optax.GradientTransformation(
        lambda params: {"count": 0, "rate": 0.5}, lambda updates, state, params=None: (updates, {"count": 7, "rate": 2})
    )
    step = jaxacc.make_step(linear_loss, tx)
    state = step.init(jnp.ones(1))
    for _ in range(2):
        state, _ = step.update(state, {"x": jnp.ones((2, 1, 1)), "n": jnp.ones((2, 1))})
    assert (state.opt_state["count"].dtype, state.opt_state["rate"].dtype) == (jnp.int32, jnp.float32)
    assert (int(state.opt_state["count"]), float(state.opt_state["rate"])) == (7, 2)
    assert step.update._cache_size() == 1


def test_optimizers_that_need_the_gradient_in_the_parameters_dtype():
    """`init` finds what cannot take float32 gradients of bf16 parameters, and the remedy it names works (case 201)."""
    params = lm_params(dtype=jnp.bfloat16)
    with pytest.raises(TypeError, match="equal output types") as raised:
        jaxacc.make_step(lm_loss, optax.apply_if_finite(optax.adam(0.1), 3)).init(params)
    assert "pass accumulator_dtype" in "".join(raised.value.__notes__)
    step = jaxacc.make_step(lm_loss, optax.apply_if_finite(optax.adam(0.1), 3), accumulator_dtype=jnp.bfloat16)
    state, info = step.update(step.init(params), jaxacc.split_batch(lm_batch(), accumulation_steps=4))
    assert info.outcome == jaxacc.Outcome.APPLIED
    assert difference(state.params["embed"], params["embed"]) > 1e-2


def test_integer_leaves_do_not_decay():
    """adamw would decay an integer table from 100 to 95: it never sees it."""
    params = {"w": jnp.ones(2), "table": jnp.array([100]), "absent": None}
    step = jaxacc.make_step(lambda p, mb, key: linear_loss(p["w"], mb, key), optax.adamw(0.5, weight_decay=0.1))
    state, _ = step.update(step.init(params), {"x": jnp.ones((2, 1, 2)), "n": jnp.ones((2, 1))})
    assert int(state.params["table"][0]) == 100
    assert state.params["absent"] is None
    assert float(state.params["w"][0]) < 1


@pytest.mark.parametrize(
    ("tx", "message"),
    [
        (optax.lbfgs(), "needs value_fn"),
        (optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(max_backtracking_steps=3)), "needs value_fn"),
        (optax.MultiSteps(optax.sgd(1.0), 4).gradient_transformation(), r"optax\.MultiSteps"),
        (
            optax.chain(optax.clip(1.0), optax.MultiSteps(optax.sgd(1.0), 4).gradient_transformation()),
            r"optax\.MultiSteps",
        ),
    ],
)
def test_optimizers_that_cannot_work_are_refused(tx, message):
    """Line searches and a second accumulation (cases 114, 235), before anything compiles."""
    with pytest.raises(ValueError, match=message):
        jaxacc.make_step(linear_loss, tx).init(jnp.ones(1))


@pytest.mark.parametrize("fold", FOLDS)
def test_strict_promotion(fold, strict):
    """The whole step under strict promotion of ranks and dtypes, with plain SGD."""

    def loss_fn(params, microbatch, key):
        total = microbatch["x"] @ params
        return jaxacc.Mean(total, jnp.ones_like(total, jnp.int32))

    step = jaxacc.make_step(loss_fn, optax.sgd(1.0), fold=fold)
    state = step.init(jnp.ones(2), key=jax.random.key(0))
    window = jaxacc.split_batch({"x": jnp.ones((7, 2))}, accumulation_steps=4, pad=True)
    state, info = step.update(state, window)
    assert float(step.evaluate(state, window).loss.value) == pytest.approx(0, abs=1e-6)
    assert int(info.tokens) == 7


@pytest.mark.parametrize("devices", [1, 2])
def test_padding_is_not_computed(devices):
    """Of 2 x 4 microbatches with 3 real ones, update and evaluate compute 3, also where the weight depends on the forward."""
    computed = []

    def loss_fn(params, microbatch, key):
        jax.debug.callback(lambda x: computed.append(float(x)), microbatch["x"][0], ordered=False)
        return jaxacc.Mean(microbatch["x"] * params, jax.nn.sigmoid(params) * jnp.ones_like(microbatch["x"]))

    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2]) if devices == 2 else None
    step = jaxacc.make_step(loss_fn, optax.sgd(0.1), mesh=mesh)
    real = np.array([[1, 1], [1, 0], [0, 0], [0, 0]], bool)
    if devices == 1:
        real = real.reshape(8, 1)
    window = {"x": jnp.where(real, 2.0, 7.0), "row_mask": real}
    state = step.init(jnp.ones(()))
    for function, passes in ((step.evaluate, 1), (step.update, 2)):  # weights first, then the gradient
        computed.clear()
        jax.block_until_ready(function(state, window))
        jax.effects_barrier()
        assert computed == [2.0] * 3 * passes
