"""Tests of the one name that users see of the classes of global tensors, `GlobalTensor`."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

import globaltensor as flow
from globaltensor._ops.rules.deferred_mean import DeferredMean
from globaltensor._tensor.global_tensor import SlottedGlobalTensor
from globaltensor._tensor.view_tracking import RemoteView
from globaltensor.errors import GlobalTensorError

CLASSES = [flow.GlobalTensor, SlottedGlobalTensor, RemoteView, DeferredMean]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__qualname__)
def test_each_class_shows_itself_as_global_tensor(kind: Any) -> None:
    assert repr(kind) == str(kind) == "<class 'globaltensor.GlobalTensor'>"
    assert kind.__name__ == "GlobalTensor"
    assert issubclass(kind, flow.GlobalTensor)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__qualname__)
def test_pickles_of_a_class_find_it(kind: Any) -> None:
    assert pickle.loads(pickle.dumps(kind)) is kind
    assert cloudpickle.loads(cloudpickle.dumps(kind)) is kind
    assert copy.deepcopy(kind) is kind


def test_tensors_and_parameters_show_the_public_name() -> None:
    where = flow.placement.all("cpu")
    x = flow.ones(4, 3, placement=where, sbp=flow.sbp.split(0))
    model = nn.Linear(3, 2).to_global(where, flow.sbp.broadcast)
    for t in (x, x + 1, x[1:], model.weight, model(x)):
        assert type(t).__name__ == "GlobalTensor"
        assert isinstance(t, flow.GlobalTensor)
    with pytest.raises(AttributeError, match=r"^'GlobalTensor' object has no attribute 'shap'"):
        _ = x.shap


def test_a_plain_tensor_and_a_subclass_keep_their_names() -> None:
    class Mine(flow.GlobalTensor):
        pass

    assert type(torch.ones(1)).__name__ == "Tensor"
    assert Mine.__name__ == "Mine"
    assert "Mine" in repr(Mine)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__qualname__)
def test_no_tensor_is_made_by_its_class(kind: Any) -> None:
    """Libraries that load files make parameters anew: `type(p)(value, requires_grad=...)`."""
    for call in (
        lambda: kind(torch.ones(2, 3), requires_grad=False),
        lambda: kind([1.0, 2.0]),
        lambda: kind(),
    ):
        with pytest.raises(
            GlobalTensorError, match=r"type\(p\)\(value\).*to_global.*load_state_dict"
        ):
            call()
