import re
import subprocess
from pathlib import Path

G=Path("globaltensor")
def rd(p): return (G/p).read_text()
def wr(p,s): (G/p).write_text(s)
def sub(p,*prs):
    s=rd(p)
    for a,b in prs:
        assert a in s,(p,a)
        s=s.replace(a,b)
    wr(p,s)
# storage handlers -> filled in by methods
sub("_tensor/storage.py",('''for _name in METHODS:
    if callable(METHODS[_name]) and _name not in ("_typed_storage", "is_set_to"):
        HANDLERS[getattr(torch.Tensor, _name)] = _method(_name)
HANDLERS[torch.Tensor.is_set_to] = _answered_by("is_set_to")
HANDLERS[torch.Tensor.__cuda_array_interface__.__get__] = lambda func, args, kwargs: cuda_array_interface(*args)  # type: ignore[attr-defined]
''','''#: Functions of torch that need no plan: torch function -> handler(func, args, kwargs).
HANDLERS: dict[Any, Any] = {
    getattr(torch.Tensor, name): _method(name) for name, method in METHODS.items() if callable(method) and name not in ("_typed_storage", "is_set_to")
}
HANDLERS[torch.Tensor.is_set_to] = _answered_by("is_set_to")
HANDLERS[torch.Tensor.__cuda_array_interface__.__get__] = lambda func, args, kwargs: cuda_array_interface(*args)  # type: ignore[attr-defined]
'''))
s=rd("_tensor/storage.py"); s=re.sub(r'__all__ = \["METHODS"','__all__ = ["HANDLERS", "METHODS"',s); s=s.replace('"METHODS", "Address"','"METHODS", "Address"'); wr("_tensor/storage.py",s)
t=rd("_ops/methods.py"); i=t.index('for _name in ("squeeze_"'); t=t[:i]+"HANDLERS.update(storage.HANDLERS)\n"+t[i:]; wr("_ops/methods.py",t)
subprocess.run(["git","mv","globaltensor/parallel/check_replicas.py","globaltensor/_ops/check_replicas.py"],check=True)
for p in [*G.rglob("*.py"),*Path("tests").rglob("*.py"),*Path("docs").rglob("*.md")]:
    t=p.read_text(); n=t.replace("parallel.check_replicas","_ops.check_replicas")
    n=n.replace("from .._ops.check_replicas","from .check_replicas") if p.parent.name=="_ops" else n
    if n!=t: p.write_text(n)
# distributed knows no GlobalTensor
sub("distributed/collectives.py",("from .._tensor.global_tensor import GlobalTensor\n",""),("        if isinstance(value, GlobalTensor):\n","        if isinstance(value, torch.Tensor) and value.is_global:  # type: ignore[attr-defined]\n"),("{value._spec!r}","{value.spec!r}"))
sub("distributed/run/serialize.py",("from ..._tensor.global_tensor import GlobalTensor\n",""),
 ("(type(tensor) is torch.Tensor or isinstance(tensor, GlobalTensor)) or tensor.is_meta","(type(tensor) is torch.Tensor or _is_global(tensor)) or tensor.is_meta"),
 ("    if isinstance(tensor, GlobalTensor):\n        part, spec, is_parameter = tensor._local, tensor.spec,","    if _is_global(tensor):\n        held: Any = tensor\n        part, spec, is_parameter = held._local, held.spec,"),
 ("x: Any = GlobalTensor.wrap(parts","x: Any = _wrap[0](parts"),
 ("def pack(value: object)",'''_wrap: list[Callable[[torch.Tensor, Spec], Any]] = []


def register_wrapper(wrap: Callable[[torch.Tensor, Spec], Any]) -> None:
    """Say how a local tensor and its Spec become a global tensor, whose class stands above this package."""
    _wrap[:] = [wrap]


def _is_global(x: object) -> bool:
    return isinstance(x, torch.Tensor) and bool(x.is_global)  # type: ignore[attr-defined]


def pack(value: object)'''))
s=rd("distributed/run/serialize.py"); print(re.findall(r"^(?:from|import).*",s,re.M)); print(re.findall(r"__all__.*",s))
# placement asks who knows
sub("sharding/placement.py",('''        from ..distributed import env

        return Placement(type, list(range(env.get_world_size())))''','''        return Placement(type, list(range(_job_size()[0])))'''),
('''    from ..distributed import env

    said =''','''    said ='''),("    on_each = env.get_world_size() // env.get_node_size() if max(each) else 0\n","    ranks_of_job, nodes = _job_size()\n    on_each = ranks_of_job // nodes if max(each) else 0\n"))
s=rd("sharding/placement.py")
i=s.index("class Placement")
s=s[:i]+'''_job: list[Callable[[], tuple[int, int]]] = []


def register_job_size(size: Callable[[], tuple[int, int]]) -> None:
    """Say who knows how many ranks and nodes this job has (distributed/env.py): ``size()`` -> (ranks, nodes)."""
    _job[:] = [size]


def _job_size() -> tuple[int, int]:
    return _job[0]()


'''+s[i:]
wr("sharding/placement.py",s); print(re.findall(r"^(?:from|import).*",s,re.M)); print(re.findall(r"__all__.*",s))
print(rd("distributed/env.py"))
