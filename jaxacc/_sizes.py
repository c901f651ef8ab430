"""How many rows the next window takes: a fixed effective batch, a schedule of it, or a budget of tokens."""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

import numpy as np

from jaxacc._split import solve_split

Policy = Literal["process", "carry", "drop", "error"]
"""What becomes of the rows that do not fill the last window of a pass."""

Unit = Literal["updates", "examples", "tokens"]
"""What the thresholds of a schedule count."""


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


class Plan(NamedTuple):
    unit: int  # m·D, the rows of one microbatch index
    size: int | Schedule | TokenBudget  # an int is the effective batch
    last: Policy


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


class Span(NamedTuple):
    """A window as the rows it takes from the order of all passes, in which pass `e` of `R` rows begins at position `e·R`.

    Attributes:
      start: position of its first row.
      rows: how many it takes; with `last="carry"` they may belong to two passes or more.
      steps: its accumulation steps, `A`; what `rows` leave of `A·m·D` is padding.
    """

    start: int
    rows: int
    steps: int


def spans(
    rows: int,
    *,
    microbatch: int,
    accumulation_steps: int | Schedule | TokenBudget,
    last: Policy,
    replicas: int = 1,
    epochs: int | None = None,
    tokens: Callable[[int], np.ndarray] | None = None,
) -> Iterator[Span]:
    """The windows that `windows` makes, planned without reading a row: for sources with random access.

    Args:
      rows: rows of a pass, `R`.
      microbatch: `m`.
      accumulation_steps: as for `windows`.
      last: as for `windows`; what `"carry"` leaves after the last pass is in no span.
      replicas: `D`.
      epochs: passes; None goes on for ever.
      tokens: `tokens(epoch)` gives the supervised tokens of the rows of a pass, in their order, `(R,)`.

    Returns:
      An iterator over the spans, in order.

    Raises:
      ValueError: as `windows`; rows left over with `last="error"`; a pass that fills no window, or holds no tokens to fill one
        with, where that would go on for ever.

    >>> import jaxacc
    >>> plan = jaxacc.windows.spans(5, microbatch=1, accumulation_steps=2, last="drop", epochs=2)
    >>> [(span.start, span.rows) for span in plan]
    [(0, 2), (2, 2), (5, 2), (7, 2)]
    """
    if rows < 1 or (epochs is not None and epochs < 1):
        raise ValueError(f"rows={rows} and epochs={epochs} must both be at least 1.")
    plan = make_plan(microbatch, accumulation_steps, replicas, last, counted=tokens is not None)
    return _spans(plan, rows, epochs, tokens)


def _spans(plan: Plan, length: int, epochs: int | None, tokens: Callable[[int], np.ndarray] | None) -> Iterator[Span]:
    counts, start, tokens_in = Counts(), 0, token_sums(length, tokens)
    while epochs is None or start < epochs * length:
        left = length - start % length
        if plan.last == "carry":
            left = epochs * length - start if epochs is not None else None
        rows = _rows_of_next(plan, counts, start, left, tokens_in)
        if rows is None:
            assert left is not None
            if plan.last == "error":
                raise left_over(plan, counts, left, length)
            if plan.last == "carry":
                return
            if plan.last == "drop":
                if epochs is None and left == length:
                    raise ValueError(f"{length} rows, a whole pass, fill no window, and last='drop' leaves them out each time.")
                start += left
                continue
            rows = left
        yield Span(start, rows, steps_of(plan, counts, rows))
        counts = add_window(counts, rows, tokens_in(start, rows))
        start += rows


def _rows_of_next(plan: Plan, counts: Counts, start: int, left: int | None, tokens_in: Callable[[int, int], int]) -> int | None:
    """Rows that fill the window which begins at position `start`, or None if the `left` ones do not."""
    if not isinstance(plan.size, TokenBudget):
        rows = effective_batch_at(plan.size, counts)
        return rows if left is None or rows <= left else None
    rows = found = 0
    while not (rows and is_full(plan, counts, rows, found)):
        if left is not None and rows + plan.unit > left:
            return None
        found += tokens_in(start + rows, plan.unit)
        rows += plan.unit
    return rows


