"""The mirrored view on two devices of one machine: the caller cuts the batch, and gets a list of
losses, one array from each device."""

import digits
import numpy as np

import globaltensor.v0 as flow
import globaltensor.v0.typing as tp

BATCH_SIZE, DEVICES = 100, 2
EACH = BATCH_SIZE // DEVICES


def get_train_config():
    config = flow.function_config()
    config.default_data_type(flow.float)
    config.default_logical_view(flow.scope.mirrored_view())
    return config


def mlp(data):
    initializer = flow.truncated_normal(0.1)
    reshape = flow.reshape(data, [data.shape[0], -1])
    hidden = flow.layers.dense(
        reshape, 512, activation=flow.nn.relu, kernel_initializer=initializer, name="hidden"
    )
    return flow.layers.dense(hidden, 10, kernel_initializer=initializer, name="output")


@flow.global_function(type="train", function_config=get_train_config())
def train_job(
    images: tp.ListNumpy.Placeholder((EACH, 1, 28, 28), dtype=flow.float),
    labels: tp.ListNumpy.Placeholder((EACH,), dtype=flow.int32),
) -> tp.ListNumpy:
    logits = mlp(images)
    loss = flow.nn.sparse_softmax_cross_entropy_with_logits(labels, logits, name="softmax_loss")
    lr_scheduler = flow.optimizer.PiecewiseConstantScheduler([], [0.1])
    flow.optimizer.SGD(lr_scheduler, momentum=0).minimize(loss)
    return loss


@flow.global_function(type="predict", function_config=get_train_config())
def eval_job(images: tp.ListNumpy.Placeholder((EACH, 1, 28, 28), dtype=flow.float)) -> tp.ListNumpy:
    return mlp(images)


def cut(array):
    return [array[i * EACH : (i + 1) * EACH] for i in range(DEVICES)]


def main():
    arguments = digits.options(epochs=10)
    flow.config.gpu_device_num(DEVICES)
    train, test = digits.load(arguments.mnist, BATCH_SIZE)
    for step, images, labels in digits.batches(arguments, train):
        losses = train_job(cut(images), cut(labels))
        if step % 20 == 0:
            print(f"step {step}: loss {np.concatenate(losses).mean():.4f}")
    accuracy = digits.accuracy(lambda images: np.concatenate(eval_job(cut(images))), test)
    print(f"accuracy: {accuracy:.1f}%")


if __name__ == "__main__":
    main()
