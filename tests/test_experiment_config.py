"""Configuration: every fault is named before anything runs, and the command line replaces quantities, not halves of them."""

import dataclasses
from pathlib import Path

import pytest

from jaxacc.experiment.cli import main
from jaxacc.experiment.config import (
    BatchConfig,
    Config,
    DataConfig,
    InputConfig,
    ModelConfig,
    TrainConfig,
    UserError,
    check,
    load,
    override,
)

VALID = "[batch]\nmicrobatch = 4\naccumulation_steps = 2\n[train]\nepochs = 1\n"
CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.toml"))


def config_of(tmp_path, text):
    path = tmp_path / "config.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configs_open_with_their_command(path):
    """Each is valid and says how to run it, how long that takes and what comes out."""
    check(load(path))
    head = path.read_text().split("[batch]")[0]
    assert head.startswith(f"# jaxacc train configs/{path.name}\n")
    assert "expect" in head
    assert "minute" in head or "hour" in head


def test_all_faults_at_once(tmp_path):
    """Unknown keys with the nearest known one, wrong types without coercion, unknown choices: in one message."""
    path = config_of(
        tmp_path,
        '[batch]\neffective = 8.7\nmicrobach = 4\n[model]\nwidth = "8"\nprecision = "bfloat"\nremat = 1\n'
        '[optmizer]\nname = "sgd"\n[data]\npaths = "a.txt"\n[train]\nseed = true\n',
    )
    with pytest.raises(UserError) as error:
        load(path)
    for part in [
        "8 faults", "batch.effective: 8.7 is a float, expected int", "did you mean 'microbatch'", "model.width: '8' is a str",
        "did you mean 'bfloat16'", "model.remat: 1 is a int", "optmizer: unknown key, did you mean 'optimizer'",
        "data.paths: 'a.txt' is not a list of strings", "train.seed: True is a bool",
    ]:  # fmt: skip
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch = 3", "batch: 3 is not a table"),
        ("[batch", "is not TOML"),
        ("[batch]\neffective = 32\nmicrobatch = 4\naccumulation_steps = 4\n[train]\nepochs = 1", "4 x accumulation_steps 4 x"),
        ("[batch]\neffective = 96\nmicrobatch = 40\n[train]\nepochs = 1", "Use microbatch dividing 96 (32, 48, ...)"),
        ("[batch]\neffective = 32\n[train]\nepochs = 1", "two of effective_batch, microbatch and accumulation_steps"),
        ("[batch]\nmicrobatch = 4\naccumulation_steps = 0\n[train]\nepochs = 1", "accumulation_steps=0 must be at least 1"),
        ("[batch]\nmicrobatch = 4\naccumulation_steps = 2", "states no duration"),
        ("[batch]\nmicrobatch = 4\naccumulation_steps = 2\n[train]\nepochs = 1\nupdates = 3", "updates=3 and epochs=1"),
        (VALID + "[model]\nwidth=10\nheads=4", "not divisible by model.heads"),
        (VALID + "[model]\ndropout=1.0", "dropout=1.0 must be less than 1"),
        (VALID + '[data]\npaths=["no.txt"]', "cannot read no.txt"),
        (VALID + '[data]\npaths=["empty.txt"]', "empty.txt is empty"),
    ],
)  # fmt: skip
def test_bad_input_exits_with_2_and_writes_nothing(tmp_path, monkeypatch, capsys, text, message):
    """One message on stderr, no traceback, no file."""
    monkeypatch.chdir(tmp_path)
    config_of(tmp_path, text)
    (tmp_path / "empty.txt").write_text(" \n")
    assert main(["train", "config.toml", "--run-dir", "run"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.startswith("jaxacc: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.toml", "empty.txt"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "missing.toml"], "cannot read the config missing.toml"),
        (["train", "--run-dir", "new", "config.toml"], "the config comes before the options: jaxacc train config.toml"),
        (["train", "config.toml", "--optimizer.learning-rate", "nan"], "optimizer.learning_rate=nan must be a finite number"),
        (["train", "config.toml", "--resume"], "--resume needs the --run-dir"),
        (["train", "config.toml", "--resume", "--run-dir", "nowhere"], "nowhere is not a run folder"),
        (["train", "config.toml", "--run-dir", "."], "exists and is not empty"),
        (["train", "config.toml", "--run-dir", "config.toml"], "is a file"),
    ],
)
def test_bad_paths(tmp_path, monkeypatch, capsys, arguments, message):
    """A missing config, a folder that is taken, a resume of nothing."""
    monkeypatch.chdir(tmp_path)
    config_of(tmp_path, VALID)
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]


def test_unknown_option_names_the_nearest(tmp_path, capsys):
    """Options are checked by the argument parser."""
    path = config_of(tmp_path, VALID)
    with pytest.raises(SystemExit, match="2"):
        main(["train", str(path), "--batch.microbach", "2"])
    assert "--batch.microbatch" in capsys.readouterr().err


FILE = {"effective": 32, "microbatch": 8}


