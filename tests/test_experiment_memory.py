"""Measured memory: every figure with its source, and buffers that grow are named."""

import json
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jaxacc.experiment import memory
from jaxacc.experiment.cli import main

CONFIG = """
[batch]
effective = 4
microbatch = 2
[train]
updates = 9
[data]
context = 16
held_out = 0.02
[model]
layers = 1
width = 16
heads = 2
hidden = 16
"""
GIB = 2**30


@pytest.mark.skipif(sys.version_info < (3, 12), reason="slow: one Python is enough")
def test_a_run_says_what_it_held(config, tmp_path):
    """In the sheet and in every record, from the process on CPUs; live buffers do not grow over nine windows."""
    assert main(["train", config, "--run-dir", str(tmp_path / "run")]) == 0
    sheet = json.loads((tmp_path / "run" / "sheet.json").read_text())
    records = [json.loads(line) for line in (tmp_path / "run" / "records.jsonl").read_text().splitlines()]
    measured = sheet["measured_memory"]
    assert measured["source"] == "process (resident set)"
    assert sheet["peak_memory_source"] == "compiled update"
    assert 0 < measured["baseline_bytes"] <= measured["peak_first_window_bytes"]
    assert measured["peak_first_window_bytes"] <= measured["peak_later_windows_bytes"]
    assert measured["live_buffers"] == "constant"
    assert len(records) == 9
    for record in records:
        assert 0 < record["memory_bytes"] <= measured["peak_later_windows_bytes"]
        assert record["memory_source"] == measured["source"]


@pytest.mark.parametrize(("leaks", "found"), [(0, "constant"), (1, "grew: int8[3, 5, 7] ")])
def test_growth_is_named(leaks, found):
    """An array kept per window is warned of, once; one that is replaced is none."""
    said, kept = [], []
    meter = memory.Meter(said.append, slack=2)
    for _ in range(40):
        array = jnp.zeros((3, 5, 7), jnp.int8)
        kept.extend([array] * leaks)
        meter.window()
    meter.mark("baseline")
    meter.mark("after_init")
    assert meter.measured()["live_buffers"].startswith(found)
    assert len(said) == leaks
    assert all("live device buffers grew: int8[3, 5, 7] 4 to 16 from window 4 to 16" in text for text in said)


def test_buffers_read_ahead_are_no_growth():
    """As many more of a shape as may be in flight."""
    said = []
    meter = memory.Meter(said.append, slack=2)
    for count in (1,) * 4 + (5,) * 60:
        held = [jnp.zeros((2, 9), jnp.int8) for _ in range(count)]
        meter.window()
    assert held
    assert said == []
    held += [jnp.zeros((2, 9), jnp.int8)]
    for _ in range(64):
        meter.window()
    assert len(said) == 1


def test_a_short_run_is_not_called_constant():
    meter = memory.Meter(print, slack=0)
    for stage in ("baseline", "after_init"):
        meter.mark(stage)
    meter.window()
    assert "not checked" in meter.measured()["live_buffers"]


def test_devices_that_say(monkeypatch):
    """The device that holds the most counts, and later peaks are told in bytes."""
    stats = [{"bytes_in_use": 1 * GIB, "peak_bytes_in_use": 3 * GIB}, {"bytes_in_use": 2 * GIB, "peak_bytes_in_use": 2 * GIB}]
    devices = [SimpleNamespace(memory_stats=lambda found=found: found) for found in stats]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    assert memory.read() == (2 * GIB, 3 * GIB, "device")
    meter = memory.Meter(print, slack=0)
    for stage in ("baseline", "after_init", "first_window"):
        meter.mark(stage)
    assert meter.measured()["later_windows"] == "no more than the first"
    stats[1]["peak_bytes_in_use"] = 4 * GIB
    measured = meter.measured()
    assert measured["later_windows"] == f"{GIB:,} bytes above the first"
    assert (measured["after_init_bytes"], measured["source"]) == (2 * GIB, "device")
