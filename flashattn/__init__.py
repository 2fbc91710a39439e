"""Exact attention (FlashAttention-2, forward and backward) in Triton for PyTorch, tuned first for the NVIDIA T4."""

import sys

try:
    from .interface import attention, flash_attention
except ModuleNotFoundError as error:
    if error.name != "torch" or sys.argv[0] != "-m":  # so it is while `python -m flashattn.doctor` looks for the doctor
        raise

__version__ = "0.1.0"
__all__ = ["attention", "flash_attention"]
