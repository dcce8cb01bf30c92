"""bench/radix.py and bench/traces.py: the traces token by token, the driver, the optimum, the peers' stand-ins, and the tables."""

import hashlib
import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))

import radix as bench  # noqa: E402
import radix_peers  # noqa: E402
import traces  # noqa: E402

from nano_sgl.eviction import EVICTION  # noqa: E402


def served(policy, trace, page_size, pool, kind=bench.Ours, flight=4, queue=0):
    cache = kind(page_size, bench.slots_for(trace, page_size), pool, policy)
    lengths, seconds, spent = bench.replay(cache, trace, page_size, pool, flight, queue, clocked=True)
    cache.tree.order.check(list(cache.tree.walk()))  # of the tree's own check the slots would fail: all requests get the same
    assert cache.tree.protected == 0 and cache.tree.total <= pool and 0 < seconds
    assert len(spent["match"]) == len(trace) and len(spent["insert"]) == 2 * len(trace)
    return sum(lengths)


def test_a_trace_is_the_same_to_the_last_token():
    trace = traces.tot()
    digest = hashlib.sha256(b"".join(ids.astype(np.int64).tobytes() for request in trace for ids in request)).hexdigest()
    assert digest.startswith("f2b2df314933") and len(trace) == 3120 and traces.distinct_len(trace) == 312_037
    as_bytes = lambda trace: sorted((prompt.tobytes(), output.tobytes()) for prompt, output in trace)  # noqa: E731
    assert as_bytes(trace) == as_bytes(traces.totdfs())


def test_shapes_of_the_traces():
    chat = traces.chat(sessions=5, turns=3)
    assert len(chat) == 15 and all(ids.dtype == np.int32 for request in chat for ids in request)
    lengths = sorted(len(prompt) for prompt, _ in chat)
    assert lengths[0] >= 128 + 4 and lengths[-1] > lengths[0]
    shot = traces.fewshot(requests=3)
    assert (shot[0][0][:4096] == shot[2][0][:4096]).all() and len({len(prompt) for prompt, _ in shot}) > 1
    assert {len(prompt) - 32_768 in range(64, 449) for prompt, _ in traces.long(requests=3)} == {True}
    assert traces.distinct_len(traces.unshared(requests=4)) == sum(len(p) + len(o) for p, o in traces.unshared(requests=4))
    assert traces.distinct_len([(np.arange(10, dtype=np.int32),) * 2] * 2, page_size=8) == 16


def test_a_pool_for_everything_hits_all_there_is_and_no_policy_beats_the_optimum():
    trace = traces.chat(sessions=12, turns=4)
    for page_size in (1, 16):
        whole = traces.distinct_len(trace) + 16 * len(trace)
        best = bench.optimum(trace, page_size, whole, 4)
        assert served("lru", trace, page_size, whole) == served("lru", trace, page_size, whole, bench.OursWaiting, queue=8) == best
        pool = traces.distinct_len(trace) // 2
        tight = bench.optimum(trace, page_size, pool, 4)
        hits = {policy: served(policy, trace, page_size, pool) for policy in EVICTION}
        assert max(hits.values()) <= tight <= best and hits["lru"] < tight, (hits, tight)
        assert served("lru", trace, page_size, pool, bench.OursWaiting, queue=3) == hits["lru"]


def test_the_optimum_of_a_hand_made_trace():
    a, b, c = (np.full(10, fill, np.int32) for fill in (1, 2, 3))
    end = np.array([9], np.int32)
    trace = [(first, end) for first in (a, b, c, a, b, c)]
    # Room for two: for c and its output nine tokens of b go, as b is wanted later than a; then a goes, as it is wanted no more.
    assert bench.optimum(trace, 1, 22, 1) == 9 + 1 + 9
    assert bench.optimum(trace, 1, 40, 1) == 3 * 9
    with pytest.raises(ValueError, match="2 requests at a time do not fit into a pool of 12 slots"):
        bench.optimum(trace, 1, 12, 2)


def test_cost_comes_near_the_optimum_where_lru_does_not():
    trace = traces.chat(sessions=80)
    pool = int(traces.distinct_len(trace) * 0.3)
    lru, cost, best = served("lru", trace, 1, pool), served("cost", trace, 1, pool), bench.optimum(trace, 1, pool, 4)
    assert lru < cost <= best and best - cost < (best - lru) / 2


def test_a_package_is_imported_without_what_it_names(tmp_path):
    folder = tmp_path / "peer_package" / "tree"
    folder.mkdir(parents=True)
    (folder / "core.py").write_text("from peer_package.far.away import Thing, helper, unit\nimport peer_package.other as other\n\n"
                                    "class Core(Thing):\n    size = unit(7)\n    made = other.Name.OF | None, helper(1).go()\n")
    radix_peers.stand_in("peer_package", str(tmp_path), ("peer_package.tree.core",), unit=lambda size: 2 * size)
    try:
        core = importlib.import_module("peer_package.tree.core")
        assert core.Core.size == 14 and core.Core().anything() is None and core.Core.made[1] is None
    finally:
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, radix_peers.StandIns)]
    for make in (radix_peers.sglang, radix_peers.mini_sglang, radix_peers.vllm):
        with pytest.raises(ValueError, match="is missing: give "):
            make(str(tmp_path))


def test_the_tables(monkeypatch, capsys):
    def run(*options):
        monkeypatch.setattr(sys, "argv", ["radix.py", *options])
        bench.main()
        return capsys.readouterr().out

    out = run("--traces", "tot", "--pages", "16", "--requests", "120", "--flight", "2")
    assert "tot, page 16: 120 requests" in out and "ours, all on" in out and "two runs are" in out
    out = run("--traces", "totdfs", "--pages", "1", "--requests", "120", "--flight", "2", "--policies")
    assert out.count("/0.") == len(EVICTION) and all(policy in out for policy in EVICTION)
    monkeypatch.setattr(bench, "COUNTS", (20, 40))
    assert "ours, cost" in run("--sizes")
    with pytest.raises(SystemExit):
        run("--sglang", "/nowhere")
    assert "is missing" in capsys.readouterr().err
