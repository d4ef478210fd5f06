"""Who may have the monitor's routes act."""

import pytest


@pytest.mark.parametrize(
    ("origin", "is_foreign"),
    [
        (None, False),
        ("http://comfy.lan:8188", False),
        ("https://COMFY.lan:8188", False),
        ("http://comfy.lan", True),
        ("http://evil.example", True),
        ("null", True),
        ("http://[::1", True),
        ("", True),
    ],
)
def test_an_origin_that_is_not_this_server_or_cannot_be_read_is_foreign(pack, origin, is_foreign):
    assert pack("nodes.routes")._is_foreign(origin, "comfy.lan:8188") is is_foreign
