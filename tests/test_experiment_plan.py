"""`jaxacc plan`, and `jaxacc train` with a microbatch that is planned first."""

import itertools
import json
import sys
from pathlib import Path

import pytest

from jaxacc.experiment.cli import main
from jaxacc.experiment.config import check, load

pytestmark = pytest.mark.skipif(sys.version_info < (3, 12), reason="slow: test_plan.py runs on either")

CONFIG = """
# kept
[batch]
effective = 4
accumulation_steps = 2  # replaced
last = "drop"
[train]
updates = 2
[data]
context = 48
held_out = 0.02
[model]
layers = 2
width = 16
heads = 2
hidden = 32
"""


@pytest.fixture(scope="module")
def trained(config, tmp_path_factory):
    """A run whose microbatch was planned, of which the big batch would not fit: its folder."""
    folder = tmp_path_factory.mktemp("runs") / "auto"
    options = ["--batch.microbatch", "auto", "--batch.budget", "1MB"]
    assert main(["train", config, "--run-dir", str(folder), *options]) == 0
    return folder


def test_train_plans_first(trained):
    """The folder states the microbatch as a number, of which the effective batch is a multiple."""
    sheet, config = (json.loads((trained / f"{name}.json").read_text()) for name in ("sheet", "config"))
    assert sheet["microbatch"] == 2
    assert config["batch"]["microbatch"] == sheet["microbatch"]
    assert sheet["microbatch"] * sheet["accumulation_steps"] == sheet["effective_batch"] == 4
    assert sheet["examples"] == 8


def test_the_plan_is_what_train_compiles(trained, config, tmp_path, capsys):
    """Its bytes are within 1 % of the compiled update's, and the written config trains the same."""
    path = tmp_path / "written.toml"
    path.write_text(Path(config).read_text())
    json_file = tmp_path / "plan.json"
    assert main(["plan", str(path), "--budget", "1MB", "--write", "--output", str(json_file)]) == 0
    told = capsys.readouterr().out
    sheet = json.loads((trained / "sheet.json").read_text())
    planned = json.loads(json_file.read_text())
    assert sheet["peak_memory_source"] == "compiled update"
    assert planned["total"] == pytest.approx(sheet["peak_memory_bytes"], rel=0.01)
    totals = [candidate["total"] for candidate in planned["candidates"]]
    assert min(b / a for a, b in itertools.pairwise(totals)) > 1.02
    for text in ("activations and other temp", "does not fit", "compiled microbatch 4 x 1", "estimate"):
        assert text in told
    assert check(load(path)).microbatch == sheet["microbatch"] == planned["microbatch"]
    text = path.read_text()
    assert "# kept" in text
    assert "# replaced" not in text
    assert 'last = "drop"' in text


def test_another_effective_batch(config, capsys):
    """On a mesh; and everything fits."""
    assert main(["plan", config, "--budget", "1GiB", "--effective", "8", "--mesh", "data=2"]) == 0
    assert "microbatch 4 x accumulation steps 1 x replicas 2 = 8" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("plan", [], "State budget="),
        ("plan", ["--budget", "lots"], "'lots' is no amount of memory"),
        ("plan", ["--target", "h10x8"], "target='h10x8' is not known. Nearest: h100x8"),
        ("plan", ["--budget", "1KB"], "accumulation cannot help"),
        ("plan", ["--budget", "1GB", "--effective", "0"], "batch.effective=0 must be at least 1"),
        ("plan", ["--budget", "1GB", "--effective", "9", "--mesh", "data=2"], "Set effective_batch to 8 or 10"),
        ("plan", ["--batch.schedule", "0:8", "--batch.microbatch", "2"], "for one effective batch"),
        ("train", ["--batch.microbatch", "auto", "--batch.accumulation-steps", "2"], "state effective and nothing else"),
        ("train", ["--batch.microbatch", "auto", "--batch.budget", "-3"], "'-3' is no amount of memory"),
    ],
)
def test_bad_input(config, capsys, tmp_path, command, options, message):
    """One message, status 2, and nothing written."""
    where = ["--run-dir", str(tmp_path / "run")] if command == "train" else []
    assert main([command, config, *where, *options]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


def test_auto_in_a_file(tmp_path):
    """The word is read, another one is not."""
    path = tmp_path / "auto.toml"
    path.write_text('[batch]\neffective = 8\nmicrobatch = "auto"\n[train]\nupdates = 1\n')
    assert load(path).batch.microbatch == "auto"
    path.write_text(path.read_text().replace("auto", "much"))
    assert main(["plan", str(path)]) == 2
