"""Temp bytes of a whole donated AdamW step, in gradient trees above the same step without accumulation.

    python -m benchmarks.memory

The numbers are the compiler's (`memory_analysis()`); nothing is run.
"""

from functools import partial

import jax
import jax.numpy as jnp
import optax

import jaxacc
from benchmarks import model

TX = optax.adamw(1e-3)


def plain_step(params, opt_state, window, dtype=jnp.float32):
    """One microbatch, no accumulation, an update gated on finiteness: what `A = 1` must not exceed."""
    microbatch = jax.tree.map(lambda leaf: leaf[0], window)

    def mean(params):
        total, weight = model.sums(params, microbatch, dtype)
        return total / jnp.maximum(weight, 1), weight

    (loss, weight), grads = jax.value_and_grad(mean, has_aux=True)(params)
    finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in (loss, *jax.tree.leaves(grads))]))

    def update():
        updates, new = TX.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), new

    params, opt_state = jax.lax.cond(finite & (weight > 0), update, lambda: (params, opt_state))
    return params, opt_state, loss, optax.tree.norm(grads)


def abstract(tree):
    """The shapes of a tree."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def compile_plain(dtype=jnp.float32):
    """The plain step, compiled."""
    params = jax.eval_shape(model.init_params, jax.random.key(0))
    window = abstract(model.make_window(1))
    step = jax.jit(partial(plain_step, dtype=dtype), donate_argnums=(0, 1))
    return step.lower(params, jax.eval_shape(TX.init, params), window).compile()


def compile_jaxacc(steps, fold="auto", loss_fn=model.loss_fn):
    """`make_step(...).update`, compiled for a window of `steps` microbatches."""
    step = jaxacc.make_step(loss_fn, TX, fold=fold)
    state = jax.eval_shape(step.init, jax.eval_shape(model.init_params, jax.random.key(0)))
    return step.update.lower(state, abstract(model.make_window(steps))).compile()


def temp_bytes(compiled):
    """What the program needs beyond its arguments and results."""
    return compiled.memory_analysis().temp_size_in_bytes


def gradient_bytes():
    """One gradient tree."""
    return sum(leaf.size * 4 for leaf in jax.tree.leaves(jax.eval_shape(model.init_params, jax.random.key(0))))


def extra_trees(compiled, plain):
    """Temp bytes above those of the plain step, in gradient trees."""
    return (temp_bytes(compiled) - temp_bytes(plain)) / gradient_bytes()


def main():
    """Print the table."""
    plain, half = compile_plain(), compile_plain(jnp.bfloat16)
    print(f"jax {jax.__version__}, {jax.default_backend()} compiler, {model.LAYERS} scanned layers with remat, AdamW")
    print(
        f"gradient tree {gradient_bytes() / 2**20:.1f} MiB, plain step {temp_bytes(plain) / gradient_bytes():.3f} trees of temp"
    )
    print(f"{'step':<12}{'A':>4}{'extra gradient trees':>24}")
    for fold in ("carry", "in_place"):
        if fold == "in_place" and jax.__version_info__ < (0, 11):
            print("in_place: needs jax >= 0.11")
            continue
        for steps in (1, 4, 32):
            print(f"{fold:<12}{steps:>4}{extra_trees(compile_jaxacc(steps, fold), plain):>24.4f}")
        extra = extra_trees(compile_jaxacc(4, fold, model.half_loss_fn), half)
        print(f"{fold:<12}{4:>4}{extra:>24.4f}  computed in bfloat16")


if __name__ == "__main__":
    main()
