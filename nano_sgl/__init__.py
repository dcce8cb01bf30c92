"""nano_sgl: SGLang re-made small enough to read and fork, and still a real engine.

    from nano_sgl import LLM, SamplingParams

Both names are looked up when they are first used, so that a module that needs no torch (the tree, the grammar, the language) costs none.
"""

import importlib
import os

# A thread of torch's that waits for another spins, and keeps the core from whoever it waits for: beside one busy process a step took four times
# as long as with sleeping threads. Read when torch is loaded; who sets it otherwise is obeyed.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

_WHERE = {"LLM": "llm", "Engine": "engine", "EngineConfig": "config", "SamplingParams": "protocol", "Output": "protocol",
          "RequestError": "protocol"}
__all__ = list(_WHERE)
__version__ = "0.1.0"


def __getattr__(name: str):
    if name not in _WHERE:
        raise AttributeError(f"module 'nano_sgl' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_WHERE[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
