"""sampling.py: the noise's statistics, filters and penalties against transformers, and a row's independence of its neighbours."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nano_sgl import native, sampling
from nano_sgl.protocol import SamplingParams, derive_seed
from nano_sgl.sampling import Mask, SamplingState, filter_, first_max, noise, prompt_logprobs, work_of

INF = math.inf


def run(logits, requests, positions=None, mask=None, rows=None, outputs=None, prompts=None, end_ids=(), state=None):
    """Sample a batch from scratch: requests are (params, seed) pairs, one a row of logits."""
    n, vocab_size = logits.shape
    state = state or SamplingState(n, vocab_size, "cpu")
    rows = rows or list(range(n))
    prompts = prompts or [[0]] * n
    outputs = outputs or [[]] * n
    for row, (params, seed), prompt, output in zip(rows, requests, prompts, outputs):
        params.verify(vocab_size, 10**6)
        state.set_row(row, params, seed, prompt, output)
    if positions is None:
        positions = torch.tensor([len(prompt) + len(output) for prompt, output in zip(prompts, outputs)])
    batch = state.batch([(row, params, len(prompt)) for row, (params, _), prompt in zip(rows, requests, prompts)], end_ids=end_ids)
    return state.sample(logits.clone(), positions, batch, mask)


def frequencies(logits, params, draws=20_000, seed=42):
    """How often each token is drawn at positions 0..draws-1 of one request, in batches that share one device row."""
    state = SamplingState(draws, len(logits), "cpu")
    state.set_row(0, params, seed, [0], [])
    batch = state.batch([(0, params, 1)] * draws)
    return torch.bincount(state.sample(logits.repeat(draws, 1), torch.arange(draws), batch).tokens, minlength=len(logits)) / draws


def within_three_sigma(found, expected, draws):
    for x, p in zip(found.tolist(), expected):
        assert abs(x - p) <= 3 * math.sqrt(p * (1 - p) / draws) + 1e-12, (found, expected)


def z_score(counts):
    """How many standard deviations the chi-square of these counts lies above a uniform distribution's."""
    counts = counts.double()
    expected = counts.sum() / len(counts)
    chi = ((counts - expected) ** 2 / expected).sum()
    return float((chi - (len(counts) - 1)) / math.sqrt(2 * (len(counts) - 1)))


# ---- noise ---------------------------------------------------------------------------------------------------------------------

def bits_of(seeds, positions, tokens):
    keys, words = sampling._keys(seeds, positions), sampling._token_words(tokens)
    x = torch.empty(len(keys), words.shape[-1], dtype=torch.int32)
    return sampling._uniform_bits(keys, words, x, torch.empty_like(x))


def bits_in_python(seed, position, token):
    """The same hash with Python's integers."""
    def shifted(x, n):
        return x ^ (x >> n)

    def mix64(x):
        x = shifted(x, 30) * 0xBF58476D1CE4E5B9 % 2**64
        return shifted(shifted(x, 27) * 0x94D049BB133111EB % 2**64, 31)

    key = mix64((mix64(seed % 2**64) + position * 0x9E3779B97F4A7C15) % 2**64)
    odd, offset = key % 2**32 | 1, key >> 32
    word = shifted((token + 0x9E3779B) % 2**32, 16) * 0x7FEB352D % 2**32
    word = shifted(shifted(word, 15) * 0x846CA68B % 2**32, 16)
    x = shifted((word * odd + offset) % 2**32, 16) * 0x85EBCA6B % 2**32
    signed = x - 2**32 if x >= 2**31 else x
    return signed ^ (signed >> 15)


def test_noise_is_the_hash_it_says():
    rng = np.random.default_rng(0)
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), *rng.integers(-(2**63), 2**63, 20).tolist()]
    positions = [0, 1, 131071, *rng.integers(0, 2**20, 22).tolist()]
    tokens = [0, 1, 49151, *rng.integers(0, 200_000, 10).tolist()]
    found = bits_of(torch.tensor(seeds), torch.tensor(positions), torch.tensor(tokens))
    assert found.tolist() == [[bits_in_python(s, p, t) for t in tokens] for s, p in zip(seeds, positions)]
    assert found.min() >= 0
    v = (found.double() + 0.5) / 2**31
    expected = -torch.log(-torch.log1p(-v))
    torch.testing.assert_close(noise(torch.tensor(seeds), torch.tensor(positions), torch.tensor(tokens)).double(), expected,
                               atol=1e-4, rtol=1e-5)


def test_noise_does_not_depend_on_its_surroundings():
    seeds, positions, tokens = torch.arange(7) * 977, torch.arange(7) + 5, torch.arange(1003)
    whole = noise(seeds, positions, tokens)
    for i in range(7):
        assert torch.equal(noise(seeds[i:i + 1], positions[i:i + 1], tokens)[0], whole[i])
    order = torch.randperm(1003)
    assert torch.equal(noise(seeds, positions, order), whole[:, order])
    picked = torch.stack([torch.randperm(1003)[:5] for _ in range(7)])      # [N, K]: each row its own candidates
    assert torch.equal(noise(seeds, positions, picked), whole.gather(1, picked))


