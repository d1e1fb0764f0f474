import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.stop_strings import StopStrings


def cut_by_definition(text: str, stops: list[str]) -> tuple[str, bool]:
    """The longest of the stop strings that end first, found by trying every end."""
    for end in range(1, len(text) + 1):
        completed = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if completed:
            return text[: end - max(completed)], True
    return text, False


def emitted(pushes: list[str], stops: list[str]) -> tuple[str, bool]:
    stop_strings = StopStrings(stops)
    out = ""
    stopped = False
    for push in pushes:
        text, stopped = stop_strings.push(push)
        out += text
    return out + stop_strings.finish(), stopped


@given(
    pushes=st.lists(st.text(alphabet="abc", max_size=6), max_size=12),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4),
)
def test_any_cut_into_pushes_gives_the_text_before_the_first_stop_string(pushes, stops):
    assert emitted(pushes, stops) == cut_by_definition("".join(pushes), stops)


@given(
    text=st.text(alphabet="ab", max_size=20),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_exactly_the_longest_end_that_may_become_a_stop_string_is_held_back(text, stops):
    stop_strings = StopStrings(stops)
    emitted_text = ""
    for index, character in enumerate(text, start=1):
        new, stopped = stop_strings.push(character)
        if stopped:
            return
        emitted_text += new
        ends = [
            length
            for length in range(1, index + 1)
            if any(stop.startswith(text[index - length : index]) for stop in stops)
        ]
        assert emitted_text == text[: index - max(ends, default=0)]


def test_a_stop_string_over_three_pushes_is_cut_and_nothing_of_it_is_shown():
    stop_strings = StopStrings(["\n\nUser:"])
    assert stop_strings.push("Yes.\n") == ("Yes.", False)
    assert stop_strings.push("\nUs") == ("", False)
    assert stop_strings.push("er: and") == ("", True)
    assert stop_strings.push("more") == ("", True)
    assert stop_strings.finish() == ""


def test_held_text_is_released_as_soon_as_it_cannot_become_a_stop_string():
    stop_strings = StopStrings(["<end>"])
    assert stop_strings.push("a <en") == ("a ", False)
    assert stop_strings.push("v") == ("<env", False)


def test_a_false_start_that_holds_a_second_start_keeps_the_second():
    stop_strings = StopStrings(["aab"])
    assert stop_strings.push("aaa") == ("a", False)
    assert stop_strings.push("b") == ("", True)


def test_the_stop_string_that_is_complete_first_wins_and_the_longer_of_two_that_end_together():
    assert emitted(["xabcd"], ["abcd", "bc"]) == ("xa", True)
    assert emitted(["xabc"], ["bc", "abc"]) == ("x", True)


def test_text_without_stop_strings_passes_at_once():
    stop_strings = StopStrings([])
    assert stop_strings.push("anything") == ("anything", False)
    assert stop_strings.finish() == ""


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])


def cut_behind(text: str, stops: list[str], least: int) -> tuple[str, bool]:
    """As above, but the first `least` characters cannot complete a stop string."""
    for end in range(least + 1, len(text) + 1):
        completed = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if completed:
            return text[: end - max(completed)], True
    return text, False


@given(
    text=st.text(alphabet="ab", max_size=16),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=3),
    least=st.integers(0, 12),
)
def test_what_may_not_stop_yet_is_text_and_what_goes_on_behind_it_counts(text, stops, least):
    stop_strings = StopStrings(stops)
    out, stopped = "", False
    for length, character in enumerate(text, start=1):
        part, stopped = stop_strings.push(character, may_stop=length > least)
        out += part
    assert (out + stop_strings.finish(), stopped) == cut_behind(text, stops, least)
