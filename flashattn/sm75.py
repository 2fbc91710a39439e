"""Performance model of a Turing SM: how busy a kernel's hottest loop keeps a T4's tensor cores. Nothing runs.

On Turing the compiler schedules: each instruction says how long its warp stalls, which scoreboards it waits for and
which it sets. The model follows the loop's machine code and obeys them, with the pipes, the queue to the load/store
unit and that unit itself as limits, for all warps of an SM at once. No constant was fitted. docs/t4_model.md has the
sources, what the model was compared with, and what it leaves out. All it says is predicted.
"""

import heapq
import math
import re
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from . import sass
from .sass import Instruction

# The machine. Sources, written out in docs/t4_model.md: [Yan] [Jia] [guide] [NAK] [Huerta]; else derived or a guess.
SMS, PARTITIONS = 40, 4  # [guide]
HMMA_FLOPS = 2 * 16 * 8 * 8  # of an HMMA.1688: m16n8k8


class Pipe(NamedTuple):
    """Cycles until a partition's pipe takes its next instruction, and until a result with a scoreboard is due."""

    busy: int
    latency: int


PIPES = {
    "tensor": Pipe(8, 14),  # [Yan] measured 8.06 on a T4; [NAK]
    "fp16": Pipe(2, 8),  # [guide]; [NAK]. It keeps the tensor pipe busy
    "special": Pipe(8, 18),  # [guide]; guess: as on Volta
    "fp32": Pipe(2, 5),  # [guide]; its latency is in the stall counts, as are integer's
    "integer": Pipe(2, 5),  # [guide]
    "fp64": Pipe(64, 40),  # [guide]; guess
    "uniform": Pipe(2, 12),  # guess
    "control": Pipe(1, 20),  # guess
}
LATENCY = {"shared": 19, "global": 200, "constant": 30}  # [Jia]; [Jia]: 188 where L2 is idle; guess
LSU_BYTES = 64  # a cycle, of the one load/store unit: [Yan] for LDS, derived for LDSM, SHFL and global loads
LSU_STORE = 2  # cycles that a store takes longer: [Yan]
LSU_AWAY = 4  # cycles from issue to the load/store unit: guess
LSU_QUEUE = 5  # instructions of a partition that may wait for it: [Huerta], measured on Ampere
L2_BYTES = 20.0  # a cycle and SM: [Jia], 1,270 GB/s for 40 SMs at 1.59 GHz
OPERANDS_READ = 6  # cycles from issue until registers may be written again: guess
BARRIER = 12  # cycles from the last arrival: guess

_ELSEWHERE = {"CS2R": "integer", "PLOP3": "integer", "ULDC": "uniform", "VOTEU": "uniform"}  # than sass.pipe_of says
NONE = 7  # in place of a scoreboard's number


class Op(NamedTuple):
    """An instruction as the simulation sees it: where it goes, and what the compiler wrote into its control bits."""

    pipe: str
    busy: int  # cycles until the pipe takes the next one
    latency: int  # cycles until a result that a scoreboard tracks is due
    stall: int  # cycles until the warp may issue its next instruction
    waits: tuple[int, ...]  # scoreboards that have to be clear
    result: int  # the scoreboard that is clear when the result is there, or NONE
    operands: int  # the one that is clear when the operands were read, or NONE
    lsu: int = 0  # cycles of the load/store unit
    shared_bytes: int = 0  # that a warp moves through shared memory, or by a shuffle
    global_bytes: int = 0
    barrier: bool = False


def decode(instruction: Instruction) -> Op:
    """Control bits from bit 105 on: stall 4, yield 1, scoreboards 3 and 3, waits 6; [Jia], as on Volta."""
    control = instruction.bits >> 105
    base = instruction.name.split(".")[0]
    pipe = _ELSEWHERE.get(base, sass.pipe_of(instruction.name))
    if pipe == "integer" and base[0] == "U":
        pipe = "uniform"
    waits = {number for number in range(6) if control >> 11 + number & 1}
    if base == "DEPBAR":
        waits |= {int(number) for number in re.findall(r"SB(\d)", instruction.operands)}
    lsu = moved = 0
    if pipe in ("shared", "global"):
        moved = 32 * next((size for suffix, size in ((".128", 16), (".64", 8)) if suffix in instruction.name), 4)
        if base == "LDSM":
            matrices = re.search(r"\.([24])$", instruction.name)
            moved = 128 * int(matrices[1] if matrices else 1)
        lsu = moved // LSU_BYTES + LSU_STORE * (base in ("STS", "STL", "ATOMS"))
    elif pipe == "constant":
        lsu = 1
    spill = base in ("LDL", "STL")  # which stays in the L1 cache
    if spill:
        pipe = "shared"
    return Op(
        "tensor" if pipe == "fp16" else pipe,
        *((0, LATENCY[pipe]) if lsu else PIPES[pipe]),
        max(control & 15, 1),
        tuple(sorted(waits)),
        control >> 5 & 7,
        control >> 8 & 7,
        lsu,
        moved if pipe == "shared" and not spill else 0,
        moved if pipe == "global" else 0,
        base == "BAR" and "ARV" not in instruction.name,
    )


