import asyncio
import threading

from duemq.errors import Closed
from duemq.transport.loop_thread import LoopThread


def test_a_call_that_the_end_of_the_loop_interrupts_raises_closed() -> None:
    thread, running, raised = LoopThread.acquire(), threading.Event(), []

    async def forever() -> None:
        running.set()
        await asyncio.Event().wait()

    def call() -> None:
        try:
            thread.run(forever())
        except Closed as error:
            raised.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    assert running.wait(30)
    thread.release()
    caller.join(30)
    assert [type(error) for error in raised] == [Closed]
