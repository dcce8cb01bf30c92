"""memory.py: the free list, limbo, and the device rows."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from nano_sgl.memory import KVPool, Packed, Rows, SlotAllocator, Writes


def test_slots_come_in_whole_consecutive_pages_and_never_from_the_padding_page():
    pool = SlotAllocator(num_slots=64, page_size=16)
    slots = pool.alloc(64)
    assert sorted(slots.tolist()) == list(range(16, 80))
    assert pool.alloc(16) is None and pool.available == 0
    pages = slots.reshape(-1, 16)
    assert (pages == pages[:, :1] + np.arange(16)).all()


def test_a_pool_that_is_no_multiple_of_the_page_holds_whole_pages_only():
    assert SlotAllocator(num_slots=50, page_size=16).capacity == 48


def test_what_is_freed_in_flight_waits_in_limbo_for_its_step():
    pool = SlotAllocator(num_slots=8, page_size=1)
    first = pool.alloc(4)
    pool.launch(1)
    pool.free(first[:2])
    pool.launch(2)
    pool.free(first[2:])
    assert pool.available == 4 and len(pool.limbo_pages()) == 4
    pool.commit(1)
    assert pool.available == 6
    pool.commit(2)
    assert pool.available == 8 and len(pool.limbo_pages()) == 0


def test_slots_that_no_row_addresses_skip_limbo():
    pool = SlotAllocator(num_slots=8, page_size=1)
    slots = pool.alloc(4)
    pool.launch(1)
    pool.free(slots, held_by_step=False)
    assert pool.available == 8


def test_a_page_freed_twice_is_noticed():
    pool = SlotAllocator(num_slots=4, page_size=1)
    slots = pool.alloc(4)
    pool.free(slots)
    with pytest.raises(AssertionError, match="twice"):
        pool.free(slots[:1])


@pytest.mark.parametrize("num_slots, page_size", [(0, 1), (3, 4), (8, 0)])
def test_a_pool_without_a_page_is_refused(num_slots, page_size):
    with pytest.raises(ValueError, match="page"):
        SlotAllocator(num_slots, page_size)


def test_parts_of_pages_are_refused():
    with pytest.raises(ValueError, match="whole pages"):
        SlotAllocator(64, 16).alloc(8)


@settings(max_examples=50, deadline=None)
@given(st.sampled_from([1, 4, 16]), st.lists(st.tuples(st.booleans(), st.integers(1, 6)), max_size=60))
def test_random_allocation_never_hands_out_a_slot_twice(page, ops):
    pool, held, step = SlotAllocator(64, page), [], 0
    for take, n in ops:
        if take:
            slots = pool.alloc(n * page)
            assert (slots is None) == (n * page > 64 - sum(map(len, held)) - len(pool.limbo_pages()) * page)
            if slots is not None:
                held.append(slots)
        elif held:
            if n % 2:
                step += 1
                pool.launch(step)
            pool.free(held.pop(n % len(held)))
            if n % 3 == 0:
                pool.commit(step)
        owned = [*held, pool.free_pages() * page, pool.limbo_pages() * page]
        pages = np.concatenate(owned) // page if page == 1 else np.concatenate([h[::page] for h in held] + owned[-2:]) // page
        assert sorted(pages.tolist()) == list(range(1, pool.num_pages + 1))


def test_writes_reach_the_rows_and_a_forgotten_row_is_left_alone():
    rows, writes = Rows(max_requests=4, columns=10, device="cpu"), Writes()
    for row in (1, 2, 3):
        writes.tokens(row, 0, np.arange(5, dtype=np.int32) + row)
        writes.slots(row, row, np.array([7, 8], np.int32))
        writes.length(row, row)
    writes.forget(2)
    assert writes.rows == {1, 3}
    writes.tokens(2, 0, np.array([99], np.int32))  # another request has the row now
    rows.apply(writes)
    assert rows.tokens[1, :6].tolist() == [1, 2, 3, 4, 5, 0]
    assert rows.tokens[2, :3].tolist() == [99, 0, 0]
    assert rows.table[3].tolist() == [0, 0, 0, 7, 8, 0, 0, 0, 0, 0] and rows.table[2].sum() == 0
    assert rows.length.tolist() == [0, 1, 0, 3, 0]


def test_a_row_leads_to_what_it_copies_until_the_step_has_stored_its_kv():
    """Row 2 copies two slots of row 1; row 3 leads to one of the copies, and copies the other in the same step: from where it comes from."""
    pool = KVPool(40, 4, num_layers=2, kv_heads=1, head_dim=2, dtype=torch.float32, device="cpu")
    rows, writes = Rows(max_requests=4, columns=10, device="cpu"), Writes()
    writes.slots(2, 3, np.array([20, 21, 22]))
    writes.slots(3, 3, np.array([20, 31]))
    writes.slots(4, 0, np.array([36]))
    writes.copy(2, np.array([8, 9]), np.array([20, 21]))
    writes.copy(3, np.array([21]), np.array([31]))
    writes.copy(4, np.array([8]), np.array([36]))
    writes.forget(4)
    assert writes.copied == 3
    *now, source, copy, late_rows, late_columns, late_slots = Packed([*writes.arrays(), *writes.late()], "cpu").send()
    rows.put(*now)
    assert rows.table[2, 3:6].tolist() == [8, 9, 22] and rows.table[3, 3:5].tolist() == [8, 9] and not rows.table[4].any()
    for layer in range(2):  # the step
        pool.k[layer][8:10], pool.v[layer][8:10] = layer + torch.tensor([[[1.0]], [[2.0]]]), layer + torch.tensor([[[5.0]], [[6.0]]])
    pool.copy(source, copy)
    rows.point(late_rows, late_columns, late_slots)
    assert rows.table[2, 3:6].tolist() == [20, 21, 22] and rows.table[3, 3:5].tolist() == [20, 31]
    for layer in range(2):
        assert (pool.k[layer] - layer)[[20, 21, 31], 0, 0].tolist() == [1, 2, 2] and (pool.v[layer] - layer)[[20, 21, 31], 0, 1].tolist() == [5, 6, 6]
        assert not pool.k[layer][[22, 36]].any()
    again = Rows(max_requests=4, columns=10, device="cpu")
    again.apply(writes)
    assert again.table.equal(rows.table)
    pool.copy(source[:0], copy[:0])


def test_what_is_packed_arrives_in_its_order_and_nothing_may_be_empty_handed():
    arrays = [np.arange(3, dtype=np.int32), np.empty(0, np.int64), np.array([2**40]), np.array([True, False])]
    sent = Packed(arrays, "cpu").send()
    assert [t.tolist() for t in sent] == [[0, 1, 2], [], [2**40], [1, 0]] and all(t.dtype == torch.int64 for t in sent)
    rows = Rows(max_requests=1, columns=4, device="cpu")
    rows.apply(Writes())
    assert not rows.tokens.any() and not rows.table.any() and not rows.length.any()
    arrays[0][:] = 9  # the host goes on; what was packed stays
    assert sent[0].tolist() == [0, 1, 2]


def test_rows_wait_in_limbo_too():
    rows = Rows(max_requests=1, columns=4, device="cpu")
    row = rows.alloc()
    assert row == 1 and rows.alloc() is None
    rows.launch(1)
    rows.free(row)
    assert rows.alloc() is None and rows.idle_rows() == {1}
    rows.commit(1)
    assert rows.alloc() == 1


def test_a_pool_has_the_width_of_the_heads_it_was_made_for():
    pool = KVPool(10, 4, num_layers=2, kv_heads=2, head_dim=32, dtype=torch.bfloat16, device="cpu")
    assert len(pool.k) == 2 and pool.v[1].shape == (14, 2, 32)
    assert KVPool.bytes_per_slot(2, 2, 32, torch.bfloat16) == 2 * 2 * 2 * 32 * 2
