"""Rows to windows: a row order with a position, the last window, and the held-out windows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from jaxacc._split import Split, split_batch
from jaxacc.experiment.config import TrainConfig
from jaxacc.experiment.rows import IGNORED as IGNORED
from jaxacc.experiment.rows import Examples
from jaxacc.experiment.sources import Corpus as Corpus
from jaxacc.experiment.sources import load as load
from jaxacc.experiment.tokens import BOUNDARY as BOUNDARY
from jaxacc.experiment.tokens import VOCABULARY as VOCABULARY


class Schedule(NamedTuple):
    """The run in rows: windows take `effective_batch` rows of the order, the last one what is left.

    Attributes:
      updates: windows of the whole run.
      examples: rows of the whole run.
    """

    updates: int
    examples: int


def order(rows: Examples, seed: int) -> Any:
    """The endless order of the rows: entry `p` is the row at position `p`, shuffled anew in every epoch."""
    import grain  # several seconds

    return grain.MapDataset.range(len(rows.targets)).seed(seed).shuffle().repeat()


def schedule(train: TrainConfig, rows: Examples, effective_batch: int) -> Schedule:
    """How many windows and rows the stated duration takes, exactly."""
    if train.updates is not None:
        return Schedule(train.updates, train.updates * effective_batch)
    if train.epochs is not None:
        examples = train.epochs * len(rows.targets)
        return Schedule(-(-examples // effective_batch), examples)
    assert train.tokens is not None
    epochs, missing = divmod(train.tokens, int(rows.targets.sum()))
    position = epochs * len(rows.targets)
    if missing:
        sequence = order(rows, train.seed)
        while missing > 0:
            missing -= int(rows.targets[sequence[position]])
            position += 1
    updates = -(-position // effective_batch)
    return Schedule(updates, updates * effective_batch)


def windows(rows: Examples, plan: Schedule, split: Split, *, seed: int, start: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """The windows from position `start` (rows consumed so far) to the end: leaves `(A, m * D, ...)`."""
    sequence = order(rows, seed)
    for first in range(start, plan.examples, split.effective_batch):
        indices = [sequence[position] for position in range(first, min(first + split.effective_batch, plan.examples))]
        yield _window(rows, indices, split)


def held_out_windows(rows: Examples, split: Split) -> Iterator[dict[str, np.ndarray]]:
    """All held-out rows, once, in windows of the training shape."""
    for first in range(0, len(rows.targets), split.effective_batch):
        yield _window(rows, range(first, min(first + split.effective_batch, len(rows.targets))), split)


def unigram_entropy(rows: Examples) -> float:
    """Entropy in nats of the frequencies of the targets: what a model without context could reach at best."""
    counts = rows.label_counts()
    frequencies = counts[counts > 0] / counts.sum()
    return float(-np.sum(frequencies * np.log(frequencies)))


def _window(rows: Examples, indices: Any, split: Split) -> dict[str, np.ndarray]:
    """A window of the split's shape; missing rows are filled, without labels and with `row_mask` False."""
    real = len(indices)
    filled = [*indices, *[indices[-1]] * (split.effective_batch - real)]
    batch = rows.batch(filled)
    batch["labels"][real:] = IGNORED
    batch["row_mask"] = np.arange(len(filled)) < real
    return split_batch(batch, accumulation_steps=split.accumulation_steps)
