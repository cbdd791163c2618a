"""Packed files of several streams: read whole or refused, as `gzip -t`, `xz -t`, `bzip2 -t` and `zstd -t` judge."""

import bz2
import gzip
import lzma
import os
import shutil
import subprocess
import threading
import tracemalloc
import zlib

import pytest
import zstandard

from megatron_ddrp.data.preprocess.documents import iter_documents
from megatron_ddrp.data.preprocess.inputs import InputFile, OpenInput, find_inputs
from megatron_ddrp.errors import UserError
from megatron_ddrp.tasks.finetune.table_files import read_rows

PACK = {
    ".gz": lambda data: gzip.compress(data, mtime=0),
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}
TOOLS = {".gz": "gzip", ".xz": "xz", ".bz2": "bzip2", ".zst": "zstd"}
RED, BLUE = (f'{{"text": "{word}", "n": 1}}\n'.encode() for word in ("red", "blue"))
BOTH = RED + BLUE


def skippable(size):
    return b"\x50\x2a\x4d\x18" + size.to_bytes(4, "little") + b"x" * size


def cases(packing):
    """Return name of a case → (content of the file, text; None where the file is refused)."""
    pack = PACK[packing]
    red, blue, empty = pack(RED), pack(BLUE), pack(b"")
    is_gzip, is_xz, is_zstd = packing == ".gz", packing == ".xz", packing == ".zst"
    found = {
        "one": (red, RED),
        "two": (red + blue, BOTH),
        "many": (pack(b"") + b"".join(pack(BOTH[i : i + 1]) for i in range(len(BOTH))), BOTH),
        "empty first": (empty + red, RED),
        "empty between": (red + empty + empty + blue, BOTH),
        "empty last": (red + blue + empty, BOTH),
        "empty alone": (empty, b""),
        "nothing": (b"", None),
        "zeros first": (b"\0" * 4 + red, None),
        "zeros alone": (b"\0" * 512, None),
        "letters first": (b"text" + red, None),
        "a newline behind": (red + b"\n", None),
        "letters behind": (red + blue + b"trailing garbage", None),
        "letters between": (red + b"text" + blue, None),
        "another format behind": (red + PACK[".gz" if packing != ".gz" else ".xz"](BLUE), None),
        "zeros and letters behind": (red + b"\0" * 8 + b"text", None),
    }
    for zeros in (1, 3, 4, 5, 8, 512, 20_000):
        allowed = is_gzip or (is_xz and zeros % 4 == 0)
        found[f"{zeros} zeros behind"] = (red + blue + b"\0" * zeros, BOTH if allowed else None)
        found[f"{zeros} zeros between"] = (red + b"\0" * zeros + blue, BOTH if allowed else None)
    found |= {f"cut {size} bytes into the second": (red + blue[:size], None) for size in (1, 2, 5, 9, len(blue) - 1)}
    if is_xz:
        alone = lzma.compress(BOTH, lzma.FORMAT_ALONE)
        found["of the older format"] = (alone, BOTH)
        found["zeros behind the older format"] = (alone + b"\0" * 4, None)
        found["two of the older format"] = (alone + alone, None)
        found["the older format behind"] = (red + alone, None)
        found["zeros between three"] = (red + b"\0" * 4 + empty + b"\0" * 8 + blue + b"\0" * 4, BOTH)
        found["without a check"] = (lzma.compress(BOTH, check=lzma.CHECK_NONE), BOTH)
        found["a check of unknown kind"] = (with_unknown_check(BOTH), None)
    if is_zstd:
        found["a skippable frame first"] = (skippable(4) + red + blue, BOTH)
        found["skippable frames between"] = (red + skippable(0) + skippable(10_000) + blue, BOTH)
        found["a skippable frame last"] = (red + blue + skippable(9), BOTH)
        found["a cut skippable frame"] = (red + blue + skippable(9)[:-1], None)
        found["skippable frames alone"] = (skippable(9) * 2, b"")
    return found


def with_unknown_check(data):
    """Return a sound .xz file whose check has the number 2, which no program knows; it is as long as CRC32's."""
    packed = bytearray(lzma.compress(data, check=lzma.CHECK_CRC32))
    packed[7] = packed[-3] = 2
    packed[8:12] = zlib.crc32(packed[6:8]).to_bytes(4, "little")
    packed[-12:-8] = zlib.crc32(packed[-8:-2]).to_bytes(4, "little")
    return bytes(packed)


def unpacked(path):
    with OpenInput(InputFile(str(path), path.name)) as opened:
        data = b"".join(iter(lambda: opened.read(1 << 20), b""))
        assert opened.manifest_entry()["bytes"] == opened.bytes_read
    return data


EVERY = [(packing, name) for packing in PACK for name in cases(packing)]


