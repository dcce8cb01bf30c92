"""spec.py against brute force in plain Python: draft trees, expansion, merging, verification, and the drafters that need no weights."""

from __future__ import annotations

import itertools
import math
import random
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nano_sgl import native, sampling, spec
from nano_sgl.protocol import SamplingParams
from nano_sgl.radix import Tree, draw, key_bytes
from nano_sgl.spec import (
    DECAY, CostCurve, DraftOptions, DraftTree, Lengths, Ngram, Radix, Record, best, expand, guess, make_drafters, merge, no_guesses, reroot,
    verify,
)

INF = math.inf
RANDOM = st.randoms(use_true_random=False)
REPOSITORY = Path(__file__).parent.parent


# ---------------------------------------------------------------------------------------------------- trees in Python

def grown(r: random.Random, nodes: int, vocabulary: int = 5, root: int = 0, lean: float = 0.5) -> tuple[list[int], list[int]]:
    """(tokens, parents) of a random tree: parents come first, siblings differ. `lean`: how often a node hangs on the last one."""
    tokens, parents = [root], [0]
    while len(tokens) < nodes:
        parent = len(tokens) - 1 if r.random() < lean else r.randrange(len(tokens))
        free = set(range(vocabulary)) - {t for t, p in list(zip(tokens, parents))[1:] if p == parent}
        if free:
            tokens.append(r.choice(sorted(free)))
            parents.append(parent)
    return tokens, parents


def packed(r: random.Random, trees: list[tuple[list[int], list[int]]], nodes: int) -> DraftTree:
    """Trees as rows; padding holds anything that may stand there."""
    rows = [([*tokens, *r.choices(range(5), k=nodes - len(tokens))], [*parents, *(r.randrange(nodes) for _ in range(nodes - len(tokens)))])
            for tokens, parents in trees]
    return DraftTree(torch.tensor([row[0] for row in rows]), torch.tensor([row[1] for row in rows]), torch.tensor([len(t) for t, _ in trees]))


def ancestors(parents: list[int], node: int) -> list[int]:
    """From the root down to the node itself."""
    return [*ancestors(parents, parents[node]), node] if node else [0]


def paths_of(tree: DraftTree, row: int) -> list[tuple[int, ...]]:
    """Of each guess of a row the tokens from the first guess down to it. Audits that it is a tree whose siblings differ."""
    size, tokens, parents = int(tree.sizes[row]), tree.tokens[row].tolist(), tree.parents[row].tolist()
    assert 1 <= size <= len(tokens) and all(0 <= parents[node] < node for node in range(1, size))
    found = [tuple(tokens[i] for i in ancestors(parents, node)[1:]) for node in range(1, size)]
    assert len(set(found)) == len(found)
    return found


def scored(r: random.Random, parents: list[int], steps: int = 4) -> list[float]:
    """Random scores that never rise along a path, and often tie."""
    scores = [1.0]
    for parent in parents[1:]:
        scores.append(scores[parent] * r.randint(1, steps) / steps)
    return scores


def is_best(found: list[tuple[tuple, float]], expected: dict[tuple, float], count: int) -> None:
    """`found` are as many of the expected (path, score) as there may be, none that is left is better, and they stand best first."""
    assert len(found) == min(count, len(expected))
    for path, score in found:
        assert score == pytest.approx(expected[path], rel=1e-4)
    scores = [score for _, score in found]
    assert all(a >= b for a, b in zip(scores, scores[1:]))
    left = [score for path, score in expected.items() if path not in dict(found)]
    assert not left or not found or scores[-1] >= max(left) * (1 - 1e-4)


@settings(max_examples=60, deadline=None)
@given(RANDOM, st.sampled_from([1, 2, 5, 9, 33, 64]))
def test_bits_depth_and_family_are_what_a_walk_finds(r, nodes):
    trees = [grown(r, r.randint(1, nodes), lean=r.choice([0, 0.5, 1])) for _ in range(3)]
    tree = packed(r, trees, nodes)
    first, sibling = tree.family()
    for row, (_, parents) in enumerate(trees):
        for node in range(nodes):
            real = node < len(parents)
            above = ancestors(parents, node) if real else [0]
            assert bool(tree.inside[row, node]) == real
            assert int(tree.bits[row, node]) % 2**64 == sum(1 << i for i in above)
            assert tree.members[row, node].tolist() == [i in above for i in range(nodes)]
            assert int(tree.depth[row, node]) == len(above) - 1
            children = [i for i in range(1, len(parents)) if real and parents[i] == node]
            later = [i for i in range(node + 1, len(parents)) if 0 < node and parents[i] == parents[node]]
            assert int(first[row, node]) == (children[0] if children else -1)
            assert int(sibling[row, node]) == (later[0] if later else -1)


