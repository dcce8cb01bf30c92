"""The kernel sets that run on this machine's CPU: torch's operations, and kernels.cpp compiled for each instruction set that it has."""

import platform
import shutil
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
FLAGS = set(CPUINFO.read_text().split()) if platform.machine() == "x86_64" and CPUINFO.exists() else set()

SETS = [("torch", "off")]
if any(map(shutil.which, ("g++", "c++", "clang++"))):
    SETS += [("cpp", "native")] + [("cpp", march) for march, flag in (("x86-64-v4", "avx512vl"), ("x86-64-v3", "avx2")) if flag in FLAGS]
