"""Free memory inside the limits of control groups, told by files of a made-up machine."""

import pytest
import torch

from forward_influence import memory
from forward_influence.cgroups import free_in_groups

MIB = 2**20
UNLIMITED_V1 = 9223372036854771712


def machine(root, lines, groups):
    """A root folder with ``/proc/self/cgroup`` and files of groups, by folder below ``/sys/fs/cgroup``."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("".join(f"{line}\n" for line in lines))
    for folder, files in groups.items():
        path = root / "sys/fs/cgroup" / folder
        path.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (path / name).write_text(f"{content}\n")
    return root


def v2(limit, used, cached=0):
    return {"memory.max": limit, "memory.current": used, "memory.stat": f"anon 5\nfile 77\ninactive_file {cached}"}


def v1(limit, used, cached=0):
    return {
        "memory.limit_in_bytes": limit, "memory.usage_in_bytes": used,
        "memory.stat": f"inactive_file 1\ntotal_inactive_file {cached}",
    }  # fmt: skip


CASES = {
    "v2": (["0::/job"], {"job": v2(100 * MIB, 30 * MIB, 10 * MIB)}, 80 * MIB),
    "v2, the outer group is tighter": (["0::/a/b"], {"a/b": v2(90, 10), "a": v2(95, 70)}, 25),
    "v2, only the outer group has a limit": (["0::/a/b"], {"a/b": v2("max", 10), "a": v2(95, 70)}, 25),
    "v2 in a container": (["0::/"], {"": v2(50, 20)}, 30),
    "v2, the path is the host's": (["0::/kubepods/pod7"], {"": v2(50, 20)}, 30),
    "v2 without memory.stat": (["0::/"], {"": {"memory.max": 50, "memory.current": 20}}, 30),
    "v2 beyond its limit": (["0::/"], {"": v2(50, 60)}, 0),
    "v2 without a limit": (["0::/"], {"": v2("max", 60)}, None),
    "v1": (["3:cpu:/x", "2:memory:/job", "1:name=systemd:/"], {"memory/job": v1(70, 30, 5)}, 45),
    "v1 in a container": (["2:memory:/docker/0123"], {"memory": v1(70, 30)}, 40),
    "v1, controllers together": (["2:cpuset,memory:/j"], {"memory/j": v1(70, 30)}, 40),
    "v1, nothing but the largest number": (["2:memory:/"], {"memory": v1(UNLIMITED_V1, 30)}, UNLIMITED_V1 - 30),
    "both": (["2:memory:/j", "0::/j"], {"memory/j": v1(70, 30), "unified/j": v2(20, 1)}, 19),
    "another controller": (["2:cpu:/j"], {"memory/j": v1(70, 30)}, None),
    "no such files": (["0::/"], {}, None),
}


@pytest.mark.parametrize("case", CASES)
def test_rest_of_the_tightest_group(tmp_path, case):
    lines, groups, expected = CASES[case]
    assert free_in_groups(machine(tmp_path, lines, groups)) == expected


def test_no_control_groups_at_all(tmp_path):
    assert free_in_groups(tmp_path) is None


@pytest.mark.parametrize(("allowed", "expected"), [(None, 1000), (10, 10), (10**9, 1000)])
def test_free_memory_is_what_machine_and_group_allow(monkeypatch, allowed, expected):
    import psutil

    class Machine:
        available = 1000

    monkeypatch.setattr(psutil, "virtual_memory", Machine)
    monkeypatch.setattr(memory, "free_in_groups", lambda: allowed)
    assert memory.free_memory(torch.device("cpu")) == expected
