"""The NVIDIA probe over a driver that is not there, and CUDA_VISIBLE_DEVICES as CUDA reads it."""

import warnings

import pytest
import torch

from easymp.base import env
from easymp.hardware import nvidia
from easymp.hardware.nvidia import Card, visible

from .fakes import FakeCard, install, properties, pynvml
from .machines import MACHINES

GIB = 2**30
PAIR = [FakeCard(uuid="GPU-aaaa"), FakeCard(uuid="GPU-bbbb")]


@pytest.fixture(autouse=True)
def nothing_hidden():
    with env.override(CUDA_VISIBLE_DEVICES=None, CUDA_DEVICE_ORDER=None):
        yield


def test_nvml_answers_and_torch_is_not_asked(monkeypatch):
    recorded = MACHINES["H100"].devices[0]
    fake = pynvml([FakeCard(recorded.name, (9, 0), recorded.memory + 551 * 2**20, reserved=551 * 2**20)])
    install(monkeypatch, fake)
    found = nvidia.probe()
    assert found == ("nvidia", (recorded,), "", ())
    assert fake.open == 0  # shut down again
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize(
    ("p2p", "links"),
    [
        (lambda a, b, what: 0, "NVLink"),
        (lambda a, b, what: 0 if what == 0 else 5, "PCIe P2P"),
        (lambda a, b, what: 5, "PCIe"),
    ],
)
def test_links_between_two(monkeypatch, p2p, links):
    install(monkeypatch, pynvml(PAIR, p2p=p2p))
    assert nvidia.probe().links == links


def test_the_weakest_pair_names_the_links(monkeypatch):
    cards = [FakeCard(uuid=f"GPU-{i}") for i in range(4)]
    bridged = [{"GPU-0", "GPU-1"}, {"GPU-2", "GPU-3"}]  # NVLink bridges join pairs only
    install(
        monkeypatch,
        pynvml(cards, p2p=lambda a, b, what: 0 if what == 0 or {a.uuid, b.uuid} in bridged else 5),
    )
    assert nvidia.probe().links == "PCIe P2P"


@pytest.mark.parametrize(("text", "names"), [("1", ["b"]), ("GPU-bbbb,GPU-aaaa", ["b", "a"]), ("0", ["a"])])
def test_visible_devices_are_honoured_and_counted_anew(monkeypatch, text, names):
    cards = [FakeCard("a", uuid="GPU-aaaa"), FakeCard("b", uuid="GPU-bbbb")]
    install(monkeypatch, pynvml(cards))
    with env.override(CUDA_VISIBLE_DEVICES=text, CUDA_DEVICE_ORDER="PCI_BUS_ID"):
        devices = nvidia.probe().devices
    assert [device.name for device in devices] == names
    assert [device.index for device in devices] == list(range(len(names)))


def test_all_hidden(monkeypatch):
    install(monkeypatch, pynvml(PAIR))
    with env.override(CUDA_VISIBLE_DEVICES=""):
        assert nvidia.probe().missing == ("no NVIDIA GPU: CUDA_VISIBLE_DEVICES='' shows none of the 2 here",)


def test_a_mig_instance(monkeypatch):
    part = FakeCard("NVIDIA A100-SXM4-80GB MIG 1g.10gb", memory=10 * GIB, uuid="MIG-1234")
    install(
        monkeypatch,
        pynvml([FakeCard(mig=True, instances=[part], uuid="GPU-1"), FakeCard(mig=False, uuid="GPU-2")]),
    )
    (device,) = nvidia.probe().devices
    assert (device.name, device.memory, device.capability, device.index) == (part.name, 10 * GIB, (8, 0), 0)


def test_a_driver_too_old_for_this_torch(monkeypatch):
    install(monkeypatch, pynvml(PAIR, cuda=12040))
    found = nvidia.probe()
    assert not found.devices
    assert "runs CUDA 12.4" in found.missing[0] and "install torch built for CUDA 12" in found.missing[0]


def test_a_card_this_torch_has_no_code_for(monkeypatch):
    install(monkeypatch, pynvml([FakeCard("NVIDIA GeForce GTX 1080", (6, 1))]))
    found = nvidia.probe()
    assert not found.devices[0].built_for
    assert len(found.missing) == 1 and "sm_61" in found.missing[0] and "cu126" in found.missing[0]


def by_torch(monkeypatch, cards, peers=True):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(cards))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties(cards))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: peers)


