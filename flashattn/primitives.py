"""Device helpers that the kernels share: the seams where a variant of attention plugs in.

Where a head's rows begin (`sequence_span`), which blocks a program visits (`key_range`, and its transpose
`query_range`), which scores live (`score_mask`), and one step of the online softmax (`softmax_step`).
Exponentials are base 2 throughout: exp(x) = exp2(x * LOG2E), and the scale of the scores carries the LOG2E.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
HALF_SHIFT = tl.constexpr(97)  # see to_half()
HALF_SCALE = tl.constexpr(2.0 ** (127 - 15 - HALF_SHIFT.value))


@triton.jit
def sequence_span(ptr, batch, head, stride_b, stride_h, STRIDE_UNIT: tl.constexpr):
    """Pointer to the first row of one head. 64-bit, as every offset here: tensors pass 2**31 elements."""
    return ptr + (batch * stride_b.to(tl.int64) + head * stride_h.to(tl.int64)) * STRIDE_UNIT


@triton.jit
def row_stride(stride, CONSTANT: tl.constexpr):
    """A row stride in the kernel: the constant that launcher.constant_rows has for it, else the argument."""
    if CONSTANT:
        return tl.full([], CONSTANT, tl.int32)
    else:
        return stride


@triton.jit
def key_range(start_m, seqlen_q, seqlen_k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr):
    """Keys for the query block at start_m: blocks that need no mask start in [0, full_stop), masked in [begin, end)."""
    full_end = seqlen_k
    end = seqlen_k
    if CAUSAL:
        diagonal = start_m + seqlen_k - seqlen_q  # the last key that the block's first row sees
        full_end = tl.minimum(tl.maximum(diagonal + 1, 0), seqlen_k)
        end = tl.minimum(tl.maximum(diagonal + BLOCK_M, 0), seqlen_k)
    # With begin for a full_stop the compiler, which then knows the loop's last step, serialises Hopper's wgmma.
    return full_end - BLOCK_N + 1, full_end // BLOCK_N * BLOCK_N, end


@triton.jit
def query_range(start_n, seqlen_q, seqlen_k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr):
    """Queries for the key block at start_n: masked blocks from begin on, whole ones in [full_begin, full_end)."""
    begin = 0
    full_begin = 0
    full_end = seqlen_q // BLOCK_M * BLOCK_M
    if CAUSAL:
        diagonal = start_n + seqlen_q - seqlen_k  # the first row that sees the block's first key
        last_key = tl.minimum(start_n + BLOCK_N, seqlen_k) - 1 - start_n
        begin = tl.maximum(diagonal, 0) // BLOCK_M * BLOCK_M
        full_begin = tl.cdiv(tl.maximum(diagonal + last_key, 0), BLOCK_M) * BLOCK_M
        full_end = tl.maximum(full_end, full_begin)
    return begin, full_begin, full_end


@triton.jit
def score_mask(offs_m, offs_n, seqlen_q, seqlen_k, CAUSAL: tl.constexpr):
    """True where a score lives; offs_m and offs_n broadcast against each other, in either order."""
    live = offs_n < seqlen_k
    if CAUSAL:
        live = live & (offs_n <= offs_m + (seqlen_k - seqlen_q))
    return live


@triton.jit
def softmax_step(s, m_i, l_i, scale_log2, SHIFT: tl.constexpr, MASKED: tl.constexpr):
    """One block of the online softmax (FlashAttention-2, algorithm 1, lines 8 to 10).

    s [BLOCK_M, BLOCK_N] are unscaled scores, m_i and l_i [BLOCK_M] the running maximum (of scaled scores, base 2, plus
    SHIFT) and sum. Returns p, alpha (what the accumulator is to be multiplied by), m_i, l_i; p and l_i are 2**-SHIFT
    of what they are without.
    """
    m_new = tl.max(s, 1) * scale_log2
    m_new = tl.maximum(m_i, m_new + SHIFT if SHIFT else m_new)
    # A row that has seen no key keeps its maximum at -inf, and -inf - -inf would be NaN.
    m_ref = tl.where(m_new == float("-inf"), 0.0, m_new) if MASKED else m_new
    p = tl.exp2(s * scale_log2 - m_ref[:, None])  # one FFMA: the scale is not applied to s on its own
    alpha = tl.exp2(m_i - m_ref)
    return p, alpha, m_new, l_i * alpha + tl.sum(p, 1)


@triton.jit
def to_half(p):
    """From p = P * 2**-HALF_SHIFT, P from 0 to 1, P * HALF_SCALE, rounded to fp16, half up.

    In integers, since conversions share the exponentials' pipe. Of so small a p the three highest bits of the exponent
    are 0. Without them its bias is fp16's, 15 and not 127: the rest of it and ten bits of the mantissa are the number.
    A smaller shift would leave one of those bits, a larger one has exp2 lose more: it gives 0 under 2**-126.

    The exponentials have to give p as it is. A product with a power of two in between is miscompiled: ptxas (12.4 to
    12.9) takes that power for a part of the shift below. compile_tiles.py in tests/ looks for the shift.
    """
    bits = p.to(tl.int32, bitcast=True)
    return ((bits * 8 + 0x8000) >> 16).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def tile_ptrs(
    row_ptr, start, stride_row, stride_d,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, STRIDE_UNIT: tl.constexpr,
    TRANSPOSED: tl.constexpr = False, NARROW: tl.constexpr = False, FIRST: tl.constexpr = 0,
):  # fmt: skip
    """Pointers [ROWS, BLOCK_D] to the rows from start + FIRST on; TRANSPOSED: [BLOCK_D, ROWS].

    NARROW: offsets within the tile have 32 bits, which do where launcher.pack_strides gives a unit over 1.
    """
    row_ptr += start * (stride_row.to(tl.int64) * STRIDE_UNIT)
    offs_row = tl.arange(FIRST, FIRST + ROWS)
    offs_d = tl.arange(0, BLOCK_D)
    if STRIDE_UNIT == 1 or not NARROW:
        offs_row = offs_row.to(tl.int64)
        offs_d = offs_d.to(tl.int64)
    offs_row = offs_row * stride_row * STRIDE_UNIT
    offs_d = offs_d * stride_d
    return row_ptr + (offs_row[None, :] + offs_d[:, None] if TRANSPOSED else offs_row[:, None] + offs_d[None, :])


@triton.jit
def tile_mask(
    start, seqlen,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TRANSPOSED: tl.constexpr = False,
    FIRST: tl.constexpr = 0,
):  # fmt: skip
    """True on the elements of tile_ptrs() that exist."""
    rows = start + tl.arange(FIRST, FIRST + ROWS) < seqlen
    columns = tl.arange(0, BLOCK_D) < HEAD_DIM
    return rows[None, :] & columns[:, None] if TRANSPOSED else rows[:, None] & columns[None, :]


@triton.jit
def load_tile(
    row_ptr,
    start,
    seqlen,
    stride_row,
    stride_d,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    MASKED: tl.constexpr,
    VOLATILE: tl.constexpr = False,
    TRANSPOSED: tl.constexpr = False,
    NARROW: tl.constexpr = False,
):
    """Rows start to start + ROWS of one head, [ROWS, BLOCK_D], zero where there is no element.

    A volatile load stays where it stands: Triton from 3.3 on hoists others out of a loop. TRANSPOSED gives
    [BLOCK_D, ROWS], which on sm_75 goes to a dot as it is: Triton from 3.3 on takes a tile under tl.trans there
    through shared memory in slices, with two barriers each.
    """
    ptrs = tile_ptrs(row_ptr, start, stride_row, stride_d, ROWS, BLOCK_D, STRIDE_UNIT, TRANSPOSED, NARROW)
    if MASKED:
        mask = tile_mask(start, seqlen, ROWS, HEAD_DIM, BLOCK_D, TRANSPOSED)
        return tl.load(ptrs, mask=mask, other=0.0, volatile=VOLATILE)
    elif HEAD_DIM < BLOCK_D:
        columns = tl.arange(0, BLOCK_D) < HEAD_DIM
        mask = columns[:, None] if TRANSPOSED else columns[None, :]
        return tl.load(ptrs, mask=mask, other=0.0, volatile=VOLATILE)
    else:
        return tl.load(ptrs, volatile=VOLATILE)


@triton.jit
def _ones_at(begin, ptr, seqlen, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS, COLUMNS], 1 where the column is begin + row, else 0: the `other` of a load that is never made, since
    3.2.0's compiler dies where it can work out a dot's operand."""
    ones = begin + tl.arange(0, ROWS)[:, None] == tl.arange(0, COLUMNS)[None, :]
    never = tl.zeros([ROWS, COLUMNS], tl.int32) > seqlen
    return tl.load(ptr + never.to(tl.int32), mask=never, other=ones.to(ptr.dtype.element_ty))


