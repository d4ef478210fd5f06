import itertools

from hypothesis import given
from hypothesis import strategies as st

from runtime.prompting.stop import StopMatcher, parse_stop_strings

TEXT = st.text(alphabet="abc", max_size=20)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=4)


def by_the_rule(text, stops):
    """What passes, and the string that stops: the first to complete, of two at once the longer. By brute force."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            stop = max(ended, key=len)
            return text[: end - len(stop)], stop
    return text, None


def cut(text, at):
    places = [0, *sorted(place % (len(text) + 1) for place in at), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(places)]


@given(TEXT, STOPS, st.lists(st.integers(min_value=0), max_size=6))
def test_any_cut_follows_the_rule(text, stops, at):
    matcher = StopMatcher(stops)

    passed = "".join(matcher.push(part) for part in cut(text, at)) + matcher.flush()

    assert (passed, matcher.matched) == by_the_rule(text, stops)


@given(TEXT, STOPS)
def test_text_is_held_back_exactly_as_long_as_it_could_still_match(text, stops):
    matcher = StopMatcher(stops)
    passed = ""
    for at, char in enumerate(text, start=1):
        passed += matcher.push(char)
        if matcher.matched is not None:
            break
        starts = [n for n in range(at + 1) if any(stop.startswith(text[n:at]) for stop in stops)]
        longest = min((n for n in starts if n < at), default=at)
        assert passed == text[:longest]


def test_stop_strings_come_one_a_line_with_escapes():
    typed = "###\n\\n\\nUser:\n\nend\\t\r\n a \nC:\\\\new\n\\q"

    assert parse_stop_strings(typed) == ("###", "\n\nUser:", "end\t", " a ", "C:\\new", "\\q")
