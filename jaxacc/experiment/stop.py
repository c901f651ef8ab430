"""Ends before the end: signals and a limit of time, which finish the window in flight and save."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxacc.experiment.config import UserError

STOPPED = 75
"""Exit status after SIGTERM or the time limit: saved, to be continued (EX_TEMPFAIL)."""
INTERRUPTED = 130
"""Exit status after SIGINT: saved, to be continued."""
BREACHED = 76
"""Exit status after a breached gate."""

_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


class Reason(NamedTuple):
    """Why a run stops before its end: what the user reads, and the exit status."""

    text: str
    status: int


Stop = Callable[[int], Reason | None]
"""Asked after every window, with the windows attempted: whether to stop."""


def parse_duration(text: str) -> float:
    """Seconds of "3h50m", "90s", "1d12h"; a bare number is seconds.

    Raises:
      UserError: for anything else.

    >>> parse_duration("3h50m"), parse_duration("1.5m")
    (13800.0, 90.0)
    """
    parts = re.findall(r"(\d+(?:\.\d+)?)([dhms])", text)
    if text.isdecimal():
        parts = [(text, "s")]
    elif not parts or "".join(map("".join, parts)) != text:
        raise UserError(f"--stop-after {text!r} is not a duration. Write it as in 3h50m, 90s or 1d12h.")
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


@contextmanager
def stopping(seconds: float | None) -> Iterator[Stop]:
    """Watch for SIGTERM, SIGINT and the end of so many seconds from here.

    The first signal asks for a stop after the window in flight; after it the next SIGINT ends the process at once, as if
    nobody watched. Signals are watched in the main thread alone, for Python allows it nowhere else.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    caught: list[Reason] = []

    def handle(number: int, _: Any) -> None:
        caught.append(Reason(signal.Signals(number).name, INTERRUPTED if number == signal.SIGINT else STOPPED))
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def stop(_: int) -> Reason | None:
        if caught:
            return caught[0]
        return Reason("the time limit", STOPPED) if deadline is not None and time.monotonic() >= deadline else None

    watched = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, handle) for number in watched}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: it was not Python's


class Agreement:
    """One answer for all processes: a stop that any of them asks for, a window later, after the same window in each.

    Every process gives its answer into an array on its devices; what all of them gave is read one window later, when it is
    there, so that nobody waits. A single process is answered at once.
    """

    def __init__(self, stop: Stop, mesh: Mesh | None):
        self._stop, self._pending = stop, None
        self._mesh = mesh if jax.process_count() > 1 else None
        if self._mesh is not None:
            self._sharding = NamedSharding(self._mesh, P(self._mesh.axis_names))
            self._largest = jax.jit(lambda statuses: statuses.max(), out_shardings=NamedSharding(self._mesh, P()))

    def __call__(self, attempted: int) -> Reason | None:
        """The reason to stop after this window, the same in all processes."""
        own = self._stop(attempted)
        if self._mesh is None:
            return own
        status = np.full((1,), own.status if own else 0, np.int32)
        before, self._pending = (
            self._pending,
            self._largest(jax.make_array_from_callback((self._mesh.size,), self._sharding, lambda _: status)),
        )
        agreed = 0 if before is None else int(before)
        if not agreed:
            return None
        return own or Reason("a stop that another process was asked for", agreed)
