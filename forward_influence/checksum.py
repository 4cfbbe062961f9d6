"""A cheap checksum over all weights of a model in memory: whether it is still the one that was loaded."""

from __future__ import annotations

import hashlib
import json

#: Integers of each size in bytes, as which weights are summed: exact in any order, so threads change nothing.
_INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


def weights_checksum(model) -> str:
    """Hex digest over name, dtype, shape, and bit patterns of all parameters and saved buffers.

    Patterns are summed along rows and along columns, modulo 2**32 (2**64 for wider numbers). Any single change
    shows, and so does an exchange of rows or columns; a forger could defeat it.

    Parameters
    ----------
    model : torch.nn.Module
    """
    import torch

    digest = hashlib.sha256()
    for name, weight in model.state_dict().items():
        digest.update(json.dumps([name, str(weight.dtype), list(weight.shape)]).encode())
        if not weight.numel():
            continue
        wide = torch.int64 if weight.element_size() == 8 else torch.int32
        bits = weight.detach().contiguous().view(getattr(torch, _INTEGERS[weight.element_size()]))
        table = bits.reshape(len(bits) if bits.dim() else 1, -1)
        for dimension in (0, 1):
            digest.update(table.sum(dimension, dtype=wide).cpu().numpy().tobytes())
    return digest.hexdigest()[:32]
