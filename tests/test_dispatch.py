"""Between a call and the kernels: tensors that are not what their memory says, transforms, tracers, export."""

import shutil

import pytest
import torch
from oracle import DEVICE, gradients, inputs
from torch.testing import assert_close

from flashattn import attention, interface
from flashattn.reference import dense_attention

BACKENDS = pytest.mark.parametrize("backend", ["triton", "reference"])
SMALL = (2, 2, 20, 30, 16)


# Tensors -------------------------------------------------------------------------------------------------------------


@BACKENDS
@pytest.mark.parametrize("place", range(3))
def test_a_negated_view(backend, place):
    """The imaginary part of a conjugate: torch.Tensor with a flag, and memory of the other sign."""
    tensors = list(inputs(*SMALL, dtype=torch.float32))
    expected = attention(*tensors, causal=True, backend=backend)
    for _ in range(2):  # the second call is remembered
        attention(*tensors, causal=True, backend=backend)
    x = tensors[place]
    tensors[place] = torch.complex(x, -x).conj().imag
    assert tensors[place].is_neg()
    assert_close(attention(*tensors, causal=True, backend=backend), expected)


@BACKENDS
def test_a_negated_gradient(backend):
    """As complex numbers make them: the real part of conj(i o) w is o times the imaginary part of w."""
    leaves = inputs(*SMALL, dtype=torch.float32)
    weight = torch.complex(torch.randn_like(leaves[0]), torch.randn_like(leaves[0]))
    seen = []

    def layer(q, k, v):
        o = attention(q, k, v, backend=backend)
        o.register_hook(lambda do: seen.append(do.is_neg()))
        return (torch.complex(torch.zeros_like(o), o).conj() * weight).sum().real

    plain = gradients(lambda q, k, v: attention(q, k, v, backend=backend), leaves, weight.imag)
    assert_close(gradients(layer, leaves), plain)
    assert seen == [True]


@BACKENDS
def test_a_gradient_that_is_known_to_be_0(backend):
    leaves = inputs(*SMALL, dtype=torch.float32)
    zero = torch._efficientzerotensor(leaves[0].shape, device=DEVICE)
    for grad in gradients(lambda q, k, v: attention(q, k, v, backend=backend), leaves, zero):
        assert grad.count_nonzero() == 0


class Wrapper(torch.Tensor):
    """Has no memory of its own."""

    @staticmethod
    def __new__(cls, x):
        made = torch.Tensor._make_wrapper_subclass(cls, x.shape, strides=x.stride(), dtype=x.dtype, device=x.device)
        made.inner = x
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*(x.inner if isinstance(x, cls) else x for x in args), **(kwargs or {}))


@BACKENDS
@pytest.mark.parametrize("place", range(3))
def test_a_subclass(backend, place):
    tensors = list(inputs(*SMALL, dtype=torch.float32))
    expected = attention(*tensors, backend=backend)
    tensors[place] = Wrapper(tensors[place])
    assert torch.equal(attention(*tensors, backend=backend), expected)


# torch.func ----------------------------------------------------------------------------------------------------------


@BACKENDS
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap takes one slice after the other
def test_transforms_of_torch_func(backend):
    def loss(q, k, v):
        return attention(q, k, v, causal=True, backend=backend).sin().sum()

    def of_all(q, k, v):
        return torch.vmap(loss)(q, k, v).sum()

    slices = [inputs(1, 2, 20, 30, 16, dtype=torch.float32) for _ in range(3)]
    tensors = [torch.stack(x) for x in zip(*slices, strict=True)]
    everything = (0, 1, 2)
    expected = [torch.stack(x) for x in zip(*[gradients(loss, x) for x in slices], strict=True)]
    assert_close(torch.vmap(torch.func.grad(loss, everything))(*tensors), expected)
    assert_close(torch.func.grad(of_all, everything)(*tensors), expected)
    assert_close(gradients(of_all, tensors), expected)
    q, k, v = slices[0]
    assert_close(
        torch.func.jacrev(lambda q: attention(q[:, :, :2], k, v, backend=backend))(q),
        torch.autograd.functional.jacobian(lambda q: attention(q[:, :, :2], k, v, backend=backend), q),
    )
    assert torch.func.functionalize(loss)(q, k, v) == loss(q, k, v)
    with pytest.raises(NotImplementedError, match="double backward"):
        torch.func.grad(lambda q: torch.func.grad(loss)(q, k, v).sum())(q)


