"""The caller's tensors as contiguous memory that MPI can read and write, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from .progress import Steps

__all__ = ["Memory", "plain"]


class Memory:
    """The memory of one operation's tensors. Tensors that lie contiguous on the host are used as
    they are; what is written for others is copied at the end.

    ``cuda_aware``: MPI takes CUDA memory too; else that goes through the host.
    """

    __slots__ = ("_copies", "_cuda_aware", "_streams")

    def __init__(self, cuda_aware: bool) -> None:
        self._cuda_aware = cuda_aware
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._streams: list[torch.cuda.Stream] = []

    def read(self, t: Tensor) -> Tensor:
        """Memory with the values of ``t``; it is only read."""
        if plain(t):
            return t
        t = t.detach()
        if t.is_conj() or t.is_neg():
            t = t.resolve_conj().resolve_neg()
        if t.is_cuda:
            self._wait_for(t)
        return (t if t.is_cpu or self._cuda_aware else t.cpu()).contiguous()

    def write(self, t: Tensor) -> Tensor:
        """Memory whose values ``t`` will have."""
        if plain(t):
            return t
        if t.is_cuda:
            self._wait_for(t)
        here = t.is_cpu or self._cuda_aware
        if here and t.is_contiguous() and not (t.is_conj() or t.is_neg()):
            return t.detach()
        return self.replace(
            t, torch.empty(t.shape, dtype=t.dtype, device=t.device if here else "cpu")
        )

    def change(self, t: Tensor) -> Tensor:
        """Memory with the values of ``t``, which will have those written there."""
        memory = self.read(t)
        return memory if memory.data_ptr() == t.data_ptr() else self.replace(t, memory)

    def replace(self, t: Tensor, memory: Tensor) -> Tensor:
        """``memory``, whose values ``t`` will have."""
        self._copies.append((t.detach(), memory))
        return memory

    def _wait_for(self, t: Tensor) -> None:
        """Kernels that the caller has queued may still be writing or reading it. What is copied
        back goes to the same queue."""
        stream = torch.cuda.current_stream(t.device)
        stream.synchronize()
        self._streams.append(stream)

    def around(self, steps: Steps) -> Steps:
        """The same steps, and at their end the copies."""
        return self._then_copy(steps) if self._copies or self._streams else steps

    def _then_copy(self, steps: Steps) -> Steps:
        yield from steps
        for t, memory in self._copies:
            if t.is_cuda:
                # Another thread than the caller's may be here, with another queue.
                with torch.cuda.stream(self._streams[0]):
                    t.copy_(memory.view(t.shape))
            else:
                t.copy_(memory.view(t.shape))
        for stream in self._streams:
            stream.synchronize()


def plain(t: Tensor) -> bool:
    """Whether MPI can use the memory of ``t`` as it is."""
    return (
        t.layout is torch.strided
        and t.is_cpu
        and t.is_contiguous()
        and not (t.requires_grad or t.is_conj() or t.is_neg())
    )