@pytest.mark.parametrize("bits", [0, 2**31 - 1, 2**31 - 64, 1])
def test_noise_is_finite_at_its_ends(bits, monkeypatch):
    monkeypatch.setattr(sampling, "_uniform_bits", lambda keys, words, x, t: x.fill_(bits))
    found = noise(torch.tensor([1]), torch.tensor([1]), torch.arange(8))
    assert torch.isfinite(found).all()
    assert -3 < found[0, 0] < 23


AXES = {"positions": (torch.zeros(1000, dtype=torch.int64), torch.arange(1000)),
        "seeds": (torch.arange(1000), torch.zeros(1000, dtype=torch.int64)),
        "high seeds": (torch.arange(1000) << 40, torch.full((1000,), 7)),
        "both": (torch.arange(1000), 1000 - torch.arange(1000)),
        "samples of n": (torch.tensor([derive_seed(3, i) - 2**63 for i in range(1000)]), torch.full((1000,), 9))}


@pytest.mark.parametrize("axis", AXES)
def test_uniforms_are_uniform_and_independent(axis):
    """Chi-square of single bits' worth, of neighbours along both axes, of triples, and of row and column means."""
    bits = bits_of(*AXES[axis], torch.arange(3000))

    def flat(x, buckets):
        return z_score(torch.bincount(x.reshape(-1).long(), minlength=buckets))

    scores = [flat(bits >> 19, 4096), flat(bits & 4095, 4096), flat((bits >> 9) & 4095, 4096)]
    for top in (bits >> 25, bits & 63):                 # six bits of two numbers that lie near each other
        for dr, dt in ((0, 1), (1, 0), (1, 1), (0, 2), (2, 0), (0, 128)):
            scores.append(flat(top[:len(top) - dr, :3000 - dt] * 64 + top[dr:, dt:], 4096))
    four = bits >> 27
    scores.append(flat(four[:, :-2] * 256 + four[:, 1:-1] * 16 + four[:, 2:], 4096))
    scores.append(flat(four[:-2] * 256 + four[1:-1] * 16 + four[2:], 4096))
    u = (bits.double() + 0.5) / 2**31
    for dim, count in ((0, 1000), (1, 3000)):           # means of independent numbers: variance 1 / 12 n
        means = (u.mean(dim) - 0.5) * math.sqrt(12 * count)
        scores.append(float((means.var() - 1) * math.sqrt(len(means) / 2)))
    lag = torch.stack([u[:, :-1].flatten() - 0.5, u[:, 1:].flatten() - 0.5])
    scores.append(float((lag[0] * lag[1]).mean() * 12 * math.sqrt(lag.shape[1])))       # serial correlation
    assert max(map(abs, scores)) < 4.5, scores


def test_gumbel_moments():
    values = noise(torch.arange(2000) + 10**6, torch.zeros(2000, dtype=torch.int64), torch.arange(1000)).double()
    assert abs(values.mean() - 0.5772157) < 4 * math.sqrt(math.pi**2 / 6 / values.numel())
    assert abs(values.var() - math.pi**2 / 6) < 0.01


def test_rare_tokens_are_drawn_as_often_as_they_should(kernel_set):
    """A token of probability 1e-4 among 1000: the far end of the noise must be fine-grained."""
    logits = torch.full((1000,), math.log(1e-4))
    logits[500] = math.log(1 - 999e-4)
    found = frequencies(logits, SamplingParams(), draws=20_000)
    assert abs(found[500] - 0.9001) < 3 * math.sqrt(0.9 * 0.1 / 20_000)
    rest = torch.cat([found[:500], found[501:]]) * 20_000
    assert abs(z_score(rest)) < 4


# ---- distributions -------------------------------------------------------------------------------------------------------------