@pytest.mark.parametrize(
    ("file", "given", "expected"),
    [
        (FILE, {}, (8, 4)),
        (FILE, {"microbatch": 4}, (4, 8)),
        (FILE, {"accumulation_steps": 2}, (16, 2)),
        (FILE, {"effective": 64}, (8, 8)),
        (FILE, {"effective": 64, "accumulation_steps": 2}, (32, 2)),
        (FILE, {"microbatch": 2, "accumulation_steps": 2}, (2, 2)),
        ({"microbatch": 8, "accumulation_steps": 4}, {"microbatch": 4}, (4, 8)),
        ({"microbatch": 8, "accumulation_steps": 4}, {"accumulation_steps": 8}, (4, 8)),
        ({"effective": 32, "accumulation_steps": 4}, {"microbatch": 4}, (4, 8)),
        ({"effective": 32, "accumulation_steps": 4}, {"effective": 64}, (16, 4)),
    ],
)
def test_batch_overrides(file, given, expected):
    """What is overridden wins, its partner is dropped, the effective batch stays."""
    base = Config(batch=BatchConfig(**file), train=TrainConfig(epochs=1))
    split = check(override(base, Config(batch=BatchConfig(**given))))
    assert (split.microbatch, split.accumulation_steps) == expected


SCHEDULE, BUDGET = {"microbatch": 8, "schedule": "0:32 9:64"}, {"microbatch": 8, "accumulation_steps": 4, "tokens": 99}


@pytest.mark.parametrize(
    ("file", "given", "expected", "sizes"),
    [
        (SCHEDULE, {}, (8, 8), ("0:32 9:64", None)),
        (SCHEDULE, {"microbatch": 4}, (4, 16), ("0:32 9:64", None)),
        (SCHEDULE, {"effective": 16}, (8, 2), (None, None)),
        (SCHEDULE, {"schedule": "0:8"}, (8, 1), ("0:8", None)),
        (SCHEDULE, {"tokens": 5, "accumulation_steps": 3}, (8, 3), (None, 5)),
        (BUDGET, {}, (8, 4), (None, 99)),
        (BUDGET, {"accumulation_steps": 7}, (8, 7), (None, 99)),
        (BUDGET, {"tokens": 5}, (8, 4), (None, 5)),
        (BUDGET, {"effective": 16}, (8, 2), (None, None)),
        (BUDGET, {"schedule": "0:8"}, (8, 1), ("0:8", None)),
        (FILE, {"schedule": "0:8 5:16"}, (8, 2), ("0:8 5:16", None)),
    ],
)
def test_schedules_and_budgets_override(file, given, expected, sizes):
    """One way to size windows replaces the other, and keeps the microbatch."""
    base = Config(batch=BatchConfig(**file, last="drop"), train=TrainConfig(epochs=1))
    config = override(base, Config(batch=BatchConfig(**given, last="drop")))
    split = check(config)
    assert (split.microbatch, split.accumulation_steps) == expected
    assert (config.batch.schedule, config.batch.tokens) == sizes


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch": BatchConfig(microbatch=8, schedule="0:32", effective=32)}, "schedule states the effective batches"),
        ({"batch": BatchConfig(microbatch=8, schedule="0:30")}, "30 is not divisible by microbatch 8"),
        ({"batch": BatchConfig(microbatch=8, schedule="5:32")}, "must begin with 0"),
        ({"batch": BatchConfig(microbatch=8, tokens=100)}, "accumulation_steps as the most of a window"),
        ({"model": ModelConfig(name="unet")}, 'model.name="unet" cannot read data.source="text"'),
        ({"data": DataConfig(source="shapes")}, "Use the unet"),
        ({"data": DataConfig(source="tokens", paths=("a.npy",), vocabulary=9), "input": InputConfig(workers=1)}, "whole token"),
    ],
)
def test_what_does_not_go_together(options, said):
    base = Config(batch=BatchConfig(**FILE), train=TrainConfig(epochs=1))
    with pytest.raises(UserError, match=said):
        check(dataclasses.replace(base, **options))


def test_three_contradicting_overrides_are_refused():
    """All three on the command line have to agree."""
    base = Config(batch=BatchConfig(**FILE), train=TrainConfig(epochs=1))
    with pytest.raises(UserError, match="effective_batch=64 contradicts microbatch 4 x accumulation_steps 4"):
        check(override(base, Config(batch=BatchConfig(64, 4, 4))))


@pytest.mark.parametrize("unit", ["updates", "epochs", "tokens"])
def test_a_duration_replaces_the_duration(unit):
    """Whatever the unit in the file was."""
    base = Config(train=TrainConfig(epochs=3))
    train = override(base, Config(train=TrainConfig(**{unit: 7}))).train
    assert {name: getattr(train, name) for name in ("updates", "epochs", "tokens")} == {
        **dict.fromkeys(("updates", "epochs", "tokens")),
        unit: 7,
    }
    assert override(base, Config()).train.epochs == 3
