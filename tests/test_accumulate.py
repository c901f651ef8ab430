"""`accumulate` equals the one big batch, for any split of it (laws 1 to 3 and 10)."""

import functools

import flax
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import (
    COUNTS,
    FOLDS,
    LENGTH,
    assert_trees_close,
    difference,
    largest,
    linear_loss,
    lm_batch,
    lm_loss,
    lm_nll,
    lm_oracle,
    lm_params,
)

import jaxacc

SPLITS = (1, 2, 4, 8)
quickly = hypothesis.settings(deadline=None, derandomize=True, max_examples=12)


@functools.cache
def grads_of(fold, loss_fn=lm_loss, **options):
    return jax.jit(jaxacc.accumulate(loss_fn, fold=fold, **options))


@functools.cache
def oracle():
    return jax.jit(lm_oracle)


def mean_of_means(params, window):
    """The mistake nearly everyone makes, to see that the tests below would notice it."""
    grads = [lm_oracle(params, jax.tree.map(lambda leaf, a=a: leaf[a], window))[1] for a in range(len(window["mask"]))]
    return jax.tree.map(lambda *gs: sum(gs) / len(gs), *grads)


@pytest.mark.parametrize("steps", SPLITS)
@pytest.mark.parametrize("fold", FOLDS)
def test_split_invariance_float64(fold, steps, x64):
    """Law 1 in float64, with ragged rows, tied and gathered parameters (cases 1, 3, 4, 5, 22, 47, 48, 187 to 190, 194)."""
    params, batch = lm_params(dtype=jnp.float64), lm_batch()
    loss, grads = oracle()(params, batch)
    out = grads_of(fold)(params, jaxacc.split_batch(batch, accumulation_steps=steps))
    assert largest(grads) > 1e-2
    assert int(out.weight) == sum(COUNTS)
    np.testing.assert_allclose(out.loss, loss, rtol=1e-12)
    assert_trees_close(out.grads, grads, rtol=1e-12, atol=1e-14)
    if steps == 4:
        rest = jaxacc.split_batch(lm_batch(counts=COUNTS[1:]), accumulation_steps=steps)
        assert difference(mean_of_means(params, rest), oracle()(params, lm_batch(counts=COUNTS[1:]))[1]) > 1e-3


@quickly
@hypothesis.given(
    fold=st.sampled_from(FOLDS),
    steps=st.sampled_from(SPLITS),
    counts=st.lists(st.integers(0, LENGTH), min_size=8, max_size=8).filter(any),
    order=st.permutations(range(8)),
)
def test_split_invariance_float32(fold, steps, counts, order):
    """Law 1 in float32, for any masks and any order of the rows (case 4).

    Tolerance: sums of at most 128 float32 terms differ by a few ulp of the largest partial sum, 1e-5 of the largest
    entry; the signal is that entry.
    """
    params, batch = lm_params(), lm_batch(counts=counts)
    loss, grads = oracle()(params, batch)
    shuffled = jax.tree.map(lambda leaf: leaf[np.asarray(order)], batch)
    out = grads_of(fold)(params, jaxacc.split_batch(shuffled, accumulation_steps=steps))
    assert int(out.weight) == sum(counts)
    np.testing.assert_allclose(out.loss, loss, rtol=1e-5)
    assert_trees_close(out.grads, grads, rtol=1e-5, atol=1e-5 * largest(grads))