def test_frequencies(kernel_set, api_case):
    """F071: every filter, and in one mixed batch each row its own."""
    assert api_case("F071")["snippet"].startswith("Sampler alone: logits = log([.4,.3,.2,.1])")
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    flat = torch.softmax(logits / 2, -1).tolist()
    three = [4 / 9, 3 / 9, 2 / 9, 0]
    expected = [({}, [0.4, 0.3, 0.2, 0.1]), ({"top_p": 0.6}, [4 / 7, 3 / 7, 0, 0]), ({"top_k": 3}, three),
                ({"min_p": 0.5}, three), ({"temperature": 2.0}, flat)]
    draws = 20_000
    for seed, (fields, p) in enumerate(expected):
        found = frequencies(logits, SamplingParams(**fields), draws, seed)
        within_three_sigma(found, p, draws)
        assert all(x == 0 for x, q in zip(found.tolist(), p) if q == 0)
    kinds = [SamplingParams(**fields) for fields, _ in expected]        # the same rows interleaved in one batch
    state = SamplingState(5, 4, "cpu")
    state.block_rows = 2**16
    for row, params in enumerate(kinds):
        state.set_row(row, params, row, [0], [])
    batch = state.batch([(i % 5, kinds[i % 5], 1) for i in range(5 * draws)])
    tokens = state.sample(logits.repeat(5 * draws, 1), torch.arange(5 * draws) // 5, batch).tokens.view(draws, 5)
    for row, (_, p) in enumerate(expected):
        alone = frequencies(logits, kinds[row], draws, row)
        found = torch.bincount(tokens[:, row], minlength=4) / draws
        assert torch.equal(found, alone)                                # not only as often: the same draws
        within_three_sigma(found, p, draws)


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 5e-7}, {"top_k": 1}, {"top_p": 0},
                                    {"top_p": 0.0, "temperature": 2}])
def test_greedy_takes_the_lowest_of_the_best(fields):
    """F065, F069: narrowest settings are an argmax, of every seed, and ties go to the lowest id."""
    logits = torch.zeros(20, 500)
    logits[:, 77] = logits[:, 300] = 3.0
    found = run(logits, [(SamplingParams(**fields), seed) for seed in range(20)])
    assert found.tokens.tolist() == [77] * 20 and not found.bad.any()


def test_tiny_temperature_is_not_greedy_but_close(kernel_set):
    logits = torch.randn(5, 1000)
    found = run(logits, [(SamplingParams(temperature=2e-6), seed) for seed in range(5)])
    assert torch.equal(found.tokens, logits.argmax(-1))


@pytest.mark.parametrize("shape", [(1, 128), (3, 49152), (5, 100), (2, 384), (4, 1)])
def test_first_max(shape):
    torch.manual_seed(0)
    z = torch.randn(shape).mul_(2).round_()         # many ties
    best, ids = first_max(z)
    assert torch.equal(best, z.amax(-1))
    for row, i in zip(z, ids):
        assert i == int((row == row.max()).nonzero()[0])
    z[0, -1] = math.nan
    best, ids = first_max(z)
    assert best[0].isnan() and 0 <= ids[0] < shape[1]
    assert torch.equal(first_max(torch.full((2, 256), -INF))[1], torch.zeros(2, dtype=torch.int64))


# ---- filters against transformers ----------------------------------------------------------------------------------------------

def kept_by_us(logits, fields):
    params = SamplingParams(**fields)
    n, vocab_size = logits.shape
    state = SamplingState(n, vocab_size, "cpu")
    for row in range(n):
        state.set_row(row, params, 0, [0], [])
    z = logits * state.values[:, sampling.INV_TEMPERATURE, None]
    filter_(z, state.values, work_of(params, vocab_size), [torch.empty_like(z) for _ in range(3)])
    return z > -1e37


def kept_by_transformers(logits, fields):
    scores = logits.double()        # its own rounding is not ours to follow
    if fields.get("temperature", 1) != 1:
        scores = TemperatureLogitsWarper(float(fields["temperature"]))(None, scores)
    if 0 < fields.get("top_k", 0) < logits.shape[-1]:
        scores = TopKLogitsWarper(fields["top_k"])(None, scores)
    if fields.get("top_p", 1) < 1:
        scores = TopPLogitsWarper(fields["top_p"])(None, scores)
    if fields.get("min_p", 0):
        scores = MinPLogitsWarper(fields["min_p"])(None, scores)
    return scores > -INF


@pytest.mark.parametrize("fields", [
    {"top_k": 2}, {"top_k": 50}, {"top_k": 64}, {"top_k": 65}, {"top_k": 500}, {"top_k": 999}, {"top_k": 1000}, {"top_k": 5000},
    {"top_p": 0.01}, {"top_p": 0.5}, {"top_p": 0.9}, {"top_p": 0.99}, {"top_p": 0.9999}, {"min_p": 0.001}, {"min_p": 0.1},
    {"min_p": 1.0}, {"top_k": 20, "top_p": 0.8}, {"top_k": 64, "top_p": 0.3}, {"top_k": 300, "top_p": 0.8},
    {"top_k": 20, "top_p": 0.95, "min_p": 0.05}, {"top_k": 300, "top_p": 0.95, "min_p": 0.01},
    {"top_p": 0.9, "temperature": 0.3}, {"top_p": 0.9, "temperature": 3.0},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.02, "temperature": 1.7},
], ids=str)
def test_kept_sets_are_those_of_transformers(fields):
    torch.manual_seed(0)
    for scale in (0.3, 2.0, 6.0):
        logits = torch.randn(40, 1000) * scale
        ours, theirs = kept_by_us(logits, fields), kept_by_transformers(logits, fields)
        if "top_p" not in fields and "min_p" not in fields:
            assert torch.equal(ours, theirs)
        # Rounding may move a boundary: ours lies between the sets of settings that are narrower and wider by 1e-6.
        narrower, wider = dict(fields), dict(fields)
        for name in fields.keys() & {"top_p", "min_p"}:
            step = 1e-6 if name == "top_p" else -1e-5 * fields[name]
            narrower[name], wider[name] = min(1.0, fields[name] - step), fields[name] + step
        assert (kept_by_transformers(logits, narrower) <= ours).all() and (ours <= kept_by_transformers(logits, wider)).all()
        assert (ours != theirs).sum() <= 3


