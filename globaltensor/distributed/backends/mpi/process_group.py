"""MpiGroup: the process group that torch.distributed calls.

It converts the caller's tensors to contiguous memory, and starts operations.
"""

# mypy: disable-error-code="override,assignment"
# torch's stubs give each method several signatures. The first argument shows which one is meant.
from __future__ import annotations

import contextlib
import itertools
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from ....errors import WorldError
from . import collectives
from .contiguous import Memory, plain
from .library import library
from .progress import Finished, Joint, Operation, Steps, progress
from .reduction import Reduction, reduction
from .requests import Inbox, Letter, Round, Team
from .sparse_all_reduce import all_reduce_sparse

__all__ = ["MpiGroup"]

Work = Operation | Finished

_ONE_GROUP: Final = "make one process group of all ranks, and smaller ones with new_group"
_NO_MPIRUN: Final = (
    "start the ranks together: mpirun -n 4 python script.py, srun --mpi=pmix, or "
    "the launcher with --backend mpi"
)


class MpiGroup(dist.ProcessGroup):
    """A process group over MPI.

    ``ranks`` are its members in torch's numbering. An empty list means all of MPI's ranks. The
    constructor raises WorldError if the members do not meet within the timeout, or if MPI's world
    does not contain all of them.
    """

    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta, name: str, ranks: Sequence[int]
    ) -> None:
        # the constructor for Python subclasses
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._store, self._timeout, self._title = store, timeout, name
        self._names = list(ranks) or list(range(size))
        self.library = lib = library()
        self._places = self._find_members(store, rank, size)
        if not ranks:
            lib.places, lib.timeout = dict(enumerate(self._places)), timeout
            with lib.one_at_a_time or contextlib.nullcontext():
                lib.listen()
        world = lib.api.COMM_WORLD
        with lib.one_at_a_time or contextlib.nullcontext():
            comm = world.Create_group(
                world.Get_group().Incl(self._places), zlib.crc32(name.encode()) % 32768
            )
            comm.Set_errhandler(lib.api.ERRORS_RETURN)
            letters = comm.Dup()
        members = list(range(size))
        self._team = Team(lib, comm, members, self._names, rank)
        self._inbox = Inbox(Team(lib, letters, members, self._names, rank))
        self._tags, self._together = itertools.count(), None
        self._alive, self._description = True, ""

    _together: list[Operation] | None

    def _find_members(self, store: Any, rank: int, size: int) -> list[int]:
        """Wait for all members, and return their ranks in MPI's world.

        MPI's collective functions have no time limit, so none starts before all members have come.
        """
        lib = self.library
        keys = [f"mpi rank of {i}" for i in range(size)]
        store.set(keys[rank], f"{lib.rank} {lib.size}")
        try:
            store.wait(keys, self._timeout)
        except RuntimeError as error:
            missing = [self._names[i] for i in range(size) if not store.check([keys[i]])]
            raise WorldError(
                f"{self._label()}: after {self._timeout.total_seconds():g} s ranks {missing} have "
                f"not joined"
            ) from error
        places_and_sizes = [tuple(map(int, store.get(key).split())) for key in keys]
        places = [place for place, _ in places_and_sizes]
        if len(set(places)) < size or any(world != lib.size for _, world in places_and_sizes):
            worlds = sorted({world for _, world in places_and_sizes})
            raise WorldError(
                f"{self._label()}: MPI was started with {' and '.join(map(str, worlds))} "
                f"process(es), not with these {size}; {_NO_MPIRUN}"
            )
        if size < lib.size and not lib.places:
            raise WorldError(
                f"{self._label()}: MPI was started with {lib.size} processes; {_ONE_GROUP}"
            )
        return places

    def _label(self) -> str:
        return f"rank {self._names[self.rank()]}: mpi group {self._title} of ranks {self._names}"

    # Properties that torch reads

    def getBackendName(self) -> str:
        return "mpi"

    def name(self) -> str:
        return "mpi"

    @property
    def group_name(self) -> str:
        return self._title

    @property
    def group_desc(self) -> str:
        return self._description

    # torch stores both with the backends of a group. This group is its own backend.
    def _set_group_name(self, name: str) -> None:
        self._title = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def _get_backend_name(self) -> str:
        return "mpi"

    @property
    def _device_types(self) -> list[torch.device]:
        return (
            [torch.device("cpu"), torch.device("cuda")]
            if torch.cuda.is_available()
            else [torch.device("cpu")]
        )

    def _get_backend(self, device: torch.device) -> Any:
        return self

    get_backend = _get_backend  # its name since torch 2.14

    supports_splitting = supports_coalescing = supports_time_estimate = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def get_group_store(self) -> Any:
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Mark the group as destroyed.

        The call is not collective: operations that other ranks still wait for end with their time
        limit.
        """
        self._alive = False

    abort = shutdown

    # Starting operations

    def _start(
        self,
        title: str,
        memory: Memory,
        rounds: Sequence[Steps],
        outputs: Sequence[Tensor],
        options: Any,
        later: bool = False,
    ) -> Work:
        return self._begin(
            title,
            memory.around(rounds[0] if len(rounds) == 1 else _chain_steps(rounds)),
            outputs,
            options,
            later,
        )

    def _may_run_inline(self, options: Any) -> bool:
        """Return True if the caller waits anyway, and no other thread is inside MPI."""
        return (
            options is not None
            and not options.asyncOp
            and self._together is None
            and self.library.one_at_a_time is None
        )

    def _begin(
        self, title: str, steps: Steps, outputs: Sequence[Tensor], options: Any, later: bool = False
    ) -> Work:
        if not self._alive:
            raise WorldError(f"{self._label()} was destroyed: {title} is no longer possible")
        if self._may_run_inline(options):
            return Operation.at_once(self, steps, outputs, title, options)
        operation = Operation(self, steps, outputs, title, options)
        if self._together is not None:
            self._together.append(operation)
        elif not operation.advance() and not (
            self.library.full and not later and operation.carry_on()
        ):
            if later:
                progress().see_to_later(operation)
            elif options is None or options.asyncOp:
                progress().see_to(operation)
        return operation

    def describe_operation(self, title: str, outputs: Sequence[Tensor]) -> str:
        """Return a description of the operation and its ranks, for an error."""
        shapes = ", ".join(f"{str(t.dtype)[6:]} {list(t.shape)}" for t in outputs[:3])
        return f"{self._label()}: {title}" + (
            f" of {shapes}{', ...' if len(outputs) > 3 else ''}" if shapes else ""
        )

    def seconds(self, options: Any) -> float:
        """Return the time limit of an operation: that of the call, else that of the group."""
        own = options.timeout.total_seconds() if options is not None else -1.0
        return own if own > 0 else self._timeout.total_seconds()

    def _start_coalescing(self, device: torch.device) -> None:
        self._together = []

    def _end_coalescing(self, device: torch.device) -> Joint:
        works, self._together = self._together or [], None
        for work in works:
            if not work.advance():
                progress().see_to(work)
        return Joint(works)

    def _memory(self) -> Memory:
        return Memory(self.library.cuda_aware)

    def _tag(self) -> int:
        return next(self._tags) % self.library.tags

    # Reductions

    def allreduce(self, tensors: Sequence[Tensor] | Tensor, opts: Any = None) -> Work:
        operands = _as_list(tensors)
        fold = self._reduction_for(opts, operands)
        # The usual case takes a shorter path.
        if len(operands) == 1 and fold.factor is None and plain(operands[0]):
            team, t, options = self._team, operands[0], _options(opts)
            if (
                team.size == 2
                and 0 < t.nbytes <= collectives.EAGER
                and self._alive
                and self._may_run_inline(options)
            ):
                try:
                    steps = collectives.all_reduce_pair(team, self._tag(), t, fold)
                except WorldError as error:
                    steps = _raise_steps(error)
                if steps is None:
                    return Finished(operands)
            else:
                steps = collectives.all_reduce(team, self._tag(), t, fold)
            return self._begin("all_reduce", steps, operands, options)
        memory = self._memory()
        rounds = [self._all_reduced(memory, t, fold) for t in operands]
        return self._start("all_reduce", memory, rounds, operands, _options(opts))

    allreduce_coalesced = allreduce

    def _all_reduced(self, memory: Memory, t: Tensor, fold: Reduction) -> Steps:
        if t.layout is not torch.strided:
            return all_reduce_sparse(self._team, self._tag(), t, fold)
        return collectives.all_reduce(
            self._team, self._tag(), self._input_memory(memory, t, fold, memory.change), fold
        )

    @staticmethod
    def _input_memory(
        memory: Memory, t: Tensor, fold: Reduction, use: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return the memory of a tensor to reduce, scaled if the reduction requires it."""
        if fold.factor is None:
            return use(t)
        scaled = fold.prepare(memory.read(t))
        return memory.replace(t, scaled) if use == memory.change else scaled

    def reduce(self, tensors: Sequence[Tensor] | Tensor, opts: Any = None) -> Work:
        operands = _as_list(tensors)
        root = 0 if opts is None else opts.rootRank
        fold, memory = self._reduction_for(opts, operands), self._memory()
        use = memory.change if root == self._team.index else memory.read
        rounds = [
            collectives.reduce(
                self._team, self._tag(), self._input_memory(memory, t, fold, use), fold, root
            )
            for t in operands
        ]
        return self._start("reduce", memory, rounds, operands, opts)

    def reduce_scatter(
        self,
        output_tensors: Sequence[Tensor] | Tensor,
        input_tensors: Sequence[Any],
        opts: Any = None,
    ) -> Work:
        outs = _as_list(output_tensors)
        ins = (
            [list(input_tensors)]
            if isinstance(input_tensors[0], Tensor)
            else [list(one) for one in input_tensors]
        )
        fold, memory, rounds = self._reduction_for(opts, outs), self._memory(), []
        for out, chunks in zip(outs, ins, strict=True):
            self._check_list("reduce_scatter", "input_list", chunks, out)
            self._check_size("reduce_scatter", "its own input", chunks[self._team.index], out, 1)
            rounds.append(
                self._reduce_scattered(
                    memory,
                    out,
                    [self._input_memory(memory, c, fold, memory.read) for c in chunks],
                    fold,
                )
            )
        return self._start("reduce_scatter", memory, rounds, outs, _options(opts))

    def reduce_scatter_single_coalesced(
        self, outputTensors: Sequence[Tensor], inputTensors: Sequence[Tensor], opts: Any = None
    ) -> Work:
        fold, memory, rounds = self._reduction_for(opts, outputTensors), self._memory(), []
        for out, whole in zip(outputTensors, inputTensors, strict=True):
            self._check_size("reduce_scatter_tensor", "input", whole, out, self._team.size)
            flat = self._input_memory(memory, whole, fold, memory.read).view(-1)
            rounds.append(
                self._reduce_scattered(
                    memory, out, flat.split_with_sizes([out.numel()] * self._team.size), fold
                )
            )
        return self._start("reduce_scatter_tensor", memory, rounds, outputTensors, _options(opts))

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter_single(
        self, outputTensor: Tensor, inputTensor: Tensor, opts: Any = None
    ) -> Work:
        return self.reduce_scatter_single_coalesced([outputTensor], [inputTensor], opts)

    _reduce_scatter_base = reduce_scatter_single

    def _reduce_scattered(
        self, memory: Memory, out: Tensor, chunks: Sequence[Tensor], fold: Reduction
    ) -> Steps:
        return collectives.reduce_scatter(self._team, self._tag(), chunks, memory.write(out), fold)

    def _reduction_for(self, opts: Any, tensors: Sequence[Tensor]) -> Reduction:
        op = dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)
        return reduction(op, tensors[0].dtype, self._team.size)

    # Moves

    def broadcast(self, tensors: Sequence[Tensor] | Tensor, opts: Any = None) -> Work:
        buffers, root = (
            _as_list(tensors),
            0 if opts is None else opts if isinstance(opts, int) else opts.rootRank,
        )
        memory = self._memory()
        use = memory.read if root == self._team.index else memory.write
        rounds = [collectives.broadcast(self._team, self._tag(), use(t), root) for t in buffers]
        return self._start("broadcast", memory, rounds, buffers, _options(opts))

    def allgather(
        self,
        output_tensors: Sequence[Any],
        input_tensors: Sequence[Tensor] | Tensor,
        opts: Any = None,
    ) -> Work:
        ins = _as_list(input_tensors)
        lists = (
            [list(output_tensors)]
            if isinstance(output_tensors[0], Tensor)
            else [list(one) for one in output_tensors]
        )
        memory, rounds = self._memory(), []
        for outs, own_input in zip(lists, ins, strict=True):
            self._check_list("all_gather", "tensor_list", outs, own_input)
            self._check_size("all_gather", "its own output", outs[self._team.index], own_input, 1)
            rounds.append(
                collectives.all_gather(
                    self._team,
                    self._tag(),
                    memory.read(own_input),
                    [memory.write(out) for out in outs],
                )
            )
        return self._start(
            "all_gather", memory, rounds, [t for outs in lists for t in outs], _options(opts)
        )

    def allgather_coalesced(
        self,
        output_lists: Sequence[Sequence[Tensor]],
        input_list: Sequence[Tensor],
        opts: Any = None,
    ) -> Work:
        """Gather several tensors: ``output_lists[r][i]`` is ``input_list[i]`` of rank r."""
        lengths = [len(outs) for outs in output_lists]
        if lengths != [len(input_list)] * self._team.size:
            raise WorldError(
                f"{self._label()}: all_gather_coalesced has output lists of {lengths} tensors; it "
                f"needs {self._team.size} lists, one for each rank of the "
                f"group, of {len(input_list)}, as many as there are inputs"
            )
        return self.allgather(list(zip(*output_lists, strict=True)), input_list, opts)

    def all_gather_single_coalesced(
        self, output_lists: Sequence[Tensor], input_list: Sequence[Tensor], opts: Any = None
    ) -> Work:
        memory, rounds, size = self._memory(), [], self._team.size
        for out, own_input in zip(output_lists, input_list, strict=True):
            self._check_size("all_gather_into_tensor", "output", out, own_input, size)
            flat = memory.write(out).view(-1)
            rounds.append(
                collectives.all_gather(
                    self._team,
                    self._tag(),
                    memory.read(own_input),
                    flat.split_with_sizes([own_input.numel()] * size),
                )
            )
        return self._start("all_gather_into_tensor", memory, rounds, output_lists, _options(opts))

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        return self.all_gather_single_coalesced([output], [input], opts)

    _allgather_base = all_gather_single

    def gather(
        self,
        output_tensors: Sequence[Any],
        input_tensors: Sequence[Tensor] | Tensor,
        opts: Any = None,
    ) -> Work:
        (own_input,), memory, root = (
            _as_list(input_tensors),
            self._memory(),
            0 if opts is None else opts.rootRank,
        )
        outs = list(output_tensors[0]) if root == self._team.index else []
        parts = None
        if root == self._team.index:
            self._check_list("gather", "gather_list", outs, own_input)
            self._check_size("gather", "its own output", outs[root], own_input, 1)
            parts = [memory.write(out) for out in outs]
        rounds = collectives.gather(self._team, self._tag(), memory.read(own_input), parts, root)
        return self._start("gather", memory, [rounds], outs or [own_input], _options(opts))

    def gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Gather into one tensor on the root: what torch calls since 2.14."""
        parts: list[Tensor] = []
        if self._team.index == (0 if opts is None else opts.rootRank):
            self._check_size("gather_single", "gather_tensor", output, input, self._team.size)
            parts = list(output.view(self._team.size, -1).unbind())
        return self.gather([parts], [input.reshape(-1)], opts)

    def scatter(
        self,
        output_tensors: Sequence[Tensor] | Tensor,
        input_tensors: Sequence[Any],
        opts: Any = None,
    ) -> Work:
        (out,), memory, root = (
            _as_list(output_tensors),
            self._memory(),
            0 if opts is None else opts.rootRank,
        )
        parts = None
        if root == self._team.index:
            chunks = list(input_tensors[0])
            self._check_list("scatter", "scatter_list", chunks, out)
            self._check_size("scatter", "its own input", chunks[root], out, 1)
            parts = [memory.read(chunk) for chunk in chunks]
        rounds = collectives.scatter(self._team, self._tag(), parts, memory.write(out), root)
        return self._start("scatter", memory, [rounds], [out], _options(opts))

    def alltoall(
        self, output_tensor: Sequence[Tensor], input_tensor: Sequence[Tensor], opts: Any = None
    ) -> Work:
        outs, ins, memory, me = (
            list(output_tensor),
            list(input_tensor),
            self._memory(),
            self._team.index,
        )
        self._check_list("all_to_all", "output_tensor_list", outs, ins[0])
        self._check_list("all_to_all", "input_tensor_list", ins, outs[0])
        self._check_size("all_to_all", "its own input", ins[me], outs[me], 1)
        rounds = collectives.all_to_all(
            self._team, self._tag(), [memory.read(t) for t in ins], [memory.write(t) for t in outs]
        )
        return self._start("all_to_all", memory, [rounds], outs, _options(opts))

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
    ) -> Work:
        memory = self._memory()
        self._check_dtype("all_to_all_single", output, input)
        parts = self._split_rows("output", memory.write(output), output_split_sizes)
        sends = self._split_rows("input", memory.read(input), input_split_sizes)
        rounds = collectives.all_to_all(self._team, self._tag(), sends, parts)
        return self._start("all_to_all_single", memory, [rounds], [output], _options(opts))

    alltoall_base = all_to_all_single

    def _split_rows(self, what: str, t: Tensor, rows: Sequence[int]) -> list[Tensor]:
        size = self._team.size
        length = t.shape[0] if t.ndim else 1
        if not rows:
            if length % size:
                raise WorldError(
                    f"{self._label()}: all_to_all_single: the {what}'s {length} rows are not a "
                    f"multiple of {size} ranks; pass {what}_split_sizes"
                )
            rows = [length // size] * size
        if len(rows) != size or sum(rows) != length:
            raise WorldError(
                f"{self._label()}: all_to_all_single: {what}_split_sizes {list(rows)} must be "
                f"{size} numbers that add up to {length} rows"
            )
        row = t.numel() // length if length else 0
        return list(t.view(-1).split_with_sizes([n * row for n in rows]))

    # Barriers

    def barrier(self, opts: Any = None) -> Work:
        return self._start(
            "barrier",
            self._memory(),
            [collectives.barrier(self._team, self._tag())],
            [],
            _options(opts),
        )

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Block until all ranks have come.

        Raise WorldError if some have not. On the group's first rank the error names all of these.
        """
        team, tag = self._team, self._tag()
        marks = [torch.zeros(1, dtype=torch.uint8) for _ in self._names]

        def steps() -> Steps:
            yield from collectives.gather(
                team, tag, marks[team.index], None if team.index else marks, 0
            )
            yield from collectives.broadcast(team, tag, marks[0], 0)

        self._start("monitored_barrier", self._memory(), [steps()], [], None, later=True).wait(
            timeout or timedelta(0)
        )

    # Single messages

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int = 0) -> Work:
        (t,), memory = tensors, self._memory()
        self._check_peer("send", dst, tag)
        return self._start(
            "send",
            memory,
            [_send_steps(self._inbox.team, memory.read(t), dst, tag)],
            tensors,
            None,
            later=True,
        )

    def recv(self, tensors: Sequence[Tensor], src: int | None, tag: int = 0) -> Work:
        (t,), memory = tensors, self._memory()
        if src is not None:
            self._check_peer("recv", src, tag)
        return self._start(
            "recv",
            memory,
            [_receive_steps(Letter(self._inbox, memory.write(t), src, tag))],
            tensors,
            None,
            later=True,
        )

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> Work:
        return self.recv(tensors, None, tag)

    # Checks of arguments

    def _check_peer(self, what: str, peer: int, tag: int) -> None:
        if not 0 <= peer < self._team.size:
            raise WorldError(
                f"{self._label()}: {what}: there is no rank {peer} in a group of {self._team.size}"
            )
        if not 0 <= tag <= self.library.tags:
            raise WorldError(
                f"{self._label()}: {what}: tag {tag} must be from 0 to {self.library.tags}, the "
                f"largest that this MPI has"
            )

    def _check_list(self, what: str, name: str, tensors: Sequence[Tensor], like: Tensor) -> None:
        if len(tensors) != self._team.size:
            raise WorldError(
                f"{self._label()}: {what}: {name} has {len(tensors)} tensors; it needs "
                f"{self._team.size}, one for each rank of the group"
            )
        for t in tensors:
            self._check_dtype(what, t, like)

    def _check_dtype(self, what: str, a: Tensor, b: Tensor) -> None:
        if a.dtype != b.dtype:
            raise WorldError(
                f"{self._label()}: {what}: tensors of {a.dtype} and of {b.dtype}; all must be of "
                f"one dtype"
            )

    def _check_size(self, what: str, name: str, a: Tensor, b: Tensor, times: int) -> None:
        self._check_dtype(what, a, b)
        if a.numel() != times * b.numel():
            wanted = f"{times} x {b.numel()}" if times > 1 else str(b.numel())
            raise WorldError(
                f"{self._label()}: {what}: {name} has {a.numel()} elements "
                f"(shape {list(a.shape)}); it needs {wanted}"
            )


def _as_list(tensors: Sequence[Tensor] | Tensor) -> Sequence[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else tensors


def _options(opts: Any) -> Any:
    """Return the options, or None.

    Groups can also be called with a reduction or a root in place of the options.
    """
    return opts if hasattr(opts, "timeout") else None


def _chain_steps(rounds: Sequence[Steps]) -> Steps:
    for steps in rounds:
        yield from steps


def _raise_steps(error: WorldError) -> Steps:
    yield from ()
    raise error


def _send_steps(team: Team, t: Tensor, to: int, tag: int) -> Steps:
    this_round = Round(team, tag, shared=False)
    this_round.send(t, to)
    yield this_round


def _receive_steps(letter: Letter) -> Steps:
    yield letter
