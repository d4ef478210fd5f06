"""The loop's thread: what is asked of it while it closes, or after it."""

import asyncio
import threading

import pytest

from runtime.engines.server.http import LoopThread
from runtime.errors import ServerError


@pytest.fixture
def loop():
    one = LoopThread()
    yield one
    one.close()


def test_what_runs_while_the_loop_closes_is_told_so(loop):
    has_begun, faults = threading.Event(), []

    async def long():
        has_begun.set()
        await asyncio.sleep(60)

    def ask():
        with pytest.raises(ServerError, match="is closed") as caught:
            loop.run(long())
        faults.append(caught.value)

    asking = threading.Thread(target=ask)
    asking.start()
    has_begun.wait(10)
    loop.close()
    asking.join(10)

    assert len(faults) == 1


def test_nothing_is_waited_for_in_vain_whenever_the_loop_closes(loop):
    def ask():
        try:
            while True:
                loop.run(asyncio.sleep(0))
        except ServerError:
            pass

    asking = [threading.Thread(target=ask, daemon=True) for _ in range(4)]
    for one in asking:
        one.start()

    loop.close()
    for one in asking:
        one.join(10)

    assert not any(one.is_alive() for one in asking)


def test_a_closed_loop_refuses_and_closes_again(loop):
    loop.close()
    loop.call_soon(lambda: None)

    with pytest.raises(ServerError, match="Run the graph again"):
        loop.run(asyncio.sleep(0))