def test_small_and_large_top_k_agree(monkeypatch):
    """The sorted list and the bisection find the same boundary."""
    logits = torch.randn(30, 700) * 3
    for fields in ({"top_k": 7}, {"top_k": 64}, {"top_k": 33, "top_p": 0.7}):
        by_list = kept_by_us(logits, fields)
        with monkeypatch.context() as patch:
            patch.setattr(sampling, "SMALL_K", 0)
            assert torch.equal(kept_by_us(logits, fields), by_list)


def test_ties_stay_together(kernel_set):
    """Tokens of equal logit are all kept or all removed, whatever their order."""
    logits = torch.tensor([[3.0, 2.0, 2.0, 2.0, 1.0, 1.0, 0.0]])
    assert kept_by_us(logits, {"top_k": 2}).tolist() == [[True] * 4 + [False] * 3]
    assert kept_by_us(logits, {"top_k": 5}).tolist() == [[True] * 6 + [False]]
    assert kept_by_us(logits, {"top_p": 0.5}).tolist() == [[True] * 4 + [False] * 3]
    assert kept_by_us(torch.zeros(1, 300), {"top_p": 0.1}).all()
    order = torch.randperm(7)
    assert torch.equal(kept_by_us(logits[:, order], {"top_k": 3}), kept_by_us(logits, {"top_k": 3})[:, order])


def test_exact_boundaries(kernel_set):
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert kept_by_us(logits, {"top_p": 0.4}).sum() == 1
    assert kept_by_us(logits, {"top_p": 0.7}).sum() == 2
    assert kept_by_us(logits, {"top_p": 0.71}).sum() == 3
    assert kept_by_us(logits, {"top_p": 0.9}).sum() == 3
    assert kept_by_us(logits, {"top_p": 1e-9}).sum() == 1
    assert kept_by_us(logits, {"min_p": 0.75}).sum() == 2
    assert kept_by_us(logits, {"min_p": 0.25}).sum() == 4
    assert kept_by_us(logits, {"min_p": 1.0}).sum() == 1


def test_filters_on_rows_with_masked_tokens(kernel_set):
    """-inf tokens (a grammar's) hold no mass and stay out, also when k exceeds what is left."""
    logits = torch.full((3, 500), -INF)
    logits[:, 5:8] = torch.tensor([1.0, 2.0, 3.0])
    for fields in ({}, {"top_k": 50}, {"top_k": 300}, {"top_p": 0.999}, {"min_p": 0.01}, {"top_k": 300, "top_p": 0.99}):
        found = run(logits.repeat(40, 1), [(SamplingParams(**fields), seed) for seed in range(120)])
        assert set(found.tokens.tolist()) == {5, 6, 7} and not found.bad.any(), fields


# ---- neighbours ----------------------------------------------------------------------------------------------------------------

FIELDS = [{}, {"temperature": 0}, {"top_p": 0.9}, {"top_k": 20}, {"top_k": 200, "top_p": 0.8}, {"min_p": 0.1},
          {"temperature": 1.5}, {"presence_penalty": 1.5}, {"repetition_penalty": 1.3, "top_p": 0.5},
          {"frequency_penalty": 0.7, "logprobs": 3}, {"logit_bias": {7: 5.0, 9: -100.0}},
          {"min_tokens": 20, "temperature": 0.7}, {"logprobs": 0, "top_k": 64, "top_p": 0.9}]


def test_a_top_k_beyond_the_allowed_tokens_leaves_the_other_filters_alone(kernel_set):
    logits = torch.full((1, 1000), -INF)
    logits[0, :200] = torch.linspace(4, 0, 200)
    for fields in ({"top_p": 0.1}, {"min_p": 0.9}, {"top_p": 0.1, "min_p": 0.9}):
        drawn = {k: [run(logits.clone(), [(SamplingParams(top_k=k, **fields), seed)]).tokens.item() for seed in range(40)] for k in (-1, 900)}
        assert drawn[900] == drawn[-1] and max(drawn[900]) < 20


