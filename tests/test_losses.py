"""Losses count what they sum (cases 15, 46, 136, 147 to 149, 151, 153 to 155, 161)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxacc
from jaxacc import losses


def numpy_causal_lm(logits, labels, mask, ignore_index, shift):
    """One position after another, in float64."""
    total, weight = 0.0, 0
    for row in np.ndindex(labels.shape[:-1]):
        for t in range(labels.shape[-1] - shift):
            target = labels[row][t + shift]
            if target != ignore_index and (mask is None or mask[row][t + shift]):
                z = logits[row][t].astype(np.float64)
                total -= z[target] - z.max() - np.log(np.exp(z - z.max()).sum())
                weight += 1
    return total, weight


@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("ignore_index", [-100, 0])
def test_against_numpy(shift, masked, ignore_index):
    """Any shape, mask and ignored label."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, 2, 6, 5)).astype(np.float32)
    labels = np.where(rng.uniform(size=(3, 2, 6)) < 0.3, ignore_index, rng.integers(0, 5, (3, 2, 6)))
    mask = rng.integers(0, 2, (3, 2, 6)) if masked else None
    loss = losses.causal_lm(logits, labels, mask=mask, ignore_index=ignore_index, shift=shift)
    total, weight = numpy_causal_lm(logits, labels, mask, ignore_index, shift)
    assert weight > 0
    assert int(loss.weight) == weight
    assert loss.weight.dtype == jnp.int32
    np.testing.assert_allclose(loss.total, total, rtol=1e-5)


@pytest.mark.parametrize("masked_first", [True, False])
def test_shifted_targets_are_counted(masked_first):
    """Case 148: 2 x 5 unpadded labels have 8 targets, whether position 0 is masked or not; shifted labels have 10."""
    labels = np.ones((2, 5), int)
    if masked_first:
        labels[:, 0] = -100
    assert int(losses.causal_lm(jnp.zeros((2, 5, 3)), labels).weight) == 8
    assert int(losses.causal_lm(jnp.zeros((2, 5, 3)), np.ones((2, 5), int), shift=False).weight) == 10


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_masked_positions_do_not_matter(dtype, strict):
    """NaN and inf logits at masked positions reach neither the value nor the gradient; the sum is float32."""
    labels = jnp.array([[1, 2, -100, -100]])
    logits = jnp.zeros((1, 4, 3), dtype).at[0, 1:].set(jnp.nan).at[0, 2].set(jnp.inf)
    loss, grads = jax.value_and_grad(lambda z: losses.causal_lm(z, labels).total)(logits)
    assert loss.dtype == jnp.float32
    assert float(loss) == pytest.approx(np.log(3), rel=1e-6)
    assert grads.dtype == dtype
    assert bool(jnp.all(jnp.isfinite(grads)))
    assert float(jnp.abs(grads).max()) > 0.3
    empty = losses.causal_lm(logits, jnp.full((1, 4), -100))
    assert (float(empty.total), int(empty.weight)) == (0, 0)


def test_ignored_labels_raise_no_alarm():
    """Under `jax_debug_nans` no intermediate value is NaN: an ignored label of -100 does not index the vocabulary."""
    labels = jnp.array([[1, -100, 2, -100]])
    with jax.debug_nans(True):
        loss, grads = jax.value_and_grad(lambda z: losses.causal_lm(z, labels).total)(jnp.zeros((1, 4, 3)))
    assert float(loss) == pytest.approx(np.log(3), rel=1e-6)
    assert float(jnp.abs(grads).max()) > 0.3


@pytest.mark.parametrize(
    ("logits", "labels", "mask"), [((2, 5, 3), (2, 4), None), ((2, 5), (2, 5), None), ((2, 5, 3), (2, 5), (5,))]
)
def test_shapes_that_do_not_belong_together(logits, labels, mask):
    """The shapes are named."""
    with pytest.raises(ValueError, match="one axis for the vocabulary"):
        losses.causal_lm(jnp.zeros(logits), jnp.zeros(labels, int), mask=None if mask is None else jnp.ones(mask))


