"""A manifest that is not as it was written is refused; one of an earlier version has no sum and passes."""

import json

import pytest

from megatron_ddrp.data.atomic import SUM
from megatron_ddrp.data.dataset.indexed_dataset import read_manifest
from megatron_ddrp.errors import UserError
from tests.datasets import write_dataset


@pytest.fixture
def prefix(tmp_path):
    manifest = {"tokens": 2, "inputs": [("a.txt", 7)], "tokenizer": {"vocab_size": 9}}
    write_dataset(tmp_path / "p", [[[1, 2]]], manifest=manifest)
    return tmp_path / "p"


def test_what_was_written_is_read(prefix):
    manifest = read_manifest(prefix)
    assert {name: manifest[name] for name in ("tokens", "inputs")} == {"tokens": 2, "inputs": [["a.txt", 7]]}
    assert SUM not in manifest


@pytest.mark.parametrize("change", [{"tokens": 3}, {"inputs": []}, {"tokenizer": {}}, {"more": 1}, {SUM: 5}])
def test_an_edited_manifest_is_refused(prefix, change):
    path = prefix.with_suffix(".json")
    written = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(written | change), encoding="utf-8")
    with pytest.raises(UserError, match="damaged or edited"):
        read_manifest(prefix)
    del written[SUM]
    path.write_text(json.dumps(written | {"tokens": 3}), encoding="utf-8")
    assert read_manifest(prefix)["tokens"] == 3
