"""`layout_of`: where a micro-batch has its tokens, against a count token by token."""

import pytest
import torch

from megatron_ddrp.data.batches.batch import IGNORED_LABEL
from megatron_ddrp.model.stages import layout_of
from tests.unit.model.tiny import packed_batch, tiny_batch

PADDED = tiny_batch(lengths=(7, 4, 2))
FULL = tiny_batch(lengths=(7, 7))
PACKED = packed_batch(tiny_batch(lengths=(7, 4, 2, 3)), [[0], [1, 2], [3]])
PACKED_FULL = packed_batch(tiny_batch(lengths=(4, 3, 7)), [[0, 1], [2]])
NOTHING_TO_PREDICT = tiny_batch(predicted=0)
BATCHES = {"padded": PADDED, "full": FULL, "packed": PACKED, "packed without padding": PACKED_FULL}
BATCHES |= {"nothing to predict": NOTHING_TO_PREDICT}


def count(batch):
    """The runs of a document or of padding as lists of flat places, the predicted ones, and whether a row restarts."""
    runs, predicted, restarts = {}, [], False
    rows, seq = batch.input_ids.shape
    for row in range(rows):
        for column in range(seq):
            place = row * seq + column
            number, position = int(batch.document_ids[row, column]), int(batch.position_ids[row, column])
            runs.setdefault((row, number), []).append(place)
            if number:
                restarts = restarts or (position != column and position != 0)
            if batch.labels[row, column] != IGNORED_LABEL:
                predicted.append(place)
    return list(runs.values()), predicted, restarts


@pytest.mark.parametrize("name", BATCHES)
def test_the_layout_is_what_counting_gives(name):
    batch = BATCHES[name]
    layout = layout_of(batch)
    runs, predicted, restarts = count(batch)
    assert layout.predicted.tolist() == predicted
    borders = layout.runs.tolist()
    assert [list(range(begin, end)) for begin, end in zip(borders, borders[1:], strict=False)] == runs
    assert layout.runs.dtype == torch.int32 and layout.longest == max(map(len, runs))
    assert layout.full == (len(runs) == len(batch.labels) and bool(batch.document_ids.all()))
    assert layout.restarts == restarts
    seq = batch.input_ids.shape[1]
    asked = (layout.queries + seq * torch.arange(len(layout.queries))[:, None]).flatten()
    assert asked[layout.answers].tolist() == predicted
    assert layout.queries.shape[1] == max(
        sum(place // seq == row for place in predicted) for row in range(len(batch.labels))
    )


@pytest.mark.parametrize("name", BATCHES)
def test_arrays_and_tensors_have_one_layout(name):
    batch = BATCHES[name]
    for one, other in zip(layout_of(batch), layout_of(batch.map(torch.Tensor.numpy)), strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
