"""What the compiler makes of kernels, for every architecture, with no GPU."""

import json
import subprocess
import sys

import pytest
import torch
from children import ROOT, with_triton

from flashattn import launcher, sass
from flashattn.launcher import constant_rows, pack_strides

triton = pytest.importorskip("triton", reason="Triton is not installed")

SHARED_BYTES = {75: 65536, 80: 166912, 86: 101376, 90: 232448, 100: 232448}  # what a program may ask for


def compiled(capability, which, pass_, dtype, *head_dims, release=triton.__version__):
    """The rows of compile_tiles.py."""
    command = [sys.executable, ROOT / "tests" / "compile_tiles.py"]
    command += map(str, (capability, which, pass_, dtype, *head_dims))
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=with_triton(release, triton.__version__)
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    "dtype, head_dims",
    [("float16", (32, 48, 64)), ("float16", (80, 96, 128)), ("float16", (160, 192, 256))]
    + [("float32", (32, 64)), ("float32", (128, 256))],
    ids=str,
)
@pytest.mark.parametrize("pass_", ["forward", "dkdv", "dq"])
@pytest.mark.parametrize("release", ["3.2.0", "3.6.0", "3.9.0"])
def test_every_tile_for_sm_75(release, dtype, pass_, head_dims):
    """Fits the T4's shared memory, runs on its tensor cores, and takes the registers and stack that its table says."""
    rows = compiled(75, "all", pass_, dtype, *head_dims, release=release)
    assert {row["head_dim"] for row in rows} == set(head_dims)
    for row in rows:
        assert row["shared_bytes"] <= row["promised"] <= SHARED_BYTES[75], row
        assert list(row["mma"]) == (["m16n8k8.f32.f16.f16.f32"] if dtype == "float16" else []), row
        assert not row["forbidden"], row
        assert row["registers"] <= row["tile"]["registers"], row
        assert row["stack_bytes"] <= row["tile"]["stack_bytes"], row
        asked, left = row.get("halves", (1, 1))
        assert 0 < asked == left, row


@pytest.mark.parametrize("pass_", ["forward", "dkdv", "dq"])
@pytest.mark.parametrize(
    "capability, which, release, head_dims",
    [
        (80, "default", triton.__version__, (64, 128)),
        (86, "default", triton.__version__, (80, 128)),
        (90, "default", triton.__version__, (64, 192)),
        (90, "all", "3.6.0", (64, 128)),  # where ptxas refuses a limit to the registers that is too low
        (100, "default", "3.6.0", (64,)),
    ],
    ids=str,
)
def test_tiles_for_newer_architectures(capability, which, release, head_dims, pass_):
    for row in compiled(capability, which, pass_, "float16", *head_dims, release=release):
        assert row["shared_bytes"] <= row["promised"] <= SHARED_BYTES[capability], row
        assert row["mma"], row


def test_strides_are_packed_in_units_of_eight():
    assert pack_strides(torch.empty(2, 3, 5, 40)) == ([75, 25, 5, 1], 8)
    assert pack_strides(torch.empty(2, 3, 5, 40), torch.empty(2, 3, 5, 4))[1] == 1
    for row, unit in ((2**23 - 8, 8), (2**23, 1)):  # 256 rows of the second are past 32 bits
        assert pack_strides(torch.empty_strided((2, 3, 5, 40), (8, 8, row, 1), device="meta"))[1] == unit


def test_row_strides_that_a_kernel_holds(monkeypatch):
    monkeypatch.setattr(launcher, "_rows", set())
    x = torch.empty(2, 3, 5, 40)
    heads_in_rows, batches_in_rows = (
        torch.empty(2, 5, 3, 40).transpose(1, 2),
        torch.empty(5, 2, 3, 40).permute(1, 2, 0, 3),
    )
    assert constant_rows(8, k=x, v=heads_in_rows) == {"ROW_K": 5, "ROW_V": 15}
    assert constant_rows(8, k=batches_in_rows, v=x[:1].expand_as(x)) == {"ROW_K": 0, "ROW_V": 0}
    assert constant_rows(1, k=x) == {"ROW_K": 0}
    for heads in range(1, 100):  # a model has few; something else varies here
        constant_rows(8, q=torch.empty(2, 5, heads, 40, device="meta").transpose(1, 2))
    assert len(launcher._rows) == launcher.CONSTANT_ROWS
    assert constant_rows(8, q=torch.empty(2, 5, 99, 40, device="meta").transpose(1, 2)) == {"ROW_Q": 0}
    assert constant_rows(8, q=x) == {"ROW_Q": 5}


