"""`jaxacc train --mesh`: the same run on one device, on several, and in several processes."""

import json
import os
import shutil
import socket
import subprocess
import sys

import jax
import pytest

from jaxacc.experiment.cli import main

CONFIG = """
[batch]
effective = 8
microbatch = 2
[train]
updates = 4
[data]
context = 16
held_out = 0.01
[model]
layers = 1
width = 16
heads = 2
hidden = 32
[optimizer]
learning_rate = 1e-2
[checkpoint]
every = 2
"""


OLD = sys.version_info < (3, 12)


@pytest.fixture(scope="module")
def train(config, tmp_path_factory):
    """Run once per list of options; gives the run folder."""
    folders = {}

    def run(*options):
        if options not in folders:
            folders[options] = tmp_path_factory.mktemp("runs") / "run"
            assert main(["train", config, "--run-dir", str(folders[options]), *options]) == 0
        return folders[options]

    return run


def sheet_of(folder):
    sheet = json.loads((folder / "sheet.json").read_text())
    assert sheet.pop("measured_memory")["source"]
    return sheet


@pytest.mark.parametrize(
    ("options", "replicas"),
    [
        (("--mesh", "data=2"), 2),
        (("--mesh", "data=4", "--optimizer.sharded"), 4),
        (("--mesh", "data=2", "model=2"), 2),
        (("--mesh", "model=2"), 1),
    ],
)
def test_a_mesh_gives_the_run_of_one_device(train, options, replicas):
    """Same counts, same losses to float32 rounding; the split is what it should be."""
    one, many = sheet_of(train()), sheet_of(train(*options))
    assert (many["replicas"], many["accumulation_steps"]) == (replicas, 4 // replicas)
    for name in ("attempted", "applied", "microbatches", "examples", "supervised_tokens", "effective_batch"):
        assert many[name] == one[name]
    for name in ("first_loss", "final_loss", "eval_loss"):
        assert many[name] == pytest.approx(one[name], rel=1e-5)
    assert one["first_loss"] - one["final_loss"] > 0.1


def test_resume_on_a_mesh_is_bit_equal(train, config, tmp_path):
    """With a sharded optimizer: each shard is restored to its device."""
    options = ("--mesh", "data=4", "--optimizer.sharded")
    folder = tmp_path / "stopped"
    shutil.copytree(train(*options), folder)
    shutil.rmtree(folder / "checkpoints" / "4")
    (folder / "sheet.json").unlink()
    assert main(["train", config, "--run-dir", str(folder), "--resume", *options]) == 0
    assert sheet_of(folder) == sheet_of(train(*options))


@pytest.mark.parametrize("begin", ["anew", pytest.param("from one process", marks=pytest.mark.skipif(OLD, reason="slow"))])
def test_two_processes_give_the_run_of_two_devices(begin, train, config, tmp_path):
    """Bit for bit, from the start or from a checkpoint of one process, which restores theirs in turn; only process 0 prints."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ, "JAX_NUM_CPU_DEVICES": "1", "JAX_PLATFORMS": "cpu", "JAX_NUM_PROCESSES": "2",
        "JAX_COORDINATOR_ADDRESS": f"localhost:{port}", "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
    }  # fmt: skip
    options = ("--mesh", "data=2", "--optimizer.sharded")
    command = [sys.executable, "-m", "jaxacc", "train", config, "--run-dir", str(tmp_path / "run"), *options]
    if begin != "anew":
        shutil.copytree(train(*options), tmp_path / "run")
        shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")
        command.append("--resume")
    processes = [
        subprocess.Popen(
            command, env={**environment, "JAX_PROCESS_ID": str(i)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for i in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert "sheet" in outputs[0][0]
    assert "sheet" not in outputs[1][0]
    assert sheet_of(tmp_path / "run") == sheet_of(train(*options))
    records = (tmp_path / "run" / "records.jsonl").read_text().splitlines()
    assert [json.loads(line)["attempted"] for line in records] == [1, 2, 3, 4]
    (tmp_path / "run" / "sheet.json").unlink()
    assert main([*command[3:], *["--resume"] * (begin == "anew")]) == 0
    assert sheet_of(tmp_path / "run") == sheet_of(train(*options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mesh", "data=64"], "needs 64 devices; there are 8 in 1 processes"),
        (["--mesh", "data=3"], "not divisible by microbatch 2 x replicas 3"),
        (["--mesh", "modle=2"], "mesh.modle: unknown axis, did you mean 'model'"),
        (["--mesh", "model=4"], "mesh.model=4 must divide model.heads=2"),
        (["--mesh", "data=0"], "mesh.data=0 must be at least 1"),
        (["--optimizer.sharded"], "optimizer.sharded needs replicas"),
    ],
)
def test_bad_meshes(config, tmp_path, capsys, options, message):
    """Refused before anything is written."""
    if "64" in options[-1]:
        options = [*options, "--batch.effective", "128", "--batch.accumulation-steps", "1"]
    assert main(["train", config, "--run-dir", str(tmp_path / "run"), *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
