"""strict=True: ranks compare the shapes of tensors, not only their element counts."""

import pytest
import thinwire
import torch
from ranks import run
from thinwire.torch import GradientExchange, all_gather_into_tensor, all_reduce

WORDS = r"has \d+ elements of f32 in the shape \d+x\d+, .*has \d+ elements of f32 in the shape"


def tensor_of(rank: int, width: int) -> torch.Tensor:
    """Return a tensor with the same number of elements on both ranks, in different shapes."""
    return torch.ones((2, width) if rank == 0 else (width, 2))


def call(how: str, rank: int, strict: bool) -> None:
    if how == "reduce":
        GradientExchange(strict=strict).reduce({"x": tensor_of(rank, 500)})
    elif how == "gather":
        source = tensor_of(rank, 500)
        all_gather_into_tensor(torch.zeros(2000), source)  # reads the environment
    else:
        width = 100_000 if how == "large" else 500
        name = None if how == "unnamed" else "x"
        all_reduce(tensor_of(rank, width), name=name, strict=strict)


def other_shape(rank: int, how: str, strict: bool):
    if not strict:
        return call(how, rank, strict)
    with pytest.raises(thinwire.MismatchError, match=WORDS) as caught:
        call(how, rank, strict)
    return str(caught.value)


@pytest.mark.parametrize("how", ["small", "large", "unnamed", "reduce", "gather"])
def test_another_shape_is_a_mismatch_that_names_both(how):
    environment = {"THINWIRE_STRICT": "1", "THINWIRE_TIMEOUT_S": "20"}
    for message in run(other_shape, how, True, environment=environment):
        width = 100_000 if how == "large" else 500
        assert f"2x{width}" in message and f"{width}x2" in message


def all_alike(rank: int):
    """Reduce with and without strict, including empty and scalar tensors."""
    results = []
    for strict in (True, False):
        for shape in ((), (0,), (3, 5), (300, 500)):
            x = torch.full(shape, float(rank))
            all_reduce(x, strict=strict)
            results.append(torch.allclose(x, torch.ones(shape), rtol=0.01))
    return results


def test_equal_shapes_go_as_without_it():
    assert run(all_alike) == [[True] * 8] * 2


def test_without_it_only_counts_are_compared():
    assert run(other_shape, "small", False) == [None, None]
