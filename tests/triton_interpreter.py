"""The Triton kernels as the tests run them: compiled where there is a CUDA device, else in Triton's interpreter.

Triton decides at decoration, that is when nano_sgl.kernels is imported, whether a kernel is to be interpreted. Other tests have imported it by
then, so this module loads a second copy under another name with TRITON_INTERPRET set for just that moment. (Triton itself must be imported
before, without it, or its own helpers disagree about the mode.)
"""

import importlib.util
import os
import sys

import torch
import triton  # noqa: F401

from nano_sgl import kernels as product


def load_interpreted():
    """A copy of nano_sgl.kernels whose Triton kernels run in the interpreter, on CPU tensors."""
    spec = importlib.util.spec_from_file_location("kernels_interpreted", product.__file__)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        spec.loader.exec_module(module)
    finally:
        del os.environ["TRITON_INTERPRET"]
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before
    return module


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
kernels = product if DEVICE == "cuda" else load_interpreted()
# The interpreter computes wrongly on bfloat16 (products, sums, dots), so attention in bfloat16 waits for a device
FLOATS = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])
