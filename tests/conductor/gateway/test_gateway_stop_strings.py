from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.gateway.stop_strings import StopMatcher

letters = st.text(alphabet="abc", max_size=24)
stop_lists = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=4)


def cut_by_rule(text: str, stops: list[str]) -> str | None:
    """The oracle: try every end, from the first; of stops that end there, the longest."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return None


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    return [text[start:end] for start, end in pairwise(edges)]


@settings(max_examples=500)
@given(text=letters, stops=stop_lists, cuts=st.lists(st.integers(0, 24), max_size=12))
def test_text_is_cut_at_the_first_match_however_it_arrives(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    shown = "".join(matcher.feed(piece) for piece in pieces_of(text, cuts))
    expected = cut_by_rule(text, stops)
    if expected is None:
        assert matcher.matched is None
        assert shown + matcher.flush() == text
    else:
        assert matcher.matched in stops
        assert shown == expected


@given(text=letters, stops=stop_lists)
def test_nothing_is_held_back_that_cannot_become_a_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = matcher.feed(text)
    if matcher.matched is None:
        held = text[len(shown) :]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


def test_a_stop_string_over_three_pieces_is_never_shown_in_part() -> None:
    matcher = StopMatcher(["</end>"])
    assert [matcher.feed(piece) for piece in ("text <", "/en", "d> more")] == ["text ", "", ""]
    assert matcher.matched == "</end>"


def test_a_stop_string_inside_of_one_piece_cuts_exactly_there() -> None:
    assert StopMatcher(["STOP"]).feed("beforeSTOPafter") == "before"


def test_nothing_is_shown_after_a_match() -> None:
    matcher = StopMatcher(["x"])
    matcher.feed("x")
    assert matcher.feed("more") == ""


def test_held_text_is_shown_at_the_end() -> None:
    matcher = StopMatcher(["abc"])
    assert matcher.feed("zab") == "z"
    assert matcher.flush() == "ab"
