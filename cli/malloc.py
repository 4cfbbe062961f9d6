"""Let glibc keep big blocks: handing them back costs a page fault for every page that is used again."""

from __future__ import annotations

import ctypes
import os
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEEP = 1 << 30


def keep_memory() -> None:
    """Raise glibc's thresholds for this process; does nothing on other systems, or if the user set them."""
    if not sys.platform.startswith("linux") or any(name.startswith("MALLOC_") for name in os.environ):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # musl has none
        return
    mallopt(_M_MMAP_THRESHOLD, _KEEP)
    mallopt(_M_TRIM_THRESHOLD, _KEEP)
