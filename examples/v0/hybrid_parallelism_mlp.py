"""Hybrid parallelism on two devices of one machine: the hidden layer splits the batch, the output
layer splits its weight."""

import digits

import globaltensor.v0 as flow
import globaltensor.v0.typing as tp

BATCH_SIZE = 100


def get_train_config():
    config = flow.function_config()
    config.default_data_type(flow.float)
    return config


def mlp(data):
    initializer = flow.truncated_normal(0.1)
    reshape = flow.reshape(data, [data.shape[0], -1])
    hidden = flow.layers.dense(
        reshape, 512, activation=flow.nn.relu, kernel_initializer=initializer, name="hidden"
    )
    return flow.layers.dense(
        hidden,
        10,
        kernel_initializer=initializer,
        # the weight is (outputs, inputs): split(0) gives each device some of the outputs
        model_distribute=flow.distribute.split(axis=0),
        name="output",
    )


@flow.global_function(type="train", function_config=get_train_config())
def train_job(
    images: tp.Numpy.Placeholder((BATCH_SIZE, 1, 28, 28), dtype=flow.float),
    labels: tp.Numpy.Placeholder((BATCH_SIZE,), dtype=flow.int32),
) -> tp.Numpy:
    logits = mlp(images)
    loss = flow.nn.sparse_softmax_cross_entropy_with_logits(labels, logits, name="softmax_loss")
    lr_scheduler = flow.optimizer.PiecewiseConstantScheduler([], [0.1])
    flow.optimizer.SGD(lr_scheduler, momentum=0).minimize(loss)
    return loss


@flow.global_function(type="predict", function_config=get_train_config())
def eval_job(images: tp.Numpy.Placeholder((BATCH_SIZE, 1, 28, 28), dtype=flow.float)) -> tp.Numpy:
    return mlp(images)


def main():
    arguments = digits.options(epochs=10)
    flow.config.gpu_device_num(2)
    train, test = digits.load(arguments.mnist, BATCH_SIZE)
    for step, images, labels in digits.batches(arguments, train):
        loss = train_job(images, labels)
        if step % 20 == 0:
            print(f"step {step}: loss {loss.mean():.4f}")
    print(f"accuracy: {digits.accuracy(eval_job, test):.1f}%")


if __name__ == "__main__":
    main()