@triton.jit
def load_in_registers(
    row_ptr, start, seqlen, stride_row, stride_d,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, STRIDE_UNIT: tl.constexpr,
):  # fmt: skip
    """load_tile() for a dot's left operand that is to stay in registers; Triton reads a loaded one from shared memory
    again for every dot.

    What a dot gives is in registers, laid out as the next one's left operand: so the tile goes through products with
    the identity, which change no finite number, some columns at a time. Two products, since only dots that feed each
    other get the layout of the kernel's main ones.
    """
    COLUMNS: tl.constexpr = 16
    dtype = row_ptr.dtype.element_ty
    columns = tl.arange(0, COLUMNS)
    step = stride_d * tl.full([], 1, tl.int64)
    tile = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for begin_d in tl.range(0, BLOCK_D, COLUMNS):
        ptrs = tile_ptrs(row_ptr + begin_d * step, start, stride_row, stride_d, ROWS, COLUMNS, STRIDE_UNIT)
        mask = tile_mask(start, seqlen, ROWS, HEAD_DIM, COLUMNS) & (begin_d + columns < HEAD_DIM)[None, :]
        part = tl.load(ptrs, mask=mask, other=0.0)
        part = tl.dot(part, _ones_at(0, row_ptr, seqlen, COLUMNS, COLUMNS), input_precision="ieee").to(dtype)
        tile = tl.dot(part, _ones_at(begin_d, row_ptr, seqlen, COLUMNS, BLOCK_D), tile, input_precision="ieee")
    return tile.to(dtype)


