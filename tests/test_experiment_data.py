"""From text to windows: every byte predicted once, every row consumed as often as the plan says."""

import itertools
import time

import numpy as np
import pytest

from jaxacc import Split
from jaxacc.experiment import data
from jaxacc.experiment.config import BatchConfig, Config, DataConfig, InputConfig, TrainConfig, UserError
from jaxacc.experiment.rows import IGNORED
from jaxacc.experiment.sheet import entropy
from jaxacc.experiment.sources import load
from jaxacc.experiment.tokens import BOUNDARY

CONTEXT = 9
SPLIT = Split(2, 2)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Paragraphs of many lengths."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join("ab" * (3 * n) + "." for n in range(1, 9)))
    return load(DataConfig(paths=(str(path),), documents="paragraph", context=CONTEXT, held_out=0.3))


def test_every_byte_is_predicted_once(tmp_path):
    """The targets of all rows are the documents and their end, in order; tokens overlap by one."""
    for name, length in [("a", 1), ("b", CONTEXT - 2), ("c", CONTEXT - 1), ("d", 4 * CONTEXT), ("e", 40)]:
        (tmp_path / name).write_text("".join(chr(97 + i % 26) for i in range(length)))
    corpus = load(DataConfig(paths=tuple(str(tmp_path / n) for n in "abcde"), context=CONTEXT, held_out=0.2))
    targets = []
    for rows in (corpus.train, corpus.held_out):
        labels = rows.batch(np.arange(len(rows.targets)))["labels"][:, 1:]
        targets += list(labels[labels != IGNORED])
        assert rows.targets.sum() == (labels != IGNORED).sum()
    contents = [(tmp_path / n).read_bytes() for n in "abcde"]
    assert sorted(targets) == sorted(itertools.chain(*contents, [BOUNDARY] * 5))


def test_held_out_documents_do_not_depend_on_their_order(tmp_path):
    """The split is by content, so it is the same for every seed, run and order of files."""
    for name in "abcdef":
        (tmp_path / name).write_text(name * 30)
    paths = [str(tmp_path / name) for name in "abcdef"]
    one, other = (load(DataConfig(paths=tuple(p), context=8, held_out=0.3)) for p in (paths, paths[::-1]))
    assert set(one.held_out.stream) == set(other.held_out.stream) != {BOUNDARY}
    assert not set(one.held_out.stream) & set(one.train.stream) - {BOUNDARY}


def test_the_default_text_is_ragged_and_held_out_by_document():
    """Help topics: rows of different length, and no paragraph of the held-out text in the training text."""
    corpus = load(DataConfig())
    assert 0.02 < np.mean(corpus.train.lengths < 128) < 0.5
    assert 0.05 < corpus.held_out.targets.sum() / corpus.train.targets.sum() < 0.2
    assert 3.0 < entropy(corpus.held_out.label_counts()) < 3.4
    train, held_out = (bytes(np.where(rows.stream == BOUNDARY, 0, rows.stream).astype(np.uint8)) for rows in corpus[:2])
    paragraphs = [part for document in held_out.split(b"\0") for part in document.split(b"\n\n") if len(part) > 60]
    assert len(paragraphs) > 50
    assert paragraphs[0] in held_out
    assert not any(part in train for part in paragraphs)


class Numbered:
    """Rows that hold their own number, with 1 to 5 targets."""

    def __init__(self, rows=19):
        self.targets = 1 + np.arange(rows) * 7 % 5
        self.fill = {"labels": IGNORED}

    def batch(self, indices):
        tokens = np.repeat(np.asarray(indices)[:, None], 6, axis=1)
        return {"tokens": tokens, "labels": np.where(np.arange(6) <= self.targets[indices][:, None], tokens, IGNORED)}


ROWS = Numbered()


def plan_of(rows, split=SPLIT, *, seed=3, **stated):
    """The plan of a config that states these batch options and one duration."""
    durations = {name: stated.pop(name) for name in ("updates", "epochs", "tokens") if name in stated}
    budget = {"tokens": stated.pop("budget")} if "budget" in stated else {}
    return data.plan_run(Config(batch=BatchConfig(**stated, **budget), train=TrainConfig(seed=seed, **durations)), split, rows)


def windows_of(rows, plan, split=SPLIT, *, seed=3, start=0, steps=1):
    reader = data.reader(rows, data.order(len(rows.targets), seed), plan, split, None, steps=steps)
    return [reader(number) for number in range(start, plan.updates)]


