"""The public functions: docstring, validation, dispatch."""

import importlib.util
import math
import os
import warnings

import torch

from . import configs
from .autograd import attend, unwatched
from .configs import DTYPES, MAX_HEAD_DIM

BACKENDS = ("auto", "triton", "reference")
SMALLEST_SCALE, LARGEST_SCALE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max / 2
HAS_TRITON = importlib.util.find_spec("triton") is not None
# Triton reads the variable when a kernel is decorated: from then on the process interprets, or it does not.
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention, softmax(scale * q k^T) v, in memory linear in the lengths; differentiable once.

    Args:
        q: (batch, heads, seqlen_q, head_dim) in float16, bfloat16 or float32, on any device, with any strides.
            Lengths may be 0; head_dim is 1 to 256. Under autocast q, k and v are cast to its dtype.
        k, v: (batch, heads_k, seqlen_k, head_dim), like q. heads is a multiple of heads_k: query head h attends
            to key head h // (heads // heads_k), and no key is copied for it.
        causal: query i sees key j when j <= i + seqlen_k - seqlen_q (aligned at the bottom right):

                seqlen_q 2, seqlen_k 4      seqlen_q 4, seqlen_k 2
                    1 1 1 0                     0 0
                    1 1 1 1                     0 0
                                                1 0
                                                1 1

            A row that sees no key has output 0, lse -inf and gradient 0. The mask of PyTorch's
            scaled_dot_product_attention(is_causal=True) is aligned at the top left: the same where the lengths are.
        scale: factor of the scores, head_dim**-0.5 if None.
        return_lse: also return the natural logarithm of each row's sum of exp(scale * q k^T).
        backend: "triton" (CUDA tensors on Turing or later, or CPU tensors under TRITON_INTERPRET=1, but for
            bfloat16), "reference" (the same algorithm in PyTorch, any device), or "auto": Triton where it can, else
            the reference.

    Returns:
        The output, shaped, typed and laid out as q; with return_lse also lse (batch, heads, seqlen_q) in float32.

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it, what came, what is accepted.
        NotImplementedError: backend="triton" where it cannot run; a gradient of a gradient; forward-mode gradients.

    The same inputs give the same bits, forward and backward. float32 uses IEEE products, never TF32; scores,
    softmax and sums are float32 for every dtype. Source: Dao, FlashAttention-2 (2023), algorithms 1 and 2.
    """
    key = _call_key(q, k, v, causal, scale, backend)
    known = key and _calls.get(key)  # in that order: torch.compile would guard on what there is
    if not known:
        given = q, k, v
        q, k, v = _autocast(q, k, v)
        _validate(q, k, v, causal, scale, backend)
        if backend == "auto":
            backend = backend_for(q)
        elif backend == "triton" and (reason := _refusal(q)):
            raise NotImplementedError(f"backend='triton' {reason}; use backend='auto' or 'reference'")
        scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
        if scale < 0:  # the kernels take the maximum before they scale
            q, scale = -q, -scale
        if scale < SMALLEST_SCALE:  # in fp32 it would be 0, and a masked score 0 * -inf
            q, scale = q * 0, 1.0
        remembered = key and q is given[0] and k is given[1] and v is given[2]
        known = causal, scale, backend, {} if remembered else None
        if remembered:
            if len(_calls) >= MAX_CALLS:
                _calls.clear()
            _calls[key] = known
    o, lse_log2 = attend(q, k, v, *known)
    return (o, lse_log2 * math.log(2)) if return_lse else o


_calls: dict[tuple, tuple] = {}  # by _call_key(): what attend() is told besides the tensors
MAX_CALLS = 4096  # that are remembered


def _call_key(q, k, v, causal, scale, backend) -> tuple | None:
    """All of a call but the tensors' values, where it is remembered: on a GPU, with nothing unusual about it.

    Settling it anew, from the checks to the choice of compiled kernels, takes longer than a short sequence on the GPU.
    """
    usual = (
        type(q) is type(k) is type(v) is torch.Tensor
        and q.is_cuda
        and type(causal) is bool
        and (scale is None or isinstance(scale, float))
        and type(backend) is str
        and unwatched()  # and what else eager() asks, but for gradients: that takes half a microsecond
        and not (q.is_neg() or k.is_neg() or v.is_neg())
    )
    if not usual:
        return None
    try:
        return (
            q.shape, q.stride(), q.dtype, q.get_device(),
            k.shape, k.stride(), k.dtype, k.get_device(),
            v.shape, v.stride(), v.dtype, v.get_device(),
            causal, scale, backend, configs.tunings,
            # Of CUDA: with its name, it takes half a microsecond more.
            torch.is_autocast_enabled() and torch.get_autocast_dtype("cuda"),
        )  # fmt: skip
    except RuntimeError:  # a sparse or nested tensor has none of these, and is refused by name
        return None


def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, use_triton: bool | None = None
) -> torch.Tensor:
    """`attention` under another spelling: use_triton is None (backend "auto"), True ("triton"), False ("reference")."""
    if use_triton is not None and not isinstance(use_triton, bool):
        raise TypeError(f"use_triton must be None, True or False, got {use_triton!r}")
    backend = {None: "auto", True: "triton", False: "reference"}[use_triton]
    return attention(q, k, v, causal=causal, backend=backend)


def backend_for(q: torch.Tensor) -> str:
    """What backend="auto" takes for a tensor like q: "triton" or "reference"."""
    if q.is_cuda and not HAS_TRITON:
        warnings.warn("flashattn: Triton is not installed; attention runs on its slow PyTorch reference", stacklevel=3)
    return "triton" if _refusal(q) is None else "reference"


def _refusal(q: torch.Tensor) -> str | None:
    """Why the Triton kernels cannot take a tensor like q; None where they can."""
    if not HAS_TRITON:
        return "needs the package triton, which is not installed"
    if INTERPRETED and q.dtype == torch.bfloat16:
        return (
            "takes float16 or float32 under TRITON_INTERPRET=1, got q in bfloat16, which Triton's interpreter "
            "computes wrongly"
        )
    if not q.is_cuda and not (INTERPRETED and q.device.type == "cpu"):
        return (
            "takes CUDA tensors, or CPU tensors where TRITON_INTERPRET=1 was set before flashattn was imported; "
            f"got q on {q.device}"
        )
    if q.is_cuda and torch.cuda.get_device_capability(q.device) < (7, 5):
        return f"needs a GPU of Turing (sm_75) or later, got {torch.cuda.get_device_name(q.device)}"
    return None


def _autocast(*tensors):
    """The tensors in autocast's dtype, where autocast is on for their device."""
    device = tensors[0].device.type if isinstance(tensors[0], torch.Tensor) else "cpu"
    if device not in ("cuda", "cpu") or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype in DTYPES else x for x in tensors)


