"""Loss scaling and what becomes of values that are not finite: once per window, whatever A and D."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import assert_identical, assert_trees_close, difference, host, lm_batch, lm_loss, lm_params

import jaxacc

SCALE = jaxacc.LossScale(initial=2.0**15, growth_interval=10)


def make(loss_fn=lm_loss, tx=None, **options):
    return jaxacc.make_step(loss_fn, tx or optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)), **options)


def test_the_scale_does_not_show():
    """Scale 1 and 2^15 give the same update, clipped in true units; the norm is the true one."""
    window = jaxacc.split_batch(lm_batch(), accumulation_steps=4)
    runs = []
    for scale in (None, jaxacc.LossScale(initial=1.0), SCALE):
        step = make(loss_scale=scale)
        runs.append(host(step.update(step.init(lm_params()), window)))
    (plain, info), (_, info_one), (scaled, info_scaled) = runs
    assert (info.loss_scale, float(info_one.loss_scale), float(info_scaled.loss_scale)) == (None, 1.0, 2.0**15)
    assert difference(scaled.params["embed"], lm_params()["embed"]) > 1e-3
    assert_trees_close(scaled.params, plain.params, rtol=1e-5, atol=1e-6)
    assert float(info_scaled.grad_norm) == pytest.approx(float(info.grad_norm), rel=1e-6)
    assert float(info_scaled.grad_norm) > 0.2  # the clip acted, and not on 2^15 times that


def test_float16_needs_it():
    """Gradients of 1e-8 vanish in float16 and not with a scale; a window of 65,536 tokens does not overflow it."""

    def loss_fn(params, microbatch, key):
        small = (microbatch["x"].astype(jnp.float16) * params).astype(jnp.float32) * 1e-4
        return jaxacc.Mean(small, jnp.ones_like(small))

    window = {"x": jnp.ones((16, 4096))}
    params = jnp.ones((), jnp.float16)
    outs = {}
    for scale in (1.0, 2.0**15):
        step = jaxacc.make_step(loss_fn, optax.sgd(0.0), loss_scale=jaxacc.LossScale(initial=scale))
        outs[scale] = step.update(step.init(params), window)[1]
    assert float(outs[1.0].grad_norm) == 0
    assert float(outs[2.0**15].grad_norm) == pytest.approx(1e-4, rel=1e-2)  # cotangents of 5e-5 have 10 bits
    assert int(outs[2.0**15].outcome) == jaxacc.Outcome.APPLIED


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_a_16_bit_loss_may_be_scaled(dtype):
    """Its cotangent is a power of two near scale / N, and the rest is multiplied afterwards: exact to its own rounding."""
    loss_fn = lambda params, microbatch, key: jaxacc.Mean(microbatch["x"].astype(dtype) * params, microbatch["n"])
    window = {"x": jnp.full((3, 7), 0.5), "n": jnp.ones((3, 7), jnp.int32)}
    for scale in (None, jaxacc.LossScale(initial=2.0**18)):
        step = jaxacc.make_step(loss_fn, optax.sgd(0.0), loss_scale=scale)
        _, info = step.update(step.init(jnp.ones((), dtype)), window)
        assert float(info.grad_norm) == pytest.approx(0.5, rel=1e-6)


def overflowing(params, microbatch, key):
    """The gradient, not the loss, overflows where the flag is set: what a scale too large does."""

    @jax.custom_vjp
    def through(x, flag):
        return x

    through.defvjp(lambda x, flag: (x, flag), lambda flag, g: (jnp.where(flag, jnp.inf, g), None))
    flag = jnp.any(microbatch["overflow"])
    embed = through(params["embed"], flag)
    return lm_loss({**params, "embed": embed}, microbatch, key)


@pytest.mark.parametrize("replicas", [1, 4])
@pytest.mark.parametrize("at", [0, 3])
def test_an_overflow_skips_and_halves_once(at, replicas):
    """Cases 122, 132, 134, 135: at any microbatch; nothing moves, the schedule neither; the next window is right."""
    batch = lm_batch(16)
    good = jaxacc.split_batch({**batch, "overflow": np.zeros(16, bool)}, accumulation_steps=4)
    bad = {**good, "overflow": good["overflow"].copy()}
    bad["overflow"][at, 3] = True
    mesh = jax.make_mesh((replicas,), ("data",), devices=jax.devices()[:replicas])
    rates = optax.linear_schedule(1e-2, 1e-3, 4)
    step = make(overflowing, optax.adamw(rates), loss_scale=SCALE, mesh=mesh)
    start = step.init(lm_params())
    untouched = host((start.params, start.opt_state))
    state, info = step.update(start, bad)
    assert int(info.outcome) == jaxacc.Outcome.SKIPPED_NONFINITE
    assert_identical((state.params, state.opt_state), untouched)
    assert (float(info.loss_scale), float(state.loss_scale.scale)) == (2.0**15, 2.0**14)
    state, info = step.update(state, good)
    assert (float(info.loss_scale), int(info.outcome)) == (2.0**14, jaxacc.Outcome.APPLIED)
    fresh, _ = step.update(step.init(lm_params()), good)
    assert_trees_close(state.params, fresh.params, rtol=1e-5, atol=1e-6)
    assert difference(state.params["embed"], untouched[0]["embed"]) > 1e-3
    assert [int(n) for n in (state.ledger.attempted, state.ledger.applied)] == [2, 1]


def tiny(params, microbatch, key):
    return jaxacc.Mean(params * microbatch["x"], microbatch["n"])


@pytest.mark.parametrize("steps", [1, 4])
def test_ten_good_windows_double_once(steps):
    """Whatever A; a bad window starts the count again, an empty one does not; floor and ceiling hold."""
    config = jaxacc.LossScale(initial=8.0, growth_interval=10, floor=4.0, ceiling=16.0)
    step = jaxacc.make_step(tiny, optax.sgd(0.0), loss_scale=config)
    good = {"x": jnp.ones((steps, 2)), "n": jnp.ones((steps, 2), jnp.int32)}
    bad, empty = {**good, "x": good["x"].at[0, 0].set(jnp.nan)}, {**good, "n": jnp.zeros((steps, 2), jnp.int32)}
    sequence = [good] * 9 + [empty] + [good] + [good] * 10 + [bad] * 4 + [good] * 9 + [bad] + [good] * 10
    state, seen = step.init(jnp.float32(1)), []
    for window in sequence:
        state, info = step.update(state, window)
        seen.append(float(info.loss_scale))
    assert seen == [8.0] * 11 + [16.0] * 11 + [8.0, 4.0, 4.0] + [4.0] * 10 + [4.0] * 10
    assert float(state.loss_scale.scale) == 8.0
    assert int(state.ledger.applied) == 10 + 10 + 9 + 10


@pytest.mark.parametrize(
    "config",
    [
        {"initial": 0.5}, {"initial": 2.0**30}, {"floor": 0.0}, {"factor": 1.0}, {"growth_interval": 0},
        {"initial": float("inf"), "ceiling": float("inf")},
    ],
)  # fmt: skip
def test_scales_that_cannot_work(config):
    """Refused when the step is made."""
    with pytest.raises(ValueError, match=r"LossScale\("):
        jaxacc.make_step(tiny, optax.sgd(0.1), loss_scale=jaxacc.LossScale(**config))
    with pytest.raises(ValueError, match=r"is no jaxacc\.LossScale"):
        jaxacc.make_step(tiny, optax.sgd(0.1), loss_scale=1024.0)


def poisoned_window(steps=4, at=1):
    window = jaxacc.split_batch(lm_batch(16, counts=(1, 2, 3, 5, 8, 13, 16, 4)), accumulation_steps=steps)
    poison = np.zeros(window["mask"].shape[:2], np.float32)
    poison[at, 0] = np.nan
    return {**window, "poison": poison}


def poisonable(params, microbatch, key):
    loss = lm_loss(params, microbatch, key)
    metrics = {"rows": jaxacc.Sum(jnp.int32(microbatch["poison"].size))}
    return jaxacc.Mean(loss.total + jnp.sum(microbatch["poison"] * jnp.sum(params["embed"])), loss.weight), metrics


def poisonable_terms(params, microbatch, key):
    loss, metrics = poisonable(params, microbatch, key)
    return {"nll": loss, "norm": jaxacc.Mean(jnp.sum(params["unused"] ** 2), jnp.int32(1))}, metrics


@pytest.mark.parametrize("replicas", [1, 4])
@pytest.mark.parametrize("loss_fn", [poisonable, poisonable_terms])
def test_a_microbatch_that_is_not_finite_is_dropped(loss_fn, replicas):
    """Cases 129, 130: it loses total, weight and metrics; on a mesh only on the replica that has it."""
    several = {"norm": 0.1} if loss_fn is poisonable_terms else None
    mesh = jax.make_mesh((replicas,), ("data",), devices=jax.devices()[:replicas])
    options = {"has_aux": True, "coefficients": several, "mesh": mesh}
    step = jaxacc.make_step(loss_fn, optax.sgd(0.1), nonfinite="drop_microbatch", **options)
    window = poisoned_window()
    lost = slice(0, 4 // replicas)  # the rows of that microbatch on that replica
    masked = {**window, "mask": window["mask"].copy(), "poison": np.zeros_like(window["poison"])}
    masked["mask"][1, lost] = False
    state, info = step.update(step.init(lm_params()), window)
    assert int(info.outcome) == jaxacc.Outcome.APPLIED
    assert (int(info.dropped), int(info.metrics["rows"].value)) == (1, 16 - 4 // replicas)
    clean = jaxacc.make_step(loss_fn, optax.sgd(0.1), **options)
    expected, expected_info = clean.update(clean.init(lm_params()), masked)
    names = ("embed", "layers")  # the other term has one microbatch less, and the same mean
    assert_trees_close([state.params[n] for n in names], [expected.params[n] for n in names], rtol=1e-5, atol=1e-6)
    assert difference(state.params["embed"], lm_params()["embed"]) > 1e-2
    assert (float(info.loss), int(info.weight)) == (pytest.approx(float(expected_info.loss)), int(expected_info.weight))
    skipped, info = clean.update(clean.init(lm_params()), window)
    assert int(info.outcome) == jaxacc.Outcome.SKIPPED_NONFINITE
    assert_identical(skipped.params, lm_params())


@pytest.mark.parametrize("steps", [1, 4])
def test_a_window_of_nothing_finite_is_empty(steps):
    """Dropping everything leaves no weight, so nothing moves."""
    step = jaxacc.make_step(tiny, optax.adamw(0.1), nonfinite="drop_microbatch")
    state, info = step.update(step.init(jnp.float32(1)), {"x": jnp.full((steps, 2), jnp.nan), "n": jnp.ones((steps, 2), int)})
    assert (int(info.outcome), int(info.dropped)) == (jaxacc.Outcome.SKIPPED_EMPTY, steps)
    assert float(state.params) == 1
    assert float(step.evaluate(state, {"x": jnp.full((1, 2), jnp.nan), "n": jnp.ones((1, 2), int)}).loss.total) != 0


def test_dropping_in_a_streamed_window():
    """The same as in a resident one; with stated weights it cannot be."""
    step = jaxacc.make_step(tiny, optax.sgd(0.1), nonfinite="drop_microbatch")
    window = {"x": jnp.ones((4, 2)).at[2, 0].set(jnp.inf), "n": jnp.ones((4, 2), jnp.int32)}
    state = step.init(jnp.float32(1))
    accumulator = step.begin(state, {name: leaf[0] for name, leaf in window.items()})
    for a in range(4):
        accumulator = step.add(accumulator, state, {name: leaf[a] for name, leaf in window.items()})
    state, info = step.finish(accumulator, state)
    expected, expected_info = step.update(step.init(jnp.float32(1)), window)
    assert (int(info.dropped), int(info.weight)) == (int(expected_info.dropped), int(expected_info.weight)) == (1, 6)
    assert float(state.params) == float(expected.params) == pytest.approx(0.9)
    with pytest.raises(ValueError, match="a dropped microbatch would change them"):
        step.begin(step.init(jnp.float32(1)), {"x": jnp.ones(2), "n": jnp.ones(2, int)}, weights={"loss": 8})
    with pytest.raises(ValueError, match="nonfinite='drop' is not one of"):
        jaxacc.make_step(tiny, optax.sgd(0.1), nonfinite="drop")


def test_dropping_a_single_term_costs_no_forward_pass():
    """Its denominator is divided out afterwards; several terms keep the forward pass of the denominators (stated)."""
    window = poisoned_window()

    def flops(loss_fn, **options):
        step = jaxacc.make_step(loss_fn, optax.sgd(0.1), has_aux=True, fold="carry", **options)
        return step.update.lower(step.init(lm_params()), window).compile().cost_analysis()["flops"]

    assert flops(poisonable, nonfinite="drop_microbatch") < 1.1 * flops(poisonable)
    terms = {"coefficients": {"norm": 0.1}}
    assert flops(poisonable_terms, nonfinite="drop_microbatch", **terms) > 1.2 * flops(poisonable_terms, **terms)


def test_nothing_asks_the_host():
    """Case 133: finiteness is decided on the device; the program has no callback, infeed or outfeed."""
    step = make(loss_scale=SCALE, nonfinite="drop_microbatch")
    text = step.update.lower(step.init(lm_params()), jaxacc.split_batch(lm_batch(), accumulation_steps=4)).compile().as_text()
    assert "while(" in text
    assert not any(word in text for word in ("callback", "infeed", "outfeed", "send("))


def test_skips_in_a_row_are_counted():
    """Cases 125, 127: consecutive ones only; the message has the counts."""
    step = jaxacc.make_step(tiny, optax.sgd(0.1))
    good = {"x": jnp.ones((2, 2)), "n": jnp.ones((2, 2), jnp.int32)}
    bad = {**good, "x": good["x"] * jnp.nan}
    state = step.init(jnp.float32(1))
    for window in (bad, bad, good, bad, bad):
        state, _ = step.update(state, window)
        jaxacc.check_skipped(state.ledger, raise_after=3)
    assert int(state.ledger.skipped_in_a_row) == 2
    state, _ = step.update(state, bad)
    with pytest.raises(FloatingPointError, match=r"the last 3 windows were all skipped \(1 of 6 attempted were applied\)"):
        jaxacc.check_skipped(state.ledger, raise_after=3)
    with pytest.raises(ValueError, match="raise_after=0"):
        jaxacc.check_skipped(state.ledger, raise_after=0)


def test_negative_weights_do_not_corrupt_the_ledger():
    """They are skipped; the counter of tokens never goes down, nor up by 2^32."""
    step = jaxacc.make_step(tiny, optax.sgd(0.1))
    state, info = step.update(step.init(jnp.float32(1)), {"x": jnp.ones((2, 2)), "n": -jnp.ones((2, 2), jnp.int32)})
    assert (int(info.outcome), int(state.ledger.tokens)) == (jaxacc.Outcome.SKIPPED_NONFINITE, 0)
