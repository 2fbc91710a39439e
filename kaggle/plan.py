"""What a run is to do: its settings, its steps in order of worth, and how long they should take."""

from collections.abc import Iterable
from dataclasses import dataclass, fields

IMAGE = "image"  # the pass with the Triton that is installed; the others have a release in a folder of its own
# The releases that have a T4's tensor cores, by flashattn.turing, whose list it would take torch to read.
TRITONS = "3.2.0 3.3.0 3.3.1 3.4.0 3.5.0 3.5.1 3.6.0 3.7.0 3.7.1 3.8.0 3.9.0".split()
TESTS, BENCHMARK, TUNE = "01_tests", "02_benchmark", "tune"
TOGETHER = (TESTS,)  # times nothing: its passes run at once where there are GPUs enough
ONCE = ("03_triton_versions",)  # brings Triton releases of its own: the first pass is enough
NO_GPU = ("04_t4_predicted",)  # use none, and so are pushed only where they are named

# What a quick run tells the notebooks: tests that compile few kernels, a few rows, two releases.
QUICK = {
    TESTS: {"pytest_args": ["tests/test_attention.py", "-k", "(lengths or scores or grouped) and not 1000"]},
    BENCHMARK: {
        "seq_lens": [512, 2048, 8192],
        "long_seq_lens": [],
        "head_dims": [64],
        "causal": [True],
        "budget_ms": 20.0,
        "peer_seq_lens": [2048],
        "grouped_seq_lens": [2048],
        "host_seq_lens": [128, 512],
        "sustained_s": 5.0,
    },
    "03_triton_versions": {"releases": ["3.2.0", "3.6.0"]},
}
QUICK_TUNE = "--head-dims 64 --seq-lens 2048 --causal yes --budget-ms 10".split()

# Minutes of a step on Kaggle, (quick, full). Estimates, with no T4 at hand, from what each is made of:
# - compiling a kernel for sm_75: 1 s on a core of an AMD EPYC, taken as 3 s there. The tests of a quick run need some
#   65 in each pass, both passes at once on 4 cores that count as 2.5; the tuner 10 or 38, the benchmark 6 or 25.
# - all tests: 94 s by 8 processes beside an NVIDIA H200 when they were 808, so 980 s of a core for the 1,047 of now;
#   taken as twice that, for both passes.
# - useful operations of the benchmark times the calls of a measurement (a check, two peaks of memory, two calls to
#   plan, five turns), at rates near those that others saw on a T4 (flashattn 20 TFLOP/s, SDPA EFFICIENT 15, naive
#   attention 3, SDPA MATH 2, a matrix product 22, fp64 0.2): up to length 16,384 0.7 minutes or 10.2, the two lengths
#   beyond none or 6.8, grouped heads 0.5 or 1, the host's cost less; of the tuner none or 1.5.
# - three times without a pause, 5 s after 5 s of rest or 60 s after 10 s: half a minute or 3.5. FlexAttention, taken to
#   refuse after half a minute of compiling for each kind of kernel: 2 kinds or 8, so 1 minute or 4. What else the
#   benchmark does took 2 minutes beside the H200, in full and with fewer parts; taken as 1 or 4.
# - the predictions: 54 kernels compiled and simulated, 126 s of a core of that EPYC, taken as 4 minutes.
# - 13 Triton releases: 6 minutes on two cores of that EPYC, taken as 12, and 2.5 GB to download.
MINUTES = {
    TESTS: (4, 26),
    TUNE: (1, 4),
    BENCHMARK: (4, 31),
    "03_triton_versions": (3, 15),
    "04_t4_predicted": (4, 4),
}
OTHER_MINUTES = (5, 30)  # of a notebook that is not listed
PREPARING_MINUTES = 2  # packages, the machine's facts, a Triton release, flashattn.doctor
SLACK = 3  # how many times its estimate a step may take
LEAST_LIMIT_MINUTES = 10  # that it may take at least: an estimate of a minute is easily wrong by more than that