PACKED = np.array([[1] * 9 + [2] * 7, [3] * 4 + [1] * 6 + [2] * 6])
PADDED = np.array([[1] * 5 + [2] * 6 + [0] * 5, [7] * 1 + [8] * 12 + [-1] * 3])


def log_softmax(logits):
    """In float64, shifted by the maximum."""
    z = np.asarray(logits, np.float64)
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def sequences_of(labels, segment_ids, counts, shift):
    """The positions and labels of the targets of every sequence, one list per sequence, by walking along the rows."""
    for row in range(len(labels)):
        sequences = {}
        for t in range(labels.shape[1] - shift):
            here, there = segment_ids[row][t], segment_ids[row][t + shift]
            if here == there > 0 and counts[row][t + shift]:
                sequences.setdefault(there, []).append((row, t, labels[row][t + shift]))
        yield from sequences.values()


def numpy_aggregate(logits, sequences, aggregation, constant):
    """`(total, weight)` from the definition, sequence by sequence."""
    log_p = log_softmax(logits)
    per_sequence = [np.array([-log_p[target] for target in sequence]) for sequence in sequences]
    if aggregation == "token_mean":
        return sum(nll.sum() for nll in per_sequence), sum(map(len, per_sequence))
    if aggregation == "sequence_mean":
        return sum(nll.mean() for nll in per_sequence), len(per_sequence)
    return sum(nll.sum() / constant for nll in per_sequence), len(per_sequence)


def text(rows=2, length=16, vocabulary=5, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, length, vocabulary)).astype(np.float32), rng.integers(0, vocabulary, (rows, length))


AGGREGATIONS = [("token_mean", None), ("sequence_mean", None), ("constant", 40)]


@pytest.mark.parametrize(("aggregation", "constant"), AGGREGATIONS)
@pytest.mark.parametrize("segment_ids", [PACKED, PADDED, None])
def test_packing_and_aggregation_against_numpy(aggregation, constant, segment_ids, strict):
    """Every aggregation over rows and over packed segments, with a masked and an ignored label."""
    logits, labels = text()
    mask = np.random.default_rng(1).uniform(size=labels.shape) < 0.7
    labels[0, 3] = -100
    ids = np.ones_like(labels) if segment_ids is None else segment_ids
    sequences = list(sequences_of(labels, ids, mask & (labels != -100), shift=1))
    total, weight = numpy_aggregate(logits, sequences, aggregation, constant)
    loss = losses.causal_lm(logits, labels, mask=mask, segment_ids=segment_ids, aggregation=aggregation, constant=constant)
    assert weight > 0
    assert (int(loss.weight), loss.weight.dtype, loss.total.dtype) == (weight, jnp.int32, jnp.float32)
    np.testing.assert_allclose(loss.total, total, rtol=1e-5)
    per_token = losses.causal_lm(logits, labels, mask=mask).total
    assert (aggregation, segment_ids is None) == ("token_mean", True) or abs(float(per_token) / total - 1) > 0.01


def test_packed_segments_have_no_target_across():
    """Two rows of 16 tokens with 2 and 3 segments have 27 targets; without segment ids there would be 30."""
    logits, labels = text()
    assert int(losses.causal_lm(logits, labels).weight) == 30
    loss, grads = jax.value_and_grad(lambda z: losses.causal_lm(z, labels, segment_ids=PACKED).total)(logits)
    assert int(losses.causal_lm(logits, labels, segment_ids=PACKED).weight) == 27
    assert float(loss) > 0
    silent = np.zeros((2, 16), bool)  # positions without a target of their own
    silent[[0, 0, 1, 1, 1], [8, 15, 3, 9, 15]] = True
    np.testing.assert_array_equal(np.abs(grads).max(-1) == 0, silent)


