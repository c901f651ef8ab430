"""JSON lines, one per update and one per evaluation, complete and in order also after a resume."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any


class Records:
    """An append-only file of JSON records that each carry `attempted`."""

    def __init__(self, path: Path, *, upto: int, writes: bool = True):
        """Open the file and cut off what lies beyond `upto` attempted windows, an unfinished line included.

        Of several processes one `writes`; the others only keep the first and the last record.
        """
        self.first: dict[str, Any] | None = None
        self.last: dict[str, Any] | None = None
        kept = []
        for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
            if not line.endswith(b"\n") or (record := json.loads(line))["attempted"] > upto:
                break
            self._remember(record)
            kept.append(line)
        self._file = None
        if writes:
            write_atomically(path, b"".join(kept))
            self._file = path.open("a", encoding="utf-8")

    def append(self, record: dict[str, Any]) -> None:
        """Write a record. Numbers that JSON does not know (NaN, inf) become null."""
        record = {name: _jsonable(value) for name, value in record.items()}
        self._remember(record)
        if self._file is not None:
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _remember(self, record: dict[str, Any]) -> None:
        self.first = self.first or record
        self.last = record


def write_json(path: Path, tree: dict[str, Any]) -> None:
    """Write one JSON document, whole or not at all."""
    tree = {name: _jsonable(value) for name, value in tree.items()}
    write_atomically(path, (json.dumps(tree, indent=2, allow_nan=False) + "\n").encode())


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file by its new content in one step."""
    beside = path.with_name(path.name + ".new")
    beside.write_bytes(content)
    os.replace(beside, path)


def _jsonable(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
