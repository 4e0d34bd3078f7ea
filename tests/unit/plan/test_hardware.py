"""The data file is sound, names are found or corrected, and a user's file adds to it."""

from __future__ import annotations

import pytest

from polyturn.errors import ConfigError
from polyturn.plan.hardware import load_hardware

MINE = """
date: "2026-11-01"
gpus:
  mine: {label_gib: 10, usable_mib: 9000, bf16_tflops: 10, bandwidth_gb_s: 100}
instances:
  box: {gpu: mine, count: 2}
  g5.2xlarge: {gpu: mine, count: 3, price: 9.5}
"""


def test_a_card_has_less_than_its_label():
    for name, gpu in load_hardware().gpus.items():
        assert 0.9 * gpu.label_gib * 1024 < gpu.usable_mib <= gpu.label_gib * 1024, name


def test_an_instance_has_gpus_and_a_price_with_its_day():
    machine = load_hardware().machine("p4d.24xlarge")
    assert (machine.gpu_name, machine.count, machine.nvlink) == ("a100-40gb", 8, True)
    assert (machine.price, machine.price_date) == (21.96, "2026-01-21")


def test_a_sagemaker_instance_has_the_price_of_sagemaker():
    assert load_hardware().machine("ml.p4d.24xlarge").price == 25.25


def test_no_list_price_has_no_day():
    machine = load_hardware().machine("p5e.48xlarge")
    assert machine.price is None
    assert machine.price_date is None


def test_several_machines_are_priced_and_counted_together():
    machine = load_hardware().machine("p4d.24xlarge").times(3)
    assert (machine.total, machine.nodes, machine.price) == (24, 3, 21.96)
    assert machine.total_price == pytest.approx(65.88)
    assert load_hardware().gpus_alone("a10g", 2).times(2).total_price is None


@pytest.mark.parametrize("nodes", [0, -1, 10**6])
def test_absurd_numbers_of_machines(nodes):
    with pytest.raises(ConfigError, match="from 1 to 1,024"):
        load_hardware().machine("p4d.24xlarge").times(nodes)


def test_every_instance_has_a_memory_of_its_own():
    hardware = load_hardware()
    for name, instance in hardware.instances.items():
        assert instance.ram_gib is not None, name
        assert instance.ram_gib > hardware.gpus[instance.gpu].label_gib, name


def test_gpus_alone_have_no_price():
    machine = load_hardware().gpus_alone("a10g", 3)
    assert (machine.count, machine.price, machine.nvlink) == (3, None, None)


@pytest.mark.parametrize(
    ("kind", "name", "meant"),
    [
        ("gpu", "a100-40g", "a100-40gb"),
        ("machine", "ml.p4d.24xlarg", "ml.p4d.24xlarge"),
        ("machine", "p4d.24xlarg", "p4d.24xlarge"),
    ],
)
def test_an_unknown_name_gets_the_nearest(kind, name, meant):
    with pytest.raises(ConfigError, match=f"is not known; did you mean {meant}\\?"):
        getattr(load_hardware(), kind)(name)


@pytest.mark.parametrize("count", [0, -1, 10**9])
def test_absurd_counts(count):
    with pytest.raises(ConfigError, match="from 1 to 1,024"):
        load_hardware().gpus_alone("a10g", count)


def test_a_file_of_ones_own(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(MINE, encoding="utf-8")
    hardware = load_hardware(path)
    assert hardware.machine("box").gpu.usable_bytes == 9000 * 1024 * 1024
    replaced = hardware.machine("g5.2xlarge")
    assert (replaced.count, replaced.price, replaced.price_date) == (3, 9.5, "2026-11-01")
    assert hardware.machine("g5.12xlarge").count == 4


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (MINE.replace("usable_mib: 9000", "usable_mib: -1"), r"gpus\.mine\.usable_mib: .* \(found -1\)"),
        (MINE.replace("box: {gpu: mine", "box: {gpu: a10"), r"instances\.box\.gpu=a10 is no known GPU; did you mean a10g\?"),
        (MINE.replace('date: "2026-11-01"', ""), "date: field required"),
        (MINE.replace("count: 2", "cuont: 2"), r"instances\.box\.(count|cuont)"),
        ("gpus: [", r"mine\.yaml:\d+: "),
        ("", "the file: "),
    ],
)
def test_a_bad_file_is_one_sentence(tmp_path, text, sentence):
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=sentence) as caught:
        load_hardware(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="can't be read"):
        load_hardware(tmp_path / "none.yaml")