@pytest.mark.parametrize(("aggregation", "constant"), AGGREGATIONS)
def test_packing_changes_nothing(aggregation, constant):
    """Case 154: sequences packed into rows, padding included, give the loss of the same sequences in rows of their own."""
    logits, labels = text()
    apart = np.full((4, 16), -100)
    apart_logits = np.zeros((4, 16, 5), np.float32)
    for n, (row, segment) in enumerate([(0, 1), (0, 2), (1, 7), (1, 8)]):
        where = PADDED[row] == segment
        apart[n, : where.sum()], apart_logits[n, : where.sum()] = labels[row][where], logits[row][where]
    loss_of = functools.partial(losses.causal_lm, aggregation=aggregation, constant=constant)
    packed, separate = loss_of(logits, labels, segment_ids=PADDED), loss_of(apart_logits, apart)
    naive = loss_of(logits, np.where(PADDED > 0, labels, -100))
    assert int(packed.weight) == int(separate.weight) != int(naive.weight)
    np.testing.assert_allclose(packed.total, separate.total, rtol=1e-6)
    assert abs(float(naive.value / packed.value) - 1) > 1e-3


@pytest.mark.parametrize(("aggregation", "constant"), AGGREGATIONS)
def test_masked_lm_against_numpy(aggregation, constant, strict):
    """Nothing is shifted: a label at position 0 counts, and T labels have T targets."""
    logits, labels = text(rows=3, length=6)
    counts = np.random.default_rng(1).uniform(size=labels.shape) < 0.4
    counts[:, 0], counts[2] = True, False
    sequences = sequences_of(labels, np.ones_like(labels), counts, shift=0)
    total, weight = numpy_aggregate(logits, list(sequences), aggregation, constant)
    by_label, by_mask = np.where(counts, labels, -100), labels
    for given, mask in [(by_label, None), (by_mask, counts), (by_mask, counts.astype(np.float32))]:
        loss = losses.masked_lm(logits, given, mask=mask, aggregation=aggregation, constant=constant)
        assert int(loss.weight) == weight > 0
        np.testing.assert_allclose(loss.total, total, rtol=1e-5)
    assert int(losses.masked_lm(logits, labels).weight) == 18


def numpy_classification(logits, labels, counts, class_weights, smoothing):
    """Example by example and class by class, in float64."""
    log_p, classes = log_softmax(logits), logits.shape[-1]
    total = weight = 0.0
    for i in np.ndindex(labels.shape):
        if counts[i]:
            w = np.ones(classes) if class_weights is None else class_weights
            total -= (1 - smoothing) * w[labels[i]] * log_p[i][labels[i]]
            total -= smoothing / classes * sum(w[c] * log_p[i][c] for c in range(classes))
            weight += w[labels[i]]
    return total, weight


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("shape", [(12,), (2, 3, 4)])
def test_classification_against_numpy(smoothing, weighted, shape, strict):
    """Class weights and smoothing, alone and together, with masked and ignored labels."""
    rng = np.random.default_rng(2)
    logits, labels = rng.normal(size=(*shape, 4)).astype(np.float32), rng.integers(0, 4, shape)
    mask = rng.uniform(size=shape) < 0.8
    ignored = rng.uniform(size=shape) < 0.2
    class_weights = np.array([0.25, 1.0, 4.0, 0.5], np.float32) if weighted else None
    total, weight = numpy_classification(logits, labels, mask & ~ignored, class_weights, smoothing)
    loss = losses.classification(
        logits, np.where(ignored, -100, labels), class_weights=class_weights, label_smoothing=smoothing, mask=mask
    )
    np.testing.assert_allclose(loss, (total, weight), rtol=1e-5)
    assert loss.weight.dtype == (jnp.float32 if weighted else jnp.int32)
    unsmoothed, _ = numpy_classification(logits, labels, mask & ~ignored, class_weights, 0.0)
    assert smoothing == 0 or abs(unsmoothed / total - 1) > 1e-3
    assert not weighted or abs(weight / (mask & ~ignored).sum() - 1) > 0.1


def test_classification_by_hand():
    """Uniform logits: every term is log(C), so that the denominators show: 1 + 3 + 3, and smoothing adds mean(w) = 2."""
    logits, labels, weights = jnp.zeros((3, 2)), jnp.array([0, 1, 1]), jnp.array([1.0, 3.0])
    plain = losses.classification(logits, labels, class_weights=weights)
    smooth = losses.classification(logits, labels, class_weights=weights, label_smoothing=0.5)
    np.testing.assert_allclose(plain, (7 * np.log(2), 7), rtol=1e-6)
    np.testing.assert_allclose(smooth, ((0.5 * 7 + 0.5 * 3 * 2) * np.log(2), 7), rtol=1e-6)