@triton.jit
def store_tile(
    row_ptr,
    tile, start, seqlen, stride_row, stride_d,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, STRIDE_UNIT: tl.constexpr,
    NARROW: tl.constexpr = False,
):  # fmt: skip
    """The inverse of load_tile, in the element type of the pointer.

    NARROW: rows are counted from ROWS on. With the numbers that the loads ahead of the loop have, the compiler keeps
    what it made of them in registers until here (docs/h200.md). On sm_75 another count gains nothing.
    """
    FIRST: tl.constexpr = ROWS if NARROW and ROWS <= 128 else 0  # offsets of up to 256 rows fit 32 bits
    start -= FIRST
    ptrs = tile_ptrs(row_ptr, start, stride_row, stride_d, ROWS, BLOCK_D, STRIDE_UNIT, NARROW=NARROW, FIRST=FIRST)
    mask = tile_mask(start, seqlen, ROWS, HEAD_DIM, BLOCK_D, FIRST=FIRST)
    tl.store(ptrs, tile.to(row_ptr.dtype.element_ty), mask=mask)


# A head dim in two parts ----------------------------------------------------------------------------------------------
#
# A tile's columns are a power of two. A head dim of 80 is held in two tiles, of 64 and 16 columns, where BLOCK_D is 64
# and TAIL_D 16; or else in one of 128. Where TAIL_D is 0 the second of a pair stands for nothing, and is no code.


