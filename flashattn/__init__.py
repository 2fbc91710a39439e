"""Exact attention (FlashAttention-2, forward and backward) in Triton for PyTorch, tuned first for the NVIDIA T4."""

from .interface import attention, flash_attention

__version__ = "0.1.0"
__all__ = ["attention", "flash_attention"]
