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
sub("graph/module_state.py",("from .._ops import backward\n","from .._tensor.grad import set_grad\n"),("backward.set_grad.__wrapped__","set_grad.__wrapped__"))
sub("graph/capture/autograd_recorder.py",("from ..._ops import backward as gradients\n","from ..._ops import backward as backward_pass\nfrom ..._tensor.grad import get_grad, set_grad\n"),("gradients.run:","backward_pass.run:"),("gradients.get_grad","get_grad"),("gradients.set_grad","set_grad"))
sub("_ops/methods.py",("from . import backward as gradients\n","from .._tensor.grad import get_grad, set_grad\nfrom .backward import tensor_backward\n"),("gradients.tensor_backward","tensor_backward"),("gradients.get_grad","get_grad"),("gradients.set_grad","set_grad"))
# storage handlers
s=rd("_tensor/storage.py")
s=s.replace("from .._ops.dispatch import HANDLERS\n","")
s=s.replace("        HANDLERS[getattr(torch.Tensor, _name)]","        HANDLERS[getattr(torch.Tensor, _name)]")
wr("_tensor/storage.py",s)
# check_replicas beside the rank guard
