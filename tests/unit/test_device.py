"""The CPU device layer against what the operating system says."""

from __future__ import annotations

import resource

import torch

from torchtitan_simplefsdp.titan.device import CpuDevice, get_peak_resident_bytes

MIB = 2**20


def test_peak_memory_grows_by_what_is_allocated_and_stays_when_it_is_freed():
    before = get_peak_resident_bytes()
    block = torch.ones(before // 4 + 200 * MIB)  # four bytes each: more than the whole process had
    grown = get_peak_resident_bytes()
    assert grown - before >= 200 * MIB
    del block
    slack = 4 * MIB  # the kernel counts per thread and adds up in batches of 64 pages
    assert get_peak_resident_bytes() >= grown - slack
    assert CpuDevice.memory_stats()["active_bytes.all.peak"] >= grown - slack


def test_peak_memory_agrees_with_getrusage():
    # getrusage may hold the peak of the parent that started this process, never less than ours
    assert get_peak_resident_bytes() <= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 * 1.01


def test_total_memory_holds_the_peak():
    assert get_peak_resident_bytes() < CpuDevice.get_device_properties().total_memory
    assert CpuDevice.get_device_name()
