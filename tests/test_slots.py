"""Slots: one state each, legal moves alone, turns by age, and quarantine that only a rotation ends."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import ContractError
from kvxfer.slots import LANDING_MOVES, SENDER_MOVES, SlotState, SlotTable

Moves = Mapping[SlotState, frozenset[SlotState]]
both = pytest.mark.parametrize("moves", [SENDER_MOVES, LANDING_MOVES], ids=["sender", "landing"])


def _put(table: SlotTable, moves: Moves, state: SlotState) -> int:
    """A slot in `state`, reached by the shortest legal way."""
    ways = {SlotState.FREE: [SlotState.FREE]}
    queue = [SlotState.FREE]
    while state not in ways:
        last = queue.pop(0)
        for following in moves[last]:
            if following not in ways:
                ways[following] = [*ways[last], following]
                queue.append(following)
    _, first, *others = ways[state]
    slot = table.take(first)
    assert slot is not None
    for each in others:
        if each is SlotState.QUARANTINED:
            table.quarantine(slot, "peer")
        else:
            table.move(slot, each)
    return slot


@both
def test_every_move_outside_the_table_is_refused(moves: Moves) -> None:
    for state in moves:
        if state is SlotState.FREE:
            continue
        for target in SlotState:
            table = SlotTable(1, moves)
            slot = _put(table, moves, state)
            if target in moves[state]:
                table.move(slot, target)
                assert table.state(slot) is target
            else:
                with pytest.raises(AssertionError, match="no legal move"):
                    table.move(slot, target)
                assert table.state(slot) is state


@both
def test_a_free_slot_goes_only_where_the_side_leases(moves: Moves) -> None:
    table = SlotTable(1, moves)
    (first,) = moves[SlotState.FREE]
    assert table.take(first) == 0
    assert table.take(first) is None
    assert table.num_free == 0


def test_the_slot_that_was_free_for_longest_is_taken() -> None:
    """So a slot that just came back rests: a late read of it would show sooner than hide."""
    table = SlotTable(3, SENDER_MOVES)
    assert [table.take(SlotState.FILLING) for _ in range(3)] == [0, 1, 2]
    for slot in (1, 0):
        table.move(slot, SlotState.FREE)
    assert [table.take(SlotState.FILLING) for _ in range(2)] == [1, 0]


def test_quarantine_is_counted_by_peer_and_ends_for_all_at_once() -> None:
    table = SlotTable(4, LANDING_MOVES)
    for peer in ("a", "a", "b"):
        slot = table.take(SlotState.CREDITED)
        assert slot is not None
        table.quarantine(slot, peer)
    assert (table.num_quarantined("a"), table.num_quarantined("b"), table.num_quarantined("c")) == (2, 1, 0)
    assert table.release_quarantine() == 3
    assert table.num_quarantined("a") == 0
    assert table.num_free == 4
    assert sorted(str(table.take(SlotState.CREDITED)) for _ in range(4)) == ["0", "1", "2", "3"]
    assert table.release_quarantine() == 0


@pytest.mark.parametrize("num_slots", [0, -1])
def test_a_table_has_slots(num_slots: int) -> None:
    with pytest.raises(ContractError, match="num_slots"):
        SlotTable(num_slots, SENDER_MOVES)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), max_size=80), st.booleans())
def test_counts_and_states_agree_after_any_legal_steps(steps: list[tuple[int, int]], is_sender: bool) -> None:
    """Every slot is in exactly one state, the sums are right, and no slot is taken twice."""
    moves = SENDER_MOVES if is_sender else LANDING_MOVES
    table = SlotTable(5, moves)
    (first,) = moves[SlotState.FREE]
    for slot, choice in steps:
        state = table.state(slot)
        if state is SlotState.FREE:
            taken = table.take(first)
            assert taken is not None
        elif state is SlotState.QUARANTINED:
            table.release_quarantine()
        else:
            target = sorted(moves[state], key=lambda each: each.value)[choice % len(moves[state])]
            if target is SlotState.QUARANTINED:
                table.quarantine(slot, "peer")
            else:
                table.move(slot, target)
        states = [table.state(each) for each in range(5)]
        assert {state: table.count(state) for state in SlotState} == {state: states.count(state) for state in SlotState}
        assert table.num_quarantined("peer") == states.count(SlotState.QUARANTINED)


def test_slots_in_turn_wait_for_what_is_about_to_be_free() -> None:
    table = SlotTable(3, SENDER_MOVES)
    table.in_turn = True
    assert [table.take(SlotState.FILLING) for _ in range(4)] == [0, 1, 2, None]
    for slot in (1, 2):
        table.move(slot, SlotState.FREE)
    assert table.num_free == 2
    assert table.take(SlotState.FILLING) is None, "slot 0 is being filled"
    table.move(0, SlotState.READY)
    assert table.next_free() is None, "slot 0 waits for a credit"
    table.move(0, SlotState.IN_FLIGHT)
    assert table.next_free() is None
    table.move(0, SlotState.FREE)
    assert [table.take(SlotState.FILLING) for _ in range(3)] == [0, 1, 2]


def test_slots_in_turn_do_not_wait_for_slow_ones() -> None:
    table = SlotTable(3, SENDER_MOVES)
    table.in_turn = True
    for _ in range(3):
        table.take(SlotState.FILLING)
    for slot in (1, 2):
        table.move(slot, SlotState.FREE)
    table.mark_slow()
    assert table.next_free() is None, "slot 0 was taken since the last look"
    table.mark_slow()
    assert [table.take(SlotState.FILLING) for _ in range(3)] == [1, 2, None]
    table.move(0, SlotState.FREE)
    assert table.take(SlotState.FILLING) == 0
    table.move(1, SlotState.FREE)
    table.mark_slow()
    assert table.take(SlotState.FILLING) == 1
    table.move(2, SlotState.FREE)
    assert table.take(SlotState.FILLING) == 2
    table.move(1, SlotState.FREE)
    assert table.take(SlotState.FILLING) is None, "slot 0 was taken again before the last look"


def test_slots_in_turn_pass_over_quarantined_ones() -> None:
    table = SlotTable(2, SENDER_MOVES)
    table.in_turn = True
    table.take(SlotState.FILLING)
    table.move(0, SlotState.READY)
    table.move(0, SlotState.IN_FLIGHT)
    table.quarantine(0, "peer")
    assert table.take(SlotState.FILLING) == 1
    table.move(1, SlotState.FREE)
    assert table.take(SlotState.FILLING) == 1
