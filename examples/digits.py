"""The model of train_digits.py: a small network on 8x8 images of handwritten digits, in plain NumPy.

Nothing here knows of other workers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.floating[Any]]
Integers = npt.NDArray[np.int64]

DATA = Path(__file__).parent / "data" / "digits.csv.gz"
HELD_OUT = 357  # leaves 1,440 images to learn from: 30 batches of 48
PIXELS, HIDDEN, DIGITS = 64, 32, 10


def load_digits() -> tuple[Array, Integers, Array, Integers]:
    """Images (pixels 0 to 1) and labels to learn from, then those held out: the same split every time."""
    rows = np.loadtxt(DATA, delimiter=",", dtype=np.float32)
    rows = rows[np.random.default_rng(0).permutation(len(rows))]
    images, labels = rows[:, :PIXELS] / 16, rows[:, PIXELS].astype(np.int64)
    return images[:-HELD_OUT], labels[:-HELD_OUT], images[-HELD_OUT:], labels[-HELD_OUT:]


def fresh_state(seed: int) -> Array:
    """An untrained model's weights and their velocity, two rows: momentum has to survive a restart too."""
    random = np.random.default_rng(seed)
    hidden = random.normal(0, np.sqrt(2 / PIXELS), (PIXELS, HIDDEN))
    output = random.normal(0, np.sqrt(2 / HIDDEN), (HIDDEN, DIGITS))
    weights = np.concatenate([hidden.ravel(), np.zeros(HIDDEN), output.ravel(), np.zeros(DIGITS)])
    return np.stack([weights, np.zeros_like(weights)]).astype(np.float32)


def layers(weights: Array) -> tuple[Array, Array, Array, Array]:
    """Views of a flat vector of weights as the two layers' matrices and biases."""
    sizes = [PIXELS * HIDDEN, HIDDEN, HIDDEN * DIGITS]
    hidden, hidden_bias, output, output_bias = np.split(weights, np.cumsum(sizes))
    return hidden.reshape(PIXELS, HIDDEN), hidden_bias, output.reshape(HIDDEN, DIGITS), output_bias


def loss_and_gradient(weights: Array, images: Array, labels: Integers) -> tuple[float, Array]:
    """Mean cross-entropy of the model's answers, and its gradient as a flat vector."""
    hidden, hidden_bias, output, output_bias = layers(weights)
    active = np.maximum(images @ hidden + hidden_bias, 0)
    scores = active @ output + output_bias
    odds = np.exp(scores - scores.max(axis=1, keepdims=True))
    answers = odds / odds.sum(axis=1, keepdims=True)
    rows = np.arange(len(labels))
    loss = float(-np.log(np.maximum(answers[rows, labels], 1e-12)).mean())

    answers[rows, labels] -= 1
    to_scores = answers / len(labels)
    to_active = (to_scores @ output.T) * (active > 0)
    parts = [images.T @ to_active, to_active.sum(axis=0), active.T @ to_scores, to_scores.sum(axis=0)]
    return loss, np.concatenate([part.ravel() for part in parts])


def accuracy(weights: Array, images: Array, labels: Integers) -> float:
    """The share of images that the model reads right."""
    hidden, hidden_bias, output, output_bias = layers(weights)
    scores = np.maximum(images @ hidden + hidden_bias, 0) @ output + output_bias
    return float((scores.argmax(axis=1) == labels).mean())