def test_the_64th_node_is_the_sign_bit():
    chain = DraftTree(torch.arange(64)[None], torch.arange(64)[None].sub(1).clamp(min=0), torch.tensor([64]))
    assert chain.bits[0].tolist() == [2**(node + 1) - 1 for node in range(63)] + [-1]
    assert chain.depth[0].tolist() == list(range(64))
    star = DraftTree(torch.arange(64)[None], torch.zeros(1, 64, dtype=torch.int64), torch.tensor([64]))
    assert star.bits[0].tolist() == [1] + [2**node + 1 for node in range(1, 63)] + [-2**63 + 1]
    assert star.depth[0].tolist() == [0] + [1] * 63
    found = verify(star, torch.full((1, 64), 63))
    assert (found.counts.tolist(), found.order[0, :2].tolist()) == ([1], [0, 63])


@settings(max_examples=30, deadline=None)
@given(RANDOM)
def test_the_first_guesses_are_a_tree_again(r):
    tree = packed(r, [grown(r, r.randint(1, 9)) for _ in range(4)], 9)
    counts = [r.randint(0, 9) for _ in range(4)]
    first = tree.first(torch.tensor(counts))
    for row, count in enumerate(counts):
        assert paths_of(first, row) == paths_of(tree, row)[:count]
        assert first.members[row, count + 1:].sum(-1).eq(1).all()  # what was cut sees the root alone
    alone = no_guesses(torch.tensor([3, 4]), 5)
    assert (alone.tokens.shape, alone.sizes.tolist(), alone.tokens[:, 0].tolist()) == ((2, 6), [1, 1], [3, 4])


# ------------------------------------------------------------------------------------------- best, expand, merge

@settings(max_examples=100, deadline=None)
@given(RANDOM, st.integers(1, 12), st.integers(1, 16))
def test_the_best_candidates_are_a_tree(r, guesses, count):
    """With fewer candidates than asked for, candidates that are none, and ties."""
    rows = [grown(r, guesses + 1, root=9) for _ in range(3)]
    scores = [scored(r, parents, steps=2)[1:] for _, parents in rows]
    for row, none in enumerate(r.choice([0, 0.3, 1]) for _ in rows):
        for node in range(guesses):  # what hangs on no candidate is none
            parent = rows[row][1][node + 1] - 1
            if r.random() < none or (parent >= 0 and scores[row][parent] == -INF):
                scores[row][node] = -INF
    tokens, parents = (torch.tensor([row[part][1:] for row in rows]) for part in (0, 1))
    tree, found = best(torch.tensor([9, 9, 9]), tokens, parents - 1, torch.tensor(scores), count)
    assert tree.tokens.shape == found.shape == (3, count + 1)
    for row, (tokens, parents) in enumerate(rows):
        order = sorted((n for n in range(guesses) if scores[row][n] > -INF), key=lambda n: (-scores[row][n], n))[:count]
        assert paths_of(tree, row) == [tuple(tokens[i] for i in ancestors(parents, n + 1)[1:]) for n in order]
        assert found[row, 1:len(order) + 1].tolist() == pytest.approx([scores[row][n] for n in order])
        assert tree.tokens[row, 0] == 9 and not tree.tokens[row, len(order) + 1:].any()


def eagle2(likely, steps: int, topk: int, count: int) -> tuple[list[tuple], list[list[tuple]]]:
    """Li et al. 2024, section 4, in words: (the paths that stay, the leaves that were expanded at each step)."""
    made, expanded, leaves = [], [], [(0.0, ())]
    for _ in range(steps):
        expanded.append([path for _, path in leaves])
        new = [(score + logprob, path + (token,)) for score, path in leaves for token, logprob in likely(path)]
        made += new
        leaves = sorted(new, key=lambda at: -at[0])[:topk]
    return sorted((at for at in made if at[0] > -INF), key=lambda at: (-at[0], len(at[1])))[:count], expanded


@settings(max_examples=100, deadline=None)
@given(RANDOM, st.integers(1, 5), st.integers(1, 4), st.integers(1, 24))
def test_expand_is_eagles_expansion(r, steps, topk, count):
    tables = [{}, {}]

    def likely(row: int, path: tuple) -> list[tuple[int, float]]:
        if path not in tables[row]:
            tables[row][path] = [(token, r.choice([0.0, -0.25, -0.5, -0.5, -1.0, -INF])) for token in r.sample(range(7), topk)]
        return tables[row][path]

    oracle = [eagle2(lambda path, row=row: likely(row, path), steps, topk, count) for row in range(2)]
    candidates, asked = [[()], [()]], []

    def step(leaves, beams):
        nonlocal candidates
        asked.append([[candidates[row][beam] for beam in beams[row].tolist()] for row in range(2)])
        for row, paths in enumerate(asked[-1]):
            assert [path[-1] if path else 10 + row for path in paths] == leaves[row].tolist()
        made = [[[(path, *at) for at in likely(row, path)] for path in paths] for row, paths in enumerate(asked[-1])]
        candidates = [[path + (token,) for leaf in leaves for path, token, _ in leaf] for leaves in made]
        return tuple(torch.tensor([[[at[part] for at in leaf] for leaf in leaves] for leaves in made]) for part in (1, 2))

    tree, scores = expand(torch.tensor([10, 11]), step, steps, topk, count)
    assert tree.tokens[:, 0].tolist() == [10, 11]
    for row, (kept, expanded) in enumerate(oracle):
        assert [paths[row] for paths in asked] == expanded
        assert paths_of(tree, row) == [path for _, path in kept]
        assert scores[row, 1:len(kept) + 1].tolist() == [score for score, _ in kept]


