import pytest


@pytest.fixture
def lines(pack):
    module = pack("nodes.lines")
    seen = []
    module.io.NodeOutput = seen.append
    return module.Lines, seen


def test_each_line_with_text_is_an_item(lines):
    node, seen = lines

    node.execute(" a cat \n\n\ta dog\n")

    assert seen == [["a cat", "a dog"]]


def test_a_text_without_lines_is_one_of_our_errors(lines, pack):
    with pytest.raises(pack("runtime").ResidentError, match=r"^Text Lines has no line to pass on\. Write at least one"):
        lines[0].execute(" \n ")
