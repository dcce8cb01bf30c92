"""The Triton kernels as the tests run them: compiled where there is a CUDA device, else in Triton's interpreter.

A kernel is decorated for the interpreter if TRITON_INTERPRET is set at that moment, which is when our module is imported. Other
tests have imported it by then, so this loads the package a second time, under another name, with the variable set for just that
long. (Triton itself comes first and without it, or its own helpers would disagree about the mode.)
"""

import importlib
import importlib.util
import os
import sys

import torch
import triton  # noqa: F401

import nano_sgl
from nano_sgl import attention as compiled_attention
from nano_sgl import kernels as compiled_kernels
from nano_sgl import masks as compiled_masks


def load_interpreted():
    """(kernels, attention, masks) of a second copy of the package, whose Triton kernels run in the interpreter on CPU tensors."""
    spec = importlib.util.spec_from_file_location(
        "nano_sgl_interpreted", nano_sgl.__file__, submodule_search_locations=nano_sgl.__path__
    )
    sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    before = os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        return tuple(importlib.import_module(f"{spec.name}.{name}") for name in ("kernels", "attention", "masks"))
    finally:
        del os.environ["TRITON_INTERPRET"]
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
kernels, attention, masks = (compiled_kernels, compiled_attention, compiled_masks) if DEVICE == "cuda" else load_interpreted()
# The interpreter computes wrongly on bfloat16 (products, sums, dots), so attention in bfloat16 waits for a device
FLOATS = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])