@settings(max_examples=100, deadline=None)
@given(RANDOM, st.integers(2, 3), st.integers(1, 63))
def test_merge_is_the_union_and_no_guess_stands_twice(r, parts, count):
    rows = 2
    trees = [[grown(r, r.randint(1, 14), vocabulary=3, lean=0.6) for _ in range(rows)] for _ in range(parts)]
    scores = [[scored(r, parents) for _, parents in part] for part in trees]
    wide = [max(2, *(len(tokens) for tokens, _ in part)) + r.randint(0, 3) for part in trees]
    inputs = [(packed(r, part, n), torch.tensor([s + [r.random() for _ in range(n - len(s))] for s in score]))
              for part, score, n in zip(trees, scores, wide)]
    tree, found = merge(inputs, count)
    assert tree.tokens.shape == found.shape == (rows, count + 1)
    for row in range(rows):
        union: dict[tuple, float] = {}  # in the order in which they come
        for (one, _), score in zip(inputs, scores):
            for path, value in zip(paths_of(one, row), score[row][1:]):
                union[path] = max(union.get(path, 0.0), value)
        expected = sorted(union, key=lambda path: -union[path])[:count]
        assert paths_of(tree, row) == expected
        assert found[row, 1:len(expected) + 1].tolist() == pytest.approx([union[path] for path in expected])
    again = merge([(tree, found), inputs[0]], count)[0]  # what has been merged can be merged
    assert [paths_of(again, row) for row in range(rows)] == [paths_of(tree, row) for row in range(rows)]


# ------------------------------------------------------------------------------------------------ verify and reroot

@settings(max_examples=100, deadline=None)
@given(RANDOM, st.sampled_from([1, 4, 16, 64]))
def test_verification_is_a_walk(r, nodes):
    trees = [grown(r, r.randint(1, nodes), vocabulary=4, lean=0.4) for _ in range(4)]
    tree, targets = packed(r, trees, nodes), torch.tensor([[r.randrange(4) for _ in range(nodes)] for _ in trees])
    found = verify(tree, targets)
    for row, (tokens, parents) in enumerate(trees):
        path = [0]
        while step := [n for n in range(1, len(tokens)) if parents[n] == path[-1] and tokens[n] == targets[row, path[-1]]]:
            path += step
        assert int(found.counts[row]) == len(path) - 1
        assert found.order[row].tolist() == path + [n for n in range(nodes) if n not in path]
        assert found.tokens[row, :len(path)].tolist() == targets[row, path].tolist()


def test_a_drafter_that_breaks_the_rules_harms_no_text():
    equal = DraftTree(torch.tensor([[0, 1, 1, 2]]), torch.tensor([[0, 0, 0, 2]]), torch.tensor([4]))  # 1 twice, and 2 below the second
    found = verify(equal, torch.tensor([[1, 2, 2, 3]]))
    assert (found.counts.tolist(), found.order.tolist(), found.tokens[0, :3].tolist()) == ([2], [[0, 2, 3, 1]], [1, 2, 3])
    upside_down = DraftTree(torch.tensor([[0, 3, 2, 1]]), torch.tensor([[0, 2, 3, 0]]), torch.tensor([4]))  # the chain 1 2 3
    found = verify(upside_down, torch.tensor([[1, 4, 3, 2]]))
    assert (found.counts.tolist(), found.order.tolist(), found.tokens.tolist()) == ([3], [[0, 3, 2, 1]], [[1, 2, 3, 4]])