def real(window):
    """The rows that a window holds."""
    return window["tokens"][window["row_mask"]][:, 0].tolist()


@pytest.mark.parametrize("last", ["process", "carry", "drop"])
@pytest.mark.parametrize(("epochs", "steps"), [(1, 1), (3, 1), (2, 3), (3, 4)])
def test_epochs_consume_every_row_that_often(epochs, steps, last):
    """Or count it as dropped; in a new order in every epoch; padding repeats a row without labels."""
    rows, split = ROWS, Split(2, steps)
    plan = plan_of(rows, split, epochs=epochs, last=last)
    windows = windows_of(rows, plan, split)
    length, size = len(rows.targets), split.effective_batch
    expected = {
        "process": epochs * -(-length // size), "carry": -(-epochs * length // size), "drop": epochs * (length // size),
    }  # fmt: skip
    assert plan.updates == len(windows) == expected[last]
    consumed = [row for window in windows for row in real(window)]
    order = [data.order(length, 3)[p] for p in range(epochs * length)]
    counts = plan.counts(plan.updates)
    if last == "drop":
        kept = length // size * size
        order = [row for epoch in range(epochs) for row in order[epoch * length : epoch * length + kept]]
        assert counts["dropped"] == epochs * (length - kept)
    assert consumed == order
    assert counts["examples"] == len(order) == epochs * length - counts["dropped"]
    assert len({tuple(order[e * length : (e + 1) * length]) for e in range(epochs)}) == epochs or last == "drop"
    for window in windows:
        padding = ~window["row_mask"]
        assert (window["labels"][padding] == IGNORED).all()
        assert (np.diff(window["row_mask"].ravel().astype(int)) <= 0).all()
        assert window["row_position"].ravel().tolist() == list(range(size))
    edges = [length * e for e in range(1, epochs) if length * e % size] if last == "carry" else []
    assert counts["carried"] == sum(edge % size for edge in edges)


def test_windows_go_on_where_they_stopped():
    """Position is the number of windows: read from any of them on, they are the same."""
    rows = ROWS
    plan = plan_of(rows, epochs=2, last="process")
    whole = windows_of(rows, plan)
    for stop in range(len(whole)):
        rest = list(data.read_ahead(data.reader(rows, data.order(len(rows.targets), 3), plan, SPLIT, None),
                                    range(stop, plan.updates), None, InputConfig(prefetch=2)))  # fmt: skip
        assert len(rest) == len(whole) - stop
        assert all((a[name] == b[name]).all() for a, b in zip(rest, whole[stop:], strict=True) for name in b)


def test_token_durations_are_exact():
    """As many windows as reach the tokens, and not one more."""
    rows = ROWS
    total = int(rows.targets.sum())
    for tokens in (1, 30, total, total + 1, 3 * total + 17):
        plan = plan_of(rows, tokens=tokens)
        counts = [(w["labels"][..., 1:] != IGNORED).sum() for w in windows_of(rows, plan)]
        assert len(counts) == plan.updates
        assert sum(counts[:-1]) < tokens <= sum(counts)


def test_schedules_and_budgets():
    """The effective batch follows the thresholds; a budget ends a window with the first microbatch that reaches it."""
    rows = ROWS
    plan = plan_of(rows, Split(2, 4), microbatch=2, schedule="0:2 3:4 5:8", updates=7)
    assert plan.spans[:, 1].tolist() == [2, 2, 2, 4, 4, 8, 8]
    assert [w["row_mask"].shape for w in windows_of(rows, plan, Split(2, 4))] == [(r // 2, 2) for r in plan.spans[:, 1]]
    by_examples = plan_of(rows, Split(2, 4), microbatch=2, schedule="0:2 5:8", schedule_by="examples", updates=5)
    assert by_examples.spans[:, 1].tolist() == [2, 2, 2, 8, 8]
    by_tokens = plan_of(rows, Split(2, 4), microbatch=2, schedule="0:2 15:8", schedule_by="tokens", updates=5)
    budget = plan_of(rows, Split(2, 4), microbatch=2, accumulation_steps=4, budget=18, updates=5)
    for chosen in (by_tokens, budget):
        windows = windows_of(rows, chosen, Split(2, 4), steps=4 if chosen is budget else 1)
        tokens = [(w["labels"][..., 1:] != IGNORED).sum(axis=(1, 2)) for w in windows]
        if chosen is budget:
            assert {w["row_mask"].shape for w in windows} == {(4, 2)}
            steps = [next((a for a, n in enumerate(np.cumsum(t), 1) if n >= 18), 4) for t in tokens]
            assert [rows_of // 2 for rows_of in chosen.spans[:, 1]] == steps
            assert len(set(steps)) > 1
        else:
            before = np.concatenate([[0], np.cumsum([t.sum() for t in tokens])])[:-1]
            assert chosen.spans[:, 1].tolist() == [8 if n >= 15 else 2 for n in before]
            assert len(set(chosen.spans[:, 1].tolist())) == 2


def test_processes_read_their_own_columns():
    """The parts of two processes are the window; each asks only for the rows it holds."""
    rows, split = ROWS, Split(2, 2, replicas=2)
    plan, asked = plan_of(rows, split, epochs=1, last="process"), []

    class Counting:
        fill, targets = rows.fill, rows.targets

        def batch(self, indices):
            asked.extend(indices)
            return rows.batch(indices)

    whole = windows_of(rows, plan, split)
    sequence = data.order(len(rows.targets), 3)
    parts = [data.Reader(Counting(), sequence, plan.spans, 1, np.arange(2) + 2 * p, 4) for p in range(2)]
    for number, window in enumerate(whole):
        asked.clear()
        both = [part(number) for part in parts]
        assert all((np.concatenate([b[name] for b in both], axis=1) == window[name]).all() for name in window)
        assert len(asked) <= window["row_mask"].sum() + 1  # one more where a process has padding only


def test_reading_overlaps_the_step():
    """While the step runs, and nobody asks, the next windows are read; without prefetch none is (`benchmarks/input.py`)."""
    for prefetch in (0, 2):
        begun = []
        read = lambda number, begun=begun: begun.append(number) or {"x": np.zeros((1, 1))}
        windows = data.read_ahead(read, range(12), None, InputConfig(prefetch=prefetch))
        next(windows)
        limit = time.monotonic() + (20 if prefetch else 0.2)
        while len(begun) < 2 and time.monotonic() < limit:
            time.sleep(0.01)  # the step
        assert (len(begun) > 1) == (prefetch > 0)
        windows.close()


def test_worker_processes_read_the_same():
    """Rows, order and plan travel to Grain's workers; the windows come in order."""
    plan = plan_of(ROWS, epochs=1, last="process")
    reader = data.reader(ROWS, data.order(19, 3), plan, SPLIT, None)
    read = list(data.read_ahead(reader, range(plan.updates), None, InputConfig(workers=2)))
    assert len(read) == plan.updates
    assert all((a[name] == b[name]).all() for a, b in zip(read, windows_of(ROWS, plan), strict=True) for name in b)


def test_bad_rows_reach_the_caller():
    """What reading ahead finds is raised where the window is asked for, as it is."""

    def read(number):
        if number == 2:
            raise UserError("row 7 is bad")
        return {"x": np.full((1, 1), number)}

    for prefetch in (0, 2):
        windows = data.read_ahead(read, range(4), None, InputConfig(prefetch=prefetch))
        assert [int(next(windows)["x"][0, 0]) for _ in range(2)] == [0, 1]
        with pytest.raises(UserError, match="row 7 is bad"):
            next(windows)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"last": "drop", "epochs": 1}, "fill no window"),
        ({"last": "drop", "updates": 3}, "fill no window, and last='drop' leaves them out each time"),
        ({"last": "error", "epochs": 1}, "left over"),
    ],
)
def test_windows_that_cannot_be_made(options, said):
    with pytest.raises(UserError, match=said):
        plan_of(ROWS, Split(100, 7), **options)


def test_held_out_windows_cover_every_row_once(corpus):
    """With padding that does not count."""
    rows = corpus.held_out
    plan = data.held_out_plan(rows, SPLIT)
    reader = data.reader(rows, range(len(rows.targets)), plan, SPLIT, None)
    windows = [reader(number) for number in range(plan.updates)]
    assert sum(w["row_mask"].sum() for w in windows) == len(rows.targets)
    assert sum((w["labels"][..., 1:] != IGNORED).sum() for w in windows) == rows.targets.sum()


def test_the_fingerprint_sees_every_token(tmp_path):
    """And the context, which cuts the rows."""
    (tmp_path / "a").write_text("x" * 50)
    (tmp_path / "b").write_text("y" * 50)
    config = DataConfig(paths=(str(tmp_path / "a"), str(tmp_path / "b")), context=8)
    before = load(config).fingerprint
    assert load(config).fingerprint == before
    (tmp_path / "a").write_text("x" * 49 + "z")
    assert load(config).fingerprint != before
