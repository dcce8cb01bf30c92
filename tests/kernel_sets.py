"""The kernel sets that run on this machine's CPU: torch's operations, and kernels.cpp compiled for each instruction set that it has."""

import platform
import shutil
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
FLAGS = set(CPUINFO.read_text().split()) if platform.machine() == "x86_64" and CPUINFO.exists() else set()

# Each stands for a way to multiply: AMX tiles, bf16 dot products, registers of 16, 8 and (as on ARM) 4 floats
MARCHES = {"native": "", "cooperlake": "avx512_bf16", "x86-64-v4": "avx512vl", "x86-64-v3": "avx2", "x86-64": "sse2"}
SETS = [("torch", "off")]
if any(map(shutil.which, ("g++", "c++", "clang++"))):
    SETS += [("cpp", march) for march, flag in MARCHES.items() if not flag or flag in FLAGS]
