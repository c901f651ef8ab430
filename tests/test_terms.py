"""Losses of several terms: each over its own denominator, times its coefficient, through one gradient tree."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import (
    FOLDS,
    LENGTH,
    assert_identical,
    assert_trees_close,
    difference,
    host,
    lm_batch,
    lm_nll,
    lm_params,
)

import jaxacc

COEFFICIENTS = {"z": 1e-2, "future": 0.3, "router": 0.1}


def logits_of(params, tokens):
    hidden = params["embed"][tokens]
    hidden, _ = jax.lax.scan(lambda h, mix: (h + jnp.tanh(h @ mix), None), hidden, params["layers"]["mix"])
    return hidden @ params["embed"].T


def future_nll(params, batch):
    """The token after the next, for which the last target of a row has no label: the mask rolls along."""
    logits = logits_of(params, batch["tokens"])
    targets = jnp.roll(batch["targets"], -1, axis=1)
    mask = jnp.roll(batch["mask"], -1, axis=1).at[:, -1].set(False)
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked, mask


def terms_of(params, microbatch, key):
    nll, mask = lm_nll(params, microbatch), microbatch["mask"]
    z = jnp.square(jax.nn.logsumexp(logits_of(params, microbatch["tokens"]), axis=-1))
    future, future_mask = future_nll(params, microbatch)
    return {
        "nll": jaxacc.Mean(jnp.sum(jnp.where(mask, nll, 0)), jnp.sum(mask, dtype=jnp.int32)),
        "z": jaxacc.Mean(jnp.sum(z), jnp.int32(z.size)),
        "future": jaxacc.Mean(jnp.sum(jnp.where(future_mask, future, 0)), jnp.sum(future_mask, dtype=jnp.int32)),
        "router": jaxacc.Mean(jnp.sum(params["unused"] ** 3), jnp.int32(1)),
    }


def oracle(params, batch):
    """One big batch, four means written out."""
    floats = {name: params[name] for name in ("embed", "layers", "unused")}

    def loss(floats):
        p = {**params, **floats}
        mask = batch["mask"]
        nll = jnp.sum(jnp.where(mask, lm_nll(p, batch), 0)) / mask.sum()
        z = jnp.mean(jnp.square(jax.nn.logsumexp(logits_of(p, batch["tokens"]), axis=-1)))
        future, future_mask = future_nll(p, batch)
        future = jnp.sum(jnp.where(future_mask, future, 0)) / future_mask.sum()
        return nll + 1e-2 * z + 0.3 * future + 0.1 * jnp.sum(p["unused"] ** 3)

    loss, grads = jax.value_and_grad(loss)(floats)
    return loss, {**grads, "table": None, "absent": None}


@pytest.mark.parametrize("steps", [1, 2, 8])
@pytest.mark.parametrize("fold", FOLDS)
def test_every_term_has_its_own_denominator(fold, steps, x64):
    """Cases 158, 161 to 163: token mean, z-loss over all positions, multi-token prediction, router balance per microbatch."""
    params, batch = lm_params(dtype=jnp.float64), lm_batch()
    out = jax.jit(jaxacc.accumulate(terms_of, coefficients=COEFFICIENTS, fold=fold))(
        params, jaxacc.split_batch(batch, accumulation_steps=steps)
    )
    loss, grads = oracle(params, batch)
    np.testing.assert_allclose(out.loss, loss, rtol=1e-12)
    assert_trees_close(out.grads, grads, rtol=1e-11, atol=1e-13)
    counts = {name: int(term.weight) for name, term in out.terms.items()}
    assert counts == {"nll": 48, "z": 8 * LENGTH, "future": 48 - 7, "router": steps}
    assert int(out.weight) == 48
    _, under_tokens = jaxacc.accumulate(terms_of, coefficients={**COEFFICIENTS, "router": 0.1 * steps / 48})(
        params, jaxacc.split_batch(batch, accumulation_steps=steps)
    )[:2]
    assert difference(under_tokens["unused"], grads["unused"]) > 0.1


def constant_terms(params, microbatch, key):
    """Linear, so that the gradient of each parameter is the coefficient of its term times a mean known by hand."""
    rare = microbatch["rare"]
    return {
        "main": jaxacc.Mean(params["main"] * microbatch["x"], microbatch["n"]),
        "rare": jaxacc.Mean(params["rare"] * rare * microbatch["x"], rare),
        "balance": jaxacc.Mean(params["balance"] * 1.0, jnp.int32(1)),
        "never": jaxacc.Mean(params["never"] * 5.0, jnp.int32(0)),
    }


LINEAR = {"rare": 0.5, "balance": 0.01, "never": 7.0}


def linear_batch(rows=16):
    n = np.arange(rows, dtype=np.int32) % 5 + 1
    rare = (np.arange(rows) == 6).astype(np.int32)  # in one microbatch of any split
    return {"x": np.arange(1.0, rows + 1, dtype=np.float32), "n": n, "rare": rare}


def linear_gradient(rows=16):
    b = linear_batch(rows)
    return {"main": b["x"].sum() / b["n"].sum(), "rare": 0.5 * 7.0, "balance": 0.01, "never": 0.0}


PARAMS = {name: jnp.float32(1) for name in ("main", "rare", "balance", "never")}


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_coefficients_do_not_depend_on_the_split(replicas):
    """Cases 160, 163: every A and D gives the coefficients; a term without weight gives nothing."""
    mesh = jax.make_mesh((replicas,), ("data",), devices=jax.devices()[:replicas])
    step = jaxacc.make_step(constant_terms, optax.sgd(1.0), coefficients=LINEAR, mesh=mesh)
    for steps in (1, 2, 4, 8)[: 4 if replicas < 4 else 3]:
        window = jaxacc.split_batch(linear_batch(), accumulation_steps=steps)
        state, info = step.update(step.init(PARAMS), window)
        moved = {name: 1 - float(value) for name, value in state.params.items()}
        assert moved == pytest.approx(linear_gradient(), rel=1e-5, abs=1e-7)
        terms = {name: float(term.value) for name, term in info.terms.items()}
        assert terms == pytest.approx({"main": 136 / 46, "rare": 7, "balance": 1, "never": 0}, rel=1e-6)
        assert float(info.loss) == pytest.approx(136 / 46 + 3.5 + 0.01, rel=1e-6)
        assert (int(info.weight), int(info.tokens), int(state.ledger.tokens)) == (46, 46, 46)
        assert int(info.terms["balance"].weight) == steps * replicas


def test_evaluation_reports_terms():
    """Undivided, to be merged over windows; the loss is the main term."""
    step = jaxacc.make_step(constant_terms, optax.sgd(1.0), coefficients=LINEAR)
    result = step.evaluate(step.init(PARAMS), jaxacc.split_batch(linear_batch(), accumulation_steps=4))
    both = jaxacc.merge(result, result)
    assert (float(both.loss.total), int(both.loss.weight)) == (272, 92)
    assert float(both.terms["rare"].value) == 7


@pytest.mark.parametrize("replicas", [1, 2])
def test_streamed_terms_need_their_weights(replicas):
    """Stated ahead, they give the window's update; others are noticed and nothing moves."""
    mesh = jax.make_mesh((replicas,), ("data",), devices=jax.devices()[:replicas])
    step = jaxacc.make_step(constant_terms, optax.sgd(1.0), coefficients=LINEAR, mesh=mesh)
    window = jaxacc.split_batch(linear_batch(), accumulation_steps=4)
    parts = [jax.tree.map(lambda leaf, a=a: leaf[a], window) for a in range(4)]
    expected = host(step.update(step.init(PARAMS), window))
    right = {"main": 46, "rare": 1, "balance": 4 * replicas, "never": 0}

    def run(weights):
        state = step.init(PARAMS)
        accumulator = step.begin(state, parts[0], weights=weights)
        for part in parts:
            accumulator = step.add(accumulator, state, part)
        return step.finish(accumulator, state)

    state, info = run(right)
    assert_trees_close(state.params, expected[0].params, rtol=1e-6)
    assert_trees_close(info, expected[1], rtol=1e-6)
    state, info = run({**right, "rare": 2})
    assert int(info.outcome) == jaxacc.Outcome.SKIPPED_WEIGHTS
    assert_identical(state.params, PARAMS)
    with pytest.raises(ValueError, match=r"State those of the whole window: step\.begin\(state, microbatch, weights="):
        run(None)
    with pytest.raises(ValueError, match=r"weights names \['main'\], and the loss has the terms"):
        run({"main": 46})


