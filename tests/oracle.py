"""What the tests of attention share: the device, and one comparison of everything that a call computes."""

import math
from functools import partial

import torch

from flashattn import attention
from flashattn.configs import choose
from flashattn.reference import dense_attention
from flashattn.testing import check, largest_score, make_inputs, score_condition

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float16, torch.float32] + ([torch.bfloat16] if DEVICE == "cuda" else [])

assert_equal = partial(torch.testing.assert_close, rtol=0, atol=0)  # of tensors, or of sequences of them


def inputs(batch, heads, seqlen_q, seqlen_k, head_dim, **options):
    return make_inputs(batch, heads, seqlen_q, seqlen_k, head_dim, **{"device": DEVICE, **options})


def gradients(f, tensors, do=None):
    """Of f's output, in each of the tensors; do is 1 where none is given."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    o = f(*leaves)
    return torch.autograd.grad(o, leaves, torch.ones_like(o) if do is None else do)


def compare(q, k, v, *, causal=False, scale=None, backend="triton", do=None, dlse=None, cancels=False):
    """Hold o, lse and the gradients of q, k and v (for random or given do and dlse) to the fp64 oracle.

    cancels: rows have one key that counts, so that dP - delta is a difference of equal numbers.
    """
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o, lse = attention(*leaves, causal=causal, scale=scale, return_lse=True, backend=backend)
    do = torch.randn_like(o) if do is None else do
    grads = torch.autograd.grad((o, lse), leaves, (do, torch.zeros_like(lse) if dlse is None else dlse))
    exact = dense(leaves, causal, scale, do, dlse, torch.float64)
    baseline = dense(leaves, causal, scale, do, dlse, q.dtype)
    terms = {"o": 0.0, "dq": 0.0, "dk": 0.0, "dv": 0.0}
    if cancels and do.numel() and v.numel():
        dp = largest_score(do.abs(), v.abs()) * q.shape[-1] ** -0.5
        terms |= {"dq": dp * float(k.abs().max()), "dk": dp * float(q.abs().max())}
    for name, actual in zip(terms, (o, *grads), strict=True):
        condition = score_condition(q, k, scale)
        check(name, actual, exact[name], baseline[name], condition=condition, terms=terms[name])
        assert actual.dtype == q.dtype
    # lse is fp32 whatever the inputs are, so its baseline is PyTorch in fp32.
    fp32 = dense(leaves, causal, scale, do, dlse, torch.float32)
    check("lse", lse, exact["lse"], fp32["lse"], terms=lse_terms(q, k) if backend == "triton" else 0.0)
    return o, lse, grads


def lse_terms(q, k, tile=None):
    """check()'s terms for lse: with integer_p, exponents of 64 to 128 in base 2, and what exp2 loses of each key."""
    if not q.numel() or not (tile or choose("forward", q, q.shape[2], False)).integer_p:
        return 0.0
    return 32 * math.log(2) + k.shape[2] * 2.0**-29 / (2 * torch.finfo(torch.float32).eps)


def dense(leaves, causal, scale, do, dlse, dtype):
    """o, lse, dq, dk, dv of dense attention computed in dtype."""
    o, lse = dense_attention(*leaves, causal=causal, scale=scale, dtype=dtype)
    outputs, grads = [o], [do.to(dtype)]
    if dlse is not None:
        outputs, grads = [o, lse.masked_fill(lse.isinf(), 0)], [do.to(dtype), dlse.to(dtype)]
    dq, dk, dv = torch.autograd.grad(outputs, leaves, grads)
    return {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
