"""Train a small GPT on the bytes of Python's standard library, on any number of processes.

    python -m globaltensor.distributed.launch --nproc_per_node 2 examples/train_gpt.py --parallel
    tensor

The model is written as for one device, and no line of it depends on ranks. The table `PARALLEL`
alone decides how the job is spread over them: it has the sbp of each parameter and each input.
Every choice has the same losses (`single` is plain PyTorch, for comparison).
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import math
import os
import pickle
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

import globaltensor as flow

B, S = flow.sbp.broadcast, flow.sbp.split
VOCABULARY = 256  # every byte is a token
CLIP = 1.0  # the largest norm of a step's gradients

# ---------------------------------------------------------------- the model: ordinary PyTorch


class Block(nn.Module):
    """A layer of attention and a feed-forward layer, each behind a layer norm.

    Input and output are [batch, time, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_size = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (
            project(h).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A decoder-only transformer whose output layer is tied to the embedding of the bytes."""

    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.token.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(
                    parameter,
                    std=0.02 / math.sqrt(2 * layers)
                    if name.endswith(("out.weight", "down.weight"))
                    else 0.02,
                )

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits [batch, time, 256] of the byte that follows each byte of [batch, time]."""
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    """Return the mean cross-entropy of predicting each byte from the bytes before it.

    ``rows`` is [batch, context + 1]."""
    logits, targets = model(rows[:, :-1]), rows[:, 1:]
    if targets.is_global:  # with stages, logits are placed on the last stage
        targets = targets.to_global(placement=logits.placement)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# ---------------------------------------------------------------- sbp of parameters and inputs

Sbp = list[flow.sbp.sbp]  # one entry for each axis of the placement


class Parallel(NamedTuple):
    """A table of sbp that spreads the job over the ranks.

    It has the sbp of the batch, and by patterns of names the sbp of parameters and of modules'
    outputs."""

    batch: Sbp
    parameters: dict[str, Sbp]
    outputs: dict[str, Sbp]


# Projections into a block are split by columns, and projections out of it by rows (nn.Linear stores
# weights transposed). The embedding is split by bytes.
TENSOR = {
    "*.q.weight": S(0),
    "*.k.weight": S(0),
    "*.v.weight": S(0),
    "*.out.weight": S(1),
    "*.up.*": S(0),
    "*.down.weight": S(1),
    "token.weight": S(0),
    "*": B,
}
# The outputs of these modules are partial sums, which the hooks sum at once. Otherwise the library
# chooses the layout that moves the fewest bytes next. For a model as small as this one, it would
# gather the weights and split the batch.
SUMS = {"token": B, "*.out": B, "*.down": B}
# Sequence parallelism reduce-scatters these sums to a split in time, so that ranks do not repeat
# each other's layer norms and residuals.
IN_TIME = {"token": S(1), "*.out": S(1), "*.down": S(1), "*norm*": B}


def axis(table: dict[str, flow.sbp.sbp], before: Sequence[flow.sbp.sbp] = ()) -> dict[str, Sbp]:
    """Return the table for a placement's only axis, or for the axis after those of ``before``."""
    return {name: [*before, sbp] for name, sbp in table.items()}


PARALLEL = {
    "data": Parallel([S(0)], axis({"*": B}), {}),
    "fsdp": Parallel([S(0)], axis({"*": S(0)}), {}),
    "tensor": Parallel([B], axis(TENSOR), axis(SUMS)),
    "sequence": Parallel([B], axis(TENSOR), axis(IN_TIME)),
    # Two axes: data parallel over the first, tensor parallel over the second.
    "hybrid": Parallel([S(0), B], axis(TENSOR, [B]), axis(SUMS, [S(0)])),
}


# For the search, which chooses all layouts: everything starts as broadcast.
ANY = Parallel([B], axis({"*": B}), {})


def placement_of(options: argparse.Namespace) -> flow.placement:
    """Return all ranks on one axis, or for hybrid as a grid [replica, member of the replica]."""
    if options.parallel != "hybrid":
        return flow.placement.all(options.device)
    if flow.env.get_world_size() % options.tensor_size:
        sys.exit(
            f"--tensor-size {options.tensor_size} does not divide the {flow.env.get_world_size()} "
            f"processes of this job"
        )
    return flow.placement(
        options.device,
        torch.arange(flow.env.get_world_size()).view(-1, options.tensor_size).tolist(),
    )


def spread(model: nn.Module, parallel: Parallel, placement: flow.placement) -> None:
    """Make the model global: its parameters, and the outputs that are in the table."""
    model.to_global(placement, parallel.parameters)
    for name, module in model.named_modules():
        for pattern, sbp in parallel.outputs.items():
            if fnmatch.fnmatch(name, pattern):
                module.register_forward_hook(
                    lambda module, inputs, output, sbp=sbp: output.to_global(sbp=sbp)
                )


# ---------------------------------------------------------------- data, checkpoints, text


def corpus() -> Tensor:
    """Return the standard library's top-level modules, joined: uint8 [bytes], at most 8 MB."""
    text = b"".join(
        path.read_bytes() for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    )
    return torch.frombuffer(bytearray(text[:8_000_000]), dtype=torch.uint8)


def draw(text: Tensor, batch: int, context: int, seed: int) -> Tensor:
    """Draw random snippets of the text, the same on every rank: [batch, context + 1]."""
    starts = torch.randint(
        len(text) - context, (batch, 1), generator=torch.Generator().manual_seed(seed)
    )
    return text[starts + torch.arange(context + 1)].long()


def whole(value: Any) -> Any:
    """Return the full value of a global tensor as an ordinary tensor on every rank.

    Other values are returned unchanged."""
    if isinstance(value, Tensor) and value.is_global:
        return value.detach().to_global(flow.placement.all(value.placement.type), B).to_local()
    return value


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write a checkpoint of full values, so that any number of processes can resume in any mode.

    The file appears under this name only when it is complete."""
    state = tree_map(
        whole, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    )
    if flow.env.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, path.with_suffix(".part"))
        os.replace(path.with_suffix(".part"), path)


def restore(path: Path, model: nn.Module) -> dict[str, Any]:
    """Load a checkpoint of `save`: put the parameters into the model, and return the rest."""
    try:
        saved: dict[str, Any] = torch.load(path, map_location="cpu")
        saved, parameters = {name: saved[name] for name in ("step", "optimizer")}, saved["model"]
    except OSError as error:
        sys.exit(f"--resume: {path} cannot be read: {error.strerror or error}")
    except (pickle.UnpicklingError, RuntimeError, EOFError, LookupError, TypeError) as error:
        sys.exit(
            f"--resume: {path} is no checkpoint of this program, or not all of one "
            f"({type(error).__name__})"
        )
    try:
        model.load_state_dict(parameters)
    except RuntimeError as error:
        sys.exit(
            f"--resume: {path} is of another model, see --layers, --width and --context: "
            f"{' '.join(str(error).split())[:200]} ..."
        )
    return saved


def restore_optimizer(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], device: torch.device
) -> None:
    """Load full values, and box the state of a global parameter to the parameter's layout."""
    optimizer.load_state_dict(state)
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if value.shape == parameter.shape and parameter.is_global:
                values[name] = (
                    value.to(device)
                    .to_global(parameter.placement, [B] * len(parameter.sbp))
                    .to_global(sbp=parameter.sbp)
                )


@torch.no_grad()
def continuation(
    model: nn.Module,
    prompt: Tensor,
    length: int,
    temperature: float,
    seed: int,
    feed: Callable[[Tensor], Tensor],
) -> Iterator[int]:
    """Sample bytes from the trained model, one after the other, with a sliding window [context].

    All ranks draw the same bytes."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(length):
        logits = torch.from_numpy(model(feed(prompt[None]))[0, -1].double().cpu().numpy())
        byte = (
            logits.argmax()
            if temperature == 0
            else torch.multinomial(torch.softmax(logits / temperature, 0), 1, generator=generator)[
                0
            ]
        )
        prompt = torch.cat([prompt[1:], byte[None]])
        yield int(byte)


# ---------------------------------------------------------------- the run


def plan_in(path: str) -> flow.auto.Plan:
    try:
        return flow.auto.load_plan(path)
    except flow.auto.PlanError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add(
        "--parallel",
        choices=["single", "pipeline", "auto", *PARALLEL],
        default="data",
        help="how to distribute the job; single: plain PyTorch, one process",
    )
    add("--picture", type=Path, help="auto: file to write a page to that shows the plan")
    add(
        "--plan",
        type=plan_in,
        help=(
            "auto: apply the plan in this file (Plan.save, `globaltensor plan --json`) instead of "
            "searching for one"
        ),
    )
    add(
        "--cluster",
        help=(
            "auto: the cluster, as a file that `globaltensor profile` has written or the name of "
            "a preset; without it the ranks are measured"
        ),
    )
    add("--tensor-size", type=int, default=2, help="hybrid: ranks that share one replica")
    add(
        "--graph",
        action="store_true",
        help="capture the training step as a static graph (nn.Graph)",
    )
    add(
        "--micro-batches",
        type=int,
        default=1,
        help="with --graph: number of micro-batches to cut each batch into, for one step",
    )
    add("--layers", type=int, default=4)
    add("--width", type=int, default=128)
    add("--heads", type=int, default=4)
    add("--context", type=int, default=128, help="number of bytes that the model looks back")
    add("--batch", type=int, default=16, help="snippets per step, over all processes")
    add("--steps", type=int, default=500)
    add(
        "--lr",
        type=float,
        default=3e-3,
        help="maximum learning rate: the rate warms up, then falls along a cosine",
    )
    add("--seed", type=int, default=0)
    add("--dtype", choices=["float32", "float64", "bfloat16"], default="float32")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--checkpoint", type=Path, help="file to save the trained state to")
    add("--resume", action="store_true", help="continue from --checkpoint, up to --steps")
    add("--sample", type=int, default=200, help="number of bytes of the continuation at the end")
    add(
        "--temperature",
        type=float,
        default=0.7,
        help="temperature of the continuation; 0: always the likeliest byte",
    )
    add("--log-every", type=int, default=25, help="steps between two reports of the loss")
    add("--no-progress", action="store_true", help="no live line, even on a terminal")
    options = parser.parse_args(arguments)
    counts = ("layers", "width", "heads", "context", "batch", "steps", "tensor_size", "log_every")
    if small := [f"--{name.replace('_', '-')}" for name in counts if getattr(options, name) < 1]:
        parser.error(f"{', '.join(small)} must be at least 1")
    if (
        options.micro_batches < 1
        or options.batch % options.micro_batches
        or (options.micro_batches > 1 and not options.graph)
    ):
        parser.error(
            f"--micro-batches {options.micro_batches} needs --graph, and must divide --batch "
            f"{options.batch}"
        )
    if (options.picture or options.plan or options.cluster) and options.parallel != "auto":
        parser.error("--picture, --plan and --cluster go with --parallel auto")
    if options.temperature < 0 or options.sample < 0:
        parser.error("--temperature and --sample must be at least 0")
    if options.resume and options.checkpoint is None:
        parser.error("--resume needs --checkpoint, the file to go on from")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device here")
    if options.width % options.heads:
        parser.error(f"--width {options.width} must be a multiple of --heads {options.heads}")
    return options


def learning_rate(step: int, steps: int) -> float:
    """Return the factor of the rate: it warms up, then falls along a cosine to a tenth."""
    return min(
        (step + 1) / max(1, min(20, steps // 10)), 0.55 + 0.45 * math.cos(math.pi * step / steps)
    )


def place(
    model: nn.Module, options: argparse.Namespace, device: torch.device
) -> Callable[..., Tensor]:
    """Spread the model as the options say, and return a function that makes its inputs global.

    The function boxes a plain tensor to the batch's sbp, or with ``whole`` to broadcast."""
    if options.parallel == "single":
        return lambda tensor, whole=False: tensor.to(device)
    if options.parallel == "pipeline":  # one stage a process
        if options.layers < flow.env.get_world_size():
            sys.exit(
                f"--parallel pipeline: {flow.env.get_world_size()} processes need a layer each, "
                f"but --layers is {options.layers}"
            )
        stages = [
            flow.placement(options.device, [rank]) for rank in range(flow.env.get_world_size())
        ]
        flow.pipeline.cut(model, stages)
        return lambda tensor, whole=False: (
            tensor.to(device)
            .to_global(flow.placement.all(options.device), B, check_meta=False)
            .to_global(stages[0], B)
        )
    parallel, placement = PARALLEL.get(options.parallel, ANY), placement_of(options)
    if options.parallel == "auto" and (options.plan or not options.graph):
        flow.parallelize(
            model,
            placement,
            options.plan or "auto",
            inputs=(torch.zeros(options.batch, options.context, dtype=torch.long),),
        )
    else:
        spread(model, parallel, placement)

    def feed(tensor: Tensor, whole: bool = False) -> Tensor:
        # All ranks have drawn the same numbers, so no check is needed: each takes its own slice.
        tensor = tensor.to(device).to_global(placement, [B] * placement.axes, check_meta=False)
        return tensor if whole else tensor.to_global(sbp=parallel.batch)

    return feed


class Step(flow.nn.Graph):
    """A training step as a static graph, captured at the first call and then run without dispatch.

    Gradients are clipped to the ``clip_grad_max_norm`` of the optimizer's group."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: int, auto: bool
    ) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer)
        self.config.set_gradient_accumulation_steps(micro_batches)
        plan = flow.auto.plan_of(model)
        if plan is not None:
            # The plan comes from a file and the model follows it already. The graph adds the
            # micro-batches and their schedule.
            self.config.use_auto_plan(plan)
        else:
            self.config.enable_auto_parallel(auto)

    def build(self, rows: Tensor) -> Tensor:
        loss = loss_of(self.model, rows)
        loss.backward()
        return loss


def eager_step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = loss_of(model, rows)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    return loss.detach()


def show_plan(step_of: Any, model: nn.Module, options: argparse.Namespace) -> None:
    """Print a summary of the plan that the search has found, and write its page if asked to."""
    plan = flow.auto.plan_of(model) or step_of.auto_plan()
    print(plan, flush=True)
    if options.picture:
        plan.save_html(options.picture)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch_of: Callable[[int], Tensor],
    first: int,
    options: argparse.Namespace,
) -> list[float]:
    """Run the steps from ``first`` on, and return the mean loss of every --log-every steps."""
    step_of = (
        Step(model, optimizer, options.micro_batches, options.parallel == "auto")
        if options.graph
        else functools.partial(eager_step, model, optimizer)
    )
    losses = []
    with flow.utils.Progress(
        options.steps,
        first=first,
        tokens=options.batch * options.context,
        every=options.log_every,
        live=not options.no_progress,
    ) as progress:
        for step in range(first, options.steps):
            for group in optimizer.param_groups:
                group["lr"] = options.lr * learning_rate(step, options.steps)
            loss = step_of(batch_of(step))
            if step == first and flow.env.get_rank() == 0 and options.parallel == "auto":
                show_plan(step_of, model, options)
            report = progress.step(loss)  # on every rank: reading a global loss is collective
            if report is not None:
                losses.append(report.loss)
    return losses


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train as the arguments say, and return the reported losses, the validation loss last."""
    options = parse(arguments)
    if options.cluster is None:
        return run(options)
    try:
        cluster = flow.auto.cluster_of(options.cluster)
    except flow.auto.PlanError as error:
        sys.exit(f"--cluster: {error}")
    with flow.use_cluster(cluster):
        return run(options)


def run(options: argparse.Namespace) -> list[float]:
    loud = flow.env.get_rank() == 0
    if options.parallel == "single" and not loud:
        return []
    flow.fuse_loss_count()  # all ranks read the same losses and hook the same gradients
    device = torch.device(options.device)
    torch.manual_seed(options.seed)
    model = GPT(options.layers, options.width, options.heads, options.context).to(
        device, getattr(torch, options.dtype)
    )
    text = corpus()
    training, validation = text[: -len(text) // 20], text[-len(text) // 20 :]
    if loud:
        size, processes = (
            sum(p.numel() for p in model.parameters()),
            1 if options.parallel == "single" else flow.env.get_world_size(),
        )
        print(
            f"{size:,} parameters, {len(text):,} bytes of text, {options.parallel} on {processes} "
            f"process(es)",
            flush=True,
        )

    saved = restore(options.checkpoint, model) if options.resume else {"step": 0}
    feed = place(model, options, device)
    group = {"params": model.parameters(), "clip_grad_max_norm": CLIP}
    optimizer = torch.optim.AdamW(
        [group], lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    if options.resume:
        restore_optimizer(optimizer, saved["optimizer"], device)
    losses = train(
        model,
        optimizer,
        lambda step: feed(draw(training, options.batch, options.context, options.seed + step)),
        saved["step"],
        options,
    )
    if options.checkpoint:
        save(options.checkpoint, model, optimizer, max(saved["step"], options.steps))

    with torch.no_grad():
        held_out = [
            loss_of(
                model, feed(draw(validation, options.batch, options.context, options.seed - 1 - i))
            ).item()
            for i in range(4)
        ]
    losses.append(sum(held_out) / len(held_out))
    prompt = draw(validation, 1, options.context - 1, options.seed)[0]
    sampled = bytes(
        continuation(
            model,
            prompt,
            options.sample,
            options.temperature,
            options.seed,
            lambda ids: feed(ids, whole=True),
        )
    )
    if loud:
        before, after = (
            bytes(part).decode(errors="replace") for part in (prompt.tolist(), sampled)
        )
        print(
            f"validation loss {losses[-1]:.4f} nats/byte\n--- after\n{before}\n--- the model "
            f"writes\n{after}",
            flush=True,
        )
    return losses


#: For each mode, what each process had.
HELD = {
    "single": "everything",
    "data": "all parameters, and its share of the rows of each batch",
    "fsdp": "its share of each parameter, and of the rows of each batch",
    "tensor": "its share of the heads and features of each layer, and every batch",
    "sequence": "its share of the heads and features of each layer, and of time between layers",
    "hybrid": "its share of the rows of a batch, and of each layer with the others of its replica",
    "pipeline": "some of the layers",
    "auto": "what the plan above says",
}


def closing(options: argparse.Namespace, losses: Sequence[float]) -> str:
    """Return two lines for the end: what the user has seen, and what to try next."""
    processes = 1 if options.parallel == "single" else flow.env.get_world_size()
    after = f"loss {losses[0]:.2f} -> {losses[-1]:.2f} (validation)"
    other = "tensor" if options.parallel != "tensor" else "fsdp"
    return (
        f"Seen: {after} on {processes} process(es); each had {HELD[options.parallel]}.\n"
        f'Next: make train ARGS="--parallel {other}" has the same losses; docs/quickstart.md makes '
        "your own model parallel; examples/README.md has more programs."
    )


if __name__ == "__main__":
    losses = main()
    if flow.env.get_rank() == 0:
        print(f"---\n{closing(parse(None), losses)}", flush=True)
