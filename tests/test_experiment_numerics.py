"""What `[numerics]` and `model.precision` do to a run."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxacc.experiment import models
from jaxacc.experiment.cli import main
from jaxacc.experiment.config import load
from jaxacc.experiment.prepare import prepare

CONFIG = """
[batch]
effective = 8
microbatch = 2
[train]
updates = 4
eval_every = 0
[data]
context = 16
held_out = 0.01
[model]
layers = 2
width = 16
heads = 2
hidden = 32
dropout = 0.1
[optimizer]
learning_rate = 1e-2
[checkpoint]
every = 0
"""


once = pytest.mark.skipif(sys.version_info < (3, 12), reason="slow: one Python is enough")


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("precision", "held", "scaled"),
    [
        ("float16", "float32", True), pytest.param("bfloat16", "float32", False, marks=once),
        pytest.param("bfloat16_params", "bfloat16", False, marks=once),
    ],
)  # fmt: skip
def test_precisions(precision, held, scaled, config, tmp_path):
    """Every policy learns; the sheet names it; a float16 run has its scale in state, records and checkpoints."""
    arguments = ["train", config, "--run-dir", str(tmp_path / "run"), "--model.precision", precision]
    arguments += [
        "--numerics.loss-scale",
        "1024",
        "--numerics.loss-scale-growth",
        "3",
        "--numerics.noise-scale",
        "microbatches",
    ]
    assert main(arguments) == 0
    sheet = json.loads((tmp_path / "run" / "sheet.json").read_text())
    records = lines(tmp_path / "run" / "records.jsonl")
    assert sheet["precision"].startswith(precision.removesuffix("_params"))
    assert (sheet["final_loss"] < sheet["first_loss"], sheet["skipped"]) == (True, 0)
    assert [r.get("loss_scale") for r in records] == ([1024, 1024, 1024, 2048] if scaled else [None] * 4)
    assert sheet["loss_scale"] == (2048 if scaled else "none")
    assert sheet["noise_scale"] == "unavailable" or sheet["noise_scale"] > 0
    file = load(Path(config))
    state = prepare(replace(file, model=replace(file.model, precision=precision))).state
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(state.params)} == {held}
    if scaled:
        assert main([*arguments, "--train.updates", "5", "--resume"]) == 0
        assert [(r["attempted"], r["loss_scale"]) for r in lines(tmp_path / "run" / "records.jsonl")][3:] == [
            (4, 2048),
            (5, 2048),
        ]


def test_row_keys_make_dropout_independent_of_the_split(config, tmp_path):
    """The same losses for (m, A) = (2, 4) and (4, 2), dropout on."""

    def losses(microbatch):
        folder = tmp_path / str(microbatch)
        options = ["--batch.microbatch", str(microbatch), "--model.dropout", "0.5", "--numerics.row-keys"]
        assert main(["train", config, "--run-dir", str(folder), *options]) == 0
        return [record["loss"] for record in lines(folder / "records.jsonl")]

    losses_of_two = losses(2)
    assert losses_of_two == pytest.approx(losses(4), rel=1e-5)
    assert losses_of_two[-1] < losses_of_two[0] - 0.05


def test_a_run_that_only_skips_ends(config, tmp_path, monkeypatch, capsys):
    """After `raise_after` skipped windows in a row, with the counts."""
    build = models.build

    def broken(*args, **kwargs):
        init, loss_fn = build(*args, **kwargs)
        return init, lambda params, microbatch, key: jax.tree.map(
            lambda x: x * jnp.float32(jnp.inf) if x.dtype == jnp.float32 else x, loss_fn(params, microbatch, key)
        )

    monkeypatch.setattr(models, "build", broken)
    assert main(["train", config, "--run-dir", str(tmp_path / "run"), "--numerics.raise-after", "3"]) == 1
    assert "the last 3 windows were all skipped (0 of 3 attempted were applied)" in capsys.readouterr().err
