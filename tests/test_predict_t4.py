"""The model of a T4's SM: cycles that can be counted by hand, the work of a loop, and what it predicts of the tiles."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from children import ROOT, environment, with_triton

triton = pytest.importorskip("triton", reason="Triton is not installed")

import predict_t4  # noqa: E402

from flashattn import sass, sm75  # noqa: E402
from flashattn.configs import Tile  # noqa: E402

# Reading machine code ------------------------------------------------------------------------------------------------


def line(address, text, *, stall=1, result=7, operands=7, waits=0):
    """An instruction as nvdisasm prints it, its control bits in the second line."""
    control = stall | 1 << 4 | result << 5 | operands << 8 | waits << 11
    return (
        f"        /*{address:04x}*/ {text:>30} ;   /* 0x000000000000047c */\n"
        f"                                         /* 0x{control << 41:016x} */\n"
    )


def test_control_bits():
    lines = [
        line(0, "LDG.E.128.SYS R4, [R2]", stall=2, result=3, operands=1),
        line(16, "@!P0 STS.128 [R8], R4", stall=15, operands=0, waits=0b001010),
        line(32, "HMMA.1688.F32 R12, R8, R10, R12", stall=8, waits=0b100000),
        line(48, "DEPBAR.LE SB2, 0x0", waits=1),
    ]
    instructions = sass.parse("".join(lines))
    load, store, product, wait = map(sm75.decode, instructions)
    assert instructions[1].predicate == "!P0" and instructions[1].bits & 0xFFF == 0x47C
    assert (load.pipe, load.stall, load.result, load.operands, load.waits) == ("global", 2, 3, 1, ())
    assert (load.lsu, load.global_bytes, load.shared_bytes, load.latency) == (8, 512, 0, 200)
    assert (store.pipe, store.stall, store.result, store.operands, store.waits) == ("shared", 15, 7, 0, (1, 3))
    assert (store.lsu, store.shared_bytes) == (10, 512)
    assert (product.pipe, product.busy, product.latency, product.stall, product.waits) == ("tensor", 8, 14, 8, (5,))
    assert wait.waits == (0, 2)


@pytest.mark.parametrize(
    "name, pipe, lsu, shared_bytes",
    [
        ("LDSM.16.M88.4", "shared", 8, 512),
        ("LDSM.16.MT88.2", "shared", 4, 256),
        ("LDSM.16.M88", "shared", 2, 128),
        ("LDS.U.64", "shared", 4, 256),
        ("SHFL.BFLY", "shared", 2, 128),
        ("STL.64", "shared", 6, 0),  # a spill: the same unit, another memory
        ("HFMA2", "tensor", 0, 0),
        ("UIADD3", "uniform", 0, 0),
        ("MUFU.EX2", "special", 0, 0),
        ("IMAD.MOV.U32", "fp32", 0, 0),
    ],
)
def test_where_an_instruction_goes(name, pipe, lsu, shared_bytes):
    op = sm75.decode(sass.Instruction(name))
    assert (op.pipe, op.lsu, op.shared_bytes) == (pipe, lsu, shared_bytes)


def test_a_turn_follows_the_branches():
    names = ["MOV", "HMMA", "BRA", "FADD", "BRA", "FMUL", "FADD", "BRA"]
    targets = {2: 5, 4: 6, 7: 1}  # taken; falls through; the loop's own
    predicates = {4: "P0", 6: "!PT", 7: "P1"}
    code = [sass.Instruction(name, targets.get(n), predicates.get(n, "")) for n, name in enumerate(names)]
    assert [i.name for i in sm75.turn(sass.hottest_loop(code))] == ["HMMA", "BRA", "FMUL", "BRA"]


def test_the_hottest_loop_is_the_one_without_masks():
    whole, edge = ["HMMA", "FADD"], ["HMMA", "FADD", "FADD", "FSEL"]
    code = [sass.Instruction(name) for name in whole] + [sass.Instruction("BRA", 0, "P0")]
    code += [sass.Instruction(name) for name in edge] + [sass.Instruction("BRA", 3, "P0")]
    assert sass.hottest_loop(code) == code[:3]


# The simulation ------------------------------------------------------------------------------------------------------

NONE = sm75.NONE


def op(pipe, *, stall=1, waits=(), result=NONE, **more):
    busy, latency = sm75.PIPES.get(pipe) or (0, sm75.LATENCY[pipe])
    return sm75.Op(pipe, busy, latency, stall, waits, result, NONE, **more)


def cycles(ops, num_warps, programs=1):
    """Of a turn, the same under every policy."""
    (found,) = {sm75.simulate(ops, num_warps, programs, policy)[0] for policy in sm75.POLICIES}
    return found


DEPENDENT = op("tensor", waits=(0,), result=0)
INDEPENDENT = op("tensor")
LOAD = op("shared", result=0, lsu=8)
BARRIER = op("control", waits=(0,), barrier=True)


def test_products_of_a_warp():
    assert cycles([DEPENDENT] * 10, num_warps=1) == 10 * 14  # each waits for the one before
    assert cycles([INDEPENDENT] * 10, num_warps=1) == 10 * 8
    assert cycles([op("tensor", stall=11)] * 10, num_warps=1) == 10 * 11


def test_warps_share_the_pipes_of_their_partition():
    assert cycles([INDEPENDENT] * 10, num_warps=4) == 10 * 8  # one in each
    assert cycles([INDEPENDENT] * 10, num_warps=8) == 2 * 10 * 8
    assert cycles([INDEPENDENT] * 10, num_warps=4, programs=3) == 3 * 10 * 8
    assert cycles([DEPENDENT] * 10, num_warps=8) == 2 * 10 * 8  # two warps hide most of 14
    assert cycles([op("integer")] * 10, num_warps=8) == 2 * 10 * 2


def test_all_partitions_share_the_load_store_unit():
    loads = [op("shared", lsu=8)] * 6
    assert cycles(loads, num_warps=1) == 6 * 8
    assert cycles(loads, num_warps=4) == 4 * 6 * 8
    assert sm75.pipe_cycles(loads)["lsu"] == 4 * 6 * 8
    wide = [op("global", lsu=8, global_bytes=512, result=0), op("integer", waits=(0,))]
    assert cycles([*wide] * 4, num_warps=8, programs=2) == pytest.approx(4 * 16 * 512 / sm75.L2_BYTES, rel=0.01)


def test_warps_meet_at_a_barrier():
    assert cycles([op("integer", stall=5), op("control", barrier=True)], num_warps=4) == 5 + 12
    # Four loads go out at once: 4 cycles to the unit, 8 each, the last after 3 * 8. 19 + 8 - 2 cycles later it is
    # there, and 12 after that the warps go on.
    assert cycles([LOAD, BARRIER], num_warps=4) == 4 + 3 * 8 + (19 + 8 - 2) + 12


def test_a_barrier_holds_only_its_own_program():
    """While one program waits, the other has the tensor cores: together they take what their products take."""
    ops = [*[INDEPENDENT] * 20, LOAD, BARRIER]
    alone = cycles(ops, num_warps=4)
    assert alone > 20 * 8 + 12
    together, stalls = sm75.simulate(ops, 4, 2, phase=0.5)
    assert 2 * 20 * 8 <= together < 2 * 20 * 8 + 12
    assert sum(stalls.values()) == pytest.approx(1)


def test_a_partition_whose_warps_all_wait_is_woken_by_none_of_them():
    meeting = op("control", barrier=True)
    ops = [LOAD, op("special", result=1), LOAD, meeting, BARRIER]
    took, _ = sm75.simulate(ops, num_warps=8, programs=2, policy="furthest", phase=0.2)
    assert took >= 2 * 8 * (8 + 8)  # what the load/store unit has to do


# The work of a loop --------------------------------------------------------------------------------------------------

# Two programs of four warps with all that a 128 x 64 block at head dim 64 needs, and tensor cores that never rest.
FORWARD = {"BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_D": 64, "TAIL_D": 0}
IDEAL = sm75.Prediction(255, 0, 4, 2, 800, 256, 30000, 4096, 256 * 8 * 2, 1, 1, 1, 1, "tensor", {})


def test_useful_is_what_the_tile_needs():
    cost = sm75.score_cost(IDEAL, "forward", FORWARD)
    assert cost.useful(2, 64) == 1
    assert cost.instructions == 800 * 4 / (128 * 64) and cost.shared_bytes == 30000 * 4 / (128 * 64)
    assert cost.useful(2, 40) == 40 / 64  # padded
    assert sm75.tflops(1, 1.59) == pytest.approx(65.1, abs=0.1)


def test_blocks_of_a_turn():
    def useful(**changed):
        return sm75.score_cost(replace(IDEAL, **changed), "forward", FORWARD).useful(2, 64)

    assert useful(hmmas=512, global_bytes=8192, cycles=2 * IDEAL.cycles) == 1  # two blocks
    assert useful(hmmas=512, cycles=2 * IDEAL.cycles) == 1 / 2  # every product twice
    assert useful(hmmas=288, cycles=1.125 * IDEAL.cycles) == 1 / 1.125  # an identity product on top
    assert useful(global_bytes=8192) == 1  # tiles loaded twice
    with pytest.raises(ValueError, match="forward: a turn of the hottest loop has not"):
        useful(hmmas=128)


def test_the_backward_counts_five_products_of_seven():
    tile = {"BLOCK_M": 32, "BLOCK_N": 128, "BLOCK_D": 48, "TAIL_D": 16}
    dkdv = sm75.score_cost(replace(IDEAL, cycles=4 * 128 * 2 * 4), "dkdv", tile)
    dq = sm75.score_cost(replace(IDEAL, hmmas=384, cycles=6 * 128 * 2 * 4), "dq", FORWARD)
    assert dkdv.useful(4, 64) == dq.useful(3, 64) == 1
    both = sm75.Cost(*map(sum, zip(dkdv, dq, strict=True)))
    assert both.useful(sm75.BACKWARD_PRODUCTS, 64) == pytest.approx(5 / 7)


# The predictions -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("release", predict_t4.BASELINE_RELEASES)
def test_no_default_tile_became_worse(release):
    """If a change is meant: `"$(scripts/setup.sh)" scripts/predict_t4.py --write-baseline REASON`; commit the file."""
    baseline = json.loads(predict_t4.BASELINE.read_text())["triton"][release]
    found = predict_t4.main_rows(with_triton(release, triton.__version__), processes=1)
    kernels = 6 * len(predict_t4.MAIN_HEAD_DIMS) + 2  # dK and dV of 192 are two, with the mask and without
    assert len(found) == len(baseline) == kernels and not predict_t4.changes(found, baseline)


def test_a_worse_kernel_is_seen():
    """The forward with 16 rows a warp, which read twice as much shared memory for each product."""
    release = triton.__version__
    if release not in predict_t4.BASELINE_RELEASES:
        pytest.skip(f"the baseline has no Triton {release}")
    baseline = json.loads(predict_t4.BASELINE.read_text())["triton"][release]
    baseline = {"forward d64 full": baseline["forward d64 full"]}
    slow, broken = (predict_t4.Case("forward", 64, False, 0, Tile(*sizes)) for sizes in [(64, 32, 4), (64, 48, 4)])
    rows = predict_t4.rows([slow, broken], processes=1)
    (change,) = predict_t4.changes(rows[:1], baseline)
    assert change.startswith("forward d64 full: useful utilisation 0.") and rows[0]["bound"] == "lsu"
    assert rows[1]["result"] != "ok" and predict_t4.changes(rows[1:], baseline)  # 48 is no power of two


def test_changes_are_named():
    before = {"tile": "128x64 w4", "registers": 200, "stack_bytes": 8, "useful": 0.6}
    row = before | {"kernel": "forward d64 full", "result": "ok"}
    baseline = {row["kernel"]: before}
    assert not predict_t4.changes([row], baseline)
    assert not predict_t4.changes([row | {"registers": 180, "stack_bytes": 0, "useful": 0.58}], baseline)
    worse = row | {"registers": 201, "stack_bytes": 16, "useful": 0.56}
    assert predict_t4.changes([worse], baseline) == [
        "forward d64 full: registers 201, were 200",
        "forward d64 full: stack_bytes 16, were 8",
        "forward d64 full: useful utilisation 0.560, was 0.600",
    ]
    assert predict_t4.changes([row | {"useful": 0.64}], baseline)
    assert predict_t4.changes([], baseline) == ["forward d64 full: has no row"]


def made(kernel, cost, rank=0):
    names = {f"score_{name}": value for name, value in zip(sm75.Cost._fields, (cost, 1, 1), strict=True)}
    return {"kernel": kernel, "rank": rank, "result": "ok", **names}


def test_summary_of_rows():
    ideal = 2 * 64 / 1024  # cycles of a product of one score
    rows = [
        made("forward d64 full", 4 * ideal),
        made("forward d64 full", 2 * ideal, rank=1),
        made("dkdv d64 full", 8 * ideal),
        made("dq d64 full", 6 * ideal),
    ]
    lines = {line["what"]: line for line in predict_t4.summary(rows)}
    assert lines["forward d64 full"]["default"] == 0.5 and lines["forward d64 full"]["best"] == 1
    assert lines["backward d64 full"]["default"] == pytest.approx(5 / 14)
    assert lines["forward d128 full"]["default"] is None
    both = lines["forward with backward d64, times SDPA"]["default"]
    assert both == pytest.approx((1 / 0.332 + 2.5 / 0.260) / (1 / 0.5 + 2.5 / (5 / 14)))


def test_dk_and_dv_apart_are_one_candidate():
    ideal = 2 * 64 / 1024
    rows = [made("dk d64 full", 6 * ideal), made("dv d64 full", 4 * ideal), made("dq d64 full", 6 * ideal)]
    rows.append(made("dkdv d64 full", 8 * ideal, rank=1))
    (line,) = [line for line in predict_t4.summary(rows) if line["what"] == "backward d64 full"]
    assert line["default"] == pytest.approx(5 / 16) and line["best"] == pytest.approx(5 / 14)
    rows[1]["result"] = "does not fit"
    assert predict_t4.useful(rows, "backward", 64, "full", default=True) is None
    assert predict_t4.useful(rows, "backward", 64, "full", default=False) == pytest.approx(5 / 14)


def test_a_tile_with_dk_and_dv_apart_has_two_rows():
    tile = Tile(16, 64, 4, hold=True, apart=True)
    found = predict_t4.rows([predict_t4.Case("dkdv", 32, False, 0, tile)], processes=1)
    assert [(r["kernel"], r["result"]) for r in found] == [("dk d32 full", "ok"), ("dv d32 full", "ok")]


def test_measured_is_the_longest_length_of_a_t4_run(tmp_path):
    lines = predict_t4.summary([made("forward d64 full", 2 * 2 * 64 / 1024)])
    assert {line["measured"] for line in predict_t4.beside_measured(lines, tmp_path)} == {None}
    run = tmp_path / "2026-01-02_t4_0123456"
    run.mkdir()
    common = "2026-01-02,float16,64,False"
    rows = [
        f"{common},forward,8192,flashattn,20.5",
        f"{common},forward,512,flashattn,11",
        f"{common},forward,8192,naive,3",
    ]
    text = "\n".join(["date,dtype,head_dim,causal,mode,seqlen,provider,tflops", *rows])
    (run / "attention.csv").write_text(text)
    found = {line["what"]: line for line in predict_t4.beside_measured(lines, tmp_path)}
    assert found["forward d64 full"]["measured"] == 20.5 and found["forward d64 full"]["predicted at 1.59 GHz"] == 65.1
    assert found["backward d64 full"]["measured"] is None and len(found) == len(predict_t4.AIMS)


def test_the_command(tmp_path):
    command = [sys.executable, ROOT / "scripts" / "predict_t4.py"]
    chosen = [
        "--processes",
        "1",
        "--passes",
        "dq",
        "--head-dims",
        "32",
        "--causal",
        "yes",
        "--csv",
        tmp_path / "rows.csv",
    ]
    done = subprocess.run([*command, *chosen], capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("dq d32 causal") == len((tmp_path / "rows.csv").read_text().splitlines()) - 1 >= 1


def test_columns_stay_in_line_whatever_the_tile(capsys):
    cost = sm75.score_cost(IDEAL, "forward", FORWARD)
    row = {"kernel": "forward d64 full"} | predict_t4.predicted(IDEAL, cost, 2, 64)
    row |= {"registers": 255, "stack_bytes": 0}
    tiles = ["128x64 w4", "128x64 w4 " + "lever " * 12 + "end"]
    refused = {"result": "does not fit", "tile": "16x16"}
    predict_t4.print_rows([*(row | {"tile": tile} for tile in tiles), row | refused])
    heading, *lines, bad = capsys.readouterr().out.splitlines()
    assert [line[heading.index("tile") :] for line in lines] == tiles
    assert lines[0].index("255") + 3 == heading.index("regs") + 4 and bad.endswith("does not fit  16x16")


@pytest.mark.parametrize("number", ["0", "-1"])
def test_processes_that_are_refused(capsys, number):
    with pytest.raises(SystemExit, match="2"):
        predict_t4.main(["--first", "--passes", "dq", "--head-dims", "32", "--processes", number])
    assert f"--processes: got {number}, accepted are 1 or more" in capsys.readouterr().err


def test_release_that_a_baseline_lacks_is_named(monkeypatch, capsys):
    monkeypatch.setattr(predict_t4.triton_releases, "path", lambda release: None)
    monkeypatch.setattr(predict_t4.turing, "triton_version", lambda: "another")
    with pytest.raises(SystemExit, match="1"):
        predict_t4.main(["--write-baseline", "a test"])
    command = '"$(scripts/setup.sh)" scripts/triton_releases.py 3.2.0'
    assert capsys.readouterr().err == f"Triton 3.2.0 is not here: {command} fetches it\n"


def test_a_baseline_needs_a_reason(capsys):
    with pytest.raises(SystemExit, match="2"):
        predict_t4.main(["--write-baseline", " "])
    assert "--write-baseline: got no reason" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        predict_t4.main(["--head-dims", "64", "257"])
    assert "--head-dims: got 257, accepted are 1 to 256" in capsys.readouterr().err
