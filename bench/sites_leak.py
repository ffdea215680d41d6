"""The images that a peer can reconstruct from an update between sites, by codec and local steps.

    python -m bench.sites_leak [--images 4] [--out FILE.json]

The attack is gradient inversion (Geiping et al., "Inverting Gradients", arXiv 2003.14053): from the
anchor and the decoded update it searches the images whose local steps would have made an update in
the same direction (cosine similarity and total variation, signed Adam; several local steps are
unrolled, as in the paper's section 6). The site makes local steps of one Fashion-MNIST image each
with a convolutional network at its first weights, which is where the attack works best, and the
attacker knows labels, learning rate and number of steps, and begins with the mean image of each
label's class. The update goes through the bytes of
thinwire.torch.sites: tensors below 1,024 elements are exact there, whatever the codec.

A row has the mean PSNR in dB of the reconstructed images; that of `guess`, the image that the
attack begins with, which is what an attacker has without any update; and the share of images that
come 3 dB above their guess. What this attack does not find a longer or better one may."""

from __future__ import annotations

import argparse
import math
import multiprocessing
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from scipy.optimize import linear_sum_assignment
from thinwire.torch import tensors
from thinwire.torch.sites.updates import UpdateCodec
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from bench import harness
from demo import data

CODECS = {
    "fp32": "fp32", "int8": "int8", "int4": "int4", "adaptive, 2 bits": "adaptive",
    "topk, 1 %": "topk:density=0.01",
}  # fmt: skip
# Steps of the attack and its rate, by local steps.
ATTACKS = {1: (500, 0.1), 4: (400, 0.1), 32: (100, 0.03)}
RATE = 0.05  # of local steps
SMOOTH = 1e-3  # weight of the total variation
ABOVE_DB = 3.0
LOW, HIGH = -data._MEAN / data._DEVIATION, (1 - data._MEAN) / data._DEVIATION

Tensors = dict[str, torch.Tensor]


def network() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 12, 5, padding=2, stride=2), torch.nn.Tanh(),
        torch.nn.Conv2d(12, 12, 5, padding=2, stride=2), torch.nn.Tanh(),
        torch.nn.Conv2d(12, 12, 5, padding=2), torch.nn.Tanh(),
        torch.nn.Flatten(), torch.nn.Linear(588, data.CLASSES),
    )  # fmt: skip


def update_of(
    model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor, differentiable: bool
) -> Tensors:
    """Anchor minus parameters after a local step of SGD with each image. images: (H, 1, 28, 28)."""
    anchor = {name: p.detach() for name, p in model.named_parameters()}
    now = {name: p.clone().requires_grad_() for name, p in anchor.items()}
    for image, label in zip(images, labels, strict=True):
        loss = cross_entropy(functional_call(model, now, (image[None],)), label[None])
        gradients = torch.autograd.grad(loss, list(now.values()), create_graph=differentiable)
        now = {n: p - RATE * g for (n, p), g in zip(now.items(), gradients, strict=True)}
        if not differentiable:
            now = {name: p.detach().requires_grad_() for name, p in now.items()}
    return {name: anchor[name] - p for name, p in now.items()}


def sent(model: torch.nn.Module, spec: str, update: Tensors) -> Tensors:
    """Return what the peers decode."""
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    codec = UpdateCodec({"*": spec}, sizes, tensors.structure_of(model))
    flat = {name: values.detach().reshape(-1).contiguous() for name, values in update.items()}
    zeros = {name: torch.zeros_like(values) for name, values in flat.items()}
    pieces = codec.encode(lambda name, begin, end: flat[name][begin:end], zeros, 1.0, {})
    decoded = codec.decode(memoryview(b"".join(pieces)))
    return {name: decoded[name].view_as(update[name]).clone() for name in update}


