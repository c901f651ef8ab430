"""`two_pass` gives the gradient of a contrastive loss over the whole effective batch (cases 169, 171)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from problems import FOLDS, assert_trees_close, difference, largest

import jaxacc

SPLITS = (1, 2, 4, 8)
WIDTH = 5


def clip_params(dtype=jnp.float64):
    """Two towers, a temperature, and leaves that get no gradient."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    return {
        "image": {"layers": draw(2, 6, 6) / 2, "out": draw(6, WIDTH)}, "text": draw(4, WIDTH),
        "log_scale": jnp.asarray(0.7, dtype), "unused": jnp.ones(3, dtype), "table": jnp.arange(4), "absent": None,
    }  # fmt: skip


def clip_batch(rows=8, dtype=np.float64):
    rng = np.random.default_rng(1)
    return {"image": rng.normal(size=(rows, 6)).astype(dtype), "text": rng.normal(size=(rows, 4)).astype(dtype)}


def kept(key, rows):
    """What dropout leaves of the hidden layer, `(rows, 6)`."""
    return jax.random.uniform(key, (rows, 6)) < 0.7


def towers(params, batch, mask=None):
    """Both embeddings; with a mask, dropout."""
    scanned = jax.lax.scan(lambda h, layer: (h + jnp.tanh(h @ layer), None), batch["image"], params["image"]["layers"])
    hidden = scanned[0] if mask is None else jnp.where(mask, scanned[0] / 0.7, jnp.zeros_like(scanned[0]))
    return {"image": hidden @ params["image"]["out"], "text": jnp.tanh(batch["text"] @ params["text"])}


def embed(params, microbatch, key):
    """The problem as jaxacc wants it, and its loss below."""
    return towers(params, microbatch, None if key is None else kept(key, len(microbatch["image"])))


def nll(params, embeddings, real):
    """CLIP's loss of every row, by hand: both directions, the temperature learned, padding out of the negatives."""
    images, texts = (e / jnp.linalg.norm(e, axis=-1, keepdims=True) for e in (embeddings["image"], embeddings["text"]))
    logits = images @ texts.T * jnp.exp(params["log_scale"])
    least = jnp.full_like(logits, -1e9)
    rows, columns = jnp.where(real[None], logits, least), jnp.where(real[:, None], logits, least)
    return (jax.nn.logsumexp(rows, axis=1) + jax.nn.logsumexp(columns, axis=0)) / 2 - jnp.diagonal(logits)


def clip_loss(params, embeddings, rows):
    real = rows.get("row_mask", jnp.ones(len(rows["image"]), bool))
    return jaxacc.Mean(nll(params, embeddings, real), jnp.ones(len(real), jnp.int32))


