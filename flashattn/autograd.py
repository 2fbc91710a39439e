"""The operators, as torch.compile sees them, and the autograd function around them."""

import functools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch._C._functorch import TransformType, peek_interpreter_stack
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from . import configs, reference
from .launcher import LaunchCache

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


def _forward_kernels(q, k, v, *, causal, scale, cache=None):
    if q.dtype == torch.bfloat16 and _lacks_bf16(q.device):
        _warn_bf16()
        o, lse_log2 = _forward_kernels(*map(_saturate, (q, k, v)), causal=causal, scale=scale, cache=cache)
        return o.to(q.dtype), lse_log2
    return _kernels().forward(q, k, v, causal=causal, scale=scale, cache=cache)


def _delta_kernels(o, do, dlse_log2, *, cache=None):
    if o.dtype == torch.bfloat16 and _lacks_bf16(o.device):
        o, do = o.float(), do.float()
    return _kernels().delta(o, do, dlse_log2, cache=cache)


def _backward_kernels(q, k, v, do, lse_log2, delta, *, causal, scale, needs, dtype=None, cache=None):
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
            cache=cache,
        )
        return tuple(g if g is None else torch.ldexp(g, exponent).to(q.dtype) for g in grads)
    options = {"causal": causal, "scale": scale, "needs": needs, "dtype": dtype}
    return _kernels().backward(q, k, v, do, lse_log2, delta, **options, cache=cache)


def _without_autocast(fn):
    """The reference's products stay fp32 under autocast, which has cast q, k and v already; and make no graph."""

    def wrapped(q, *args, cache=None, **kwargs):
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
def _forward(q, k, v, causal, scale, backend, cache=None):
    return _BACKENDS[backend].forward(q, k, v, causal=causal, scale=scale, cache=cache)


@torch.library.register_fake("flashattn::forward", lib=_operators)
def _forward_fake(q, k, v, causal, scale, backend):
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.impl(_operators, "delta", "CompositeExplicitAutograd")
def _delta(o, do, dlse_log2, backend, cache=None):
    return _BACKENDS[backend].delta(o, do, dlse_log2, cache=cache)


@torch.library.register_fake("flashattn::delta", lib=_operators)
def _delta_fake(o, do, dlse_log2, backend):
    return o.new_empty(o.shape[:3], dtype=torch.float32)


@torch.library.impl(_operators, "backward", "CompositeExplicitAutograd")
def _backward(q, k, v, do, lse_log2, delta, causal, scale, backend, needs, cache=None):
    if do.numel() == 0:  # no query: no kernel would write dk and dv
        grads = [torch.zeros_like(x) if need else None for x, need in zip((q, k, v), needs, strict=True)]
    else:
        settings = {"causal": causal, "scale": scale, "needs": needs, "cache": cache}
        grads = _BACKENDS[backend].backward(q, k, v, do, lse_log2, delta, **settings)
    return tuple(q.new_empty(0) if g is None else g for g in grads)  # an operator returns tensors only


@torch.library.register_fake("flashattn::backward", lib=_operators)
def _backward_fake(q, k, v, do, lse_log2, delta, causal, scale, backend, needs):
    inputs = zip((q, k, v), needs, strict=True)
    return tuple(torch.empty_like(x) if need else x.new_empty(0) for x, need in inputs)


def _flops(mode: str, q_shape, k_shape, *args, **kwargs) -> int:
    """What torch.utils.flop_counter counts; its formulas for SDPA leave the mask out too."""
    from . import measure  # which nothing else here needs

    batch, heads, seqlen_q, head_dim = q_shape
    return int(measure.flops(batch, heads, seqlen_q, k_shape[2], head_dim, mode=mode))


for _mode in ("forward", "backward"):
    register_flop_formula(getattr(torch.ops.flashattn, _mode))(functools.partial(_flops, _mode))


# What a thread's dispatches go through besides their tensors: this, and less of it in inference mode.
_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)
_UNWATCHED = _KEYS.add(torch._C.DispatchKey.ADInplaceOrView).raw_repr(), _KEYS.raw_repr()


def unwatched() -> bool:
    """Whether no torch.compile, tracer, fake tensor mode, FLOP counter, vmap or the like must see an operator."""
    return not torch.compiler.is_compiling() and torch._C._dispatch_tls_local_include_set().raw_repr() in _UNWATCHED


def eager(*tensors: torch.Tensor) -> bool:
    """Whether an operator may run on these tensors without the dispatcher.

    It may not where it is watched; nor on subclasses, and on tensors that are not what their memory says: lazy
    negations (torch.Tensor.is_neg), and gradients that are known to be 0.
    """
    if not unwatched():
        return False
    for x in tensors:
        if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.is_neg() or x._is_zerotensor():
            return False
    return True