def invert(
    model: torch.nn.Module,
    target: Tensors,
    labels: torch.Tensor,
    first: torch.Tensor,
    *,
    sparse: bool,
    steps: int,
    rate: float,
) -> torch.Tensor:
    """The images that the attack finds. first: those that it begins with. sparse: zeros of the
    target say nothing."""
    places = {name: values != 0 for name, values in target.items()} if sparse else None

    def flat(update: Tensors) -> torch.Tensor:
        return torch.cat([
            (u[places[name]] if places is not None else u).reshape(-1)
            for name, u in update.items()
        ])  # fmt: skip

    wanted = flat(target)
    images = first.clone().requires_grad_()
    optimizer = torch.optim.Adam([images], lr=rate)
    drops = [steps * part // 8 for part in (3, 5, 7)]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, drops, 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        found = flat(update_of(model, images, labels, True))
        down, across = images.diff(dim=2).abs().mean(), images.diff(dim=3).abs().mean()
        away = 1 - torch.cosine_similarity(found, wanted, dim=0)
        (away + SMOOTH * (down + across)).backward()
        images.grad.sign_()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            images.clamp_(LOW, HIGH)
    return images.detach()


def psnr(found: torch.Tensor, truth: torch.Tensor) -> float:
    """In dB, of normalised pixels; the peak is the range of pixels."""
    mean_square = (found - truth).square().mean().item() * data._DEVIATION**2
    return math.inf if mean_square == 0 else -10 * math.log10(mean_square)


def matched(found: torch.Tensor, truth: torch.Tensor, labels: torch.Tensor) -> list[float]:
    """The PSNR of each true image: images of one label are paired for the highest sum."""
    table = [
        [psnr(f, t) if a == b else -1000.0 for f, b in zip(found, labels.tolist(), strict=True)]
        for t, a in zip(truth, labels.tolist(), strict=True)
    ]
    rows, columns = linear_sum_assignment(table, maximize=True)
    return [table[row][column] for row, column in zip(rows, columns, strict=True)]


def row_of(name: str, local_steps: int, attacks: int) -> harness.Row:
    torch.set_num_threads(1)
    train, model, begun = data.load("train"), network(), time.process_time()
    means = torch.stack([
        train.batch((train.labels == label).nonzero().view(-1)[:1000])[0].mean(0)
        for label in range(data.CLASSES)
    ]).view(-1, 1, 28, 28)  # fmt: skip
    spec, (steps, rate) = CODECS[name], ATTACKS[local_steps]
    reached: list[float] = []
    guesses: list[float] = []
    for attack in range(attacks):
        first = attack * local_steps
        truth, labels = train.batch(torch.arange(first, first + local_steps))
        truth = truth.view(-1, 1, 28, 28)
        update = sent(model, spec, update_of(model, truth, labels, False))
        found = invert(
            model, update, labels, means[labels],
            sparse=spec.startswith("topk"), steps=steps, rate=rate,
        )  # fmt: skip
        reached += matched(found, truth, labels)
        guesses += [psnr(means[label], t) for label, t in zip(labels, truth, strict=True)]
    above = [r > g + ABOVE_DB for r, g in zip(reached, guesses, strict=True)]
    row = {
        "codec": name, "local_steps": local_steps, "images": len(reached),
        "psnr_db": round(statistics.mean(reached), 1), "best_db": round(max(reached), 1),
        "guess_db": round(statistics.mean(guesses), 1), "above_guess": sum(above) / len(above),
        "attack_steps": steps, "cpu_s": round(time.process_time() - begun, 1),
    }  # fmt: skip
    print(row, flush=True)
    return row


def measure(images: int) -> list[harness.Row]:
    """images: attacks of one step; of several steps there is one. On two processes."""
    wanted = [(name, n, images if n == 1 else 1) for n in ATTACKS for name in CODECS]
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as workers:
        found = [workers.submit(row_of, *each) for each in reversed(wanted)]  # the longest first
        return [each.result() for each in reversed(found)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--images", type=int, default=4, help="attacks of one local step")
    parser.add_argument("--out", type=Path, default=Path("build/sites_leak.json"))
    given = parser.parse_args()
    rows = measure(given.images)
    harness.write(given.out, rows, "torch", rate=RATE, smooth=SMOOTH)
    columns = {
        "local steps": "{local_steps}", "codec": "{codec}", "PSNR, dB": "{psnr_db}",
        "best": "{best_db}", "guess": "{guess_db}", "3 dB above the guess": "{above_guess}",
    }  # fmt: skip
    print(harness.table(rows, columns))
    return 0


if __name__ == "__main__":
    sys.exit(main())
