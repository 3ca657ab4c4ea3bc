"""Streams belong to the device that asks for them, also when a model has moved."""

from __future__ import annotations

import pytest
import torch

from fsdp_passes.context import FsdpContext
from fsdp_passes.streams import Purpose, Streams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices in one process"),
]


def test_each_device_has_streams_of_its_own() -> None:
    streams, devices = Streams(), [torch.device("cuda", 0), torch.device("cuda", 1)]
    for purpose in Purpose:
        there = [streams.get(purpose, device) for device in devices]
        assert [stream.device for stream in there if stream is not None] == devices
        assert [streams.get(purpose, device) for device in devices] == there
    offloading = FsdpContext().offloading
    assert [offloading.stream_to_cpu(device).device for device in devices] == devices
