"""Plan a GPT-2-sized model for TPUs and GPUs that are not here: the microbatch, its memory, where the reduction is.

    python -m benchmarks.plan [TARGET ...]

124 million parameters, 1024 tokens, bfloat16 computation, remat by layer, AdamW, effective batch 512. Says which compiler is
missing where one is.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxacc
from jaxacc._bytes import show_bytes
from jaxacc.experiment import models
from jaxacc.experiment.config import ModelConfig

TARGETS = ("v5e:2x2", "v5p:2x2x1", "h100x8", "rtx4090x1")
CONTEXT, VOCABULARY, EFFECTIVE = 1024, 50_257, 512
MODEL = ModelConfig(layers=12, width=768, heads=12, hidden=3072, remat=True, precision="bfloat16")


def planned(target):
    """The plan for one target."""
    row = {name: np.zeros((1, CONTEXT), np.int32) for name in ("tokens", "labels")}
    init, loss_fn = models.build(MODEL, vocabulary=VOCABULARY, row=row)
    spec = {name: jax.ShapeDtypeStruct((CONTEXT,), jnp.int32) for name in row}
    params = jax.eval_shape(init, jax.random.key(0))
    return jaxacc.plan(loss_fn, optax.adamw(1e-3), params, spec, effective_batch=EFFECTIVE, target=target)


def row_of(target):
    """One line of the table."""
    try:
        plan = planned(target)
    except ValueError as error:
        return f"{target:<11}{error}"
    m, steps, replicas = plan.split
    reduced = [c for c in plan.collectives if c.kind in ("all-reduce", "reduce-scatter")]
    once, looping = (show_bytes(sum(c.bytes for c in reduced if c.in_loop == where)) for where in (False, True))
    tried = sum(c.compiled for c in plan.candidates)
    sizes = f"{show_bytes(plan.total):>12}{show_bytes(plan.budget):>12}"
    return f"{target:<11}{m:>5}{steps:>5}{replicas:>4}{sizes}{once:>13}{looping:>10}{tried:>7}"


def main():
    """Print the table."""
    print(f"jax {jax.__version__}, {EFFECTIVE} rows of {CONTEXT} tokens, float32 parameters, bytes per device")
    print(f"{'target':<11}{'m':>5}{'A':>5}{'D':>4}{'total':>12}{'budget':>12}{'reduced':>13}{'in loops':>10}{'tried':>7}")
    for target in sys.argv[1:] or TARGETS:
        print(row_of(target), flush=True)


if __name__ == "__main__":
    main()
