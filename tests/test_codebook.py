import pytest
import torch

from pwfn import Config, GaussianNetwork, PwfnError
from pwfn.fixing.codebook import merge_rare


def literal(values: list[float], max_size: int) -> list[float]:
    """The same with lists: every element looks at every value that is left."""
    weight = {c: float(values.count(c)) for c in values}
    while len(weight) > max_size:
        best = None
        for c in sorted(weight):
            heir = min((o for o in sorted(weight) if o != c), key=lambda o: abs(o - c))
            cost = weight[c] * (heir - c) ** 2
            if best is None or cost < best[0]:
                best = cost, c, heir
        _, leaving, heir = best
        weight[heir] += weight.pop(leaving)
    return [min(sorted(weight), key=lambda o: abs(o - v)) for v in values]


def test_by_hand():
    # Costs: 2 * 0.25, 1 * 0.0625, 2 * 0.0625, 1 * 0.0625; of the two cheapest the smaller goes.
    values = torch.tensor([0.0, 0.0, 0.5, 0.75, 0.75, 1.0])
    assert merge_rare(values, 3).tolist() == [0.0, 0.0, 0.75, 0.75, 0.75, 1.0]
    # Then 1.0, to 0.75; then 0.0, whose two cost 2 * 0.5625 against four times as much.
    assert merge_rare(values, 2).tolist() == [0.0, 0.0, 0.75, 0.75, 0.75, 0.75]
    assert merge_rare(values, 1).tolist() == [0.75] * 6
    assert values.tolist() == [0.0, 0.0, 0.5, 0.75, 0.75, 1.0]


def test_an_heir_may_go_in_its_turn_and_each_then_takes_what_is_nearest():
    # 0 goes to 1 and 1 to 2.5; 0 and 1 are left with 2.5, the nearest, and so is 4.
    values = torch.tensor([0.0, 1.0, 2.5, 4.0, *[2.5] * 9, *[9.0] * 50])
    assert merge_rare(values, 2).unique().tolist() == [2.5, 9.0]
    assert merge_rare(values, 2).tolist() == literal(values.tolist(), 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_agrees_with_the_literal_reading(dtype):
    generator = torch.Generator().manual_seed(0)
    for size, levels, max_size in ((1, 1, 1), (40, 7, 3), (200, 30, 12), (300, 100, 1), (300, 60, 59)):
        # Multiples of 1/64 squared: exact, with ties.
        codes = (torch.randn(size, generator=generator) * levels / 4).round()
        values = (codes * codes.abs() / 64).to(dtype)
        assert merge_rare(values, max_size).tolist() == literal(values.tolist(), max_size)


def test_few_values_stay_as_they_are_and_a_copy_is_given():
    values = torch.tensor([0.5, -0.5])
    same = merge_rare(values, 2)
    assert torch.equal(same, values)
    assert same.data_ptr() != values.data_ptr()
    assert merge_rare(torch.empty(0), 3).numel() == 0


@pytest.mark.parametrize("max_size", [0, -1, 1.5, "2"])
def test_bad_limits(max_size):
    with pytest.raises(PwfnError, match=f"max_size is {max_size!r}: allowed is a whole number"):
        merge_rare(torch.zeros(3), max_size)


def test_the_last_fixing_alone_limits_the_values():
    torch.manual_seed(0)
    model = torch.nn.Linear(40, 30)
    settings = {"posterior.init": "constant", "fixing.grid_exponent": 7}
    plain = GaussianNetwork(model, Config().override(settings))
    net = GaussianNetwork(model, Config().override({**settings, "fixing.max_codebook_size": 8}))
    for network in (plain, net):
        network.fix(0.9)
    assert torch.equal(net.mu, plain.mu)
    assert net.mu[net.fixed].unique().numel() > 8
    assert net.rounded().finish().codebooks[0].numel() == 8  # what a target looks at on the way, too
    for network in (plain, net):
        network.fix(1.0)
    assert torch.equal(net.mu, merge_rare(plain.mu, 8))
    assert net.mu.unique().numel() == 8