# The command ---------------------------------------------------------------------------------------------------------


def command(*arguments, release=triton.__version__):
    """The report of python -m flashattn.codegen, as {title: text}, or what it said when it refused."""
    done = subprocess.run(
        [sys.executable, "-m", "flashattn.codegen", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=with_triton(release, triton.__version__),
    )
    if done.returncode:
        return done.stderr
    assert done.stderr == ""
    return {line[:14].strip(): line[15:] for line in done.stdout.splitlines()}


def test_report_on_a_shipped_kernel(tmp_path):
    levers = ["q_in_registers=False", "v_ahead=False"]
    report = command("--arch", "sm_75", "forward", "head_dim=64", *levers, "--save", tmp_path)
    assert report["kernel"].startswith("forward_kernel for sm_75, Triton ")
    assert report["shared memory"] == "24576 bytes a program of 4 warps"
    assert "m16n8k8.f32.f16.f16.f32" in report["tensor cores"] and ", 0 cp.async" in report["other PTX"]
    assert "tensor 256," in report["hottest loop"]  # two products of 128 x 64 x 64 by 4 warps, m16n8k8 at a time
    assert {path.suffix for path in tmp_path.iterdir()} == {".ptx", ".cubin", ".sass"}


MATMUL = [ROOT / "tests" / "foreign_kernels.py", "*fp16, *fp16, *fp16, i32, i32:16, i32:16"]


def test_dk_and_dv_apart_have_two_reports(tmp_path):
    report = command("dkdv", "head_dim=32", "block_m=16", "block_n=64", "hold=True", "apart=True", "--save", tmp_path)
    assert report["kernel"].startswith("dkdv_kernel_WITH_DV for sm_75")  # the second
    names = [f"dkdv_kernel_WITH_{part}.{kind}" for part in ("DK", "DV") for kind in ("cubin", "ptx", "sass")]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_report_on_any_kernel():
    kernel = f"{MATMUL[0]}:matmul_kernel"
    blocks = ("BLOCK_M=64", "BLOCK_N=64", "BLOCK_K=32", "GROUP=1", "num_stages=3")
    turing = command("--arch", "sm_75", kernel, MATMUL[1], *blocks)
    assert "32 m16n8k8.f32.f16.f16.f32" in turing["tensor cores"] and ", 0 cp.async" in turing["other PTX"]
    hopper = command("--arch", "sm_90", kernel, MATMUL[1], *blocks)
    assert "m64n64k16" in hopper["tensor cores"] and ", 0 cp.async" not in hopper["other PTX"]


PUBLISHED = """
import torch, triton, triton.language as tl
from beside import SIZE
DEVICE = triton.runtime.driver.active.get_active_torch_device()
@triton.autotune([triton.Config({"BLOCK": 32}, num_warps=2), triton.Config({"BLOCK": 64})], key=["n"])
@triton.heuristics({"EVEN": lambda args: args["n"] % 64 == 0})
@triton.jit
def kernel(x_ptr, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs[:, None] * n + offs[None, :])
    tl.store(x_ptr + offs[:, None] * n + offs[None, :], tl.dot(x, x).to(tl.float16))
"""


def test_report_on_a_kernel_as_people_publish_it(tmp_path):
    """Decorated, from a file that asks for the device and imports its neighbour."""
    (tmp_path / "beside.py").write_text("SIZE = 1")
    (tmp_path / "published.py").write_text(PUBLISHED)
    first = command(f"{tmp_path}/published.py:kernel", "*fp16, i32", "EVEN=False")
    assert first["shared memory"].endswith(" of 2 warps") and "16 m16n8k8" in first["tensor cores"]
    larger = command(f"{tmp_path}/published.py:kernel", "*fp16, i32", "EVEN=False", "BLOCK=64", "num_warps=4")
    assert "64 m16n8k8" in larger["tensor cores"]
    assert "EVEN" in command(f"{tmp_path}/published.py:kernel", "*fp16, i32")


def test_stock_code_of_a_release_without_turing():
    stock = command("forward", "head_dim=32", "--stock", release="3.6.0")
    assert stock["tensor cores"] == "none" and "tensor" not in stock["hottest loop"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "the following arguments are required: KERNEL\n"),
        (["--arch", "sm_12", "forward"], "--arch: got sm_12, accepted are sm_75, sm_80"),
        (["forward", "head_dim=300"], "ValueError: head_dim: got 300, accepted are 1 to 256"),
        (["forward", "dtype=float17"], "ValueError: dtype: got float17, accepted are float16, bfloat16, float32"),
        (["forward", "dtype=bfloat16"], "dtype: got torch.bfloat16, accepted are float16, float32"),
        (["forward", "block_m=100"], "ValueError: block: got [100], accepted are 16, 32, 64, 128, 256"),
        (["forward", "block=3"], "ValueError: argument: got block, accepted are head_dim, causal, dtype, block_m"),
        (["forward", "head_dim=fp32"], "ValueError: head_dim: got fp32, accepted are 1 to 256"),  # a type of signatures
        (["forward.py"], "forward.py: ValueError: accepted are forward, dkdv, dq, FILE.py:NAME and MODULE:NAME"),
        (["json:dumps"], "json:dumps: is function, accepted is a Triton kernel"),
        (["nothing.py:kernel"], "nothing.py:kernel: "),
        (["forward", "head_dim=64", "causal"], "causal: a value is given as NAME=VALUE"),
        ([f"{MATMUL[0]}:matmul_kernel", "*half"], "*half: accepted are *fp16"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    assert message in command(*arguments)


# Machine code --------------------------------------------------------------------------------------------------------

LISTING = """
        .section        .text.kernel,"ax",@progbits
.text.kernel:
        /*0000*/                   IMAD.MOV.U32 R1, RZ, RZ, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   LDG.E.128.SYS R4, [R2] ;
.L_x_0:
        /*0020*/                   LDSM.16.M88.4 R8, [R4] ;
        /*0030*/                   HMMA.1688.F32 R12, R8, R10, R12 ;
        /*0040*/                   HMMA.1688.F32 R12, R8, R11, R12 ;
        /*0050*/                   MUFU.EX2 R9, R9 ;
        /*0060*/              @!P0 BRA `(.L_x_0) ;
        /*0070*/                   HMMA.1688.F32 R12, R8, R10, R12 ;
        /*0080*/              @P1  BRA `(.L_x_1) ;
.L_x_2:
        /*0090*/                   FFMA R0, R0, R0, R0 ;
        /*00a0*/              @P2  BRA `(.L_x_2) ;
        /*00b0*/                   EXIT ;
.L_x_3:
        /*00c0*/                   BRA `(.L_x_3);
"""


def test_hottest_loop_of_a_listing():
    instructions = sass.parse(LISTING)
    assert len(instructions) == 13 and instructions[6][:3] == ("BRA", 2, "!P0") and instructions[0].target is None
    assert sass.pipe_mix(sass.hottest_loop(instructions)) == {"tensor": 2, "shared": 1, "special": 1, "control": 1}
    assert sass.hottest_loop(instructions[9:11]) == []  # targets are indices of the whole
    assert sass.hottest_loop([]) == []


@pytest.mark.parametrize(
    "capability, warps, registers, shared_bytes, blocks",
    [
        (75, 4, 255, 24576, 2),  # registers: 8 warps of 256 each
        (75, 4, 128, 24576, 2),  # shared memory: 65536 // 24576
        (75, 4, 128, 16384, 4),  # registers: 16 warps
        (75, 8, 64, 1024, 4),  # the SM's 32 warps
        (75, 1, 32, 0, 16),  # the SM's 16 programs
        (75, 4, 255, 65537, 0),
        (80, 4, 255, 81920, 2),  # 1,024 bytes a program are the system's: 2 * 82944 of 167936
        (90, 16, 128, 0, 1),
    ],
)
def test_programs_that_fit_a_multiprocessor(capability, warps, registers, shared_bytes, blocks):
    assert sass.blocks_per_sm(capability, warps, registers, shared_bytes) == blocks
