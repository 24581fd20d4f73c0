"""Tests that raw memory is not accessible. Code that reads storage without torch's functions gets
an error that names an alternative, the same on every rank, and never bytes.

A probe may crash the interpreter, so probes run in a child process of their rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import pickle
import signal
import sys
import tempfile
import types
import warnings
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.pool import run_on
from torch import nn

import globaltensor as flow
from globaltensor.errors import StorageError
from globaltensor.sharding.spec import StorageSpec

B, P, S = flow.sbp.broadcast, flow.sbp.partial_sum, flow.sbp.split


def in_child(probes: dict[str, Callable[[], Any]]) -> dict[str, str]:
    """Return the outcome of each probe in a child process: ``value ...``, ``error ...``, or
    ``nothing ...`` if the child died."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        signal.alarm(20)
        warnings.simplefilter("ignore")
        with open(write, "wb") as pipe:
            for name, probe in probes.items():
                try:
                    said = f"value {probe()!r}"
                except BaseException as error:
                    said = f"error {type(error).__name__}: {error}"
                pickle.dump((name, said), pipe)
                pipe.flush()
        os._exit(0)
    os.close(write)
    found = dict.fromkeys(probes, "nothing: the child has died, of this or of one before")
    with open(read, "rb") as pipe, contextlib.suppress(EOFError, pickle.UnpicklingError):
        while True:
            name, said = pickle.load(pipe)
            found[name] = said
    os.waitpid(pid, 0)
    return found


def spread(t: torch.Tensor, sbp: Any, placement: Any = None) -> Any:
    where = placement or flow.placement.all("cpu")
    return t.clone().to_global(where, [B] * where.axes).to_global(sbp=sbp)


def rows(n: int = 4) -> torch.Tensor:
    return torch.arange(n * 3.0).view(n, 3)


def filled(p: Any, x: Any) -> Any:
    p.data = x
    return p.sum()


def linear_filled(x: Any) -> Any:
    module = nn.Linear(3, 4, dtype=x.dtype if x.is_floating_point() else None)
    module.weight.data = x
    return module(torch.zeros(2, 3, dtype=x.dtype)).sum()


def safetensors_of(x: Any) -> Any:
    from safetensors.torch import save

    return save({"w": x})


def safetensors_file_of(x: Any) -> Any:
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as folder:
        return save_file({"a": rows(), "w": x}, f"{folder}/w")


def safetensors_model_of(x: Any) -> Any:
    from safetensors.torch import save_model

    with tempfile.TemporaryDirectory() as folder:
        return save_model(types.SimpleNamespace(state_dict=lambda: {"w": x}), f"{folder}/w")  # type: ignore[arg-type]


READERS: dict[str, Callable[[Any], Any]] = {
    "from_dlpack": lambda x: torch.from_dlpack(x) + 0,
    "utils.from_dlpack": lambda x: torch.utils.dlpack.from_dlpack(x) + 0,
    "np.from_dlpack": lambda x: np.from_dlpack(x).sum(),
    "to_dlpack": lambda x: torch.to_dlpack(x),  # type: ignore[attr-defined]
    "utils.to_dlpack": lambda x: torch.utils.dlpack.to_dlpack(x),
    "__dlpack__": lambda x: x.__dlpack__(),
    "Tensor.__dlpack__": lambda x: torch.Tensor.__dlpack__(x),
    "__dlpack_device__": lambda x: x.__dlpack_device__(),
    "storage element": lambda x: x.untyped_storage()[0],
    "storage list": lambda x: x.untyped_storage().tolist(),
    "storage loop": lambda x: list(x.untyped_storage()),
    "storage bytes": lambda x: bytes(x.untyped_storage()),
    "storage array": lambda x: np.asarray(x.untyped_storage()),
    "storage copy": lambda x: x.untyped_storage().clone(),
    "storage cpu": lambda x: x.untyped_storage().cpu(),
    "storage resize": lambda x: x.untyped_storage().resize_(0),
    "storage pickle": lambda x: pickle.dumps(x.untyped_storage()),
    "storage fork": lambda x: ForkingPickler.dumps(x.untyped_storage()),
    "storage save": lambda x: torch.save(x.untyped_storage(), os.devnull),
    "storage of Tensor": lambda x: torch.Tensor.untyped_storage(x)[0],
    "typed storage": lambda x: x.storage()[0],
    "typed storage list": lambda x: x.storage().tolist(),
    "address": lambda x: int(x.data_ptr()),
    "address of Tensor": lambda x: hex(torch.Tensor.data_ptr(x)),
    "address in text": lambda x: f"{x.data_ptr():#x}",
    "address of storage": lambda x: int(x.untyped_storage().data_ptr()),
    "const address": lambda x: (
        int(x.const_data_ptr()) if hasattr(x, "const_data_ptr") else int(x.data_ptr())
    ),
    "address to read": lambda x: ctypes.string_at(x.data_ptr(), x.nbytes),
    "pointer": lambda x: ctypes.cast(x.data_ptr(), ctypes.POINTER(ctypes.c_ubyte))[0],
    "share_memory_": lambda x: x.share_memory_(),
    "plain.data": lambda x: filled(torch.zeros(x.shape, dtype=x.dtype), x),
    "weight.data": lambda x: filled(
        nn.Parameter(torch.zeros(x.shape, dtype=x.dtype), x.is_floating_point()), x
    ),
    "Linear.weight.data": linear_filled,
    "plain.set_": lambda x: torch.zeros(x.shape, dtype=x.dtype).set_(x).sum(),
    "Tensor.set_": lambda x: torch.Tensor.set_(torch.zeros(x.shape, dtype=x.dtype), source=x).sum(),
    "safetensors": safetensors_of,
    "safetensors file": safetensors_file_of,
    "safetensors model": safetensors_model_of,
}


