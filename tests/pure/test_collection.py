"""Planning leaves the garbage collector as it was."""

from __future__ import annotations

import gc

import pytest

from overlap_pass.schedule.collection import collection_put_off


@pytest.fixture
def collector():
    was = gc.isenabled()
    yield
    (gc.enable if was else gc.disable)()


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_off_inside_and_behind_it_as_it_was(collector, enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    with collection_put_off():
        assert not gc.isenabled()
        with collection_put_off():
            pass
        assert not gc.isenabled()
    assert gc.isenabled() is enabled


def test_an_error_inside_turns_it_on_again(collector) -> None:
    gc.enable()

    @collection_put_off()
    def fails() -> None:
        raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fails()
    assert gc.isenabled()