def test_a_class_of_weight_0_is_inert():
    """Neither a logit of -inf at its label nor the gradient there reach the sum."""
    logits = jnp.array([[0.0, -jnp.inf], [0.0, 1.0]])
    labels, weights = jnp.array([1, 0]), jnp.array([2.0, 0.0])
    total, grads = jax.value_and_grad(lambda z: losses.classification(z, labels, class_weights=weights).total)(logits)
    assert float(total) == pytest.approx(2 * np.log(1 + np.e), rel=1e-6)
    assert bool(jnp.all(jnp.isfinite(grads)))
    assert float(jnp.abs(grads[1]).max()) > 0.3


@pytest.mark.parametrize("dtype", [np.uint8, np.int32])
@pytest.mark.parametrize("weighted", [True, False])
def test_segmentation_against_numpy(dtype, weighted, strict):
    """Per pixel, void pixels apart, for labels as they come from image files."""
    rng = np.random.default_rng(3)
    logits, labels = rng.normal(size=(2, 5, 4, 3)).astype(np.float32), rng.integers(0, 3, (2, 5, 4))
    void = rng.uniform(size=labels.shape) < 0.4
    class_weights = np.array([0.5, 2.0, 3.0], np.float32) if weighted else None
    expected = numpy_classification(logits, labels, ~void, class_weights, 0.0)
    loss = losses.segmentation(logits, np.where(void, 255, labels).astype(dtype), class_weights=class_weights)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert 0 < (~void).sum() < void.size
    seven = losses.segmentation(logits, np.where(void, 7, labels).astype(dtype), ignore_index=7, class_weights=class_weights)
    np.testing.assert_allclose(seven, expected, rtol=1e-5)


WEIGHTS = jnp.array([0.25, 1.0, 4.0, 0.5, 2.0])
LOSSES = {
    "causal_lm": losses.causal_lm,
    "sequence_mean": functools.partial(losses.causal_lm, aggregation="sequence_mean"),
    "constant": functools.partial(losses.causal_lm, aggregation="constant", constant=16),
    "masked_lm": losses.masked_lm,
    "masked_lm_sequence_mean": functools.partial(losses.masked_lm, aggregation="sequence_mean"),
    "classification": functools.partial(losses.classification, class_weights=WEIGHTS, label_smoothing=0.1),
    "class_weights": functools.partial(losses.classification, class_weights=WEIGHTS),
    "smoothing": functools.partial(losses.classification, label_smoothing=0.1),
    "segmentation": functools.partial(losses.segmentation, ignore_index=-100),
}


def ragged(rows=8):
    """Rows with 16, 1, 0, 11, ... labels, the larger losses in the shorter rows."""
    logits, labels = text(rows)
    lengths = np.array([16, 2, 0, 11, 5, 1, 0, 8])
    return jnp.asarray(logits * (1 + 16 / (1 + lengths))[:, None, None], jnp.float32), np.where(
        np.arange(16) < lengths[:, None], labels, -100
    )


@pytest.mark.parametrize("name", LOSSES)
def test_any_split_of_the_rows_merges(name):
    """Law 1 for every loss, its gradient included; the mean of the means of the parts is another number."""
    logits, labels = ragged()
    loss_of = LOSSES[name]
    whole = loss_of(logits, labels)
    gradient_of = jax.grad(lambda z, y: loss_of(z, y).total)
    differing = []
    for parts in [(4,), (2, 4, 6), (1, 7), (1, 2, 3, 4, 5, 6, 7)]:
        pieces = list(zip(np.split(logits, parts), np.split(labels, parts), strict=True))
        means = [loss_of(z, y) for z, y in pieces]
        merged = functools.reduce(jaxacc.merge, means)
        np.testing.assert_allclose(merged, whole, rtol=2e-6)
        np.testing.assert_allclose(
            np.concatenate([gradient_of(z, y) for z, y in pieces]), gradient_of(logits, labels), rtol=1e-5, atol=1e-6
        )
        differing.append(abs(float(np.mean([mean.value for mean in means]) / whole.value) - 1))
    assert float(whole.value) > 0
    assert max(differing) > 0.01


