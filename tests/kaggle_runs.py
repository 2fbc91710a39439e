"""Made-up runs: what kaggle/driver.py leaves, as far as the pull and the index read it."""

import io
import json
import zipfile

from kaggle_server import git

README = """\
# A project

<!-- table:t4_forward if any -->
No complete run yet.
<!-- /table:t4_forward -->

[results](results/)
"""
SHA = "5" * 64


def step(name, state="passed", triton="image", note="301 passed"):
    return {"name": name, "triton": triton, "state": state, "seconds": 12.3, "note": note}


def status_of(root, **changes):
    """What the driver writes of a complete run on a T4."""
    return {
        "format": 1,
        "commit": git(root, "rev-parse", "HEAD"),
        "dirty": "no",
        "payload_sha256": SHA,
        "parameters": {"quick": True, "notebooks": ["01_tests", "02_benchmark"]},
        "state": "finished",
        "reason": "",
        "accepts_any_device": False,
        "gpu": {"name": "Tesla T4", "capability": "7.5", "count": 2},
        "machine": {"gpu": "Tesla T4", "torch": "2.10.0+cu128", "triton": "3.6.0", "power_limit_w": "70.00"},
        "started": "2026-12-02T10:00:00+00:00",
        "ended": "2026-12-02T10:18:00+00:00",
        "steps": [step("01_tests"), step("02_benchmark")],
    } | changes


def csv_of(gpu="Tesla T4", triton="3.6.0", tflops=21.5):
    row = {"provider": "flashattn", "mode": "forward", "batch": 4, "heads": 16, "seqlen": 512, "head_dim": 64}
    row |= {"causal": False, "dtype": "float16", "tflops": tflops, "status": "measured", "gpu": gpu, "driver": "560"}
    row |= {"torch": "2.10.0", "triton": triton, "commit": "a" * 40, "dirty": "no", "date": "2026-12-02T10:10"}
    rows = [row, row | {"provider": "sdpa_efficient", "tflops": 17.0}, row | {"provider": "sdpa_flash", "tflops": ""}]
    return "\n".join([",".join(row), *(",".join(map(str, r.values())) for r in rows), ""]).encode()


def files_of(status, **more):
    """Files of a run, as they lie in the driver's output folder."""
    counts = {"passed": 301, "failed": 0, "skipped": 2, "comparisons": 900}
    files = {
        "status.json": json.dumps(status).encode(),
        "01_tests.ipynb": b"{}",
        "triton3.2.0/01_tests.ipynb": b"{}",
        "01_tests.json": json.dumps({"ok": True, "counts": counts}).encode(),
        "attention.csv": csv_of(),
        "attention.png": b"\x89PNG",
        "triton3.2.0/01_tests.json": json.dumps({"ok": True, "counts": counts | {"passed": 300}}).encode(),
        "triton3.2.0/attention.csv": csv_of(triton="3.2.0", tflops=23.0),
    }
    return files | more


def zipped(files):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return data.getvalue()


def placed(root):
    return sorted(path.name for path in (root / "results").iterdir() if path.name[:2] == "20")
