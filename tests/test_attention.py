"""Outputs, lse and all gradients against fp64, over dtypes, head dims, lengths, masks, heads and scores."""

import pytest
import torch
from oracle import DEVICE, DTYPES, assert_equal, compare, dense, inputs

from flashattn import attention, flash_attention
from flashattn.testing import check, make_inputs

causal_or_not = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.mark.parametrize("head_dim", [1, 8, 16, 17, 32, 40, 64, 72, 73, 80, 96, 128, 145, 160, 192, 250, 256])
@causal_or_not
@every_dtype
def test_head_dims(head_dim, causal, dtype):
    compare(*inputs(1, 2, 70, 90, head_dim, dtype=dtype), causal=causal)


# Around the block sizes, M and N independent, and lengths 0.
LENGTHS = [
    *[(1, 1), (1, 20), (20, 1), (15, 16), (16, 15), (17, 65), (63, 127), (65, 17), (129, 128), (128, 129)],
    *[(1, 300), (300, 2), (200, 333), (333, 200), (1000, 1000), (0, 5), (5, 0), (0, 0)],
]


@pytest.mark.parametrize("seqlen_q, seqlen_k", LENGTHS)
@causal_or_not
@every_dtype
def test_lengths(seqlen_q, seqlen_k, causal, dtype):
    q, k, v = inputs(1, 1, seqlen_q, seqlen_k, 64 if dtype != torch.float32 else 16, dtype=dtype)
    compare(q, k, v, causal=causal, cancels=seqlen_k <= 2)


@pytest.mark.parametrize("heads, heads_k", [(4, 2), (6, 1), (3, 3), (5, 5)])
@causal_or_not
@every_dtype
def test_grouped_heads(heads, heads_k, causal, dtype):
    compare(*inputs(2, heads, 40, 70, 32, heads_k=heads_k, dtype=dtype), causal=causal)


@pytest.mark.parametrize("batch, heads, heads_k", [(0, 2, 2), (2, 0, 0), (2, 0, 3)])
def test_no_batch_or_heads(batch, heads, heads_k):
    q, k, v = inputs(batch, heads, 8, 9, 16, heads_k=heads_k, requires_grad=True)
    o, lse = attention(q, k, v, return_lse=True, backend="triton")
    assert o.shape == q.shape and lse.shape == q.shape[:3]
    for grad, x in zip(torch.autograd.grad(o.sum(), (q, k, v)), (q, k, v), strict=True):
        assert torch.equal(grad, torch.zeros_like(x))


@causal_or_not
@every_dtype
def test_gradient_of_lse(causal, dtype):
    q, k, v = inputs(2, 2, 90, 70, 40, dtype=dtype)
    dlse = torch.randn(q.shape[:3], device=DEVICE)
    compare(q, k, v, causal=causal, dlse=dlse)
    compare(q, k, v, causal=causal, dlse=dlse, do=torch.zeros_like(q))
    compare(q, k, v, causal=causal, dlse=dlse.transpose(0, 2).contiguous().transpose(0, 2))
    compare(q, k, v, causal=causal, dlse=dlse[:1, :1].expand_as(dlse))


def test_gradient_of_lse_alone():
    q, k, v = inputs(1, 2, 40, 50, 16, dtype=torch.float32, requires_grad=True)
    _, lse = attention(q, k, v, return_lse=True, backend="triton")
    dq, dk, dv = torch.autograd.grad(lse.sum(), (q, k, v))
    exact = dense((q, k, v), False, None, torch.zeros_like(q), torch.ones_like(lse), torch.float64)
    baseline = dense((q, k, v), False, None, torch.zeros_like(q), torch.ones_like(lse), torch.float32)
    check("dq", dq, exact["dq"], baseline["dq"])
    check("dk", dk, exact["dk"], baseline["dk"])
    assert torch.equal(dv, torch.zeros_like(v))