@settings(max_examples=100, deadline=None)
@given(RANDOM, st.integers(1, 20))
def test_rerooted_guesses_are_those_below_what_has_come(r, guesses):
    """Proposed when `known` tokens were known; since then 0 to 5 more have come, often along the tree."""
    rows, columns, cases = 4, 24, []
    for _ in range(rows):
        tokens, parents = grown(r, r.randint(1, guesses + 1), vocabulary=3, lean=0.6)
        scores = scored(r, parents)
        order = sorted(range(len(tokens)), key=lambda n: -scores[n])  # best first, as drafters propose them; the root stays in front
        tokens, parents, scores = [tokens[n] for n in order], [order.index(parents[n]) for n in order], [scores[n] for n in order]
        known, come, node = r.randint(1, 12), [], 0
        for _ in range(r.randint(0, 5)):
            below = [n for n in range(1, len(tokens)) if parents[n] == node]
            node = r.choice(below) if below and r.random() < 0.8 else -1
            come.append(tokens[node] if node >= 0 else r.randrange(3))
        text = [r.randrange(3) for _ in range(known)] + come
        cases.append((tokens, parents, scores, known, come, text + [r.randrange(3) for _ in range(columns - len(text))]))
    pad = lambda part: torch.tensor([[*case[part][1:], *[0] * (guesses + 1 - len(case[part]))] for case in cases]).view(rows, guesses)
    tree, found = reroot(pad(0), pad(1) - 1, (pad(2) * 2**20).long(), torch.tensor([len(case[0]) - 1 for case in cases]),
                         torch.tensor([case[3] for case in cases]), torch.tensor([case[5] for case in cases], dtype=torch.int32),
                         torch.tensor([case[3] + len(case[4]) - 1 for case in cases]))
    assert tree.tokens.shape == found.shape == (rows, guesses + 1)
    for row, (tokens, parents, scores, known, come, text) in enumerate(cases):
        paths = [tuple(tokens[i] for i in ancestors(parents, n)[1:]) for n in range(len(tokens))]
        left = [(path[len(come):], score) for path, score in zip(paths, scores) if path[:len(come)] == tuple(come) and len(path) > len(come)]
        root = dict(zip(paths, scores)).get(tuple(come), 1.0)
        assert tree.tokens[row, 0] == text[known + len(come) - 1]
        assert paths_of(tree, row) == [path for path, _ in left]
        assert found[row, 1:len(left) + 1].tolist() == pytest.approx([score / root for _, score in left], rel=1e-3, abs=2**-20 / root)


# ------------------------------------------------------------------------------------------------------------- ngram

def lookup(text: list[int], o: DraftOptions) -> tuple[dict[tuple, float], int]:
    """Prompt lookup as `Ngram` describes it: (score of each guess by its path, quality)."""
    last, places = len(text) - 1, []
    for end in range(last):
        match = 0
        while match < o.longest and match <= end and text[end - match] == text[last - match]:
            match += 1
        if match >= o.shortest:
            places.append((match, end))
    places = sorted(places, reverse=True)[:o.branches]
    scores: dict[tuple, float] = defaultdict(float)
    for match, end in places:
        vote = 2.0**match / sum(2.0**m for m, _ in places)
        chain = [text[end + 1 + k % (last - end)] for k in range(o.count)]
        for k in range(o.count):
            scores[tuple(chain[:k + 1])] += vote * DECAY**(k + 1)
    return dict(scores), min(places[0][0], 15) if places else 0


def padded(r: random.Random, texts: list[list[int]], columns: int) -> torch.Tensor:
    """Texts as rows, garbage behind them."""
    return torch.tensor([text + [r.choice([0, 1, -1, 2**31 - 1]) for _ in range(columns - len(text))] for text in texts], dtype=torch.int32)


@pytest.mark.parametrize("march", ["native", "off"])
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(RANDOM, st.integers(1, 5), st.integers(1, 12), st.integers(1, 10), st.integers(1, 4))
def test_ngram_is_a_prompt_lookup(march, monkeypatch, r, branches, count, longest, vocabulary):
    """kernels.cpp's, and the torch twin."""
    monkeypatch.setattr(native, "choice", march)
    options = DraftOptions(count=count, branches=branches, longest=longest, shortest=r.randint(1, longest))
    texts = [[r.randrange(vocabulary) for _ in range(r.choice([1, 2, 3, 8, 40]))] for _ in range(4)]
    texts[0] = (texts[0] * 3)[:40]  # one that repeats itself
    columns = max(map(len, texts)) + r.randint(0, 5)
    known = torch.tensor([len(text) for text in texts])
    tree, scores, quality = drafted_by(options, padded(r, texts, columns), known)
    assert tree.tokens.shape == scores.shape == (4, count + 1) and tree.tokens.dtype == torch.int64
    for row, text in enumerate(texts):
        expected, match = lookup(text, options)
        assert (int(tree.tokens[row, 0]), int(quality[row])) == (text[-1], match)
        is_best(list(zip(paths_of(tree, row), scores[row, 1:].tolist())), expected, count)
        assert set(tree.tokens[row].tolist()) <= {0, *text}, "padding holds tokens that exist"
    other = drafted_by(options, padded(r, texts, columns), known)
    assert torch.equal(tree.tokens, other[0].tokens) and torch.equal(tree.parents, other[0].parents) and torch.equal(quality, other[2])


def drafted_by(options: DraftOptions, tokens: torch.Tensor, known: torch.Tensor):
    """`Ngram.draft`, where nobody has a guess too."""
    roots = tokens.gather(1, known[:, None] - 1)[:, 0].long()
    return guess([Ngram(options)], tokens, known, options.count) or (
        no_guesses(roots, options.count), torch.ones(len(roots), options.count + 1), torch.zeros_like(known))


def drafted(text: str, **options) -> list[str]:
    tree, _, quality = drafted_by(DraftOptions(**options), torch.tensor([list(text.encode())], dtype=torch.int32), torch.tensor([len(text)]))
    return ["".join(map(chr, path)) for path in paths_of(tree, 0)] if int(quality) else []