def test_a_row_does_not_depend_on_its_neighbours(kernel_set):
    """F075: alone, permuted, in other rows, among others, in blocks of another size: the same token and the same logprob."""
    torch.manual_seed(1)
    n = 39
    requests = [(SamplingParams(**FIELDS[i % len(FIELDS)]), derive_seed(5, i % 128)) for i in range(n)]
    logits = (torch.randn(n, 640) * 2).bfloat16().float()               # with ties
    prompts = [[i % 640, 7, 9] for i in range(n)]
    outputs = [[(i * 31 + j) % 640 for j in range(i % 9)] for i in range(n)]
    whole = run(logits, requests, prompts=prompts, outputs=outputs, end_ids=[2])

    def part(index, **options):
        return run(logits[index], [requests[i] for i in index], prompts=[prompts[i] for i in index],
                   outputs=[outputs[i] for i in index], end_ids=[2], **options)

    for i in range(n):
        alone = part([i])
        assert alone.tokens[0] == whole.tokens[i]
        if requests[i][0].logprobs is not None:
            assert torch.equal(alone.logprobs[0], whole.logprobs[i])
    generator = np.random.default_rng(2)
    for size in (2, 17, n):
        index = generator.permutation(n)[:size].tolist()
        rows = generator.permutation(64)[:size].tolist()
        for block_rows in (1, 3, 64):
            state = SamplingState(64, 640, "cpu")
            state.block_rows = block_rows
            assert torch.equal(part(index, rows=rows, state=state).tokens, whole.tokens[index])


def test_every_kernel_set_draws_the_same_tokens(kernel_set):
    """Against the torch twins, over all filters; a token may differ only where two perturbed logits are as good as equal."""
    rng = np.random.default_rng(0)
    for case in range(10):
        vocab_size = int(rng.choice([5, 100, 1000, 5003]))
        requests = [(SamplingParams(temperature=float(rng.choice([0.3, 1, 2])), top_p=float(rng.choice([1, 1, 0.9, 0.5, 1e-3, 0])),
                                    top_k=int(rng.choice([-1, -1, 1, 5, 64, 65, 900])), min_p=float(rng.choice([0, 0, 0.05, 0.5]))), int(seed))
                    for seed in rng.integers(2**63, size=12)]
        logits = torch.from_numpy(rng.normal(size=(12, vocab_size)) * 3).float()
        if case % 3 == 0:  # ties, and tokens that a mask forbids
            logits = (logits * 4).round() / 4
            logits[:, ::7] = -INF
        found, chosen = run(logits.clone(), requests).tokens, native.choice
        native.use("off")
        want = run(logits.clone(), requests).tokens
        native.use(chosen)
        for i in (found != want).nonzero().flatten().tolist():
            z = logits[i] / requests[i][0].temperature + noise(torch.tensor([requests[i][1]]), torch.tensor([1]), torch.arange(vocab_size))[0]
            assert abs(z[found[i]] - z[want[i]]) < 1e-4


def test_seeds_and_positions_matter():
    logits = torch.zeros(64, 500)
    same = run(logits, [(SamplingParams(), 5)] * 64)
    assert len(set(same.tokens.tolist())) == 1
    seeds = run(logits, [(SamplingParams(), seed) for seed in range(64)])
    places = run(logits, [(SamplingParams(), 5)] * 64, positions=torch.arange(64))
    assert len(set(seeds.tokens.tolist())) > 40 and len(set(places.tokens.tolist())) > 40
    big = run(logits[:2], [(SamplingParams(), 2**64 - 1), (SamplingParams(), 2**63)])
    assert len(set(big.tokens.tolist())) == 2


def test_sampling_is_the_argmax_of_logits_plus_noise(kernel_set):
    """What drafts rely on: whoever knows the seed can tell the token."""
    logits = torch.randn(8, 300)
    seeds, positions = torch.arange(8) + 11, torch.arange(8) * 3
    found = run(logits, [(SamplingParams(temperature=0.7), seed) for seed in seeds.tolist()], positions=positions)
    assert torch.equal(found.tokens, (logits / 0.7 + noise(seeds, positions, torch.arange(300))).argmax(-1))


def test_a_reused_row_forgets_its_predecessor(kernel_set):
    state = SamplingState(2, 300, "cpu")
    logits = torch.randn(2, 300)
    heavy = SamplingParams(repetition_penalty=1.5, frequency_penalty=1.0, logit_bias={3: 100.0}, min_tokens=9, top_k=5,
                           temperature=0.5)
    run(logits, [(heavy, 1), (heavy, 2)], state=state, prompts=[[1, 2], [3]], outputs=[[4, 4], [5]], end_ids=[8])
    for params in (SamplingParams(), SamplingParams(presence_penalty=1.0), SamplingParams(repetition_penalty=1.2)):
        fresh = run(logits, [(params, 1), (params, 2)])
        assert torch.equal(run(logits, [(params, 1), (params, 2)], state=state).tokens, fresh.tokens)


# ---- penalties and biases ------------------------------------------------------------------------------------------------------

