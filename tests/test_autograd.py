"""Which gradients are computed, torch.compile, autocast, and bf16 on a GPU that has none."""

import itertools
import warnings
from functools import partial

import pytest
import torch
from oracle import DEVICE, compare, dense, gradients, inputs

from flashattn import attention, autograd
from flashattn.testing import check


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=3))[1:], ids=str)
def test_gradients_only_where_needed(backend, needs, monkeypatch):
    q, k, v = inputs(1, 2, 60, 70, 16, dtype=torch.float32, requires_grad=True)
    do = torch.randn_like(q)
    expected = torch.autograd.grad(attention(q, k, v, backend=backend), (q, k, v), do)
    leaves = [x.detach().requires_grad_(need) for x, need in zip((q, k, v), needs, strict=True)]

    computed = []
    passes = autograd._BACKENDS[backend]

    def recorded(*args, **kwargs):
        grads = passes.backward(*args, **kwargs)
        computed.append(tuple(g is not None for g in grads))
        return grads

    monkeypatch.setitem(autograd._BACKENDS, backend, passes._replace(backward=recorded))
    attention(*leaves, backend=backend).backward(do)
    assert computed == [needs]
    for leaf, need, grad in zip(leaves, needs, expected, strict=True):
        assert torch.equal(leaf.grad, grad) if need else leaf.grad is None


@pytest.mark.parametrize("with_dk, with_dv", [(True, False), (False, True)])
def test_one_of_dk_and_dv_leaves_the_other_alone(with_dk, with_dv):
    from flashattn.backward import backward, delta
    from flashattn.configs import choose
    from flashattn.forward import forward

    q, k, v = inputs(1, 2, 60, 70, 32)
    options = {"causal": True, "scale": 0.2}
    o, lse_log2 = forward(q, k, v, **options, tile=choose("forward", q, 60, True))
    tiles = {"dkdv_tile": choose("dkdv", q, 70, True), "dq_tile": choose("dq", q, 60, True)}
    before = k.clone(), v.clone()
    arguments = q, k, v, q, lse_log2, delta(o, q, None)
    _, dk, dv = backward(*arguments, **options, **tiles, needs=(True, True, True))
    some = backward(*arguments, **options, **tiles, needs=(False, with_dk, with_dv))
    assert some[0] is None
    for actual, expected, wanted in zip(some[1:], (dk, dv), (with_dk, with_dv), strict=True):
        assert torch.equal(actual, expected) if wanted else actual is None
    assert torch.equal(k, before[0]) and torch.equal(v, before[1])


