"""Layers of published models, from first to last: parameters, and FLOPs of the forward pass."""

from dataclasses import dataclass

from support.published_schedules import Layer


def vgg16() -> list[Layer]:
    """Simonyan and Zisserman 2014, arXiv:1409.1556, configuration D."""
    layers, channels, side = [], 3, 224
    for repeats, wide in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
        for _ in range(repeats):
            layers.append(_convolution(channels, wide, 3, side, biases=1))
            channels = wide
        side //= 2
    for inputs, outputs in ((channels * side**2, 4096), (4096, 4096), (4096, 1000)):
        layers.append(_dense(inputs, outputs))
    return layers


def resnet(blocks: tuple[int, int, int, int]) -> list[Layer]:
    """He et al. 2015, arXiv:1512.03385: (3, 4, 6, 3) is ResNet-50, (3, 4, 23, 3) ResNet-101."""
    layers, channels, side = [_convolution(3, 64, 7, 112)], 64, 56
    for stage, repeats in enumerate(blocks):
        width = 64 * 2**stage
        for block in range(repeats):
            smaller = side // 2 if block == 0 and stage else side
            layers.append(_convolution(channels, width, 1, side))
            layers.append(_convolution(width, width, 3, smaller))
            layers.append(_convolution(width, 4 * width, 1, smaller))
            if block == 0:
                layers.append(_convolution(channels, 4 * width, 1, smaller))
            channels, side = 4 * width, smaller
    return [*layers, _dense(channels, 1000)]


def even(parameters: float, layers: int) -> list[Layer]:
    """Return a model as equal layers, from its size and depth alone."""
    return [Layer(round(parameters / layers), 1.0)] * layers


@dataclass(frozen=True)
class Decoder:
    """A decoder-only transformer, embeddings and head included.

    Args:
        queries, key_values: width of all heads together.
        matrices: of the feed-forward layer, 3 if it is gated.
        tied: whether the head is the embedding.
    """

    width: int
    feed_forward: int
    depth: int
    vocabulary: int
    queries: int
    key_values: int
    matrices: int
    tied: bool = False

    @property
    def layers(self) -> list[Layer]:
        """A tied embedding's gradient is complete where the embedding's is: at the very end."""
        head = self.width * self.vocabulary
        attention = 2 * self.width * (self.queries + self.key_values)
        block = attention + self.matrices * self.width * self.feed_forward
        last = Layer(0 if self.tied else head, head)
        return [Layer(head, 0.0), *[Layer(block, block)] * self.depth, last]

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers)

    def step_flops(self, rows: int, tokens: int) -> float:
        """As MaxText counts them (`calculate_tflops_training_per_device`): recomputation is left
        out, attention is causal."""
        attention = 12 * self.depth * self.queries * tokens / 2
        return rows * tokens * (6 * self.parameters + attention)


def _convolution(inputs: int, outputs: int, kernel: int, side: int, biases: int = 2) -> Layer:
    """`side` of its output; 2 `biases` are the scale and shift of a BatchNorm."""
    weights = kernel**2 * inputs * outputs
    return Layer(weights + biases * outputs, weights * side**2)


def _dense(inputs: int, outputs: int) -> Layer:
    return Layer((inputs + 1) * outputs, inputs * outputs)