def tensors() -> dict[str, Any]:
    n = flow.env.get_world_size()
    found = {
        "S(0)": spread(rows(), S(0)),
        "S(1)": spread(rows(), S(1)),
        "P": spread(rows(), P),
        "uneven": spread(rows(5), S(0)),
        "tiny": spread(rows(1), S(0)),
        "bf16": spread(rows().bfloat16(), S(0)),
        "int": spread(rows().long(), S(1)),
        "view": spread(rows(), S(0))[:, 1:],
        "moved view": spread(rows(), S(0))[1],
    }
    kept = found["S(0)"]._spec  # ZeRO stores a parameter in this way and shows it unsplit
    found["share"] = flow.GlobalTensor.wrap(
        found["S(0)"].to_local(), StorageSpec.of(kept, kept.replace(layout=[B]), [0])
    )
    if n == 4:
        grid, some = flow.placement("cpu", [[0, 1], [2, 3]]), flow.placement("cpu", [1, 2])
        found = {
            "grid": spread(rows(), [S(0), S(1)], grid),
            "half": spread(rows(), [B, S(1)], grid),
            "some ranks": spread(rows(), S(0), some),
        }
    return found


def read_in_children() -> dict[str, str]:
    import safetensors.torch  # noqa: F401 - import once, not in each child

    with pytest.raises(RuntimeError):  # set_ raises an error within torch
        torch.zeros(4, 3).set_(spread(rows(), S(0)))
    found = {}
    for name, x in tensors().items():
        found |= in_child(
            {f"{name}, {how}": functools.partial(read, x) for how, read in READERS.items()}
        )
    return found


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.sweep(2)
def test_whoever_reads_memory_is_refused(n: int) -> None:
    said = run_on(n, read_in_children)
    for probe in said[0]:
        texts = {of_rank[probe] for of_rank in said}
        assert len(texts) == 1, (probe, texts)
        (text,) = texts
        assert "StorageError: " in text or "InterfaceError: " in text, (probe, text)
        assert "to_local()" in text
        if ".data" in probe or "set_" in probe:
            assert "module.to_global(placement, sbp)" in text
        else:
            assert "flow.save(obj, path, global_dst_rank=0)" in text
            assert "save_file(state, path)" in text


def whole_values() -> None:
    warnings.filterwarnings("ignore", "TypedStorage is deprecated")
    rank = flow.env.get_rank()
    alone = flow.placement("cpu", [rank])
    for x in (
        spread(rows(), B),
        flow.GlobalTensor.wrap(rows(), flow.Spec.make((4, 3), torch.float32, alone, [S(0)])),
    ):
        local = x.to_local()
        assert (
            x.data_ptr()
            == local.data_ptr()
            == torch.Tensor.data_ptr(x)
            == x.untyped_storage().data_ptr()
        )
        assert ctypes.string_at(x.data_ptr(), 48) == local.numpy().tobytes()
        assert x.untyped_storage().nbytes() == 48
        assert x.storage().tolist() == local.flatten().tolist()
        assert torch.equal(torch.from_dlpack(x), rows())
        assert torch.equal(torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x)), rows())
        assert np.array_equal(np.from_dlpack(x), rows().numpy())
        assert x[1:].storage_offset() == 3
        from safetensors.torch import load

        assert torch.equal(load(safetensors_of(x))["w"], rows())
        assert x.share_memory_() is x
        assert x.is_shared()


