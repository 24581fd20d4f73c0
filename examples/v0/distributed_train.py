"""A perceptron trained on several machines: start this script on each of them. The first one of the
list prints.

python distributed_train.py --nodes 192.168.1.12 192.168.1.11
"""

import digits

import globaltensor.v0 as flow
import globaltensor.v0.typing as tp

BATCH_SIZE = 100


def mlp(data):
    initializer = flow.truncated_normal(0.1)
    reshape = flow.reshape(data, [data.shape[0], -1])
    hidden = flow.layers.dense(
        reshape, 512, activation=flow.nn.relu, kernel_initializer=initializer, name="hidden"
    )
    return flow.layers.dense(hidden, 10, kernel_initializer=initializer, name="output-weight")


def config_distributed(nodes, port):
    print("distributed config")
    flow.config.gpu_device_num(1)  # devices of each machine
    flow.env.ctrl_port(port)  # where machines meet: the same on all
    flow.env.machine([{"addr": address} for address in nodes])


@flow.global_function(type="train")
def train_job(
    images: tp.Numpy.Placeholder((BATCH_SIZE, 1, 28, 28), dtype=flow.float),
    labels: tp.Numpy.Placeholder((BATCH_SIZE,), dtype=flow.int32),
) -> tp.Numpy:
    logits = mlp(images)
    loss = flow.nn.sparse_softmax_cross_entropy_with_logits(labels, logits, name="softmax_loss")
    lr_scheduler = flow.optimizer.PiecewiseConstantScheduler([], [0.1])
    flow.optimizer.SGD(lr_scheduler, momentum=0).minimize(loss)
    return loss


@flow.global_function(type="predict")
def eval_job(images: tp.Numpy.Placeholder((BATCH_SIZE, 1, 28, 28), dtype=flow.float)) -> tp.Numpy:
    return mlp(images)


def main():
    arguments = digits.options(
        epochs=10,
        nodes={
            "nargs": "+",
            "default": ["127.0.0.1"],
            "metavar": "ADDRESS",
            "help": "the machines, the master first",
        },
        port={"type": int, "default": 9988, "help": "the control port"},
    )
    config_distributed(arguments.nodes, arguments.port)
    flow.config.enable_debug_mode(True)
    flow.config.enable_legacy_model_io(False)
    train, test = digits.load(arguments.mnist, BATCH_SIZE)
    for step, images, labels in digits.batches(arguments, train):
        loss = train_job(images, labels)
        if step % 20 == 0:
            print(f"step {step}: loss {loss.mean():.4f}")
    print(f"accuracy: {digits.accuracy(eval_job, test):.1f}%")


if __name__ == "__main__":
    main()
