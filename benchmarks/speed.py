"""Time of a window, over A times `value_and_grad` of a microbatch plus one update, side by side in one run.

    python -m benchmarks.speed

1.0 means that accumulating costs nothing. The rounds of all programs are interleaved, the medians compared: read the
ratios, not the times. MultiSteps and microbatch are run as documented, so the first takes means of means.
"""

import statistics
import time

import jax
import jax.numpy as jnp
import optax

import jaxacc
from benchmarks import model

STEPS, ROUNDS, LAYERS, WIDTH, ROWS, LENGTH = 8, 15, 8, 128, 4, 64
TX = optax.adamw(1e-3)


def mean(params, microbatch):
    """Mean loss of one microbatch."""
    total, weight = model.sums(params, microbatch)
    return total / jnp.maximum(weight, 1)


def reference():
    """A separate calls of value_and_grad and one update, no accumulation between them."""
    grad = jax.jit(jax.value_and_grad(mean))

    @jax.jit
    def update(params, opt_state, grads):
        updates, opt_state = TX.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def run(carry, window):
        params, opt_state = carry
        for a in range(STEPS):
            _, grads = grad(params, jax.tree.map(lambda leaf, a=a: leaf[a], window))
        return update(params, opt_state, grads)

    return run, lambda params: (params, TX.init(params))


def with_jaxacc(fold):
    """`make_step`."""
    step = jaxacc.make_step(model.loss_fn, TX, fold=fold)
    return lambda state, window: step.update(state, window)[0], step.init


def hand_written():
    """The scan that people write, summing losses, weights and gradients."""

    @jax.jit
    def run(carry, window):
        params, opt_state = carry

        def add(sums, microbatch):
            (total, weight), grads = jax.value_and_grad(lambda p: model.sums(p, microbatch), has_aux=True)(params)
            return jax.tree.map(jnp.add, sums, (total, weight, grads)), None

        zeros = (jnp.float32(0), jnp.int32(0), jax.tree.map(jnp.zeros_like, params))
        (_, weight, grads), _ = jax.lax.scan(add, zeros, window)
        updates, opt_state = TX.update(jax.tree.map(lambda g: g / weight, grads), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return run, lambda params: (params, TX.init(params))


def multi_steps():
    """`optax.MultiSteps`, one call per microbatch inside a scan."""
    tx = optax.MultiSteps(TX, STEPS)

    @jax.jit
    def run(carry, window):
        def one(carry, microbatch):
            params, opt_state = carry
            updates, opt_state = tx.update(jax.grad(mean)(params, microbatch), opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), None

        return jax.lax.scan(one, carry, window)[0]

    return run, lambda params: (params, tx.init(params))


def microbatch():
    """`optax.microbatch` of a sum, divided by hand."""

    @jax.jit
    def run(carry, window):
        params, opt_state = carry
        flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), window)
        sums = optax.microbatch(jax.grad(model.sums, has_aux=True), argnums=1, microbatch_size=ROWS)
        grads, weight = sums(params, flat)
        updates, opt_state = TX.update(jax.tree.map(lambda g: g / weight, grads), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return run, lambda params: (params, TX.init(params))


def programs():
    """Everything that is compared, by name."""
    folds = ["carry", *(["in_place"] if jax.__version_info__ >= (0, 11) else [])]
    return {
        "reference": reference(),
        **{f"jaxacc {fold}": with_jaxacc(fold) for fold in folds},
        "hand-written scan": hand_written(),
        "optax.MultiSteps": multi_steps(),
        "optax.microbatch": microbatch(),
    }


def measure(rounds=ROUNDS):
    """Median seconds of a window for each program, rounds interleaved."""
    window = jax.device_put(model.make_window(STEPS, ROWS, LENGTH, WIDTH))
    runs, states = {}, {}
    for name, (run, init) in programs().items():
        runs[name] = run
        states[name] = jax.block_until_ready(run(init(model.init_params(jax.random.key(0), LAYERS, WIDTH)), window))
    seconds = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            states[name] = jax.block_until_ready(run(states[name], window))
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def main():
    """Print the table."""
    medians = measure()
    print(f"jax {jax.__version__}, {jax.default_backend()}, A = {STEPS}, {LAYERS} scanned layers with remat")
    for name, seconds in medians.items():
        print(f"{name:<20}{seconds * 1e3:>9.1f} ms{seconds / medians['reference']:>8.2f}")


if __name__ == "__main__":
    main()
