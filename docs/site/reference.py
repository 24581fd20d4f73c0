"""The pages of the API reference, made from the public names and their docstrings.

``hooks.py`` adds the pages to the site. A test calls `missing` to check that every public name has
an entry.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import operator
import re
import types
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch

import globaltensor
from globaltensor.graph.config import Config

__all__ = ["MODULES", "Page", "missing", "pages", "public_names"]

#: Public modules. Each of their names has an entry.
MODULES: Final = (
    "", "amp", "auto", "boxing", "cluster", "comm", "distributed", "distributed.simulate", "env",
    "errors", "nn", "nn.graph", "nn.parallel", "optim", "optim.lr_scheduler", "pipeline", "sbp",
    "utils", "utils.data", "utils.global_view",
)  # fmt: skip

#: Second names of objects, and the names under which the objects have their entries.
ALIASES: Final = {
    "show": "visualize_sharding",
    "Placement": "placement",
    "optim.lr_scheduler.WarmUpLR": "optim.lr_scheduler.WarmupLR",
    "env.destory_rdma": "env.destroy_rdma",
    "nn.graph.Graph": "nn.Graph",
    "auto.PlanError": "errors.PlanError",
    "cluster.Cluster": "Cluster",
    "cluster.current_cluster": "current_cluster",
    "cluster.use_cluster": "use_cluster",
    "boxing.boxing_log": "boxing_log",
    "boxing.explain_boxing": "explain_boxing",
    "boxing.no_boxing": "no_boxing",
    "sbp.sbp": "sbp.Sbp",
}

#: Classes that have no public name, and the attribute through which users get their instances.
ATTRIBUTES: Final = {"nn.Graph.config": Config}

#: Members without an underscore that only the library itself calls.
_OF_THE_LIBRARY: Final = frozenset(
    (globaltensor.GlobalTensor, name) for name in ("wrap", "without_slots")
)

_LEGACY: Final = " ".join(
    f"{kind}Tensor" for kind in "BFloat16 Bool Byte Char Double Float Half Int Long Short".split()
)

_CREATION: Final = (
    "tensor as_tensor scalar_tensor empty zeros ones full eye arange linspace logspace "
    "tril_indices triu_indices bartlett_window blackman_window hamming_window hann_window "
    "kaiser_window empty_like zeros_like ones_like full_like"
)


class Page(NamedTuple):
    """A page of the reference: its title, a sentence, and its sections of names.

    A section is (heading, names). ``"errors.*"`` stands for all names of a module that no other
    section lists.
    """

    title: str
    about: str
    sections: Sequence[tuple[str, str]]


PAGES: Final = {
    "tensors": Page(
        "Tensors and layouts",
        "The classes of tensors and of their layouts, and the functions that create tensors. See "
        "also [global tensors](../concepts/global_tensors.md).",
        [
            ("Tensors", "GlobalTensor Tensor to_global to_local"),
            ("Placement and sbp", "placement Spec sbp.*"),
            ("Drawings", "visualize_sharding sharding_svg"),
            (
                "Creation",
                _CREATION,
            ),
            ("Constructors of a type", _LEGACY),
            ("OneFlow's forms", "tensordot transpose utils.global_view.*"),
        ],
    ),
    "moving": Page(
        "Moving data",
        "Functions that move tensors between layouts, record the traffic, and state how other "
        "functions split. See also [boxing](../boxing.md).",
        [
            ("From layout to layout", "local_to_global global_to_global"),
            ("See and forbid traffic", "boxing_log no_boxing explain_boxing"),
            ("Compare the ranks", "check_ranks check_replicas"),
            ("Functions of your own", "rule local_map"),
            ("The planner", "boxing.*"),
        ],
    ),
    "models": Page(
        "Whole models",
        "Functions that make a model parallel, and what a training loop uses. See also "
        "[parallelism is a choice of sbp](../parallel.md).",
        [
            ("Parallelize", "parallelize nn.parallel.*"),
            (
                "Gradients and memory",
                "no_sync reshard_after_forward set_grad_reduce_dtype fuse_loss_count",
            ),
            ("Layers", "context_parallel moe_experts grouped_linear"),
            ("Mixed precision", "amp.*"),
            ("Optimizers and schedules", "optim.* optim.lr_scheduler.*"),
            ("Data", "utils.data.*"),
            ("Watch a run", "memory_summary utils.*"),
        ],
    ),
    "graphs": Page(
        "Graphs and pipelines",
        "Static graphs, and pipelines of stages. See also [graphs](../graph.md) and "
        "[pipelines](../pipeline.md).",
        [("Graphs", "nn.Graph nn.Graph.config nn.* nn.graph.*"), ("Pipelines", "pipeline.*")],
    ),
    "plans": Page(
        "Plans and clusters",
        "The search for a plan, and the model of a cluster that prices it. See also "
        "[automatic parallelism](../auto.md) and [the cluster model](../cluster.md).",
        [
            ("Plans", "auto.*"),
            ("Clusters", "Cluster current_cluster use_cluster cluster.*"),
        ],
    ),
    "distributed": Page(
        "Distributed and launching",
        "Ranks, collectives, and ways to start processes from Python. See also "
        "[ways to start](../starting.md) and [collectives](../distributed.md).",
        [
            ("Start processes", "run spawn"),
            ("This rank", "env.get_rank env.get_world_size env.*"),
            ("torch.distributed", "distributed.*"),
            ("OneFlow's collectives", "comm.*"),
            ("Simulated ranks", "distributed.simulate.*"),
        ],
    ),
    "random": Page(
        "Random numbers",
        "Functions that draw random numbers: the numbers of one device, on any placement. See also "
        "[random numbers](../randomness.md).",
        [("Functions", "rand randn randint randperm normal rand_like randn_like randint_like")],
    ),
    "saving": Page(
        "Saving",
        "Functions that write and read files. See also [files](../files.md).",
        [("Functions", "save load rebuild_global_tensor")],
    ),
    "errors": Page(
        "Errors",
        "The classes of errors and warnings. [Errors](../errors.md) has the causes and remedies.",
        [("Classes", "errors.*")],
    ),
}

# ------------------------------------------------------------------------------------ public names


def _module(name: str) -> Any:
    return operator.attrgetter(name)(globaltensor) if name else globaltensor


def _value(name: str) -> Any:
    if name in ATTRIBUTES:
        return ATTRIBUTES[name]
    module, _, attribute = name.rpartition(".")
    return getattr(_module(module), attribute)


def _is_ours(value: Any) -> bool:
    return (getattr(value, "__module__", None) or "globaltensor").startswith("globaltensor")


def _names(module: str) -> Iterator[str]:
    """Yield the full name of everything public in a module.

    That is its ``__all__``. Without one, it is what the module has and torch or Python did not
    define.
    """
    found = _module(module)
    # getattr would return torch's __all__. flow.pipeline re-exports the names of another package,
    # which are not in its own __all__.
    listed = None if module == "pipeline" else vars(found).get("__all__")
    for name, value in list(vars(found).items()):
        if listed is None and (
            name.startswith("_")
            or isinstance(value, types.ModuleType)
            or getattr(value, "__module__", "") in ("typing", "__future__", "collections.abc")
            or name == "TYPE_CHECKING"
            or not (_is_ours(value) or callable(value))
        ):
            continue
        if listed is None or name in listed:
            yield f"{module}.{name}".lstrip(".")
    for name in listed or ():
        if name not in vars(found):  # the module imports it at the first access
            yield f"{module}.{name}".lstrip(".")


def public_names() -> list[str]:
    """Return the name, without the package's, of everything public in ``MODULES``."""
    names = [name for module in MODULES for name in _names(module)]
    return [n for n in names if not isinstance(_value(n), types.ModuleType)]