@pytest.mark.parametrize("fold", FOLDS)
def test_equal_lengths_agree_with_the_mean_of_means(fold, x64):
    """Case 1, the control: where all weights are equal the common mistake is no mistake."""
    params, batch = lm_params(dtype=jnp.float64), lm_batch(counts=(5,))
    window = jaxacc.split_batch(batch, accumulation_steps=4)
    assert_trees_close(grads_of(fold)(params, window).grads, mean_of_means(params, window), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("steps", SPLITS)
@pytest.mark.parametrize("fold", FOLDS)
def test_against_numpy(fold, steps, x64):
    """Fractional weights against a closed form that JAX has no part in (cases 6, 10, 13, 19)."""
    rng = np.random.default_rng(1)
    x, y, n, w = rng.normal(size=(8, 3)), rng.normal(size=8), rng.uniform(size=8), rng.normal(size=3)

    def loss_fn(w, microbatch, key):
        error = microbatch["x"] @ w - microbatch["y"]
        return jaxacc.Mean(microbatch["n"] * error**2, microbatch["n"])

    out = jaxacc.accumulate(loss_fn, fold=fold)(
        jnp.asarray(w), jaxacc.split_batch({"x": x, "y": y, "n": n}, accumulation_steps=steps)
    )
    error = x @ w - y
    np.testing.assert_allclose(out.loss, (n * error**2).sum() / n.sum(), rtol=1e-12)
    np.testing.assert_allclose(out.grads, 2 * (n * error) @ x / n.sum(), rtol=1e-12)


@pytest.mark.parametrize("fold", FOLDS)
def test_worked_values(fold):
    """512 tokens at mean 2 with 1,536 at mean 4 give 3.5; 8, 8, 8 and 2 examples weigh 8/26, ..., 2/26 (cases 7, 76)."""
    run = grads_of(fold, linear_loss)
    window = {"x": jnp.array([[[1024.0]], [[6144.0]]]), "n": jnp.array([[512], [1536]])}
    out = run(jnp.ones(1), window)
    assert float(out.loss) == 3.5
    basis = {"x": jnp.eye(4)[:, None] * jnp.array([8.0, 8, 8, 2])[:, None, None], "n": jnp.array([[8], [8], [8], [2]])}
    np.testing.assert_allclose(run(jnp.ones(4), basis).grads, np.array([8, 8, 8, 2]) / 26, rtol=1e-6)


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("fold", FOLDS)
def test_negative_weights(fold, steps):
    """Only a weight of exactly 0 is inert: a negative one counts, in a microbatch, a window and at A = 1."""
    x = jnp.arange(1.0, 13).reshape(4, 3)
    for n in ([1.0, 2.0, 3.0, -1.0], [-1.0, -2.0, -3.0, 1.0]):
        window = jaxacc.split_batch({"x": x, "n": jnp.array(n)}, accumulation_steps=steps)
        out = grads_of(fold, linear_loss)(jnp.ones(3), window)
        np.testing.assert_allclose(out.grads, x.sum(0) / sum(n), rtol=1e-5)
        np.testing.assert_allclose(out.loss, x.sum() / sum(n), rtol=1e-5)
        assert largest(out.grads) > 1


def test_class_weights_are_summed_over_the_window():
    """Case 19: weights (1, 9) and labels (0, 0), (0, 1) have denominators 2 and 10, the window 12."""
    weights = jnp.array([1.0, 9.0])
    window = {"x": jnp.ones((2, 2, 1)), "label": jnp.array([[0, 0], [0, 1]])}

    def loss_fn(params, microbatch, key):
        weight = weights[microbatch["label"]]
        return jaxacc.Mean(weight * (microbatch["x"] @ params), weight)

    out = jaxacc.accumulate(loss_fn)(jnp.ones(1), window)
    assert float(out.weight) == 12
    assert float(out.loss) == pytest.approx(1)


AGGREGATIONS = {
    "token": lambda nll, mask: (jnp.sum(nll * mask), jnp.sum(mask)),
    "sequence_sum": lambda nll, mask: (jnp.sum(nll * mask, -1), jnp.any(mask, -1)),
    "sequence_mean": lambda nll, mask: (jnp.sum(nll * mask, -1) / jnp.maximum(jnp.sum(mask, -1), 1), jnp.any(mask, -1)),
    "constant": lambda nll, mask: (jnp.sum(nll * mask), nll.shape[0] * LENGTH),
}


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_every_aggregation_is_invariant(name):
    """Token mean, sums and means per sequence, a constant: different numbers, each the same for every A (cases 8, 15, 43)."""

    def loss_fn(params, microbatch, key):
        return jaxacc.Mean(*AGGREGATIONS[name](lm_nll(params, microbatch), microbatch["mask"]))

    params, batch = lm_params(), lm_batch(counts=(1, 1, 1, 13))
    total, weight = AGGREGATIONS[name](lm_nll(params, batch), batch["mask"])
    for steps in SPLITS:
        out = jaxacc.accumulate(loss_fn)(params, jaxacc.split_batch(batch, accumulation_steps=steps))
        np.testing.assert_allclose(out.loss, np.sum(total) / np.sum(weight), rtol=1e-5)


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize("poison", [jnp.nan, jnp.inf])
def test_zero_weight_is_inert(fold, steps, poison):
    """Law 3: a microbatch of weight 0 contributes nothing, even where its loss is NaN (cases 136, 141, 143, 147)."""

    def loss_fn(params, microbatch, key):
        loss = lm_loss(params, microbatch, key)
        broken = jnp.where(loss.weight == 0, poison, 1.0) * jnp.sum(params["embed"])
        metric = jaxacc.Mean(jnp.where(loss.weight == 0, poison, 2.0), 1)
        return jaxacc.Mean(loss.total + broken - jnp.sum(params["embed"]), loss.weight), {"two": metric}

    run = jax.jit(jaxacc.accumulate(loss_fn, fold=fold, has_aux=True))
    params = lm_params()
    for empty in range(steps):
        batch = lm_batch(rows=2 * steps, counts=(4, 7))
        window = jaxacc.split_batch(batch, accumulation_steps=steps)
        lost = 2 * window["mask"][empty].sum()
        window["mask"][empty] = False
        out = run(params, window)
        assert int(out.weight) == window["mask"].sum() == (22 * steps - lost) / 2
        kept = jax.tree.map(lambda leaf, e=empty: np.delete(leaf, e, axis=0).reshape(-1, LENGTH), window)
        if steps == 1:
            assert float(out.loss) == 0
            assert largest(out.grads) == 0
            assert float(out.metrics["two"].value) == 0
            continue
        loss, grads = oracle()(params, kept)
        np.testing.assert_allclose(out.loss, loss, rtol=1e-5)
        assert_trees_close(out.grads, grads, rtol=1e-4, atol=1e-5)
        assert float(out.metrics["two"].value) == 2


@pytest.mark.parametrize("fold", FOLDS)
def test_an_empty_window_is_zero(fold):
    """Cases 139, 144: no weight anywhere gives zeros, not 0/0."""
    out = grads_of(fold)(lm_params(), jaxacc.split_batch(lm_batch(counts=(0,)), accumulation_steps=4))
    assert int(out.weight) == 0
    assert float(out.loss) == 0
    assert largest(out.grads) == 0


@pytest.mark.parametrize("fold", FOLDS)
def test_leaves_without_gradient(fold):
    """Unused parameters get zeros; integers and None get None and reach the loss untouched (case 194)."""
    seen = []

    def loss_fn(params, microbatch, key):
        seen.append((params["table"].dtype, params["absent"]))
        return lm_loss(params, microbatch, key)

    out = jaxacc.accumulate(loss_fn, fold=fold)(lm_params(), jaxacc.split_batch(lm_batch(), accumulation_steps=2))
    assert out.grads["table"] is None
    assert out.grads["absent"] is None
    assert largest(out.grads["unused"]) == 0
    assert set(seen) == {(jnp.arange(4).dtype, None)}


def test_random_keys_as_parameters_are_left_alone():
    """A PRNG key among the parameters (as in a Flax NNX state) is no floating leaf."""
    params = {"w": jnp.ones(2), "rng": jax.random.key(0)}
    window = {"x": jnp.ones((2, 3, 2)), "n": jnp.ones((2, 3))}
    out = jaxacc.accumulate(lambda p, mb, key: linear_loss(p["w"], mb, key))(params, window)
    assert out.grads["rng"] is None
    np.testing.assert_array_equal(out.grads["w"], 1)


def test_padded_rows_do_not_count():
    """Rows that `split_batch` pads in are excluded by `row_mask` from totals, weights and metrics (case 29)."""
    batch = {"x": jnp.arange(14.0).reshape(7, 2), "n": jnp.ones(7, bool)}

    def loss_fn(params, microbatch, key):
        total = microbatch["x"] @ params
        tops = {"top": jaxacc.Max(-total), "integer_top": jaxacc.Max(-total.astype(jnp.int32))}
        return jaxacc.Mean(total, microbatch["n"]), {"rows": jaxacc.Sum(microbatch["n"]), **tops}

    out = jaxacc.accumulate(loss_fn, has_aux=True)(jnp.ones(2), jaxacc.split_batch(batch, accumulation_steps=4, pad=True))
    assert int(out.weight) == 7
    assert int(out.metrics["rows"].value) == 7
    assert float(out.metrics["top"].value) == int(out.metrics["integer_top"].value) == -1
    np.testing.assert_allclose(out.grads, batch["x"].mean(0))


def test_metrics_reduce_as_declared():
    """Means by their own weight, sums, maxima: independent of A (cases 21, 130, 160, 247)."""
    x = jnp.arange(1.0, 9.0)

    def loss_fn(params, microbatch, key):
        values = microbatch["x"]
        metrics = {
            "mean": jaxacc.Mean(values**2, values),
            "sum": jaxacc.Sum(jnp.sum(values)),
            "max": jaxacc.Max(values),
            "constant": jaxacc.Mean(jnp.float32(0.01), 1),
        }
        return jaxacc.Mean(values * params, jnp.ones_like(values)), metrics

    for steps in SPLITS:
        out = jaxacc.accumulate(loss_fn, has_aux=True)(jnp.float32(2), jaxacc.split_batch({"x": x}, accumulation_steps=steps))
        assert float(out.metrics["mean"].value) == pytest.approx(204 / 36)
        assert float(out.metrics["sum"].value) == 36
        assert float(out.metrics["max"].value) == 8
        assert float(out.metrics["constant"].value) == pytest.approx(0.01)
        assert float(out.loss) == 9


def test_keys_differ_between_microbatches():
    """Case 177: every microbatch draws its own randomness; without a key the loss sees None."""
    draws = []

    def loss_fn(params, microbatch, key):
        draws.append(key)
        noise = jax.random.uniform(key, (1,)) if key is not None else jnp.zeros(1)
        return jaxacc.Mean(noise * params, jnp.ones(1)), {"draw": jaxacc.Max(microbatch["pick"] * noise)}

    run = jax.jit(jaxacc.accumulate(loss_fn, has_aux=True))
    picks = jnp.eye(4)[:, :, None]
    values = [float(run(jnp.float32(1), {"pick": pick}, jax.random.key(0)).metrics["draw"].value) for pick in picks]
    assert len(set(values)) == 4
    run(jnp.float32(1), {"pick": picks[0]})
    assert draws[-1] is None


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_types_do_not_depend_on_a(dtype, steps):
    """16-bit parameters and metrics of every kind: the same dtypes, none of them weak, for A = 1 as for A > 1."""

    def loss_fn(params, microbatch, key):
        half = microbatch["x"][:, 0].astype(dtype)
        metrics = (jaxacc.Sum(1), jaxacc.Sum(0.5), jaxacc.Max(True), [jaxacc.Max(half), jaxacc.Mean(half > 0, 2)], None)
        return linear_loss(params, microbatch, key), metrics

    window = {"x": jnp.ones((steps, 2, 4), dtype), "n": jnp.ones((steps, 2), bool)}
    out = jaxacc.accumulate(loss_fn, has_aux=True)(jnp.ones(4, dtype), window)
    assert [leaf.dtype for leaf in jax.tree.leaves(out)] == [jnp.dtype(kind) for kind in "ffiififiifii"]
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(out))
    np.testing.assert_array_equal(out.grads, 1)


