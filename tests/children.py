"""The environment of a process that a test starts, and the Triton releases that it can have."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import triton_releases  # noqa: E402


def environment(*, interpreted: bool = True, **changes: str) -> dict[str, str]:
    """This process's environment with the checkout first on the path; without TRITON_INTERPRET if not interpreted.

    One OpenMP thread, since tests run side by side; no plotting backend of a notebook that runs the tests.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    left_out = {"MPLBACKEND"} if interpreted else {"MPLBACKEND", "TRITON_INTERPRET"}
    kept = {key: value for key, value in os.environ.items() if key not in left_out}
    return kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | changes


def with_triton(release: str, installed: str) -> dict[str, str]:
    """An environment with a Triton release, the installed one or one that was fetched; skips if it is neither."""
    folder = None if release == installed else triton_releases.path(release)
    if release != installed and folder is None:
        pytest.skip(triton_releases.not_here(release))
    changed = environment(interpreted=False)
    return changed | {"PYTHONPATH": os.pathsep.join(map(str, filter(None, [folder, changed["PYTHONPATH"]])))}
