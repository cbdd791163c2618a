"""Exports of ours carry sums: what no reader could see, such as another weight, is one line."""

import json
import random

import pytest

from megatron_ddrp.conversion.families.contract import CARD, SUMS
from megatron_ddrp.conversion.to_huggingface import export_checkpoint
from megatron_ddrp.errors import UserError
from tests.unit.conversion.conftest import READERS, write_checkpoint


@pytest.fixture(params=["absolute", "ddrp"])
def export(tmp_path, tokenizer, request):
    run = write_checkpoint(tmp_path / "run", tokenizer, position_encoding=request.param)
    return export_checkpoint(run, tmp_path / "hf").output


def test_every_file_but_code_and_card_has_a_sum(export):
    files = json.loads((export / SUMS).read_text(encoding="utf-8"))["files"]
    assert {*files, SUMS, CARD} == {path.name for path in export.iterdir() if path.suffix != ".py"}


@pytest.mark.parametrize("reader", READERS)
def test_an_edited_card_is_no_damage(export, reader):
    (export / CARD).write_text("Trained by us.\n", encoding="utf-8")
    READERS[reader](export)
    (export / CARD).unlink()
    READERS[reader](export)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "vocab.txt", "tokenizer.json"])
@pytest.mark.parametrize("reader", READERS)
def test_a_flipped_bit_is_refused_by_every_reader(export, reader, name):
    content = bytearray((export / name).read_bytes())
    content[random.Random(name).randrange(len(content))] ^= 1
    (export / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name} has the CRC-32 .* damaged or changed since its export"):
        READERS[reader](export)


@pytest.mark.parametrize("content", ["{}", "[]", '{"files": {}}', '{"files": {"config.json": {"bytes": 1}}}', "{"])
def test_damaged_sums_are_refused(export, content):
    (export / SUMS).write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=SUMS):
        READERS["glue"](export)


def test_a_folder_without_sums_is_read_as_one_of_another_program(export):
    (export / SUMS).unlink()
    READERS["glue"](export)
