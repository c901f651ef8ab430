"""From examples to windows: nothing lost, nothing twice, whatever the policy, the schedule and the place of a stop."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxacc
import jaxacc.windows
from jaxacc.windows import Counts, Schedule, TokenBudget, count_windows, parse_schedule, spans, windows

POLICIES = ("process", "carry", "drop")


def examples(rows, epoch=0):
    """Rows that know their epoch and place, of unequal supervised length, with the leaves that padding empties."""
    length = 3
    return [
        {
            "x": np.float64([np.sin(7 * epoch + 3 * r + j) for j in range(length)]),
            "labels": np.int32([100 * epoch + r] * length),
            "mask": np.arange(length) < 1 + r % length,
            "row_ids": np.int32(100 * epoch + r),
        }
        for r in range(rows)
    ]


def real_ids(window):
    """Ids of the real rows, in the order of their positions."""
    order = np.argsort(window["row_position"][window["row_mask"]])
    return window["row_ids"][window["row_mask"]][order].tolist()


def expected_groups(rows, size, last, epochs):
    """The oracle: what each window holds, and what is left waiting, from slices of lists."""
    passes = [[100 * epoch + r for r in range(rows)] for epoch in range(epochs)]
    if last == "carry":
        passes = [list(itertools.chain(*passes))]
    groups = [ids[start : start + size] for ids in passes for start in range(0, len(ids), size)]
    whole = groups if last == "process" else [group for group in groups if len(group) == size]
    left = passes[0][sum(map(len, whole)) :] if last == "carry" else []
    return whole, left


def check_window(window, ids, steps, unit):
    """Shape, order, masks and positions of a window that should hold the rows `ids`."""
    assert {leaf.shape[:2] for leaf in window.values()} == {(steps, unit)}
    assert window["row_mask"].dtype == bool
    assert window["row_position"].dtype == np.int32
    assert real_ids(window) == ids
    assert window["row_mask"].ravel().tolist() == [r < len(ids) for r in range(steps * unit)]
    assert window["row_position"].ravel().tolist() == list(range(steps * unit))
    padding = ~window["row_mask"]
    assert np.all(window["labels"][padding] == -100)
    assert not np.any(window["mask"][padding])
    last = window["x"][window["row_mask"]][-1]
    assert np.all(window["x"][padding] == last)
    assert np.all(window["labels"][~padding] >= 0)


def check_stream(rows, steps, last, unit=1, replicas=1, epochs=3):
    """Every row of several epochs exactly once, or counted as dropped or waiting; window for window as the oracle."""
    source = lambda epoch: examples(rows, epoch)
    stream = windows(source, microbatch=unit // replicas, replicas=replicas, accumulation_steps=steps, last=last)
    groups, left = expected_groups(rows, steps * unit, last, epochs)
    got = [window for _ in range(epochs) for window in stream]
    assert len(got) == len(groups)
    for window, ids in zip(got, groups, strict=True):
        check_window(window, ids, steps, unit)
    total, kept = rows * epochs, sum(map(len, groups))
    counts = stream.counts
    assert counts[:4] == (total, kept, 0, len(groups))
    assert counts.dropped == (total - kept if last == "drop" else 0)
    assert counts.pending == len(left)
    assert counts.carried == (sum(rows * (e + 1) % (steps * unit) for e in range(epochs)) if last == "carry" else 0)
    assert counts.epochs == epochs
    assert len(groups) == count_windows(
        rows, microbatch=unit // replicas, replicas=replicas, accumulation_steps=steps, last=last, epochs=epochs
    )
    flushed = stream.flush()
    assert (flushed is None) == (left == [])
    if flushed is not None:
        check_window(flushed, left, steps, unit)
        assert (stream.counts.pending, stream.counts.examples) == (0, total)


@pytest.mark.parametrize("last", POLICIES)
def test_every_row_once_or_counted(last):
    """Cases 76, 79, 82, 85, 86, 88, 89: L microbatches 1 to 9, A 1 to 4, each policy, three epochs, whole and ragged."""
    for length, steps in itertools.product(range(1, 10), range(1, 5)):
        check_stream(length, steps, last)
        check_stream(2 * length - 1, steps, last, unit=2)


@pytest.mark.parametrize("last", POLICIES)
def test_a_prime_number_of_rows_over_replicas(last):
    """Case 232: rows that four replicas do not divide, each exactly once; all replicas end at about the same index."""
    check_stream(23, 3, last, unit=8, replicas=4)
    (window,) = windows(examples(13), microbatch=2, replicas=4, accumulation_steps=3, last="process")
    per_replica = window["row_mask"].reshape(3, 4, 2).any(axis=2).sum(axis=0)
    assert per_replica.tolist() == [2, 2, 2, 1]


@pytest.mark.parametrize(
    ("rows", "steps", "epochs", "updates"),
    [(5, 2, 2, (6, 5, 4)), (2, 3, 1, (1, 0, 0)), (10, 4, 1, (3, 2, 2)), (7, 3, 2, (6, 4, 4)), (7, 2, 3, (12, 10, 9))],
)
def test_updates_per_epoch(rows, steps, epochs, updates):
    """Cases 79, 80, 82, 89, 102, 110: the number of updates by policy, as the reports state it."""
    for last, expected in zip(POLICIES, updates, strict=True):
        assert count_windows(rows, microbatch=1, accumulation_steps=steps, last=last, epochs=epochs) == expected


def test_error_policy():
    """A full last window passes; rows left over are named, with what to do."""
    geometry = {"microbatch": 2, "accumulation_steps": 2, "last": "error"}
    stream = windows(examples(8), **geometry)
    assert len(list(stream)) == count_windows(8, **geometry) == 2
    for attempt in (lambda: list(windows(examples(9), **geometry)), lambda: count_windows(9, **geometry)):
        with pytest.raises(
            ValueError, match=r"1 of the 9 rows of a pass are left over, and the next window takes 4 rows.*'carry'"
        ):
            attempt()


def test_planted_mistakes_fail(monkeypatch):
    """The checks above see a lost row, a doubled row, a mask that counts padding, and a wrong order."""
    right = jaxacc.windows.stack

    def lost(rows, *args):
        return right([*rows[1:], rows[-1]], *args)

    def wide(rows, *args):
        return right(rows, *args) | {"row_mask": np.ones_like(right(rows, *args)["row_mask"])}

    def strided(rows, steps, unit, fill):
        return {
            name: leaf.reshape(unit, steps, *leaf.shape[2:]).swapaxes(0, 1)
            for name, leaf in right(rows, steps, unit, fill).items()
        }

    for wrong in (lost, wide, strided):
        monkeypatch.setattr(jaxacc.windows, "stack", wrong)
        with pytest.raises(AssertionError):
            check_stream(5, 2, "process", unit=2)
    monkeypatch.setattr(jaxacc.windows, "stack", right)
    check_stream(5, 2, "process", unit=2)

    end_pass = jaxacc.windows.Windows._end_pass
    monkeypatch.setattr(jaxacc.windows.Windows, "_end_pass", lambda self: not end_pass(self))
    for last in ("process", "carry"):
        with pytest.raises(AssertionError):
            check_stream(5, 2, last, unit=2)


@pytest.mark.parametrize(
    "size", [2, parse_schedule("0:2 6:4 14:6", by="examples"), TokenBudget(5)], ids=["int", "ramp", "budget"]
)
@pytest.mark.parametrize("last", POLICIES)
def test_stop_and_resume_anywhere(last, size):
    """Cases 223, 225, 227, 231: after any window, a new stream from the saved state gives the windows still to come."""
    geometry = {"microbatch": 2, "accumulation_steps": size, "last": last, "tokens": "mask", "check_row_ids": True}
    make = lambda state=None: windows(lambda epoch: examples(7, epoch), **geometry, state=state)

    def endless(stream):
        while stream.counts.epochs < 4:
            for window in stream:
                yield real_ids(window), stream.state
        yield stream.counts, stream.state

    whole = list(endless(make()))
    assert len(whole) >= 5
    for stop, (_, state) in enumerate(whole[:-1]):
        saved = jax.tree.map(lambda leaf: np.array(leaf), state)
        restored = jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(saved))
        rest = list(endless(make(restored)))
        assert [ids for ids, _ in rest] == [ids for ids, _ in whole[stop + 1 :]]


def test_resume_with_other_sizes():
    """Case 228: other sizes go on with the waiting rows where these fit into the next window, else refuse."""
    stream = windows(examples(7), microbatch=2, accumulation_steps=2, last="carry")
    assert len(list(stream)) == 1
    assert stream.counts.pending == 3
    other = windows(examples(7), microbatch=1, accumulation_steps=5, last="process", state=stream.state)
    assert [real_ids(window) for window in other] == [[4, 5, 6, 0, 1], [2, 3, 4, 5, 6]]
    for size in (1, TokenBudget(10, most=1)):
        with pytest.raises(ValueError, match=r"3 rows wait, and the next window takes 2\. .*flush"):
            windows(examples(7), microbatch=2, accumulation_steps=size, last="carry", tokens="mask", state=stream.state)


def test_a_broken_loop_goes_on():
    """Cases 92, 231: leaving the loop (to evaluate, say) and coming back loses nothing; two streams do not mix."""
    stream, other = (windows(examples(9), microbatch=1, accumulation_steps=2, last="process") for _ in range(2))
    got = []
    while stream.counts.epochs < 1:
        for window in stream:
            got += real_ids(window)
            break
        next(iter(other))
    assert got == list(range(9))


def test_a_source_that_fails_goes_on():
    """After an exception the pass goes on where it stood: a pass that failed does not look complete."""
    failures = [5]

    def source(epoch):
        for row in examples(8, epoch):
            if failures and row["row_ids"] == failures[0]:
                failures.pop()
                raise OSError("unreachable")
            yield row

    stream = windows(source, microbatch=1, accumulation_steps=2, last="process")
    got = []
    with pytest.raises(OSError, match="unreachable"):
        got.extend(real_ids(window) for window in stream)
    assert stream.counts[:2] == (5, 4)
    got.extend(real_ids(window) for window in stream)
    assert got == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert stream.counts.rows == stream.counts.examples == 8


def test_batches_of_any_size():
    """Case 86: the boundary is the window's, not the loader's; a loader may reuse its buffer."""
    rows, buffer = examples(11), {}

    def batches(epoch):
        for first, size in ((0, 3), (3, 5), (8, 1), (9, 2)):
            for name in rows[0]:
                stacked = np.stack([row[name] for row in rows[first : first + size]])
                buffer.setdefault(name, np.zeros((5, *stacked.shape[1:]), stacked.dtype))[:size] = stacked
            yield {name: leaf[:size] for name, leaf in buffer.items()}

    stream = windows(batches, microbatch=2, accumulation_steps=2, last="process", batched=True)
    for window, ids in zip(stream, ([0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]), strict=True):
        check_window(window, ids, 2, 2)


def test_a_source_by_index():
    """A data set that only has `__getitem__` is read in order, in every pass."""

    class Dataset:
        def __getitem__(self, index):
            return {"x": range(3)[index]}

    stream = windows(Dataset(), microbatch=1, accumulation_steps=3, last="error")
    assert [window["x"].ravel().tolist() for _ in range(2) for window in stream] == [[0, 1, 2]] * 2


def test_fill():
    """Stated values replace the defaults; unnamed leaves repeat the last real row."""
    (window,) = windows(examples(1), microbatch=2, accumulation_steps=1, last="process", fill={"x": 0, "row_ids": -1})
    assert window["x"][0, 1].tolist() == [0, 0, 0]
    assert window["row_ids"].tolist() == [[0, -1]]
    np.testing.assert_array_equal(window["labels"][0, 1], window["labels"][0, 0])
    np.testing.assert_array_equal(window["mask"][0, 1], window["mask"][0, 0])


def squared_error(params, microbatch, key):
    """Summed over supervised tokens, with their number."""
    error = params["w"] * microbatch["x"] - 0.5
    mask = microbatch["mask"]
    return jaxacc.Mean(jnp.sum(jnp.where(mask, error**2, 0.0)), jnp.sum(mask, dtype=jnp.int32))


def oracle(weights, rows):
    """Loss, gradient and denominator on exactly these examples, in NumPy."""
    x, mask = (np.stack([row[name] for row in rows]) for name in ("x", "mask"))
    error = (weights * x - 0.5) * mask
    return np.sum(error**2) / mask.sum(), np.sum(2 * error * x, axis=0) / mask.sum(), mask.sum()


@pytest.mark.parametrize("last", POLICIES)
def test_gradients_equal_the_oracle_on_exactly_those_rows(last, x64):
    """Cases 76, 77, 83: seven rows, windows of four, three epochs; constant A and lost rows would be far off."""
    by_id = {int(row["row_ids"]): row for epoch in range(3) for row in examples(7, epoch)}
    weights = np.float64([1.5, -2.0, 0.25])
    gradient = jax.jit(jaxacc.accumulate(squared_error))
    stream = windows(lambda epoch: examples(7, epoch), microbatch=2, accumulation_steps=2, last=last, tokens="mask")
    passes = itertools.chain.from_iterable(stream for _ in range(3))
    groups = expected_groups(7, 4, last, 3)[0]
    total = 0
    for window, ids in zip(passes, groups, strict=True):
        out = gradient({"w": jnp.asarray(weights)}, window)
        loss, grads, tokens = oracle(weights, [by_id[r] for r in ids])
        np.testing.assert_allclose(out.loss, loss, rtol=1e-12)
        np.testing.assert_allclose(out.grads["w"], grads, rtol=1e-12)
        assert int(out.weight) == tokens
        wrong = oracle(weights, [by_id[r] for r in ids[:-1]])[1]
        assert np.max(np.abs(wrong - grads)) > 1e-3
        total += int(tokens)
    assert stream.counts.tokens == total


def test_a_short_window_on_a_mesh(x64):
    """Case 232 on two devices: five rows over two replicas are one exact update."""
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    step = jaxacc.make_step(squared_error, optax.sgd(1.0), mesh=mesh)
    weights = np.float64([1.5, -2.0, 0.25])
    (window,) = windows(examples(5), microbatch=2, replicas=2, accumulation_steps=2, last="process")
    state, info = step.update(step.init({"w": jnp.asarray(weights)}), jaxacc.place_window(window, mesh))
    np.testing.assert_allclose(weights - np.asarray(state.params["w"]), oracle(weights, examples(5))[1], rtol=1e-12)
    assert int(info.examples) == int(state.ledger.examples) == 5


def test_schedule_by_updates_and_examples():
    """Cases 259, 261: a size holds from the first window that begins at its threshold; the totals agree."""
    schedule = parse_schedule("0:2 2:4 3:6")
    stream = windows(examples(20), microbatch=2, accumulation_steps=schedule, last="process")
    assert [(len(w["row_mask"]), w["row_mask"].sum()) for w in stream] == [(1, 2), (1, 2), (2, 4), (3, 6), (3, 6)]
    assert count_windows(20, microbatch=2, accumulation_steps=schedule, last="process") == 5

    schedule = parse_schedule("0:2 3:6", by="examples")  # crossed within the second window
    stream = windows(examples(11), microbatch=2, accumulation_steps=schedule, last="drop", one_shape=True)
    got = list(stream)
    assert [w["row_mask"].sum() for w in got] == [2, 2, 6]
    assert {w["x"].shape for w in got} == {(3, 2, 3)}
    assert stream.counts.dropped == 1
    assert list(itertools.chain(*map(real_ids, got))) == list(range(10))


@pytest.mark.parametrize("last", POLICIES)
def test_schedules_and_budgets_are_counted_exactly(last):
    """`count_windows` reads nothing and agrees with the stream, over epochs and for every kind of size."""
    tokens = [1 + r % 3 for r in range(13)]
    sizes = [
        (parse_schedule("0:2 3:4 5:8"), 13),
        (parse_schedule("0:2 9:4 20:8", by="examples"), 13),
        (parse_schedule("0:2 9:4 20:8", by="tokens"), tokens),
        (TokenBudget(7), tokens),
        (TokenBudget(9, most=2), tokens),
        (TokenBudget(1000), tokens),
    ]
    for (size, rows), epochs in itertools.product(sizes, (1, 2, 3)):
        geometry = {"microbatch": 1, "replicas": 2, "accumulation_steps": size, "last": last}
        stream = windows(lambda epoch: examples(13, epoch), **geometry, tokens="mask")
        got = [window for _ in range(epochs) for window in stream]
        assert count_windows(rows, **geometry, epochs=epochs) == len(got) == stream.counts.windows
        ids = list(itertools.chain(*map(real_ids, got)))
        assert len(set(ids)) == len(ids) == 13 * epochs - stream.counts.dropped - stream.counts.pending
        assert stream.counts.tokens == sum(int(w["mask"][w["row_mask"]].sum()) for w in got)
        planned = list(spans(13, **geometry, epochs=epochs, tokens=None if rows == 13 else lambda epoch: tokens))
        order = [100 * epoch + r for epoch in range(epochs) for r in range(13)]
        assert [order[span.start : span.start + span.rows] for span in planned] == [real_ids(window) for window in got]
        assert [span.steps for span in planned] == [window["row_mask"].shape[0] for window in got]


def test_spans_without_end():
    """Without a number of epochs the plan goes on, and refuses sizes that no pass can ever fill."""
    geometry = {"microbatch": 1, "accumulation_steps": 3}
    carried = itertools.islice(spans(5, **geometry, last="carry"), 1000)
    assert [span.start for span in carried] == list(range(0, 3000, 3))
    assert [span.start for span in itertools.islice(spans(5, **geometry, last="drop"), 3)] == [0, 5, 10]
    with pytest.raises(ValueError, match="2 rows, a whole pass, fill no window"):
        next(spans(2, **geometry, last="drop"))
    with pytest.raises(ValueError, match="some of them above 0; it gives 0"):
        next(spans(2, microbatch=1, accumulation_steps=TokenBudget(4), last="carry", tokens=lambda epoch: np.zeros(2)))
    with pytest.raises(ValueError, match="rows=0"):
        spans(0, **geometry, last="carry")


def test_token_budget():
    """A window ends with the first whole microbatch index by which it holds the tokens: no padding but at the end."""
    tokens = [1 + r % 3 for r in range(13)]
    size = TokenBudget(7)
    got = list(windows(examples(13), microbatch=2, accumulation_steps=size, last="process", tokens="mask"))
    assert [len(w["row_mask"]) for w in got] == [2, 2, 2, 1]
    assert all(w["row_mask"].all() for w in got[:-1])
    start = 0
    for window in got[:-1]:
        rows = int(window["row_mask"].sum())
        assert sum(tokens[start : start + rows]) >= 7 > sum(tokens[start : start + rows - 2])
        start += rows
    by_function = windows(
        examples(13), microbatch=2, accumulation_steps=size, last="process", tokens=lambda row: int(row["mask"].sum())
    )
    assert [real_ids(w) for w in by_function] == [real_ids(w) for w in got]
    bounded = windows(
        examples(13), microbatch=2, accumulation_steps=TokenBudget(7, most=1), last="process", tokens="mask", one_shape=True
    )
    assert [w["row_mask"].shape for w in bounded] == [(1, 2)] * 7


def with_leaf(row, **leaves):
    """Examples of which one differs."""
    rows = examples(5)
    rows[row] |= leaves
    return rows


def without(row, name):
    """Examples of which one lacks a leaf."""
    rows = examples(5)
    del rows[row][name]
    return rows


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ([], {}, r"no rows in pass 0.*a function of the epoch"),
        (without(3, "mask"), {}, r"row 3 of pass 0 has other leaves.*missing \['mask'\]"),
        (with_leaf(2, y=1), {}, r"row 2 of pass 0 .* not seen before \['y'\]"),
        (with_leaf(4, x=np.zeros(4)), {}, r"leaf 'x' of row 4 of pass 0 is float64 \(4,\).*pad them to one length"),
        (with_leaf(4, x=np.zeros(3, np.float32)), {}, r"leaf 'x' of row 4 of pass 0 is float32"),
        (with_leaf(1, x=[[1.0], [2.0, 3.0]]), {}, r"leaf 'x' of example 1 is ragged"),
        (with_leaf(1, x="text"), {}, r"leaf 'x' of example 1 has dtype <U4.*encode"),
        ([np.zeros(3)], {}, r"example 0 is a ndarray\. It must be a dict"),
        ([{}], {}, r"example 0 is a dict\. It must be a dict of arrays with a leaf"),
        (with_leaf(0, row_mask=True), {}, r"row 0 of pass 0 has \['row_mask'\], which windows writes"),
        (with_leaf(3, x=[0.0, np.nan, 0.0]), {"check_finite": True}, r"leaf 'x' of row 3 of pass 0 has NaN"),
        (with_leaf(3, row_ids=np.int32(1)), {"check_row_ids": True}, r"row 3 of pass 0 repeats row_ids 1"),
        ([{"x": 1.0}], {"check_row_ids": True}, r"check_row_ids=True needs the leaf 'row_ids'"),
        ([{"labels": np.uint8(3)}], {}, r"leaf 'labels' of dtype uint8 cannot hold the fill value -100"),
        ([{"x": 1}], {"fill": {"x": 0.5}}, r"leaf 'x' of dtype int64 cannot hold the fill value 0.5"),
        ([{"x": 1}], {"fill": {"y": 0}}, r"fill names \['y'\], which row 0 of pass 0 has not: its leaves are \['x'\]"),
        ([{"x": np.zeros(2), "y": np.zeros(3)}], {"batched": True}, r"leaves of batch 0 must agree on a leading row axis"),
        ([{"x": 1.0}], {"batched": True}, r"leaves of batch 0 must agree on a leading row axis"),
        ([{"x": 1.0}], {"tokens": "mask"}, r"tokens='mask' is not a leaf of the rows"),
        ([{"x": 1.0}], {"tokens": "x"}, r"tokens='x' must be a mask or a number of tokens"),
        ([{"labels": -100}], {"tokens": "labels"}, r"For labels give a function"),
    ],
)
def test_bad_rows(source, options, message):
    """What was given, the rule, the remedy; the row is named."""
    with pytest.raises(ValueError, match=message):
        list(windows(source, microbatch=1, accumulation_steps=2, last="process", **options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"last": "flush"}, r"last='flush' is not a policy.*process, carry, drop, error"),
        ({"accumulation_steps": 0}, r"accumulation_steps=0 is less than 1"),
        ({"microbatch": 2.5}, r"microbatch=2\.5 is not a whole number"),
        ({"replicas": 0}, r"replicas=0 is less than 1"),
        ({"accumulation_steps": Schedule(((0, 4), (5, 6)))}, r"effective_batch=6 is not divisible by microbatch 4"),
        ({"accumulation_steps": Schedule(((0, 4), (5, 8), (5, 12)))}, r"\[0, 5, 5\] .* must begin with 0 and increase"),
        ({"accumulation_steps": Schedule(((0, 4),), "tokens")}, r"counts tokens, and nothing says how"),
        ({"accumulation_steps": TokenBudget(100)}, r"counts tokens, and nothing says how"),
        ({"accumulation_steps": TokenBudget(0), "tokens": "mask"}, r"must be at least 1"),
        ({"accumulation_steps": TokenBudget(9), "tokens": "mask", "one_shape": True}, r"Give TokenBudget\.most"),
    ],
)
def test_bad_geometry(options, message):
    """Case 80, 259: refused before a row is read."""
    with pytest.raises(ValueError, match=message):
        windows(iter(()), **{"microbatch": 4, "accumulation_steps": 2, "last": "process"} | options)


@pytest.mark.parametrize(
    ("text", "by", "message"),
    [
        ("0:64 1000", "updates", r"'0:64 1000' is not threshold:rows pairs"),
        ("0:64 x:8", "updates", r"is not threshold:rows pairs"),
        ("", "updates", r"must begin with 0 and increase"),
        ("10:64", "updates", r"\[10\] of the schedule must begin with 0"),
        ("0:64 200:128 100:256", "updates", r"must begin with 0 and increase"),
        ("0:0", "updates", r"effective batch below 1"),
        ("0:64", "steps", r"by 'steps' is not known. Use one of updates, examples, tokens"),
    ],
)
def test_bad_schedules(text, by, message):
    """A schedule that is not increasing, or not one."""
    with pytest.raises(ValueError, match=message):
        parse_schedule(text, by=by)


def test_a_generator_is_read_once():
    """The second pass over a generator is an error, not an epoch without rows; nor does it resume silently."""
    stream = windows(iter(examples(4)), microbatch=1, accumulation_steps=2, last="carry")
    assert len(list(stream)) == 2
    with pytest.raises(ValueError, match=r"no rows in pass 1.*a generator can be read only once"):
        list(stream)
    resumed = windows(iter(examples(1)), microbatch=1, accumulation_steps=2, last="carry", state=stream.state._replace(read=2))
    with pytest.raises(ValueError, match=r"ends after 1 rows of pass 1, of which 2 had been read"):
        list(resumed)


def test_counts_start_at_zero():
    """A stream that has not been read has counted nothing."""
    stream = windows(examples(3), microbatch=1, accumulation_steps=2, last="drop")
    assert stream.counts == Counts()
    assert stream.flush() is None