@triton.jit
def load_parts(
    row_ptr, start, seqlen, stride_row, stride_d,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TAIL_D: tl.constexpr,
    STRIDE_UNIT: tl.constexpr, MASKED: tl.constexpr,
    VOLATILE: tl.constexpr = False, TRANSPOSED: tl.constexpr = False, NARROW: tl.constexpr = False,
):  # fmt: skip
    """load_tile() of the first BLOCK_D columns, and of the others."""
    x = load_tile(
        row_ptr, start, seqlen, stride_row, stride_d,
        ROWS, HEAD_DIM, BLOCK_D, STRIDE_UNIT, MASKED, VOLATILE, TRANSPOSED, NARROW,
    )  # fmt: skip
    if TAIL_D:
        tail = load_tile(
            tail_ptr(row_ptr, stride_d, BLOCK_D), start, seqlen, stride_row, stride_d,
            ROWS, HEAD_DIM - BLOCK_D, TAIL_D, STRIDE_UNIT, MASKED, VOLATILE, TRANSPOSED, NARROW,
        )  # fmt: skip
    else:
        tail = x
    return x, tail


@triton.jit
def tail_ptr(row_ptr, stride_d, BLOCK_D: tl.constexpr):
    """Where the columns from BLOCK_D on begin."""
    return row_ptr + tl.full([], BLOCK_D, tl.int64) * stride_d


@triton.jit
def store_parts(
    row_ptr, tile, tail, start, seqlen, stride_row, stride_d,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TAIL_D: tl.constexpr,
    STRIDE_UNIT: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """The inverse of load_parts()."""
    store_tile(row_ptr, tile, start, seqlen, stride_row, stride_d, ROWS, HEAD_DIM, BLOCK_D, STRIDE_UNIT, NARROW)
    if TAIL_D:
        store_tile(
            tail_ptr(row_ptr, stride_d, BLOCK_D), tail, start, seqlen, stride_row, stride_d,
            ROWS, HEAD_DIM - BLOCK_D, TAIL_D, STRIDE_UNIT, NARROW,
        )  # fmt: skip


@triton.jit
def dot_parts(x, x_tail, y, y_tail, TAIL_D: tl.constexpr, TRANSPOSED: tl.constexpr = False):
    """x y^T over both parts: [x rows, y rows]. TRANSPOSED: y comes as y^T."""
    s = tl.dot(x, y if TRANSPOSED else tl.trans(y), input_precision="ieee")
    if TAIL_D:
        s = tl.dot(x_tail, y_tail if TRANSPOSED else tl.trans(y_tail), s, input_precision="ieee")
    return s


@triton.jit
def load_ahead(
    row_ptr, start, seqlen, stride_row, stride_d,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TAIL_D: tl.constexpr,
    STRIDE_UNIT: tl.constexpr, MASKED: tl.constexpr, TRANSPOSED: tl.constexpr = False,
):  # fmt: skip
    """load_parts() of 16-bit elements as integers, for a loop to carry to its head.

    What a dot takes would go to shared memory at once. Integers do where loaded() makes tiles of them, behind one
    barrier.
    """
    x, tail = load_parts(
        row_ptr, start, seqlen, stride_row, stride_d,
        ROWS, HEAD_DIM, BLOCK_D, TAIL_D, STRIDE_UNIT, MASKED, TRANSPOSED=TRANSPOSED,
    )  # fmt: skip
    return x.to(tl.int16, bitcast=True), tail.to(tl.int16, bitcast=True)


@triton.jit
def loaded(x, tail, ptr):
    """The tiles of load_ahead() from a pointer like ptr."""
    return x.to(ptr.dtype.element_ty, bitcast=True), tail.to(ptr.dtype.element_ty, bitcast=True)


@triton.jit
def in_registers(x):
    """x [rows, columns], as the result of a dot: as the first operand of other dots it then stays in registers.

    A loaded tile would be read from shared memory anew for each of them. Exact: 0 * 0 is added.
    """
    a = tl.zeros([x.shape[0], 16], x.dtype)
    b = tl.zeros([16, x.shape[1]], x.dtype)
    return tl.dot(a, b, x.to(tl.float32), input_precision="ieee").to(x.dtype)