@pytest.mark.parametrize(
    ("coefficients", "message"),
    [
        (None, "Every term but one, the main one, needs a coefficient"),
        ({"rare": 1.0}, "Every term but one"),
        ({**LINEAR, "main": 1.0}, "Every term but one"),
        ({**LINEAR, "other": 1.0}, r"coefficients names \['balance', 'never', 'other', 'rare'\]"),
        ({**LINEAR, "rare": float("nan")}, "must be a finite number"),
    ],
)
def test_coefficients_that_do_not_fit(coefficients, message):
    """Names and numbers are checked before anything runs."""
    with pytest.raises(ValueError, match=message):
        jaxacc.accumulate(constant_terms, coefficients=coefficients)(
            PARAMS, jaxacc.split_batch(linear_batch(), accumulation_steps=2)
        )


def test_other_bad_terms():
    """A coefficient for a plain loss, an entry that is no Mean, a 16-bit term."""
    window = {"x": jnp.ones((2, 3))}
    plain = lambda params, microbatch, key: jaxacc.Mean(microbatch["x"] * params, microbatch["x"])
    with pytest.raises(ValueError, match=r"the loss has the terms \['loss'\], and coefficients names \['z'\]"):
        jaxacc.accumulate(plain, coefficients={"z": 1.0})(jnp.float32(1), window)
    with pytest.raises(ValueError, match="returned a scalar as a term of the loss"):
        jaxacc.accumulate(lambda *args: {"a": plain(*args), "b": 1.0}, coefficients={"b": 1.0})(jnp.float32(1), window)
    half = lambda *args: {"a": plain(*args), "b": jaxacc.Mean(plain(*args).total.astype(jnp.bfloat16), 1)}
    with pytest.raises(ValueError, match="the total of the term 'b' is bfloat16"):
        jaxacc.accumulate(half, coefficients={"b": 1.0})(jnp.float32(1), window)