@pytest.mark.parametrize("backend", ["triton", "reference"])
@every_dtype
def test_rows_without_a_key_are_exact(backend, dtype):
    q, k, v = inputs(1, 2, 100, 30, 32, dtype=dtype)
    o, lse, (dq, _, _) = compare(q, k, v, causal=True, backend=backend)
    assert torch.equal(o[:, :, :70], torch.zeros_like(o[:, :, :70]))
    assert torch.equal(dq[:, :, :70], torch.zeros_like(dq[:, :, :70]))
    assert (lse[:, :, :70] == -torch.inf).all() and lse[:, :, 70:].isfinite().all()


@pytest.mark.parametrize("largest", [1e2, 1e4, 1e5])
@causal_or_not
@every_dtype
def test_large_scores(largest, causal, dtype):
    """Keys come in pairs of one score, so that P is no 0 or 1 and gradients stay: half of the head dim tells them
    apart, and no query has that half."""
    q, k, v = inputs(1, 2, 70, 90, 64, dtype=dtype)
    q[..., 32:] = 0
    k[:, :, 1::2, :32] = k[:, :, 0::2, :32]
    factor = (largest / float((q.double() @ k.double().mT).abs().max() * 64**-0.5)) ** 0.5
    o, _, (dq, dk, dv) = compare(q * factor, k * factor, v, causal=causal)
    assert min(float(x.abs().max()) for x in (o, dq, dk, dv)) > 0.1


@pytest.mark.parametrize("scale", [0.3, 2, 0, 0.0, -0.5, 1e-46, -1e-46])
@every_dtype
def test_scale(scale, dtype):
    compare(*inputs(1, 2, 40, 50, 32, dtype=dtype), scale=scale, causal=True)


@pytest.mark.parametrize("head_dim", [1, 40, 128])
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(1, 300), (300, 200), (0, 5), (5, 0)])
@causal_or_not
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_reference(head_dim, seqlen_q, seqlen_k, causal, dtype):
    q, k, v = inputs(2, 4, seqlen_q, seqlen_k, head_dim, heads_k=2, dtype=dtype)
    compare(q, k, v, causal=causal, backend="reference", dlse=torch.randn(q.shape[:3], device=DEVICE))


@causal_or_not
def test_future_keys_do_not_leak(causal):
    q, k, v = inputs(1, 1, 100, 100, 32)
    before = attention(q, k, v, causal=causal)
    k[:, :, 60:], v[:, :, 60:] = 100, 100
    changed = (attention(q, k, v, causal=causal) != before).any(-1).flatten()
    assert changed[60:].all() and changed[:60].any() != causal


@pytest.mark.parametrize("backend", ["triton", "reference"])
@causal_or_not
def test_the_same_bits_each_time(backend, causal):
    q, k, v = inputs(1, 4, 150, 170, 64, heads_k=2, requires_grad=True)
    do = torch.randn_like(q)

    def run():
        o, lse = attention(q, k, v, causal=causal, return_lse=True, backend=backend)
        return o, lse, *torch.autograd.grad(o, (q, k, v), do)

    first = run()
    for _ in range(2 if DEVICE == "cpu" else 10):
        assert_equal(run(), first)


def test_other_spelling():
    q, k, v = inputs(1, 2, 30, 40, 16)
    for use_triton, backend in ((None, "auto"), (True, "triton"), (False, "reference")):
        expected = attention(q, k, v, causal=True, backend=backend)
        assert torch.equal(flash_attention(q, k, v, True, use_triton), expected)
    with pytest.raises(TypeError, match="use_triton must be None, True or False, got 'yes'"):
        flash_attention(q, k, v, use_triton="yes")


def test_bfloat16_on_a_cpu_takes_the_reference():
    q, k, v = make_inputs(1, 1, 20, 30, 16, dtype=torch.bfloat16)
    assert torch.equal(attention(q, k, v), attention(q, k, v, backend="reference"))
    with pytest.raises(NotImplementedError, match="backend='triton'.*q.*(bfloat16|on cpu)"):
        attention(q, k, v, backend="triton")
