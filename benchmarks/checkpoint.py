"""What asynchronous saves cost the updates between them: wall time with and without, side by side in one run.

    python -m benchmarks.checkpoint

AdamW on 2.1 million parameters, a save every tenth update. Blocks of updates with and without saves alternate, so
that what else the machine does falls on both.
"""

import statistics
import tempfile
import time
from pathlib import Path

import jax
import optax

import jaxacc
from benchmarks import model
from jaxacc.experiment.checkpoint import open_checkpoints

STEPS, LAYERS, WIDTH, ROWS, LENGTH, EVERY = 8, 4, 256, 8, 64, 10


def measure(blocks=6, every=EVERY):
    """`(seconds per update without saves, with saves, seconds that a call of save takes)`, medians over blocks."""
    step = jaxacc.make_step(model.loss_fn, optax.adamw(1e-3))
    state = step.init(model.init_params(jax.random.key(0), LAYERS, WIDTH))
    window = jax.device_put(model.make_window(STEPS, ROWS, LENGTH, WIDTH))
    state, info = step.update(state, window)
    float(info.loss)
    seconds, calls, number = {False: [], True: []}, [], 0
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = open_checkpoints(Path(folder) / "checkpoints", keep=1)
        for block in range(2 * blocks + 2):
            saves = block % 2 == 1
            begun = time.perf_counter()
            if saves:
                number += 1
                checkpoints.save(number, state, {"config": {}})
                calls.append(time.perf_counter() - begun)
            for _ in range(every):
                state, info = step.update(state, window)
                float(info.loss)
            seconds[saves].append((time.perf_counter() - begun) / every)
            checkpoints.wait()
        checkpoints.close()
    plain, saving = (statistics.median(seconds[saves][1:]) for saves in (False, True))
    return plain, saving, statistics.median(calls[1:])


def main():
    """Print the table."""
    plain, saving, call = measure()
    print(f"jax {jax.__version__}, {jax.default_backend()}, a save every {EVERY} updates")
    print(f"{'without saves':<24}{1000 * plain:>8.1f} ms per update")
    print(f"{'with saves':<24}{1000 * saving:>8.1f} ms per update, ratio {saving / plain:.3f}")
    print(f"{'a call of save':<24}{1000 * call:>8.1f} ms")


if __name__ == "__main__":
    main()
