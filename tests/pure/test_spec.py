"""Spec strings read back as what they were written from, and say what is wrong with those that do not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap_pass.errors import OptionError
from overlap_pass.spec import build, nearest, spec, split


@dataclass(frozen=True)
class Greedy:
    name: ClassVar[str] = "greedy"

    lookahead: int = 4
    margin: float = 1.0
    hoist: bool = True
    start: str = "as_written"


@dataclass(frozen=True)
class Plain:
    name: ClassVar[str] = "plain"


def read(text: str) -> Greedy:
    name, fields = split(text, option="strategy")
    assert name == "greedy"
    return build(Greedy, fields, option="strategy")


def test_a_bare_name_is_the_dataclass_with_its_defaults():
    assert read("greedy") == Greedy()
    assert read("greedy{}") == Greedy()


def test_fields_are_read_as_their_declared_type():
    assert read("greedy{lookahead=8, margin=2, hoist=false, start=backward_pre}") == Greedy(
        lookahead=8, margin=2.0, hoist=False, start="backward_pre"
    )
    assert isinstance(read("greedy{margin=2}").margin, float)


def test_blanks_around_the_pieces_do_not_matter():
    assert read("  greedy { lookahead = 8 ,margin=2 } ") == Greedy(lookahead=8, margin=2.0)


def test_only_fields_that_differ_from_their_default_are_printed_in_declared_order():
    assert spec(Greedy()) == "greedy"
    assert spec(Greedy(hoist=False, lookahead=2)) == "greedy{lookahead=2, hoist=false}"


words = st.text(st.characters(categories=("L", "N"), include_characters="_-./ "), min_size=1).filter(
    lambda text: text == text.strip()
)


@given(
    st.builds(
        Greedy,
        lookahead=st.integers(),
        margin=st.floats(allow_nan=False),
        hoist=st.booleans(),
        start=words,
    )
)
def test_what_is_printed_reads_back_as_the_same_object(strategy):
    assert read(spec(strategy)) == strategy


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no spec"),
        ("greedy{", "is no spec"),
        ("greedy{lookahead=1}}", "is no spec"),
        ("Greedy Strategy", "is no spec"),
        ("greedy{lookahead}", "'lookahead' is no 'key=value'"),
        ("greedy{lookahead=}", "'lookahead=' is no 'key=value'"),
        ("greedy{=3}", "'=3' is no 'key=value'"),
        ("greedy{lookahead=1, lookahead=2}", "sets 'lookahead' twice"),
        ("greedy{lookahed=1}", "did you mean 'lookahead'?"),
        ("greedy{lookahead=1.5}", "'1.5' is not a whole number"),
        ("greedy{margin=wide}", "'wide' is not a number"),
        ("greedy{hoist=1}", "'1' is not true or false"),
    ],
)
def test_a_bad_spec_is_an_option_error_that_says_what_is_wrong(text, message):
    with pytest.raises(OptionError) as caught:
        read(text)
    assert message in str(caught.value)
    assert "strategy" in str(caught.value)


def test_a_field_of_a_strategy_without_fields_says_that_it_takes_none():
    with pytest.raises(OptionError, match="plain takes no options"):
        build(Plain, {"lookahead": "1"}, option="strategy")


def test_a_word_that_a_spec_cannot_spell_is_refused_when_printed():
    with pytest.raises(OptionError, match=r"greedy\.start='a,b' cannot be written in a spec"):
        spec(Greedy(start="a,b"))


def test_a_field_type_that_no_spec_can_hold_is_a_programming_error():
    @dataclass(frozen=True)
    class Odd:
        name: ClassVar[str] = "odd"

        levels: bytes = b""

    with pytest.raises(TypeError, match=r"Odd\.levels"):
        build(Odd, {"levels": "x"}, option="strategy")


def test_the_hint_names_all_known_words_even_when_none_is_near():
    assert nearest("zzz", ["b", "a"]) == "known: a, b"