@functools.cache
def _sections() -> dict[str, list[tuple[str, list[str]]]]:
    """Return the names of each page's sections, with the names of ``module.*`` listed."""
    public = public_names()
    explicit = {
        name
        for page in PAGES.values()
        for _, names in page.sections
        for name in names.split()
        if not name.endswith(".*")
    }
    taken = explicit | set(ALIASES)
    out: dict[str, list[tuple[str, list[str]]]] = {}
    for key, page in PAGES.items():
        out[key] = []
        for heading, names in page.sections:
            listed: list[str] = []
            for name in names.split():
                if name.endswith(".*"):
                    module = name.removesuffix(".*")
                    more = [n for n in public if n.rpartition(".")[0] == module and n not in taken]
                    taken.update(more)
                    listed += more
                else:
                    listed.append(name)
            if listed:
                out[key].append((heading, listed))
    return out


def missing() -> list[str]:
    """Return the public names that have no entry on any page."""
    listed = {n for sections in _sections().values() for _, names in sections for n in names}
    return [n for n in public_names() if n not in listed | set(ALIASES)]


# ------------------------------------------------------------------------------------ docstrings


class _Shown:
    """An annotation, shown by its own text."""

    def __init__(self, annotation: Any) -> None:
        text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
        self.text = text.replace("_annotation.", "")

    def __repr__(self) -> str:
        return self.text


