"""Lightning's strategies pass the warm-up options on to compress()."""

import itertools
from pathlib import Path

import pytest
from lightning_warm_up import WARM_UP
from mixed_precision import BATCHES, WIDTH
from test_mixed_precision import ranks_of

PROGRAM = Path(__file__).resolve().parent / "lightning_warm_up.py"
ELEMENTS = WIDTH * WIDTH + WIDTH


@pytest.mark.slow
def test_the_first_steps_go_by_the_codec_of_the_warm_up(tmp_path):
    ranks = ranks_of("lightning", tmp_path, PROGRAM)
    assert len(ranks) == 2
    for strategy, sent in itertools.chain.from_iterable(rank.items() for rank in ranks):
        bytes_of_steps = [after - before for before, after in itertools.pairwise([0, *sent])]
        # With two ranks both hops together send each element once.
        an_element = [round(sent / ELEMENTS, 1) for sent in bytes_of_steps]
        # int8, then int4
        assert an_element == [1.0] * WARM_UP + [0.5] * (BATCHES - WARM_UP), strategy
