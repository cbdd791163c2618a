"""Maps that share an input: the gradients of plain linear maps, one exchange for all, behind the weights' products."""

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ddrp.parallel.pipeline import Entrance, column_map, column_maps

PRODUCTS = ("mm", "addmm_", "addmm")


class Order(TorchDispatchMode):
    """Notes matrix products, and what is noted by hand."""

    def __init__(self):
        super().__init__()
        self.events = []

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        name = function.overloadpacket.__name__
        if name in PRODUCTS:
            self.events.append(name)
        return function(*arguments, **(named or {}))


def noting(events):
    """An entrance of one rank, whose exchange doubles the gradient at the end."""

    def back(gradient):
        events.append("start")

        def wait():
            events.append("wait")
            return gradient * 2

        return wait

    return Entrance(lambda x: x.view_as(x), back)


def some_maps(count):
    torch.manual_seed(0)
    return [nn.Linear(5, out, bias=out != 4).double() for out in range(3, 3 + count)]


def test_gradients_are_those_of_linear_maps_and_the_inputs_passes_the_exchange():
    maps, x = some_maps(3), torch.randn(2, 4, 5, dtype=torch.double, requires_grad=True)
    parameters = [parameter for each in maps for parameter in each.parameters()]
    targets = [torch.randn(2, 4, each.out_features, dtype=torch.double) for each in maps]

    def gradients(outputs):
        loss = sum((output * target).sum() for output, target in zip(outputs, targets, strict=True))
        return torch.autograd.grad(loss, [x, *parameters])

    of_input, *expected = gradients([each(x) for each in maps])
    exchanged, *own = gradients(column_maps(x, noting([]), maps))
    torch.testing.assert_close(exchanged, 2 * of_input)
    torch.testing.assert_close(own, expected)


def test_one_exchange_runs_while_all_weight_gradients_are_computed():
    maps, x = some_maps(3), torch.randn(4, 5, dtype=torch.double, requires_grad=True)
    order = Order()
    loss = sum(output.sum() for output in column_maps(x, noting(order.events), maps))
    with order:
        loss.backward()
    assert order.events == ["mm", "addmm_", "addmm_", "start", "mm", "mm", "mm", "wait"]


def test_an_output_that_nobody_reads_adds_nothing():
    maps, x = some_maps(2), torch.randn(4, 5, dtype=torch.double, requires_grad=True)
    column_maps(x, noting([]), maps)[1].sum().backward()
    torch.testing.assert_close(x.grad, 2 * maps[1].weight.sum(0).expand(4, 5).detach())
    assert not maps[0].weight.grad.any()


def test_a_map_without_its_bias():
    each, x = some_maps(1)[0], torch.randn(4, 5, dtype=torch.double, requires_grad=True)
    torch.testing.assert_close(column_map(x, noting([]), each.weight, None), x @ each.weight.T)


def test_weights_that_zero_3_takes_apart_are_used_by_their_modules():
    maps, x = some_maps(2), torch.randn(4, 5, dtype=torch.double, requires_grad=True)
    called = []
    for each in maps:
        each.weight.ds_id = 0
        each.register_forward_hook(lambda *_: called.append(1))
    sum(output.sum() for output in column_maps(x, noting([]), maps)).backward()
    assert len(called) == 2
    torch.testing.assert_close(x.grad, 2 * sum(each.weight.sum(0) for each in maps).expand(4, 5).detach())
