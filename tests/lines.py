"""What an operation costs, in lines that are run: no clock, so no noise."""

import sys
from types import ModuleType


def lines_run(module: ModuleType, action) -> int:
    """Lines of a module's file that run in action()."""
    count, file = 0, module.__file__

    def trace(frame, event, argument):
        nonlocal count
        if frame.f_code.co_filename != file:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return count
