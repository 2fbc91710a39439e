"""The wheel, as a notebook with no internet installs it: by itself, beside the torch that is there."""

import subprocess
import sys

import pytest
from children import ROOT, environment

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="needs bash"),
    pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this tree is no checkout"),
    pytest.mark.slow,
]

USE = """
import pathlib, sys
import torch, flashattn
from flashattn import attention
assert pathlib.Path(flashattn.__file__).parents[1] == pathlib.Path(sys.argv[1]), flashattn.__file__
q = torch.randn(1, 2, 30, 16, requires_grad=True)
attention(q, q, q, causal=True, backend="reference").sum().backward()
assert q.grad.isfinite().all()
print(flashattn.__version__)
"""


def test_wheel_installs_alone_and_runs(tmp_path):
    made = subprocess.run(
        [ROOT / "scripts" / "build_wheel.sh"],
        capture_output=True,
        text=True,
        env=environment(FLASHATTN_PYTHON=sys.executable),
    )
    assert made.returncode == 0, made.stderr
    wheel = made.stdout.strip()
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--target", site, wheel]
    done = subprocess.run(install, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = {path.name.split("-")[0] for path in site.iterdir()}
    assert names == {"flashattn"}
    shipped = sorted(path.name for path in (ROOT / "flashattn" / "tuned").iterdir())
    assert shipped and sorted(path.name for path in (site / "flashattn" / "tuned").iterdir()) == shipped
    clean = environment() | {"PYTHONPATH": str(site)}
    used = subprocess.run([sys.executable, "-c", USE, site], capture_output=True, text=True, env=clean, cwd=tmp_path)
    assert used.returncode == 0, used.stderr
    assert wheel.endswith(f"flashattn-{used.stdout.strip()}-py3-none-any.whl")
