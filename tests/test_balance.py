import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest

from bbalpha import _balance
from bbalpha._balance import LARGEST, SIZE, Memo, Tape, group_sizes, is_balanced, patterns, tape_seed
from bbalpha._kernels import Passes, step_seed

RATES = (0.5, 0.25, 0.05, 0.1, 1 / 3, 0.9, 0.003)


def table(K, rate):
    """Whether pattern i keeps a unit in pass k (SIZE, K)."""
    planes = patterns(K, rate).planes
    return np.stack([(planes[k // 7].numpy() >> (k % 7)) & 1 for k in range(K)], 1)


def keep(seed, K, shape, rate, *, first=0, count=None, together=None):
    passes = Passes(seed, first, K if count is None else count, together=K if together is None else together)
    return passes.noise(shape, rate).keep()


# ------------------------------------------------------------------------------ the table


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("K", [2, 3, 7, 8, 10, 20, 63, 100, 128])
def test_every_pattern_drops_its_share_and_every_pass_the_same(K, rate):
    kept = table(K, rate)
    exact = round(rate * SIZE)
    drops = K - kept.sum(1)
    assert set(drops) <= {exact * K // SIZE, -(-exact * K // SIZE)}
    assert (SIZE - kept.sum(0) == exact).all()  # each pass alone is dropout at the rate
    assert patterns(K, rate).scale == SIZE / (SIZE - exact)


@pytest.mark.parametrize("K", [10, 50, 128])
def test_passes_of_a_unit_know_of_each_other_equally(K):
    """Any two passes: the same small negative correlation, but for what a table of 65,536 leaves to chance."""
    corr = np.corrcoef(table(K, 0.5).T)[~np.eye(K, dtype=bool)]
    assert abs(corr.mean() + 1 / (K - 1)) < 1e-9
    assert corr.std() < 0.008


def test_the_order_of_the_passes_differs_from_unit_to_unit():
    """Not one shift a unit: of the patterns that keep pass 0, others follow on it in equal shares."""
    kept = table(10, 0.5)
    assert len(np.unique(kept, axis=0)) == math.comb(10, 5)


def test_a_table_is_the_same_in_every_process():
    found = patterns(10, 0.25).planes[0].numpy()
    _balance.patterns.cache_clear()
    assert (patterns(10, 0.25).planes[0].numpy() == found).all()
    assert found[:6].tolist() == [59, 85, 118, 27, 91, 123]  # the masks of a seed hang on it


def test_groups_are_whole_and_drop_whole_numbers_where_they_can():
    for K in (1, 2, LARGEST, LARGEST + 1, 300, 1000):
        for rate in RATES:
            sizes = group_sizes(K, rate)
            assert sum(sizes) == K
            assert max(sizes) <= LARGEST
    assert group_sizes(240, 0.05) == (120, 120)
    assert group_sizes(256, 0.5) == (128, 128)


# ------------------------------------------------------------------------------ the masks


@given(
    K=st.integers(2, 140),
    rate=st.sampled_from(RATES),
    shape=st.sampled_from([(1,), (3,), (5, 7), (2, 1, 3)]),
    seed=st.integers(-(2**63), 2**63 - 1),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_a_pass_is_the_same_however_passes_are_run(K, rate, shape, seed, data):
    whole = keep(seed, K, shape, rate)
    first = data.draw(st.integers(0, K - 1))
    count = data.draw(st.integers(1, K - first))
    assert torch.equal(keep(seed, K, shape, rate, first=first, count=count, together=K), whole[first : first + count])
    parent = Passes(seed, 0, K, together=K)
    parts = [parent.part(k, 3).noise(shape, rate).keep() for k in range(0, K, 3)]  # a memo between them
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize(("K", "rate"), [(10, 0.5), (20, 0.05), (10, 0.05), (150, 0.25)])
def test_each_unit_is_dropped_in_its_share_of_the_passes(K, rate):
    drops = (~keep(1, K, (40, 50), rate)).sum(0)
    exact = sum(round(rate * n, 9) for n in group_sizes(K, rate))
    groups = len(group_sizes(K, rate))
    assert bool((drops >= math.floor(exact) - (groups - 1)).all())
    assert bool((drops <= math.ceil(exact) + (groups - 1)).all())
    assert drops.double().mean() == pytest.approx(rate * K, rel=0.1)


def test_masks_are_independent_over_units_rows_sites_seeds_and_groups():
    K, n = 10, 20_000
    passes = Passes(3, 0, K, together=K)
    site, other = (passes.noise((n,), 0.5).keep()[0].double() - 0.5 for _ in range(2))
    seed = keep(4, K, (n,), 0.5)[0].double() - 0.5
    group = keep(3, 256, (n,), 0.5, first=128, count=1, together=256)[0].double() - 0.5
    first = keep(3, 256, (n,), 0.5, first=0, count=1, together=256)[0].double() - 0.5
    for a, b in ((site, other), (site, seed), (first, group), (site[1:], site[:-1]), (site[4:], site[:-4])):
        assert abs(float((a * b).mean() * 4)) < 4.5 / math.sqrt(n)


def test_large_sites_are_looked_up_in_blocks(monkeypatch):
    whole = keep(0, 10, (1001, 3), 0.25)
    monkeypatch.setattr(_balance, "_BLOCK", 64)
    assert torch.equal(keep(0, 10, (1001, 3), 0.25), whole)


def test_what_is_remembered_is_bounded():
    passes = Passes(0, 0, 4, together=4)
    part = passes.part(0, 1)
    passes.memo.left = 10
    part.noise((1000,), 0.5)
    assert not passes.memo.words
    assert torch.equal(part.part(0, 1).noise((30,), 0.5).keep(), keep(0, 4, (30,), 0.5, count=1, together=4))
    assert len(passes.memo.words) == 1


@given(spans=st.lists(st.integers(1, 9), min_size=1, max_size=6), others=st.lists(st.integers(1, 9), max_size=6),
       room=st.integers(0, 30))  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_a_tape_reads_the_same_with_and_without_a_memory(spans, others, room):
    """Also where memory runs out, and where one pass met other sites than the one before."""
    memo = Memo()
    memo.left = room
    for asked in (spans, others, spans):
        plain, remembered = Tape(5, 1), Tape(5, 1, memo=memo)
        for span in asked:
            assert torch.equal(plain.draw(span), remembered.read(span)[0])


def test_one_pass_and_rates_out_of_reach_are_drawn_as_ever():
    assert not is_balanced(1, 0.5)
    assert not is_balanced(10, 1e-4)
    assert torch.equal(keep(0, 1, (100,), 0.5), Passes(0, 0, 1).noise((100,), 0.5).keep())
    assert torch.equal(keep(0, 10, (100,), 1e-4), Passes(0, 0, 10).noise((100,), 1e-4).keep())


def test_several_sites_at_once_are_those_one_after_the_other():
    sites = [((3, 5), 0.5), ((7,), 0.5), ((2, 2), 0.25)]
    at_once = Passes(0, 0, 4, together=4).noises(sites)
    passes = Passes(0, 0, 4, together=4)
    for noise, (shape, rate) in zip(at_once, sites, strict=True):
        assert torch.equal(noise.keep(), passes.noise(shape, rate).keep())
    factors = Passes(0, 0, 4, together=4).noises(sites[:2], torch.float64)
    for noise, other in zip(factors, at_once, strict=False):
        assert torch.equal(noise.values, other.keep() * 2.0)
        assert noise.values.dtype == torch.float64


# ------------------------------------------------------------------------------ seeds


def test_no_two_steps_or_sites_of_a_long_run_share_a_stream():
    assert len({step_seed(5, t) for t in range(200_000)}) == 200_000
    assert len({tape_seed(step_seed(5, t), group) for t in range(50_000) for group in range(4)}) == 200_000


def test_streams_of_one_generator_seed_differ_by_their_key():
    """Where the 32 bits that torch's generator takes agree, the patterns are unrelated nevertheless."""
    words = Tape(0, 0).draw(5000)
    other = words ^ 0x1234567_89ABCDEF
    a, b = (torch.empty((10, 20_000), dtype=torch.int8) for _ in range(2))
    patterns(10, 0.5).fill(a, words, first=0)
    patterns(10, 0.5).fill(b, other, first=0)
    corr = ((a > 0).double() - 0.5) * ((b > 0).double() - 0.5) * 4
    assert float(corr.mean(1).abs().max()) < 4.5 / math.sqrt(20_000)


# ------------------------------------------------------------------------------ numbers that are not 0 or 1


@pytest.mark.parametrize("K", [2, 10, 128, 200])
def test_uniform_numbers_of_a_unit_lie_one_in_each_part(K):
    numbers = Passes(3, 0, K, together=K).uniforms((50, 4), torch.float32)
    parts, at = group_sizes(K, 0.5), 0
    for size in parts:
        ranks = (numbers[at : at + size] * size).floor().sort(0).values
        assert torch.equal(ranks, torch.arange(size).float()[:, None, None].expand_as(ranks))
        at += size
    assert float(numbers.min()) >= 0
    assert float(numbers.max()) < 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_normal_numbers_of_a_pass_are_normal_and_those_of_a_unit_balanced(dtype):
    numbers = Passes(4, 0, 10, together=10).normals((200, 100), dtype)
    assert numbers.dtype == dtype
    assert bool(numbers.isfinite().all())
    if dtype == torch.bfloat16:
        return
    for k in (0, 9):
        assert kstest(numbers[k].flatten().numpy(), "norm").pvalue > 1e-3
    independent = Passes(4, 0, 10).normals((200, 100), dtype)
    assert float(numbers.mean(0).std()) < 0.3 * float(independent.mean(0).std())
    pairs = np.corrcoef(numbers.flatten(1).numpy())[~np.eye(10, dtype=bool)]
    assert abs(pairs.mean() + 1 / 9) < 0.02  # any two passes of a unit alike
    assert pairs.std() < 0.02


@given(K=st.integers(2, 140), seed=st.integers(0, 2**32), data=st.data())
@settings(max_examples=30, deadline=None)
def test_numbers_of_a_pass_are_the_same_however_passes_are_run(K, seed, data):
    whole = Passes(seed, 0, K, together=K)
    first = data.draw(st.integers(0, K - 1))
    count = data.draw(st.integers(1, K - first))
    some = Passes(seed, first, count, together=K)
    for _ in range(2):  # the second site goes on where the first has stopped
        a, b = (passes.normals((3, 5), torch.float64) for passes in (whole, some))
        assert torch.equal(a[first : first + count], b)
        assert torch.equal(whole.noise((5,), 0.5).keep()[first : first + count], some.noise((5,), 0.5).keep())


def test_numbers_of_independent_passes_are_those_of_their_generators():
    passes = Passes(3, 0, 2)
    expected = torch.stack([torch.empty(5).normal_(generator=g) for g in Passes(3, 0, 2).generators])
    assert torch.equal(passes.normals((5,), torch.float32), expected)
