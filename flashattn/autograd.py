"""The operators, as torch.compile sees them, and the autograd function around them."""

import functools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch._C._functorch import TransformType, peek_interpreter_stack
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode

from . import configs, reference
from .codegen import Memory

LARGEST_DELTA = 2.0**14  # beside gradients that are scaled for fp16, which rounds dS = P * (dP - delta)


@functools.cache  # once a process, whatever the warning filters
def _warn_bf16() -> None:
    warnings.warn(
        "flashattn: this GPU has no bf16 tensor cores, so bf16 inputs are computed in fp16: values beyond 65504 "
        "saturate (see docs/numerics.md). Inputs in torch.float16 save the conversions.",
        stacklevel=2,
    )


def _lacks_bf16(device: torch.device) -> bool:
    """Whether the device has no bf16 tensor cores, so that bf16 inputs run on the fp16 ones."""
    return device.type == "cuda" and configs.device_of(device).capability < 80


def _saturate(x: torch.Tensor) -> torch.Tensor:
    """x in fp16, values beyond its range at its ends; NaN stays NaN."""
    largest = torch.finfo(torch.float16).max
    return x.to(torch.float16).clamp(-largest, largest)  # before the cast, bf16 would round the bound up


def _largest(x: torch.Tensor) -> torch.Tensor:
    """The largest finite |x|: one row of NaN is not to cost the others their scale."""
    return x.abs().nan_to_num(0.0, posinf=0.0).amax().float()


class _Passes(NamedTuple):
    forward: Callable
    delta: Callable
    backward: Callable


@functools.cache  # not an import statement, which every call would pay for
def _kernels() -> _Passes:
    """The passes in Triton, which a machine may lack."""
    from .backward import backward, delta
    from .forward import forward

    return _Passes(forward, delta, backward)


def _forward_kernels(q, k, v, *, causal, scale, again=None):
    if q.dtype == torch.bfloat16 and _lacks_bf16(q.device):
        _warn_bf16()
        o, lse_log2 = _forward_kernels(*map(_saturate, (q, k, v)), causal=causal, scale=scale, again=again)
        return o.to(q.dtype), lse_log2
    return _kernels().forward(q, k, v, causal=causal, scale=scale, again=again)


def _delta_kernels(o, do, dlse_log2, *, again=None):
    if o.dtype == torch.bfloat16 and _lacks_bf16(o.device):
        o, do = o.float(), do.float()
    return _kernels().delta(o, do, dlse_log2, again=again)


def _backward_kernels(q, k, v, do, lse_log2, delta, *, causal, scale, needs, dtype=None, again=None):
    if q.dtype == torch.bfloat16 and _lacks_bf16(q.device):
        # A power of two brings the incoming gradients into fp16's range; fp32 undoes it.
        largest = torch.maximum(_largest(do), _largest(delta) / LARGEST_DELTA)
        exponent = torch.frexp(largest).exponent.clamp(-126, 126)  # beyond, ldexp's own 2**exponent is no fp32
        do = torch.ldexp(do.float(), -exponent).to(torch.float16)
        grads = _backward_kernels(
            *map(_saturate, (q, k, v)),
            *(do, lse_log2, torch.ldexp(delta, -exponent)),
            causal=causal,
            scale=scale,
            needs=needs,
            dtype=torch.float32,
            again=again,
        )
        return tuple(g if g is None else torch.ldexp(g, exponent).to(q.dtype) for g in grads)
    options = {"causal": causal, "scale": scale, "needs": needs, "dtype": dtype}
    return _kernels().backward(q, k, v, do, lse_log2, delta, **options, again=again)


def _without_autocast(fn):
    """The reference's products stay fp32 under autocast, which has cast q, k and v already; and make no graph."""

    def wrapped(q, *args, again=None, **kwargs):
        kind = q.device.type
        autocast = torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()
        with autocast, torch.no_grad():
            return fn(q, *args, **kwargs)

    return wrapped


_BACKENDS = {
    "triton": _Passes(_forward_kernels, _delta_kernels, _backward_kernels),
    "reference": _Passes(*map(_without_autocast, (reference.forward, reference.delta, reference.backward))),
}

_operators = torch.library.Library("flashattn", "DEF")
_operators.define(
    "forward(Tensor q, Tensor k, Tensor v, bool causal, float scale, str backend) -> (Tensor o, Tensor lse_log2)"
)
_operators.define("delta(Tensor o, Tensor dout, Tensor? dlse_log2, str backend) -> Tensor")
_operators.define(
    "backward(Tensor q, Tensor k, Tensor v, Tensor dout, Tensor lse_log2, Tensor delta, "
    "bool causal, float scale, str backend, bool[] needs) -> (Tensor dq, Tensor dk, Tensor dv)"
)


@torch.library.impl(_operators, "forward", "CompositeExplicitAutograd")
def _forward(q, k, v, causal, scale, backend, again=None):
    return _BACKENDS[backend].forward(q, k, v, causal=causal, scale=scale, again=again)


@torch.library.register_fake("flashattn::forward", lib=_operators)
def _forward_fake(q, k, v, causal, scale, backend):
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.impl(_operators, "delta", "CompositeExplicitAutograd")
def _delta(o, do, dlse_log2, backend, again=None):
    return _BACKENDS[backend].delta(o, do, dlse_log2, again=again)


