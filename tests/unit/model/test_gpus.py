"""A GPU for which this torch has no code is refused wherever a command takes a device; torch's answers are set."""

import pytest
import torch

from megatron_ddrp.commands.dry_run import dry_run
from megatron_ddrp.commands.planning import PresentDevice
from megatron_ddrp.config import Config
from megatron_ddrp.encoders.text_encoder import load_encoder
from megatron_ddrp.errors import UserError
from megatron_ddrp.model.fused import missing_code, named_device
from megatron_ddrp.parallel.process_group import own_device
from megatron_ddrp.tasks.jobs import device_of

CUDA_13 = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"


@pytest.fixture
def host(monkeypatch):
    """Return a function that sets the compute capability of each GPU, and what torch was built for."""

    def show(capabilities, built=CUDA_13):
        def capability(device):
            return capabilities[torch.device(device).index or 0]

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built.split())

    return show


@pytest.mark.parametrize(
    ("built", "capability", "runs"),
    [
        ("sm_70", (7, 0), True),
        (CUDA_13, (7, 0), False),
        (CUDA_13, (8, 9), True),  # by sm_80 and sm_86
        (CUDA_13, (12, 1), True),
        (CUDA_13, (11, 0), False),
        ("sm_86", (8, 0), False),
        ("sm_90", (10, 0), False),
        ("compute_70 sm_75", (12, 0), True),
        ("compute_80", (7, 5), False),
        ("sm_90a", (9, 0), True),
        ("compute_90a", (10, 0), False),
        ("sm_100a", (10, 3), False),
        ("sm_100f", (10, 3), True),
        ("compute_100f", (12, 0), False),
        ("", (7, 0), True),  # torch does not say
    ],
)
def test_code_runs_on_the_gpus_that_nvidia_says(host, built, capability, runs):
    host([capability], built)
    assert (missing_code(torch.device("cuda")) is None) == runs


TAKERS = [
    lambda: own_device(0),
    lambda: device_of(0),
    lambda: named_device(),
    lambda: named_device("cuda", "--device cuda"),
    lambda: load_encoder("nowhere"),
    lambda: load_encoder("nowhere", device="cuda:0"),
    lambda: PresentDevice(100),
]


@pytest.mark.parametrize("take", TAKERS)
def test_every_command_refuses_it_before_it_computes(host, take):
    host([(7, 0)])
    with pytest.raises(UserError) as error:
        take()
    built = CUDA_13.replace(" ", ", ")
    assert str(error.value) == (
        f"Tesla V100 has compute capability 7.0, and torch {torch.__version__} has code for {built} only: pip install "
        "torch==2.13.0+cu126 --index-url https://download.pytorch.org/whl/cu126, or set CUDA_VISIBLE_DEVICES= to use "
        "the CPU"
    )


def test_the_remedy_for_a_new_gpu_is_a_newer_build(host):
    host([(12, 0)], "sm_70 sm_90")
    with pytest.raises(UserError, match="code for sm_70, sm_90 only: pip install --upgrade torch, or set"):
        named_device()


@pytest.mark.parametrize(("capabilities", "agreed"), [([(7, 0), (7, 0)], True), ([(8, 0), (7, 0)], False)])
def test_one_rank_speaks_if_all_ranks_of_a_host_are_refused(host, capabilities, agreed):
    host(capabilities)
    with pytest.raises(UserError) as error:
        own_device(1)
    assert error.value.agreed == agreed


def test_a_dry_run_says_that_a_run_would_be_refused(host, capsys):
    host([(7, 0)])
    dry_run(Config().replace(model={"vocab_size": 100, "num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}))
    assert capsys.readouterr().out.startswith("warning: a run on this machine would be refused: Tesla V100 has compute")
