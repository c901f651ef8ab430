"""Collectives are found, weighed and placed inside or outside loops, in programs and in text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxacc
from jaxacc._inspect import _groups

ADD = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""
LOOP = """
%cond (s: (s32[], f32[16])) -> pred[] {
  %s = (s32[], f32[16]{0}) parameter(0)
  ROOT %more = pred[] constant(true)
}

%body (t: (s32[], f32[16])) -> (s32[], f32[16]) {
  %t = (s32[], f32[16]{0}) parameter(0)
  ROOT %inner = (s32[], f32[16]{0}) {call}(%t), {role}=%far
}

%far (u: (s32[], f32[16])) -> (s32[], f32[16]) {
  %u = (s32[], f32[16]{0}) parameter(0)
  %x = f32[16]{0} get-tuple-element(%u), index=1
  %reduced = f32[16]{0} all-reduce(%x), replica_groups=[1,4]<=[4], to_apply=%add
  ROOT %out = (s32[], f32[16]{0}) tuple(%u, %reduced)
}

ENTRY %main (p: (s32[], f32[16])) -> (s32[], f32[16]) {
  %p = (s32[], f32[16]{0}) parameter(0)
  ROOT %loop = (s32[], f32[16]{0}) while(%p), condition=%cond, body=%body
}
"""


def entry(*lines):
    return (
        "HloModule m, num_partitions=4\n" + ADD + "\nENTRY %main (p: f32[16]) -> f32[16] {\n  " + "\n  ".join(lines) + "\n}\n"
    )


@pytest.mark.parametrize(
    ("call", "role"), [("call", "to_apply"), ("call-start", "to_apply"), ("fusion-start", "calls"), ("fusion", "calls")]
)
def test_follows_calls_into_loops(call, role):
    """A collective in a computation that a loop's body calls, or starts, runs in the loop."""
    (found,) = jaxacc.inspect_collectives(ADD + LOOP.replace("{call}", call).replace("{role}", role))
    assert (found.kind, found.bytes, found.in_loop) == ("all-reduce", 64, True)
    (outside,) = jaxacc.inspect_collectives(ADD + LOOP.replace("body=%body", "body=%cond"))
    assert not outside.in_loop


@pytest.mark.parametrize(
    ("line", "kind", "size"),
    [
        ("%r = f32[16]{0} all-reduce(%p), replica_groups={{0,1,2,3}}, to_apply=%add", "all-reduce", 64),
        ("%r = (f32[16]{0}, bf16[8]{0}) all-reduce(%p, %q), replica_groups={}, to_apply=%add", "all-reduce", 80),
        ("%r = f32[16]{0:T(128)S(1)} all-reduce-start(%p), replica_groups={}, to_apply=%add", "all-reduce", 64),
        ("%r = (f32[16]{0}, f32[4]{0}) all-reduce-start(%p, %q), replica_groups={}, to_apply=%add", "all-reduce", 80),
        ("%r = ((f32[16]{0}), f32[16]{0}) all-reduce-start(%p), replica_groups={}, to_apply=%add", "all-reduce", 64),
        ("%r = f32[4]{0} reduce-scatter(%p), replica_groups=[1,4]<=[4], dimensions={0}, to_apply=%add", "reduce-scatter", 64),
        ("%r = f32[4]{0} reduce-scatter(%p), replica_groups={}, dimensions={0}, to_apply=%add", "reduce-scatter", 64),
        (
            "%r = ((f32[16]{0}), f32[4]{0}) reduce-scatter-start(%p), replica_groups={{0,1,2,3}}, to_apply=%add",
            "reduce-scatter",
            64,
        ),
        ("%r = (f32[4]{0}, f32[16]{0}) all-gather-start(%p), replica_groups={}, dimensions={0}", "all-gather", 64),
        ("%r = ((f32[4], s8[1]), (f32[16], s8[4])) all-gather-start(%p, %q), dimensions={0}", "all-gather", 68),
        (
            "%r = (f32[16], f32[16], u32[], u32[]) collective-permute-start(%p), source_target_pairs={{0,1},{1,0}}",
            "collective-permute",
            64,
        ),
        ("%r = f32[16]{0} all-to-all(%p), replica_groups={{0,1},{2,3}}, dimensions={0}", "all-to-all", 64),
    ],
)
def test_payloads(line, kind, size):
    """Results of a started pair count once, a reduction counts what goes in, a gather what comes out."""
    done = "ROOT %d = f32[16]{0} all-reduce-done(%r)"
    (found,) = jaxacc.inspect_collectives(entry(line, done))
    assert (found.kind, found.bytes, found.in_loop) == (kind, size, False)