def test_aggregation_over_a_window():
    """A window folded in 1, 2 or 8 microbatches has the loss and gradient of mean over sequences, not of mean over tokens."""
    logits, labels = ragged()

    def loss_fn(params, microbatch, key):
        return losses.causal_lm(microbatch["z"] * params["scale"], microbatch["y"], aggregation="sequence_mean")

    outs = [
        jaxacc.accumulate(loss_fn)(
            {"scale": jnp.float32(0.7)}, jaxacc.split_batch({"z": logits, "y": labels}, accumulation_steps=a)
        )
        for a in (1, 2, 8)
    ]
    for out in outs:
        np.testing.assert_allclose((out.loss, out.grads["scale"]), (outs[0].loss, outs[0].grads["scale"]), rtol=1e-5)
        assert int(out.weight) == 5  # rows of 16, 2, 11, 5 and 8 labels
    assert abs(float(outs[0].loss / losses.causal_lm(logits * 0.7, labels).value) - 1) > 0.1


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("name", LOSSES)
def test_uncounted_logits_do_not_matter(name, dtype, strict):
    """NaN and inf where no label counts reach neither value nor gradient; the sum is float32."""
    logits, labels = ragged()
    logits, loss_of = logits.astype(dtype), LOSSES[name]
    aside = np.broadcast_to((labels == -100)[..., None], logits.shape)
    if name in ("causal_lm", "sequence_mean", "constant"):  # position t predicts label t + 1
        aside = np.concatenate([aside[:, 1:], np.ones_like(aside[:, :1])], axis=1)
    poisoned = jnp.where(aside, jnp.where(jnp.arange(5) % 2 == 0, jnp.nan, jnp.inf).astype(dtype)[None, None], logits)
    total, grads = jax.value_and_grad(lambda z: loss_of(z, labels).total)(poisoned)
    assert total.dtype == jnp.float32
    assert float(total) == float(loss_of(logits, labels).total) > 0
    assert grads.dtype == dtype
    np.testing.assert_array_equal(np.abs(grads.astype(np.float32)).max(-1) > 0, ~aside[..., 0])
    empty = loss_of(poisoned, np.full_like(labels, -100))
    assert (float(empty.total), float(empty.weight), float(empty.value)) == (0, 0, 0)


@pytest.mark.parametrize("name", LOSSES)
def test_float64_stays(name, x64):
    """What is computed in float64 is returned in float64."""
    logits, labels = ragged()
    wide = LOSSES[name](logits.astype(jnp.float64) * (1 + 1e-12), labels)
    assert wide.total.dtype == jnp.float64
    assert float(wide.total) != float(LOSSES[name](logits.astype(jnp.float64), labels).total)


def test_labels_outside_of_the_classes():
    """Negative labels never count; one beyond the last class is not taken for another class, with class weights neither."""
    logits, weights = jnp.zeros((3, 2)), jnp.array([1.0, 0.0])
    assert int(losses.segmentation(logits, jnp.array([-100, -1, 1])).weight) == 1
    assert int(losses.causal_lm(logits[None], jnp.array([[0, -1, 1]])).weight) == 1
    assert np.isnan(losses.classification(logits, jnp.array([0, 1, 2])).total)
    assert np.isnan(losses.classification(logits, jnp.array([0, 1, 2]), class_weights=weights).total)


