"""How long the step waits for its windows, from a source that takes half as long as the step, read ahead or not.

    python -m benchmarks.input

The source sleeps; the step is a real update. Shares of the wall time of each run, side by side.
"""

import itertools
import time
from functools import partial

import jax
import optax

import jaxacc
from benchmarks import model
from jaxacc.experiment.config import InputConfig
from jaxacc.experiment.data import read_ahead

STEPS, UPDATES, LAYERS, WIDTH, ROWS, LENGTH = 8, 20, 8, 128, 4, 64


def read(seconds, number):
    """A window that takes so many seconds to read."""
    time.sleep(seconds)
    return model.make_window(STEPS, ROWS, LENGTH, WIDTH, seed=number)


def run(update, state, windows, updates=UPDATES):
    """Share of the time that `updates` updates wait for their windows, and seconds per update."""
    state, info = update(state, next(windows))
    float(info.loss)
    begun, waited = time.perf_counter(), 0.0
    for _ in range(updates):
        asked = time.perf_counter()
        window = next(windows)
        waited += time.perf_counter() - asked
        state, info = update(state, window)
        float(info.loss)
    seconds = time.perf_counter() - begun
    return waited / seconds, seconds / updates


def measure(updates=UPDATES):
    """`{how: (share waited, seconds per update)}`."""
    step = jaxacc.make_step(model.loss_fn, optax.adamw(1e-3))
    fresh = lambda: step.init(model.init_params(jax.random.key(0), LAYERS, WIDTH))
    resident = itertools.repeat(jax.device_put(read(0, 0)))
    _, seconds = run(step.update, fresh(), resident, updates)
    shares = {"resident": (0.0, seconds)}
    ways = {
        "no prefetch": InputConfig(prefetch=0), "prefetch 2": InputConfig(prefetch=2),
        "prefetch 2, 1 worker": InputConfig(prefetch=2, workers=1),
    }  # fmt: skip
    for name, config in ways.items():
        windows = read_ahead(partial(read, seconds / 2), range(updates + 1), None, config)
        shares[name] = run(step.update, fresh(), windows, updates)
        windows.close()
    return shares


def main():
    """Print the table."""
    print(f"jax {jax.__version__}, {jax.default_backend()}: the source sleeps for half a window's time")
    for name, (share, seconds) in measure().items():
        print(f"{name:<22}{share:>7.1%} waited{seconds * 1e3:>9.1f} ms per update")


if __name__ == "__main__":
    main()