def _save(ctx, inputs, output, cache=None) -> None:
    """What the backward pass takes, of inputs and output of flashattn::forward."""
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.settings, ctx.cache = inputs[3:], cache
    ctx.set_materialize_grads(False)


def _gradients(ctx, do, dlse_log2) -> tuple[torch.Tensor | None, ...]:
    """dq, dk and dv, where they are needed."""
    q, k, v, o, lse_log2 = ctx.saved_tensors
    do = torch.zeros_like(o) if do is None else do
    needs = list(ctx.needs_input_grad[:3])
    cache, alone = None, eager(q, k, v, o, do, *([] if dlse_log2 is None else [dlse_log2]))
    if alone:
        if ctx.cache is not None:
            cache = ctx.cache.setdefault(_backward_key((q, k, v, o, do), dlse_log2, needs), {})
        delta = _delta(o, do, dlse_log2, ctx.settings[-1], cache=cache)
        del o
        ctx.maybe_clear_saved_tensors()  # o makes room for the gradients, unless somebody else holds it
    else:  # compiled code frees by itself what it needs no more
        delta = torch.ops.flashattn.delta(o, do, dlse_log2, ctx.settings[-1])
    # Only a graph of the backward pass, for a gradient of a gradient, makes autograd run this with gradients on.
    backward = _AttentionBackward.apply if torch.is_grad_enabled() else _AttentionBackward.forward
    grads = backward(alone, cache, q, k, v, do, lse_log2, delta, *ctx.settings, needs)
    return tuple(g if need else None for g, need in zip(grads, needs, strict=True))


def _backward_key(tensors, dlse_log2, needs) -> tuple:
    """All of a backward pass but its tensors' values: hooks may have changed what the forward pass has saved."""
    return *[(x.stride(), x.dtype, x.get_device()) for x in tensors], dlse_log2 is None, *needs


class _Attention(torch.autograd.Function):
    """flashattn::forward with gradients, for the eager: what PyTorch makes of _save and _gradients costs more."""

    @staticmethod
    def forward(ctx, q, k, v, settings, cache):
        output = _forward(q, k, v, *settings, cache=cache)
        _save(ctx, (q, k, v, *settings), output, cache)
        return output

    @staticmethod
    def backward(ctx, do, dlse_log2):
        return *_gradients(ctx, do, dlse_log2), None, None


class _Transformed(torch.autograd.Function):
    """flashattn::forward as torch.func can differentiate it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs):
        return torch.ops.flashattn.forward(*inputs)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _save(ctx, inputs, output)
        ctx.set_materialize_grads(True)  # vmap in PyTorch 2.6 fails on a gradient that is None

    @staticmethod
    def backward(ctx, do, dlse_log2):
        return *_gradients(ctx, do, dlse_log2), None, None, None


torch.library.register_autograd("flashattn::forward", _Transformed.backward, setup_context=_save, lib=_operators)


class _AttentionBackward(torch.autograd.Function):
    """The backward pass as a function of its own, so that differentiating it is refused, not wrong."""

    generate_vmap_rule = True

    @staticmethod
    def forward(alone, cache, *args):
        return _backward(*args, cache=cache) if alone else torch.ops.flashattn.backward(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(
            "flashattn.attention: double backward (a gradient of its gradient) is not supported; "
            "torch.nn.functional.scaled_dot_product_attention under SDPBackend.MATH has one"
        )


def attend(
    q, k, v, causal: bool, scale: float, backend: str, cache: LaunchCache | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and base-2 log-sum-exp of validated tensors, differentiable where an input needs a gradient.

    cache: where launches are remembered, for tensors that are eager() and calls that differ in the values only.
    """
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in (q, k, v)):
        raise NotImplementedError("flashattn.attention: forward-mode differentiation is not supported")
    if cache is None and not eager(q, k, v):
        if _is_transformed():
            return _Transformed.apply(q, k, v, causal, scale, backend)
        return torch.ops.flashattn.forward(q, k, v, causal, scale, backend)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _Attention.apply(q, k, v, (causal, scale, backend), cache)
    return _forward(q, k, v, causal, scale, backend, cache=cache)


def _is_transformed() -> bool:
    """Whether a transform of torch.func is at work that asks for rules: functionalize() does not."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._are_functorch_transforms_active()
        and peek_interpreter_stack().key() in (TransformType.Grad, TransformType.Vmap)
    )