@pytest.mark.parametrize("steps", [64, 1024])
def test_bfloat16_sums_do_not_drift(steps):
    """1,024 microbatches of bf16 ones average to exactly 1; a bf16 sum would stop at 256 (cases 198, 199, 203, 206)."""
    window = {"x": jnp.ones((steps, 1, 1), jnp.bfloat16), "n": jnp.ones((steps, 1), jnp.int8)}
    params = jnp.ones(1, jnp.bfloat16)
    out = grads_of("auto", linear_loss)(params, window)
    assert out.grads.dtype == jnp.float32
    assert float(out.grads[0]) == 1
    assert float(out.loss) == 1
    assert int(out.weight) == steps
    narrow = grads_of("carry", linear_loss, accumulator_dtype=jnp.bfloat16)(params, window)
    assert (float(narrow.grads[0]) == 1) == (steps <= 256)


def test_a_16_bit_loss_is_divided_exactly():
    """1 / 1000 rounded to bf16 would bias every gradient by 0.1 %: a loss computed in 16 bits is divided at the end."""
    window = {"x": jnp.ones((1000, 1, 1), jnp.bfloat16), "n": jnp.ones((1000, 1), jnp.int32)}
    out = grads_of("auto", linear_loss)(jnp.ones(1, jnp.bfloat16), window)
    assert float(out.grads[0]) == pytest.approx(1, abs=1e-6)
    assert abs(float(jnp.bfloat16(1 / 1000)) * 1000 - 1) > 1e-4