def test_no_graph_without_a_gradient():
    q, k, v = inputs(1, 2, 20, 30, 16)
    assert attention(q, k, v).grad_fn is None
    with torch.no_grad():
        assert attention(q.requires_grad_(), k, v).grad_fn is None


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("causal", [False, True])
def test_torch_compile_sees_one_operator(backend, causal):
    """No graph break, and the same numbers, forward and backward."""

    def layer(q, k, v):
        o, lse = attention(2 * q, k, v, causal=causal, return_lse=True, backend=backend)
        return (o.sin() * lse.cos()[..., None]).sum()

    q, k, v = inputs(1, 2, 60, 70, 16, dtype=torch.float32, requires_grad=True)
    expected = layer(q, k, v)
    expected_grads = torch.autograd.grad(expected, (q, k, v))
    torch._dynamo.reset()
    actual = torch.compile(layer, fullgraph=True, backend="aot_eager")(q, k, v)
    torch.testing.assert_close(actual, expected)
    for a, b in zip(torch.autograd.grad(actual, (q, k, v)), expected_grads, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_whatever_looks_on_sees_the_operator(backend):
    """Tracers, fake tensors and dispatch modes: the eager shortcut past the dispatcher must not hide the operator."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils._python_dispatch import TorchDispatchMode

    q, k, v = inputs(1, 2, 20, 30, 16, dtype=torch.float32)

    def call(q, k, v):
        return attention(q, k, v, causal=True, backend=backend)

    others = [torch.randn_like(x) for x in (q, k, v)]
    for pre_dispatch in (False, True):
        graph = make_fx(call, pre_dispatch=pre_dispatch)(q, k, v)
        assert torch.ops.flashattn.forward.default in [node.target for node in graph.graph.nodes]
        assert torch.equal(graph(*others), call(*others))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert call(q, k, v).shape == q.shape
        assert call(*map(mode.from_tensor, (q, k, v))).shape == q.shape
    seen = []

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Spy():
        call(q, k, v)
    assert torch.ops.flashattn.forward.default in seen


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    from torch.utils.checkpoint import checkpoint

    q, k, v = inputs(1, 2, 20, 30, 16, dtype=torch.float32, requires_grad=True)
    expected = torch.autograd.grad(attention(q, k, v).square().sum(), (q, k, v))
    checkpoint(attention, q, k, v, use_reentrant=reentrant).square().sum().backward()
    for x, grad in zip((q, k, v), expected, strict=True):
        torch.testing.assert_close(x.grad, grad)


def test_torch_compile_takes_a_scale_that_varies():
    q, k, v = inputs(1, 2, 20, 30, 16, dtype=torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, scale: attention(q, k, v, scale=scale), fullgraph=True, backend="aot_eager")
    for scale in (0.5, 0.25, 0.125, 0.3):
        torch.testing.assert_close(compiled(q, scale), attention(q, k, v, scale=scale))


def test_operators_keep_their_contract():
    q, k, v = inputs(1, 2, 20, 30, 16, dtype=torch.float32)
    for backend in ("triton", "reference"):
        torch.library.opcheck(torch.ops.flashattn.forward.default, (q, k, v, True, 0.25, backend), test_utils=CHECKS)
        o, lse_log2 = torch.ops.flashattn.forward(q, k, v, True, 0.25, backend)
        for dlse_log2 in (None, lse_log2):
            arguments = (o, q, dlse_log2, backend)
            torch.library.opcheck(torch.ops.flashattn.delta.default, arguments, test_utils=CHECKS)
        delta = torch.ops.flashattn.delta(*arguments)
        arguments = (q, k, v, q, lse_log2, delta, True, 0.25, backend, [True, False, True])
        torch.library.opcheck(torch.ops.flashattn.backward.default, arguments, test_utils=CHECKS)


CHECKS = ("test_schema", "test_faketensor", "test_autograd_registration")


def test_autocast_is_honoured():
    """fp32 q and k from an adapter beside a 16-bit v, as in mixed-precision training."""
    q, k, v = inputs(1, 2, 40, 50, 16, dtype=torch.float32, requires_grad=True)
    dtype = torch.float16 if DEVICE == "cuda" else torch.bfloat16
    with torch.autocast(DEVICE, dtype=dtype):
        o = attention(q, k, v.to(dtype), causal=True)
    assert o.dtype == dtype
    expected = attention(q.to(dtype), k.to(dtype), v.to(dtype), causal=True)
    assert torch.equal(o, expected)
    o.sum().backward()
    assert q.grad.dtype == torch.float32


@pytest.fixture
def no_bf16(monkeypatch):
    """The rule for bf16 on a GPU without it, on the device at hand."""
    monkeypatch.setattr(autograd, "_lacks_bf16", lambda device: True)
    monkeypatch.setattr("flashattn.interface._refusal", lambda q: None)  # it is fp16 that is interpreted


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.filterwarnings("ignore:flashattn")
def test_bf16_without_bf16_tensor_cores(no_bf16, causal):
    q, k, v = inputs(1, 2, 60, 70, 40, dtype=torch.bfloat16)
    dlse = torch.randn(q.shape[:3], device=DEVICE)
    # Of the incoming gradients: fp16 alone would lose or overflow them.
    for size, size_lse in ((1.0, 1.0), (1e-8, 1e-8), (1e4, 1e4), (1e-4, 1e4)):
        compare(q, k, v, causal=causal, do=size * torch.randn_like(q), dlse=size_lse * dlse)


@pytest.mark.filterwarnings("ignore:flashattn")
def test_bf16_values_beyond_fp16_saturate(no_bf16):
    q, k, v = inputs(1, 1, 20, 30, 16, dtype=torch.bfloat16)
    v[..., 0] = 1e6
    o = attention(q, k, v, backend="triton")
    leaves = [x.requires_grad_() for x in (q, k, v.clamp(-65504, 65504))]
    exact, baseline = (dense(leaves, False, None, o, None, dtype)["o"] for dtype in (torch.float64, torch.bfloat16))
    check("o", o, exact, baseline)


@pytest.mark.filterwarnings("ignore:flashattn")
@pytest.mark.parametrize("size", [0.0, 1e-39, 1e-30, 1e36])
def test_bf16_without_bf16_tensor_cores_takes_gradients_that_fit_fp32(no_bf16, size):
    q, k, v = inputs(1, 1, 20, 30, 16, dtype=torch.bfloat16, requires_grad=True)
    o = attention(q, k, v, backend="triton")
    for grad in torch.autograd.grad(o, (q, k, v), torch.full_like(o, size)):
        assert grad.isfinite().all() and (size < 1e-30 or grad.count_nonzero())


@pytest.mark.filterwarnings("ignore:flashattn")
@pytest.mark.parametrize("size", [1e-8, 1e6])
def test_bf16_without_bf16_tensor_cores_keeps_a_nan_to_its_row(no_bf16, size):
    """A padded row of garbage, whose loss is left out, as the first of two batches has it."""
    q, k, v = inputs(2, 1, 20, 30, 16, dtype=torch.bfloat16)
    do = size * torch.randn_like(q)
    layer = partial(attention, backend="triton")
    expected = gradients(layer, (q[1:], k[1:], v[1:]), do[1:])
    q[0, 0, 3], do[0] = float("nan"), 0.0
    for actual, exact in zip(gradients(layer, (q, k, v), do), expected, strict=True):
        torch.testing.assert_close(actual[1:], exact, rtol=0.02, atol=0.02 * size)


def test_bf16_without_bf16_tensor_cores_warns_once(no_bf16):
    q, k, v = inputs(1, 1, 20, 30, 16, dtype=torch.bfloat16)
    autograd._warn_bf16.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            attention(q, k, v, backend="triton")
    assert sum("bf16 inputs are computed in fp16" in str(w.message) for w in caught) == 1
