"""Wrong engines, made by small patches on live ones: what a check that cannot see them is not worth.

Each function spoils one engine and returns what is to be called before every step of a run, and a list that the mutation appends to when it
strikes. None changes what the engine believes: lengths, owners and tokens stay as they were, so that only answers can tell.
"""

import numpy as np
import torch

from nano_sgl.engine import Engine

SAME_KV = 1e-2                  # keys of one column that are nearer than this lead to the same answers


def idle(step: int) -> None:
    """Nothing to do before a step."""


def zero_a_slot(engine: Engine):
    """One slot of a tree node that running requests share loses its keys and values, in all layers: that of the largest value."""
    struck = []

    def top(node):
        while node.parent.parent is not None:
            node = node.parent
        return node

    def each_step(step):
        left = lambda r: r.max_new - len(r.output_ids)
        running = [r for r in engine.scheduler.running if r.node.end and r.output_ids and not r.leaving and left(r) > 4]
        if struck or not running:
            return
        node = top(max(running, key=lambda r: (top(r.node).locks, left(r))).node)
        slots = torch.from_numpy(node.slots.astype(np.int64))
        slot = int(slots[engine.kv.v[-1][slots].float().flatten(1).norm(dim=1).argmax()])
        for cache in (*engine.kv.k, *engine.kv.v):
            cache[slot] = 0
        struck.append(slot)
    return each_step, struck


def skip_a_repoint(engine: Engine, nth: int = 0):
    """A row adopts a path of the tree, and the write of its slots into the row's table is lost. The nth time that this could matter: where
    what stands in the row leads to other KV (a row used before may lead to its own duplicates of the same)."""
    scheduler, take_path, struck, seen = engine.scheduler, engine.scheduler._take_path, [], []

    def matters(req, node):
        if node.end <= req.own_start:
            return False
        there = engine.rows.table[req.row, req.own_start:node.end].long()
        wanted = torch.from_numpy(scheduler.tree.slots(node, req.own_start).astype(np.int64))
        keys = engine.kv.k[0]
        return ((keys[there] - keys[wanted]).abs().flatten(1).amax(1) < SAME_KV).float().mean() < 0.5

    def lossy(req, node):
        if struck or not matters(req, node):
            return take_path(req, node)
        seen.append(req)
        if len(seen) <= nth:
            return take_path(req, node)
        struck.append(req.rid)
        writes, scheduler._writes = scheduler._writes, Deaf(scheduler._writes)
        take_path(req, node)
        scheduler._writes = writes
    scheduler._take_path = lossy
    return idle, struck


class Deaf:
    """Writes whose slots are lost."""

    def __init__(self, writes):
        self.length = writes.length

    def slots(self, row, start, slots):
        pass


def skip_the_copies(engine: Engine):
    """What a row should have of another's page is not copied to its slots."""
    struck = []
    engine.kv.copy = lambda source, target: struck.extend(target.tolist())
    return idle, struck


def shorten_a_row(engine: Engine):
    """The device's length of a decoding row is one short: a token is computed again, in the place of the one before."""
    struck = []

    def each_step(step):
        rows = [r.row for r in engine.scheduler.running if len(r.output_ids) > 2 and not r.leaving]
        if rows and not struck:
            engine.rows.length[rows[0]] -= 1
            struck.append(rows[0])
    return each_step, struck


def keep_an_overrun_token(engine: Engine):
    """A request that a stop string ends takes the token that was in flight by then."""
    struck, patched = [], set()

    def late(push):
        reasons = []

        def push_late(token):
            reasons.append(push(token))
            if reasons[-1] == "stop" and not struck:
                struck.append(token)
                return None
            return "stop" if "stop" in reasons else reasons[-1]
        return push_late

    def each_step(step):
        for rid, stream in engine.streams.items():
            if rid not in patched:
                patched.add(rid)
                stream.text.push = late(stream.text.push)
    return each_step, struck


def noise_by_row(engine: Engine):
    """Noise is keyed by the row of the batch, not by the position of the token."""
    struck, sample = [], engine.sampler.sample

    def wrong(logits, positions, *rest):
        struck.append(len(logits))
        return sample(logits, torch.arange(len(logits)), *rest)
    engine.sampler.sample = wrong
    return idle, struck


def forget_counts(engine: Engine):
    """A request that starts again after a retraction has forgotten what it had put out: its penalties begin anew."""
    struck, set_row = [], engine.sampler.set_row

    def wrong(row, params, seed, prompt_ids, output_ids):
        struck.extend(output_ids[:1])
        return set_row(row, params, seed, prompt_ids, [])
    engine.sampler.set_row = wrong
    return idle, struck


def take_a_wrong_guess(engine: Engine):
    """The best guess of a row is kept, though it was wrong."""
    struck, sample = [], engine.sampler.sample

    def wrong(logits, positions, *rest, **more):
        sampled = sample(logits, positions, *rest, **more)
        steps = (positions[1:] == positions[:-1] + 1).nonzero().flatten()  # a root, and the guess behind it
        if len(steps) and not struck:
            struck.append(int(steps[0]))
            sampled.tokens[steps[0]] = engine.speculation.ready.tokens[rest[0].rows[steps[0]], 1]
        return sampled
    engine.sampler.sample = wrong
    return idle, struck


def leave_the_guesses_where_they_are(engine: Engine):
    """Guesses that were right are not put behind the known tokens: the row's table leads to the KV of others."""
    struck, verify = [], engine.runner.verify

    def wrong(*step):
        struck.append(step)
        engine.speculation.branching = False
        try:
            return verify(*step)
        finally:
            engine.speculation.branching = True
    engine.runner.verify = wrong
    return idle, struck


def count_no_guesses(engine: Engine):
    """Penalties do not count the guesses above a node."""
    struck, sample = [], engine.sampler.sample

    def wrong(logits, positions, batch, mask=None, branch=None, guesses=None):
        if branch is not None:
            struck.append(len(logits))
            branch.real.zero_()
        return sample(logits, positions, batch, mask, branch, guesses)
    engine.sampler.sample = wrong
    return idle, struck


def begin_the_grammar_anew(engine: Engine):
    """A request that starts again after a retraction is where its grammar begins."""
    struck, plan = [], engine._plan

    def wrong(batch):
        begun = [(one, one.state) for req in batch.started if req.output_ids and (one := engine.streams[req.rid].constraint)]
        for one, _ in begun:
            struck.append(one)
            one.state = one.grammar.start
        try:
            return plan(batch)
        finally:
            for one, state in begun:
                one.state = state
    engine._plan = wrong
    return idle, struck


def follow_the_grammar_to_the_root_only(engine: Engine):
    """The state of a row does not take notice of the guesses that were right."""
    struck, verify = [], engine.runner.verify

    def wrong(guesses, logits, rows, params, walk, results):
        if walk is not None:
            finish = walk.finish

            def behind(tokens, nodes):
                struck.extend(nodes[nodes > 0].tolist())
                return finish(tokens)
            walk.finish = behind
        return verify(guesses, logits, rows, params, walk, results)
    engine.runner.verify = wrong
    return idle, struck
