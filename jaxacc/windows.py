"""Host side: examples to windows, with what the last window of an epoch becomes, row positions, and schedules of A."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice, pairwise
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from jaxacc._split import ROW_IDS, ROW_MASK, solve_split

ROW_POSITION = "row_position"
FILL = {"labels": -100, "mask": 0}
"""What padding rows hold by default, in leaves of these names; in all other leaves they repeat the last real row."""

Policy = Literal["process", "carry", "drop", "error"]
"""What becomes of the rows that do not fill the last window of a pass."""

Unit = Literal["updates", "examples", "tokens"]
"""What the thresholds of a schedule count."""

Row = Mapping[str, np.ndarray]
Window = dict[str, np.ndarray]
Source = Iterable[Mapping[str, Any]] | Callable[[int], Iterable[Mapping[str, Any]]]


class Schedule(NamedTuple):
    """An effective batch that changes at window boundaries: `parse_schedule` makes one.

    Attributes:
      steps: `((threshold, effective batch), ...)`; the first threshold is 0 and they increase.
      by: what the thresholds count: `"updates"` (windows attempted), `"examples"` or `"tokens"` in the windows so far.
    """

    steps: tuple[tuple[int, int], ...]
    by: Unit = "updates"


class TokenBudget(NamedTuple):
    """Windows that end with the first whole microbatch index by which they hold at least `tokens` supervised tokens.

    Attributes:
      tokens: supervised tokens.
      most: a window ends after so many accumulation steps at the latest; None for no bound.
    """

    tokens: int
    most: int | None = None


class Counts(NamedTuple):
    """What became of the rows, exactly: `rows == examples + dropped + pending`.

    Attributes:
      rows: rows read from the source.
      examples: rows put into windows.
      tokens: supervised tokens put into windows, if `windows` was told how to count them; else 0.
      windows: windows made.
      dropped: rows left out at the end of a pass (`last="drop"`).
      carried: rows that the end of a pass left for the next one (`last="carry"`), added up over the passes.
      epochs: passes over the source that are complete.
    """

    rows: int = 0
    examples: int = 0
    tokens: int = 0
    windows: int = 0
    dropped: int = 0
    carried: int = 0
    epochs: int = 0

    @property
    def pending(self) -> int:
        """Rows read that wait for their window to fill."""
        return self.rows - self.examples - self.dropped


class State(NamedTuple):
    """Where a `Windows` stands: a plain pytree to save beside the model. `windows(..., state=state)` goes on from it.

    Attributes:
      counts: what became of the rows so far.
      read: rows of the open pass that have been read.
      pending: the rows that wait for their window to fill, in order.
    """

    counts: Counts = Counts()
    read: int = 0
    pending: tuple[Row, ...] = ()


class _Plan(NamedTuple):
    unit: int  # m·D, the rows of one microbatch index
    size: int | Schedule | TokenBudget  # an int is the effective batch
    last: Policy


class _Input(NamedTuple):
    batched: bool
    tokens: Callable[[Row], int]
    fill: Mapping[str, Any] | None
    check_row_ids: bool
    check_finite: bool


def windows(
    source: Source,
    *,
    microbatch: int,
    accumulation_steps: int | Schedule | TokenBudget,
    last: Policy,
    replicas: int = 1,
    batched: bool = False,
    fill: Mapping[str, Any] | None = None,
    tokens: str | Callable[[Row], int] | None = None,
    one_shape: bool = False,
    check_row_ids: bool = False,
    check_finite: bool = False,
    state: State | None = None,
) -> Windows:
    """Group the rows of a source into windows: every leaf `(A, m·D, ...)`, filled microbatch by microbatch.

    Row `r` of the effective batch, in the order of the source, goes to microbatch index `r // (m·D)`. A window that is not
    full has its padding in a tail of whole microbatches and one partial one, so that replicas run out of rows within one
    index of each other. The leaf `row_mask` (bool, `(A, m·D)`) is False in padding; `row_position` (int32, `(A, m·D)`) is
    `r`. In several processes make the windows of all replicas in each, and keep the columns of its own for `place_window`.

    Args:
      source: examples, dicts of arrays without a row axis. One iteration over it is one pass, an epoch; several epochs
        need a source that can be read again (not a generator), or a function `source(epoch)` that returns the iterable.
        It may reuse its arrays: rows are copied.
      microbatch: `m`, rows of one forward and backward pass on one replica.
      accumulation_steps: `A`, or what decides it window by window: a `Schedule` or a `TokenBudget`.
      last: what becomes of rows that do not fill the last window of a pass. `"process"`: they make a padded window of
        the same shape, whose denominator is what is there. `"carry"`: they begin the first window of the next pass
        (`flush` gives what the last pass left). `"drop"`: they are left out. `"error"`: `ValueError`.
      replicas: `D`, data-parallel replicas.
      batched: the source yields batches, dicts of arrays with a leading row axis, of any number of rows.
      fill: values of padding rows by leaf; instead of the default `FILL`, -100 in `labels` and 0 in `mask`. Leaves that
        are not named repeat the last real row.
      tokens: how to count the supervised tokens of a row, for schedules and budgets in tokens: a function of the row, or
        the name of a leaf (a mask, or a number per row) that is summed.
      one_shape: pad every window to the largest `A` of the `Schedule`, or to `TokenBudget.most`: one compilation instead
        of one for each distinct `A`.
      check_row_ids: raise if a value of the leaf `row_ids` repeats within a pass.
      check_finite: raise on NaN or infinity in any leaf.
      state: go on where another `Windows` stood, over the same source. Rows it had read are read again and passed over.
        Sizes and policy may change, unless more rows wait than the next window takes.

    Returns:
      A `Windows`: each `for` loop over it is one pass. `.counts` tells what became of the rows.

    Raises:
      ValueError: numbers that are not positive integers or do not divide, an unknown policy, a schedule that does not
        increase, tokens that nobody counts. While reading: no rows, a row whose leaves, shapes or dtypes differ from the
        first row's, reserved leaves, a fill value that the leaf cannot hold, and what the checks find.

    >>> import numpy as np, jaxacc
    >>> examples = [{"x": np.float32(row)} for row in range(5)]
    >>> stream = jaxacc.windows.windows(examples, microbatch=1, accumulation_steps=2, last="carry")
    >>> [window["x"].ravel().tolist() for epoch in range(2) for window in stream]
    [[0.0, 1.0], [2.0, 3.0], [4.0, 0.0], [1.0, 2.0], [3.0, 4.0]]
    >>> stream.counts.examples, stream.counts.carried, stream.counts.pending
    (10, 1, 0)
    """
    plan = _make_plan(microbatch, accumulation_steps, replicas, last, counted=tokens is not None)
    options = _Input(batched, _token_counter(tokens), fill, check_row_ids, check_finite)
    state = state or State()
    _check_state(plan, state)
    return Windows(source, plan, options, _largest(plan) if one_shape else 0, state)


class Windows:
    """The windows of a source: `windows` makes one.

    Each `for` loop is one pass over the source. A loop after a `break` goes on with the open pass, and so does one after an
    exception, which opens the source again and passes over the rows that were read.

    >>> import jaxacc
    >>> settings = {"microbatch": 1, "accumulation_steps": 2, "last": "carry"}
    >>> stream = jaxacc.windows.windows([{"x": row} for row in range(5)], **settings)
    >>> next(iter(stream))["x"].tolist()
    [[0], [1]]
    >>> again = jaxacc.windows.windows([{"x": row} for row in range(5)], **settings, state=stream.state)
    >>> [window["x"].tolist() for window in again], again.counts.pending
    ([[[2], [3]]], 1)
    >>> window = again.flush()
    >>> window["x"].tolist(), window["row_mask"].tolist()
    ([[4], [4]], [[True], [False]])
    """

    def __init__(self, source: Source, plan: _Plan, options: _Input, padded: int, state: State) -> None:
        self._source, self._plan, self._options, self._padded = source, plan, options, padded
        self._counts, self._read = Counts(*map(int, state.counts)), int(state.read)  # restored ones may be arrays
        self._pending: list[Row] = [{name: np.asarray(leaf) for name, leaf in row.items()} for row in state.pending]
        self._tokens = sum(map(options.tokens, self._pending))  # in the pending rows
        self._first: Row | None = self._pending[0] if self._pending else None
        self._rows: Iterator[tuple[Row, int]] | None = None

    @property
    def counts(self) -> Counts:
        """What became of the rows so far."""
        return self._counts

    @property
    def state(self) -> State:
        """Where the stream stands, after the window that it gave last."""
        return State(self._counts, self._read, tuple(self._pending))

    def __iter__(self) -> Iterator[Window]:
        """The windows from here to the end of the pass."""
        while (read := self._next()) is not None:
            row, tokens = read
            self._pending.append(row)
            self._tokens += tokens
            self._read += 1
            self._counts = self._counts._replace(rows=self._counts.rows + 1)
            if _is_full(self._plan, self._counts, len(self._pending), self._tokens):
                yield self._close()
        if self._end_pass():
            yield self._close()

    def flush(self) -> Window | None:
        """The rows that wait, as a padded window, or None if there are none: after the last pass with `last="carry"`."""
        return self._close() if self._pending else None

    def _next(self) -> tuple[Row, int] | None:
        if self._rows is None:
            rows = self._read_pass()
            passed = sum(1 for _ in islice(rows, self._read))
            if passed < self._read:
                raise ValueError(
                    f"the source ends after {passed} rows of pass {self._counts.epochs}, of which {self._read} had been "
                    "read. Resume with the same source; one that can be read only once cannot be opened again."
                )
            self._rows = rows
        try:
            return next(self._rows, None)
        except BaseException:
            self._rows = None  # a generator that raised looks exhausted: the pass would end early
            raise

    def _read_pass(self) -> Iterator[tuple[Row, int]]:
        """The rows of one pass, checked, with their tokens."""
        source, epoch, options = self._source, self._counts.epochs, self._options
        ids: set[bytes] = set()
        items = source(epoch) if callable(source) else source
        for index, row in enumerate(_rows_of(items, options.batched)):
            where = f"row {index} of pass {epoch}"
            if index == 0:
                _check_leaves(row, options, where)
            self._first = self._first or row
            _check_row(row, self._first, where)
            if options.check_finite:
                _check_finite(row, where)
            if options.check_row_ids:
                _check_id(row, ids, where)
            yield row, options.tokens(row)

    def _close(self) -> Window:
        counts, rows = self._counts, self._pending
        steps = max(_steps(self._plan, counts, len(rows)), self._padded)
        window = _stack(rows, steps, self._plan.unit, FILL if self._options.fill is None else self._options.fill)
        self._counts = _add(counts, len(rows), self._tokens)
        self._pending, self._tokens = [], 0
        return window

    def _end_pass(self) -> bool:
        """Apply the policy; whether the rows that are left make a window now."""
        counts, left, last = self._counts, len(self._pending), self._plan.last
        self._rows = None
        if self._read == 0:
            raise ValueError(
                f"the source gave no rows in pass {counts.epochs}. An epoch needs at least one; a generator can be read only "
                "once: give a list, or a function of the epoch that returns the iterable."
            )
        if left and last == "error":
            raise _left_over(self._plan, counts, left, self._read)
        self._read = 0
        self._counts = counts._replace(
            epochs=counts.epochs + 1,
            carried=counts.carried + (left if last == "carry" else 0),
            dropped=counts.dropped + (left if last == "drop" else 0),
        )
        if last == "drop":
            self._pending, self._tokens = [], 0
        return left > 0 and last == "process"


def parse_schedule(text: str, *, by: Unit = "updates") -> Schedule:
    """Read a schedule of the effective batch: `"0:64 1000:128"` is 64 rows at first, and 128 from threshold 1000 on.

    A threshold that is crossed within a window counts from the next window on.

    Args:
      text: `threshold:rows` pairs, separated by spaces; the first threshold is 0 and they increase.
      by: what the thresholds count: `"updates"`, `"examples"` or `"tokens"`.

    Returns:
      The `Schedule`, for `windows(..., accumulation_steps=schedule)`.

    Raises:
      ValueError: text that is not such pairs, thresholds that do not increase from 0, rows below 1, another unit.

    >>> import jaxacc
    >>> jaxacc.windows.parse_schedule("0:64 1000:128", by="examples")
    Schedule(steps=((0, 64), (1000, 128)), by='examples')
    """
    pairs = [pair.split(":") for pair in text.split()]
    try:
        steps = tuple((int(threshold), int(rows)) for threshold, rows in pairs)
    except ValueError as error:
        raise ValueError(f"schedule {text!r} is not threshold:rows pairs. Write, for example, '0:64 1000:128'.") from error
    return _check_schedule(Schedule(steps, by))


def count_windows(
    rows: int | Iterable[int],
    *,
    microbatch: int,
    accumulation_steps: int | Schedule | TokenBudget,
    last: Policy,
    replicas: int = 1,
    epochs: int = 1,
) -> int:
    """How many windows, and so updates, `windows` makes of so many rows, exactly and without reading them.

    Args:
      rows: rows of one epoch; or, for a `TokenBudget` and a `Schedule` by tokens, the supervised tokens of each of them,
        in order (the same order in every epoch).
      microbatch: `m`.
      accumulation_steps: as for `windows`.
      last: as for `windows`; with `"carry"` what the last epoch leaves is not counted.
      replicas: `D`.
      epochs: passes over the rows.

    Returns:
      The number of windows.

    Raises:
      ValueError: as `windows`, and rows left over with `last="error"`.

    >>> import jaxacc
    >>> [jaxacc.windows.count_windows(5, microbatch=1, accumulation_steps=2, last=last, epochs=2)
    ...  for last in ("process", "carry", "drop")]
    [6, 5, 4]
    """
    tokens = None if isinstance(rows, int | np.integer) else np.asarray(list(rows), np.int64)
    length = int(rows) if isinstance(rows, int | np.integer) else np.size(tokens)
    if length < 1 or epochs < 1:
        raise ValueError(f"rows={length} and epochs={epochs} must both be at least 1.")
    plan = _make_plan(microbatch, accumulation_steps, replicas, last, counted=tokens is not None)
    joined, passes = (epochs, 1) if last == "carry" else (1, epochs)
    length *= joined
    before = np.zeros(length + 1, np.int64) if tokens is None else np.concatenate([[0], np.cumsum(np.tile(tokens, joined))])
    counts = Counts()
    for _ in range(passes):
        start = 0
        while (stop := start + _rows_needed(plan, counts, before, start)) <= length:
            counts, start = _add(counts, stop - start, int(before[stop] - before[start])), stop
        if start < length and last == "error":
            raise _left_over(plan, counts, length - start, length)
        if start < length and last == "process":
            counts = _add(counts, length - start, int(before[length] - before[start]))
    return counts.windows


def _make_plan(
    microbatch: int,
    accumulation_steps: int | Schedule | TokenBudget,
    replicas: int,
    last: Policy,
    counted: bool,
) -> _Plan:
    if last not in get_args(Policy):
        raise ValueError(
            f"last={last!r} is not a policy for the last window of a pass. Use one of {', '.join(get_args(Policy))}."
        )
    unit = solve_split(microbatch=microbatch, accumulation_steps=1, replicas=replicas).effective_batch
    size = accumulation_steps
    if isinstance(size, Schedule):
        for _, rows in _check_schedule(size).steps:
            solve_split(effective_batch=rows, microbatch=microbatch, replicas=replicas)
    elif isinstance(size, TokenBudget):
        if size.tokens < 1 or (size.most is not None and size.most < 1):
            raise ValueError(f"{size}: tokens and most must be at least 1.")
    else:
        size = solve_split(microbatch=microbatch, accumulation_steps=size, replicas=replicas).effective_batch
    if not counted and (isinstance(size, TokenBudget) or (isinstance(size, Schedule) and size.by == "tokens")):
        raise ValueError(
            f"{size} counts tokens, and nothing says how. Give windows tokens='mask', or a function of the row such as "
            "tokens=lambda row: int((row['labels'][1:] != -100).sum()), and count_windows the tokens of each row."
        )
    return _Plan(unit, size, last)


def _check_schedule(schedule: Schedule) -> Schedule:
    thresholds = [threshold for threshold, _ in schedule.steps]
    if schedule.by not in get_args(Unit):
        raise ValueError(f"a schedule by {schedule.by!r} is not known. Use one of {', '.join(get_args(Unit))}.")
    if thresholds[:1] != [0] or any(low >= high for low, high in pairwise(thresholds)):
        raise ValueError(f"the thresholds {thresholds} of the schedule must begin with 0 and increase, as in '0:64 1000:128'.")
    if min(rows for _, rows in schedule.steps) < 1:
        raise ValueError(f"the schedule {schedule.steps} has an effective batch below 1. Every one needs a row.")
    return schedule


def _token_counter(tokens: str | Callable[[Row], int] | None) -> Callable[[Row], int]:
    if tokens is None:
        return lambda row: 0
    if not isinstance(tokens, str):
        return tokens

    def total(row: Row) -> int:
        if tokens not in row:
            raise ValueError(f"tokens={tokens!r} is not a leaf of the rows, which have {sorted(row)}.")
        leaf = np.asarray(row[tokens])
        if leaf.dtype.kind not in "biu" or np.any(leaf < 0):
            raise ValueError(
                f"tokens={tokens!r} must be a mask or a number of tokens, integers of at least 0. For labels give a "
                "function: tokens=lambda row: int((row['labels'][1:] != -100).sum())."
            )
        return int(np.sum(leaf, dtype=np.int64))

    return total


def _effective_batch(size: int | Schedule, counts: Counts) -> int:
    """Rows of the window that begins at these counts."""
    if isinstance(size, int):
        return size
    position = {"updates": counts.windows, "examples": counts.examples, "tokens": counts.tokens}[size.by]
    return size.steps[bisect_right(size.steps, position, key=lambda step: step[0]) - 1][1]


def _add(counts: Counts, rows: int, tokens: int) -> Counts:
    """The counts after one more window."""
    return counts._replace(examples=counts.examples + rows, tokens=counts.tokens + tokens, windows=counts.windows + 1)


def _is_full(plan: _Plan, counts: Counts, rows: int, tokens: int) -> bool:
    if not isinstance(plan.size, TokenBudget):
        return rows == _effective_batch(plan.size, counts)
    enough = tokens >= plan.size.tokens or rows == plan.unit * (plan.size.most or 0)
    return enough and rows % plan.unit == 0


def _rows_needed(plan: _Plan, counts: Counts, before: np.ndarray, start: int) -> int:
    """Rows that fill the window beginning at row `start`, where `before[r]` tokens lie before row `r`."""
    if not isinstance(plan.size, TokenBudget):
        return _effective_batch(plan.size, counts)
    rows = int(np.searchsorted(before, before[start] + plan.size.tokens)) - start
    steps = -(-rows // plan.unit)
    return plan.unit * min(steps, plan.size.most or steps)


def _check_state(plan: _Plan, state: State) -> None:
    most = (
        plan.unit * (plan.size.most or 0) if isinstance(plan.size, TokenBudget) else _effective_batch(plan.size, state.counts)
    )
    if 0 < most <= len(state.pending):
        raise ValueError(
            f"in the state {len(state.pending)} rows wait, and the next window takes {most}. Resume with the sizes that it was "
            "saved with, or flush() before the state is saved."
        )


def _steps(plan: _Plan, counts: Counts, rows: int) -> int:
    """Accumulation steps of the window that closes now: a short one keeps the shape of the full one."""
    if isinstance(plan.size, TokenBudget):
        return -(-rows // plan.unit)
    return _effective_batch(plan.size, counts) // plan.unit


def _largest(plan: _Plan) -> int:
    if isinstance(plan.size, TokenBudget):
        if plan.size.most is None:
            raise ValueError(f"one_shape=True pads to the largest A, and {plan.size} has none. Give TokenBudget.most.")
        return plan.size.most
    return (max(rows for _, rows in plan.size.steps) if isinstance(plan.size, Schedule) else plan.size) // plan.unit


def _left_over(plan: _Plan, counts: Counts, rows: int, length: int) -> ValueError:
    takes = plan.size if isinstance(plan.size, TokenBudget) else f"{_effective_batch(plan.size, counts)} rows"
    return ValueError(
        f"{rows} of the {length} rows of a pass are left over, and the next window takes {takes}. With last='error' every "
        "window must be full: use last='process', 'carry' or 'drop', or an effective batch that divides the rows."
    )


def _rows_of(items: Iterable[Mapping[str, Any]], batched: bool) -> Iterator[Row]:
    for index, item in enumerate(items):
        where = f"{'batch' if batched else 'example'} {index}"
        if not isinstance(item, Mapping) or not item:
            raise ValueError(f"{where} is a {type(item).__name__}. It must be a dict of arrays with a leaf at least.")
        arrays = {name: _array(leaf, f"leaf {name!r} of {where}") for name, leaf in item.items()}
        if not batched:
            yield arrays
            continue
        shapes = {name: array.shape for name, array in arrays.items()}
        if len({shape[:1] for shape in shapes.values()}) != 1 or () in shapes.values():
            raise ValueError(f"the leaves of {where} must agree on a leading row axis, got shapes {shapes}.")
        yield from ({name: array[row] for name, array in arrays.items()} for row in range(len(next(iter(arrays.values())))))


def _array(leaf: Any, where: str) -> np.ndarray:
    """A copy: loaders reuse their buffers, and a row waits until its window is full."""
    try:
        array = np.array(leaf)
    except ValueError as error:
        raise ValueError(f"{where} is ragged: {error}. Pad it to one length.") from error
    if array.dtype.kind in "OSUMm":
        raise ValueError(f"{where} has dtype {array.dtype}. Leaves must be numbers or bools; encode text before.")
    return array


def _check_leaves(row: Row, options: _Input, where: str) -> None:
    reserved = sorted({ROW_MASK, ROW_POSITION} & set(row))
    if reserved:
        raise ValueError(f"{where} has {reserved}, which windows writes. Rename them; leave padding rows out of the source.")
    if options.check_row_ids and ROW_IDS not in row:
        raise ValueError(f"check_row_ids=True needs the leaf {ROW_IDS!r}; {where} has {sorted(row)}.")
    unknown = sorted(set(options.fill or ()) - set(row))
    if unknown:
        raise ValueError(f"fill names {unknown}, which {where} has not: its leaves are {sorted(row)}.")
    for name, value in (FILL if options.fill is None else options.fill).items():
        if name in row and not _holds(np.asarray(row[name]).dtype, value):
            raise ValueError(
                f"leaf {name!r} of dtype {row[name].dtype} cannot hold the fill value {value!r} of padding rows. State "
                f"one that it can hold and the loss ignores: fill={{{name!r}: ...}}."
            )


def _holds(dtype: np.dtype, value: Any) -> bool:
    try:
        return bool(np.full((), value, dtype) == value or value != value)
    except (OverflowError, TypeError, ValueError):
        return False


def _check_row(row: Row, first: Row, where: str) -> None:
    if row.keys() != first.keys():
        missing, extra = sorted(first.keys() - row.keys()), sorted(row.keys() - first.keys())
        raise ValueError(
            f"{where} has other leaves than the first row: missing {missing}, not seen before {extra}. Every row needs the "
            "same leaves; fill in a value that the loss ignores."
        )
    for name, leaf in row.items():
        if leaf.shape != first[name].shape or leaf.dtype != first[name].dtype:
            raise ValueError(
                f"leaf {name!r} of {where} is {leaf.dtype} {leaf.shape}, in the first row {first[name].dtype} "
                f"{first[name].shape}. Rows must agree: pad them to one length, with labels that the loss ignores."
            )


def _check_finite(row: Row, where: str) -> None:
    for name, leaf in row.items():
        if not np.all(np.isfinite(leaf)):
            raise ValueError(
                f"leaf {name!r} of {where} has NaN or infinite entries. Clean the source, or do not ask (check_finite)."
            )


def _check_id(row: Row, seen: set[bytes], where: str) -> None:
    identity = np.asarray(row[ROW_IDS]).tobytes()
    if identity in seen:
        raise ValueError(f"{where} repeats {ROW_IDS} {row[ROW_IDS]!s}. Ids must differ within a pass: remove the duplicate.")
    seen.add(identity)


def _stack(rows: list[Row], steps: int, unit: int, fill: Mapping[str, Any]) -> Window:
    total = steps * unit
    filler = {name: np.full_like(leaf, fill[name]) if name in fill else leaf for name, leaf in rows[-1].items()}
    padded = [*rows, *[filler] * (total - len(rows))]
    flat = {name: np.stack([row[name] for row in padded]) for name in filler}
    flat |= {ROW_MASK: np.arange(total) < len(rows), ROW_POSITION: np.arange(total, dtype=np.int32)}
    return {name: leaf.reshape(steps, unit, *leaf.shape[1:]) for name, leaf in flat.items()}