def test_integer_weights_count_exactly():
    """Law 10: 2^24 + 3 tokens in a window, where float32 stops at 2^24; bools and bytes count in 32 bits."""
    window = {"x": jnp.ones((3, 1, 1)), "n": jnp.array([[2**24], [1], [2]], jnp.int32)}
    assert int(grads_of("auto", linear_loss)(jnp.ones(1), window).weight) == 2**24 + 3
    window = {"x": jnp.ones((3, 300, 1)), "n": jnp.ones((3, 300), jnp.int8)}
    assert int(grads_of("auto", linear_loss)(jnp.ones(1), window).weight) == 900
    window = {"x": jnp.ones((3, 300, 1)), "n": jnp.full((3, 300), 200, jnp.int16)}
    assert int(grads_of("auto", linear_loss)(jnp.ones(1), window).weight) == 180_000


def test_wider_parameters_keep_their_width(x64):
    """float64 parameters are summed in float64, bf16 in float32, unless another dtype is asked for."""
    params = {"a": jnp.ones(1, jnp.float64), "b": jnp.ones(1, jnp.bfloat16)}
    window = {"x": jnp.ones((2, 1, 1)), "n": jnp.ones((2, 1))}
    loss_fn = lambda p, mb, key: linear_loss(p["a"] + p["b"], mb, key)
    out = jaxacc.accumulate(loss_fn)(params, window)
    assert (out.grads["a"].dtype, out.grads["b"].dtype) == (jnp.float64, jnp.float32)
    out = jaxacc.accumulate(loss_fn, accumulator_dtype=jnp.float32)(params, window)
    assert out.grads["a"].dtype == jnp.float32


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("fold", FOLDS)
def test_eager_calls_take_what_jit_takes(fold, steps):
    """NumPy windows and parameters, float64 ones too, and Python numbers: the loss sees JAX arrays for every A."""
    params = {"w": np.arange(1, 4.0), "scale": 0.5, "table": np.arange(4)}
    batch = {"x": np.random.default_rng(0).normal(size=(6, 3)), "index": np.arange(6) % 4}

    def loss_fn(params, microbatch, key):
        x = microbatch["x"].at[:, 0].set(1)
        total = params["scale"] * (x @ params["w"]) ** 2 * params["table"][microbatch["index"]]
        return jaxacc.Mean(total, jnp.ones_like(total))

    window = jaxacc.split_batch(batch, accumulation_steps=steps)
    run = jaxacc.accumulate(loss_fn, fold=fold)
    eager, jitted = run(params, window), jax.jit(run)(params, window)
    assert largest(eager.grads) > 0.1
    assert eager.grads["table"] is None
    assert [leaf.dtype for leaf in jax.tree.leaves(eager)] == [jnp.float32] * 6 + [jnp.int32]
    assert_trees_close(eager, jitted, rtol=1e-5)


