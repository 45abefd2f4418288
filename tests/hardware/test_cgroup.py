"""Limits of control groups, on trees laid out as kernels and container runtimes lay them out."""

import pytest

from easymp.hardware import cgroup, cpu

GIB = 2**30
V2 = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "31 23 0:27 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
V1 += "32 23 0:28 {root} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
OTHERS = "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw\n23 22 0:22 / /sys rw - sysfs sysfs rw\n"
NONE = 9223372036854771712  # version 1's way of saying none


@pytest.fixture
def tree(tmp_path):
    """Writes files below a root: ``tree({"proc/self/cgroup": "0::/"})`` returns the root."""

    def write(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
        return tmp_path

    return write


def v2(path, files, root="/"):
    inside = {f"sys/fs/cgroup/{name}".replace("//", "/"): text for name, text in files.items()}
    return {"proc/self/cgroup": f"0::{path}", "proc/self/mountinfo": OTHERS + V2.format(root=root), **inside}


def v1(path, files, root="/"):
    inside = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    groups = f"12:pids:{path}\n5:memory:{path}\n3:cpu,cpuacct:{path}\n1:name=systemd:/"
    return {"proc/self/cgroup": groups, "proc/self/mountinfo": OTHERS + V1.format(root=root), **inside}


def test_no_control_groups_no_limit(tree):
    root = tree({"proc/cpuinfo": ""})
    assert (cgroup.memory_limit(root), cgroup.cpu_quota(root)) == (None, None)


def test_v2_in_a_container(tree):
    root = tree(v2("/", {"memory.max": 4 * GIB, "cpu.max": "150000 100000"}))
    assert (cgroup.memory_limit(root), cgroup.cpu_quota(root)) == (4 * GIB, 1.5)


def test_v2_max_is_no_limit(tree):
    root = tree(v2("/a/b", {"a/memory.max": "max", "a/b/memory.max": "max", "a/b/cpu.max": "max 100000"}))
    assert (cgroup.memory_limit(root), cgroup.cpu_quota(root)) == (None, None)


def test_v2_an_ancestors_limit_counts(tree):
    files = {
        "slurm/memory.max": 8 * GIB,
        "slurm/job/memory.max": "max",
        "slurm/job/step/memory.max": 16 * GIB,
        "slurm/cpu.max": "200000 100000",
        "slurm/job/step/cpu.max": "800000 100000",
        "other/memory.max": GIB,
    }
    root = tree(v2("/slurm/job/step", files))
    assert (cgroup.memory_limit(root), cgroup.cpu_quota(root)) == (8 * GIB, 2.0)


@pytest.mark.parametrize(
    ("path", "inside"),
    [
        ("/docker/abc", "/docker/abc"),
        ("/../../docker/abc", "/"),
        ("/docker/abc", "/kubepods/pod1"),
        ("/", "/../.."),
    ],
)
def test_the_hosts_path_in_a_container_falls_back_on_the_mount(tree, path, inside):
    root = tree(v2(path, {"memory.max": 2 * GIB}, root=inside))
    assert cgroup.memory_limit(root) == 2 * GIB


def test_a_path_below_the_mounts_root(tree):
    root = tree(v2("/docker/abc/inner", {"inner/memory.max": GIB, "memory.max": 2 * GIB}, root="/docker/abc"))
    assert cgroup.memory_limit(root) == GIB


def test_v1(tree):
    files = {
        "memory/a/memory.limit_in_bytes": 3 * GIB,
        "memory/memory.limit_in_bytes": NONE,
        "cpu,cpuacct/a/cpu.cfs_quota_us": 350000,
        "cpu,cpuacct/a/cpu.cfs_period_us": 100000,
        "cpu,cpuacct/cpu.cfs_quota_us": -1,
        "cpu,cpuacct/cpu.cfs_period_us": 100000,
    }
    root = tree(v1("/a", files))
    assert (cgroup.memory_limit(root), cgroup.cpu_quota(root)) == (3 * GIB, 3.5)


def test_v1_without_limits(tree):
    root = tree(v1("/", {"memory/memory.limit_in_bytes": NONE, "cpu,cpuacct/cpu.cfs_quota_us": -1}))
    assert (cgroup.memory_limit(root), cgroup.cpu_quota(root)) == (NONE, None)


def test_v1_ancestors_beyond_the_mount_are_in_the_sum(tree):
    stat = f"cache 0\nrss 12\nhierarchical_memory_limit {GIB}\nhierarchical_memsw_limit {2 * GIB}"
    root = tree(v1("/", {"memory/memory.limit_in_bytes": NONE, "memory/memory.stat": stat}))
    assert cgroup.memory_limit(root) == GIB


def test_both_versions_at_once(tree):
    files = v1("/a", {"memory/a/memory.limit_in_bytes": 3 * GIB})
    files["proc/self/cgroup"] += "\n0::/b"
    files["proc/self/mountinfo"] += V2.format(root="/").replace("/sys/fs/cgroup ", "/sys/fs/cgroup/unified ")
    files["sys/fs/cgroup/unified/b/cpu.max"] = "100000 100000"
    root = tree(files)
    assert (cgroup.memory_limit(root), cgroup.cpu_quota(root)) == (3 * GIB, 1.0)


@pytest.mark.parametrize(
    ("allowed", "quota", "threads"),
    [(8, None, 8), (8, 4.0, 4), (8, 1.5, 1), (8, 0.25, 1), (2, 16.0, 2)],
)
def test_threads_that_can_really_run(allowed, quota, threads):
    assert cpu.threads(allowed, quota) == threads


def test_the_processors_memory_and_threads_obey_the_group(tree):
    here = cpu.probe()
    bound = cpu.probe(tree(v2("/", {"memory.max": 2**20, "cpu.max": "100000 100000"})))
    assert (bound.memory, bound.threads) == (2**20, 1)
    assert bound.cores == here.cores


def test_numa_nodes_with_processors_count(tree):
    nodes = "sys/devices/system/node"
    root = tree(
        {
            f"{nodes}/node0/cpulist": "0-3",
            f"{nodes}/node1/cpulist": "4-7",
            f"{nodes}/node2/cpulist": "",
            f"{nodes}/online": "0-2",
        }
    )
    assert cpu.numa_nodes(root) == 2


def test_no_numa_is_one_node(tree):
    assert cpu.numa_nodes(tree({"proc/cpuinfo": ""})) == 1
