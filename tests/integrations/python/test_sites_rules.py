"""The median and the trimmed mean of decoded updates, compared with numpy's: 2 to 8 members, each
cut, and four codecs. Flower's own gave the same
(bench/results/epyc-zen4-2cores/sites_rules.json)."""

import pytest
import torch
from thinwire.torch.sites import updates as rules

numpy = pytest.importorskip("numpy")

SIZES = {"weight": 70000, "bias": 300}  # elements
CODECS = ("fp32", "int4", "adaptive", "topk:density=0.1")
MEMBERS = (2, 3, 4, 5, 6, 8)


def updates_of(codec: str, members: int) -> list[dict[str, torch.Tensor]]:
    """Return the decoded updates of all members, of similar length, the last one poisoned. Codecs
    with few values give many ties."""
    coder, decoded = rules.UpdateCodec(codec, SIZES, {}), []
    for member in range(members):
        generator = torch.Generator().manual_seed(member)
        scale = -10.0 if member == members - 1 else 1.0
        update = {n: scale * torch.randn(k, generator=generator) + 1 for n, k in SIZES.items()}
        zeros = {name: torch.zeros(numel) for name, numel in SIZES.items()}
        pieces = coder.encode(lambda n, begin, end, of=update: of[n][begin:end], zeros, 1.0, {})
        decoded.append(coder.decode(memoryview(b"".join(pieces))))
    return decoded


def compared(median, trimmed) -> list[dict]:
    """Compare our rules with others', which take (arrays, samples) per member and how many to cut
    at each end, and return arrays. `most` is the largest difference in units of the allowed
    rounding, so above 1 is wrong: in float32 k values can be added in any order, which changes the
    sum by at most k * 2**-23 of the mean of their sizes (Higham 2002, section 4.2, for both sums).
    The middle value and the mean of the middle two are rounded once, so medians are equal."""
    rows = []
    for codec in CODECS:
        for members in MEMBERS:
            updates, said = updates_of(codec, members), [1.0] * members
            results = [([u[name].numpy() for name in SIZES], 1) for u in updates]
            middle = (members - 1) // 2
            cases = [("median", middle, rules.rule_of("median")(updates, said, {}))]
            for cut in range(middle + 1):
                cases.append(("trimmed", cut, rules.trimmed(updates, said, {}, cut=cut)))
            by_name = rules.rule_of("trimmed")(updates, said, {})
            cases.append(("trimmed", int(rules.TRIM * members), by_name))
            for rule, cut, found in cases:
                theirs = (median if rule == "median" else trimmed)(results, cut)
                most = most_off(updates, cut, found, theirs, exact=rule == "median")
                rows.append(
                    {"rule": rule, "codec": codec, "members": members, "cut": cut, "most": most}
                )
    return rows


def most_off(
    updates: list[dict[str, torch.Tensor]],
    cut: int,
    found: dict[str, torch.Tensor],
    theirs: list,
    exact: bool,
) -> float:
    most = 0.0
    for name, values in zip(SIZES, theirs, strict=True):
        off = (found[name].double() - torch.as_tensor(values).double()).abs()
        kept = torch.stack([u[name] for u in updates]).sort(0).values[cut : len(updates) - cut]
        allowed = len(kept) * 2.0**-23 * kept.double().abs().mean(0)
        if exact:
            most = max(most, 0.0 if bool((off == 0).all()) else float("inf"))
        else:
            most = max(most, float(torch.where(off == 0, 0.0, off / allowed).max()))
    return most


def layers_of(results):
    return [numpy.stack(layer) for layer in zip(*(arrays for arrays, _ in results), strict=True)]


def median(results, _cut):
    return [numpy.median(rows, axis=0) for rows in layers_of(results)]


def trimmed(results, cut):
    """Return scipy.stats.trim_mean's formula in float64."""
    kept = [numpy.sort(rows, axis=0)[cut : len(rows) - cut] for rows in layers_of(results)]
    return [rows.astype(numpy.float64).mean(axis=0) for rows in kept]


def test_median_and_trimmed_mean_are_numpys():
    rows = compared(median, trimmed)
    assert {row["members"] % 2 for row in rows} == {0, 1}
    assert {row["cut"] for row in rows if row["rule"] == "trimmed"} == {0, 1, 2, 3}
    assert [row for row in rows if not row["most"] <= 1] == []


def test_another_rule_is_seen():
    def mean(results, _cut):
        return trimmed(results, 0)

    rows = compared(mean, mean)
    assert all((row["most"] > 1) == (row["cut"] > 0) for row in rows if row["rule"] == "trimmed")
    assert all(row["most"] > 1 for row in rows if row["members"] > 2 and row["rule"] == "median")
