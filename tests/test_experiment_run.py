"""`jaxacc train` from end to end: records, checkpoints, resume, sheet, model."""

import dataclasses
import itertools
import json
import math
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxacc
from jaxacc.experiment import data, models, optimizers
from jaxacc.experiment.cli import main
from jaxacc.experiment.config import BatchConfig, Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig, check, load
from jaxacc.experiment.records import Records
from jaxacc.experiment.rows import IGNORED
from jaxacc.experiment.sheet import digest
from jaxacc.experiment.sources import load as load_data
from jaxacc.experiment.tokens import VOCABULARY

CONFIG = """
[batch]
effective = 8
microbatch = 2
[train]
updates = 7
eval_every = 3
[data]
context = 24
held_out = 0.02
[model]
layers = 2
width = 16
heads = 2
hidden = 32
dropout = 0.1
[optimizer]
learning_rate = 1e-2
warmup = 2
[checkpoint]
every = 2
keep = 4
"""
MODEL = ModelConfig(layers=2, width=16, heads=2, hidden=32)
KEYS = {
    "microbatch", "accumulation_steps", "replicas", "effective_batch", "attempted", "applied", "microbatches", "examples",
    "supervised_tokens", "precision", "normalization", "last_window", "peak_memory_bytes", "first_loss", "final_loss",
    "eval_loss", "params_sha256",
}  # fmt: skip


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def windows_of(config):
    """The windows of a config, read one by one."""
    rows, split = load_data(config.data).train, check(config)
    plan = data.plan_run(config, split, rows)
    reader = data.reader(rows, data.order(len(rows.targets), config.train.seed), plan, split, None)
    return [reader(number) for number in range(plan.updates)]


