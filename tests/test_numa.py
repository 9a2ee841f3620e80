"""Host memory lies on the NUMA node of its GPU, where there are several: topology, system call."""

from __future__ import annotations

import mmap
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from linux import policy_at, system_call
from training import assert_same, train

from torch_offload import OffloadConfig, host, numa
from torch_offload.host import HostStore
from torch_offload.numa import node_of, prefer

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
PAGE = mmap.PAGESIZE
MBIND, GET_MEMPOLICY = 237, 239
DEFAULT, PREFERRED, BIND, INTERLEAVE = 0, 1, 2, 3


@pytest.fixture
def gpu(monkeypatch) -> SimpleNamespace:
    """A GPU in PCI slot 0001:9a:03."""
    properties = SimpleNamespace(pci_domain_id=1, pci_bus_id=0x9A, pci_device_id=3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return properties


@pytest.fixture
def tree(tmp_path) -> Callable[..., Path]:
    """Makes a faked /sys."""

    def make(nodes: list[int], gpu_node: str | None, slot: str = "0001:9a:03.0") -> Path:
        folder = tmp_path / "sys/devices/system/node"
        folder.mkdir(parents=True)
        (folder / "online").write_text("0\n")
        for node in nodes:
            (folder / f"node{node}").mkdir()
        device = tmp_path / "sys/bus/pci/devices" / slot
        device.mkdir(parents=True)
        if gpu_node is not None:
            (device / "numa_node").write_text(f"{gpu_node}\n")
        return tmp_path

    return make


class Kernel:
    """Stands in for the system calls: notes them, and answers as it is told to."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, ...]] = []
        self.policy = DEFAULT
        self.result = {MBIND: 0, GET_MEMPOLICY: 0}

    def __call__(self, number: int, *values: object) -> int:
        if number == GET_MEMPOLICY:
            values[0]._obj.value = self.policy
        else:
            address, num_bytes, mode, mask, num_bits, flags = values
            assert num_bits == len(mask) * 64 + 1
            assert flags == 0
            nodes = [i for i in range(len(mask) * 64) if mask[i // 64] >> i % 64 & 1]
            self.calls.append((address, num_bytes, mode, *nodes))
        return self.result[number]


@pytest.fixture
def kernel(monkeypatch) -> Kernel:
    found = Kernel()
    monkeypatch.setattr(numa, "_syscall", lambda: found)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    return found


def test_the_node_of_the_gpu_among_several(gpu, tree):
    assert node_of(CUDA, tree([0, 1, 12], "12")) == 12


@pytest.mark.parametrize(
    ("nodes", "gpu_node"),
    [
        ([0], "0"),  # one node: nothing to choose
        ([0, 1], "-1"),  # the firmware does not say, as in many virtual machines
        ([0, 1], "2"),  # not there (any more)
        ([0, 1], "nonsense"),
        ([0, 1], None),
        ([], "0"),
    ],
)
def test_no_node_where_there_is_no_choice(gpu, tree, nodes, gpu_node):
    assert node_of(CUDA, tree(nodes, gpu_node)) is None


def test_no_node_without_a_tree_or_a_slot_in_it(gpu, tree, tmp_path):
    assert node_of(CUDA, tmp_path / "nowhere") is None
    assert node_of(CUDA, tree([0, 1], "1", slot="0000:9a:03.0")) is None


def test_no_node_for_other_devices(gpu, tree, monkeypatch):
    root = tree([0, 1], "1")
    assert node_of(CPU, root) is None
    assert node_of(torch.device("xpu", 0), root) is None
    assert node_of(torch.device("mps"), root) is None
    assert node_of(CUDA, root) == 1
    del gpu.pci_domain_id  # torch before 2.8
    assert node_of(CUDA, root) is None
    gpu.pci_domain_id = 1
    monkeypatch.setattr(torch.version, "hip", "6.3")
    assert node_of(CUDA, root) is None


@pytest.mark.parametrize("node", [0, 1, 63, 64, 130])
def test_the_call_names_the_range_and_the_node(kernel, node):
    assert prefer(2**40, 3 * PAGE, node)
    assert kernel.calls == [(2**40, 3 * PAGE, PREFERRED, node)]


@pytest.mark.parametrize("policy", [PREFERRED, BIND, INTERLEAVE])
def test_a_policy_of_the_user_stays(kernel, policy):
    kernel.policy = policy
    assert not prefer(2**40, PAGE, 1)
    assert kernel.calls == []


def test_a_system_that_refuses_is_no_error(kernel, monkeypatch):
    kernel.result[MBIND] = -1
    assert not prefer(2**40, PAGE, 1)
    kernel.result[GET_MEMPOLICY] = -1
    assert not prefer(2**40, PAGE, 1)
    assert len(kernel.calls) == 1
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    kernel.result = {MBIND: 0, GET_MEMPOLICY: 0}
    assert not prefer(2**40, PAGE, 1)
    assert len(kernel.calls) == 1


def test_no_system_call_on_other_systems(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert numa._syscall() is None
    assert not prefer(0, PAGE, 0)


@pytest.mark.parametrize(("machine", "number"), [("x86_64", 237), ("aarch64", 235)])
def test_the_number_is_that_of_the_machine(monkeypatch, machine, number):
    numbers = []

    def call(number: int, *values: object) -> int:
        numbers.append(number)
        return 0

    monkeypatch.setattr(numa, "_syscall", lambda: call)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert prefer(2**40, PAGE, 1)
    assert numbers[-1] == number


def test_a_store_asks_for_its_node_before_pages_are_touched(kernel, monkeypatch):
    monkeypatch.setattr(host, "node_of", lambda device: 1 if device == CPU else None)
    touched_at: list[int] = []
    real = host._Piece.touch

    def touch(piece: host._Piece, start: int, stop: int) -> None:
        touched_at.append(len(kernel.calls))
        real(piece, start, stop)

    monkeypatch.setattr(host._Piece, "touch", touch)
    blocks = HostStore(CPU, False, lambda: None).allocate([300 * 2**20, 64, 0])
    assert kernel.calls == [
        (blocks[0].address, 300 * 2**20, PREFERRED, 1),
        (blocks[1].address, 64, PREFERRED, 1),
    ]
    assert set(touched_at) == {2}


def test_training_makes_no_call_without_a_choice(kernel):
    plain = train(CPU, config=None)
    assert_same(plain, train(CPU, config=OffloadConfig(chunk_size=50_000)))
    assert kernel.calls == []


def test_training_is_exact_when_the_system_refuses(kernel, monkeypatch):
    monkeypatch.setattr(host, "node_of", lambda device: 1)
    kernel.result[MBIND] = -1
    plain = train(CPU, config=None)
    assert_same(plain, train(CPU, config=OffloadConfig(chunk_size=50_000)))
    assert kernel.calls


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
@pytest.mark.skipif(platform.machine() not in numa._CALLS, reason="call numbers are not known")
def test_the_kernel_takes_the_wish():
    plain, placed = host._Piece(64 * PAGE), host._Piece(64 * PAGE)
    mbind = numa._CALLS[platform.machine()][0]
    if system_call(mbind, placed.address, placed.num_bytes, DEFAULT, 0, 0, 0):
        pytest.skip("this system does not allow mbind")
    if policy_at(0) != (DEFAULT, 0):
        pytest.skip("this process has a NUMA policy of its own")
    assert policy_at(plain.address) == (DEFAULT, 0)
    assert prefer(placed.address, placed.num_bytes, 0)
    assert policy_at(placed.address) == (PREFERRED, 1)
    assert policy_at(placed.address + 63 * PAGE) == (PREFERRED, 1)
    placed.touch(0, placed.num_bytes)
    assert policy_at(plain.address) == (DEFAULT, 0)
    assert not prefer(placed.address, PAGE, 1000), "no such node"
