"""One of the processes of `test_distributed`: python distributed_worker.py OUT MODE ADDRESS PROCESS."""

import json
import os
import sys

import jax
import numpy as np
import optax
from problems import lm_batch, lm_loss, lm_params

import jaxacc

ROWS = (7, 6)


def train(mesh, window_of):
    """Three updates; losses, counts and a parameter."""
    tx = optax.chain(optax.clip_by_global_norm(0.05), optax.adamw(1e-2))
    step = jaxacc.make_step(lm_loss, tx, mesh=mesh, shard_optimizer=True, check_row_ids=True)
    state, losses = step.init(lm_params(), key=jax.random.key(0)), []
    for update in range(3):
        state, info = step.update(state, window_of(update))
        losses.append(float(info.loss))
        print("updated", update, flush=True)
    return {
        "losses": losses,
        "examples": int(state.ledger.examples),
        "tokens": int(state.ledger.tokens),
        "microbatches": int(state.ledger.microbatches),
        "duplicates": int(info.duplicate_rows),
        "embed": np.asarray(state.params["embed"]).tolist(),
    }


def window_of_process(update, process):
    """This process's rows of 13, filled up to the same two microbatches of 4."""
    batch = {**lm_batch(rows=13, seed=update, counts=(3, 5, 8, 0, 16)), "row_ids": np.arange(13)}
    start = sum(ROWS[:process])
    mine = jax.tree.map(lambda leaf: leaf[start : start + ROWS[process]], batch)
    window = jaxacc.split_batch(mine, accumulation_steps=2, microbatch=4, pad=True)
    window["mask"] &= window["row_mask"][..., None]
    return window


def main(out, mode, address, process):
    """Train together; in mode "dies" the second process does not come along."""
    process = int(process)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    if mode == "environment":
        os.environ.update(JAX_COORDINATOR_ADDRESS=address, JAX_NUM_PROCESSES="2", JAX_PROCESS_ID=str(process))
        jaxacc.distributed_initialize()
    else:
        jaxacc.distributed_initialize(address, 2, process, heartbeat_timeout=10, shutdown_timeout=10)
    jaxacc.distributed_initialize()  # does nothing
    assert (jax.process_count(), jax.process_index(), jax.device_count()) == (2, process, 2)
    mesh = jax.make_mesh((2,), ("data",))

    def window_of(update):
        if mode == "dies" and update == 1 and process == 1:
            os._exit(1)
        return jaxacc.place_window(window_of_process(update, process), mesh)

    result = train(mesh, window_of)
    with open(f"{out}.{process}", "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
