"""Imports run one way, and the package imports with no GPU, no driver and no Triton."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "flashattn"

# Each layer may import those before it. Modules of one line may not import one another.
LAYERS = [
    ["measure", "reference", "testing"],  # import only torch
    ["sass", "turing"],
    ["sm75"],
    ["launcher", "configs", "primitives"],
    ["codegen", "forward", "backward"],
    ["autograd", "launches"],
    ["interface"],
    ["doctor"],
    ["__init__"],
]
LAYER = {module: depth for depth, modules in enumerate(LAYERS) for module in modules}
KERNELS = {"primitives", "forward", "backward"}  # these import Triton, and so are imported when first needed


def imports(module: str, nested: bool) -> set[str]:
    """Modules of the package, and top-level names of others, that a module imports: at its top, or anywhere."""
    tree = ast.parse((PACKAGE / f"{module}.py").read_text())
    found = set()
    for node in ast.walk(tree) if nested else tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level:
            found |= {f".{node.module}"} if node.module else {f".{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module.split(".")[0])
    return found


def test_every_module_has_its_place():
    assert {path.stem for path in PACKAGE.glob("*.py")} == set(LAYER)


@pytest.mark.parametrize("module", LAYER)
def test_imports_run_one_way(module):
    own = {name[1:] for name in imports(module, nested=True) if name.startswith(".")}
    upward = {name for name in own if LAYER[name] >= LAYER[module]}
    assert not upward, f"{module} imports {upward}"


@pytest.mark.parametrize("module", LAYERS[0])
def test_helpers_import_only_torch(module):
    others = {name for name in imports(module, nested=True) if name not in sys.stdlib_module_names}
    assert others <= {"torch"}


@pytest.mark.parametrize("module", LAYER)
def test_only_kernels_import_triton_at_the_top(module):
    top = imports(module, nested=False)
    assert ("triton" in top) == (module in KERNELS)
    if module not in KERNELS:
        assert not top & {f".{name}" for name in KERNELS}


def test_imports_and_runs_with_no_gpu_and_no_triton():
    code = """
import sys
sys.modules["triton"] = None  # importing it fails, as where it is not installed
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *args: None if name == "triton" else find_spec(name, *args)
import torch
from flashattn import attention
q = torch.randn(1, 2, 30, 16, requires_grad=True)
attention(q, q, q, causal=True).sum().backward()
assert q.grad.isfinite().all()
try:
    attention(q, q, q, backend="triton")
except NotImplementedError as error:
    assert "needs the package triton" in str(error)
else:
    raise SystemExit("backend='triton' ran without Triton")
print("ran")
"""
    environment = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(PACKAGE.parent), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and done.stdout.strip() == "ran", done.stderr
