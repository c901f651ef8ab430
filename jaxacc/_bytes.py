"""Amounts of memory as people write them."""

from __future__ import annotations

import re

UNITS = {
    "": 1,
    "B": 1,
    **{f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)},
    **{f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)},
}


def parse_bytes(amount: int | str) -> int:
    """Bytes of a number of them, or of text such as `"20GiB"` or `"1.5 GB"`; `ValueError` for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(amount))
    units = {name.lower(): size for name, size in UNITS.items()}
    if isinstance(amount, bool) or match is None or match.group(2).lower() not in units:
        raise ValueError(f"{amount!r} is no amount of memory. Write bytes, or a number with a unit: '20GiB', '500MB'.")
    size = round(float(match.group(1)) * units[match.group(2).lower()])
    if size < 1:
        raise ValueError(f"{amount!r} is less than 1 byte. State the memory that the program may take on one device.")
    return size


def show_bytes(size: int) -> str:
    """`1536` as `"1.50 KiB"`."""
    unit = next((u for u in ("TiB", "GiB", "MiB", "KiB") if abs(size) >= UNITS[u]), "B")
    return f"{size} B" if unit == "B" else f"{size / UNITS[unit]:.2f} {unit}"