@pytest.fixture(scope="module")
def run(config, tmp_path_factory):
    """A run that was never stopped."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert main(["train", config, "--run-dir", str(folder)]) == 0
    return folder


def test_records_say_what_was_consumed(run, config):
    """One per update, in the words of the ledger, against the windows themselves."""
    records = lines(run / "records.jsonl")
    tokens = examples = 0
    for index, (record, window) in enumerate(zip(records, windows_of(load(Path(config))), strict=True), 1):
        tokens += int((window["labels"][..., 1:] != IGNORED).sum())
        examples += 8
        assert record["attempted"] == record["applied"] == index
        assert (record["microbatches"], record["examples"], record["tokens"]) == (4 * index, examples, tokens)
        assert record["outcome"] == "APPLIED"
        assert record["seconds"] > 0
        assert 0 < record["grad_norm"] < 100
    rate = optimizers.build(OptimizerConfig(learning_rate=1e-2, warmup=2), 7)[1]
    assert [r["lr"] for r in records] == pytest.approx([float(rate(i)) for i in range(7)])
    assert records[-1]["loss"] < records[0]["loss"]
    assert [e["attempted"] for e in lines(run / "evals.jsonl")] == [3, 6, 7]


def test_sheet(run):
    """Every key, and numbers that agree with the records."""
    sheet = json.loads((run / "sheet.json").read_text())
    assert set(sheet) >= KEYS
    records = lines(run / "records.jsonl")
    assert (sheet["microbatch"], sheet["accumulation_steps"], sheet["replicas"], sheet["effective_batch"]) == (2, 4, 1, 8)
    assert (sheet["attempted"], sheet["applied"], sheet["microbatches"], sheet["examples"]) == (7, 7, 28, 56)
    assert sheet["supervised_tokens"] == records[-1]["tokens"]
    assert (sheet["first_loss"], sheet["final_loss"]) == (records[0]["loss"], records[-1]["loss"])
    assert sheet["eval_loss"] == lines(run / "evals.jsonl")[-1]["loss"]
    assert sheet["peak_memory_bytes"] > 3 * 4 * sheet["parameters"]
    assert re.fullmatch(r"[0-9a-f]{64}", sheet["params_sha256"])


@pytest.mark.parametrize("stop", [2, 5])
def test_resume_is_bit_equal(run, config, tmp_path, stop):
    """Stopped after a checkpoint (with records beyond it), resumed: parameters, records and evaluations are the same."""
    folder = tmp_path / "stopped"
    shutil.copytree(run, folder)
    (folder / "sheet.json").unlink()
    kept = max(step for step in (2, 4) if step <= stop)
    for path in (folder / "checkpoints").iterdir():
        if int(path.name) > kept:
            shutil.rmtree(path)
    for name in ("records.jsonl", "evals.jsonl"):
        beyond = [line for line in (folder / name).read_text().splitlines(True) if json.loads(line)["attempted"] <= stop]
        (folder / name).write_text("".join(beyond) + '{"attempted": 9')
    assert main(["train", config, "--run-dir", str(folder), "--resume"]) == 0
    whole, resumed = (json.loads((f / "sheet.json").read_text()) for f in (run, folder))
    assert all(sheet.pop("measured_memory")["source"] for sheet in (whole, resumed))
    assert resumed == whole
    measured = ("seconds", "waited", "memory_bytes")
    strip = lambda record: {name: value for name, value in record.items() if name not in measured}
    for name in ("records.jsonl", "evals.jsonl"):
        assert [*map(strip, lines(folder / name))] == [*map(strip, lines(run / name))]


def test_a_finished_run_stays_what_it_is(run, config, tmp_path):
    """Resuming it changes nothing; going on needs a longer duration."""
    folder = tmp_path / "finished"
    shutil.copytree(run, folder)
    before = (folder / "sheet.json").read_text()
    assert main(["train", config, "--run-dir", str(folder), "--resume"]) == 0
    assert (folder / "sheet.json").read_text() == before
    assert main(["train", config, "--run-dir", str(folder), "--resume", "--train.updates", "8"]) == 0
    assert json.loads((folder / "sheet.json").read_text())["attempted"] == 8
    assert len(lines(folder / "records.jsonl")) == 8


def test_resume_refuses_another_experiment(run, config, capsys):
    """Each difference is named, and nothing is touched."""
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    overrides = ["--model.hidden", "32", "--optimizer.learning-rate", "1e-4", "--batch.microbatch", "4", "--train.seed", "3"]
    assert main(["train", config, "--run-dir", str(run), "--resume", *overrides]) == 2
    err = capsys.readouterr().err
    for part in ("optimizer.learning_rate: 0.01 in the run, 0.0001 now", "'microbatch': 4", "train.seed: 0 in the run, 3 now"):
        assert part in err
    assert "model.hidden" not in err
    assert main(["train", config, "--run-dir", str(run)]) == 2
    assert "--resume to continue" in capsys.readouterr().err
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}


def test_a_run_without_checkpoint_starts_again(config, tmp_path, capsys):
    """And says so."""
    folder = tmp_path / "begun"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "records.jsonl").write_text('{"attempted": 1, "loss": 5.0}\n')
    assert main(["train", config, "--run-dir", str(folder), "--resume"]) == 0
    assert "starting from update 0" in capsys.readouterr().out
    assert [r["attempted"] for r in lines(folder / "records.jsonl")] == [1, 2, 3, 4, 5, 6, 7]


def test_the_split_does_not_matter(config, tmp_path):
    """Without dropout, A = 1 and A = 4 end at the same losses: the same rows in every update."""
    evals = []
    for steps in (1, 4):
        folder = tmp_path / str(steps)
        options = ["--batch.accumulation-steps", str(steps), "--model.dropout", "0", "--train.updates", "3"]
        assert main(["train", config, "--run-dir", str(folder), *options]) == 0
        sheet = json.loads((folder / "sheet.json").read_text())
        assert sheet["accumulation_steps"] == steps
        evals.append([sheet["first_loss"], sheet["final_loss"], sheet["eval_loss"]])
    assert evals[0] == pytest.approx(evals[1], rel=1e-5)
    assert abs(evals[0][1] - evals[0][0]) > 0.05


def test_train_loss_at_rate_0_is_the_eval_loss():
    """On the same rows, without dropout."""
    batch, train = BatchConfig(microbatch=2, accumulation_steps=4), TrainConfig(updates=1)
    window = windows_of(Config(batch, train, DataConfig(context=24, held_out=0.02)))[0]
    init, loss_fn = models.build(MODEL, vocabulary=VOCABULARY, row={"tokens": window["tokens"][0]})
    step = jaxacc.make_step(loss_fn, optax.sgd(0.0))
    state = step.init(jax.jit(init)(jax.random.key(0)), key=jax.random.key(1))
    evaluation = step.evaluate(state, window)
    assert int(evaluation.loss.weight) == int((window["labels"][..., 1:] != IGNORED).sum())
    _, info = step.update(state, window)
    assert float(info.loss) == pytest.approx(float(evaluation.loss.value), rel=1e-6)


def test_model_is_causal_and_deterministic_without_key():
    """A token changes no logits before it; dropout acts only with a key."""
    config = dataclasses.replace(MODEL, dropout=0.5, remat=True)
    init, loss_fn = models.build(config, vocabulary=VOCABULARY, row={"tokens": np.zeros((1, 8), np.int32)})
    params = jax.jit(init)(jax.random.key(0))
    model = models.Transformer(config, VOCABULARY, 8)
    apply = jax.jit(lambda tokens: model.apply({"params": params}, tokens[None], None, deterministic=True))
    one, other = apply(jnp.arange(8)), apply(jnp.arange(8).at[4].set(9))
    assert jnp.array_equal(one[:, :4], other[:, :4])
    assert not jnp.allclose(one[:, 4:], other[:, 4:])
    tokens = jnp.arange(16).reshape(2, 8)
    microbatch = {"tokens": tokens, "labels": tokens}
    total = jax.jit(lambda key: loss_fn(params, microbatch, key).total)
    with_keys = [float(total(jax.random.key(k))) for k in (0, 0, 1)]
    assert with_keys[0] == with_keys[1] != with_keys[2] != float(total(None))


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor"])
@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear"])
def test_optimizers(name, schedule):
    """Warmup to the peak, then down to a tenth or constant; norm scales do not decay."""
    config = OptimizerConfig(name, 0.5, schedule, warmup=10, weight_decay=0.1)
    tx, rate = optimizers.build(config, 100)
    assert [float(rate(i)) for i in (0, 4, 9)] == pytest.approx([0.05, 0.25, 0.5])
    assert float(rate(10)) == pytest.approx(0.5)
    assert float(rate(100)) == pytest.approx(0.5 if schedule == "constant" else 0.05)
    params = {"norm": {"scale": jnp.ones((2, 3))}, "dense": {"kernel": jnp.ones((2, 3))}}
    state = tx.init(params)
    for _ in range(3):
        updates, state = tx.update(jax.tree.map(jnp.zeros_like, params), state, params)
        params = optax.apply_updates(params, updates)
    decayed = params["dense"]["kernel"]
    assert jnp.array_equal(params["norm"]["scale"], jnp.ones((2, 3)))
    assert bool((decayed < 1).all()) is (name == "adamw")


def test_small_lm_would_fit_its_words():
    """The larger config builds: shapes only, nothing is allocated."""
    config = load(Path(__file__).parents[1] / "configs" / "small_lm.toml")
    init, _ = models.build(config.model, vocabulary=VOCABULARY, row={"tokens": np.zeros((1, config.data.context), np.int32)})
    shapes = jax.eval_shape(init, jax.random.key(0))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)) > 80e6
    assert config.model.remat


def test_records_never_end_in_half_a_line(tmp_path):
    """What was cut by a crash, or lies beyond the checkpoint, goes; NaN is null."""
    path = tmp_path / "records.jsonl"
    path.write_text('{"attempted": 1}\n{"attempted": 2}\n{"attempted": 3}\n{"att')
    records = Records(path, upto=2)
    records.append({"attempted": 3, "loss": math.nan})
    records.close()
    assert lines(path) == [{"attempted": 1}, {"attempted": 2}, {"attempted": 3, "loss": None}]
    assert records.first == {"attempted": 1}


def test_digest_sees_every_bit():
    """Of values, dtypes, shapes and names."""
    params = {"a": np.arange(6.0).reshape(2, 3), "b": np.float32(1)}
    variants = [
        params, {**params, "b": np.nextafter(np.float32(1), np.float32(2))}, {**params, "a": params["a"].reshape(3, 2)},
        {**params, "a": params["a"].astype(np.float32)}, {"c": params["a"], "b": params["b"]}, {"a": params["a"]},
    ]  # fmt: skip
    assert len({digest(variant) for variant in variants}) == len(variants)
    assert digest(params) == digest(dict(reversed(params.items())))


def test_a_packed_sequence_gives_the_same_loss_as_alone():
    """No attention and no targets across segments, positions from the segment's start: packed equals separate (case 154)."""
    init, loss_fn = models.build(MODEL, vocabulary=VOCABULARY, row={"tokens": np.zeros((1, 12), np.int32)})
    params = jax.tree.map(lambda leaf: leaf * 8, jax.jit(init)(jax.random.key(0)))  # attention that is far from uniform
    pieces = [np.arange(1, 4), np.arange(4, 9), np.arange(20, 23)]
    alone = np.full((3, 12), 256), np.full((3, 12), IGNORED)
    packed = np.full((1, 12), 256), np.full((1, 12), IGNORED), np.zeros((1, 12), int)
    column = 0
    for row, piece in enumerate(pieces):
        for array in alone:
            array[row, : len(piece)] = piece
        for array in packed:
            array[0, column : column + len(piece)] = piece
        packed[2][0, column : column + len(piece)] = row + 1
        column += len(piece)
    names = ("tokens", "labels", "segment_ids")
    loss = jax.jit(lambda microbatch: loss_fn(params, microbatch, None))
    separate = loss(dict(zip(names, alone, strict=False)))
    together = loss(dict(zip(names, packed, strict=True)))
    across = loss(dict(zip(names, packed[:2], strict=False)))
    assert int(separate.weight) == int(together.weight) == 2 + 4 + 2
    assert float(together.total) == pytest.approx(float(separate.total), rel=1e-5)
    assert int(across.weight) == 10
    assert abs(float(across.value) - float(separate.value)) > 0.01


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        (["--batch.last", "process"], [8, 8, 4] * 2),
        (["--batch.schedule", "0:4 2:8"], [4, 4, 8, 8, 8, 8]),
        (["--batch.tokens", "100", "--batch.accumulation-steps", "4"], None),
    ],
)
def test_windows_and_resumes_inside_an_epoch(options, rows, tmp_path, config):
    """Two epochs of 20 rows in short windows, by a schedule and by a budget: records count them, a resume is bit-equal."""
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"{n} " + "abcd" * (n % 4 + 1) for n in range(21)))
    base = ["train", config, "--data.paths", str(text), "--data.documents", "paragraph", "--data.held-out", "0.001"]
    base += ["--train.epochs", "2", "--train.eval-every", "0", *options]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert main([*base, "--run-dir", str(whole)]) == 0
    records, sheet = lines(whole / "records.jsonl"), json.loads((whole / "sheet.json").read_text())
    examples = [0, *(record["examples"] for record in records)]
    if rows is not None:
        assert [b - a for a, b in itertools.pairwise(examples)] == rows
    assert examples[-1] == 40
    assert (sheet["examples_dropped"], sheet["last_window"]) == (0, "process" if "process" in options else "carry")
    assert sheet["examples_carried"] == (4 if "--batch.schedule" in options else sheet["examples_carried"])
    shutil.copytree(whole, stopped)
    for folder in (stopped / "checkpoints").iterdir():
        if folder.name.isdecimal() and int(folder.name) > 2:
            shutil.rmtree(folder)
    assert main([*base, "--run-dir", str(stopped), "--resume"]) == 0
    again = json.loads((stopped / "sheet.json").read_text())
    assert again["params_sha256"] == sheet["params_sha256"]
    assert [r["loss"] for r in lines(stopped / "records.jsonl")] == [r["loss"] for r in records]