@BACKENDS
def test_gradients_in_batches(backend):
    leaves = [x.requires_grad_() for x in inputs(*SMALL, dtype=torch.float32)]
    o = attention(*leaves, backend=backend)
    many = torch.randn(3, *o.shape, device=DEVICE)
    actual = torch.autograd.grad(o, leaves, many, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(o, leaves, do, retain_graph=True) for do in many]
    assert_close(actual, [torch.stack(x) for x in zip(*each, strict=True)])


# Compiling, tracing, counting ----------------------------------------------------------------------------------------


def test_eager_calls_do_not_compile_anew(monkeypatch):
    """What attention() remembers of them is nothing that a compiled caller depends on."""
    compilations = []

    def counted(graph, _):
        compilations.append(graph)
        return graph

    monkeypatch.setattr(interface, "_calls", {})
    tensors = inputs(*SMALL, dtype=torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, backend=counted)
    for length in range(1, 13):
        compiled(*tensors)
        if DEVICE == "cuda":
            attention(*(x[:, :, :length] for x in tensors))
        else:
            interface._calls[length] = None
    assert len(compilations) == 1 and len(interface._calls) == 12


@BACKENDS
@pytest.mark.skipif(DEVICE == "cpu" and not shutil.which("g++"), reason="Inductor needs a compiler")
def test_inductor(backend):
    def layer(x):
        return attention(x, 2 * x, 2 * x, causal=True, backend=backend).sin()

    x = inputs(*SMALL, dtype=torch.float32)[:1]
    torch._dynamo.reset()
    assert_close(gradients(torch.compile(layer, fullgraph=True), x), gradients(layer, x))


@BACKENDS
def test_one_tensor_three_times(backend):
    def layer(x):
        return attention(x, x, x, causal=True, backend=backend)

    x = inputs(*SMALL, dtype=torch.float32)[:1]
    torch._dynamo.reset()
    assert_close(gradients(torch.compile(layer, fullgraph=True, backend="aot_eager"), x), gradients(layer, x))


class Layer(torch.nn.Module):
    def __init__(self, backend):
        super().__init__()
        self.projection, self.backend = torch.nn.Linear(16, 48, device=DEVICE), backend

    def forward(self, x):
        return attention(*self.projection(x).chunk(3, -1), causal=True, backend=self.backend)


@BACKENDS
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_model_learns(backend, strict):
    layer, x = Layer(backend), inputs(*SMALL, dtype=torch.float32)[0]
    expected = torch.autograd.grad(layer(x).sum(), list(layer.parameters()))
    exported = torch.export.export(layer, (x,), strict=strict).module()
    assert_close(torch.autograd.grad(exported(x).sum(), list(exported.parameters())), expected)


@BACKENDS
def test_flops_are_counted(backend):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    def counted(f):
        with FlopCounterMode(display=False) as counter:
            gradients(f, inputs(1, 2, 20, 30, 16, dtype=torch.float32))
        return counter.get_total_flops()

    scores = 2 * (1 * 2 * 20 * 30 * 16)  # FLOPs
    assert counted(lambda q, k, v: attention(q, k, v, backend=backend)) == 7 * scores
    with sdpa_kernel(SDPBackend.MATH):  # which keeps the scores, and so has a product less
        assert counted(torch.nn.functional.scaled_dot_product_attention) == 6 * scores


def test_the_operator_itself_has_gradients():
    leaves = inputs(*SMALL, dtype=torch.float32)
    actual = gradients(lambda q, k, v: torch.ops.flashattn.forward(q, k, v, True, 0.25, "reference")[0], leaves)
    assert_close(
        actual, gradients(lambda q, k, v: dense_attention(q, k, v, causal=True, scale=0.25)[0].float(), leaves)
    )
