"""The one exception of this package for what the caller has to change, and how to know the end of memory."""


class Refused(ValueError):
    """A request that would give wrong numbers, or none. The message says what to do instead."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on any device."""
    import torch  # this module is on the way of every command's help

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    words = ("out of memory", "can't allocate memory", "not enough memory", "alloc_failed", "bad_alloc")
    return any(one in text for one in words)