def kept_of_the_batch(key, rows, steps, replicas=1):
    """What is kept of every row in the order of the batch: row `j` of a replica lies in its microbatch `j % steps`."""
    masks = np.empty((rows, 6), bool)
    for replica in range(replicas):
        for a in range(steps):
            folded = jax.random.fold_in(key, a)
            folded = jax.random.fold_in(folded, replica) if replicas > 1 else folded
            start, stop = (r * rows // replicas for r in (replica, replica + 1))
            masks[start + a : stop : steps] = kept(folded, rows // replicas // steps)
    return masks


@jax.jit
def oracle(params, batch, mask=None):
    """Loss and gradient of one big batch, by `jax.value_and_grad` alone."""
    names = ("image", "text", "log_scale", "unused")

    def mean(floats):
        return jnp.mean(nll(floats, towers(floats, batch, mask), jnp.ones(len(batch["image"]), bool)))

    loss, grads = jax.value_and_grad(mean)({name: params[name] for name in names})
    return loss, {**grads, "table": None, "absent": None}


@functools.cache
def run(fold, embed_fn=embed, loss_fn=clip_loss):
    return jax.jit(jaxacc.two_pass(embed_fn, loss_fn, fold=fold))


def mesh_of(size):
    return jax.make_mesh((size,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:size])


def run_on(mesh, loss_fn=clip_loss, embed_fn=embed, fold="auto", check_vma=True):
    grads_of = jaxacc.two_pass(embed_fn, loss_fn, axis_name="data", fold=fold)
    specs = {"in_specs": (P(), P(None, "data"), P()), "out_specs": P(), "check_vma": check_vma}
    return jax.jit(jax.shard_map(grads_of, mesh=mesh, **specs))


@pytest.mark.parametrize("steps", SPLITS)
@pytest.mark.parametrize("fold", FOLDS)
def test_equals_the_big_batch_float64(fold, steps, x64):
    """Loss and every gradient, of both towers and the temperature, with dropout that is the same in both passes (169, 171)."""
    params, batch, key = clip_params(), clip_batch(), jax.random.key(3)
    loss, grads = oracle(params, batch, kept_of_the_batch(key, 8, steps))
    out = run(fold)(params, jaxacc.split_batch(batch, accumulation_steps=steps), key)
    assert int(out.weight) == 8
    assert all(largest(grads[name]) > 0.1 for name in ("image", "text", "log_scale"))
    assert difference(grads, oracle(params, batch)[1]) > 0.05
    np.testing.assert_allclose(out.loss, loss, rtol=1e-12)
    assert_trees_close(out.grads, grads, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("fold", FOLDS)
def test_equals_the_big_batch_float32(fold):
    """Without a key. Tolerance: 1e-6 of the largest entry, which is the signal."""
    params, batch = clip_params(jnp.float32), clip_batch(dtype=np.float32)
    loss, grads = oracle(params, batch)
    out = run(fold)(params, jaxacc.split_batch(batch, accumulation_steps=4))
    np.testing.assert_allclose(out.loss, loss, rtol=1e-6)
    assert_trees_close(out.grads, grads, rtol=1e-6, atol=1e-6 * largest(grads))


def test_negatives_within_the_microbatch_are_another_loss(x64):
    """Case 169: `accumulate` of the same loss sees 2 rows at a time; only at A = 1 is that the same."""

    def loss_fn(params, microbatch, key):
        return clip_loss(params, embed(params, microbatch, key), microbatch)

    params, batch = clip_params(), clip_batch()
    loss, grads = oracle(params, batch)
    alone, whole = (
        jax.jit(jaxacc.accumulate(loss_fn))(params, jaxacc.split_batch(batch, accumulation_steps=steps)) for steps in (4, 1)
    )
    assert abs(alone.loss - loss) > 0.1
    assert difference(alone.grads, grads) > 0.1
    np.testing.assert_allclose(whole.loss, loss, rtol=1e-12)
    assert_trees_close(whole.grads, grads, rtol=1e-12, atol=1e-14)


def test_other_dropout_in_the_second_pass_would_be_noticed(monkeypatch, x64):
    """Case 171, the mistake planted: with other keys in the first pass the loss is fine and the gradient wrong."""
    params, batch, key, other = clip_params(), clip_batch(), jax.random.key(3), jax.random.key(4)
    embed_all = jaxacc._two_pass._embed
    monkeypatch.setattr(
        jaxacc._two_pass, "_embed", lambda f, params, window, _, axes: embed_all(f, params, window, other, axes)
    )
    loss, grads = oracle(params, batch, kept_of_the_batch(other, 8, 4))
    out = jax.jit(jaxacc.two_pass(embed, clip_loss))(params, jaxacc.split_batch(batch, accumulation_steps=4), key)
    np.testing.assert_allclose(out.loss, loss, rtol=1e-12)
    assert difference(out.grads, grads) > 0.1


@pytest.mark.parametrize("fold", FOLDS)
def test_padding_is_left_out(fold, x64):
    """5 rows filled up to 8, at the end and in between; a microbatch that is padding only is not evaluated, so may hold NaN."""
    params, batch = clip_params(), clip_batch(5)
    loss, grads = oracle(params, batch)
    between = jax.tree.map(lambda leaf: np.insert(leaf, [2, 4, 4], leaf[:3], axis=0), batch)
    between["row_mask"] = np.array([1, 1, 0, 1, 1, 0, 0, 1], bool)
    between = jaxacc.split_batch(between, accumulation_steps=4)
    between["image"][2] = np.nan
    assert between["row_mask"].sum(1).tolist() == [2, 1, 0, 2]
    for window in (between, jaxacc.split_batch(batch, accumulation_steps=4, pad=True)):
        out = run(fold)(params, window)
        assert int(out.weight) == 5
        np.testing.assert_allclose(out.loss, loss, rtol=1e-12)
        assert_trees_close(out.grads, grads, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("fold", FOLDS)
def test_an_empty_window_is_zero(fold, x64):
    """No real row anywhere: zeros, not the NaN of normalized zeros, nor the gradient of a loss of nothing."""
    window = {**jaxacc.split_batch(clip_batch(), accumulation_steps=4), "row_mask": np.zeros((4, 2), bool)}
    out = run(fold)(clip_params(), window)
    assert int(out.weight) == float(out.loss) == largest(out.grads) == 0


@pytest.mark.parametrize(
    ("size", "check_vma", "fold"), [(1, True, "auto"), (4, False, "auto"), *[(4, True, fold) for fold in FOLDS]]
)
def test_mesh_invariance(fold, size, check_vma, x64):
    """4 replicas and 1 agree with the big batch: nothing is counted twice, nothing left out (law 6)."""
    params, batch = clip_params(), clip_batch(16)
    loss, grads = oracle(params, batch)
    window = jaxacc.split_batch(batch, accumulation_steps=2)
    out = run_on(mesh_of(size), fold=fold, check_vma=check_vma)(params, window, None)
    assert int(out.weight) == 16
    np.testing.assert_allclose(out.loss, loss, rtol=1e-12)
    assert_trees_close(out.grads, grads, rtol=1e-12, atol=1e-14)


def test_mesh_with_dropout_and_padding(x64):
    """Every replica drops by its own key, the same in both passes; one replica is short, one has nothing but padding."""
    params, batch, key = clip_params(), clip_batch(11), jax.random.key(3)
    loss, grads = oracle(params, batch, kept_of_the_batch(key, 16, 2, replicas=4)[:11])
    window = jaxacc.split_batch(batch, accumulation_steps=2, microbatch=8, pad=True)
    assert window["row_mask"].sum(0).tolist() == [2, 2, 2, 2, 2, 1, 0, 0]
    out = run_on(mesh_of(4))(params, window, key)
    assert int(out.weight) == 11
    np.testing.assert_allclose(out.loss, loss, rtol=1e-12)
    assert_trees_close(out.grads, grads, rtol=1e-12, atol=1e-14)


def test_one_reduction_and_one_gather_of_embeddings():
    """Law 9: outside of every loop, the embeddings are gathered and the gradient reduced; unused rows are not gathered."""
    mesh, params = mesh_of(4), clip_params(jnp.float32)
    window = jaxacc.split_batch(clip_batch(16, np.float32), accumulation_steps=2)
    compiled = run_on(mesh).lower(params, window, None).compile()
    jaxacc.check_reduction(compiled, params, mesh=mesh)
    found = jaxacc.inspect_collectives(compiled, mesh=mesh)
    assert not any(c.in_loop for c in found)
    assert sorted(c.bytes for c in found if c.kind == "all-gather") == [16 * WIDTH * 4] * 2
    gradient = sum(leaf.size * 4 for leaf in jax.tree.leaves(jaxacc._tree.partition(params)[0]))
    assert sum(c.bytes for c in found if c.kind == "all-reduce") == gradient + 4 + 4  # the total and the weight


def test_rows_come_in_the_order_of_the_batch():
    """Embeddings and rows of every kind, on one device and on a mesh: `loss_fn` sees the batch that was split."""
    batch = {"x": np.arange(32.0, dtype=np.float32), "id": np.arange(32), "even": np.arange(32) % 2 == 0}

    def embed_fn(params, microbatch, key):
        return params * microbatch["x"], microbatch["id"]

    def loss_fn(params, embeddings, rows):
        position = jnp.arange(32)
        hits = (embeddings[1] == position) & (rows["id"] == position) & (rows["even"] == (position % 2 == 0))
        return jaxacc.Mean(jnp.where(hits, embeddings[0] * position, jnp.nan), jnp.ones(32))

    window = jaxacc.split_batch(batch, accumulation_steps=4)
    for grads_of in (jax.jit(jaxacc.two_pass(embed_fn, loss_fn)), run_on(mesh_of(4), loss_fn, embed_fn)):
        assert float(grads_of(jnp.float32(1), window, None).grads) == np.mean(np.arange(32.0) ** 2)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bit(dtype, strict):
    """Parameters and embeddings of 16 bits, no dtype promoted in silence: sums in float32, `1 / weight` not rounded."""
    window = {"x": jnp.ones((7, 3, 2), dtype)}
    embed_fn = lambda params, microbatch, key: {"half": microbatch["x"] @ params, "single": jnp.ones((3, 1))}
    half = lambda params, embeddings, rows: jaxacc.Mean(embeddings["half"], jnp.ones(21, jnp.int32))
    out = run("carry", embed_fn, half)(jnp.ones(2, dtype), window)
    assert out.grads.dtype == jnp.float32
    np.testing.assert_allclose(out.grads, 1, rtol=1e-6)


def test_complex_embeddings(x64):
    """The cotangent of a complex embedding is pulled back as JAX would."""
    x = np.random.default_rng(0).normal(size=(8, 3))
    w = jnp.array([1 + 2j, 0.5 - 1j, -1j])
    embed_fn = lambda params, microbatch, key: (microbatch["x"] @ params) ** 2
    loss_fn = lambda params, embeddings, rows: jaxacc.Mean(jnp.abs(embeddings - jnp.mean(embeddings)) ** 2, jnp.ones(8))
    out = jax.jit(jaxacc.two_pass(embed_fn, loss_fn))(w, jaxacc.split_batch({"x": x}, accumulation_steps=4))
    expected = jax.grad(lambda w: jnp.mean(loss_fn(w, embed_fn(w, {"x": x}, None), None).total))(w)
    assert largest(expected.imag) > 1
    np.testing.assert_allclose(out.grads, expected, rtol=1e-12)


@pytest.mark.parametrize("fold", FOLDS)
def test_memory_does_not_depend_on_a_but_for_the_embeddings(fold):
    """Temp bytes for A = 32 less those for A = 4: less than two copies of the embeddings, 1/32 of one layer's activations.

    The loss compares all rows through their mean, because `B x B` logits would grow with A by themselves.
    """
    rows, width, features = 32, 256, 4
    params = {"layers": jax.ShapeDtypeStruct((6, width, width), jnp.float32), "out": jnp.ones((width, features))}

    def embed_fn(params, microbatch, key):
        hidden, _ = jax.lax.scan(lambda h, layer: (jnp.tanh(h @ layer), None), microbatch["x"], params["layers"])
        return hidden @ params["out"]

    def loss_fn(params, embeddings, rows):
        return jaxacc.Mean(jnp.sum((embeddings - jnp.mean(embeddings, 0, keepdims=True)) ** 2, 1), jnp.ones(len(embeddings)))

    def temp(steps):
        window = {"x": jax.ShapeDtypeStruct((steps, rows, width), jnp.float32)}
        compiled = jax.jit(jaxacc.two_pass(embed_fn, loss_fn, fold=fold)).lower(params, window).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    embeddings = (32 - 4) * rows * features * 4
    assert embeddings / 2 < temp(32) - temp(4) < 2 * embeddings
    assert 2 * embeddings < (32 - 4) * rows * width * 4 / 30


@pytest.mark.parametrize(
    ("embed_fn", "loss_fn", "message"),
    [
        (lambda p, mb, key: jnp.sum(mb["x"], 0) * p, None, r"\(2,\).*microbatch of 3 rows.*every leaf of shape \(3, \.\.\.\)"),
        (lambda p, mb, key: {"a": mb["x"] * p, "b": jnp.sum(p)}, None, r"\['b'\]"),
        (lambda p, mb, key: jnp.ones((3, 2), int), None, "nothing floating"),
        (None, lambda p, e, rows: jnp.sum(e), r"returned a scalar\. It must return jaxacc\.Mean"),
        (None, lambda p, e, rows: (jaxacc.Mean(jnp.sum(e), 1), {}), "two_pass takes no metrics"),
        (None, lambda p, e, rows: jaxacc.Mean(e, jnp.ones_like(e)), r"shape \(12, 2\).*one per row, \(12,\)"),
    ],
)
def test_broken_contracts(embed_fn, loss_fn, message):
    """What `two_pass` would have to guess about is refused while tracing."""
    grads_of = jaxacc.two_pass(embed_fn or (lambda p, mb, key: mb["x"] * p), loss_fn)
    with pytest.raises(ValueError, match=message):
        grads_of(jnp.float32(1), {"x": jnp.ones((4, 3, 2))})


def test_a_forgotten_axis_name_is_an_error():
    """Inside a manual region the negatives of the other replicas would be missing: `two_pass` is named."""
    window = jaxacc.split_batch(clip_batch(16, np.float32), accumulation_steps=1)
    mapped = jax.shard_map(
        jaxacc.two_pass(embed, clip_loss), mesh=mesh_of(2), in_specs=(P(), P(None, "data")), out_specs=P(), check_vma=False
    )
    with pytest.raises(ValueError, match=r"two_pass is called where .* axis_name='data'"):
        mapped(clip_params(jnp.float32), window)
