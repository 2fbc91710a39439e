"""Inputs and gradients with strides of every kind, and memory around them that must not be read or written."""

import pytest
import torch
from oracle import DEVICE, compare, inputs

from flashattn import attention

LAYOUTS = {
    "(batch, length, heads, head_dim)": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "(batch, heads, head_dim, length)": lambda x: x.mT.contiguous().mT,
    "(length, batch, heads, head_dim)": lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "every other row": lambda x: x.repeat_interleave(2, 2)[:, :, ::2],
    "a slice of a wider head": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "odd offset": lambda x: torch.cat([x[..., :1], x], -1)[..., 1:],
    "every other element": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "reversed heads": lambda x: x.flip(1).contiguous().flip(1),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_layouts(layout, dtype):
    q, k, v = inputs(2, 3, 50, 70, 40, dtype=dtype)
    do = layout(torch.randn_like(q))
    compare(layout(q), layout(k), layout(v), causal=True, do=do)


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_expanded(axis):
    """Stride 0 in one axis of every input, the gradient's included."""

    def expand(x):
        return x.narrow(axis, 0, 1).expand_as(x)

    q, k, v = map(expand, inputs(2, 2, 50, 50, 32))
    compare(q, k, v, causal=True, do=expand(torch.randn_like(q)), cancels=axis == 2)


def test_gradient_of_a_sum_has_stride_0():
    q, k, v = inputs(2, 2, 50, 70, 40, requires_grad=True)
    o = attention(q, k, v, backend="triton")
    grads = torch.autograd.grad(o.sum(), (q, k, v), retain_graph=True)
    for a, b in zip(grads, torch.autograd.grad(o, (q, k, v), torch.ones_like(q)), strict=True):
        torch.testing.assert_close(a, b)


def test_results_are_laid_out_as_their_inputs():
    q, k, v = (LAYOUTS["(batch, length, heads, head_dim)"](x).requires_grad_() for x in inputs(2, 3, 50, 70, 40))
    o = attention(q, k, v, backend="triton")
    for x, like in zip((o, *torch.autograd.grad(o.sum(), (q, k, v))), (q, q, k, v), strict=True):
        assert x.stride() == like.stride()


def surrounded(x, fill=float("nan")):
    """x inside a larger tensor that is NaN everywhere else. Returns the view and the whole."""
    whole = torch.full([n + 6 for n in x.shape], fill, dtype=x.dtype, device=x.device)
    inside = whole[tuple(slice(3, 3 + n) for n in x.shape)]
    inside.copy_(x)
    return inside, whole


@pytest.mark.parametrize("seqlen_q, seqlen_k, head_dim", [(50, 70, 40), (1, 65, 64), (129, 3, 17), (130, 130, 16)])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_surroundings_are_not_read(seqlen_q, seqlen_k, head_dim, causal, dtype):
    """NaN outside of every input and gradient; what torch.empty returns is NaN too (see conftest.py)."""
    assert torch.empty(8, device=DEVICE).isnan().all()
    q, k, v = (surrounded(x)[0] for x in inputs(2, 2, seqlen_q, seqlen_k, head_dim, dtype=dtype))
    compare(q, k, v, causal=causal, do=surrounded(torch.randn(q.shape, device=DEVICE, dtype=dtype))[0])


def test_surroundings_are_not_written():
    from flashattn.backward import delta_launch, dkdv_launch, dq_launch
    from flashattn.configs import choose
    from flashattn.forward import forward_launch

    q, k, v = inputs(2, 2, 50, 70, 40)
    (o, o_all), (dq, dq_all) = (surrounded(torch.empty_like(q), 7.0) for _ in range(2))
    (dk, dk_all), (dv, dv_all) = (surrounded(torch.empty_like(k), 7.0) for _ in range(2))
    lse, delta = torch.full((2, 2, 2, 50), 7.0, device=DEVICE), torch.full((2, 2, 2, 50), 7.0, device=DEVICE)
    options = {"causal": True, "scale": 0.1}
    forward_launch(q, k, v, o, lse[0], **options, tile=choose("forward", q, 50, True)).run()
    delta_launch(o, q, None, delta[0]).run()
    dkdv_launch(q, k, v, q, dk, dv, lse[0], delta[0], **options, tile=choose("dkdv", q, 70, True)).run()
    dq_launch(q, k, v, q, dq, lse[0], delta[0], **options, tile=choose("dq", q, 50, True)).run()
    for whole, inside in ((o_all, o), (dq_all, dq), (dk_all, dk), (dv_all, dv)):
        assert inside.isfinite().all()
        inside.fill_(7.0)
        assert (whole == 7.0).all()
    assert (lse[1] == 7.0).all() and (delta[1] == 7.0).all()
