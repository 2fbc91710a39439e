"""Writes what this machine is into the JSON file that is named.

As a process of its own: the driver lives as long as the run does, and would hold GPU memory all the while.
"""

import json
import os
import sys
from pathlib import Path

import psutil
import torch

from flashattn import measure

# Which image of Kaggle or Colab it is; kaggle_run is "Batch" or "Interactive".
FILES = {"image_commit": "/etc/git_commit", "image_date": "/etc/build_date"}
VARIABLES = {"kaggle_run": "KAGGLE_KERNEL_RUN_TYPE", "colab_release": "COLAB_RELEASE_TAG"}


def facts() -> dict[str, object]:
    """The GPUs, measure.run_metadata(), the host, and the image where it is known."""
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "gpus": [{"name": gpu.name, "capability": f"{gpu.major}.{gpu.minor}"} for gpu in gpus],
        **measure.run_metadata(),
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        **{name: Path(path).read_text().strip() for name, path in FILES.items() if Path(path).is_file()},
        **{name: os.environ[variable] for name, variable in VARIABLES.items() if variable in os.environ},
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(facts(), indent=2) + "\n")
