"""Adapters to frameworks raise a typed error at once for what they do not support; it says what
they do support."""

import os

import pytest
import thinwire

NEEDS_MOMENTUM = r"codec is 'onebit.*needs no momentum.*take int4"


@pytest.fixture
def lightning():
    pytest.importorskip("lightning")
    from thinwire import lightning

    return lightning


@pytest.mark.parametrize("strategy", ["ThinwireStrategy", "ThinwireFabricStrategy"])
def test_lightnings_strategies_know_their_options(lightning, strategy):
    make = getattr(lightning, strategy)
    with pytest.raises(TypeError, match=r"'codek' is an option of neither.*did you mean codec"):
        make(codek="int4")
    with pytest.raises(thinwire.InvalidArgumentError, match=r"momentum is 0\.9.*take int4"):
        make(codec="onebit", momentum=0.9)
    with pytest.raises(thinwire.InvalidArgumentError, match=NEEDS_MOMENTUM):
        make(codec="onebit")
    # Fabric's strategy has no such option.
    with pytest.raises((thinwire.InvalidArgumentError, TypeError), match="ddp_comm_hook"):
        make(codec="int4", ddp_comm_hook=print)
    make(codec="int4", find_unused_parameters=True, bucket_cap_mb=5, accelerator=None)


def test_lightnings_statistics_come_every_so_many_batches(lightning):
    for every in (0, -1, 2.5, "x"):
        with pytest.raises(thinwire.InvalidArgumentError, match="every is"):
            lightning.ThinwireStats(every=every)


def test_accelerates_prepare():
    accelerate = pytest.importorskip("accelerate")
    from thinwire.accelerate import prepare

    with pytest.raises(thinwire.InvalidArgumentError, match="expected an Accelerator"):
        prepare("model", "optimizer", codec="int4")
    accelerator = accelerate.Accelerator(cpu=True)
    with pytest.raises(thinwire.InvalidArgumentError, match=r"momentum is 0\.9.*take int4"):
        prepare(accelerator, codec="onebit", momentum=0.9)
    with pytest.raises(thinwire.InvalidArgumentError, match=NEEDS_MOMENTUM):
        prepare(accelerator, codec={"*.bias": "fp32", "*": "onebit"})
    assert prepare(accelerator) == (None,)  # there is one process


def test_the_trainers_callback(tmp_path):
    pytest.importorskip("transformers")
    import torch
    from thinwire.transformers import ThinwireCallback
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(output_dir=os.fspath(tmp_path), use_cpu=True, report_to=[])
    trainer = Trainer(torch.nn.Linear(1, 1), arguments)
    with pytest.raises(thinwire.InvalidArgumentError, match="expected the Trainer that gets this"):
        ThinwireCallback(arguments, codec="int4")
    with pytest.raises(thinwire.InvalidArgumentError, match="resume_from is 5"):
        ThinwireCallback(trainer, resume_from=5)
    with pytest.raises(thinwire.InvalidArgumentError, match=r"momentum is 0\.9.*take int4"):
        ThinwireCallback(trainer, codec="onebit", momentum=0.9)
    with pytest.raises(thinwire.InvalidArgumentError, match=NEEDS_MOMENTUM):
        ThinwireCallback(trainer, codec="onebit:block=128")
