"""Lines that a run prints about its device."""

import pytest
import torch

from megatron_ddrp.run.device import unused_devices


@pytest.mark.parametrize(("devices", "ranks", "says"), [(8, 1, True), (8, 8, False), (1, 1, False), (0, 1, False)])
def test_one_process_beside_several_gpus_is_told_how_to_use_them(
    devices: int, ranks: int, says: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    lines = unused_devices(ranks)
    assert bool(lines) is says
    assert not lines or lines[0].startswith("1 of 8 GPUs used; to use all: deepspeed --module megatron_ddrp pretrain")
