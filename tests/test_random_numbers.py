"""Masks against what chance would give: their rate, and whether they know of each other.

Counts are held against the binomial law: an alarm is a count more than 4 standard deviations off, which chance gives
once in 16,000. In full (`-m slow`) a defect of one part in ten thousand, of a rate or of a dependence, lies 6.5
deviations off and is found 99 times in 100: that takes 1.1e9 bits a rate and 4.2e9 pairs. By default a tenth or a
hundredth as many, which find defects of a few parts in a thousand.
"""

import math

import numpy as np
import pytest
import torch

from bbalpha._balance import SIZE, Tape, groups, patterns, tape_seed
from bbalpha._kernels import Passes, held_out_seed, pass_seed, step_seed, streams
from bbalpha._torch import generators

ALARM = 4.0  # standard deviations
BLOCK = 2**22  # units drawn at a time
DEFECT = 1e-4

slow = pytest.mark.slow


def kept(seed, shape, rate, *, together, first=0, count=1, sites=1):
    """Whether units are kept, (count, *shape) bool for each site."""
    passes = Passes(seed, first, count, together=together)
    return [passes.noise(shape, rate).keep().numpy() for _ in range(sites)]


def deviations(hits, n, p):
    return (hits - n * p) / math.sqrt(n * p * (1 - p))


# ------------------------------------------------------------------------------ rates


def rate_off(draw, rate, blocks):
    """By how many deviations the rate of so many blocks is off, `draw(block)` at a time."""
    hits = n = 0
    for i in range(blocks):
        mask = draw(i)
        hits += mask.size - int(np.count_nonzero(mask))
        n += mask.size
    return deviations(hits, n, rate)


def block_of_one_pass(rate, together, k, break_it=None):
    def draw(i):
        (mask,) = kept(step_seed(11, i), (BLOCK,), rate, together=together, first=k)
        return mask if break_it is None else break_it(mask)

    return draw


RATES = [(0.5, 0, 3), (0.05, 0, 3), (0.5, 10, 0), (0.05, 20, 7), (0.1, 10, 9), (0.3, 200, 130)]


@pytest.mark.parametrize("blocks", [10, pytest.param(252, marks=slow)])
@pytest.mark.parametrize(("rate", "together", "k"), RATES)
def test_a_pass_drops_at_its_rate(rate, together, k, blocks):
    realised = round(rate * SIZE) / SIZE if together else rate
    assert abs(rate_off(block_of_one_pass(rate, together, k), realised, blocks)) < ALARM


@slow
@pytest.mark.parametrize("together", [0, 10])
def test_a_rate_that_is_off_by_one_in_ten_thousand_is_found(together):
    random = np.random.default_rng(0)

    def drop_more(mask):
        mask = mask.copy()
        mask.ravel()[random.integers(mask.size, size=round(2 * DEFECT * mask.size))] = False  # half of them were kept
        return mask

    assert rate_off(block_of_one_pass(0.5, together, 0, drop_more), 0.5, 252) > ALARM


# ------------------------------------------------------------------------------ dependence


class Pairs:
    """Counts of pairs of masks that agree, by what the two have in common."""

    def __init__(self):
        self.agree, self.n = {}, {}

    def add(self, name, a, b):
        self.agree[name] = self.agree.get(name, 0) + a.size - int(np.count_nonzero(a ^ b))
        self.n[name] = self.n.get(name, 0) + a.size

    def off(self, name, rate):
        return deviations(self.agree[name], self.n[name], rate**2 + (1 - rate) ** 2)


