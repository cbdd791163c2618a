"""Compile the Triton kernels of attention without a GPU, and list their registers, spills, memory and instructions.

    python benchmarks/kernels.py                     prints them, for sm_80 (A100) and sm_90 (H100, H200)
    python benchmarks/kernels.py --write             keeps them as the bounds that tests hold, in kernel_bounds.json
    python benchmarks/kernels.py --encodings ddrp --head-sizes 64 --compare 2
    python benchmarks/kernels.py --encodings t5 alibi --write
                                                     replaces the rows of these alone

Triton compiles for GPUs that are not there. The launches are those of a training step in bf16 with dropout 0.1, caught
where kernels are started, so that what is compiled is what is shipped: every kernel, its tile and its arguments.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import measure  # noqa: F401  (puts the repository on the import path)
import torch
from torch import Tensor, nn

from megatron_ddrp.config import ModelConfig, encoding_class
from megatron_ddrp.config.registry import ENCODINGS
from megatron_ddrp.model.attention.gpu import triton_attention
from megatron_ddrp.model.attention.logits import Attending

BOUNDS = Path(__file__).with_name("kernel_bounds.json")
TRITON = "3.9.0"
"""The version that made the bounds: others allot registers in their own way."""
CAPABILITIES = (80, 90)
HEAD_SIZES = (64, 128)
WINDOW = 64
PACKED: list[tuple[int, str, int, int | None]] = [(64, "rope", 0, WINDOW), (64, "ddrp", 2, WINDOW)]
PACKED += [(64, "deberta", 0, None), (64, "absolute", 0, None), (64, "ddrp", 0, None), (64, "ddrp", 2, None)]
"""Head size, encoding, heads in HCD and window of the layers that are compiled for packed rows too."""
SEQ = 512


class Launch(NamedTuple):
    """One start of a kernel."""

    kernel: Any
    arguments: tuple[Any, ...]
    constants: dict[str, Any]


@dataclass(frozen=True)
class Compiled:
    """The resources that a compiled kernel takes."""

    registers: int
    """Registers of a thread, at most 255."""
    spilled: int
    """Bytes of a thread's stack, for values that did not fit into registers."""
    shared: int
    """Bytes of shared memory of a program."""
    instruction: str
    """The instruction that multiplies matrices: "wgmma" (Hopper), "mma.sync" (Ampere), or "none"."""
    two_bytes: int
    """Loads and stores of two bytes from and to global memory: gathers, where neighbours should travel together."""
    per_pair: float
    """Instructions of a thread per pair of tokens, in the longest of the innermost loops; 0 without a loop."""


