"""Places in staging memory: never two launches at once in one, and room for as many as there is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from overlap_pass.memory.places import ALIGNMENT, WORDS, Place, aligned, laid_out, tenancies

SIZES = st.lists(st.integers(1, 20 * ALIGNMENT), min_size=1, max_size=60)


@given(SIZES)
def test_a_launch_waits_for_every_earlier_one_that_may_still_lie_in_its_bytes_or_use_its_word(sizes: list[int]) -> None:
    found = tenancies(sizes)
    left: set[int] = set()
    for index, (tenancy, size) in enumerate(zip(found, sizes, strict=True)):
        left.update(tenancy.after)
        assert all(earlier < index for earlier in tenancy.after)
        for earlier in set(range(index)) - left:
            other, other_size = found[earlier].place, sizes[earlier]
            start, other_start = tenancy.place.offset, other.offset
            assert start + size <= other_start or other_start + other_size <= start
            assert tenancy.place.word != other.word


@given(SIZES)
def test_places_lie_inside_memory_for_the_largest_launch_twice(sizes: list[int]) -> None:
    for tenancy, size in zip(tenancies(sizes), sizes, strict=True):
        assert tenancy.place.capacity_bytes == 2 * aligned(max(sizes))
        assert tenancy.place.offset % ALIGNMENT == 0
        assert tenancy.place.offset + size <= tenancy.place.capacity_bytes


@given(SIZES)
def test_the_words_awaited_are_those_of_the_launches_before_it_and_all_for_the_first(sizes: list[int]) -> None:
    found, nothing_left = tenancies(sizes), tenancies(sizes, leaves_nothing=True)
    assert found[0].place.awaited == tuple(range(WORDS))
    assert nothing_left[0].place.awaited == ()
    for tenancy in found[1:]:
        assert tenancy.place.awaited == tuple(found[earlier].place.word for earlier in tenancy.after)
    assert nothing_left[1:] == found[1:]


@given(SIZES)
def test_numbers_say_all_of_a_place(sizes: list[int]) -> None:
    for tenancy in tenancies(sizes):
        assert Place.of(*tenancy.place.numbers) == tenancy.place


def test_two_launches_of_the_largest_size_are_under_way_at_once() -> None:
    assert [tenancy.after for tenancy in tenancies([1000] * 4)] == [(), (), (0,), (1,)]


def test_pieces_of_a_launch_lie_one_after_the_other() -> None:
    assert laid_out((1, ALIGNMENT, ALIGNMENT + 1)) == ((0, ALIGNMENT, 2 * ALIGNMENT), 4 * ALIGNMENT)
