"""`jaxacc train` from end to end: records, checkpoints, resume, sheet, model."""

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
from jaxacc.experiment.config import Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig, load
from jaxacc.experiment.records import Records
from jaxacc.experiment.sheet import digest

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
KEYS = {
    "microbatch", "accumulation_steps", "replicas", "effective_batch", "attempted", "applied", "microbatches", "examples",
    "supervised_tokens", "precision", "normalization", "last_window", "peak_memory_bytes", "first_loss", "final_loss",
    "eval_loss", "params_sha256",
}  # fmt: skip


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def run(config, tmp_path_factory):
    """A run that was never stopped."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert main(["train", config, "--run-dir", str(folder)]) == 0
    return folder


def test_records_say_what_was_consumed(run):
    """One per update, in the words of the ledger, against the windows themselves."""
    records = lines(run / "records.jsonl")
    rows = data.load(load_config(run).data).train
    plan = data.Schedule(7, 56)
    tokens = examples = 0
    for index, (record, window) in enumerate(
        zip(records, data.windows(rows, plan, jaxacc.Split(2, 4), seed=0), strict=True), 1
    ):
        tokens += int((window["labels"][..., 1:] != data.IGNORED).sum())
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


def load_config(run):
    tree = json.loads((run / "config.json").read_text())
    return Config(
        data=DataConfig(**{**tree["data"], "paths": tuple(tree["data"]["paths"])}), model=ModelConfig(**tree["model"])
    )


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
    assert resumed == whole
    strip = lambda record: {name: value for name, value in record.items() if name != "seconds"}
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
    corpus = data.load(DataConfig(context=24, held_out=0.02))
    init, loss_fn = models.build(ModelConfig(2, 16, 2, 32), vocabulary=data.VOCABULARY, context=24)
    step = jaxacc.make_step(loss_fn, optax.sgd(0.0))
    state = step.init(jax.jit(init)(jax.random.key(0)), key=jax.random.key(1))
    window = next(data.windows(corpus.train, data.Schedule(1, 7), jaxacc.Split(2, 4), seed=0))
    evaluation = step.evaluate(state, window)
    assert int(evaluation.loss.weight) == int((window["labels"][..., 1:] != data.IGNORED).sum())
    _, info = step.update(state, window)
    assert float(info.loss) == pytest.approx(float(evaluation.loss.value), rel=1e-6)


def test_model_is_causal_and_deterministic_without_key():
    """A token changes no logits before it; dropout acts only with a key."""
    config = ModelConfig(2, 16, 2, 32, dropout=0.5, remat=True)
    init, loss_fn = models.build(config, vocabulary=data.VOCABULARY, context=8)
    params = jax.jit(init)(jax.random.key(0))
    model = models.Transformer(config, data.VOCABULARY, 8)
    apply = jax.jit(lambda tokens: model.apply({"params": params}, tokens[None], deterministic=True))
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
    init, _ = models.build(config.model, vocabulary=data.VOCABULARY, context=config.data.context)
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


def test_durations_of_the_config_are_the_plan():
    """Updates are what they say."""
    rows = data.load(DataConfig(context=24)).train
    assert data.schedule(TrainConfig(updates=7), rows, 8) == data.Schedule(7, 56)