@pytest.mark.parametrize(("packing", "name"), EVERY)
def test_a_packed_file_is_read_whole_or_refused(tmp_path, packing, name):
    content, text = cases(packing)[name]
    path = tmp_path / f"a.jsonl{packing}"
    path.write_bytes(content)
    if text is None:
        for read in (unpacked, lambda path: list(read_rows(str(path)))):
            with pytest.raises(UserError, match=r"a\.jsonl\.\w+: damaged or cut off after \d+ bytes \(.*\); copy it"):
                read(path)
    else:
        assert unpacked(path) == text
        rows = [row.cells["text"] for row in read_rows(str(path))] if text else []
        assert rows == ["red", "blue"][: text.count(b"\n")]


LENIENT = {
    ".gz": {f"{zeros} zeros between" for zeros in (1, 3, 4, 5, 8, 512, 20_000)},  # gzip ignores the rest, with exit 2
    ".bz2": {name for name in cases(".bz2") if name.endswith(("behind", "between")) and not name.startswith("empty")},
    ".zst": {"another format behind"},  # zstd reads these formats too
}
"""Packing → cases in which we differ from the tool: gzip and bzip2 leave bytes out with a warning."""


@pytest.mark.parametrize("packing", PACK)
def test_the_formats_own_tool_judges_alike(tmp_path, packing):
    if not shutil.which(TOOLS[packing]):
        pytest.skip(f"{TOOLS[packing]} is not installed")
    path = tmp_path / f"a{packing}"
    judged = {}
    for name, (content, text) in cases(packing).items():
        path.write_bytes(content)
        done = subprocess.run([TOOLS[packing], "-t", str(path)], capture_output=True, timeout=60)
        judged[name] = (done.returncode == 0, text is not None)
    assert {name for name, (sound, read) in judged.items() if sound != read} <= LENIENT.get(packing, set())


@pytest.mark.parametrize("packing", PACK)
def test_no_flipped_bit_and_no_cut_shortens_a_file_in_silence(tmp_path, packing):
    """Every bit of the later stream, its head included, and every length."""
    red, blue = PACK[packing](RED), PACK[packing](BLUE)
    path = tmp_path / f"a{packing}"

    def read(content):
        path.write_bytes(content)
        try:
            return unpacked(path)
        except UserError:
            return None

    for bit in range(8 * len(blue)):
        harmed = bytearray(blue)
        harmed[bit // 8] ^= 1 << bit % 8
        assert read(red + harmed) in (None, BOTH), f"bit {bit}"
    for size in range(1, len(blue)):
        assert read(red + blue[:size]) is None, f"{size} bytes"


@pytest.mark.parametrize("packing", PACK)
@pytest.mark.parametrize("step", [1, 7, 1 << 20])
def test_a_pipe_is_read_alike_however_it_is_written(tmp_path, packing, step):
    """Its first write may be shorter than the bytes by which the packing is known."""
    path = tmp_path / "pipe"
    found = cases(packing)
    several = {name: found[name] for name in ("two", "empty between", "8 zeros between", "letters behind")}
    several |= {name: case for name, case in found.items() if "skippable frame first" in name or name.startswith("cut")}
    os.mkfifo(path)
    for name, (content, text) in several.items():

        def write(content=content):
            with open(path, "wb", buffering=0) as pipe:
                for start in range(0, len(content), step):
                    pipe.write(content[start : start + step])

        writer = threading.Thread(target=write)
        writer.start()
        try:
            read = [text for (text,) in iter_documents([str(path)])]
        except UserError:
            read = None
        writer.join()
        assert read == (None if text is None else ["red", "blue"]), name


@pytest.mark.parametrize("packing", PACK)
def test_memory_stays_bounded_where_little_unpacks_to_much(tmp_path, packing):
    path = tmp_path / f"a{packing}"
    streams, limit = (6, 300 << 20) if packing == ".zst" else (2, 16 << 20)
    path.write_bytes(PACK[packing](bytes(64 << 20)) * streams)
    with OpenInput(InputFile(str(path), path.name)) as opened:
        tracemalloc.start()
        try:
            size = sum(map(len, iter(lambda: opened.read(1 << 20), b"")))
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert size == streams * 64 << 20 and most < limit


def test_a_damaged_packed_file_of_a_folder_is_not_left_out(tmp_path):
    """A file without a further ending is recognised by its text, which a damaged file hides."""
    (tmp_path / "wiki_00.bz2").write_bytes(bz2.compress(b'<doc id="1" url="u" title="A">\nA\n</doc>\n'))
    assert [file.name for file in find_inputs([str(tmp_path)])] == ["wiki_00.bz2"]
    (tmp_path / "wiki_01.bz2").write_bytes(bz2.compress(b'<doc id="1" url="u" title="A">\nB\n</doc>\n')[3:])
    with pytest.raises(UserError, match=r"wiki_01\.bz2: damaged or cut off after"):
        find_inputs([str(tmp_path)])
