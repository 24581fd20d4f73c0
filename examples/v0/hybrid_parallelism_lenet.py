"""Pipelining on two devices of one machine: LeNet's hidden layer is on device 0, its output layer
on device 1, the convolutions on both.

``--pieces 2`` lets the batch flow through the two dense layers in pieces, one behind the other.
"""

import digits
from lenet_model import BATCH_SIZE, convolutions

import globaltensor.v0 as flow
import globaltensor.v0.typing as tp

PIECES = 1


def lenet(data, train=False):
    initializer = flow.truncated_normal(0.1)
    reshape = flow.unpack(convolutions(data), PIECES)
    with flow.scope.placement("gpu", "0:0"):
        hidden = flow.layers.dense(
            reshape, 512, activation=flow.nn.relu, kernel_initializer=initializer, name="hidden"
        )
    if train:
        hidden = flow.nn.dropout(hidden, rate=0.5)
    with flow.scope.placement("gpu", "0:1"):
        return flow.pack(
            flow.layers.dense(hidden, 10, kernel_initializer=initializer, name="outlayer"), PIECES
        )


@flow.global_function(type="train")
def train_job(
    images: tp.Numpy.Placeholder((BATCH_SIZE, 1, 28, 28), dtype=flow.float),
    labels: tp.Numpy.Placeholder((BATCH_SIZE,), dtype=flow.int32),
) -> tp.Numpy:
    logits = lenet(images, train=True)
    with flow.scope.placement("gpu", "0:1"):
        loss = flow.nn.sparse_softmax_cross_entropy_with_logits(labels, logits, name="softmax_loss")
    lr_scheduler = flow.optimizer.PiecewiseConstantScheduler([], [0.1])
    flow.optimizer.SGD(lr_scheduler, momentum=0).minimize(loss)
    return loss


@flow.global_function(type="predict")
def eval_job(images: tp.Numpy.Placeholder((BATCH_SIZE, 1, 28, 28), dtype=flow.float)) -> tp.Numpy:
    return lenet(images)


def main():
    global PIECES
    arguments = digits.options(epochs=10, pieces={"type": int, "default": 1})
    PIECES = arguments.pieces
    flow.config.gpu_device_num(2)
    train, test = digits.load(arguments.mnist, BATCH_SIZE)
    for step, images, labels in digits.batches(arguments, train):
        loss = train_job(images, labels)
        if step % 20 == 0:
            print(f"step {step}: loss {loss.mean():.4f}")
    print(f"accuracy: {digits.accuracy(eval_job, test):.1f}%")


if __name__ == "__main__":
    main()