def edited(logits, params, prompt, output, **options):
    """The logits after the edits of one request."""
    state = SamplingState(1, logits.shape[-1], "cpu")
    state.set_row(0, params, 0, prompt, output)
    batch = state.batch([(0, params, len(prompt))], end_ids=options.pop("end_ids", []))
    logits = logits.clone()
    state.sample(logits, torch.tensor([len(prompt) + len(output)]), batch, **options)
    return logits


def test_repetition_penalty_is_that_of_transformers():
    torch.manual_seed(0)
    for penalty in (0.5, 1.2, 2.0):
        logits = torch.randn(1, 500) * 4
        prompt, output = torch.randint(0, 500, (40,)).tolist(), torch.randint(0, 500, (30,)).tolist()
        theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits)
        torch.testing.assert_close(edited(logits, SamplingParams(repetition_penalty=penalty), prompt, output), theirs)


def test_presence_and_frequency_count_the_output_only():
    """F073."""
    logits = torch.randn(1, 50)
    prompt, output = [1, 1, 1, 2, 3], [4, 4, 4, 5, 1]
    found = edited(logits, SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), prompt, output)
    expected = logits.clone()
    for token, count in ((4, 3), (5, 1), (1, 1)):
        expected[0, token] -= 0.5 + 0.25 * count
    torch.testing.assert_close(found, expected)
    assert torch.equal(edited(logits, SamplingParams(presence_penalty=2, frequency_penalty=2), prompt, []), logits)


@pytest.mark.parametrize("extra", [{}, {"frequency_penalty": 0.5, "repetition_penalty": 1.3}], ids=str)
@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 1}, {"temperature": 0.7, "top_p": 0.8}, {"top_k": 5}], ids=str)
def test_a_settled_row_is_not_sampled(fields, extra):
    """Its logits may be anything. What others draw, and what is counted, is what it was."""
    params = SamplingParams(**fields, **extra)
    for settled in ({2: 7}, {0: 3, 1: 4, 5: 0}, {i: 9 - i for i in range(6)}):
        plain, state = SamplingState(6, 40, "cpu"), SamplingState(6, 40, "cpu")
        logits = torch.randn(6, 40)
        forced = logits.clone()
        for at, token in settled.items():
            logits[at], forced[at] = math.nan, -INF
            forced[at, token] = 0
        found = []
        for one, z, known in ((plain, forced, {}), (state, logits, settled)):
            for row in range(6):
                one.set_row(row, params, row, [1, 2], [3])
            found.append(one.sample(z, torch.full((6,), 3), one.batch([(row, params, 2) for row in range(6)], settled=known)))
        assert torch.equal(found[0].tokens, found[1].tokens) and not found[1].bad.any()
        assert not extra or torch.equal(plain.counts, state.counts)


def test_counts_kept_while_sampling_equal_counts_rebuilt():
    """A request that was retracted (its row written again from its ids) goes on as if nothing had happened."""
    torch.manual_seed(3)
    kinds = [SamplingParams(presence_penalty=0.8, frequency_penalty=0.3), SamplingParams(repetition_penalty=1.4),
             SamplingParams(), SamplingParams(repetition_penalty=1.1, presence_penalty=-1.0, temperature=0)]
    prompts = [[1, 2, 3], [4, 4], [5], [6, 7, 8, 9]]
    outputs = [[], [], [], []]
    state = SamplingState(4, 40, "cpu")
    for row, params in enumerate(kinds):
        state.set_row(row, params, row, prompts[row], [])
    batch = state.batch([(row, params, len(prompts[row])) for row, params in enumerate(kinds)])
    for _ in range(30):
        logits = torch.randn(4, 40)
        positions = torch.tensor([len(prompt) + len(output) for prompt, output in zip(prompts, outputs)])
        again = run(logits, [(params, row) for row, params in enumerate(kinds)], prompts=prompts, outputs=outputs)
        found = state.sample(logits, positions, batch)
        assert torch.equal(found.tokens, again.tokens)
        for output, token in zip(outputs, found.tokens.tolist()):
            output.append(token)


def test_logit_bias():
    """F181's arithmetic: added once to its token and row, also when a row is reordered."""
    logits = torch.randn(3, 60)
    requests = [(SamplingParams(temperature=0, logit_bias={59: 100.0}), 0), (SamplingParams(temperature=0), 0),
                (SamplingParams(temperature=0, logit_bias={int(logits[2].argmax()): -100.0}), 0)]
    found = run(logits, requests).tokens
    assert found[0] == 59 and found[1] == logits[1].argmax() and found[2] == logits[2].topk(2).indices[1]
    assert run(logits[[2, 0]], [requests[2], requests[0]]).tokens.tolist() == found[[2, 0]].tolist()
    changed = edited(logits[:1], SamplingParams(logit_bias={3: 1.5, 4: -2.0}), [0], [])
    expected = logits[:1].clone()
    expected[0, 3] += 1.5
    expected[0, 4] -= 2.0
    assert torch.equal(changed, expected)


