"""What only a GPU can show: compilations, large tensors, large grids, other devices."""

import gc

import pytest
import torch
from oracle import DEVICE, assert_equal, compare, inputs

from flashattn import attention, measure

pytestmark = pytest.mark.gpu

FREE_BYTES = torch.cuda.mem_get_info()[0] if DEVICE == "cuda" else 0
needs_memory = pytest.mark.skipif(FREE_BYTES < 40e9, reason="needs 40 GB of free GPU memory")


@pytest.fixture
def compilations(monkeypatch):
    """The kernels that were compiled, or fetched from Triton's disk cache, since the test began."""
    import triton

    names = []

    def hook(*args, **kwargs):
        names.append(kwargs["fn"].name)

    if hasattr(triton, "knobs"):
        monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", hook)
    else:
        monkeypatch.setattr(triton.runtime.JITFunction, "cache_hook", hook)
    return names


def run(layout, batch, heads, heads_k, seqlen_q, seqlen_k, head_dim, **options):
    tensors = inputs(batch, heads, seqlen_q, seqlen_k, head_dim, heads_k=heads_k)
    if layout == "lengths first":  # two rows then lie as far apart as all batches are long
        tensors = [x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for x in tensors]
    attention(*(x.requires_grad_() for x in tensors), **options).sum().backward()


# With head dims that no other test uses: all is new.
@pytest.mark.parametrize("layout, head_dim", [("rows last", 24), ("rows last", 88), ("lengths first", 104)])
def test_shapes_do_not_compile_anew(layout, head_dim, compilations):
    """A length, batch or head count compiles only where its length bucket has another tile."""
    run(layout, 2, 4, 2, 1000, 1024, head_dim, causal=True)
    first = len(compilations)
    assert first == 4  # forward, delta, dkdv, dq
    for batch, heads, heads_k in ((2, 1, 1), (3, 6, 2), (16, 16, 16)):
        for seqlen_q, seqlen_k in ((1001, 999), (1024, 1024), (513, 1000), (600, 700)):  # of one bucket
            run(layout, batch, heads, heads_k, seqlen_q, seqlen_k, head_dim, causal=True, scale=batch / 7)
    assert compilations[first:] == []
    run(layout, 2, 4, 2, 1000, 1024, head_dim, causal=False)
    assert len(compilations) == 2 * first - 1  # delta knows no mask: the hook does see new kernels


@pytest.mark.parametrize("kept", [False, True])
def test_the_output_makes_room_for_the_gradients(kept):
    """Where nothing but the graph holds it: its memory is then free before dq, dk and dv take theirs."""
    q, k, v = inputs(1, 8, 2048, 2048, 64, requires_grad=True)
    do = torch.randn_like(q)

    def step():
        o = attention(q, k, v)
        o.register_hook(lambda _: do)
        loss = o.sum()
        del o
        return torch.autograd.grad(loss, (q, k, v), retain_graph=kept), loss if kept else None

    gc.collect()  # what other tests left is not to go while this one counts
    tensors = measure.peak_memory(step) / (q.numel() * q.itemsize)
    assert 3 + kept <= tensors <= 3.2 + kept
    first, loss = step()
    if kept:
        assert_equal(torch.autograd.grad(loss, (q, k, v)), first)


def test_batch_times_heads_beyond_65535():
    compare(*inputs(70000, 1, 3, 5, 16), causal=True)


@needs_memory
def test_more_than_2_to_31_elements_of_queries():
    head_dim, tail = 128, 300
    seqlen_q = 2**31 // head_dim + tail
    q, k, v = inputs(1, 1, 1, 20, head_dim)
    q = torch.randn(1, 1, seqlen_q, head_dim, device=DEVICE, dtype=torch.float16)
    last = q[:, :, -tail:].clone().requires_grad_()
    o = attention(q.requires_grad_(), k, v)
    assert torch.equal(o[:, :, -tail:], attention(last, k, v))
    (dq,) = torch.autograd.grad(o, q, q.detach())
    expected = torch.autograd.grad(attention(last, k, v), last, last.detach())[0]
    assert torch.equal(dq[:, :, -tail:], expected)


@needs_memory
def test_more_than_2_to_31_elements_of_keys():
    """Only the last keys have a score above the floor, so only they count."""
    head_dim, tail = 128, 300
    seqlen_k = 2**31 // head_dim + tail
    q = torch.ones(1, 1, 4, head_dim, device=DEVICE, dtype=torch.float16, requires_grad=True)
    k = torch.full((1, 1, seqlen_k, head_dim), -10.0, device=DEVICE, dtype=torch.float16)
    v = torch.ones(1, 1, 1, head_dim, device=DEVICE, dtype=torch.float16).expand_as(k)
    k[:, :, -tail:] = torch.randn(tail, head_dim, device=DEVICE)
    last = k[:, :, -tail:].clone().requires_grad_(), torch.ones_like(k[:, :, -tail:]).requires_grad_()
    o = attention(q, k.requires_grad_(), v)
    dk = torch.autograd.grad(o, k, torch.arange(4.0, device=DEVICE)[:, None].expand(o.shape).half())[0]
    torch.testing.assert_close(o, attention(q, *last))
    assert dk[:, :, :-tail].count_nonzero() == 0 and dk.isfinite().all()


@needs_memory
def test_offsets_beyond_32_bits_between_heads_and_within_rows():
    """Views of one large tensor: a stride of a head, and then of a row, times its index passes 2**31."""
    whole = torch.zeros(2**31 + 2**20, device=DEVICE, dtype=torch.float16)
    plain = inputs(1, 3, 5, 5, 64)
    for shape, strides in (((1, 3, 5, 64), (0, 2**30, 64, 1)), ((1, 3, 5, 64), (0, 64, 2**29, 1))):
        views = []
        for number, x in enumerate(plain):
            view = whole[number * 1024 :].as_strided(shape, strides, storage_offset=number * 1024)
            view.copy_(x)
            views.append(view)
        assert torch.equal(attention(*views, causal=True), attention(*plain, causal=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_tensors_on_another_device():
    q, k, v = inputs(1, 2, 100, 90, 64, device="cuda:1", requires_grad=True)
    here = [x.detach().to("cuda:0").requires_grad_() for x in (q, k, v)]
    expected = attention(*here, causal=True)
    expected_grads = torch.autograd.grad(expected, here, torch.ones_like(expected))
    for current in (0, 0, 1, 1):  # twice each: the second call is remembered
        with torch.cuda.device(current):
            o = attention(q, k, v, causal=True)
            grads = torch.autograd.grad(o, (q, k, v), torch.ones_like(o))
        assert o.device == q.device and torch.equal(o.cpu(), expected.cpu())
        for a, b in zip(grads, expected_grads, strict=True):
            assert a.device == q.device and torch.equal(a.cpu(), b.cpu())