def _signature(name: str, value: Any, bound: bool = False) -> str:
    """Return ``name(arguments) -> type``, on several lines if it is long, or "".

    ``bound``: leave out the first argument, which is ``self``.
    """
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    empty = inspect.Parameter.empty
    parameters = [
        p.replace(annotation=p.annotation if p.annotation is empty else _Shown(p.annotation))
        for p in found.parameters.values()
    ]
    if bound and parameters and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL:
        parameters = parameters[1:]
    returns = found.return_annotation
    result = "" if returns is empty or returns == "None" else f" -> {_Shown(returns)}"
    line = _without_reprs(f"{name}{inspect.Signature(parameters)}{result}")
    if len(line) <= 88:
        return line
    parts = [str(inspect.Signature([p]))[1:-1].split(", /")[0] for p in parameters]
    kinds = [p.kind for p in parameters]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        parts = [part.removeprefix("*, ") for part in parts]
        parts.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    else:
        parts = [part.removeprefix("*, ") for part in parts]
    inside = "".join(f"    {part},\n" for part in parts)
    return f"{name}(\n{_without_reprs(inside)}){result}"


def _without_reprs(text: str) -> str:
    """Return a signature with ``Class.member`` and ``...`` as defaults, in place of reprs.

    >>> _without_reprs("f(x=<Color.RED: 1>, y=<factory>)")
    'f(x=Color.RED, y=...)'
    """
    return re.sub(r"<(\w+)\.(\w+): [^>]*>", r"\1.\2", text).replace("<factory>", "...")


@functools.cache
def _addresses() -> dict[str, str]:
    """Return the address of each entry, by its full name and by its last part if that is unique."""
    out: dict[str, str] = {}
    for key, sections in _sections().items():
        for _, names in sections:
            for name in names:
                out[f"flow.{name}"] = f"{key}.md#flow.{name}"
    last = Counter(name.rpartition(".")[2] for name in out)
    short = {name.rpartition(".")[2]: address for name, address in out.items()}
    return out | {name: address for name, address in short.items() if last[name] == 1}


def _linked(line: str, own: Collection[str]) -> str:
    """Return a line of a docstring with links: of `names`, ``flow.names``, errors and pages.

    ``own`` are the names of the members of the class that the docstring describes.
    """

    def link(match: re.Match[str]) -> str:
        name = match["name"]
        address = None if name in own else _addresses().get(name)
        return f"[`{name}`]({address})" if address else match[0]

    line = re.sub(r"(?<!`)`(?P<name>[\w.]+)`(?!`)", link, line)
    line = re.sub(r"``(?P<name>flow\.[\w.]+)``", link, line)
    line = re.sub(r"(?<![`\w.\[])(?P<name>[A-Z]\w+(?:Error|Warning))\b(?![`\]])", link, line)
    return re.sub(
        r"\bdocs/([\w/]+\.md)(#[\w-]+)?",
        lambda match: f"[{match[0]}](../{match[1]}{match[2] or ''})",
        line,
    )


def _markdown(text: str, own: Collection[str] = ()) -> str:
    """Return a docstring as Markdown, with fenced examples, links, and blank lines before lists."""
    out: list[str] = []
    in_example = False
    for line in text.splitlines():
        if line.startswith(">>>") and not in_example:
            out += ["", "```pycon"]
            in_example = True
        elif in_example and not line.strip():
            out.append("```")
            in_example = False
        elif (
            re.match(r"(- |\d+\. )", line)
            and out
            and out[-1].strip()
            and not re.match(r"(- |\d+\. |  )", out[-1])
        ):
            out.append("")
        if in_example:
            line = re.sub(r"\s*# (doctest:|noqa).*", "", line).replace("<BLANKLINE>", "")
        out.append(line if in_example else _linked(line, own))
    if in_example:
        out.append("```")
    return "\n".join(out)


def _documentation(value: Any) -> str:
    """Return an object's docstring as Markdown, or only its first paragraph if it is torch's."""
    text = inspect.getdoc(value) or ""
    theirs = getattr(torch.distributed, getattr(value, "__name__", ""), None)
    if not _is_ours(value) or (theirs is not None and text == inspect.getdoc(theirs)):
        where = "torch.distributed" if theirs is not None else value.__module__
        first = " ".join(text.split("\n\n")[0].split())
        full = where if where.endswith(f".{value.__name__}") else f"{where}.{value.__name__}"
        return f"{first}\n\nArguments and results are those of `{full}`."
    if isinstance(value, type) and text == inspect.getdoc(value.__mro__[1]):
        return ""
    return _markdown(text, [n for n, _ in _members(value)] if isinstance(value, type) else ())