@torch.library.register_fake("flashattn::delta", lib=_operators)
def _delta_fake(o, do, dlse_log2, backend):
    return o.new_empty(o.shape[:3], dtype=torch.float32)


@torch.library.impl(_operators, "backward", "CompositeExplicitAutograd")
def _backward(q, k, v, do, lse_log2, delta, causal, scale, backend, needs, again=None):
    if do.numel() == 0:  # no query: no kernel would write dk and dv
        grads = [torch.zeros_like(x) if need else None for x, need in zip((q, k, v), needs, strict=True)]
    else:
        settings = {"causal": causal, "scale": scale, "needs": needs, "again": again}
        grads = _BACKENDS[backend].backward(q, k, v, do, lse_log2, delta, **settings)
    return tuple(q.new_empty(0) if g is None else g for g in grads)  # an operator returns tensors only


@torch.library.register_fake("flashattn::backward", lib=_operators)
def _backward_fake(q, k, v, do, lse_log2, delta, causal, scale, backend, needs):
    inputs = zip((q, k, v), needs, strict=True)
    return tuple(torch.empty_like(x) if need else x.new_empty(0) for x, need in inputs)


def eager(q: torch.Tensor) -> bool:
    """Whether nothing looks on, so that an operator may run without the dispatcher.

    torch.compile, tracers, fake tensors, FLOP counters, torch.func and the like must see the operator.
    """
    return (
        type(q) in (torch.Tensor, torch.nn.Parameter)
        and not torch.compiler.is_compiling()
        and _get_current_dispatch_mode() is None
        and not torch._C._are_functorch_transforms_active()
        and not torch.jit.is_tracing()
    )


def _transforms_gradients() -> bool:
    """Whether a torch.func transform is at work that would lose gradients: vmap hides what needs them."""
    return (
        torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and torch._C._are_functorch_transforms_active()
        and peek_interpreter_stack().key() != TransformType.Functionalize
    )


def _run(operator, q, *args, again):
    """_forward or _backward, by itself where it may; `again` is then handed on."""
    if again is not None or eager(q):
        return operator(q, *args, again=again)
    return getattr(torch.ops.flashattn, operator.__name__.strip("_"))(q, *args)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, settings, again):
        o, lse_log2 = _run(_forward, q, k, v, *settings, again=again)
        ctx.save_for_backward(q, k, v, o, lse_log2)
        ctx.settings, ctx.again = settings, again
        ctx.set_materialize_grads(False)
        return o, lse_log2

    @staticmethod
    def backward(ctx, do, dlse_log2):
        q, k, v, o, lse_log2 = ctx.saved_tensors
        do = torch.zeros_like(o) if do is None else do
        needs = list(ctx.needs_input_grad[:3])
        again = _memory(ctx.again, (q, k, v, o, do), dlse_log2, needs)
        delta = _run(_delta, o, do, dlse_log2, ctx.settings[-1], again=again)
        del o
        if not torch.compiler.is_compiling():  # compiled code frees by itself what it needs no more
            ctx.maybe_clear_saved_tensors()  # o makes room for the gradients, unless somebody else holds it
        # Only a graph of the backward pass, for a gradient of a gradient, makes autograd run this with gradients on.
        backward = _AttentionBackward.apply if torch.is_grad_enabled() else _AttentionBackward.run
        grads = backward(again, q, k, v, do, lse_log2, delta, *ctx.settings, needs)
        return *(g if need else None for g, need in zip(grads, needs, strict=True)), None, None


def _memory(again: Memory | None, tensors, dlse_log2, needs) -> Memory | None:
    """What backward passes of this kind remember; None where they do not.

    Since the forward pass, which had its own, hooks may have laid saved tensors out anew, and what looks on have come.
    """
    if again is None or not eager(tensors[0]):
        return None
    return again.setdefault((*[x.stride() for x in tensors], dlse_log2 is None, *needs), {})


class _AttentionBackward(torch.autograd.Function):
    """The backward pass as a function of its own, so that differentiating it is refused, not wrong."""

    @staticmethod
    def run(again, q, *args):
        return _run(_backward, q, *args, again=again)

    @staticmethod
    def forward(ctx, *args):
        return _AttentionBackward.run(*args)

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(
            "flashattn.attention: double backward (a gradient of its gradient) is not supported; "
            "torch.nn.functional.scaled_dot_product_attention under SDPBackend.MATH has one"
        )


def attend(
    q, k, v, causal: bool, scale: float, backend: str, again: Memory | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and base-2 log-sum-exp of validated tensors, differentiable where an input needs a gradient.

    again: where launches are remembered, for tensors that are eager() and calls that differ in the values only.
    """
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in (q, k, v)):
        raise NotImplementedError("flashattn.attention: forward-mode differentiation is not supported")
    if again is None and _transforms_gradients():
        raise NotImplementedError(
            "flashattn.attention: torch.func transforms (vmap, grad, vjp, ...) are not supported where gradients are; "
            "use torch.autograd.grad and the batch dimension, or vmap under torch.no_grad()"
        )
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _Attention.apply(q, k, v, (causal, scale, backend), again)
    if again is not None:  # as _run() has it, in two steps fewer
        return _BACKENDS[backend].forward(q, k, v, causal=causal, scale=scale, again=again)
    return _run(_forward, q, k, v, causal, scale, backend, again=None)