def test_ngram_by_hand():
    chain = lambda text, **options: (drafted(text, branches=1, **options) or [""])[-1]
    assert chain("one two. one ", count=4) == "two."
    assert chain("abXabY.abX2.ab", count=2, shortest=2) == "X2", "the latest of the longest"
    assert chain("cabX.abY.cab", count=2) == "X.", "a longer match before a later one"
    assert chain("zababab", count=5) == "ababa", "a period goes on"
    assert chain("baaa", count=3) == "aaa"
    text = torch.tensor([list(b"a text of twenty or more") * 2])
    assert [int(Ngram(DraftOptions(longest=n)).draft(text, torch.tensor([48]))[2]) for n in (8, 15, 64)] == [8, 15, 15], "a quality has four bits"
    assert drafted("abcdefg") == drafted("a") == drafted("ab") == [], "nothing came twice"
    assert chain("xa.ya", count=2, shortest=1) == ".y" and drafted("xa.ya", shortest=2) == []
    assert drafted(" ab1 ab2 ab", count=4, branches=2) == ["2", "1", "2 ", "1 "], "equal matches, the latest first"
    assert drafted(" ab1 ab1 ab2 ab", count=3, branches=3) == ["1", "1 ", "1 a"], "two places have two votes"


# ------------------------------------------------------------------------------------------------------------- radix