def token_sums(length: int, tokens: Callable[[int], np.ndarray] | None) -> Callable[[int, int], int]:
    """`sums(start, rows)`: the tokens of so many rows from a position on; of every pass they are asked for once."""
    if tokens is None:
        return lambda start, rows: 0

    @functools.lru_cache(maxsize=2)
    def of_pass(epoch: int) -> np.ndarray:
        found = np.asarray(tokens(epoch), np.int64)
        if found.shape != (length,) or not found.any():
            raise ValueError(
                f"tokens({epoch}) must give the supervised tokens of the {length} rows of a pass, some of them above 0; it "
                f"gives {found.sum()} in an array of shape {found.shape}."
            )
        return found

    def sums(start: int, rows: int) -> int:
        total, end = 0, start + rows
        while start < end:
            epoch, index = divmod(start, length)
            taken = of_pass(epoch)[index : index + end - start]
            total, start = total + int(taken.sum()), start + taken.size
        return total

    return sums


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
    planned = spans(
        length, microbatch=microbatch, accumulation_steps=accumulation_steps, last=last, replicas=replicas, epochs=epochs,
        tokens=None if tokens is None else lambda epoch: tokens,
    )  # fmt: skip
    return sum(1 for _ in planned)


def make_plan(
    microbatch: int,
    accumulation_steps: int | Schedule | TokenBudget,
    replicas: int,
    last: Policy,
    counted: bool,
) -> Plan:
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
    return Plan(unit, size, last)


def _check_schedule(schedule: Schedule) -> Schedule:
    thresholds = [threshold for threshold, _ in schedule.steps]
    if schedule.by not in get_args(Unit):
        raise ValueError(f"a schedule by {schedule.by!r} is not known. Use one of {', '.join(get_args(Unit))}.")
    if thresholds[:1] != [0] or any(low >= high for low, high in pairwise(thresholds)):
        raise ValueError(f"the thresholds {thresholds} of the schedule must begin with 0 and increase, as in '0:64 1000:128'.")
    if min(rows for _, rows in schedule.steps) < 1:
        raise ValueError(f"the schedule {schedule.steps} has an effective batch below 1. Every one needs a row.")
    return schedule


def effective_batch_at(size: int | Schedule, counts: Counts) -> int:
    """Rows of the window that begins at these counts."""
    if isinstance(size, int):
        return size
    position = {"updates": counts.windows, "examples": counts.examples, "tokens": counts.tokens}[size.by]
    return size.steps[bisect_right(size.steps, position, key=lambda step: step[0]) - 1][1]


def add_window(counts: Counts, rows: int, tokens: int) -> Counts:
    """The counts after one more window."""
    return counts._replace(examples=counts.examples + rows, tokens=counts.tokens + tokens, windows=counts.windows + 1)


def is_full(plan: Plan, counts: Counts, rows: int, tokens: int) -> bool:
    if not isinstance(plan.size, TokenBudget):
        return rows == effective_batch_at(plan.size, counts)
    enough = tokens >= plan.size.tokens or rows == plan.unit * (plan.size.most or 0)
    return enough and rows % plan.unit == 0


def steps_of(plan: Plan, counts: Counts, rows: int) -> int:
    """Accumulation steps of the window that closes now: a short one keeps the shape of the full one."""
    if isinstance(plan.size, TokenBudget):
        return -(-rows // plan.unit)
    return effective_batch_at(plan.size, counts) // plan.unit


def largest_steps(plan: Plan) -> int:
    if isinstance(plan.size, TokenBudget):
        if plan.size.most is None:
            raise ValueError(f"one_shape=True pads to the largest A, and {plan.size} has none. Give TokenBudget.most.")
        return plan.size.most
    return (max(rows for _, rows in plan.size.steps) if isinstance(plan.size, Schedule) else plan.size) // plan.unit


def left_over(plan: Plan, counts: Counts, rows: int, length: int) -> ValueError:
    takes = plan.size if isinstance(plan.size, TokenBudget) else f"{effective_batch_at(plan.size, counts)} rows"
    return ValueError(
        f"{rows} of the {length} rows of a pass are left over, and the next window takes {takes}. With last='error' every "
        "window must be full: use last='process', 'carry' or 'drop', or an effective batch that divides the rows."
    )
