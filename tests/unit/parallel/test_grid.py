"""Places and groups of ranks in a grid whose axes differ in size, and what ranks say to each other."""

import pytest
import torch
import torch.distributed as dist

from megatron_ddrp.config import ParallelConfig
from megatron_ddrp.errors import UserError
from megatron_ddrp.parallel import process_group
from megatron_ddrp.parallel.process_group import Ranks, agree, gather_rows, place_in_grid, row_counts

CPU = torch.device("cpu")


@pytest.fixture
def place(monkeypatch):
    """Return a function that places a rank of 12, with groups as their members; and the groups made by each rank."""
    made = []

    def placed(rank):
        made.append([])
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        monkeypatch.setattr(dist, "get_world_size", lambda: 12)
        monkeypatch.setattr(dist, "new_group", lambda row, **_: made[-1].append(row) or row)
        return place_in_grid(CPU, ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2))

    return placed, made


def test_a_rank_has_its_place_and_its_groups_on_each_axis(place):
    """Tensor-parallel ranks are neighbours, data-parallel ranks 2 apart, and stages of a pipeline 6 apart."""
    placed, made = place
    ranks = placed(9)
    places = ranks.pipeline_rank, ranks.pipeline_size, ranks.data_rank, ranks.data_size
    assert (*places, ranks.tensor_rank, ranks.tensor_size) == (1, 2, 1, 3, 1, 2)
    assert ranks.data_group == [7, 9, 11] and ranks.tensor_group == [8, 9]
    assert ranks.model_group == [2, 3, 8, 9] and ranks.pipeline_group == [3, 9]
    placed(2)
    assert made[0] == made[1], "all ranks create all groups in one order"


def test_rows_of_all_ranks_are_joined_without_padding(monkeypatch):
    """The longest part is neither the first nor the last."""
    parts = [torch.full((count, 2), float(rank)) for rank, count in enumerate((1, 3, 0, 2))]

    def gather(found, padded):
        assert padded.tolist() == [[3.0, 3.0]] * 2 + [[0.0, 0.0]]
        for place, own in zip(found, parts, strict=True):
            place.fill_(-1)
            place[: len(own)] = own

    monkeypatch.setattr(dist, "all_gather", gather)
    rows = torch.full((5, 2), 3.0)
    joined = gather_rows(rows, [1, 3, 0, 2], Ranks(3, 4, CPU))
    assert joined.tolist() == torch.cat(parts).tolist()


@pytest.mark.parametrize(("tensor_rank", "pipeline_rank", "counted"), [(0, 1, 7), (1, 1, 0), (0, 0, 0)])
def test_rows_of_a_sample_count_once(monkeypatch, tensor_rank, pipeline_rank, counted):
    monkeypatch.setattr(process_group, "sum_over_ranks", lambda counts: counts)
    own = {"tensor_rank": tensor_rank, "tensor_size": 2, "pipeline_rank": pipeline_rank, "pipeline_size": 2}
    assert row_counts(7, Ranks(1, 4, CPU, **own)).tolist() == [0, counted, 0, 0]


def test_of_several_errors_the_first_ranks_is_raised(monkeypatch):
    failures = [None, ("of rank 1", 2), ("of rank 2", 1)]
    monkeypatch.setattr(process_group, "gather_objects", lambda _: [("a", failure) for failure in failures])
    with pytest.raises(UserError, match="^of rank 1$") as caught:
        agree(lambda: None)
    assert caught.value.exit_code == 2