class Cache:
    """A tree, and beside it what it should hold: of each namespace the prefixes in whole pages, of each slot where it belongs."""

    def __init__(self, page: int):
        self.tree, self.page, self.free, self.place = Tree(page), page, page, {}
        self.inserted: dict[str, Counter] = defaultdict(Counter)  # hits of a prefix in whole pages, in order of their first insertion

    def insert(self, tokens: list[int], namespace: str) -> None:
        whole = len(tokens) // self.page * self.page
        slots = np.arange(self.free, self.free + len(tokens))
        self.free += -(-len(tokens) // self.page) * self.page
        present = self.tree.insert(tokens, slots, namespace=namespace).present
        self.place.update({int(slots[i]): (namespace, tuple(tokens[:i + 1])) for i in range(present, whole)})
        self.hit(tokens[:whole], namespace)

    def hit(self, tokens: list[int], namespace: str) -> None:
        for end in range(self.page, len(tokens) + 1, self.page):
            self.inserted[namespace][tuple(tokens[:end])] += 1

    def evict(self, tokens: int) -> None:
        for slot in self.tree.evict(tokens).tolist():
            del self.place[slot]

    def continuations(self, text: list[int], namespace: str) -> set[tuple]:
        """What is cached beyond a text: as paths."""
        return {place[len(text):] for space, place in self.place.values()
                if space == namespace and len(place) > len(text) and place[:len(text)] == tuple(text)}

    def voted(self, text: list[int], namespace: str, branches: int) -> dict[tuple, float]:
        """The scores of continuations page by page, where nothing was ever evicted."""
        hits, page, scores = self.inserted[namespace], self.page, {}

        def go_on(prefix: tuple, begins: tuple, path: tuple, score: float) -> None:
            children = [p for p in hits if len(p) == len(prefix) + page and p[:len(prefix)] == prefix and p[len(prefix):][:len(begins)] == begins]
            total = sum(hits[p] for p in children)
            for child in sorted(children, key=lambda p: -hits[p])[:branches]:
                value, longer = score * hits[child] / total, path
                for token in child[len(prefix) + len(begins):]:
                    longer, value = (*longer, token), value * DECAY
                    scores[longer] = max(scores.get(longer, 0), value)
                go_on(child, (), longer, value)

        whole = len(text) // page * page
        if not whole or tuple(text[:whole]) in hits:
            go_on(tuple(text[:whole]), tuple(text[whole:]), (), 1.0)
        return scores


def proposed(cache: Cache, text: list[int], node, count: int, branches: int = 64) -> list[tuple[tuple, float]]:
    """What `radix` proposes behind a text of which `node` is the request's own, as (path, score). The tree stays as it is."""
    state = lambda: (draw(cache.tree), cache.tree.clock, [(n.hits, n.locks, n.used) for n in cache.tree.walk(ghosts=True)], list(cache.tree.roots))
    before, rest = state(), key_bytes(text[node.end:])
    tokens, parents, scores = Radix(DraftOptions(branches=branches)).propose(cache.tree, node, rest, count)
    assert state() == before
    cache.tree.check()
    assert len(tokens) == len(parents) == len(scores) <= count and all(-1 <= parent < n for n, parent in enumerate(parents))
    assert all(scores[n] < (scores[parent] if parent >= 0 else 1) for n, parent in enumerate(parents))
    paths = []
    for token, parent in zip(tokens, parents):
        paths.append(((*paths[parent], token) if parent >= 0 else (token,)))
    assert len(set(paths)) == len(paths), "siblings differ"
    return list(zip(paths, scores))


def sequences(r: random.Random, page: int) -> list[list[int]]:
    """Texts that share beginnings and part within pages."""
    made = [[r.randrange(3) for _ in range(4 * page)]]
    for _ in range(r.randint(0, 7)):
        old = r.choice(made)
        cut = r.randint(0, len(old))
        made.append(old[:cut] + [r.randrange(3) for _ in range(r.randint(0, 3 * page))])
    return made


@settings(max_examples=120, deadline=None)
@given(RANDOM, st.sampled_from([1, 2, 16]), st.integers(1, 40), st.integers(1, 4))
def test_radix_proposes_the_cached_continuations_by_their_hits(r, page, count, branches):
    cache = Cache(page)
    texts = {namespace: sequences(r, page) for namespace in ("", "other")}
    for namespace, made in texts.items():
        for text in made:
            cache.insert(text, namespace)
    for _ in range(4):
        namespace = r.choice(["", "other"])
        text = list(r.choice(r.choice(list(texts.values()))))  # perhaps of the other namespace
        text = text[:r.randint(0, len(text))]
        at = cache.tree.match(text, namespace, limit=r.randint(0, len(text)))
        node = cache.tree.lock(at)
        cache.hit(text[:at.length], namespace)
        is_best(proposed(cache, text, node, count, branches), cache.voted(text, namespace, branches), count)
        cache.tree.unlock(node)


@settings(max_examples=80, deadline=None)
@given(RANDOM, st.sampled_from([1, 4, 16]))
def test_radix_proposes_what_is_there_and_nothing_else(r, page):
    """Requests of two namespaces hold places in the tree while others are inserted and evicted, and ghosts wait in it."""
    cache, held, waiting, texts = Cache(page), [], [], sequences(r, page)
    for arrival in range(r.randint(3, 14)):
        namespace, text = r.choice(["", "other"]), r.choice(texts)
        action = r.random()
        if action < 0.5:
            cache.insert(text, namespace)
        elif action < 0.65:
            waiting.append(cache.tree.wait(text, namespace, arrival, object()))
        elif action < 0.8:
            cache.evict(r.randint(1, 4 * page))
        else:
            text = text[:r.randint(0, len(text))]
            held.append((text, namespace, cache.tree.lock(cache.tree.match(text, namespace))))
        for text, namespace, node in held:
            expected = cache.continuations(text, namespace)
            found = proposed(cache, text, node, 10_000)
            assert {path for path, _ in found} == expected
            assert [path for path, _ in proposed(cache, text, node, 5)] == [path for path, _ in found[:5]]


def test_radix_of_a_namespace_that_was_empty():
    cache = Cache(1)
    cache.insert([1, 2, 3], "other")
    root = cache.tree.root("mine")  # not yet in the tree
    assert proposed(cache, [1], root, 8) == proposed(cache, [], root, 8) == []
    cache.insert([1, 5], "mine")
    assert [path for path, _ in proposed(cache, [1], root, 8)] == [(5,)]
    cache.evict(10)
    assert proposed(cache, [], root, 8) == []


def test_radix_votes_by_hits():
    cache = Cache(1)
    for text in ([1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 4], [1, 5]):
        cache.insert(text, "")
    node = cache.tree.lock(cache.tree.match([1]))
    paths, scores = zip(*proposed(cache, [1], node, 3))
    assert paths == ((2,), (2, 3), (4,)) and scores == pytest.approx((0.6 * DECAY, 0.6 * DECAY**2, 0.2 * DECAY))
    assert [path for path, _ in proposed(cache, [1], node, 9, branches=2)] == [(2,), (2, 3), (4,)]
    cache.tree.unlock(node)


# ---------------------------------------------------------------------------------------------- exact in distribution

VOCABULARY, LENGTH = 6, 3
SETTINGS = [dict(temperature=1.0), dict(temperature=0.5), dict(temperature=1.7, top_k=3), dict(temperature=1.2, top_p=0.7),
            dict(temperature=1.5, min_p=0.2), dict(temperature=0.9, top_k=4, top_p=0.9, min_p=0.05)]


class Model:
    """Random logits of each context of two tokens, and texts sampled from them: a request a row, each with its own seed."""

    def __init__(self, seed: int, rows: int, params: SamplingParams):
        generator = torch.Generator().manual_seed(seed)
        self.logits = torch.randn(VOCABULARY, VOCABULARY, VOCABULARY, generator=generator) * 1.5
        self.state, self.params = sampling.SamplingState(rows * 10, VOCABULARY, "cpu"), params
        for row in range(rows):
            self.state.set_row(row, params, 1000 * seed + row, [0, 1], [])

    def sample(self, contexts: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """contexts [B, N, 2], positions [B, N] -> tokens [B, N]: N places of each request."""
        rows, places = positions.shape
        batch = self.state.batch([(row, self.params, 2) for row in range(rows) for _ in range(places)])
        logits = self.logits[contexts[..., 0], contexts[..., 1]].view(-1, VOCABULARY)
        return self.state.sample(logits, positions.flatten(), batch).tokens.view(rows, places)

    def plain(self, rows: int, length: int) -> torch.Tensor:
        """[B, 2 + length]: one token a step."""
        text = torch.tensor([[0, 1]]).repeat(rows, 1)
        for at in range(2, 2 + length):
            text = torch.cat((text, self.sample(text[:, None, -2:], torch.full((rows, 1), at))), 1)
        return text

    def drafted(self, rows: int, length: int, draft) -> tuple[torch.Tensor, float]:
        """The same by steps that each judge a tree. draft(text [B, C], known [B]) -> DraftTree. Returns the texts and the tokens a step."""
        text, known, steps = torch.zeros(rows, 2 + length + 16, dtype=torch.int64), torch.full((rows,), 2), 0
        text[:, 1] = 1
        every = torch.arange(rows)[:, None]
        while (known < 2 + length).any():
            tree = draft(text, known)
            before = torch.where(tree.depth == 0, text[every, known[:, None] - 2], tree.tokens.gather(1, tree.parents))
            targets = self.sample(torch.stack((before, tree.tokens), -1), known[:, None] + tree.depth)
            found = verify(tree, targets)
            goes = known < 2 + length
            there = (torch.arange(targets.shape[1]) <= found.counts[:, None]) & goes[:, None]
            at = known[:, None] + torch.arange(targets.shape[1])
            text[every.expand_as(at)[there], at[there]] = found.tokens[there]
            known, steps = known + torch.where(goes, found.counts + 1, 0), steps + goes.sum()
        return text[:, :2 + length], float((known - 2).sum() / steps)

    def chances(self) -> torch.Tensor:
        """[V, V, V]: the probability of each text of three tokens, by filters written anew."""
        p = torch.stack([_filtered(z, self.params) for z in self.logits.view(-1, VOCABULARY)]).view_as(self.logits).double()
        return torch.einsum("a,ab,abc->abc", p[0, 1], p[1], p)


def _filtered(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The distribution that top-k, then top-p of the rest, then min-p leave."""
    p = (logits.double() / params.temperature).softmax(-1)
    order = p.argsort(descending=True)
    kept = order[:params.top_k] if params.top_k > 0 else order
    mass = (p[kept] / p[kept].sum()).cumsum(0)
    kept = kept[:int((mass < params.top_p).sum()) + 1]
    kept = kept[p[kept] >= params.min_p * p.max()]
    return torch.zeros_like(p).index_put((kept,), p[kept] / p[kept].sum())


def trees_of(text: torch.Tensor, known: torch.Tensor) -> DraftTree:
    """Random draft trees."""
    r = random.Random(int(known.sum()))
    return packed(r, [grown(r, r.randint(1, 9), VOCABULARY, root=int(text[row, at - 1])) for row, at in enumerate(known.tolist())], 9)


@pytest.mark.parametrize("fields", SETTINGS, ids=str)
@pytest.mark.parametrize("drafter", ["random", "ngram"])
def test_texts_are_distributed_as_without_guesses(fields, drafter):
    """F137: chi-square of texts of three tokens; a drafter may guess whatever it likes."""
    rows = 4000
    model, ngram = Model(3, rows, SamplingParams(**fields)), Ngram(DraftOptions(count=8, branches=3, shortest=1))
    pairs = torch.tensor([*itertools.product(range(VOCABULARY), repeat=2)]).flatten().repeat(rows, 1)  # for `ngram` to find something
    draft = trees_of if drafter == "random" else lambda text, known: drafted_by(ngram.options, torch.cat((pairs, text), 1).int(), known + pairs.shape[1])[0]
    text, rate = model.drafted(rows, LENGTH, draft)
    assert rate > 1.2, "guesses were right now and then, or nothing was tested"
    expected = model.chances().flatten() * rows
    counts = torch.bincount((text[:, 2] * VOCABULARY + text[:, 3]) * VOCABULARY + text[:, 4], minlength=VOCABULARY**3).double()
    assert counts[expected == 0].sum() == 0, "a token that was filtered out"
    order = expected.argsort()
    cells = (expected[order].cumsum(0) / 8).long()  # rare texts share a cell of eight or more
    chi, cell_count = 0.0, 0
    for cell in cells.unique():
        here = order[cells == cell]
        chi, cell_count = chi + float((counts[here].sum() - expected[here].sum())**2 / expected[here].sum().clamp(min=1e-9)), cell_count + 1
    freedom = cell_count - 1
    assert chi < freedom + 4 * math.sqrt(2 * freedom) + 8, (chi, freedom)


@pytest.mark.parametrize("fields", [dict(temperature=0.0), *SETTINGS], ids=str)
def test_texts_are_the_texts_without_guesses(fields):
    """The same seed, the same text, whatever is guessed."""
    rows, length = 60, 40
    model = Model(5, rows, SamplingParams(**fields))
    plain = model.plain(rows, length)
    ngram = Ngram(DraftOptions(count=8, branches=3, shortest=1))
    for draft in (trees_of, lambda text, known: drafted_by(ngram.options, text.int(), known)[0]):
        text, rate = model.drafted(rows, length, draft)
        assert torch.equal(text, plain)
        assert rate > 1.2


# ------------------------------------------------------------------------------------------------ how many guesses pay

def test_a_cost_curve_is_straight_between_and_beyond_what_was_measured():
    curve = CostCurve([1, 4, 8], [1.0, 0.9, 2.0])  # a step of four tokens was measured as faster than one: noise
    assert curve(np.array([1, 2, 4, 6, 8, 10])).tolist() == pytest.approx([1.0, 1.0, 1.0, 1.5, 2.0, 2.5])


@settings(max_examples=100, deadline=None)
@given(RANDOM, st.integers(1, 3), st.integers(1, 4))
def test_lengths_are_those_of_most_tokens_a_second(r, rows, count):
    """Against all lengths that there are: none beats the chosen ones, and none is chosen where the gain is not worth it."""
    cost = CostCurve([1, 2, 4, 8, 16], sorted(r.uniform(1, 4) for _ in range(5)))
    lengths, records = Lengths(cost, count), []
    for quality in range(16):
        lengths.judged[quality] = r.uniform(1, 20)
        lengths.right[quality] = lengths.judged[quality] * r.random()
    for _ in range(rows):
        judged = r.choice([0.0, 3.0, 30.0])
        records.append(Record(judged=judged, right=judged * r.random(), quality=r.randrange(16)))
    found = [r.randint(0, count) for _ in range(rows)]
    rates = [(one.right + 2 * lengths.right[one.quality] / lengths.judged[one.quality]) / (one.judged + 2) for one in records]

    def speed(drafts) -> float:
        tokens = rows + sum(rate**d for rate, n in zip(rates, drafts) for d in range(1, n + 1))
        return tokens / float(cost(np.array([rows + sum(drafts)]))[0])

    chosen = lengths.choose(records, found)
    most = max(map(speed, itertools.product(*(range(n + 1) for n in found))))
    assert all(0 <= n <= has for n, has in zip(chosen, found))
    if any(chosen):
        assert speed(chosen) == pytest.approx(most) and most >= Lengths.WORTH * speed([0] * rows) * (1 - 1e-9)
    else:
        assert most <= Lengths.WORTH * speed([0] * rows) * (1 + 1e-9)


def test_lengths_fall_to_none_and_find_back():
    lengths = Lengths(CostCurve([1, 2, 16], [1.0, 1.2, 4.0]), count=4)
    record = Record(found=4, first=7, quality=3)
    choose = lambda record: lengths.choose([record], [4])[0]
    assert choose(record) > 0, "at first half of the guesses are thought to be right"
    for _ in range(20):
        lengths.learn(record, choose(record), [9])  # what came was another token
    assert choose(record) == 0
    assert choose(Record(found=4, quality=3)) == 0, "a new request with such guesses drafts none"
    assert choose(Record(found=4, quality=8)) > 0, "with others it does"
    for _ in range(10):
        lengths.learn(record, 0, [7])  # nothing was drafted, and the guess would have been right
    assert choose(record) > 0
    for _ in range(20):
        lengths.learn(record, 4, [7, 7, 7, 7, 9])
    assert choose(record) == 4


# ---------------------------------------------------------------------------------------------------------- registry

def test_a_drafter_registers_by_name(monkeypatch):
    monkeypatch.setattr(spec, "DRAFTERS", dict(spec.DRAFTERS))

    @spec.drafter("zero")
    class Zero:
        def __init__(self, options):
            self.count = options.count

        def propose(self, tree, node, rest, count):
            return [0], [-1], [1.0]

    one, two = make_drafters("zero+ngram", DraftOptions(count=3))
    assert (type(one), one.count, type(two)) == (Zero, 3, Ngram)
    assert [type(d) for d in make_drafters("ngram+radix", DraftOptions())] == [Ngram, Radix]
    for name in ("zero", "a+b"):
        with pytest.raises(ValueError, match="is taken, or no name"):
            spec.drafter(name)(Zero)


@pytest.mark.parametrize("name", ["eagle", "", "ngram+", "ngram+ngram", "ngram radix"])
def test_an_unknown_drafter_is_refused_with_a_sentence(name):
    with pytest.raises(ValueError, match=r"speculative_algorithm is .*, expected one of ngram, radix"):
        make_drafters(name, DraftOptions())


def test_the_toy_drafter_of_the_experiments_runs():
    command = [sys.executable, "experiments/bigram_drafter.py", "--bytes", "200"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: [float(x) for x in line.split()[1:]] for line in done.stdout.splitlines()[3:]}
    assert list(rows) == ["ngram", "bigram", "ngram+bigram"]
    assert all(values == sorted(values) and values[-1] > 1.1 for values in rows.values())


def test_the_demo_prints_a_tree_a_mask_and_a_verification(capsys):
    spec._demo()
    out = capsys.readouterr().out
    assert "xxx.x..." in out and "4 guesses were right, path [0, 1, 2, 4, 6]" in out