def test_where_a_rank_has_the_whole_value_its_memory_is_that() -> None:
    run_on(2, whole_values)


def identities() -> None:
    model: Any = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False), nn.Linear(5, 1))
    model[1].weight = model[0].weight
    for plan in ({"*.weight": S(0), "*": B}, B, {"*.weight": P, "*": P}):
        shared: Any = nn.Sequential(
            nn.Embedding(5, 4), nn.Linear(4, 5, bias=False), nn.Linear(5, 1), nn.Linear(5, 1)
        )
        shared[1].weight = shared[0].weight
        shared.to_global(flow.placement.all("cpu"), plan)
        one, other = shared[0].weight, shared[1].weight.detach()
        assert one.data_ptr() == other.data_ptr()
        assert hash(one.data_ptr()) == hash(other.data_ptr())
        assert one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        assert one.untyped_storage()._cdata == other.untyped_storage()._cdata
        assert one.is_set_to(other)
        assert not one.is_set_to(other.clone())
        assert not torch.zeros(5, 4).is_set_to(one)
        assert one.clone().data_ptr() != one.data_ptr()
        state = shared.state_dict()
        assert (
            len({t.data_ptr() for t in state.values()}) == len(state) - 1
        )  # also tensors without elements on some rank
        assert one.data_ptr() != 0
        assert one.untyped_storage().nbytes() == 80
        assert one.data_ptr() < one.data_ptr() + 4
        assert (one.data_ptr() + 8) - one.data_ptr() == 8
        assert sorted([one.data_ptr() + 4, other.data_ptr()])[0] == one.data_ptr()
        assert one.storage_offset() == 0
        # One rank has the value of `end`. Code that looks for its memory, as safetensors does,
        # finds the memory of its base.
        end = one.view(-1)[-1]
        assert plan is B or end.data_ptr() == other.view(-1)[-1].data_ptr()
        from safetensors.torch import _find_shared_tensors

        assert {"0.weight", "1.weight"} in _find_shared_tensors(state)
    x = spread(rows(), S(0))
    assert not hasattr(x, "__cuda_array_interface__")
    assert not hasattr(x, "__dlpack_c_exchange_api__")
    for sharded_view in (x[:, 1:], x[1], x[0, 1], spread(rows(), S(1))[:, 1]):
        with pytest.raises(StorageError, match=r"storage_offset\(\) of a view"):
            sharded_view.storage_offset()
    assert spread(rows(), B)[1].storage_offset() == rows()[1].storage_offset()
    assert spread(rows(), P)[1].storage_offset() == rows()[1].storage_offset()


def test_which_memory_it_is_can_be_asked() -> None:
    run_on(2, identities)


def pretrained(folder: str) -> list[str]:
    from safetensors.torch import load_file, save_file
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    rank, everyone = flow.env.get_rank(), flow.placement.all("cpu")
    sizes: dict[str, Any] = {
        "vocab_size": 33,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
    }
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}

    def llama() -> Any:
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=tied))

    said = []
    for tied in (False, True):
        want = llama().state_dict()
        for plan in ("data", "fsdp", "tensor", "sums"):
            model = llama()
            if plan == "sums":
                model.to_global(everyone, P)
            else:
                flow.parallelize(model, everyone, plan)
            path = f"{folder}/{plan} {tied} {rank}"
            if plan != "data":
                with pytest.raises(StorageError) as caught:
                    model.save_pretrained(path)
                said.append(str(caught.value))
                assert not os.path.exists(path) or not [
                    name for name in os.listdir(path) if "safetensors" in name
                ]
            state = {k: v.to_global(sbp=B).to_local() for k, v in model.state_dict().items()}
            model.save_pretrained(path, **({} if plan == "data" else {"state_dict": state}))
            if rank == 0:  # transformers writes on rank 0
                got = load_file(f"{path}/model.safetensors")
                assert len(got) == len(want) - (
                    tied and plan == "data"
                )  # transformers does not see that plain copies were tied
                assert all(torch.equal(got[k], want[k]) for k in got)
            if not tied:
                os.makedirs(path, exist_ok=True)
                save_file(state, f"{path}/again")
                assert all(torch.equal(t, want[k]) for k, t in load_file(f"{path}/again").items())
    return said


