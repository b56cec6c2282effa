"""The model of the examples is right: its data are the published ones, its gradient is the true one."""

from __future__ import annotations

import hashlib

import numpy as np

import digits


def test_the_data_are_those_that_the_licence_names() -> None:
    """The licence notice beside the file has its digest."""
    notice = (digits.DATA.parent / "LICENSE.md").read_text()
    assert hashlib.sha256(digits.DATA.read_bytes()).hexdigest() in notice


def test_the_held_out_images_are_always_the_same_and_never_learned_from() -> None:
    """Loading splits all 1,797 images the same way every time, with no image on both sides."""
    first, second = digits.load_digits(), digits.load_digits()
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    images, labels, held_images, held_labels = first
    assert (len(images), len(held_images)) == (1440, 357)
    assert images.min() == 0
    assert images.max() == 1
    assert set(labels) == set(held_labels) == set(range(10))
    learned = {image.tobytes() for image in images}
    assert not any(image.tobytes() in learned for image in held_images)


def test_the_gradient_is_the_slope_of_the_loss() -> None:
    """For every weight, the gradient equals the central difference of the loss."""
    images, labels, _, _ = digits.load_digits()
    images, labels = images[:20].astype(np.float64), labels[:20]
    weights = digits.fresh_state(seed=3)[0].astype(np.float64)
    _, gradient = digits.loss_and_gradient(weights, images, labels)

    def loss_with(index: int, change: float) -> float:
        changed = weights.copy()
        changed[index] += change
        return digits.loss_and_gradient(changed, images, labels)[0]

    tiny = 1e-6
    slopes = [(loss_with(i, tiny) - loss_with(i, -tiny)) / (2 * tiny) for i in range(len(weights))]
    np.testing.assert_allclose(gradient, slopes, atol=1e-7)


def test_accuracy_is_the_share_of_right_answers() -> None:
    """A model that always answers 0 is right exactly for the zeros."""
    images, labels, _, _ = digits.load_digits()
    weights = np.zeros_like(digits.fresh_state(seed=0)[0])
    digits.layers(weights)[3][0] = 1
    assert digits.accuracy(weights, images, labels) == (labels == 0).mean()
