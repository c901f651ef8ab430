"""The largest microbatch that fits a budget, from few measurements: memory is close to linear in the rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

MARGIN = 1.05
"""What is predicted to exceed the budget by more than this is not measured."""

TOLERANCE = 0.005
"""How far from a measurement a line may be, in units of what was measured."""

Totals = Mapping[int, int | None]
"""Bytes by microbatch, None where the compiler itself ran out of memory."""


def largest_that_fits(
    sizes: Sequence[int], measure: Callable[[int], int | None], budget: int
) -> tuple[int | None, dict[int, int | None]]:
    """The largest of the ascending `sizes` whose measured bytes are within the budget (or None), and all measured.

    Two ends and a guess from the line through them; then guesses between what fits and what does not, until the next
    size does not fit, measured or by a wide margin.
    """
    measured: dict[int, int | None] = {}

    def fits(at: int) -> bool:
        total = measured[sizes[at]] = measure(sizes[at])
        return total is not None and total <= budget

    low, high = 0, len(sizes) - 1
    if fits(high):
        return sizes[high], measured
    if high == 0 or not fits(low):
        return None, measured
    while high - low > 1:
        predicted = {at: predict(measured, sizes[at], whole=sizes[-1]) for at in range(low + 1, high)}
        following = predicted[low + 1]
        if _line_is_known(measured, sizes[-1]) and following is not None and following > MARGIN * budget:
            break
        within = [at for at, total in predicted.items() if total is not None and total <= budget]
        unknown = following is None
        guess = (low + high) // 2 if unknown else max(within, default=low + 1)
        low, high = (guess, high) if fits(guess) else (low, guess)
    return sizes[low], measured


def check_lines(sizes: Sequence[int], measure: Callable[[int], int | None], measured: dict[int, int | None]) -> None:
    """Measure between the ends of `sizes`, both measured, until the lines through what is measured are right.

    Memory is the larger of what the microbatches and what the update take, so that the line may have a bend.
    """
    if len(sizes) < 3:
        return
    at = len(sizes) // 2
    expected, known = predict(measured, sizes[at], whole=0), sizes[at] in measured
    if not known:
        measured[sizes[at]] = measure(sizes[at])
    found = measured[sizes[at]]
    if known or expected is None or found is None or abs(found - expected) > TOLERANCE * found:
        check_lines(sizes[: at + 1], measure, measured)
        check_lines(sizes[at:], measure, measured)


def predict(measured: Totals, size: int, *, whole: int) -> int | None:
    """Bytes at `size` from the line through its measured neighbours, None where two are not known.

    `whole`, a single microbatch per window, is another program without a loop: it counts only while there is no other.
    """
    points = {m: total for m, total in measured.items() if total is not None and m != whole}
    if len(points) < 2:
        points = {m: total for m, total in measured.items() if total is not None}
    if size in points:
        return points[size]
    if len(points) < 2:
        return None
    known = sorted(points)
    right = next((i for i, m in enumerate(known) if m > size), len(known) - 1) or 1
    a, b = known[right - 1], known[right]
    return round(points[a] + (points[b] - points[a]) * (size - a) / (b - a))


def _line_is_known(measured: Totals, whole: int) -> bool:
    return sum(total is not None and m != whole for m, total in measured.items()) >= 2
