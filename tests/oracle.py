"""What the tests of attention share: the device, and one comparison of everything that a call computes."""

import math

import torch

from flashattn import attention
from flashattn.reference import dense_attention
from flashattn.testing import check, make_inputs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float16, torch.float32] + ([torch.bfloat16] if DEVICE == "cuda" else [])


def inputs(batch, heads, seqlen_q, seqlen_k, head_dim, **options):
    return make_inputs(batch, heads, seqlen_q, seqlen_k, head_dim, **{"device": DEVICE, **options})


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
        dp = largest(do.abs(), v.abs()) * q.shape[-1] ** -0.5
        terms |= {"dq": dp * float(k.abs().max()), "dk": dp * float(q.abs().max())}
    for name, actual in zip(terms, (o, *grads), strict=True):
        condition = score_condition(q, k, scale)
        check(name, actual, exact[name], baseline[name], condition=condition, terms=terms[name])
        assert actual.dtype == q.dtype
    # lse is fp32 whatever the inputs are, so its baseline is PyTorch in fp32.
    check("lse", lse, exact["lse"], dense(leaves, causal, scale, do, dlse, torch.float32)["lse"])
    return o, lse, grads


def score_condition(q, k, scale=None):
    """How much fp32's relative rounding is magnified in P = exp2(score - lse): the size of the two, at least 1.

    1 in 16 bits, where eps is far beyond it.
    """
    if q.dtype != torch.float32 or not q.numel() or not k.numel():
        return 1.0
    score = largest(q, k) * (q.shape[-1] ** -0.5 if scale is None else abs(scale))
    return max(1.0, (score + math.log(k.shape[2])) * math.log2(math.e))


def largest(x, y):
    """The largest |x_i . y_j| in any head."""
    y = y.repeat_interleave(x.shape[1] // y.shape[1], 1)
    return float((x.detach().double() @ y.detach().double().mT).abs().max())


def dense(leaves, causal, scale, do, dlse, dtype):
    """o, lse, dq, dk, dv of dense attention computed in dtype."""
    o, lse = dense_attention(*leaves, causal=causal, scale=scale, dtype=dtype)
    outputs, grads = [o], [do.to(dtype)]
    if dlse is not None:
        outputs, grads = [o, lse.masked_fill(lse.isinf(), 0)], [do.to(dtype), dlse.to(dtype)]
    dq, dk, dv = torch.autograd.grad(outputs, leaves, grads)
    return {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