@pytest.mark.parametrize("steps", [1, 2])
def test_complex_parameters(steps):
    """Complex parameters agree with `jax.grad`, and a real `accumulator_dtype` does not drop their imaginary part."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(6, 2)), jnp.float32)
    params = jnp.array([1 + 1j, 2 - 3j], jnp.complex64)
    loss_fn = lambda p, mb, key: jaxacc.Mean(jnp.abs(mb["x"] @ p) ** 2, jnp.ones(6 // steps))
    expected = jax.grad(lambda p: jnp.mean(jnp.abs(x @ p) ** 2))(params)
    assert float(jnp.min(jnp.abs(expected.imag))) > 0.1
    window = jaxacc.split_batch({"x": x}, accumulation_steps=steps)
    for dtype in (None, jnp.float32, jnp.bfloat16):
        out = jaxacc.accumulate(loss_fn, accumulator_dtype=dtype)(params, window)
        np.testing.assert_allclose(out.grads, expected, rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bool_, jnp.complex64])
def test_accumulator_dtypes_that_lose_the_gradient(dtype):
    """Integer sums would truncate every gradient without a word."""
    window = {"x": jnp.ones((2, 3, 1)), "n": jnp.ones((2, 3))}
    with pytest.raises(ValueError, match="is not floating"):
        jaxacc.accumulate(linear_loss, accumulator_dtype=dtype)(jnp.ones(1), window)


def test_weights_may_depend_on_the_parameters():
    """The denominators come from a first pass where they depend on the forward pass; the result is the same."""

    def loss_fn(params, microbatch, key):
        gate = jax.lax.stop_gradient(jax.nn.sigmoid(microbatch["x"] @ params))
        return jaxacc.Mean(gate * (microbatch["x"] @ params) ** 2, gate)

    batch = {"x": jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)), jnp.float32)}
    outs = [jaxacc.accumulate(loss_fn)(jnp.ones(3), jaxacc.split_batch(batch, accumulation_steps=steps)) for steps in SPLITS]
    for out in outs[1:]:
        np.testing.assert_allclose(out.loss, outs[0].loss, rtol=1e-5)
        np.testing.assert_allclose(out.grads, outs[0].grads, rtol=1e-4)
    assert largest(outs[0].grads) > 0.1


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("fold", FOLDS)
def test_weights_may_depend_on_the_key(fold, steps):
    """Targets masked at random: the weights that divide are those of the very masks that the losses were summed over."""

    def loss_fn(params, microbatch, key):
        mask = jax.random.bernoulli(key, 0.5, microbatch["x"].shape)
        return jaxacc.Mean(jnp.sum(mask * params * microbatch["x"]), jnp.sum(mask)), {"masked": jaxacc.Sum(jnp.sum(mask))}

    run = jax.jit(jaxacc.accumulate(loss_fn, fold=fold, has_aux=True))
    weights = set()
    for seed in range(4):
        out = run(jnp.float32(1), {"x": jnp.ones((steps, 31))}, jax.random.key(seed))
        assert int(out.weight) == int(out.metrics["masked"].value)
        assert float(out.loss) == pytest.approx(1, rel=1e-6)
        assert float(out.grads) == pytest.approx(1, rel=1e-6)
        weights.add(int(out.weight))
    assert len(weights) > 1


def test_remat_counts_once():
    """Case 164: side results of a rematerialised forward pass are counted once."""
    window = jaxacc.split_batch(lm_batch(counts=(3, 5, 0, 9)), accumulation_steps=4)

    def with_metric(params, microbatch, key):
        loss = lm_loss(params, microbatch, key)
        return loss, {"calls": jaxacc.Sum(jnp.int32(1))}

    plain = jaxacc.accumulate(with_metric, has_aux=True)(lm_params(), window)
    remat = jaxacc.accumulate(jax.checkpoint(with_metric), has_aux=True)(lm_params(), window)
    assert int(plain.metrics["calls"].value) == int(remat.metrics["calls"].value) == 3  # one of four has no token
    assert_trees_close(remat.grads, plain.grads, rtol=1e-5, atol=1e-6)


def test_composes_with_vmap_grad_and_scan():
    """Case 218: under vmap (two models at once), inside scan, and differentiated again, with the carry fold."""
    window = jaxacc.split_batch(lm_batch(), accumulation_steps=4)
    run = jaxacc.accumulate(lm_loss, fold="carry")
    models = [lm_params(seed) for seed in (0, 1)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *models)
    both = jax.vmap(run, in_axes=(0, None))(stacked, window)
    _, scanned = jax.lax.scan(lambda carry, params: (carry, run(params, window).grads), None, stacked)
    for i, params in enumerate(models):
        grads = run(params, window).grads
        assert_trees_close(jax.tree.map(lambda leaf, i=i: leaf[i], both.grads), grads, rtol=1e-4, atol=1e-5)
        assert_trees_close(jax.tree.map(lambda leaf, i=i: leaf[i], scanned), grads, rtol=1e-4, atol=1e-5)

    def square(w, microbatch, key):
        return jaxacc.Mean((microbatch["x"] @ w) ** 2, microbatch["n"])

    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 2)), jnp.float32)
    small = jaxacc.split_batch({"x": x, "n": jnp.ones(4)}, accumulation_steps=2)
    hessian = jax.jacobian(lambda w: jaxacc.accumulate(square, fold="carry")(w, small).grads)(jnp.ones(2))
    np.testing.assert_allclose(hessian, 2 * x.T @ x / 4, rtol=1e-5)


def test_traced_once():
    """One compilation for many windows of one shape, full or short; another A compiles once more."""
    run = jax.jit(jaxacc.accumulate(lm_loss))
    for counts in (COUNTS, (16,), (0,), (1, 2)):
        run(lm_params(), jaxacc.split_batch(lm_batch(counts=counts), accumulation_steps=4))
    assert run._cache_size() == 1


@pytest.mark.parametrize("fold", FOLDS)
def test_strict_promotion(fold, strict):
    """Nothing of jaxacc relies on silent promotion of ranks or dtypes."""
    params = {"w": jnp.ones(2), "half": jnp.ones(2, jnp.bfloat16) if fold == "carry" else jnp.ones(2)}

    def loss_fn(params, microbatch, key):
        total = microbatch["x"] @ params["w"] + jnp.sum(params["half"]).astype(jnp.float32)
        return jaxacc.Mean(total, jnp.ones_like(total, jnp.int32)), {"m": jaxacc.Mean(total, microbatch["row_mask"])}

    window = jaxacc.split_batch({"x": jnp.ones((7, 2))}, accumulation_steps=4, pad=True)
    out = jaxacc.accumulate(loss_fn, fold=fold, has_aux=True)(params, window)
    assert int(out.weight) == 7
    assert float(out.metrics["m"].value) == 4


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="in place is safe from jax 0.11 on")
def test_in_place_is_refused_on_old_jax():
    """jax-ml/jax#38929: below 0.11 an in-place sum through an inner scan is silently wrong, so it cannot be forced."""
    with pytest.raises(ValueError, match=r"fold='in_place' is not possible: jax 0\.10.*38929.*Use fold='carry'"):
        jaxacc.accumulate(lm_loss, fold="in_place")(lm_params(), jaxacc.split_batch(lm_batch(), accumulation_steps=4))


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="in place needs jax 0.11")
def test_in_place_is_refused_for_other_dtypes():
    """The in-place sum has the parameters' dtype: bf16 parameters with float32 sums need the carry, and auto takes it."""
    params, window = jnp.ones(1, jnp.bfloat16), {"x": jnp.ones((2, 1, 1)), "n": jnp.ones((2, 1))}
    with pytest.raises(ValueError, match="bfloat16 parameters, float32 sums"):
        jaxacc.accumulate(linear_loss, fold="in_place")(params, window)
    assert jaxacc.accumulate(linear_loss)(params, window).grads.dtype == jnp.float32