def test_min_tokens_masks_end_ids_until_reached():
    logits = torch.zeros(1, 30)
    logits[0, 2], logits[0, 5], logits[0, 7] = 9.0, 8.0, 7.0
    params = SamplingParams(temperature=0, min_tokens=3, stop_token_ids=[5])
    for sampled in range(6):
        found = run(logits, [(params, 0)], prompts=[[1] * 4], outputs=[[9] * sampled], end_ids=[2]).tokens.item()
        assert found == (7 if sampled < 3 else 2), sampled
    eager = SamplingParams(temperature=0, min_tokens=3, stop_token_ids=[5], ignore_eos=True)    # no token ends such a text
    assert run(logits, [(eager, 0)], prompts=[[1] * 4], end_ids=[2]).tokens.item() == 2
    biased = SamplingParams(temperature=0, min_tokens=3, logit_bias={2: 100.0})
    assert run(logits, [(biased, 0)], prompts=[[1] * 4], end_ids=[2]).tokens.item() == 5


# ---- masks ---------------------------------------------------------------------------------------------------------------------

def mask_of(allowed, vocab_size):
    """A mask that allows row i the ids of allowed[i]; None: all."""
    banned = torch.zeros(len(allowed), vocab_size, dtype=torch.bool)
    for row, ids in enumerate(allowed):
        if ids is not None:
            banned[row] = True
            banned[row, list(ids)] = False
    return Mask(lambda logits: logits.masked_fill_(banned, -INF), torch.ones(len(allowed)))


def test_a_mask_wins_over_biases_and_not_over_logprobs():
    logits = torch.randn(2, 70)
    params = SamplingParams(temperature=0, logit_bias={5: 100.0}, logprobs=1)
    found = run(logits, [(params, 0), (params, 0)], mask=mask_of([{3, 40, 69}, None], 70))
    assert found.tokens.tolist() == [[3, 40, 69][int(logits[0, [3, 40, 69]].argmax())], 5]
    torch.testing.assert_close(found.logprobs, logits.log_softmax(-1).gather(1, found.tokens[:, None])[:, 0])
    requests = [(SamplingParams(), seed) for seed in range(100)]
    hundred = run(torch.randn(1, 70).repeat(100, 1), requests, mask=mask_of([{3, 40, 69}] * 100, 70))
    assert set(hundred.tokens.tolist()) == {3, 40, 69}


def test_a_mask_without_any_token_is_bad(kernel_set):
    found = run(torch.randn(2, 70), [(SamplingParams(), 1)] * 2, mask=mask_of([set(), None], 70))
    assert found.bad.tolist() == [True, False]


def test_what_is_drawn_without_knowing_what_may_come_is_not_counted():
    state, params = SamplingState(3, 70, "cpu"), SamplingParams(frequency_penalty=1.0)
    mask = Mask(lambda logits: None, torch.tensor([1.0, 0.0, 1.0]))
    found = run(torch.randn(3, 70), [(params, seed) for seed in range(3)], mask=mask, state=state)
    assert [state.counts[row, token].item() for row, token in enumerate(found.tokens.tolist())] == [1, 0, 1] and state.counts.sum() == 2


# ---- logprobs ------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 0.5, "seed": 1}, {"temperature": 2, "seed": 1},
                                    {"top_p": 0.1}, {"top_k": 2}, {"presence_penalty": 2.0}, {"repetition_penalty": 2.0},
                                    {"logit_bias": {3: 50.0}}])
def test_logprobs_are_the_models(fields):
    """F077: before temperature, filters, penalties and bias; sorted."""
    torch.manual_seed(0)
    logits = torch.randn(4, 200) * 3
    exact = logits.double().log_softmax(-1)
    found = run(logits, [(SamplingParams(logprobs=5, **fields), 7)] * 4, outputs=[[1, 3], [3], [5], []])
    torch.testing.assert_close(found.logprobs.double(), exact.gather(1, found.tokens[:, None])[:, 0], atol=2e-6, rtol=1e-6)
    values, ids = exact.topk(5)
    assert torch.equal(found.top_ids, ids)
    torch.testing.assert_close(found.top_logprobs.double(), values, atol=2e-6, rtol=1e-6)


def test_logprobs_only_of_rows_that_ask():
    logits = torch.randn(5, 90)
    found = run(logits, [(SamplingParams(logprobs=k, temperature=0), 0) for k in (None, 2, None, 0, 4)])
    assert found.logprobs.isnan().tolist() == [True, False, True, False, False]
    assert found.top_ids.shape == found.top_logprobs.shape == (5, 4)
    torch.testing.assert_close(found.top_logprobs[4], logits[4].log_softmax(-1).topk(4).values)
    torch.testing.assert_close(found.top_logprobs[1, :2], logits[1].log_softmax(-1).topk(2).values)
    nobody = run(logits, [(SamplingParams(), 0)] * 5)
    assert nobody.logprobs is None and nobody.top_ids is None and nobody.top_logprobs is None
    zero = run(logits, [(SamplingParams(logprobs=0), 0)] * 5)
    assert zero.top_ids.shape == (5, 0) and not zero.logprobs.isnan().any()


