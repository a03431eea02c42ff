"""Ctrl-C: the first is a wish, the second is obeyed at once, and outside all is as before."""

import signal
import threading

import pytest

from replicax.train.interrupt import Interrupt


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def test_the_first_ctrl_c_is_a_wish() -> None:
    with Interrupt() as interrupt:
        assert not interrupt.wanted
        ctrl_c()
        assert interrupt.wanted
    assert interrupt.wanted


def test_the_second_ctrl_c_interrupts() -> None:
    before = signal.getsignal(signal.SIGINT)

    def twice() -> None:
        with Interrupt():
            ctrl_c()
            ctrl_c()

    with pytest.raises(KeyboardInterrupt):
        twice()
    assert signal.getsignal(signal.SIGINT) is before


def test_the_handler_before_is_the_handler_after() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupt():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        ctrl_c()


@pytest.mark.parametrize("before", [signal.SIG_IGN, signal.SIG_DFL])
def test_a_handler_that_is_no_function_comes_back_too(before: signal.Handlers) -> None:
    own = signal.signal(signal.SIGINT, before)
    try:
        with Interrupt():
            changed = signal.getsignal(signal.SIGINT) is not before
        assert changed == (before is signal.SIG_DFL)  # who ignores SIGINT goes on ignoring it
        assert signal.getsignal(signal.SIGINT) is before
    finally:
        signal.signal(signal.SIGINT, own)


def test_in_another_thread_it_does_nothing() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen: list[object] = []

    def work() -> None:
        with Interrupt() as interrupt:
            seen.extend([interrupt.wanted, signal.getsignal(signal.SIGINT)])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False, before]
