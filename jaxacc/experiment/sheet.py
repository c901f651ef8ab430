"""The sheet: what a run did, in one table and one file."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

PRECISION = {
    "float32": "float32 computation, parameters and sums",
    "bfloat16": "bfloat16 computation, float32 parameters and sums",
    "bfloat16_params": "bfloat16 computation and parameters, float32 sums",
    "float16": "float16 computation with loss scale, float32 parameters and sums",
}
"""What the precision of a config means."""


def digest(params: Any) -> str:
    """SHA-256 over path, dtype, shape and bytes of every leaf, in the order of the paths: equal iff bit-equal."""
    total = hashlib.sha256()
    named = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(params)}
    for name, leaf in sorted(named.items()):
        total.update(f"{name} {leaf.dtype} {leaf.shape}\n".encode())
        total.update(np.ascontiguousarray(leaf).tobytes())
    return total.hexdigest()


def entropy(counts: np.ndarray) -> float:
    """Entropy in nats of the frequencies of the labels: the loss that a model without input could reach at best."""
    frequencies = counts[counts > 0] / counts.sum()
    return float(-np.sum(frequencies * np.log(frequencies)))


def peak_memory(compiled: Any) -> tuple[int | None, str]:
    """Bytes per device, and where the number is from: the device itself, or the compiled update."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"], "device"
    analysis = compiled.memory_analysis()
    if analysis is None:
        return None, "unknown"
    held = analysis.argument_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return held + analysis.temp_size_in_bytes, "compiled update"


def show(sheet: dict[str, Any], console: Console) -> None:
    """Print the sheet as a table."""
    table = Table("quantity", "value", title="sheet")
    parts = sheet.get("measured_memory", {})
    shown = {name: value for name, value in sheet.items() if value is not parts}
    for name, value in (shown | {f"memory {name}": value for name, value in parts.items()}).items():
        text = f"{value:,}" if isinstance(value, int) else f"{value:.4f}" if isinstance(value, float) else str(value)
        table.add_row(name, text)
    console.print(table)
