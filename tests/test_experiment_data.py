"""From text to windows: every byte predicted once, every row consumed as often as the plan says."""

import itertools

import numpy as np
import pytest

from jaxacc import Split
from jaxacc.experiment import data
from jaxacc.experiment.config import DataConfig, TrainConfig

CONTEXT = 9


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Paragraphs of many lengths."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join("ab" * (3 * n) + "." for n in range(1, 9)))
    return data.load(DataConfig(paths=(str(path),), documents="paragraph", context=CONTEXT, held_out=0.3))


def test_every_byte_is_predicted_once(tmp_path):
    """The targets of all rows are the documents and their end, in order; tokens overlap by one."""
    for name, length in [("a", 1), ("b", CONTEXT - 2), ("c", CONTEXT - 1), ("d", 4 * CONTEXT), ("e", 40)]:
        (tmp_path / name).write_text("".join(chr(97 + i % 26) for i in range(length)))
    corpus = data.load(DataConfig(paths=tuple(str(tmp_path / n) for n in "abcde"), context=CONTEXT, held_out=0.2))
    targets = []
    for rows in (corpus.train, corpus.held_out):
        labels = rows.batch(np.arange(len(rows.targets)))["labels"][:, 1:]
        targets += list(labels[labels != data.IGNORED])
        assert rows.targets.sum() == (labels != data.IGNORED).sum()
    contents = [(tmp_path / n).read_bytes() for n in "abcde"]
    assert sorted(targets) == sorted(itertools.chain(*contents, [data.BOUNDARY] * 5))


def test_held_out_documents_do_not_depend_on_their_order(tmp_path):
    """The split is by content, so it is the same for every seed, run and order of files."""
    for name in "abcdef":
        (tmp_path / name).write_text(name * 30)
    paths = [str(tmp_path / name) for name in "abcdef"]
    one, other = (data.load(DataConfig(paths=tuple(p), context=8, held_out=0.3)) for p in (paths, paths[::-1]))
    assert set(one.held_out.stream) == set(other.held_out.stream) != {data.BOUNDARY}
    assert not set(one.held_out.stream) & set(one.train.stream) - {data.BOUNDARY}


def test_the_default_text_is_ragged_and_held_out_by_document():
    """Help topics: rows of different length, and no paragraph of the held-out text in the training text."""
    corpus = data.load(DataConfig())
    assert 0.02 < np.mean(corpus.train.lengths < 128) < 0.5
    assert 0.05 < corpus.held_out.targets.sum() / corpus.train.targets.sum() < 0.2
    assert 3.0 < data.unigram_entropy(corpus.held_out) < 3.4
    train, held_out = (bytes(np.where(rows.stream == data.BOUNDARY, 0, rows.stream).astype(np.uint8)) for rows in corpus[:2])
    paragraphs = [part for document in held_out.split(b"\0") for part in document.split(b"\n\n") if len(part) > 60]
    assert len(paragraphs) > 50
    assert paragraphs[0] in held_out
    assert not any(part in train for part in paragraphs)


@pytest.mark.parametrize("effective", [1, 4, 6, 64])
@pytest.mark.parametrize("epochs", [1, 3])
def test_epochs_consume_every_row_that_often(corpus, epochs, effective):
    """Including the short last window, whose missing rows have no labels; a new order in every epoch."""
    rows = corpus.train
    plan = data.schedule(TrainConfig(epochs=epochs), rows, effective)
    windows = list(data.windows(rows, plan, Split(effective // 2 or 1, min(effective, 2)), seed=1))
    assert len(windows) == plan.updates == -(-epochs * len(rows.targets) // effective)
    assert sum(w["row_mask"].sum() for w in windows) == plan.examples
    assert all((w["labels"][~w["row_mask"]] == data.IGNORED).all() for w in windows)
    assert sum((w["labels"][..., 1:] != data.IGNORED).sum() for w in windows) == epochs * rows.targets.sum()
    order = [data.order(rows, 1)[p] for p in range(plan.examples)]
    per_epoch = np.reshape(order, (epochs, -1))
    assert (np.sort(per_epoch, axis=1) == np.arange(len(rows.targets))).all()
    assert epochs == 1 or not (per_epoch[0] == per_epoch[1]).all()


def test_windows_go_on_where_they_stopped(corpus):
    """Position is the number of rows consumed."""
    rows, split = corpus.train, Split(2, 2)
    plan = data.schedule(TrainConfig(epochs=2), rows, 4)
    whole = list(data.windows(rows, plan, split, seed=3))
    for stop in range(len(whole)):
        rest = list(data.windows(rows, plan, split, seed=3, start=4 * stop))
        assert len(rest) == len(whole) - stop
        assert all((a[name] == b[name]).all() for a, b in zip(rest, whole[stop:], strict=True) for name in a)


def test_token_durations_are_exact(corpus):
    """As many windows as reach the tokens, and not one more."""
    rows, split = corpus.train, Split(2, 2)
    total = int(rows.targets.sum())
    for tokens in (1, 30, total, total + 1, 3 * total + 17):
        plan = data.schedule(TrainConfig(tokens=tokens, seed=5), rows, 4)
        counts = [(w["labels"][..., 1:] != data.IGNORED).sum() for w in data.windows(rows, plan, split, seed=5)]
        assert len(counts) == plan.updates
        assert sum(counts[:-1]) < tokens <= sum(counts)


def test_held_out_windows_cover_every_row_once(corpus):
    """With padding that does not count."""
    rows = corpus.held_out
    windows = list(data.held_out_windows(rows, Split(2, 2)))
    assert sum(w["row_mask"].sum() for w in windows) == len(rows.targets)
    assert sum((w["labels"][..., 1:] != data.IGNORED).sum() for w in windows) == rows.targets.sum()


def test_the_fingerprint_sees_every_token(tmp_path):
    """And the context, which cuts the rows."""
    (tmp_path / "a").write_text("x" * 50)
    (tmp_path / "b").write_text("y" * 50)
    config = DataConfig(paths=(str(tmp_path / "a"), str(tmp_path / "b")), context=8)
    before = data.load(config).fingerprint
    assert data.load(config).fingerprint == before
    (tmp_path / "a").write_text("x" * 49 + "z")
    assert data.load(config).fingerprint != before