@dataclass(frozen=True)
class Settings:
    """The parameters of driver.ipynb, where they are explained."""

    notebooks: list[str]
    quick: bool
    tritons: list[str]
    notebook_parameters: dict[str, dict]
    limit_minutes: float
    accept_any_device: bool

    @classmethod
    def of(cls, parameters: dict, there: Iterable[str]) -> "Settings":
        """`there` are the project's notebooks. Raises ValueError for what is missing, unknown, or not accepted."""
        there = sorted(there)
        names = [field.name for field in fields(cls)]
        if {*parameters} != {*names}:
            raise ValueError(f"parameters: got {', '.join(parameters)}, accepted are exactly {', '.join(names)}")
        accepted = {
            "notebooks": (lambda x: _names(x) and {*x} <= {*there}, f"a list of some of {', '.join(there)}"),
            "tritons": (
                lambda x: _names(x) and {*x} <= {IMAGE, *TRITONS},
                f"a list of some of {', '.join([IMAGE, *TRITONS])}",
            ),
            "notebook_parameters": (
                lambda x: isinstance(x, dict) and {*x} <= {*there} and all(isinstance(y, dict) for y in x.values()),
                'a dictionary for each notebook that is told more, as in {"02_benchmark": {"seq_lens": [512]}}',
            ),
            "limit_minutes": (lambda x: type(x) in (int, float) and 0 < x < 1e6, "a number of minutes above 0"),
            "quick": (lambda x: isinstance(x, bool), "True or False"),
            "accept_any_device": (lambda x: isinstance(x, bool), "True or False"),
        }
        for name, (right, what) in accepted.items():
            if not right(parameters[name]):
                raise ValueError(f"{name}: got {parameters[name]!r}, accepted is {what}")
        return cls(**parameters)


def _names(x: object) -> bool:
    """Whether it is a list of different strings, one at least."""
    return isinstance(x, list) and all(isinstance(name, str) for name in x) and 0 < len(x) == len({*x})


@dataclass(eq=False)
class Step:
    """What one child does in one pass; state is "not run", "passed", "failed" or "timed out"."""

    name: str
    triton: str
    state: str = "not run"
    seconds: float = 0.0
    note: str = "not reached"

    def __str__(self) -> str:
        return f"{self.name}, Triton of the image" if self.triton == IMAGE else f"{self.name}, Triton {self.triton}"

    def minutes(self, quick: bool) -> float:
        """Its estimate."""
        return MINUTES.get(self.name, OTHER_MINUTES)[0 if quick else 1]

    def limit_minutes(self, quick: bool) -> float:
        """After which it is cut off, where the run's own limit does not come first."""
        return max(LEAST_LIMIT_MINUTES, SLACK * self.minutes(quick))


def batches(settings: Settings, gpus: int) -> list[list[Step]]:
    """The steps in order of worth; those of one list run at once."""
    at_once, found = max(1, gpus), []
    for name in settings.notebooks:
        if name in TOGETHER:
            passes = [Step(name, triton) for triton in settings.tritons]
            found += [passes[start : start + at_once] for start in range(0, len(passes), at_once)]
    for triton in settings.tritons:
        for name in settings.notebooks:
            if name in TOGETHER or (name in ONCE and triton != settings.tritons[0]):
                continue
            if name == BENCHMARK and gpus:
                found.append([Step(TUNE, triton)])
            found.append([Step(name, triton)])
    return found


def estimate(settings: Settings) -> float:
    """Minutes of a whole run on Kaggle's two T4s."""
    return PREPARING_MINUTES + sum(max(s.minutes(settings.quick) for s in steps) for steps in batches(settings, gpus=2))


def notebook_parameters(name: str, settings: Settings, *, gpus: int, processes: int) -> dict[str, object]:
    """What a notebook is told; processes is how many its tests may have, 0 where pytest-xdist is missing."""
    told = {}
    if settings.quick or not gpus:
        told |= QUICK.get(name, {})
    if name == BENCHMARK and not gpus:
        told = {}  # interpreted: run_notebooks.py has smaller shapes for that
    if name == TESTS:
        told["pytest_args"] = [*(["-n", str(processes)] if processes else []), *told.get("pytest_args", [])]
    return told | settings.notebook_parameters.get(name, {})
