"""Runs that are stopped, damaged, moved to another mesh or continued twice."""

import gc
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import jaxacc
from benchmarks import kill
from jaxacc.experiment import run as runner
from jaxacc.experiment.checkpoint import open_checkpoints
from jaxacc.experiment.checksum import checksums
from jaxacc.experiment.cli import main
from jaxacc.experiment.config import UserError, load
from jaxacc.experiment.folder import locked
from jaxacc.experiment.sheet import digest
from jaxacc.experiment.stop import INTERRUPTED, STOPPED, Agreement, Reason, parse_duration, stopping

CONFIG = """
[batch]
effective = 8
microbatch = 8
[train]
updates = 6
eval_every = 2
[data]
context = 16
held_out = 0.01
[model]
layers = 1
width = 16
heads = 2
hidden = 32
dropout = 0.2
[numerics]
row_keys = true
[optimizer]
learning_rate = 1e-2
[checkpoint]
every = 2
keep = 3
"""


pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax's readers, of damage


@pytest.fixture
def damaging():
    """What Orbax's threads still say of a damaged file, they say before the next test."""
    yield
    gc.collect()
    time.sleep(0.5)


OLD = sys.version_info < (3, 12)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def sheet_of(folder):
    sheet = json.loads((folder / "sheet.json").read_text())
    assert sheet.pop("measured_memory")["source"]
    return sheet


def steps_of(folder):
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdecimal())


def train(config, folder, *options):
    return main(["train", str(config), "--run-dir", str(folder), *options])


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    """A run that was never stopped."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert train(config, folder) == 0
    return folder


@pytest.fixture
def copied(whole, tmp_path):
    """A copy of it that may be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def stop_after(monkeypatch, windows):
    """Ask for a stop once so many windows were attempted, as a signal would."""

    class Stopper(Agreement):
        def __call__(self, attempted):
            if attempted == windows:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().__call__(attempted)

    monkeypatch.setattr(runner, "Agreement", Stopper)


def assert_same_run(folder, whole):
    """Sheets, with the digest of the parameters, and records agree; every update is there once."""
    assert sheet_of(folder) == sheet_of(whole)
    measured = ("seconds", "waited", "memory_bytes")
    strip = lambda record: {name: value for name, value in record.items() if name not in measured}
    for name in ("records.jsonl", "evals.jsonl"):
        assert [*map(strip, lines(folder / name))] == [*map(strip, lines(whole / name))]
    assert [record["attempted"] for record in lines(folder / "records.jsonl")] == list(range(1, 7))


def test_stopped_at_every_window(config, whole, tmp_path, monkeypatch, capsys):
    """SIGTERM finishes the window in flight, saves, exits with 75 and says how to go on; the end is bit-equal (law 7)."""
    folder = tmp_path / "run"
    for windows in range(1, 6):
        with monkeypatch.context() as patch:
            stop_after(patch, windows)
            again = ("--resume",) if windows > 1 else ()
            assert train(config if windows == 1 else folder / "config.json", folder, *again) == STOPPED
        assert f"stopped by SIGTERM after update {windows}, saved." in capsys.readouterr().out.replace("\n", " ")
        assert steps_of(folder)[-1] == windows
        assert len(lines(folder / "records.jsonl")) == windows
        assert not (folder / "sheet.json").exists()
    assert train(folder / "config.json", folder, "--resume") == 0
    assert_same_run(folder, whole)


def test_a_limit_of_time(config, tmp_path, capsys):
    """Saved after the window in which it ends, with the same status."""
    assert train(config, tmp_path / "run", "--stop-after", "0s") == STOPPED
    assert "stopped by the time limit after update 1, saved." in capsys.readouterr().out.replace("\n", " ")
    assert train(config, tmp_path / "other", "--stop-after", "soon") == 2
    assert "'soon' is not a duration" in capsys.readouterr().err
    assert [parse_duration(text) for text in ("3h50m", "90s", "1d", "20")] == [13800, 90, 86400, 20]


def test_signals():
    """The first SIGINT asks to stop, the second interrupts at once; handlers are put back."""
    before = signal.getsignal(signal.SIGTERM)
    with stopping(None) as stop:
        assert stop(1) is None
        os.kill(os.getpid(), signal.SIGINT)
        assert stop(2) == Reason("SIGINT", INTERRUPTED)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) == before


def flip(step):
    """One bit in every file that holds arrays."""
    for path in data_files(step):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 4
        path.write_bytes(bytes(content))


def data_files(step):
    return [path for path in (step / "params").rglob("*") if path.is_file() and path.parent.name == "d"]