def test_equal_logprobs_are_listed_by_id():
    logits = torch.zeros(1, 300)
    logits[0, [250, 9, 130]] = 1.0
    found = run(logits, [(SamplingParams(logprobs=3, temperature=0), 0)])
    assert found.top_ids.tolist() == [[9, 130, 250]]


@pytest.mark.parametrize("n", [0, 1, 37, 700])
def test_prompt_logprobs(n, monkeypatch):
    monkeypatch.setattr(sampling, "CPU_BLOCK", 3000)
    logits, targets = torch.randn(n, 150), torch.randint(0, 150, (n,))
    before = logits.clone()
    for k in (0, 3, 20):
        logprobs, top_ids, top_logprobs = prompt_logprobs(logits, targets, k)
        exact = logits.log_softmax(-1)
        torch.testing.assert_close(logprobs, exact.gather(1, targets[:, None])[:, 0])
        torch.testing.assert_close(top_logprobs, exact.topk(k).values)
        assert top_ids.shape == (n, k)
        torch.testing.assert_close(exact.gather(1, top_ids), top_logprobs)
    assert torch.equal(logits, before)
    assert prompt_logprobs(torch.randn(2, 7), torch.tensor([1, 2]), 20)[1].shape == (2, 7)


# ---- bad rows ------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("fields", [{}, {"temperature": 0}, {"top_k": 5}, {"top_k": 100}, {"top_p": 0.5}, {"min_p": 0.5},
                                    {"top_k": 5, "top_p": 0.5}, {"repetition_penalty": 1.5}, {"presence_penalty": 1.0},
                                    {"logit_bias": {3: 1.0}}, {"logprobs": 3}, {"min_tokens": 2}])
def test_rows_that_are_not_finite_are_flagged(kernel_set, fields):
    """NaN, +inf, or nothing but -inf end their own request; the others sample as if alone."""
    torch.manual_seed(0)
    good = torch.randn(2, 256)
    logits = good[[0, 0, 0, 0, 1]].clone()
    logits[0, 17] = math.nan
    logits[1] = -INF
    logits[2, 200] = INF
    logits[3, 1:] = -INF            # one token left: fine
    found = run(logits, [(SamplingParams(**fields), 4)] * 5, end_ids=[2])
    assert found.bad.tolist() == [True, True, True, False, False]
    assert ((found.tokens >= 0) & (found.tokens < 256)).all()
    assert found.tokens[3] == 0
    assert found.tokens[4] == run(good[1:], [(SamplingParams(**fields), 4)], end_ids=[2]).tokens[0]


# ---- work not done -------------------------------------------------------------------------------------------------------------

def test_nothing_is_computed_that_nobody_asked_for(monkeypatch):
    state = SamplingState(4, 300, "cpu")
    logits = torch.randn(4, 300)

    def forbidden(*args):
        raise AssertionError("computed for nobody")

    for name in ("filter_", "_log_exponential", "_logprobs", "add_bias"):
        monkeypatch.setattr(sampling, name, forbidden)
    run(logits, [(SamplingParams(temperature=0), 0)] * 4, state=state)
    assert state.counts is None and state.in_prompt is None and state.scratch == []
    monkeypatch.undo()
    run(logits, [(SamplingParams(presence_penalty=1.0), 0)] * 4, state=state)
    assert state.counts is not None and state.in_prompt is None


def test_no_sampling_waits_for_the_device(monkeypatch):
    """Reading a tensor from the host is what would wait: forbid every way to do it."""
    def forbidden(self, *args):
        raise AssertionError("the host read a tensor")

    state = SamplingState(13, 640, "cpu")
    params = [SamplingParams(**fields) for fields in FIELDS]
    for row, each in enumerate(params):
        state.set_row(row, each, row, [1, 2], [3])
    logits, positions = torch.randn(13, 640), torch.full((13,), 3)
    batch = state.batch([(row, each, 2) for row, each in enumerate(params)], end_ids=[4])
    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy", "nonzero", "__iter__"):
        monkeypatch.setattr(torch.Tensor, name, forbidden)
    state.sample(logits, positions, batch, Mask(lambda logits: None, torch.ones(13)))


def test_an_empty_batch():
    """A step may hold nothing but chunks of prompts."""
    state = SamplingState(4, 300, "cpu")
    found = state.sample(torch.empty(0, 300), torch.empty(0, dtype=torch.int64), state.batch([]))
    assert found.tokens.shape == found.bad.shape == (0,) and found.logprobs is None


def test_demo_runs():
    out = subprocess.run([sys.executable, "-m", "nano_sgl.sampling"], check=True, capture_output=True, text=True).stdout
    assert "top_p" in out
