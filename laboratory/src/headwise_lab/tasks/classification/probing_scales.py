"""The presets of the probing task, whose sizes are those of classification.

`demo` and `cpu` were chosen on dev, with plain attention; the epochs of `cpu` by the time of 225 runs on two cores.
"""

from headwise_lab.experiment.scale import presets
from headwise_lab.tasks.classification.scales import ClassificationScale

# paper: Li et al. 2021, 4.2.2: six layers of Transformer-base, Adam at 5e-4, 250 epochs; batch size and dropout are not
# given
PROBING_SCALES = presets(
    ClassificationScale,
    "demo cpu gpu paper",
    width=[48, 64, 256, 512],
    layers=[2, 6, 6, 6],
    heads=[4, 4, 8, 8],
    head_size=[12, 16, 32, 64],
    hidden=[96, 128, 1_024, 2_048],
    norm_first=[True, True, True, False],
    dropout=0.1,
    learning_rate=[2e-3, 4e-3, 5e-4, 5e-4],
    batch_size=[32, 64, 64, 64],
    epochs=[3, 3, 12, 250],
    warmup_steps=[100, 100, 400, 0],
    train_examples=[3_000, 10_000, None, None],
)