def launches(
    encoding: str, head_dim: int, compared: int, capability: int, window: int | None = None, packed: bool = False
) -> dict[str, Launch]:
    """Return the launches of one attention, forward and backward, by kernel; `compared` heads take part in HCD."""
    layout: Any = SimpleNamespace(full=not packed)
    config = ModelConfig(
        position_encoding=encoding, hidden_size=4 * head_dim, num_attention_heads=4, num_layers=1, seq_length=SEQ
    )
    module = encoding_class(encoding)(config)
    maps = [nn.Linear(config.hidden_size, config.hidden_size) for _ in range(2)]
    tensors = module.layer_part(config).of_layer(module(torch.arange(SEQ)[None]), *maps)
    terms = module.terms(config, tensors).by_offset
    found: dict[str, Launch] = {}

    def catch(kernel: Any, _: int, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        found[kernel.fn.__name__.removesuffix("_kernel")] = Launch(kernel, arguments, constants)

    def leaf(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16, device="meta").requires_grad_()

    with (
        mock.patch.object(triton_attention, "launch", catch),
        mock.patch.object(triton_attention, "why_not_triton", lambda *_: None),
        mock.patch.object(triton_attention, "capability_of", lambda _: (capability // 10, capability % 10)),
    ):
        query, key, value = (leaf(3, SEQ, 4, head_dim).transpose(1, 2) for _ in range(3))
        terms = terms.map(lambda x, _: leaf(*x.shape).requires_grad_(x.requires_grad))
        ids, heads = (torch.empty(*size, dtype=torch.long, device="meta") for size in ((3, SEQ), (compared,)))
        counted = torch.empty(3, 1, device="meta")
        attending = Attending(query, key, value, terms, ids, heads, 0.1, counted, layout, window)
        context, cosine = triton_attention.triton_attention(attending)
        (context.sum() + (0 if cosine is None else cosine)).backward()
    return found


def compile_launch(launch: Launch, capability: int) -> Compiled:
    """Compile a launch for a compute capability, 80 for 8.0, as Triton would at the first call there."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_source

    names = launch.kernel.arg_names
    given = dict(zip(names, launch.arguments, strict=False))
    constants = {name: value for name, value in launch.constants.items() if name in names}
    options = {name: value for name, value in launch.constants.items() if name not in names}
    parameters = {parameter.name: parameter for parameter in launch.kernel.params}
    free = {name for name, parameter in parameters.items() if parameter.do_not_specialize}
    unaligned = free | {name for name, parameter in parameters.items() if parameter.do_not_specialize_on_alignment}
    ones = {name: value for name, value in given.items() if type(value) is int and value == 1 and name not in free}
    constants |= {name: value for name, value in given.items() if value is None} | ones
    signature = {name: "constexpr" if name in constants else _type_of(given[name]) for name in names}
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name in names
        if name not in constants and name not in unaligned and _is_aligned(given[name])
    }
    source = ASTSource(launch.kernel, signature, constants, aligned)
    compiled = compile_source(source, target=GPUTarget("cuda", capability, 32), options=options)
    text, cubin = compiled.asm["ptx"], compiled.asm["cubin"]
    instruction = next((name for name in ("wgmma", "mma.sync") if name in text), "none")
    two_bytes = len(re.findall(r"(?:ld|st)\.global(?:\.\w+)*\.b16 ", text))
    registers, spilled, longest = _measure(cubin)
    pairs = constants.get("BLOCK_M", 1) * constants.get("BLOCK_N", 1) / (32 * options["num_warps"])  # of a thread
    return Compiled(registers, spilled, compiled.metadata.shared, instruction, two_bytes, round(longest / pairs, 1))


def _type_of(value: Any) -> str:
    """Return Triton's name for the type of an argument."""
    if isinstance(value, Tensor):
        return {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.long: "*i64", torch.int32: "*i32"}[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def _is_aligned(value: Any) -> bool:
    """Return whether Triton would see a multiple of 16: torch's allocations are, and so may numbers be."""
    return isinstance(value, Tensor) or (type(value) is int and value % 16 == 0)


def _measure(cubin: bytes) -> tuple[int, int, int]:
    """Return registers and stack bytes of a thread, and the instructions of the longest loop that contains no other."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", "--dump-sass", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    ((registers, spilled),) = re.findall(r"REG:(\d+) STACK:(\d+)", printed)
    jumps = re.findall(r"/\*([0-9a-f]{4,})\*/[^;]*\bBRA\b[^;]*0x([0-9a-f]+)", printed)  # instructions have 16 bytes
    loops = [(start, end) for end, start in ((int(a, 16), int(b, 16)) for a, b in jumps) if start < end]
    inner = [x for x in loops if not any(x != y and x[0] <= y[0] and y[1] <= x[1] for y in loops)]
    return int(registers), int(spilled), max(((end - start) // 16 + 1 for start, end in inner), default=0)


def cases(
    encodings: Sequence[str], head_sizes: Sequence[int], compared: Sequence[int]
) -> Iterator[tuple[str, int, Launch]]:
    """Yield (name, capability, launch) of every kernel of some encodings, equal ones once."""
    seen = set()
    whole = itertools.product(CAPABILITIES, head_sizes, encodings, compared, (None,), (False,))
    asked = [case for case in PACKED if case[0] in head_sizes and case[1] in encodings and case[2] in compared]
    of_packed = [(capability, *case, True) for case in asked for capability in CAPABILITIES]
    for capability, head_dim, encoding, count, window, packed in (*whole, *of_packed):
        for kernel, launch in launches(encoding, head_dim, count, capability, window, packed).items():
            kinds = [_type_of(value) if isinstance(value, Tensor) else value for value in launch.arguments]
            key = repr((capability, kernel, sorted(launch.constants.items()), kinds))
            if key not in seen:
                seen.add(key)
                rows = (" packed", " local")[window is not None] * packed
                kind = f"{encoding}{' hcd' * (count > 0)}{rows}"
                yield f"{kind}, {head_dim}, {kernel}, sm_{capability}", capability, launch


def write(table: dict[str, Compiled]) -> None:
    """Keep the rows in the file of bounds, one per line; a kernel that was not compiled now keeps its row."""
    kept = {name: Compiled(**row) for name, row in json.loads(BOUNDS.read_text(encoding="utf-8")).items()} | table
    shipped = [name for name, *_ in cases(list(ENCODINGS), HEAD_SIZES, (0, 2))]
    missing = [name for name in shipped if name not in kept]
    if missing:
        raise SystemExit(f"{len(missing)} kernels were never compiled, {missing[0]!r} the first: ask for them too")
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(asdict(kept[name]))}" for name in shipped)
    BOUNDS.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encodings", nargs="+", default=list(ENCODINGS), choices=ENCODINGS, help="default: all")
    parser.add_argument("--head-sizes", nargs="+", type=int, default=HEAD_SIZES, metavar="D", help="default: 64 128")
    parser.add_argument("--compare", type=int, nargs="+", default=[0, 2], metavar="M", help="default: 0 2 heads in HCD")
    parser.add_argument("--kernels", nargs="+", metavar="NAME", help="these alone, such as forward or key_gradient")
    parser.add_argument(
        "--tile", type=int, nargs="+", metavar="N", help="try another tile: Q K WARPS STAGES [REGISTERS]"
    )
    parser.add_argument("--write", action="store_true", help=f"keep the rows in {BOUNDS.name}")
    arguments = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)
    table: dict[str, Compiled] = {}
    for name, capability, launch in cases(arguments.encodings, arguments.head_sizes, arguments.compare):
        if arguments.kernels is None or name.split(", ")[2] in arguments.kernels:
            if arguments.tile:
                launch = launch._replace(
                    constants=launch.constants | triton_attention.Tile(*arguments.tile).of(launch.kernel)
                )
            table[name] = compile_launch(launch, capability)
            print(name, table[name], flush=True)
    if arguments.write:
        write(table)


if __name__ == "__main__":
    main()
