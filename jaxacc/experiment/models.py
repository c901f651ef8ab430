"""A decoder-only transformer in Flax Linen, and its loss function."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxacc._mean import Mean
from jaxacc.experiment.config import ModelConfig
from jaxacc.losses import causal_lm


class Layer(nn.Module):
    """Causal self-attention and a feed-forward layer, both on normed inputs of a residual stream."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array, deterministic: bool) -> jax.Array:
        """Map `(m, T, width)` to the same shape."""
        config, dtype = self.config, jnp.dtype(self.config.dtype)
        drop = nn.Dropout(config.dropout, deterministic=deterministic)
        dense = partial(nn.DenseGeneral, use_bias=False, dtype=dtype)

        normed = nn.RMSNorm(dtype=dtype, name="attention_norm")(x)
        heads = (3, config.heads, config.width // config.heads)
        q, k, v = jnp.moveaxis(dense(heads, name="qkv")(normed), -3, 0)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + drop(dense(config.width, name="out", axis=(-2, -1))(mixed))

        normed = nn.RMSNorm(dtype=dtype, name="feed_forward_norm")(x)
        hidden = nn.gelu(dense(config.hidden, name="up")(normed))
        return x + drop(dense(config.width, name="down")(hidden))


class Transformer(nn.Module):
    """Token and position embeddings, scanned layers, and the token embedding again as the readout."""

    config: ModelConfig
    vocabulary: int
    context: int

    @nn.compact
    def __call__(self, tokens: jax.Array, deterministic: bool) -> jax.Array:
        """Logits `(m, T, vocabulary)` of tokens `(m, T)`."""
        config, dtype = self.config, jnp.dtype(self.config.dtype)
        init = nn.initializers.normal(0.02)
        embed = nn.Embed(self.vocabulary, config.width, dtype=dtype, embedding_init=init, name="embed")
        positions = self.param("positions", init, (self.context, config.width))
        x = embed(tokens) + positions[: tokens.shape[-1]].astype(dtype)
        x = nn.Dropout(config.dropout, deterministic=deterministic)(x)

        body = lambda layer, x, _: (layer(x, deterministic), None)
        body = nn.remat(body, prevent_cse=False) if config.remat else body
        scan = nn.scan(body, variable_axes={"params": 0}, split_rngs={"params": True, "dropout": True}, length=config.layers)
        x, _ = scan(Layer(config, name="layers"), x, None)
        return embed.attend(nn.RMSNorm(dtype=dtype, name="norm")(x))


SHARDED_OVER_MODEL = {
    "qkv": P(None, None, None, "model"),
    "out": P(None, "model"),
    "up": P(None, None, "model"),
    "down": P(None, "model"),
}
"""Kernels that the mesh axis `model` shards, by heads and by hidden units; dimension 0 is the layer."""


def specs(params: Any) -> Any:
    """One `PartitionSpec` per parameter, for a mesh with the axis `model`."""
    return jax.tree.map_with_path(
        lambda path, _: SHARDED_OVER_MODEL.get(getattr(path[-2], "key", ""), P()) if len(path) > 1 else P(), params
    )


def build(config: ModelConfig, *, vocabulary: int, context: int) -> tuple[Callable[[jax.Array], Any], Callable[..., Mean]]:
    """`(init, loss_fn)`: `init(key)` gives the parameters, `loss_fn` is what `jaxacc.make_step` takes."""
    model = Transformer(config, vocabulary, context)

    def init(key: jax.Array) -> Any:
        return model.init({"params": key}, jnp.zeros((1, context), jnp.int32), deterministic=True)["params"]

    def loss_fn(params: Any, microbatch: dict[str, jax.Array], key: jax.Array | None) -> Mean:
        rngs = {} if key is None or config.dropout == 0 else {"dropout": key}
        logits = model.apply({"params": params}, microbatch["tokens"], deterministic=not rngs, rngs=rngs)
        assert isinstance(logits, jax.Array)
        return causal_lm(logits, microbatch["labels"])

    return init, loss_fn
