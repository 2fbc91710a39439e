"""The environment of a process that a test starts."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def environment(*, interpreted: bool = True, **changes: str) -> dict[str, str]:
    """This process's environment with the checkout first on the path; without TRITON_INTERPRET if not interpreted.

    One OpenMP thread, since tests run side by side; no plotting backend of a notebook that runs the tests.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    left_out = {"MPLBACKEND"} if interpreted else {"MPLBACKEND", "TRITON_INTERPRET"}
    kept = {key: value for key, value in os.environ.items() if key not in left_out}
    return kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | changes