def turn(loop: list[Instruction]) -> list[Instruction]:
    """What a warp executes in one turn of a loop of sass.hottest_loop().

    Branches that depend on a predicate fall through, as does one that leaves the loop; others are taken.
    """
    begin, executed, at = loop[-1].target, [], 0
    while at < len(loop):
        instruction = loop[at]
        if instruction.predicate != "!PT":
            executed.append(instruction)
        inside = instruction.target is not None and at < instruction.target - begin < len(loop)
        at = instruction.target - begin if inside and not instruction.predicate else at + 1
    return executed


def pipe_cycles(ops: list[Op]) -> dict[str, float]:
    """Cycles that a warp's turn takes of each limit, of its partition's share where all four share one.

    Besides PIPES: "lsu", the load/store unit; "l2", the way to the L2 cache; "issue", one instruction a cycle.
    """
    cycles: Counter = Counter(issue=len(ops))
    for op in ops:
        if op.lsu:
            cycles["lsu"] += op.lsu * PARTITIONS
            cycles["l2"] += op.global_bytes / L2_BYTES * PARTITIONS
        else:
            cycles[op.pipe] += op.busy
    return dict(cycles.most_common())


# The simulation ------------------------------------------------------------------------------------------------------

# Which of the warps that could issue does: the one that issued last, else one that the policy names. Turing's is not
# known, nor how far apart the programs of an SM run: a fraction of a turn.
POLICIES = ("furthest", "youngest", "round robin")
PHASES = (0.2, 0.37, 0.5)
FIRST, LAST = 2, 6  # timed is between as many turns for each warp on average: a policy may starve one


class _Warp:
    __slots__ = "number program partition at turns next clear cause held due why".split()

    def __init__(self, number: int, program: int, partition: int, start: int):
        self.number, self.program, self.partition = number, program, partition
        self.at = self.turns = 0  # the instruction that is next, and whole turns
        self.next = self.due = start  # when the stall count has run out; and when nothing else hinders, either
        self.why = "stall count"  # the last to hinder
        self.clear, self.cause = [0.0] * 6, [""] * 6  # the scoreboards: from when on, and what sets them
        self.held = False  # at a barrier