def test_segmentation(config, tmp_path):
    """A U-Net on generated images: the loss falls, and any microbatch gives the same first loss."""
    options = [
        "--data.source",
        "shapes",
        "--data.size",
        "16",
        "--data.examples",
        "40",
        "--data.context",
        "128",
        "--model.name",
        "unet",
    ]
    options += [
        "--model.layers",
        "1",
        "--model.width",
        "4",
        "--train.updates",
        "12",
        "--model.dropout",
        "0",
        "--train.eval-every",
        "0",
    ]
    sheets = []
    for steps in ("2", "8"):
        assert main(["train", config, *options, "--batch.accumulation-steps", steps, "--run-dir", str(tmp_path / steps)]) == 0
        sheets.append(json.loads((tmp_path / steps / "sheet.json").read_text()))
    assert sheets[0]["first_loss"] == pytest.approx(sheets[1]["first_loss"], rel=1e-5)
    assert sheets[0]["eval_loss"] < sheets[0]["first_loss"] - 0.05
    assert sheets[0]["normalization"].startswith("labelled pixels")
    assert sheets[0]["supervised_tokens"] < 12 * 8 * 16 * 16


def test_conversations_that_are_cut_are_said(config, tmp_path, capsys):
    """A response beyond the context is cut, counted and told once; only responses are supervised."""
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"prompt": "p", "response": "r" * n}) + "\n" for n in (2, 3, 4, 60, 70)))
    options = ["--data.source", "jsonl", "--data.paths", str(path), "--train.updates", "1", "--data.held-out", "0.01"]
    assert main(["train", config, *options, "--run-dir", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert said.count("note:") == 1
    assert "2 of 5" in said