@pytest.mark.parametrize("fails", [None, {"nvmlInit"}, {"nvmlDeviceGetName"}, {"nvmlDeviceGetMemoryInfo"}])
@pytest.mark.parametrize(("peers", "links"), [(True, "P2P"), (False, "PCIe")])
def test_torch_is_asked_where_nvml_is_silent(monkeypatch, fails, peers, links):
    fake = None if fails is None else pynvml(PAIR, fails=fails)
    install(monkeypatch, fake)
    by_torch(monkeypatch, PAIR, peers)
    found = nvidia.probe()
    assert [device.architecture for device in found.devices] == ["sm_80", "sm_80"]
    assert found.links == links
    assert fake is None or fake.open == 0


def test_only_cuda_knows_the_order_of_unlike_cards(monkeypatch):
    cards = [FakeCard("T4", (7, 5), uuid="GPU-slow"), FakeCard("A100", (8, 0), uuid="GPU-fast")]
    install(monkeypatch, pynvml(cards))
    by_torch(monkeypatch, cards[::-1])
    assert [device.name for device in nvidia.probe().devices] == ["A100", "T4"]
    with env.override(CUDA_DEVICE_ORDER="PCI_BUS_ID"):
        assert [device.name for device in nvidia.probe().devices] == ["T4", "A100"]


def test_torchs_own_reason_is_quoted(monkeypatch):
    install(monkeypatch, None)

    def is_available():
        warnings.warn(
            "CUDA initialization: Found no NVIDIA driver on your system. (Triggered internally at x.cpp:1.)",
            stacklevel=1,
        )

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    assert nvidia.probe().missing == (
        "no NVIDIA GPU: CUDA initialization: Found no NVIDIA driver on your system",
    )
    with env.override(CUDA_VISIBLE_DEVICES="3"):
        assert "(CUDA_VISIBLE_DEVICES='3')" in nvidia.probe().missing[0]


def test_a_torch_without_cuda_beside_a_driver(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "is built without CUDA" in nvidia.probe(tmp_path).missing[0]
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").touch()
    assert "install the CUDA build of torch" in nvidia.probe(tmp_path).missing[0]


# -- which cards are visible ---------------------------------------------------------------------------------------------

CARDS = tuple(Card(i, f"GPU-{x}{x}{x}{x}-{i}", f"card {i}", (8, 0), 1) for i, x in enumerate("abc"))
INSTANCES = tuple(Card(f"1.{i}", f"MIG-{i}{i}{i}{i}", "slice", (8, 0), 1) for i in range(2))
DIVIDED = Card(1, "GPU-dddd-1", "card 1", (8, 0), 8, None, True, INSTANCES)


@pytest.mark.parametrize(
    ("text", "indices"),
    [
        (None, [0, 1, 2]),
        ("0,1,2", [0, 1, 2]),
        ("2,0", [2, 0]),
        ("1", [1]),
        (" 1 , 2 ", [1, 2]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0,-1,2", [0]),
        ("0,7,1", [0]),
        ("1,1", []),
        ("1gpu,2ampere", [1, 2]),
        ("GPU-bbbb-1", [1]),
        ("GPU-cccc,GPU-aaaa", [2, 0]),
        ("GPU-", []),  # fits all of them
        ("GPU-zzzz", []),
        ("GPU-bbbb,GPU-bbbb-1", []),
    ],
)
def test_whole_cards(text, indices):
    with env.override(CUDA_VISIBLE_DEVICES=text):
        assert [card.handle for card in visible(CARDS)] == indices


@pytest.mark.parametrize(
    ("text", "handles"),
    [
        (None, ["1.0"]),  # one instance, and no whole card beside it
        ("0", [0]),
        ("1", ["1.0"]),
        ("0,1", ["1.0"]),
        ("MIG-1111", ["1.1"]),
        ("MIG-0000,MIG-1111", ["1.0"]),
        ("GPU-dddd-1", ["1.0"]),
        ("MIG-9999", []),
    ],
)
def test_divided_cards(text, handles):
    with env.override(CUDA_VISIBLE_DEVICES=text):
        assert [card.handle for card in visible((CARDS[0], DIVIDED))] == handles


def test_a_card_to_be_divided_that_has_no_instance_is_not_there():
    empty = Card(0, "GPU-eeee", "card", (9, 0), 1, None, True)
    assert visible((empty, CARDS[1])) == (CARDS[1],)
