"""Job functions: ``@flow.global_function(type="train")``.

User code decorates functions with it. When the session starts, each job function runs once on blobs
and is recorded. Calls replay the recording.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..._base.pytree import object_tensors, replaced_in_objects
from ..blob import Blob
from ..errors import JobError
from ..function_config import FunctionConfig
from ..session.device_layout import Layout
from ..session.session import session
from ..session.settings import logger
from .record import BlobRef, Given, Record
from .recorder import Tape, taping
from .signature import JobSignature

__all__ = ["JobFunction", "global_function"]


class JobFunction:
    """A job, which accepts and returns arrays when called."""

    def __init__(
        self, function: Callable[..., Any], training: bool, config: FunctionConfig
    ) -> None:
        functools.update_wrapper(self, function)
        self.function, self.training, self.config = function, training, config
        self.name = function.__name__
        self.signature = JobSignature.of(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the job; the first call starts the session.

        Raise JobError for arguments that do not fit, or inside a job function. Raise SessionError
        if a machine fails.
        """
        tape = taping()
        if tape is not None:
            raise JobError(
                f"job {self.name} is called in the job function {tape.record.name}: call plain "
                f"functions there"
            )
        return session().call(self, self.signature.given(args, kwargs))

    def recorded(self, layout: Layout) -> Record:
        """Run the function once on blobs and return its record.

        Raise JobError if the function is invalid as a job.
        """
        config = self.config
        record = Record(self.name, self.training, options=dict(config.options))
        devices = layout.all if config.scope is None else config.scope.devices
        tape = Tape(
            record, layout, devices, config.view is not None and config.view.mirrored, config.dtype
        )
        blobs = [self._input(tape, name, leaf) for name, leaf in self.signature.placeholders()]
        with tape.recording():
            returned = self.function(**self.signature.filled(blobs))
        self.signature.check(returned)
        blobs = object_tensors(returned, [], Blob)
        for blob in blobs:
            tape.seen(blob)
        record.results = replaced_in_objects(
            returned, iter([BlobRef(b.index) for b in blobs]), Blob
        )
        self._check_training(record)
        return record

    def _input(self, tape: Tape, name: str, leaf: Any) -> Blob:
        mirrored = leaf.kind.mirrored
        job_input = Given(
            name, tape.number(), leaf.shape, leaf.dtype, mirrored, leaf.batch_axis, tape.devices
        )
        tape.record.inputs.append(job_input)
        return tape.input(job_input, Blob)  # type: ignore[no-any-return]

    def _check_training(self, record: Record) -> None:
        if not self.training:
            return
        if record.optimizer is None:
            record.optimizer = self.config.train.optimizer()
        if record.optimizer is None or not record.losses:
            raise JobError(
                f'job {self.name} is of type "train", but trains nothing: call '
                f"flow.optimizer.SGD(schedule).minimize(loss) in it"
            )
        if not record.trained:
            raise JobError(f"job {self.name} trains nothing: it has no trainable variable")
        wanted = record.optimizer.variables
        strange = [] if wanted is None else [name for name in wanted if name not in record.trained]
        if strange or wanted == []:
            problem = (
                f"names {', '.join(map(repr, strange))}, which it does not train"
                if strange
                else "names none"
            )
            raise JobError(
                f"job {self.name}: its optimizer's list of variables {problem}; it trains "
                f"{', '.join(record.trained)}"
            )

    def __repr__(self) -> str:
        return f"<{'train' if self.training else 'predict'} job {self.name}>"


def global_function(
    type: str | FunctionConfig = "predict", function_config: FunctionConfig | None = None
) -> Callable[[Callable[..., Any]], JobFunction]:
    """Return a decorator that makes a function a job.

    ``type`` is "train" or "predict". ``function_config`` holds the job's settings; the older form
    passes them first.

    Parameters are annotated with placeholders. The return annotation says what the caller gets
    (`flow.typing`). All jobs must be defined before the session starts. Raise JobError for another
    type, for invalid annotations, or for a job defined too late or twice.
    """
    if isinstance(type, FunctionConfig):
        logger.warning(
            "flow.global_function(config) is an older form: write flow.global_function(type, "
            "config)"
        )
        type, function_config = "train" if type.train.optimizer() is not None else "predict", type
    if type not in ("train", "predict"):
        raise JobError(
            f'global_function: type is "train" or "predict", got {type!r}'
            + ("; write @flow.global_function()" if callable(type) else "")
        )
    if function_config is not None and not isinstance(function_config, FunctionConfig):
        raise JobError(
            f"global_function: function_config is made by flow.function_config(), got "
            f"{function_config!r}"
        )

    def decorated(function: Callable[..., Any]) -> JobFunction:
        job = JobFunction(function, type == "train", function_config or FunctionConfig())
        session().add(job)
        return job

    return decorated
