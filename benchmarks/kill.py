"""SIGKILL at random moments over one run, resumed each time: the end must be that of a run that nobody killed.

    python -m benchmarks.kill

Every life saves at least one checkpoint more than the one before, and none is killed after the end. Some are killed while a
save is under way. Prints the kills by what the process was doing, and raises where the end differs.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

CONFIG = """
[batch]
effective = 8
microbatch = 2
[train]
updates = {updates}
eval_every = 50
[data]
context = 16
held_out = 0.01
[model]
layers = 1
width = 16
heads = 2
hidden = 32
dropout = 0.1
[checkpoint]
every = 2
keep = 3
"""
UNLIKE = ("seconds", "waited", "memory_bytes", "measured_memory")
"""What two runs cannot have in common."""


def start(config, folder, *, resume):
    """`jaxacc train` in a process of its own."""
    command = [sys.executable, "-m", "jaxacc", "train", str(config), "--run-dir", str(folder), *["--resume"] * resume]
    environment = {"JAX_PLATFORMS": "cpu", **os.environ}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def newest(folder):
    """Updates of the newest committed checkpoint."""
    steps = [int(path.name) for path in (folder / "checkpoints").glob("*") if path.name.isdecimal()]
    return max(steps, default=0)


def is_saving(folder):
    """Whether a save is under way: Orbax writes beside and renames."""
    return any("tmp" in path.name for path in (folder / "checkpoints").glob("*"))


def kill_once(config, folder, chance, *, in_save):
    """One life: until it has saved something new, then on to a random moment, or into a save. None if it ended before."""
    before = newest(folder)
    process = start(config, folder, resume=folder.exists())
    while newest(folder) <= before and process.poll() is None:
        time.sleep(0.005)
    until = time.monotonic() + chance.uniform(0.0, 0.4)
    while process.poll() is None and not (is_saving(folder) if in_save else time.monotonic() >= until):
        time.sleep(0.0005 if in_save else 0.005)
    saving = is_saving(folder)
    process.send_signal(signal.SIGKILL)
    _, errors = process.communicate()
    if process.returncode != -signal.SIGKILL:
        raise AssertionError(f"the run ended by itself with status {process.returncode}: {errors[-2000:]}")
    return "in a save" if saving else "between saves", newest(folder) - before


def outcome(folder):
    """Sheet, and records and evaluations without what differs between any two runs."""
    files = (folder / "records.jsonl", folder / "evals.jsonl")
    rows = [[json.loads(line) for line in path.read_text().splitlines()] for path in files]
    alike = lambda row: {name: value for name, value in row.items() if name not in UNLIKE}
    return alike(json.loads((folder / "sheet.json").read_text())), *([alike(row) for row in table] for table in rows)


def measure(kills, updates, *, in_save, seed=0):
    """Kills by phase, and the updates that each life won."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as place:
        config = Path(place) / "kill.toml"
        config.write_text(CONFIG.format(updates=updates))
        whole, killed = Path(place) / "whole", Path(place) / "killed"
        for folder, lives in ((whole, 0), (killed, kills)):
            wanted = chance.sample([True] * in_save + [False] * (lives - in_save), lives) if lives else []
            deaths = [kill_once(config, folder, chance, in_save=saving) for saving in wanted]
            last = start(config, folder, resume=lives > 0)
            _, errors = last.communicate()
            if last.returncode:
                raise AssertionError(f"the last life ended with {last.returncode}: {errors[-2000:]}")
        expected, found = outcome(whole), outcome(killed)
        if found != expected:
            raise AssertionError("the killed run is not the one that nobody killed")
        attempted = [record["attempted"] for record in found[1]]
        if attempted != list(range(1, updates + 1)) or min(won for _, won in deaths) < 1:
            raise AssertionError("an update is missing, there twice, or a life won none")
    return Counter(phase for phase, _ in deaths), [won for _, won in deaths], expected[0]["params_sha256"]


def main(kills=30, updates=900):
    """Print the table."""
    begun = time.perf_counter()
    phases, won, digest = measure(kills, updates, in_save=10)
    print(f"{kills} kills over a run of {updates} updates, {time.perf_counter() - begun:.0f} s")
    for phase, count in sorted(phases.items()):
        print(f"  {phase:<16}{count:>4}")
    print(f"updates won per life: least {min(won)}, most {max(won)}")
    print(f"records, evaluations and parameters as of a run never killed: params_sha256 {digest}")


if __name__ == "__main__":
    main()
