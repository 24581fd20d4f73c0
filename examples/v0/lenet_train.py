"""LeNet, trained by data parallelism on two devices, then saved: lenet_eval.py loads it."""

import digits
from lenet_model import BATCH_SIZE, lenet

import globaltensor.v0 as flow
import globaltensor.v0.typing as tp


@flow.global_function(type="train")
def train_job(
    images: tp.Numpy.Placeholder((BATCH_SIZE, 1, 28, 28), dtype=flow.float),
    labels: tp.Numpy.Placeholder((BATCH_SIZE,), dtype=flow.int32),
) -> tp.Numpy:
    logits = lenet(images, train=True)
    loss = flow.nn.sparse_softmax_cross_entropy_with_logits(labels, logits, name="softmax_loss")
    lr_scheduler = flow.optimizer.PiecewiseConstantScheduler([], [0.1])
    flow.optimizer.SGD(lr_scheduler, momentum=0).minimize(loss)
    return loss


def main():
    arguments = digits.options(
        epochs=15,
        models={"default": "./lenet_models_1", "help": "the folder that the model is saved in"},
    )
    flow.config.gpu_device_num(2)
    flow.config.enable_legacy_model_io(False)
    train, _ = digits.load(arguments.mnist, BATCH_SIZE)
    for step, images, labels in digits.batches(arguments, train):
        loss = train_job(images, labels)
        if step % 20 == 0:
            print(f"step {step}: loss {loss.mean():.4f}")
    flow.checkpoint.save(arguments.models)
    print(f"model saved in {arguments.models}")


if __name__ == "__main__":
    main()
