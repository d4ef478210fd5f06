"""What a connection makes of faults."""

import errno
import os
import socket
from types import SimpleNamespace

import aiohttp
import pytest

from runtime.engines.server.http import Http, LoopThread, Unreachable
from runtime.profiles import Profile


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ECONNREFUSED, "Connect call failed ('127.0.0.1', 1)"), os.strerror(errno.ECONNREFUSED)),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "Name or service not known"),
    ],
)
def test_why_a_server_cannot_be_reached_is_told_in_the_systems_words(error, reason):
    loop = LoopThread()
    connection = Http(Profile(name="box", base_url="http://127.0.0.1:1"), loop)

    with pytest.raises(Unreachable) as caught, connection.translate_errors():
        raise aiohttp.ClientConnectorError(SimpleNamespace(ssl=None), error)
    connection.close()
    loop.close()

    assert f"cannot be reached ({reason})" in str(caught.value)