@pytest.mark.parametrize("rowwise", [True, False])
def test_from_mean_undoes_the_division(rowwise, strict):
    """Means over 2, 0 and 6 tokens, the empty one NaN, merge to the mean over tokens; their own mean is another number."""
    tokens = [jnp.array([1.0, 3.0]), jnp.zeros(0), jnp.arange(6.0)]
    weights = [jnp.int32(2), jnp.int32(0), jnp.int32(6)]

    def total(scale):
        means = [jnp.sum(part * scale) / part.size if part.size else jnp.nan * scale for part in tokens]
        if rowwise:
            rows = losses.from_mean(jnp.stack(means), jnp.stack(weights))
            merged = jaxacc.Mean(jnp.sum(rows.total), jnp.sum(rows.weight))
        else:
            merged = functools.reduce(jaxacc.merge, map(losses.from_mean, means, weights))
        return merged.total, merged

    (_, merged), grad = jax.value_and_grad(total, has_aux=True)(jnp.float32(1.0))
    assert (float(merged.total), int(merged.weight), merged.weight.dtype) == (19, 8, jnp.int32)
    assert float(merged.value) == 2.375 != np.mean([2.0, 2.5])
    assert not np.isnan(merged.total)
    assert np.isnan(grad)  # as documented: NaN * 0 in the loss itself, before the adapter sees it


def test_from_mean_takes_python_numbers_and_narrow_means():
    """The total is float32 for a bfloat16 mean; weights beyond int32 and metrics that are integers work."""
    assert losses.from_mean(jnp.bfloat16(1.5), 3) == (4.5, 3)
    assert losses.from_mean(jnp.bfloat16(1.5), 3).total.dtype == jnp.float32
    assert float(losses.from_mean(jnp.int32(2), 2**40).total) == 2.0**41


LOGITS, LABELS = jnp.zeros((2, 5, 3)), jnp.zeros((2, 5), int)


@pytest.mark.parametrize(
    ("call", "given", "remedy"),
    [
        (lambda: losses.causal_lm(LOGITS, LABELS, segment_ids=LABELS[0]), r"segment_ids \(5,\)", "everything else the shape"),
        (lambda: losses.masked_lm(LOGITS, LABELS, mask=LABELS[:1]), r"mask \(1, 5\)", "everything else the shape"),
        (lambda: losses.segmentation(LOGITS, LABELS[:, :4]), r"labels \(2, 4\)", "one axis for the vocabulary or the classes"),
        (lambda: losses.classification(LOGITS, LABELS * 1.0), "labels float32", "argmax"),
        (lambda: losses.classification(LABELS[..., None], LABELS), "logits are int32", "must be floating"),
        (lambda: losses.classification(LOGITS, LABELS, class_weights=jnp.ones(2)), r"class_weights \(2,\)", r"\(3,\)"),
        (lambda: losses.classification(LOGITS, LABELS, label_smoothing=-0.1), "label_smoothing=-0.1", "0 to 1"),
        (lambda: losses.classification(LOGITS, LABELS, label_smoothing=1.5), "label_smoothing=1.5", "0 to 1"),
        (lambda: losses.causal_lm(LOGITS, LABELS, aggregation="mean"), "aggregation='mean'", "'token_mean', 'sequence_mean'"),
        (lambda: losses.masked_lm(LOGITS, LABELS, aggregation="constant"), "constant=None", "Set constant"),
        (lambda: losses.causal_lm(LOGITS, LABELS, aggregation="constant", constant=0), "constant=0", "positive"),
        (lambda: losses.causal_lm(LOGITS, LABELS, constant=16), "'token_mean' with constant=16", "leave it out"),
        (lambda: losses.causal_lm(LOGITS, LABELS, segment_ids=LABELS, shift=False), "shift=False", "ignore_index"),
        (lambda: losses.from_mean(jnp.zeros(2), 4), r"mean \(2,\), weight \(\)", "same shape"),
    ],
)
def test_errors_name_what_was_given_and_the_remedy(call, given, remedy):
    """Before anything is computed."""
    with pytest.raises(ValueError, match=given) as raised:
        call()
    assert raised.match(remedy)


def test_a_row_of_one_token_has_no_target():
    """Nothing is left after the shift, whatever the aggregation."""
    for aggregation, constant in AGGREGATIONS:
        loss = losses.causal_lm(jnp.zeros((2, 1, 3)), jnp.ones((2, 1), int), aggregation=aggregation, constant=constant)
        assert (float(loss.total), int(loss.weight)) == (0, 0)
