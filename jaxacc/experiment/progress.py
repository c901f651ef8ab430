"""What the terminal shows while a run goes on: a live bar, or plain lines where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

PLAIN_SECONDS = 5.0
"""Seconds between two plain lines."""


class Report(Protocol):
    """Show one update of the run."""

    def __call__(self, record: dict[str, Any], tokens_per_second: float) -> None:
        """`record` as in records.jsonl; supervised tokens per second so far."""


@contextmanager
def progress(console: Console, *, done: int, updates: int) -> Iterator[Report]:
    """Show `updates` updates, `done` of them finished already."""
    if console.is_terminal:
        yield from _live(console, done, updates)
    else:
        yield _plain(console, done, updates)


def _live(console: Console, done: int, updates: int) -> Iterator[Report]:
    columns = [
        TextColumn("update"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[text]}"),
        TimeRemainingColumn(),
    ]
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("train", total=updates, completed=done, text="")

        def report(record: dict[str, Any], tokens_per_second: float) -> None:
            bar.update(task, completed=record["attempted"], text=_text(record, tokens_per_second))

        yield report


def _plain(console: Console, done: int, updates: int) -> Report:
    start = shown = time.monotonic()

    def report(record: dict[str, Any], tokens_per_second: float) -> None:
        nonlocal shown
        now, attempted = time.monotonic(), record["attempted"]
        if now - shown < PLAIN_SECONDS and attempted not in (done + 1, updates):
            return
        shown = now
        left = (now - start) / (attempted - done) * (updates - attempted)
        console.print(f"update {attempted}/{updates}  {_text(record, tokens_per_second)}  {left:.0f} s left", highlight=False)

    return report


def _text(record: dict[str, Any], tokens_per_second: float) -> str:
    outcome = "" if record["outcome"] == "APPLIED" else f"  {record['outcome']}"
    return f"loss {record['loss']:.4f}{outcome}  {tokens_per_second:,.0f} tokens/s"