def test_models_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs globaltensor[hf]")
    first, second = run_on(2, pretrained, str(tmp_path))
    assert len(first) == 6
    assert first == second


def with_accelerate() -> None:
    """Imitate accelerate, which need not be installed: it calls `save_model` on every rank and
    writes on the first."""

    class Accelerator:
        def save_model(
            self,
            model: nn.Module,
            save_directory: str,
            max_shard_size: Any = "10GB",
            safe_serialization: bool = True,
        ) -> str:
            return "written"

    def save(
        obj: Any, f: str, save_on_each_node: bool = False, safe_serialization: bool = False
    ) -> str:
        return "written"

    home = types.ModuleType("accelerate.accelerator")
    home.Accelerator, home.save = Accelerator, save  # type: ignore[attr-defined]
    sys.modules["accelerate.accelerator"] = home
    try:
        from globaltensor._tensor import file_savers

        file_savers.install()
    finally:
        del sys.modules["accelerate.accelerator"]
    model: Any = nn.Linear(3, 4)
    assert Accelerator().save_model(model, "x") == "written"
    model.to_global(flow.placement.all("cpu"), S(0))
    with pytest.raises(StorageError, match=r"Accelerator\.save_model\(\)"):
        Accelerator().save_model(model, "x")
    # torch.save would write one rank's shards, and no file would have the others
    with pytest.raises(StorageError, match=r"Accelerator\.save_model\(\)"):
        Accelerator().save_model(model, "x", safe_serialization=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert home.save(optimizer.state_dict(), "x") == "written"  # type: ignore[attr-defined]
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    for state in (optimizer.state_dict(), {"models": [model.state_dict()]}):
        with pytest.raises(StorageError, match=r"accelerate's save\(\)"):
            home.save(state, "x")  # type: ignore[attr-defined]
    replicated = {"weight": model.weight.detach().to_global(sbp=B)}
    assert home.save(replicated, "x") == "written"  # type: ignore[attr-defined]


def test_accelerate_is_asked_on_every_rank() -> None:
    run_on(2, with_accelerate)


def get_peft_model_state_dict(
    model: Any,
    state_dict: Any = None,
    adapter_name: str = "default",
    save_embedding_layers: Any = "auto",
) -> dict[str, Any]:
    """Select the tensors of one adapter, as peft's function of that name does."""
    state = model.state_dict() if state_dict is None else state_dict
    return {k.replace(f".{adapter_name}", ""): v for k, v in state.items() if adapter_name in k}


class PeftModel(nn.Module):
    """Imitate peft's model, which need not be installed: every rank selects the adapters, and a
    rank that says so writes them by safetensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model, self.peft_config = model, {"default": None}

    def save_pretrained(
        self,
        save_directory: str,
        safe_serialization: bool = True,
        selected_adapters: Any = None,
        save_embedding_layers: Any = "auto",
        is_main_process: bool = True,
        **kwargs: Any,
    ) -> None:
        from safetensors.torch import save_file

        os.makedirs(save_directory, exist_ok=True)
        for name in selected_adapters or self.peft_config:
            state = get_peft_model_state_dict(self, kwargs.get("state_dict"), name)
            file = f"{save_directory}/adapter_model"
            if is_main_process and safe_serialization:
                save_file(state, f"{file}.safetensors")
            elif is_main_process:
                torch.save(state, f"{file}.bin")


def adapted_llama(base: type) -> Any:
    """Return a model of transformers with an adapter, and transformers' methods for adapters
    without its check of peft's version."""
    from transformers import LlamaConfig

    class Adapted(base):  # type: ignore[misc]
        _hf_peft_config_loaded = True
        peft_config = types.MappingProxyType(
            {"default": types.SimpleNamespace(save_pretrained=lambda folder: None)}
        )

        def active_adapters(self) -> list[str]:
            return ["default"]

        def get_adapter_state_dict(self, adapter_name: Any = None, state_dict: Any = None) -> Any:
            return get_peft_model_state_dict(self, state_dict, adapter_name or "default")

    torch.manual_seed(0)
    sizes = {"vocab_size": 33, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    model = Adapted(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    model.lora_A = nn.ModuleDict({"default": nn.Linear(16, 2, bias=False)})
    model.lora_B = nn.ModuleDict({"default": nn.Linear(2, 16, bias=False)})
    return model


def adapters(folder: str) -> list[str]:
    from safetensors.torch import load_file
    from transformers import LlamaForCausalLM
    from transformers.utils import logging

    from globaltensor._tensor import file_savers

    logging.disable_progress_bar()
    peft, home = types.ModuleType("peft"), types.ModuleType("peft.peft_model")
    peft.get_peft_model_state_dict = get_peft_model_state_dict  # type: ignore[attr-defined]
    home.PeftModel = PeftModel  # type: ignore[attr-defined]
    rank, said = flow.env.get_rank(), []
    layouts: dict[str, Any] = {
        "all split": S(0),
        "adapters split": {"lora_*": S(0), "*": B},
        "a sum": {"lora_A.*": P, "*": B},
        "layers split": {"lora_*": B, "*": S(0)},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "peft", peft)
        patch.setitem(sys.modules, "peft.peft_model", home)
        patch.setattr(PeftModel, "save_pretrained", PeftModel.save_pretrained)
        file_savers.install()
        for name, sbp in layouts.items():
            for wrap in (lambda model: model, PeftModel):
                inner = adapted_llama(LlamaForCausalLM)
                want = inner.get_adapter_state_dict()
                model = wrap(inner)
                inner.to_global(flow.placement.all("cpu"), sbp)
                path = f"{folder}/{name} {type(model).__name__}"
                # As Trainer and peft's own guide do it: all call, and the first rank writes.
                save = functools.partial(model.save_pretrained, path, is_main_process=rank == 0)
                if name != "layers split":
                    with pytest.raises(StorageError, match=r"save_pretrained\(\)") as caught:
                        save()
                    said.append(str(caught.value))
                    assert not os.path.exists(path)
                    whole = {
                        k: v.to_global(sbp=B).to_local() for k, v in model.state_dict().items()
                    }
                    save(state_dict=whole)
                else:
                    save()
                if rank == 0:
                    got = load_file(f"{path}/adapter_model.safetensors")
                    assert len(got) == len(want)
                    for key, value in want.items():
                        (at,) = (k for k in got if k.endswith(key))
                        assert torch.equal(got[at], value)
        model.save_pretrained(f"{folder}/torch", safe_serialization=False)  # torch's own file
    return said


def test_adapters_alone_are_refused_on_every_rank_or_saved_right(tmp_path: Path) -> None:
    """Once, only the rank that writes was refused, and the others went on."""
    pytest.importorskip("transformers", reason="needs globaltensor[hf]")
    first, second = run_on(2, adapters, str(tmp_path))
    assert len(first) == 6
    assert first == second


def test_plain_data_is_as_before() -> None:
    p, q = nn.Parameter(torch.zeros(2)), torch.ones(3)
    version = p._version
    p.data.add_(1)
    assert p._version == version  # autograd does not track the write
    assert not p.data.requires_grad
    assert p.data.data_ptr() == p.data_ptr()
    p.data = q
    assert p.data_ptr() == q.data_ptr()
    assert p.requires_grad
    with pytest.raises(TypeError):
        p.data = 3  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        p.data = torch.ones(3, 3).to_sparse()
    with pytest.raises(RuntimeError, match="Deleting tensor data is not allowed"):
        del p.data

    class Seen(torch.overrides.TorchFunctionMode):
        names: list[str] = []

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.names.append(torch.overrides.resolve_name(func))
            return func(*args, **(kwargs or {}))

    with Seen():
        p.data = p.data
    assert Seen.names == ["torch.Tensor.data.__get__", "torch.Tensor.data.__set__"]


def other_methods() -> None:
    x = spread(rows(), S(0))
    assert torch.zeros(2).resize_as_(x).shape == (4, 3)
    assert x.resize_as_(rows()) is x
    model: Any = nn.Linear(3, 4).to_global(flow.placement.all("cpu"), B)  # type: ignore[operator]
    assert model.share_memory().weight.is_shared()


def test_methods_that_look_for_storage_in_others() -> None:
    run_on(2, other_methods)