def pairs_of(rate, together, blocks):
    """Agreement of masks beside each other: units, rows, passes, sites, steps, seeds."""
    pairs, shape, before = Pairs(), (BLOCK // 4096, 4096), None
    for i in range(blocks):
        (one,), (two,) = kept(step_seed(1, i), shape, rate, together=together, sites=2)
        (other_seed,) = kept(step_seed(2, i), shape, rate, together=together)
        pairs.add("units", one[:, 1:], one[:, :-1])
        pairs.add("units of a word", one[:, 4:], one[:, :-4])
        pairs.add("rows", one[1:], one[:-1])
        pairs.add("sites", one, two)
        pairs.add("seeds", one, other_seed[0])
        if not together:
            pairs.add("passes", one, kept(step_seed(1, i), shape, rate, together=0, first=1)[0][0])
        if before is not None:
            pairs.add("steps", one, before)
        before = one
    return pairs


DEPENDENCE = [(0.5, 0, 5), (0.5, 10, 5), (0.05, 20, 5)]
DEPENDENCE += [pytest.param(0.5, 0, 1008, marks=slow), pytest.param(0.5, 10, 1008, marks=slow)]


@pytest.mark.parametrize(("rate", "together", "blocks"), DEPENDENCE)
def test_masks_know_nothing_of_each_other(rate, together, blocks):
    pairs = pairs_of(rate, together, blocks)
    realised = round(rate * SIZE) / SIZE if together else rate
    off = {name: pairs.off(name, realised) for name in pairs.n}
    assert max(map(abs, off.values())) < ALARM, off


@slow
def test_a_site_that_repeats_one_in_ten_thousand_units_is_found():
    random, pairs = np.random.default_rng(0), Pairs()
    for i in range(1008):
        (one,), (two,) = kept(step_seed(1, i), (1, BLOCK), 0.5, together=0, sites=2)
        pairs.add("as they are", one, two)
        two, at = two.copy(), random.integers(BLOCK, size=round(DEFECT * BLOCK))
        two[:, at] = one[:, at]
        pairs.add("repeated", one, two)
    assert pairs.off("repeated", 0.5) > ALARM
    assert abs(pairs.off("as they are", 0.5)) < ALARM


@pytest.mark.parametrize("blocks", [2, pytest.param(100, marks=slow)])
@pytest.mark.parametrize(("K", "rate"), [(2, 0.5), (10, 0.5), (20, 0.05), (10, 0.3)])
def test_balanced_passes_of_a_unit_know_of_each_other_what_the_table_says(K, rate, blocks):
    """Any two passes agree as often as in the table of patterns, which is drawn from evenly."""
    planes = patterns(K, rate).planes
    table = np.stack([(planes[k // 7].numpy() >> (k % 7)) & 1 for k in range(K)]).astype(bool)
    a, b = np.triu_indices(K, 1)
    agree = np.zeros(len(a), np.int64)
    for i in range(blocks):
        (masks,) = kept(step_seed(5, i), (BLOCK // 4,), rate, together=K, count=K)
        agree += [masks[i].size - int(np.count_nonzero(masks[i] ^ masks[j])) for i, j in zip(a, b, strict=True)]
    n = blocks * BLOCK // 4
    want = np.array([np.mean(table[i] == table[j]) for i, j in zip(a, b, strict=True)])
    fixed = want * (1 - want) == 0  # two passes at a half are each other's complement
    assert (agree[fixed] == n * want[fixed]).all()
    off = (agree - n * want)[~fixed] / np.sqrt(n * want * (1 - want))[~fixed]
    assert np.abs(off).max(initial=0) < ALARM + 1  # of up to 190 pairs the one that is most off


@pytest.mark.parametrize("blocks", [4, pytest.param(250, marks=slow)])
def test_every_pattern_comes_as_often(blocks):
    """Chi-square over the 65,536 patterns and the four places of a word."""
    counts = np.zeros((4, SIZE), np.int64)
    for i in range(blocks):
        index = Tape(step_seed(3, i), i % 2).draw(BLOCK // 4).numpy().view(np.uint16).reshape(-1, 4)
        for place in range(4):
            counts[place] += np.bincount(index[:, place], minlength=SIZE)
    expected = blocks * BLOCK / 4 / SIZE
    chi2 = ((counts - expected) ** 2 / expected).sum(1)
    assert np.abs((chi2 - SIZE + 1) / math.sqrt(2 * SIZE)).max() < ALARM


# ------------------------------------------------------------------------------ streams


def addresses(what, n):
    """The keys of n streams of long runs, in four seeds: steps and held-out batches, their passes, or their groups."""
    steps = [step_seed(seed, t) for seed in (0, 1, 2, 2**40) for t in range(n // 40)]
    if what == "steps":
        return [of(seed, t) for seed in (0, 1, 2, 2**40) for t in range(n // 8) for of in (step_seed, held_out_seed)]
    if what == "passes":
        return [pass_seed(step, k) for step in steps for k in range(10)]
    keys = [tape_seed(step, group) for step in steps for group in range(10)]
    return [own | ((key + 2**63) & 0xFFFFFFFF) << 32 for own, key in keys]


def chance(n, bits=64):
    """That any two of n keys of so many bits are equal."""
    return -math.expm1(-n * (n - 1) / 2 ** (bits + 1))


def test_the_chance_that_two_streams_of_a_long_run_are_one_is_small():
    """The numbers of docs/laws.md: a million steps of ten passes, by themselves and balanced; with keys of 32 bits."""
    assert f"{chance(10**7):.0e} {chance(10**6):.0e}" == "3e-06 3e-08"
    assert chance(10**6, bits=32) > 0.999999


@pytest.mark.parametrize("what", ["steps", "passes", "groups"])
def test_keys_collide_as_often_as_chance_has_it_in_every_32_bits(what):
    """All 64 bits of the keys count: in any half of them there are as many equal pairs as the birthday law says."""
    n = 400_000
    keys = np.array(addresses(what, n), np.uint64)
    assert len(np.unique(keys)) == n
    want = n * (n - 1) / 2**33  # 18.6
    for shift in (0, 16, 32):
        half = (keys >> np.uint64(shift)) & np.uint64(0xFFFFFFFF)
        pairs = n - len(np.unique(half))
        assert abs(pairs - want) < ALARM * math.sqrt(want), shift


def test_no_word_comes_twice():
    """Of 4e6 words of 64 bits, over passes, groups, steps and seeds, two are equal once in two million times."""
    words = [
        torch.empty(1000, dtype=torch.int64).random_(-(2**63), None, generator=generator)
        for seed in (0, 1)
        for t in range(100)
        for generator in streams(step_seed(seed, t), 0, 10)
    ]
    words += [Tape(step_seed(seed, t), group).draw(2000) for seed in (0, 1) for t in range(250) for group in range(2)]
    words = torch.cat(words)
    assert len(words.unique()) == len(words) == 4_000_000


def test_streams_whose_seeds_differ_in_one_bit_are_unrelated():
    seeds = [pass_seed(3, 4), pass_seed(3, 5), *(pass_seed(3 ^ (1 << bit), 4) for bit in range(0, 64, 3))]
    bits = [torch.empty(50_000, dtype=torch.int64).random_(-(2**63), None, generator=g) for g in generators(seeds)]
    bits = [np.unpackbits(words.numpy().view(np.uint8)) for words in bits]
    n = len(bits[0])
    off = [deviations(n - np.count_nonzero(other ^ bits[0]), n, 0.5) for other in bits[1:]]
    assert np.abs(off).max() < ALARM + 0.5
    assert max(abs(deviations(np.count_nonzero(b), n, 0.5)) for b in bits) < ALARM + 0.5


@pytest.mark.parametrize("draw", ["normals", "uniforms"])
def test_numbers_of_two_steps_are_unrelated(draw):
    n = 400_000
    a, b = (getattr(Passes(step_seed(0, t), 0, 10, together=10), draw)((n // 10,), torch.float64) for t in (0, 1))
    a, b = ((x - x.mean()) / x.std() for x in (a, b))
    assert abs(float((a * b).mean())) * math.sqrt(n) < ALARM


def test_groups_of_balanced_passes_are_unrelated():
    assert len(groups(200, 0.5)) == 2
    one, other = kept(0, (BLOCK,), 0.5, together=200, count=1)[0], kept(0, (BLOCK,), 0.5, together=200, first=150)[0]
    assert abs(deviations(one.size - np.count_nonzero(one ^ other), one.size, 0.5)) < ALARM