def simulate(
    ops: list[Op], num_warps: int, programs: int, policy: str = "furthest", phase: float = 0.0
) -> tuple[float, dict[str, float]]:
    """Cycles that a turn takes while all programs run, and the share of each reason in the cycles that warps waited.

    The SM issues in order: a warp when its stall count has run out, its scoreboards are clear and the pipe or the
    queue takes the instruction; one warp of each partition a cycle. When something is done is known as it is issued,
    since the load/store unit serves first come, first served.
    """
    size = len(ops)
    alone = programs * sum(op.stall for op in ops)
    warps = [
        _Warp(program * num_warps + warp, program, warp % PARTITIONS, int(program * phase % 1 * alone))
        for program in range(programs)
        for warp in range(num_warps)
    ]
    partitions = [[warp for warp in warps if warp.partition == number] for number in range(PARTITIONS)]
    pipe_free = [defaultdict(int) for _ in range(PARTITIONS)]
    queue = [deque(maxlen=LSU_QUEUE) for _ in range(PARTITIONS)]  # when the last instructions left it
    arrived: dict[int, list[_Warp]] = defaultdict(list)
    stalls: Counter = Counter()
    lsu_free = l2_free = 0.0
    last: list[_Warp | None] = [None] * PARTITIONS
    slot = [0.0] * PARTITIONS  # the next cycle in which a partition can issue
    wake = [0.0] * PARTITIONS
    events = [(0.0, number) for number in range(PARTITIONS) if partitions[number]]

    def schedule(number: int) -> None:
        """Find out when each warp of a partition can issue, and wake the partition for the first."""
        soonest, leaving, free = math.inf, queue[number], pipe_free[number]
        for warp in partitions[number]:
            if warp.held:
                warp.due = math.inf
                continue
            op = ops[warp.at]
            due, why = warp.next, "stall count"
            for scoreboard in op.waits:
                if warp.clear[scoreboard] > due:
                    due, why = warp.clear[scoreboard], warp.cause[scoreboard]
            if op.lsu:
                if len(leaving) == LSU_QUEUE and leaving[0] > due:
                    due, why = leaving[0], "queue full"
            elif free[op.pipe] > due:
                due, why = free[op.pipe], f"{op.pipe} pipe"
            warp.due, warp.why = due, why
            soonest = min(soonest, due)
        wake[number] = max(soonest, slot[number])  # never, where all wait at a barrier: events of before are void
        if soonest < math.inf:
            heapq.heappush(events, (wake[number], number))

    ends: list[float] = []  # of turns, whichever warp's
    while len(ends) <= LAST * len(warps):
        now, number = heapq.heappop(events)
        if now != wake[number]:
            continue  # it was scheduled anew
        ready = [w for w in partitions[number] if w.due <= now]
        if len(ready) == 1:
            warp = ready[0]
        elif policy == "round robin":
            after = last[number].number if last[number] else -1
            warp = min(ready, key=lambda w: (w.number <= after, w.number))
        elif last[number] in ready:
            warp = last[number]
        elif policy == "youngest":
            warp = ready[-1]
        else:
            warp = max(ready, key=lambda w: (w.turns, w.at, -w.number))
        op = ops[warp.at]
        timed = len(ends) > FIRST * len(warps)
        if timed:
            stalls[warp.why] += warp.due - warp.next
            stalls["not selected"] += now - warp.due
            stalls["stall count"] += op.stall - 1
            stalls["issue"] += 1
        last[number], slot[number], warp.next = warp, now + 1, now + op.stall
        if op.lsu:
            start = max(lsu_free, now + LSU_AWAY)
            lsu_free = read = start + op.lsu
            queue[number].append(start)
            done = start + op.latency
            if op.global_bytes:
                l2_free = max(l2_free, start) + op.global_bytes / L2_BYTES
                done = max(done, l2_free + op.latency / 2)
            else:
                done += op.lsu - 2
        else:
            pipe_free[number][op.pipe] = now + op.busy
            read, done = now + OPERANDS_READ, now + op.latency
        if op.result != NONE and done >= warp.clear[op.result]:
            warp.clear[op.result], warp.cause[op.result] = done, op.pipe
        if op.operands != NONE and read >= warp.clear[op.operands]:
            warp.clear[op.operands], warp.cause[op.operands] = read, "operands read"
        warp.at += 1
        if warp.at == size:
            warp.at = 0
            warp.turns += 1
            ends.append(now)
        if op.barrier:
            warp.held = True
            group = arrived[warp.program]
            group.append(warp)
            if len(group) == num_warps:
                for other in group:
                    if timed:
                        stalls["barrier"] += max(0, now + BARRIER - other.next)
                    other.held, other.next = False, max(other.next, now + BARRIER)
                for partition in {other.partition for other in group} - {number}:
                    schedule(partition)
                group.clear()
        schedule(number)
    cycles = (ends[LAST * len(warps)] - ends[FIRST * len(warps)]) / (LAST - FIRST)
    waited = sum(stalls.values())
    return cycles, {reason: count / waited for reason, count in stalls.most_common() if count}


@dataclass(frozen=True)
class Prediction:
    """What the model says of a kernel's hottest loop. Utilisation is of the tensor pipe, by every HMMA: "raw".

    instructions, hmmas, shared_bytes and global_bytes are a warp's in a turn.
    """

    registers: int
    stack_bytes: int
    num_warps: int
    programs: int  # that share an SM
    instructions: int
    hmmas: int
    shared_bytes: int
    global_bytes: int
    cycles: float  # of the SM for a turn of all its programs
    utilisation: float  # the mean of POLICIES and PHASES
    lowest: float
    highest: float
    ceiling: float  # the utilisation at which the tightest limit of pipe_cycles() is reached
    bound: str  # that limit
    stalls: dict[str, float]


