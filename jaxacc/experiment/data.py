"""Windows for the runner: planned as spans of rows, read by Grain ahead of the step, placed on the devices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxacc._rows import ROW_POSITION
from jaxacc._sizes import Schedule, Span, TokenBudget, parse_schedule, spans, token_sums
from jaxacc._split import ROW_MASK, Split
from jaxacc._tree import PyTree
from jaxacc.experiment.config import BatchConfig, Config, InputConfig, UserError
from jaxacc.experiment.rows import Examples


class RunPlan(NamedTuple):
    """The windows of a whole run, before a row is read.

    Attributes:
      spans: `(U, 3)` int64, for every window: position of its first row in the order of all epochs, its rows, its `A`.
      epoch_rows: rows of an epoch, `R`.
      left: rows at the end of the last epoch that no window takes (`last = "drop"`).
    """

    spans: np.ndarray
    epoch_rows: int
    left: int

    @property
    def updates(self) -> int:
        """Windows of the run."""
        return len(self.spans)

    def counts(self, windows: int) -> dict[str, int]:
        """What became of the rows in the first `windows` windows: in them, dropped, carried over the end of an epoch."""
        starts, rows, _ = self.spans[:windows].T
        examples = int(rows.sum())
        reached = int(starts[-1] + rows[-1]) if windows else 0
        if windows == self.updates:
            reached += self.left
        crossed = (starts + rows - 1) // self.epoch_rows - starts // self.epoch_rows  # ends of epochs within the window
        before = self.epoch_rows - starts % self.epoch_rows
        carried = crossed * before + self.epoch_rows * crossed * (crossed - 1) // 2
        return {"examples": examples, "dropped": reached - examples, "carried": int(carried.sum())}


def order(rows: int, seed: int) -> Any:
    """The endless order of the rows: entry `p` is the row at position `p`, shuffled anew in every epoch."""
    import grain  # several seconds

    return grain.MapDataset.range(rows).seed(seed).shuffle().repeat()


def sizes(batch: BatchConfig, split: Split) -> int | Schedule | TokenBudget:
    """What decides the accumulation steps of a window."""
    if batch.schedule is not None:
        return parse_schedule(batch.schedule, by=batch.schedule_by)
    if batch.tokens is not None:
        return TokenBudget(batch.tokens, most=split.accumulation_steps)
    return split.accumulation_steps


def plan_run(config: Config, split: Split, rows: Examples) -> RunPlan:
    """The windows that the stated duration takes, exactly; what `"carry"` leaves at the end of the run is a last short one.

    Raises:
      UserError: rows that fill no window, or are left over with `last = "error"`.
    """
    train, size, length = config.train, sizes(config.batch, split), len(rows.targets)
    tokens = _tokens_of_epoch(rows, train.seed)
    counted = isinstance(size, TokenBudget) or (isinstance(size, Schedule) and size.by == "tokens")
    planned = spans(
        length, microbatch=split.microbatch, accumulation_steps=size, last=config.batch.last, replicas=split.replicas,
        epochs=train.epochs, tokens=tokens if counted else None,
    )  # fmt: skip
    try:
        if train.updates is not None:
            chosen = list(islice(planned, train.updates))
        elif train.tokens is not None:
            chosen = list(_until(planned, train.tokens, token_sums(length, tokens)))
        else:
            chosen = list(planned)
    except ValueError as error:
        raise UserError(f"[batch] {error}") from error
    left = 0
    if train.epochs is not None:
        end, reached = train.epochs * length, chosen[-1].start + chosen[-1].rows if chosen else 0
        left = end - reached
        if left and config.batch.last == "carry":
            steps = max(chosen[-1].steps if chosen else 1, -(-left // (split.microbatch * split.replicas)))
            chosen.append(Span(reached, left, steps))
            left = 0
    if not chosen:
        raise UserError(f"[batch] {length} rows fill no window of {split.effective_batch}, and last='drop' leaves them out.")
    return RunPlan(np.array(chosen, np.int64), length, left)


def _until(planned: Iterator[Span], tokens: int, tokens_in: Callable[[int, int], int]) -> Iterator[Span]:
    """As many windows as hold so many tokens."""
    for span in planned:
        yield span
        tokens -= tokens_in(span.start, span.rows)
        if tokens <= 0:
            return


def _tokens_of_epoch(rows: Examples, seed: int) -> Callable[[int], np.ndarray]:
    """`tokens(epoch)`: the supervised tokens of the rows in their order."""
    length = len(rows.targets)

    def tokens(epoch: int) -> np.ndarray:
        sequence = order(length, seed)
        return rows.targets[[sequence[position] for position in range(epoch * length, (epoch + 1) * length)]]

    return tokens


def held_out_plan(rows: Examples, split: Split) -> RunPlan:
    """All held-out rows, once, in windows of the training shape."""
    length = len(rows.targets)
    whole = spans(
        length, microbatch=split.microbatch, accumulation_steps=split.accumulation_steps, last="process",
        replicas=split.replicas, epochs=1,
    )  # fmt: skip
    return RunPlan(np.array(list(whole), np.int64), length, 0)


class Reader(NamedTuple):
    """Reads windows by their number in the plan: the part of each that one process holds. Grain's workers pickle it.

    Attributes:
      examples: the rows.
      sequence: which row is at a position.
      spans: of the plan.
      steps: least accumulation steps of a window; shorter ones are padded.
      columns: `(C,)`, which of the `m·D` rows of a microbatch index.
      unit: `m·D`.
    """

    examples: Examples
    sequence: Sequence[int]
    spans: np.ndarray
    steps: int
    columns: np.ndarray
    unit: int

    def __call__(self, number: int) -> dict[str, np.ndarray]:
        """Leaves `(A, C, ...)`: filled microbatch by microbatch, padded in the tail, with `row_mask` and `row_position`."""
        start, rows, steps = map(int, self.spans[number])
        shape = (max(steps, self.steps), len(self.columns))
        position = np.arange(shape[0], dtype=np.int32)[:, None] * np.int32(self.unit) + self.columns.astype(np.int32)
        real = position < rows
        wanted, place = np.unique(np.minimum(position, rows - 1), return_inverse=True)
        read = self.examples.batch([self.sequence[start + int(p)] for p in wanted])
        window = {name: leaf[place.ravel()].reshape(*shape, *leaf.shape[1:]) for name, leaf in read.items()}
        for name, value in self.examples.fill.items():
            window[name][~real] = value
        return {**window, ROW_MASK: real, ROW_POSITION: position}


def reader(
    examples: Examples, sequence: Sequence[int], plan: RunPlan, split: Split, sharding: NamedSharding | None, *, steps: int = 1
) -> Reader:
    """A `Reader` of what this process holds of every window."""
    unit = split.microbatch * split.replicas
    return Reader(examples, sequence, plan.spans, steps, _columns(sharding, unit), unit)


def _columns(sharding: NamedSharding | None, unit: int) -> np.ndarray:
    """The rows of a microbatch index that lie on devices of this process."""
    if sharding is None:
        return np.arange(unit)
    held = sharding.addressable_devices_indices_map((1, unit)).values()
    return np.unique(np.concatenate([np.arange(unit)[index[1]] for index in held if index is not None]))


def window_sharding(mesh: jax.sharding.Mesh | None) -> NamedSharding | None:
    """Rows over the replicas."""
    return None if mesh is None else NamedSharding(mesh, P(None, "data"))


def place(window: PyTree, sharding: NamedSharding | None) -> PyTree:
    """What this process holds of a window, on its devices."""
    if sharding is None:
        return jax.device_put(window)
    return jax.tree.map(lambda leaf: jax.make_array_from_process_local_data(sharding, leaf), window)


def read_ahead(
    reader: Callable[[int], PyTree], numbers: range, sharding: NamedSharding | None, config: InputConfig
) -> Iterator[PyTree]:
    """The windows of these numbers, on the devices, `config.prefetch` of them read and placed ahead of their use."""
    import grain
    from absl import flags

    options = grain.ReadOptions(num_threads=min(config.prefetch, 4), prefetch_buffer_size=config.prefetch)
    windows = grain.MapDataset.range(numbers.start, numbers.stop).map(reader).to_iter_dataset(options)
    if config.workers:
        flags.FLAGS.mark_as_parsed()  # Grain reads absl flags, which nobody here parses
        windows = windows.mp_prefetch(grain.MultiprocessingOptions(num_workers=config.workers))
    windows = windows.map(functools.partial(place, sharding=sharding))
    windows = grain.experimental.ThreadPrefetchIterDataset(windows, prefetch_buffer_size=config.prefetch)
    with closing(iter(windows)) as iterator:
        yield from iterator