def mesh_of(size):
    return jax.make_mesh((size,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:size])


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("fold", FOLDS)
def test_inside_shard_map(fold, steps, check_vma):
    """With `axis_name`, one replica of four without a token: the global weight divides (cases 9, 18, 53, 59, 62, 68, 137)."""
    params, batch = lm_params(), lm_batch(counts=(1, 7, 0, 0, 16, 3, 2, 9))
    replicated, rows = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec(None, "data")
    run = jax.shard_map(
        jaxacc.accumulate(lm_loss, axis_name="data", fold=fold),
        mesh=mesh_of(4), in_specs=(replicated, rows), out_specs=replicated, check_vma=check_vma,
    )  # fmt: skip
    window = jax.tree.map(lambda leaf: leaf.reshape(steps, 8 // steps, LENGTH), batch)
    out = jax.jit(run)(params, window)
    loss, grads = oracle()(params, batch)
    assert int(out.weight) == 38
    np.testing.assert_allclose(out.loss, loss, rtol=1e-5)
    assert_trees_close(out.grads, grads, rtol=1e-4, atol=1e-5 * largest(grads))


def test_inside_pmap():
    """The same inside pmap."""
    params, batch = lm_params(), lm_batch(counts=(1, 7, 0, 0, 16, 3, 2, 9))
    window = jax.tree.map(lambda leaf: leaf.reshape(4, 2, 1, LENGTH), batch)
    run = jax.pmap(jaxacc.accumulate(lm_loss, axis_name="data"), axis_name="data", in_axes=(None, 0), out_axes=None)
    out = run(params, window)
    loss, grads = oracle()(params, batch)
    np.testing.assert_allclose(out.loss, loss, rtol=1e-5)
    assert_trees_close(out.grads, grads, rtol=1e-4, atol=1e-5 * largest(grads))


def test_a_forgotten_axis_name_is_an_error():
    """Case 64: inside a manual region every replica would divide by its own weight."""
    window = jaxacc.split_batch(lm_batch(), accumulation_steps=1)
    replicated, rows = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec(None, "data")
    run = jax.shard_map(
        jaxacc.accumulate(lm_loss), mesh=mesh_of(2), in_specs=(replicated, rows), out_specs=replicated, check_vma=False
    )
    with pytest.raises(ValueError, match="axis_name='data'"):
        run(lm_params(), window)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("fold", FOLDS)
def test_constants_are_counted_once_per_replica(fold, steps, check_vma):
    """A weight, a sum, a mean and a maximum that are plain numbers, the same on every replica."""

    def loss_fn(params, microbatch, key):
        metrics = {"sum": jaxacc.Sum(3), "mean": jaxacc.Mean(0.5, 2), "max": jaxacc.Max(-7)}
        return jaxacc.Mean(jnp.sum(microbatch["x"] @ params), 2), metrics

    x = jnp.arange(steps * 24.0).reshape(steps, 8, 3)
    replicated, rows = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec(None, "data")
    run = jax.shard_map(
        jaxacc.accumulate(loss_fn, has_aux=True, axis_name="data", fold=fold),
        mesh=mesh_of(4), in_specs=(replicated, rows), out_specs=replicated, check_vma=check_vma,
    )  # fmt: skip
    out = jax.jit(run)(jnp.ones(3), {"x": x})
    assert int(out.weight) == 8 * steps
    np.testing.assert_allclose(out.grads, x.mean((0, 1)), rtol=1e-6)
    assert int(out.metrics["sum"].value) == 12 * steps
    assert out.metrics["mean"] == (2 * steps, 8 * steps)
    assert int(out.metrics["max"].value) == -7


def test_axes_that_do_not_split_rows():
    """`axis_name=()` in a manual region: every replica has all rows, and its result is the whole one."""
    params, window = lm_params(), jaxacc.split_batch(lm_batch(), accumulation_steps=2)
    run = jax.shard_map(
        jaxacc.accumulate(lm_loss, axis_name=()), mesh=mesh_of(2),
        in_specs=jax.sharding.PartitionSpec(), out_specs=jax.sharding.PartitionSpec(), check_vma=False,
    )  # fmt: skip
    loss, grads = oracle()(params, lm_batch())
    out = jax.jit(run)(params, window)
    np.testing.assert_allclose(out.loss, loss, rtol=1e-5)
    assert_trees_close(out.grads, grads, rtol=1e-4, atol=1e-5 * largest(grads))


def test_an_axis_name_that_is_not_manual_is_an_error():
    """A misspelt axis, no manual region at all, or the axis of a vmap: named, instead of a bare AssertionError of JAX."""
    window = jaxacc.split_batch(lm_batch(), accumulation_steps=1)
    replicated, rows = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec(None, "data")
    run = jaxacc.accumulate(lm_loss, axis_name=("data", "dta"))
    with pytest.raises(ValueError, match=r"names \['dta'\], but the manual mesh axes here are \('data',\)"):
        jax.shard_map(run, mesh=mesh_of(2), in_specs=(replicated, rows), out_specs=replicated)(lm_params(), window)
    with pytest.raises(ValueError, match=r"manual mesh axes here are \(\)"):
        run(lm_params(), window)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("fold", FOLDS)
def test_beside_an_automatic_axis(fold, steps):
    """Manual over the data axis alone, the other axis of the mesh automatic; metrics and keys by replica (cases 177, 180).

    Every replica draws its own randomness, a replica without weight is left out, and the largest value may be negative.
    """
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def loss_fn(params, microbatch, key):
        total, weight = microbatch["x"] @ params, jnp.sum(microbatch["n"])
        draw = jnp.where(weight == 0, jnp.nan, jax.random.uniform(key))
        metrics = {
            "draw": jaxacc.Sum(draw), "square": jaxacc.Sum(draw**2), "top": jaxacc.Max(-draw), "count": jaxacc.Max(-weight)
        }  # fmt: skip
        return jaxacc.Mean(jnp.where(weight == 0, jnp.nan, jnp.sum(total)), weight), metrics

    x = np.random.default_rng(0).normal(size=(steps, 8, 3)).astype(np.float32)
    n = np.ones((steps, 8), np.int32)
    n[:, 2:4] = 0
    replicated, rows = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec(None, "data")
    run = jax.shard_map(
        jaxacc.accumulate(loss_fn, has_aux=True, axis_name="data", fold=fold),
        mesh=mesh, in_specs=(replicated, rows, replicated), out_specs=replicated, axis_names={"data"},
    )  # fmt: skip
    out = jax.jit(run)(jnp.ones(3), {"x": x, "n": n}, jax.random.key(0))
    expected = np.delete(x, [2, 3], axis=1).reshape(-1, 3)
    assert int(out.weight) == len(expected) == 6 * steps
    np.testing.assert_allclose(out.grads, expected.mean(0), rtol=1e-5)
    mean, square = (float(out.metrics[name].value) / (3 * steps) for name in ("draw", "square"))
    assert square - mean**2 > 1e-3  # not one draw for all replicas
    assert -mean < float(out.metrics["top"].value) < 0
    assert int(out.metrics["count"].value) == -2


@pytest.mark.parametrize(
    ("returned", "has_aux", "message"),
    [
        (lambda total: total, False, r"returned a scalar\. It must return jaxacc\.Mean"),
        (lambda total: total[None], False, r"returned an array of shape \(1,\)"),
        (lambda total: (total, 3), False, "returned a tuple"),
        (lambda total: (jaxacc.Mean(total, 1), {}), False, "has_aux=True"),
        (lambda total: jaxacc.Mean(total, 1), True, r"must return \(jaxacc\.Mean\(total, weight\), metrics\)"),
        (lambda total: (jaxacc.Mean(total, 1), {"acc": total}), True, r"metric \['acc'\] is a .*does not say how it reduces"),
        (lambda total: (jaxacc.Mean(total, 1), total), True, r"metric tree is a .*does not say how it reduces"),
        (lambda total: jaxacc.Mean(jnp.ones((2, 3)) * total, 1), False, r"shape \(2, 3\)"),
        (lambda total: jaxacc.Mean(jnp.int32(3), 1), False, "must be floating"),
    ],
)
def test_broken_contracts(returned, has_aux, message):
    """A loss that jaxacc would have to guess about is refused while tracing (case 26)."""
    loss_fn = lambda params, microbatch, key: returned(jnp.sum(microbatch["x"] * params))
    with pytest.raises(ValueError, match=message):
        jaxacc.accumulate(loss_fn, has_aux=has_aux)(jnp.float32(1), {"x": jnp.ones((2, 3))})


@pytest.mark.parametrize("weight", [2, 2.0, np.prod((2, 1)), np.float32(2), np.array(2)], ids=lambda w: type(w).__name__)
def test_a_constant_weight_would_count_padding(weight):
    """A Python or NumPy number as the weight beside a row mask is refused (`np.prod(tokens.shape)` is a NumPy number)."""
    window = jaxacc.split_batch({"x": jnp.ones((3, 1))}, accumulation_steps=2, pad=True)
    with pytest.raises(ValueError, match=r"constant weight 2.*counts the padding"):
        jaxacc.accumulate(lambda p, mb, key: jaxacc.Mean(mb["x"] @ p, weight))(jnp.ones(1), window)


def test_row_masks_of_other_mappings():
    """A window that is a mapping but no dict (Flax's FrozenDict) has its `row_mask` honoured too."""
    window = jaxacc.split_batch(flax.core.freeze({"x": jnp.ones((5, 1))}), accumulation_steps=4, pad=True)
    loss_fn = lambda p, mb, key: jaxacc.Mean(mb["x"] @ p, jnp.ones(2, jnp.int32))
    for mapping in (window, flax.core.freeze(window)):
        assert int(jaxacc.accumulate(loss_fn)(jnp.ones(1), mapping).weight) == 5


@pytest.mark.parametrize(
    ("window", "message"),
    [
        ({"x": jnp.ones((2, 3)), "y": jnp.ones((4, 3))}, "disagree"),
        ({"x": jnp.ones((2, 3)), "y": jnp.ones((2, 4))}, "disagree"),
        ({"x": jnp.ones(2)}, "disagree"),
        ({"x": jnp.ones((0, 3))}, "0 microbatches"),
        ({"x": jnp.ones((2, 0))}, "of 0 rows"),
        ({}, "disagree"),
        ({"x": jnp.ones((2, 3)), "row_mask": jnp.ones((2, 3))}, "row_mask must be a bool"),
        ({"x": jnp.ones((2, 3)), "row_mask": jnp.ones((2, 3, 1), bool)}, r"row_mask must be a bool array \(A, m\)"),
    ],
)
def test_broken_windows(window, message):
    """Leading axes that disagree, A = 0, no rows (case 80)."""
    with pytest.raises(ValueError, match=message):
        jaxacc.accumulate(lambda p, mb, key: jaxacc.Mean(jnp.sum(mb["x"]) * p, 1))(jnp.float32(1), window)


def test_unknown_fold():
    """A fold that does not exist is named with those that do."""
    with pytest.raises(ValueError, match="'auto', 'in_place' and 'carry'"):
        jaxacc.accumulate(lm_loss, fold="inplace")(lm_params(), jaxacc.split_batch(lm_batch(), accumulation_steps=2))


def test_big_batch_loss_ignores_nothing():
    """The oracle itself moves when a token changes (a loss that ignores its input would prove nothing)."""
    params, batch = lm_params(), lm_batch()
    changed = {**batch, "tokens": (batch["tokens"] + 1) % 11}
    assert float(jnp.max(jnp.abs(lm_nll(params, batch) - lm_nll(params, changed)))) > 0.1