def predict(compiled, executed: list[Instruction] | None = None) -> Prediction:
    """The model's word on a codegen.Compiled for sm_75; executed, if given, takes the place of its hottest loop's turn.

    Raises ValueError where that has no tensor-core instructions, or the kernel fits no SM.
    """
    if executed is None:
        loop = sass.hottest_loop(sass.parse(sass.listing(compiled.cubin, bits=True)))
        executed = turn(loop) if loop else []
    hmmas = sum(instruction.name.startswith("HMMA") for instruction in executed)
    ops = [decode(instruction) for instruction in executed]
    programs, warps = compiled.blocks_per_sm, compiled.num_warps
    if not hmmas:
        raise ValueError(f"{compiled.name}: no loop has tensor-core instructions")
    if not programs:
        raise ValueError(f"{compiled.name}: does not fit an SM")
    limits = pipe_cycles(ops)
    bound = max(limits, key=limits.get)
    runs = [
        simulate(ops, warps, programs, policy, phase)
        for policy in POLICIES
        for phase in (PHASES if programs > 1 else PHASES[:1])
    ]
    busy = hmmas * PIPES["tensor"].busy
    found = [busy * warps * programs / PARTITIONS / cycles for cycles, _ in runs]
    mean = sum(found) / len(found)
    return Prediction(
        registers=compiled.registers,
        stack_bytes=compiled.stack_bytes,
        num_warps=warps,
        programs=programs,
        instructions=len(ops),
        hmmas=hmmas,
        shared_bytes=sum(op.shared_bytes for op in ops),
        global_bytes=sum(op.global_bytes for op in ops),
        cycles=busy * warps * programs / PARTITIONS / mean,
        utilisation=mean,
        lowest=min(found),
        highest=max(found),
        ceiling=busy / limits[bound],
        bound=bound,
        stalls=min(zip(found, runs, strict=True), key=lambda pair: abs(pair[0] - mean))[1][1],
    )


# Attention -----------------------------------------------------------------------------------------------------------

# Products of a block of queries, a block of keys and the head dim that a kernel makes of each block of scores. The
# backward needs 5: dkdv and dq both make S and dP, and so do dK and dV alone, or S at least.
PRODUCTS = {"forward": 2, "dkdv": 4, "dk": 3, "dv": 2, "dq": 3}
BACKWARD_PRODUCTS = 5


class Cost(NamedTuple):
    """What a score, one query with one key, costs an SM: cycles, a warp's instructions, bytes through shared memory."""

    cycles: float
    instructions: float
    shared_bytes: float

    def useful(self, products: int, head_dim: int) -> float:
        """Utilisation of the tensor pipe by the FLOPs that count: no padding, recomputation or repeated products."""
        return 2 * products * head_dim / (self.cycles * PARTITIONS * HMMA_FLOPS / PIPES["tensor"].busy)


def tflops(utilisation: float, ghz: float) -> float:
    """Of a T4 at a clock rate."""
    return utilisation * SMS * PARTITIONS * HMMA_FLOPS / PIPES["tensor"].busy * ghz / 1e3


def turn_cost(prediction: Prediction, scores: int) -> Cost:
    """The cost of each of the scores that a program makes in a turn."""
    return Cost(
        prediction.cycles / prediction.programs / scores,
        prediction.instructions * prediction.num_warps / scores,
        prediction.shared_bytes * prediction.num_warps / scores,
    )


def score_cost(prediction: Prediction, kernel: str, constants: Mapping[str, int]) -> Cost:
    """The cost of a score in one of PRODUCTS, from a launch's constexpr arguments.

    How many blocks of scores a turn of the loop makes is the smaller of two counts: its HMMAs over those that a block
    needs at least, and the bytes that it loads over those of the two tiles that stream by. The first alone would take
    products that several warps repeat for work, the second alone a tile that is loaded twice. Raises ValueError where
    the loop has not the work of one block.
    """
    block_m, block_n, main, tail = (constants[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_D", "TAIL_D"))
    depth = main + tail
    hmmas = PRODUCTS[kernel] * 2 * block_m * block_n * depth // HMMA_FLOPS
    streamed = 2 * 2 * (block_m if kernel in ("dkdv", "dk", "dv") else block_n) * depth  # bytes of two fp16 tiles
    warps = prediction.num_warps
    blocks = min(prediction.hmmas * warps // hmmas, prediction.global_bytes * warps // streamed)
    if not blocks:
        raise ValueError(f"{kernel}: a turn of the hottest loop has not the products and loads of one block of scores")
    return turn_cost(prediction, blocks * block_m * block_n)
