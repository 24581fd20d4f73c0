"""Tests of memory shared by the ranks of one host. Two ranks run in one process, each with its own
end."""

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from globaltensor.distributed.backends import shared_memory
from globaltensor.distributed.backends.shared_memory import PeerLost, SharedMemoryPeers, host

pytestmark = pytest.mark.skipif(
    not host(), reason="this system has no memory files, or cannot pass them on"
)


def soon() -> float:
    return 20.0


def met(*ranks: int) -> list[SharedMemoryPeers]:
    ends = [SharedMemoryPeers(rank) for rank in ranks]
    names = {end.rank: end.name for end in ends}
    with ThreadPoolExecutor(len(ends)) as pool:
        list(
            pool.map(
                lambda end: end.connect({r: n for r, n in names.items() if r != end.rank}, soon),
                ends,
            )
        )
    return ends


@pytest.fixture
def two() -> Iterator[list[SharedMemoryPeers]]:
    ends = met(3, 7)
    yield ends
    for end in ends:
        end.close()


def some(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(
        256, (n,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def test_parts_are_found_by_topic_and_number(two: list[SharedMemoryPeers]) -> None:
    a, b = two
    sizes = [1, 63, 64, 65, 4096, 5000, 1 << 20, (64 << 20) + 1]
    for number, n in enumerate(sizes):
        a.publish(5, number, [(some(n, number), (7,))])
    b.publish(6, 0, [(some(9, 1), (3,))])
    for number in reversed(range(len(sizes))):
        part = b.read(3, 5, number, sizes[number], soon)
        assert torch.equal(part.data, some(sizes[number], number)), sizes[number]
        assert part.data.data_ptr() % 64 == 0  # the alignment fits every dtype
        part.done()
    assert torch.equal(a.read(7, 6, 0, 9, soon).data, some(9, 1))


def test_one_part_for_several_and_several_for_one_each() -> None:
    ends = met(0, 1, 2)
    ends[0].publish(1, 1, [(some(100, 1), (1, 2)), (some(200, 2), ())])
    ends[0].publish(1, 2, [(some(100, 3), (2,)), (some(300, 4), (1,))])
    assert torch.equal(ends[1].read(0, 1, 1, 100, soon).data, some(100, 1))
    assert torch.equal(ends[2].read(0, 1, 1, 100, soon).data, some(100, 1))
    assert torch.equal(ends[1].read(0, 1, 2, 300, soon).data, some(300, 4))
    assert torch.equal(ends[2].read(0, 1, 2, 100, soon).data, some(100, 3))
    for end in ends:
        end.close()


def test_memory_serves_again_once_all_have_read_it(two: list[SharedMemoryPeers]) -> None:
    a, b = two
    for number in range(50):
        a.publish(1, number, [(some(10_000, number), (7,))])
        part = b.read(3, 1, number, 10_000, soon)
        assert torch.equal(part.data, some(10_000, number))
        part.done()
    assert a._arena.bytes == 16384
    a.publish(1, 100, [(some(10_000, 100), (7,))])
    kept = b.read(3, 1, 100, 10_000, soon)
    for number in range(101, 120):  # data that is still being read is not overwritten
        a.publish(1, number, [(some(10_000, number), (7,))])
    assert torch.equal(kept.data, some(10_000, 100))


def test_what_nobody_wants_does_not_keep_its_memory(two: list[SharedMemoryPeers]) -> None:
    a, b = two
    for number in range(0, 40, 2):
        a.publish(1, number, [(some(10_000), (7,))])
        assert number % 4 or b.has_arrived(3, 1, number)
        b.forget(3, 1, number)  # the block is already known, or not yet
        b.forget(3, 1, number + 1)
        a.publish(1, number + 1, [(some(10_000), (7,))])
        b.publish(2, number, [(some(1), (3,))])
        assert not b.has_arrived(3, 9, 9)
        a.read(7, 2, number, 1, soon).done()
    assert a._arena.unread() == 0
    assert not b._arrived
    assert not b._unwanted


def test_many_notes_that_nobody_reads_yet(two: list[SharedMemoryPeers]) -> None:
    def run(me: SharedMemoryPeers, other: int) -> int:
        for number in range(3000):  # more than a socket holds: each peer receives while it sends
            me.publish(1, number, [(some(8, number), (other,))])
        return sum(int(me.read(other, 1, number, 8, soon).data.sum()) for number in range(3000))

    want = sum(int(some(8, number).sum()) for number in range(3000))
    with ThreadPoolExecutor(2) as pool:
        assert [
            f.result(60) for f in [pool.submit(run, two[0], 7), pool.submit(run, two[1], 3)]
        ] == [want, want]


def test_a_sender_that_can_wait_does_not_fill_the_memory(
    two: list[SharedMemoryPeers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "_UNREAD", 1 << 20)
    a, b = two

    def read() -> None:
        for number in range(200):
            part = b.read(3, 1, number, 100_000, soon)
            assert torch.equal(part.data, some(100_000, number))
            part.done()

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(200):
        a.publish(1, number, [(some(100_000, number), (7,))], patient=True)
    reader.join(60)
    assert not reader.is_alive()
    assert a._arena.bytes <= 2 << 20


def test_one_that_waits_hears_at_once(two: list[SharedMemoryPeers]) -> None:
    a, b = two
    timer = threading.Timer(0.2, a.publish, (1, 1, [(some(5), (7,))]))
    timer.start()
    assert torch.equal(b.read(3, 1, 1, 5, soon).data, some(5))
    timer.join()


@pytest.mark.long
def test_errors(two: list[SharedMemoryPeers]) -> None:
    a, b = two
    a.publish(1, 1, [(some(5), (7,))])
    with pytest.raises(
        PeerLost,
        match="rank 3 has sent 5 bytes where 6 were expected: the ranks run different operations",
    ):
        b.read(3, 1, 1, 6, soon)
    with pytest.raises(PeerLost, match=r"nothing has come from rank 3 for 0 s: timed out"):
        b.read(3, 1, 2, 6, lambda: 0.1)
    a.publish(1, 3, [(some(70_000_000), (7,))])
    a.close()
    assert torch.equal(
        b.read(3, 1, 3, 70_000_000, soon).data, some(70_000_000)
    )  # the block arrived before the peer closed
    assert b.has_arrived(3, 1, 4)  # waiting for this block ends immediately
    with pytest.raises(PeerLost, match="rank 3 has gone"):
        b.read(3, 1, 4, 5, soon)
    with pytest.raises(PeerLost, match="rank 3 has gone"):
        b.publish(1, 5, [(some(1), (3,))])


def test_strangers_are_sent_away() -> None:
    a, b = SharedMemoryPeers(0), SharedMemoryPeers(1)
    for said in (b"", b"abc"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
            stranger.connect(f"\0globaltensor-{a.name}")
            stranger.sendall(said)
    with ThreadPoolExecutor(2) as pool:
        for done in [
            pool.submit(a.connect, {1: b.name}, soon),
            pool.submit(b.connect, {0: a.name}, soon),
        ]:
            done.result(30)
    a.publish(1, 1, [(some(5), (1,))])
    assert torch.equal(b.read(0, 1, 1, 5, soon).data, some(5))
    with pytest.raises(PeerLost, match="rank 2, of the same host, did not connect within 0 s"):
        a.connect({2: "nobody"}, lambda: 0.1)
    b.close()
    c = SharedMemoryPeers(2)
    with pytest.raises(PeerLost, match="rank 1, of the same host, cannot be reached"):
        c.connect({1: b.name}, soon)
    for end in (a, c):
        end.close()


def test_nothing_is_left_behind(two: list[SharedMemoryPeers]) -> None:
    before = set(os.listdir("/proc/self/fd"))
    a, b = met(0, 1)
    a.publish(1, 1, [(some(100_000), (1,))])
    b.read(0, 1, 1, 100_000, soon).done()
    a.close()
    a.close()
    b.close()
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_child_of_a_fork_does_not_hold_its_parents_ends(two: list[SharedMemoryPeers]) -> None:
    a, b = two
    out, into = os.pipe()
    child = os.fork()
    if not child:  # the child lives until the parent closes the pipe
        os.close(into)
        os.read(out, 1)
        os._exit(0)
    os.close(out)
    try:
        a.close()
        with pytest.raises(PeerLost, match="rank 3 has gone"):
            b.read(3, 1, 1, 5, soon)
    finally:
        os.close(into)
        os.waitpid(child, 0)
