"""Measured memory: what the devices or the process hold at the stages of a run, and whether live buffers grow."""

from __future__ import annotations

import collections
import json
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

FIRST_CHECK = 4
"""The window after which live buffers are counted first: by then the read-ahead is full."""


class Reading(NamedTuple):
    """Bytes in use now and at most so far, of the device that holds the most or of the process, which `source` says."""

    in_use: int
    peak: int
    source: str


def read() -> Reading:
    """What the devices of this process say, or the process's resident set where they say nothing (CPUs)."""
    stats = [found for device in jax.local_devices() if (found := device.memory_stats())]
    if stats and all("peak_bytes_in_use" in found for found in stats):
        in_use, peak = (max(found[name] for found in stats) for name in ("bytes_in_use", "peak_bytes_in_use"))
        return Reading(in_use, peak, "device")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    pages = Path("/proc/self/statm")
    in_use = int(pages.read_text().split()[1]) * resource.getpagesize() if pages.exists() else peak
    return Reading(in_use, max(in_use, peak), "process (resident set)")


def live_buffers() -> collections.Counter[str]:
    """Live arrays on the devices, by dtype and shape."""
    return collections.Counter(f"{array.dtype}{list(array.shape)}" for array in jax.live_arrays())


class Meter:
    """Readings by stage, and the count of live buffers over windows."""

    def __init__(self, tell: Callable[[str], None], *, slack: int):
        """`slack`: windows that may be read ahead; so many more buffers of a shape are no growth."""
        self._tell, self._slack = tell, slack + 2  # one window runs, one waits to be recorded
        self._stages: dict[str, Reading] = {}
        self._windows = 0
        self._buffers: collections.Counter[str] | None = None
        self._grown: str | None = None

    def mark(self, stage: str) -> None:
        """Read for a stage: `baseline`, `after_init`, `first_window`."""
        self._stages[stage] = read()

    def window(self) -> None:
        """Count a window. After 4, 8, 16, ... of them live buffers are compared with those after the first 4."""
        self._windows += 1
        if self._grown is None and self._windows >= FIRST_CHECK and self._windows.bit_count() == 1:
            found = live_buffers()
            self._grown = self._growth(found)
            self._buffers = self._buffers or found
            if self._grown:
                self._tell(f"warning: live device buffers grew: {self._grown}")

    def _growth(self, found: collections.Counter[str]) -> str | None:
        before = self._buffers or found
        grown = {name: count for name, count in found.items() if count > before[name] + self._slack}
        counts = ", ".join(f"{name} {before[name]} to {count}" for name, count in grown.items())
        return f"{counts} from window {FIRST_CHECK} to {self._windows}" if grown else None

    def measured(self) -> dict[str, Any]:
        """What the sheet says. Peaks are since the start of the process, its compilations, evaluations and saves included."""
        last = read()
        first = self._stages.get("first_window", last)  # without a window there is none
        more = last.peak - first.peak
        kept = "constant" if self._buffers is not None else f"not checked in fewer than {FIRST_CHECK} windows"
        return {
            "source": last.source,
            "baseline_bytes": self._stages["baseline"].in_use, "after_init_bytes": self._stages["after_init"].in_use,
            "peak_first_window_bytes": first.peak, "peak_later_windows_bytes": last.peak,
            "later_windows": f"{more:,} bytes above the first" if more else "no more than the first",
            "live_buffers": f"grew: {self._grown}" if self._grown else kept,
        }  # fmt: skip

    def measured_in(self, folder: Path) -> dict[str, Any]:
        """The same, or what the sheet of a run says that was finished before and ran no window now."""
        path = folder / "sheet.json"
        if self._windows == 0 and path.exists():
            return json.loads(path.read_text(encoding="utf-8")).get("measured_memory") or self.measured()
        return self.measured()
