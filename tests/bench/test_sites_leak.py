"""bench.sites_leak: the attack finds what is to be found, and its figures mean what they say."""

import pytest
import torch

from bench import sites_leak
from demo import data


@pytest.fixture(scope="module")
def site():
    """The network, and an image with its label as a site has them; an image of our own making, so
    that no data set is needed."""
    torch.manual_seed(2)
    rows, columns = torch.meshgrid(torch.arange(28), torch.arange(28), indexing="ij")
    pixels = ((rows - 14) ** 2 + (columns - 12) ** 2 < 60).float() * 0.8
    image = (pixels - data._MEAN) / data._DEVIATION
    return sites_leak.network(), image.view(1, 1, 28, 28), torch.tensor([3])


def test_an_exact_update_gives_its_image_away(site):
    model, image, labels = site
    update = sites_leak.sent(model, "fp32", sites_leak.update_of(model, image, labels, False))

    def attack(update):
        gray = torch.zeros_like(image)
        options = {"sparse": False, "steps": 150, "rate": 0.1}
        return sites_leak.invert(model, update, labels, gray, **options)

    found = attack(update)
    assert sites_leak.psnr(found, image) > 20
    # Another update gives another image.
    other = {name: torch.randn_like(values) for name, values in update.items()}
    assert sites_leak.psnr(attack(other), image) < 15


def test_unrolled_steps_are_those_of_sgd(site):
    model, image, _ = site
    images, labels = torch.cat([image, image.flip(2), image.flip(3)]), torch.tensor([1, 2, 3])
    found = sites_leak.update_of(model, images, labels, True)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=sites_leak.RATE)
    for one, label in zip(images, labels, strict=True):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(one[None]), label[None]).backward()
        optimizer.step()
    for name, p in model.named_parameters():
        assert torch.allclose(before[name] - p.detach(), found[name], atol=1e-6)
        p.data.copy_(before[name])


def test_images_of_one_label_are_matched_in_any_order(site):
    _, image, _ = site
    truth = torch.cat([image, image.flip(2), image.roll(3, 3)])
    labels = torch.tensor([1, 1, 0])
    noisy = truth[[1, 0, 2]] + 0.01
    assert min(sites_leak.matched(noisy, truth, labels)) > 40
    assert sites_leak.psnr(truth + data._DEVIATION**-1 * 0.1, truth) == pytest.approx(20, abs=0.01)