def _members(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and attributes that a class or a base of this library defines."""
    seen: set[str] = set()
    for base in cls.__mro__:
        if not base.__module__.startswith("globaltensor"):
            continue
        for name, value in vars(base).items():
            if (
                not name.startswith("_")
                and name not in seen
                and (base, name) not in _OF_THE_LIBRARY
            ):
                seen.add(name)
                yield name, value


def _is_of_torch(cls: type, name: str) -> bool:
    return any(base.__module__.startswith("torch") and hasattr(base, name) for base in cls.__mro__)


def _member_lines(cls: type) -> list[str]:
    """Return the lines of a class's methods and attributes."""
    fields = {f.name for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    explained: dict[int, list[str]] = {}  # id of a method -> its names
    members: dict[int, Any] = {}
    unexplained = []
    own_names = {name for name, _ in _members(cls)}
    for name, member in _members(cls):
        value = getattr(member, "__func__", member)
        # inspect.getdoc would return the docstring of torch's base class.
        shown = callable(value) or isinstance(value, property)
        if name in fields or not shown or not value.__doc__:
            unexplained.append(name)
            continue
        explained.setdefault(id(value), []).append(name)
        members[id(value)] = member
    out: list[str] = []
    for key, (name, *others) in explained.items():
        member = members[key]
        value = getattr(member, "__func__", member)
        out += [f"**`.{name}{'()' if callable(value) else ''}`**", ""]
        if callable(value) and (signature := _signature(name, value, bound=_is_bound(member))):
            out += ["```python", signature, "```", ""]
        out += [_markdown(inspect.cleandoc(value.__doc__), own_names), ""]
        if others:
            out += ["Also " + ", ".join(f"`.{other}`" for other in others) + ".", ""]
    own = [n for n in unexplained if not _is_of_torch(cls, n)]
    as_torch = [n for n in unexplained if _is_of_torch(cls, n)]
    if own and not issubclass(cls, enum.Enum):
        out += ["Attributes: " + ", ".join(f"`{n}`" for n in own) + ".", ""]
    if as_torch:
        out += ["As in PyTorch: " + ", ".join(f"`{n}`" for n in as_torch) + ".", ""]
    return out


def _is_bound(member: Any) -> bool:
    return not isinstance(member, staticmethod)


def _entry(name: str) -> list[str]:
    """Return the lines of one name: a heading, its signature, its docstring and its members."""
    value = _value(name)
    label = name.rpartition(".")[2]
    out = [f'### `flow.{name}` {{#flow.{name} data-toc-label="{label}"}}', ""]
    others = [alias for alias, target in ALIASES.items() if target == name]
    is_error = isinstance(value, type) and issubclass(value, BaseException)
    if callable(value):
        if not is_error and (signature := _signature(label, value)):
            out += ["```python", signature, "```", ""]
        out += [_documentation(value), ""]
    else:
        out += [f"A constant: `{value!r}`"[:200].rstrip("`") + "`", ""]
    if others:
        out += ["Also " + ", ".join(f"`flow.{alias}`" for alias in others) + ".", ""]
    if isinstance(value, type) and not is_error:
        out += _member_lines(value)
    return out


def _same_entries(names: Sequence[str]) -> list[str]:
    """Return one text and a table for functions whose docstrings differ only in the name."""
    first = names[0]
    text = _documentation(_value(first)).replace(f"torch.{first}`", "torch.NAME`")
    out = ["```python", _signature("NAME", _value(first)), "```", "", text, ""]
    out += ["| name | in PyTorch |", "|---|---|"]
    for name in names:
        out.append(f'| <span id="flow.{name}"></span>`flow.{name}` | `torch.{name}` |')
    return [*out, ""]


def _grouped(names: Sequence[str]) -> Iterator[list[str]]:
    """Yield runs of names whose docstrings differ only in the name."""
    run: list[str] = []
    shape = None
    for name in names:
        text = (inspect.getdoc(_value(name)) or name).replace(f"torch.{name}`", "torch.NAME`")
        if run and (text != shape or "." in name):
            yield run
            run = []
        run.append(name)
        shape = text
    if run:
        yield run


def pages() -> dict[str, str]:
    """Return the Markdown of each page by its file name, ``"reference/errors.md"``."""
    sections = _sections()
    out = {}
    about = (
        "Every public name of `globaltensor`, imported as `flow`. Names that are not here are "
        "PyTorch's: `flow.nn.Linear` is `torch.nn.Linear`."
    )
    index = ["# API reference", "", about, ""]
    for key, page in PAGES.items():
        lines = [f"# {page.title}", "", page.about, ""]
        index += [f"## [{page.title}]({key}.md)", "", page.about, ""]
        for heading, names in sections[key]:
            lines += [f"## {heading}", ""]
            for run in _grouped(names):
                lines += _entry(run[0]) if len(run) == 1 else _same_entries(run)
            links = [f"[`{name}`]({key}.md#flow.{name})" for name in names]
            index += [f"**{heading}.** " + " · ".join(links), ""]
        out[f"reference/{key}.md"] = "\n".join(lines)
    return {"reference/index.md": "\n".join(index), **out}