DAMAGES = {
    "bit flip": flip,
    "truncated": lambda step: [os.truncate(path, 10) for path in data_files(step)],
    "item gone": lambda step: shutil.rmtree(step / "opt_state"),
    "meta cut": lambda step: os.truncate(step / "meta" / "metadata", 40),
    "meta changed": lambda step: (step / "meta" / "metadata").write_text(
        (step / "meta" / "metadata").read_text().replace('"attempted": 6', '"attempted": 5')
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over(damaging, damage, config, whole, copied, capsys):
    """Named, with the reason, and left in place; the run goes on from the newest good one to the same end (section O)."""
    DAMAGES[damage](copied / "checkpoints" / "6")
    assert train(config, copied, "--resume") == 0
    out = capsys.readouterr().out.replace("\n", "")
    assert f"checkpoint {copied}/checkpoints/6 is damaged, and left in place:".replace(" ", "") in out.replace(" ", "")
    assert "resuming after update 4 of 6" in out
    assert_same_run(copied, whole)
    assert (copied / "checkpoints" / "6.bad").exists()  # its place was needed for the good one


def test_no_checkpoint_is_readable(damaging, config, copied, capsys):
    """A clear error, not a new start."""
    for step in steps_of(copied):
        DAMAGES["bit flip"](copied / "checkpoints" / str(step))
    before = (copied / "records.jsonl").read_text()
    assert train(config, copied, "--resume") == 2
    assert "none of the checkpoints" in capsys.readouterr().err
    assert (copied / "records.jsonl").read_text() == before


def test_another_model_names_its_leaves(config, copied, capsys):
    """Though the change of configuration was allowed."""
    assert train(config, copied, "--resume", "--allow-change", "--model.hidden", "64") == 2
    err = capsys.readouterr().err
    assert "is of another model or optimizer" in err
    assert "float32[1, 16, 32] in the checkpoint, float32[1, 16, 64] now" in err
    assert train(config, copied, "--resume", "--allow-change", "--optimizer.name", "sgd") == 2
    assert "missing now" in capsys.readouterr().err


def test_a_newer_format(config, copied, monkeypatch, capsys):
    """Refused by name, not taken for damage."""
    monkeypatch.setattr("jaxacc.experiment.checkpoint.FORMAT", 0)
    assert train(config, copied, "--resume") == 2
    assert "has format 1, and this jaxacc reads 0 at most" in capsys.readouterr().err


def test_restoring_best_or_a_given_update(config, whole, copied, capsys):
    """Later checkpoints are put aside, so that the run writes them anew, to the same end."""
    assert train(config, copied, "--resume", "--resume-from", "5") == 2
    assert "There are those of update 2, 4, 6" in capsys.readouterr().err
    assert train(config, copied, "--resume", "--resume-from", "2") == 0
    assert "resuming after update 2 of 6" in capsys.readouterr().out
    assert_same_run(copied, whole)
    assert (copied / "checkpoints" / "4.aside").is_dir()
    best = min(lines(whole / "evals.jsonl"), key=lambda record: record["loss"])["attempted"]
    assert train(config, copied, "--resume", "--resume-from", "best") == 0
    assert f"resuming after update {best} of 6" in capsys.readouterr().out


def test_retention(damaging, tmp_path):
    """The newest, the best by eval loss and every n-th stay; a damaged one neither counts nor goes."""

    step = jaxacc.make_step(lambda params, microbatch, key: params, optax.sgd(0.1))
    state = step.init({"w": jnp.arange(400.0)})
    losses = {1: 5.0, 2: 1.0, 3: 2.0, 4: 3.0, 5: 4.0, 6: None, 7: 6.0}
    checkpoints = open_checkpoints(tmp_path, keep=2, best=1, every=5)
    for attempted, loss in losses.items():
        checkpoints.save(attempted, state, {"config": {}}, eval_loss=loss)
        checkpoints.wait()
    assert (checkpoints.steps(), checkpoints.best()) == ([2, 5, 6, 7], 2)
    checkpoints.close()
    checkpoints = open_checkpoints(tmp_path, keep=2, best=1, every=5)
    assert checkpoints.best() == 2
    DAMAGES["bit flip"](tmp_path / "7")
    assert checkpoints.newest_of([7, 6], state, lambda *_: None, lambda _: None).attempted == 6
    checkpoints.save(8, state, {"config": {}})
    checkpoints.wait()
    assert checkpoints.steps() == [2, 5, 6, 8]
    assert (tmp_path / "7").is_dir()
    checkpoints.close()


def test_checksums_see_every_bit():
    """Flips, swaps and lost tails, of every dtype; the same wherever the leaf lies."""
    rng = np.random.default_rng(0)
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    for dtype in (np.float32, np.int8, np.float16, np.bool_, np.complex64):
        noise = rng.normal(size=(8, 5)) * 10
        leaf = noise > 0 if dtype is np.bool_ else noise.astype(dtype)
        (sums,) = checksums([jnp.asarray(leaf)])
        assert checksums([jax.device_put(leaf, spread)]) == [sums]
        raw = bytearray(leaf.tobytes())
        for at in (0, len(raw) // 2, len(raw) - 1):
            flipped = bytearray(raw)
            flipped[at] ^= 1
            changed = np.frombuffer(bytes(flipped), dtype).reshape(leaf.shape)
            assert checksums([jnp.asarray(changed)]) != [sums]
        assert checksums([jnp.asarray(leaf[::-1].copy())]) != [sums]


@pytest.mark.skipif(OLD, reason="slow: once is enough, and examples/orbax_library.py changes the mesh on either")
def test_elastic(config, whole, tmp_path, monkeypatch, capsys):
    """(m, A, D) = (8, 1, 1), (2, 4, 1), (1, 2, 4) with its optimizer sharded, and back to (2, 4, 1): the same losses."""
    folder = tmp_path / "run"
    splits = [
        [], ["--batch.microbatch", "2"], ["--batch.microbatch", "1", "--mesh", "data=4", "--optimizer.sharded"],
    ]  # fmt: skip
    for number, split in enumerate(splits):
        with monkeypatch.context() as patch:
            stop_after(patch, number + 1)
            again = ["--resume", "--allow-change"] if number else []
            assert train(config, folder, *split, *again) == STOPPED
    assert "changed: split:" in capsys.readouterr().out
    assert train(config, folder, "--batch.microbatch", "2", "--resume") == 2
    assert "allow it with --allow-change" in capsys.readouterr().err
    assert train(config, folder, "--batch.microbatch", "2", "--resume", "--allow-change") == 0
    ours, theirs = ([record["loss"] for record in lines(f / "records.jsonl")] for f in (folder, whole))
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert abs(theirs[-1] - theirs[0]) > 0.1
    one, other = sheet_of(folder), sheet_of(whole)
    assert [one[n] for n in ("examples", "supervised_tokens")] == [other[n] for n in ("examples", "supervised_tokens")]
    assert one["eval_loss"] == pytest.approx(other["eval_loss"], rel=1e-4)


def test_another_effective_batch_is_refused(config, copied, capsys):
    """Its windows would begin elsewhere, so that rows would be repeated or left out."""
    options = ("--batch.effective", "16", "--train.updates", "12")
    assert train(config, copied, "--resume", "--allow-change", *options) == 2
    assert "has consumed 48 rows in 6 updates, and a run as it is configured now 96" in capsys.readouterr().err
    assert train(config, copied, "--resume", "--allow-change", "--data.context", "24") == 2
    assert "was run on other data" in capsys.readouterr().err


def test_two_runs_in_one_folder(config, copied, capsys):
    """The second is told before it touches anything."""
    with locked(copied):
        assert train(config, copied, "--resume") == 2
    assert "another process runs in" in capsys.readouterr().err


def test_a_full_disk(config, tmp_path, monkeypatch, capsys):
    """A save that fails ends the run with the reason and the checkpoints that are there; it goes on once there is room."""
    real, failing = ocp.CheckpointManager.save, [4]

    def save(self, step, *args, **kwargs):
        if step in failing:
            self.wait_until_finished()
            raise OSError(28, "No space left on device")
        return real(self, step, *args, **kwargs)

    monkeypatch.setattr(ocp.CheckpointManager, "save", save)
    assert train(config, tmp_path / "run") == 2
    err = capsys.readouterr().err
    assert "No space left on device" in err
    assert "Those of update 2 are there" in err
    failing.clear()
    assert train(config, tmp_path / "run", "--resume") == 0
    assert [record["attempted"] for record in lines(tmp_path / "run" / "records.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_a_config_of_a_run_is_a_config(config, whole, tmp_path):
    """The resolved JSON says what the TOML said, defaults included."""
    assert load(whole / "config.json").model == load(Path(config)).model
    bad = tmp_path / "config.json"
    bad.write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        load(bad)


def test_exported_parameters(whole, copied, tmp_path, capsys):
    """Read back by plain Orbax, those of the sheet; a damaged checkpoint, a second export and no run are refused."""
    assert main(["export", str(whole), str(tmp_path / "params")]) == 0
    assert "parameters after update 6 in" in capsys.readouterr().out
    params = ocp.StandardCheckpointer().restore(tmp_path / "params")
    assert digest(params) == sheet_of(whole)["params_sha256"]
    assert main(["export", str(whole), str(tmp_path / "first"), "--checkpoint", "2"]) == 0
    assert digest(ocp.StandardCheckpointer().restore(tmp_path / "first")) != digest(params)
    assert main(["export", str(whole), str(tmp_path / "params")]) == 2
    assert main(["export", str(tmp_path), str(tmp_path / "none")]) == 2
    assert "has no checkpoints" in capsys.readouterr().err


def test_exported_tensors(whole, tmp_path, capsys):
    """One file, by path, where the package is installed; else the error says how to install it."""
    try:
        from safetensors.flax import load_file
    except ImportError:
        assert main(["export", str(whole), str(tmp_path / "m.safetensors")]) == 2
        assert "jaxacc[hf]" in capsys.readouterr().err
        return
    assert main(["export", str(whole), str(tmp_path / "m.safetensors")]) == 0
    assert load_file(tmp_path / "m.safetensors")["embed/embedding"].shape[1] == 16


@pytest.mark.skipif(OLD, reason="five processes: once is enough")
def test_killed_three_times(monkeypatch):
    """SIGKILL, one of them in a save: parameters, records and evaluations as of a run never killed (`benchmarks.kill`)."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", jax.config.jax_compilation_cache_dir)
    phases, won, _ = kill.measure(3, 60, in_save=1)
    assert phases["in a save"] >= 1
    assert sum(phases.values()) == 3
    assert min(won) >= 1
