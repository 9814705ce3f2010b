"""A worker's slots: whose turn it is, what waits, and how many leases are asked for before a slot is free."""

from __future__ import annotations

import asyncio

from stages.slots import LEAD_S, Slots


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def one_after_the_other(slots: Slots, clock: Clock, count: int, every_s: float) -> None:
    """So many leases come, do their work and are over."""
    for number in range(count):
        slots.enter(f"past-{number}")
        clock.now += every_s
        slots.forget(f"past-{number}")


async def test_leases_have_their_turn_in_the_order_in_which_they_came() -> None:
    slots = Slots(2)
    for lease in "abcd":
        slots.enter(lease)
    assert [await slots.turn("a"), await slots.turn("b"), slots.busy, slots.wanted()] == [True, True, 2, -2]
    third, fourth = (asyncio.create_task(slots.turn(lease)) for lease in "cd")
    slots.leave("b")
    assert await third
    slots.leave("b")  # once more changes nothing
    assert not fourth.done() and slots.busy == 2
    slots.forget("a")
    assert await fourth


async def test_a_lease_that_is_cancelled_while_it_waits_takes_nobodys_turn() -> None:
    slots = Slots(1)
    for lease in "abc":
        slots.enter(lease)
    second, third = (asyncio.create_task(slots.turn(lease)) for lease in "bc")
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait({second})
    slots.leave("a")
    assert await third
    slots.forget("b")
    assert slots.busy == 1


async def test_what_waits_when_the_worker_drains_is_given_back_and_what_is_at_work_goes_on() -> None:
    slots = Slots(1)
    slots.enter("a")
    slots.enter("b")
    waiting = asyncio.create_task(slots.turn("b"))
    await asyncio.sleep(0)
    slots.close()
    assert not await waiting
    slots.enter("c")
    assert [await slots.turn("a"), await slots.turn("c")] == [True, False]


async def test_leases_are_asked_for_ahead_only_where_slots_come_free_fast() -> None:
    clock = Clock()
    slots = Slots(8, clock=clock)
    one_after_the_other(slots, clock, 20, every_s=2 * LEAD_S)
    assert slots.wanted() == 8, "a lease that waits here is one that another worker does not get"
    one_after_the_other(slots, clock, 80, every_s=0.02)
    assert slots.wanted() == 8 + round(LEAD_S / 0.02)
    clock.now += 2.0
    assert slots.wanted() == 8, "the rate of now counts"
    one_after_the_other(slots, clock, 1000, every_s=0.0001)
    assert slots.wanted() == 16, "never more than there are slots"


async def test_hand_overs_hold_no_slot_but_do_not_pile_up() -> None:
    """Where what is left of each lease stands still, at most as many again are taken up behind them."""
    slots = Slots(2)
    taken = 0
    while slots.wanted() > 0:
        slots.enter(str(taken))
        slots.leave(str(taken))
        taken += 1
    assert taken == 4
    slots.forget("0")
    assert slots.wanted() == 1
