"""``forward-influence doctor``."""

from __future__ import annotations

import os
import platform


def command() -> None:
    """Say what is here: versions, devices, memory, models and data. No network is touched."""
    import psutil
    import torch

    from forward_influence.aliases import describe_models
    from forward_influence.data import describe_corpora
    from forward_influence.estimate import size
    from forward_influence.memory import free_memory
    from forward_influence.provenance import commit, versions

    print(f"python      {platform.python_version()} on {platform.platform()}")
    print("packages    " + ", ".join(f"{name} {version or 'missing'}" for name, version in versions().items()))
    print(f"commit      {commit() or 'not a checkout'}")
    print(f"processor   {os.cpu_count()} cores, {torch.get_num_threads()} threads")
    print(f"memory      {size(free_memory(torch.device('cpu')))} free of {size(psutil.virtual_memory().total)}")
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        print(f"cuda:{index}      {torch.cuda.get_device_name(index)}, {size(free)} free of {size(total)}")
    if not torch.cuda.device_count():
        print("cuda        none; models run on the CPU in float32")
    for one in describe_models():
        state = "here" if one["available"] else f"not here ({one['install']})"
        converted = ", converted" if one["converted"] else ""
        amount = f", {size(one['size_bytes'])}" if one["size_bytes"] else ""
        print(f"model       {one['alias']}: {state}{amount}{converted}; {one['licence']}")
    for one in describe_corpora():
        print(f"data        {one['name']}: {'here' if one['available'] else 'not here'}; {one['note']}")
