"""The quickstart config keeps what its header promises. CI runs it first, by the README's command, and points here."""

import itertools
import json
import os
import re
from pathlib import Path

import pytest

CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.toml"
RUN = os.environ.get("JAXACC_QUICKSTART_RUN")


@pytest.mark.skipif(RUN is None, reason="set JAXACC_QUICKSTART_RUN to the folder of a finished quickstart run")
def test_quickstart_reaches_its_expected_loss():
    """Within the stated tolerance, and well below what a model without context could reach."""
    expected, tolerance = map(float, re.findall(r"expected_eval_loss = ([\d.]+) .*within ([\d.]+)", CONFIG.read_text())[0])
    sheet = json.loads((Path(RUN) / "sheet.json").read_text())
    assert abs(sheet["eval_loss"] - expected) < tolerance
    assert sheet["eval_loss"] < sheet["unigram_entropy"] - 0.7
    assert sheet["accumulation_steps"] >= 4
    assert sheet["attempted"] == sheet["applied"] > 100
    lengths = [json.loads(line)["tokens"] for line in (Path(RUN) / "records.jsonl").read_text().splitlines()]
    assert len({after - before for before, after in itertools.pairwise(lengths)}) > 10, "windows are not ragged"
