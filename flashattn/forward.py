"""Forward pass: FlashAttention-2, algorithm 1. One program per query block of one head."""

import torch
import triton
import triton.language as tl

from .configs import Tile, choose, tile_constants
from .launcher import Launch, LaunchCache, constant_rows, empty, launch, pack_strides
from .primitives import (
    HALF_SCALE,
    HALF_SHIFT,
    LOG2E,
    dot_parts,
    key_range,
    load_ahead,
    load_in_registers,
    load_parts,
    loaded,
    row_stride,
    score_mask,
    sequence_span,
    softmax_step,
    store_parts,
    tail_ptr,
    to_half,
)


@triton.jit
def _attend(
    acc, acc_tail, m_i, l_i, q, q_tail,
    k_ptr, v_ptr,
    start_m, begin, end, seqlen_q, seqlen_k, scale_log2,
    stride_kn, stride_kd,
    stride_vn, stride_vd,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TAIL_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STRIDE_UNIT: tl.constexpr, CAUSAL: tl.constexpr, PIPELINED: tl.constexpr, K_TRANSPOSED: tl.constexpr,
    K_AHEAD: tl.constexpr, V_AHEAD: tl.constexpr, INTEGER_P: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The query block against the key blocks that start in [begin, end)."""
    if K_AHEAD and not MASKED:
        k_bits, k_tail_bits = load_ahead(
            k_ptr, begin, seqlen_k, stride_kn, stride_kd,
            BLOCK_N, HEAD_DIM, BLOCK_D, TAIL_D, STRIDE_UNIT, True, K_TRANSPOSED,
        )  # fmt: skip
    if V_AHEAD and not MASKED:
        v_bits, v_tail_bits = load_ahead(
            v_ptr, begin, seqlen_k, stride_vn, stride_vd, BLOCK_N, HEAD_DIM, BLOCK_D, TAIL_D, STRIDE_UNIT, True
        )
    for start_n in tl.range(begin, end, BLOCK_N):
        if K_AHEAD and not MASKED:
            k, k_tail = loaded(k_bits, k_tail_bits, k_ptr)
        else:
            k, k_tail = load_parts(
                k_ptr, start_n, seqlen_k, stride_kn, stride_kd,
                BLOCK_N, HEAD_DIM, BLOCK_D, TAIL_D, STRIDE_UNIT, MASKED, TRANSPOSED=K_TRANSPOSED, NARROW=PIPELINED,
            )  # fmt: skip
        if V_AHEAD and not MASKED:
            v, v_tail = loaded(v_bits, v_tail_bits, v_ptr)
        s = dot_parts(q, q_tail, k, k_tail, TAIL_D, K_TRANSPOSED)  # [BLOCK_M, BLOCK_N]
        if MASKED:
            offs_m = start_m + tl.arange(0, BLOCK_M)
            offs_n = start_n + tl.arange(0, BLOCK_N)
            live = score_mask(offs_m[:, None], offs_n[None, :], seqlen_q, seqlen_k, CAUSAL)
            s = tl.where(live, s, float("-inf"))
        p, alpha, m_i, l_i = softmax_step(s, m_i, l_i, scale_log2, HALF_SHIFT if INTEGER_P else 0, MASKED)
        if MASKED or not V_AHEAD:
            v, v_tail = load_parts(
                v_ptr, start_n, seqlen_k, stride_vn, stride_vd,
                BLOCK_N, HEAD_DIM, BLOCK_D, TAIL_D, STRIDE_UNIT, MASKED, NARROW=PIPELINED,
            )  # fmt: skip
        p = to_half(p) if INTEGER_P else p.to(v.dtype)
        acc = tl.dot(p, v, acc * alpha[:, None], input_precision="ieee")  # [BLOCK_M, BLOCK_D]
        if TAIL_D:
            acc_tail = tl.dot(p, v_tail, acc_tail * alpha[:, None], input_precision="ieee")  # [BLOCK_M, TAIL_D]
        # The last block has no next: it loads keys that are there again, since a masked load is waited for at once.
        following = tl.minimum(start_n + BLOCK_N, end - 1)
        if K_AHEAD and not MASKED:
            k_bits, k_tail_bits = load_ahead(
                k_ptr, following, seqlen_k, stride_kn, stride_kd,
                BLOCK_N, HEAD_DIM, BLOCK_D, TAIL_D, STRIDE_UNIT, False, K_TRANSPOSED,
            )  # fmt: skip
        if V_AHEAD and not MASKED:
            v_bits, v_tail_bits = load_ahead(
                v_ptr, following, seqlen_k, stride_vn, stride_vd,
                BLOCK_N, HEAD_DIM, BLOCK_D, TAIL_D, STRIDE_UNIT, False,
            )  # fmt: skip
    return acc, acc_tail, m_i, l_i


# Only tensors and last strides are specialised, and constant_rows: no length or batch size compiles the kernel anew.
@triton.jit(
    do_not_specialize=["scale_log2", "seqlen_q", "seqlen_k", "heads_q", "group"]
    + [f"stride_{tensor}{axis}" for tensor in "qkvo" for axis in "bhmn"]
)
def forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_log2_ptr,
    scale_log2, seqlen_q, seqlen_k, heads_q, group,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_ob, stride_oh, stride_om, stride_od,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TAIL_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STRIDE_UNIT: tl.constexpr, CAUSAL: tl.constexpr, PIPELINED: tl.constexpr,
    Q_IN_REGISTERS: tl.constexpr, K_TRANSPOSED: tl.constexpr, K_AHEAD: tl.constexpr, V_AHEAD: tl.constexpr,
    INTEGER_P: tl.constexpr, ROW_K: tl.constexpr, ROW_V: tl.constexpr,
):  # fmt: skip
    """o and lse of one query block. PIPELINED to INTEGER_P are choices of configs.Tile."""
    stride_kn = row_stride(stride_kn, ROW_K)
    stride_vn = row_stride(stride_vn, ROW_V)
    blocks = tl.cdiv(seqlen_q, BLOCK_M)
    block = tl.program_id(0) % blocks
    if CAUSAL:
        block = blocks - 1 - block  # the longest rows first, so that the last programs to run are short
    start_m = block * BLOCK_M
    batch_head = tl.program_id(0) // blocks
    batch = batch_head // heads_q
    head = batch_head % heads_q

    q_ptr = sequence_span(q_ptr, batch, head, stride_qb, stride_qh, STRIDE_UNIT)
    k_ptr = sequence_span(k_ptr, batch, head // group, stride_kb, stride_kh, STRIDE_UNIT)
    v_ptr = sequence_span(v_ptr, batch, head // group, stride_vb, stride_vh, STRIDE_UNIT)
    o_ptr = sequence_span(o_ptr, batch, head, stride_ob, stride_oh, STRIDE_UNIT)

    if Q_IN_REGISTERS:
        q = load_in_registers(q_ptr, start_m, seqlen_q, stride_qm, stride_qd, BLOCK_M, HEAD_DIM, BLOCK_D, STRIDE_UNIT)
        q_tail = q
        if TAIL_D:
            q_tail = load_in_registers(
                tail_ptr(q_ptr, stride_qd, BLOCK_D), start_m, seqlen_q, stride_qm, stride_qd,
                BLOCK_M, HEAD_DIM - BLOCK_D, TAIL_D, STRIDE_UNIT,
            )  # fmt: skip
    else:
        q, q_tail = load_parts(
            q_ptr, start_m, seqlen_q, stride_qm, stride_qd,
            BLOCK_M, HEAD_DIM, BLOCK_D, TAIL_D, STRIDE_UNIT, True, NARROW=PIPELINED,
        )  # fmt: skip
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    acc_tail = tl.zeros([BLOCK_M, TAIL_D if TAIL_D else 1], tl.float32)
    full_stop, begin, end = key_range(start_m, seqlen_q, seqlen_k, BLOCK_M, BLOCK_N, CAUSAL)
    for MASKED in tl.static_range(2):
        needed = True
        if MASKED and PIPELINED:
            needed = begin < end  # else it computes the addresses and first loads of an empty loop
        if needed:
            acc, acc_tail, m_i, l_i = _attend(
                acc, acc_tail, m_i, l_i, q, q_tail,
                k_ptr, v_ptr,
                start_m, begin if MASKED else 0, end if MASKED else full_stop, seqlen_q, seqlen_k, scale_log2,
                stride_kn, stride_kd,
                stride_vn, stride_vd,
                HEAD_DIM, BLOCK_D, TAIL_D, BLOCK_M, BLOCK_N, STRIDE_UNIT, CAUSAL, PIPELINED,
                K_TRANSPOSED, K_AHEAD, V_AHEAD, INTEGER_P, MASKED,
            )  # fmt: skip

    # A row without a key keeps its maximum; it gets output 0, lse -inf.
    empty = m_i == float("-inf")
    l_i = tl.where(empty, 1.0, l_i)
    if INTEGER_P:
        l_i *= 2.0**HALF_SHIFT
        m_i -= HALF_SHIFT
    share = 1.0 / (l_i * HALF_SCALE if INTEGER_P else l_i)  # a division a row, not an element
    lse_log2 = tl.where(empty, float("-inf"), m_i + tl.log2(l_i))
    store_parts(
        o_ptr, acc * share[:, None], acc_tail * share[:, None], start_m, seqlen_q, stride_om, stride_od,
        BLOCK_M, HEAD_DIM, BLOCK_D, TAIL_D, STRIDE_UNIT, PIPELINED,
    )  # fmt: skip
    offs_m = start_m + tl.arange(0, BLOCK_M)
    tl.store(lse_log2_ptr + batch_head.to(tl.int64) * seqlen_q + offs_m, lse_log2, mask=offs_m < seqlen_q)


def forward_launch(q, k, v, o, lse_log2, *, causal: bool, scale: float, tile: Tile) -> Launch:
    """The launch that fills o and lse_log2, for tensors of forward()."""
    batch, heads_q, seqlen_q, head_dim = q.shape
    heads_k, seqlen_k = k.shape[1:3]
    strides, unit = pack_strides(q, k, v, o)
    return Launch(
        kernel=forward_kernel,
        grid=triton.cdiv(seqlen_q, tile.block_m) * batch * heads_q,
        args=(
            *(q, k, v, o, lse_log2),
            *(scale * LOG2E.value, seqlen_q, seqlen_k, heads_q, heads_q // max(heads_k, 1)),
            *strides,
        ),
        constants=tile_constants(tile, head_dim, unit, causal)
        | constant_rows(unit, k=k, v=v)
        | {
            "Q_IN_REGISTERS": tile.q_in_registers,
            "K_TRANSPOSED": tile.k_transposed,
            "K_AHEAD": tile.k_ahead,
            "V_AHEAD": tile.v_ahead,
            "INTEGER_P": tile.integer_p and q.dtype == torch.float16,
        },
        options=tile.options,
    )


def forward(
    q, k, v, *, causal: bool, scale: float, tile: Tile | None = None, cache: LaunchCache | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output, laid out as q is, and base-2 log-sum-exp (batch, heads, seqlen_q) of the scores, in fp32.

    q (batch, heads, seqlen_q, head_dim); k and v (batch, heads_k, seqlen_k, head_dim), heads a multiple of
    heads_k; scale positive. tile is configs.choose's where none is given; cache, which then remembers that too, is one
    dictionary for each kind of q, k, v, causal and scale.
    """
    o = empty(lambda: torch.empty_like(q), "o", cache)
    lse_log2 = empty(lambda: torch.empty(q.shape[:3], dtype=torch.float32, device=q.device), "lse_log2", cache)
    tensors = (q, k, v, o, lse_log2)

    def make() -> list[Launch]:
        chosen = tile or choose("forward", q, q.shape[2], causal)
        return [forward_launch(*tensors, causal=causal, scale=scale, tile=chosen)]

    launch(make, tensors, "forward kernel", cache)
    return o, lse_log2
