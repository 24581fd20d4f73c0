"""Loads what lenet_train.py has saved, on one device, and counts how many digits of the test it
knows."""

import digits
from lenet_model import BATCH_SIZE, lenet

import globaltensor.v0 as flow
import globaltensor.v0.typing as tp


@flow.global_function(type="predict")
def eval_job(
    images: tp.Numpy.Placeholder((BATCH_SIZE, 1, 28, 28), dtype=flow.float),
    labels: tp.Numpy.Placeholder((BATCH_SIZE,), dtype=flow.int32),
) -> tp.Tuple[tp.Numpy, tp.Numpy]:
    return labels, lenet(images)


def main():
    arguments = digits.options(
        epochs=1,
        models={"default": "./lenet_models_1", "help": "the folder that the model was saved in"},
    )
    flow.config.enable_legacy_model_io(False)
    flow.load_variables(flow.checkpoint.get(arguments.models))
    _, test = digits.load(arguments.mnist, BATCH_SIZE)
    right = total = 0
    for images, wanted in zip(*test, strict=True):
        labels, logits = eval_job(images, wanted)
        right += (logits.argmax(1) == labels).sum()
        total += labels.size
    print(f"accuracy: {100 * right / total:.1f}%")


if __name__ == "__main__":
    main()