def test_the_reduce_scatter_of_the_tpu_compiler():
    """A fusion named all-reduce-scatter that holds an all-reduce is a reduce-scatter."""
    text = """
%all-reduce-scatter.3 (x: f32[16]) -> f32[4] {
  %x = f32[16]{0} parameter(0)
  %all-reduce.1 = f32[16]{0} all-reduce(%x), replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %slice = f32[4]{0} dynamic-slice(%all-reduce.1), dynamic_slice_sizes={4}
}
""" + entry("%p = f32[16]{0} parameter(0)", "ROOT %f = f32[4]{0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.3")
    (found,) = jaxacc.inspect_collectives(ADD + text)
    assert (found.kind, found.bytes) == ("reduce-scatter", 64)


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,2},{1,3}}", [[0, 2], [1, 3]]),
        ("[2,2]<=[4]", [[0, 1], [2, 3]]),
        ("[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
        ("mesh['a'=2,'b'=2] {'b'}", [[0, 1], [2, 3]]),
        ("mesh['a'=2,'b'=2] {'a'}", [[0, 2], [1, 3]]),
        ("mesh['a'=2,'b'=2] {'a','b'}", [[0, 1, 2, 3]]),
        ("{}", [[0, 1, 2, 3]]),
    ],
)
def test_replica_groups(text, groups):
    """Lists, iota and mesh form name the same groups, and a mesh names the axes that they cross."""
    np.testing.assert_array_equal(_groups(f"replica_groups={text}, x", 4), groups)
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
    line = f"ROOT %r = f32[16]{{0}} all-reduce(%p), replica_groups={text}, to_apply=%add"
    (found,) = jaxacc.inspect_collectives(entry(line), mesh=mesh)
    crossed = {(0, 1): ("model",), (0, 2): ("data",), (0, 1, 2, 3): ("data", "model")}
    assert found.axes == crossed[tuple(groups[0])]


def test_compiled_programs():
    """On real programs: one psum after a loop, one in it, a scatter, a gather, over the right axes."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def collectives(f, out):
        mapped = jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=out, check_vma=False)
        return [c[:4] for c in jaxacc.inspect_collectives(jax.jit(mapped).lower(jnp.ones(64)).compile(), mesh=mesh)]

    def loop(body):
        return lambda x: jax.lax.fori_loop(0, jnp.int32(x.shape[0]), lambda i, y: body(jnp.sin(y)), x)

    psum = lambda x: jax.lax.psum(x, "data")
    assert collectives(lambda x: psum(loop(jnp.cos)(x)), P()) == [("all-reduce", 128, False, ("data",))]
    assert collectives(loop(psum), P()) == [("all-reduce", 128, True, ("data",))]
    scatter = lambda x: jax.lax.psum_scatter(x, ("data", "model"), tiled=True)
    assert collectives(scatter, P(("data", "model"))) == [("reduce-scatter", 128, False, ("data", "model"))]
    assert collectives(lambda x: jax.lax.all_gather(x, "model"), P()) == [("all-gather", 256, False, ("model",))]


def test_check_reduction():
    """One reduction passes; two, one per microbatch, or none do not."""
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))
    params = jnp.ones((64, 64))

    def compiled(f):
        mapped = jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        return jax.jit(mapped).lower(params).compile()

    once = lambda x: jax.lax.psum(jnp.sin(x), "data")
    jaxacc.check_reduction(compiled(once), params, mesh=mesh)
    with pytest.raises(ValueError, match=r"32768 bytes are reduced over .* takes 16384"):
        jaxacc.check_reduction(compiled(lambda x: once(once(x))), params, mesh=mesh)
    with pytest.raises(ValueError, match="inside a loop"):
        jaxacc.check_reduction(compiled(lambda x: jax.lax.fori_loop(0, 3, lambda i, y: once(y), x)), params, mesh=mesh)
    with pytest.raises(ValueError, match="0 bytes are reduced"):
        jaxacc.check_reduction(compiled(jnp.sin), params, mesh=mesh)


@pytest.mark.parametrize("wrong", ["hello", jax.jit(jnp.sin), jax.jit(jnp.sin).lower(1.0)], ids=["text", "jitted", "lowered"])
def test_what_is_not_compiled_is_refused(wrong):
    """An empty list would read as: nothing is communicated."""
    with pytest.raises(ValueError, match=r"Pass a compiled program"):
        jaxacc.inspect_collectives(wrong)


def test_a_second_reduction_of_a_small_gradient_is_noticed():
    """The allowance for scalars never covers the gradient itself."""
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))

    def program(times):
        def f(x):
            for _ in range(times):
                x = jax.lax.optimization_barrier(jax.lax.psum(x, "data"))
                x = jax.lax.pcast(x, "data", to="varying")
            return jax.lax.psum(x, "data")

        mapped = jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P())
        return jax.jit(mapped).lower(jnp.ones((8, 4))).compile()

    params = jnp.ones((4, 4))
    jaxacc.check_reduction(program(0), params, mesh=mesh)
    with pytest.raises(ValueError, match="bytes are reduced"):
        jaxacc.check_reduction(program(1), params, mesh=mesh)