def test_one_backward_pass_serves_all_terms():
    """The program with four terms has the matrix products of one forward and one backward pass, not of four."""
    window = jaxacc.split_batch(lm_batch(), accumulation_steps=2)

    def flops(loss_fn, **options):
        grads_of = jax.jit(jaxacc.accumulate(loss_fn, fold="carry", **options))
        return grads_of.lower(lm_params(), window).compile().cost_analysis()["flops"]

    def one_term(params, microbatch, key):
        return terms_of(params, microbatch, key)["nll"]

    def tied(params, microbatch, key):
        """Four terms of the same logits."""
        main = one_term(params, microbatch, key)
        return {name: jaxacc.Mean(main.total * factor, main.weight) for factor, name in enumerate("abcd")}

    assert flops(tied, coefficients=dict.fromkeys("bcd", 0.1)) < 1.1 * flops(one_term)


def test_remat_does_not_count_twice():
    """Cases 164, 166, 167: metrics and terms are the same with the forward pass run again for the backward one."""

    def loss_fn(params, microbatch, key):
        return terms_of(params, microbatch, key), {"load": jaxacc.Sum(jnp.sum(microbatch["mask"], dtype=jnp.int32))}

    window = jaxacc.split_batch(lm_batch(), accumulation_steps=4)
    run = lambda f: jax.jit(jaxacc.accumulate(f, has_aux=True, coefficients=COEFFICIENTS))(lm_params(), window)
    plain, again = run(loss_fn), run(jax.checkpoint(loss_fn))
    assert int(again.metrics["load"].value) == 48
    assert_trees_close(again, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("replicas", [1, 2])
def test_everything_at_once(replicas, strict):
    """Terms, state, row keys, a scale, dropping, part of the parameters and the noise together, without silent promotion."""

    def loss_fn(params, state, microbatch, keys):
        noise = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5))(keys)
        x = microbatch["x"] * params["main"]
        new = {"seen": state["seen"] + jnp.sum(microbatch["n"])}
        terms = {"main": jaxacc.Mean(jnp.where(noise, x, jnp.zeros_like(x)), microbatch["n"])}
        return {**terms, "size": jaxacc.Mean(jnp.square(params["main"]), jnp.int32(1))}, {"kept": jaxacc.Sum(noise)}, new

    mesh = jax.make_mesh((replicas,), ("data",), devices=jax.devices()[:replicas])
    step = jaxacc.make_step(
        loss_fn, optax.sgd(0.1), has_aux=True, has_state=True, coefficients={"size": 0.5}, row_keys=True, mesh=mesh,
        nonfinite="drop_microbatch", state_reduction="sum", trainable={"main": True, "rest": False},
        loss_scale=jaxacc.LossScale(), noise_scale="microbatches",
    )  # fmt: skip
    params = {"main": jnp.float32(1), "rest": jnp.float32(2)}
    start = {"seen": jnp.int32(0)}
    for steps in (1, 4):
        window = jaxacc.split_batch({"x": jnp.arange(8.0), "n": jnp.ones(8, jnp.int32)}, accumulation_steps=steps)
        state, info = step.update(step.init(params, key=jax.random.key(0), model_state=start), window)
        assert int(info.outcome) == jaxacc.Outcome.APPLIED
        assert int(state.model_state["seen"]) == 8
        expected = float(info.terms["main"].total) / 8 + 0.5 * 2
        assert 1 - float(state.params["main"]) == pytest.approx(0.1 * expected, rel=1e-5)
    assert step.update._cache_size() == 2
