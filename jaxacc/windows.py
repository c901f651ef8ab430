"""Host side: examples to windows, with what the last window of an epoch becomes, row positions, and schedules of A."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from jaxacc._rows import FILL as FILL
from jaxacc._rows import ROW_POSITION as ROW_POSITION
from jaxacc._rows import (
    Input,
    Row,
    Window,
    check_finite_row,
    check_id,
    check_leaves,
    check_row,
    read_rows,
    stack,
    token_counter,
)
from jaxacc._sizes import Counts as Counts
from jaxacc._sizes import Plan, add_window, effective_batch_at, is_full, largest_steps, left_over, make_plan, steps_of
from jaxacc._sizes import Policy as Policy
from jaxacc._sizes import Schedule as Schedule
from jaxacc._sizes import Span as Span
from jaxacc._sizes import TokenBudget as TokenBudget
from jaxacc._sizes import Unit as Unit
from jaxacc._sizes import count_windows as count_windows
from jaxacc._sizes import parse_schedule as parse_schedule
from jaxacc._sizes import spans as spans

Source = Iterable[Mapping[str, Any]] | Callable[[int], Iterable[Mapping[str, Any]]]


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
    plan = make_plan(microbatch, accumulation_steps, replicas, last, counted=tokens is not None)
    options = Input(batched, token_counter(tokens), fill, check_row_ids, check_finite)
    state = state or State()
    _check_state(plan, state)
    return Windows(source, plan, options, largest_steps(plan) if one_shape else 0, state)


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

    def __init__(self, source: Source, plan: Plan, options: Input, padded: int, state: State) -> None:
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
            if is_full(self._plan, self._counts, len(self._pending), self._tokens):
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
        for index, row in enumerate(read_rows(items, options.batched)):
            where = f"row {index} of pass {epoch}"
            if index == 0:
                check_leaves(row, options, where)
            self._first = self._first or row
            check_row(row, self._first, where)
            if options.check_finite:
                check_finite_row(row, where)
            if options.check_row_ids:
                check_id(row, ids, where)
            yield row, options.tokens(row)

    def _close(self) -> Window:
        counts, rows = self._counts, self._pending
        steps = max(steps_of(self._plan, counts, len(rows)), self._padded)
        window = stack(rows, steps, self._plan.unit, FILL if self._options.fill is None else self._options.fill)
        self._counts = add_window(counts, len(rows), self._tokens)
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
            raise left_over(self._plan, counts, left, self._read)
        self._read = 0
        self._counts = counts._replace(
            epochs=counts.epochs + 1,
            carried=counts.carried + (left if last == "carry" else 0),
            dropped=counts.dropped + (left if last == "drop" else 0),
        )
        if last == "drop":
            self._pending, self._tokens = [], 0
        return left > 0 and last == "process"


def _check_state(plan: Plan, state: State) -> None:
    most = (
        plan.unit * (plan.size.most or 0) if isinstance(plan.size, TokenBudget) else effective_batch_at(plan.size, state.counts)
    )
    if 0 < most <= len(state.pending):
        raise ValueError(
            f"in the state {len(state.pending)} rows wait, and the next window takes {most}. Resume with the sizes that it was "
            "saved with, or flush() before the state is saved."
        )