def _validate(q, k, v, causal, scale, backend) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.layout != torch.strided or x.is_nested:
            raise TypeError(f"{name} must be a dense tensor, got {'a nested one' if x.is_nested else x.layout}")
        if x.dim() != 4:
            raise ValueError(
                f"{name} must have 4 dimensions (batch, heads, length, head_dim), got shape {tuple(x.shape)}"
            )
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} must be float16, bfloat16 or float32, got {x.dtype}")
        if x.dtype != q.dtype:
            raise TypeError(f"{name} must have q's dtype {q.dtype}, got {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {x.device}")
    batch, heads, _, head_dim = q.shape
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"q must have a head_dim from 1 to {MAX_HEAD_DIM}, got {head_dim}")
    for name, x in (("k", k), ("v", v)):
        if x.shape[0] != batch or x.shape[3] != head_dim:
            raise ValueError(f"{name} must have q's batch {batch} and head_dim {head_dim}, got shape {tuple(x.shape)}")
        if x.shape != k.shape:
            raise ValueError(f"v must have k's shape {tuple(k.shape)}, got {tuple(v.shape)}")
    heads_k = k.shape[1]
    if heads % heads_k if heads_k else heads:
        raise ValueError(f"q's heads must be a multiple of k's heads, got {heads} and {heads_k}")
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be True or False, got {causal!r}")
    if scale is not None:
        if isinstance(scale, bool) or not isinstance(scale, (int, float)):
            raise TypeError(f"scale must be a float or None, got {type(scale).__name__}")
        if not -LARGEST_SCALE < scale < LARGEST_SCALE:
            raise ValueError(f"scale must be finite, and in the range of float32, got {scale}")
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
