"""Shuffling: every document once, whole, in an order of its seed, and nothing under the final name before its time."""

import numpy as np
import pytest

from megatron_ddrp.config import Config
from megatron_ddrp.corpus import Corpus
from megatron_ddrp.data.dataset import merging
from megatron_ddrp.data.dataset.merging import shuffle
from megatron_ddrp.data.dataset.verification import verify
from megatron_ddrp.errors import UserError
from tests.datasets import write_dataset

MANIFEST = {"documents": 50, "json_key": "text", "partition": {"part": 1, "of": 2}, "inputs": [{"name": "a.jsonl"}]}


def source(folder, dtype=np.uint16, manifest=MANIFEST):
    """50 documents of 0 to 3 sequences of 0 to 6 ids."""
    draw = np.random.default_rng(0).integers
    documents = [[draw(0, 200, draw(0, 7)).tolist() for _ in range(draw(0, 4))] for _ in range(50)]
    return write_dataset(folder / "source", documents, dtype, manifest)


def documents_of(dataset):
    bounds = dataset.document_indices.tolist()
    return [tuple(tuple(dataset[i].tolist()) for i in range(a, b)) for a, b in zip(bounds, bounds[1:], strict=False)]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
def test_every_document_once_and_whole(tmp_path, dtype):
    dataset = source(tmp_path, dtype)
    read = []
    shuffled = shuffle(tmp_path / "mixed.bin", f"{dataset.prefix}.idx", 1, advance=read.append)
    before, after = documents_of(dataset), documents_of(shuffled)
    assert sorted(before) == sorted(after) and before != after
    assert shuffled.dtype == dtype and shuffled.prefix == str(tmp_path / "mixed")
    assert list(verify(shuffled.prefix)) == [] and not list(tmp_path.glob("*.unfinished"))
    assert sum(read) == 2 * dataset.bin_bytes  # once for the SHA-256


def test_the_order_is_the_seeds_and_does_not_depend_on_the_block(tmp_path, monkeypatch):
    dataset = source(tmp_path)
    orders = [documents_of(shuffle(tmp_path / f"mixed{seed}", dataset.prefix, seed)) for seed in (1, 2)]
    assert orders[0] != orders[1]
    monkeypatch.setattr(merging, "BLOCK", 7)
    shuffle(tmp_path / "again", dataset.prefix, 1)
    for suffix in ("bin", "idx", "json"):
        assert (tmp_path / f"again.{suffix}").read_bytes() == (tmp_path / f"mixed1.{suffix}").read_bytes()


def test_the_manifest_names_the_seed_and_no_part(tmp_path):
    found = shuffle(tmp_path / "mixed", source(tmp_path).prefix, 5).manifest
    assert found["shuffled"] == 5 and found["inputs"] == [{"name": "a.jsonl"}] and found["documents"] == 50
    assert "partition" not in found


def test_without_a_manifest_there_is_none_and_one_pass(tmp_path):
    dataset, read = source(tmp_path, manifest=None), []
    assert shuffle(tmp_path / "mixed", dataset.prefix, 1, advance=read.append).manifest is None
    assert sum(read) == dataset.bin_bytes


def test_an_output_is_replaced_only_when_asked_and_may_be_the_input(tmp_path):
    dataset = source(tmp_path)
    before = documents_of(dataset)
    with pytest.raises(UserError, match="source.bin: exists already; give --overwrite"):
        shuffle(dataset.prefix, dataset.prefix, 1)
    after = documents_of(shuffle(dataset.prefix, dataset.prefix, 1, overwrite=True))
    assert sorted(after) == sorted(before) and after != before
    assert list(verify(dataset.prefix)) == []


@pytest.mark.parametrize(("suffix", "place"), [(".bin", -1), (".idx", -8), (".idx", 40)])
def test_damage_gets_no_new_checksum(tmp_path, suffix, place):
    prefix = source(tmp_path).prefix
    data = bytearray((tmp_path / f"source{suffix}").read_bytes())
    data[place] ^= 1
    (tmp_path / f"source{suffix}").write_bytes(data)
    with pytest.raises(UserError, match=rf"source\{suffix}"):
        shuffle(tmp_path / "mixed", prefix, 1)
    assert list(tmp_path.glob("mixed*")) == []


def test_it_mends_validation_text_of_another_kind(prose_then_code, tmp_path):
    for prefix, count in ((prose_then_code, 1), (shuffle(tmp_path / "mixed", prose_then_code, 1234).prefix, 0)):
        config = Config().replace(data={"data_path": (prefix,)}, model={"seq_length": 48})  # vocabulary: the manifest's
        assert len(Corpus.open(config).split_remarks()) == count
