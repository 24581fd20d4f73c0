"""The caller's tensors as contiguous memory that MPI can read and write, and the copy back.

`process_group` calls this module.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .progress import Steps

__all__ = ["Memory", "plain"]


class Memory:
    """The memory of one operation's tensors.

    Tensors that are contiguous on the host are used directly. Buffers for results are copied to the
    caller's tensors at the end. If ``cuda_aware``, MPI accepts CUDA memory too. Otherwise CUDA
    tensors go through the host.
    """

    __slots__ = ("_copies", "_cuda_aware", "_streams")

    def __init__(self, cuda_aware: bool) -> None:
        self._cuda_aware = cuda_aware
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._streams: list[torch.cuda.Stream] = []

    def read(self, t: Tensor) -> Tensor:
        """Return memory with the values of ``t``, which is only read."""
        if plain(t):
            return t
        t = t.detach()
        if t.is_conj() or t.is_neg():
            t = t.resolve_conj().resolve_neg()
        if t.is_cuda:
            self._wait_for(t)
        return (t if t.is_cpu or self._cuda_aware else t.cpu()).contiguous()

    def write(self, t: Tensor) -> Tensor:
        """Return memory whose values are copied to ``t`` at the end, if it is not ``t`` itself."""
        if plain(t):
            return t
        if t.is_cuda:
            self._wait_for(t)
        accessible = t.is_cpu or self._cuda_aware
        if accessible and t.is_contiguous() and not (t.is_conj() or t.is_neg()):
            return t.detach()
        return self.replace(
            t, torch.empty(t.shape, dtype=t.dtype, device=t.device if accessible else "cpu")
        )

    def change(self, t: Tensor) -> Tensor:
        """Return memory with the values of ``t``, whose results are copied to ``t`` at the end."""
        memory = self.read(t)
        return memory if memory.data_ptr() == t.data_ptr() else self.replace(t, memory)

    def replace(self, t: Tensor, memory: Tensor) -> Tensor:
        """Record that ``memory`` is copied to ``t`` at the end, and return ``memory``."""
        self._copies.append((t.detach(), memory))
        return memory

    def _wait_for(self, t: Tensor) -> None:
        """Wait for queued kernels of the caller, which may still write or read ``t``.

        The copy back is queued on the same stream.
        """
        stream = torch.cuda.current_stream(t.device)
        stream.synchronize()
        self._streams.append(stream)

    def around(self, steps: Steps) -> Steps:
        """Return the same steps with the copies at their end."""
        return self._then_copy(steps) if self._copies or self._streams else steps

    def _then_copy(self, steps: Steps) -> Steps:
        yield from steps
        for t, memory in self._copies:
            if t.is_cuda:
                # The current thread may not be the caller's, and may have another current stream.
                with torch.cuda.stream(self._streams[0]):
                    t.copy_(memory.view(t.shape))
            else:
                t.copy_(memory.view(t.shape))
        for stream in self._streams:
            stream.synchronize()


def plain(t: Tensor) -> bool:
    """Return True if MPI can use the memory of ``t`` directly."""
    return (
        t.layout is torch.strided
        and t.is_cpu
        and t.is_contiguous()
        and not (t.requires_grad or t.is_conj() or t.is_neg())
    )
