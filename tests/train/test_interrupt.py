"""Ctrl-C and SIGTERM: the first asks a run to stop, and the handlers are restored."""

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
from support.waiting import HANG_SECONDS, until

from replicax.train.run.stopping import Interrupt, shown_signal

TERMINATING = [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT]


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    numbers = [signal.SIGINT, *TERMINATING]
    handlers = [signal.getsignal(number) for number in numbers]
    threads = set(threading.enumerate())
    wake = wakeup_fd()
    yield
    assert [signal.getsignal(each) for each in numbers] == handlers
    assert set(threading.enumerate()) == threads
    assert wakeup_fd() == wake


def wakeup_fd() -> int:
    current = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(current)
    return current


def sigterm() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("before", [signal.SIG_IGN, signal.SIG_DFL])
def test_a_handler_that_is_no_function_comes_back_too(before: signal.Handlers) -> None:
    own = signal.signal(signal.SIGINT, before)
    try:
        with Interrupt():
            changed = signal.getsignal(signal.SIGINT) is not before
        assert changed == (before is signal.SIG_DFL)  # an ignored SIGINT stays ignored
        assert signal.getsignal(signal.SIGINT) is before
    finally:
        signal.signal(signal.SIGINT, own)


def test_sigterm_is_a_wish_and_a_second_one_changes_nothing() -> None:
    with Interrupt() as interrupt:
        sigterm()
        assert (interrupt.wanted, interrupt.signal) == (True, signal.SIGTERM)
        sigterm()
        ctrl_c()  # the first of its kind
        assert interrupt.signal == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            ctrl_c()


@pytest.mark.parametrize("number", TERMINATING)
def test_the_others_may_be_left_alone(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with Interrupt(terminate=False):
        assert signal.getsignal(number) is before


@pytest.mark.promise("checkpoints.signals")
@pytest.mark.parametrize("number", TERMINATING)
def test_each_of_them_is_a_wish(number: signal.Signals) -> None:
    with Interrupt() as interrupt:
        signal.raise_signal(number)
        assert interrupt.signal == number


def test_sighup_stays_ignored_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupt() as interrupt:
            signal.raise_signal(signal.SIGHUP)
        assert not interrupt.wanted
    finally:
        signal.signal(signal.SIGHUP, before)


def test_at_once_is_called_once_in_another_thread() -> None:
    calls: list[tuple[int, threading.Thread]] = []

    def at_once(number: int) -> None:
        calls.append((number, threading.current_thread()))

    with Interrupt(at_once=at_once) as interrupt:
        sigterm()
        until(lambda: calls)
        assert interrupt.signal == signal.SIGTERM
        sigterm()
        ctrl_c()
        time.sleep(0.1)
        interrupt.hold()
    ((number, thread),) = calls
    assert number == signal.SIGTERM
    assert thread is not threading.current_thread()


def test_what_is_held_is_not_thrown_away() -> None:
    calls: list[int] = []
    with Interrupt(at_once=calls.append) as interrupt:
        interrupt.hold()
        sigterm()
        assert interrupt.wanted
        time.sleep(0.1)
        interrupt.let_go()
        sigterm()  # the second
        time.sleep(0.1)
    assert not calls


def test_a_signal_after_it_is_let_go_ends_it() -> None:
    calls: list[int] = []
    with Interrupt(at_once=calls.append) as interrupt:
        interrupt.hold()
        interrupt.let_go()
        sigterm()
        until(lambda: calls)


def test_hold_waits_for_who_ends_the_process() -> None:
    running, done = threading.Event(), threading.Event()

    def at_once(_number: int) -> None:
        running.set()
        time.sleep(0.3)
        done.set()

    with Interrupt(at_once=at_once) as interrupt:
        sigterm()
        assert running.wait(HANG_SECONDS)
        interrupt.hold()
        assert done.is_set()


def test_a_signal_just_before_hold_is_answered() -> None:
    """The thread that watches or `hold` answers it, whichever is first, and only once."""
    for _ in range(200):
        calls: list[int] = []
        with Interrupt(at_once=calls.append) as interrupt:
            sigterm()
            interrupt.hold()
            assert calls == [signal.SIGTERM]
        assert calls == [signal.SIGTERM]


def test_signals_of_others_are_not_ours() -> None:
    calls: list[int] = []
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    try:
        with Interrupt(at_once=calls.append) as interrupt:
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.1)
            assert not interrupt.wanted
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (calls, heard) == ([], [signal.SIGUSR1])


def test_the_innermost_acts_and_the_outer_knows() -> None:
    calls: list[int] = []
    with Interrupt(at_once=calls.append) as outer:
        with Interrupt() as inner:
            sigterm()
            time.sleep(0.1)
            assert (inner.wanted, outer.wanted, outer.signal) == (True, True, signal.SIGTERM)
        assert not calls
        outer.hold()
        outer.let_go()
        sigterm()
        time.sleep(0.1)
        assert not calls  # it is known since


def test_each_has_its_own_after_the_inner_one_is_left() -> None:
    inner_calls: list[int] = []
    calls: list[int] = []
    with Interrupt(at_once=calls.append):
        with Interrupt(at_once=inner_calls.append):
            pass
        sigterm()
        until(lambda: calls)
    assert (calls, inner_calls) == ([signal.SIGTERM], [])


def test_a_wakeup_descriptor_of_others_comes_back() -> None:
    ear, wake = os.pipe()
    os.set_blocking(wake, False)
    before = signal.set_wakeup_fd(wake)
    try:
        with Interrupt(at_once=lambda _: None):
            assert wakeup_fd() != wake
        assert wakeup_fd() == wake
    finally:
        signal.set_wakeup_fd(before)
        os.close(ear)
        os.close(wake)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*fork:RuntimeWarning")
def test_a_forked_child_is_ended_by_its_own_sigterm() -> None:
    """A pool ends its processes like this; the parent does not wait for them."""
    calls: list[int] = []
    forked, told = os.pipe()
    with Interrupt(at_once=calls.append) as interrupt:
        child = os.fork()
        if child == 0:
            os.write(told, b".")
            time.sleep(30)
            os._exit(0)
        os.read(forked, 1)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
        left = os.fork()
        if left == 0:
            time.sleep(30)
            os._exit(0)
        assert not interrupt.wanted
    os.kill(left, signal.SIGKILL)
    os.waitpid(left, 0)
    os.close(forked)
    os.close(told)
    assert not calls


def test_names() -> None:
    assert [shown_signal(n) for n in (signal.SIGINT, signal.SIGTERM)] == ["Ctrl-C", "SIGTERM"]
