"""The model that is planned for: its parameters' shapes, and what it is as a decoder. Pure.

A *decoder* here is a transformer of equal layers between an embedding and a head, as far as memory
and time depend on it. Shapes give exact bytes; the decoder gives activations and operations.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

Shape = tuple[int, ...]
#: `model_type` of the configs whose parameters can be counted.
MODEL_TYPES = ("gpt2", "llama", "mistral", "qwen2", "qwen3")
_GATED = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_ASSUMED_VOCABULARY = 32_000
_ASSUMED_HEAD = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """What activations and operations are computed from.

    Attributes:
        hidden: numbers per token between layers.
        mlp: width inside the MLP.
        layers: how many.
        vocabulary: words; 0 where there is no head.
    """

    hidden: int
    mlp: int
    layers: int
    vocabulary: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model without its numbers.

    Attributes:
        shapes: how often each shape of a parameter that is trained occurs.
        decoder: what it is, or is taken to be.
        embedding_params: in the first embedding, which does no matrix multiplication.
        origin: where this comes from, in words.
        is_assumed: whether the decoder is a guess.
        frozen_params: elements of parameters that are not trained.
    """

    shapes: Mapping[Shape, int]
    decoder: Decoder
    embedding_params: int
    origin: str
    is_assumed: bool = False
    frozen_params: int = 0

    @property
    def num_params(self) -> int:
        """Elements of all parameters that are trained."""
        return sum(prod(shape) * count for shape, count in self.shapes.items())

    @property
    def layer_params(self) -> int:
        """Elements of one layer, trained or not."""
        outside = self.embedding_params + self.decoder.vocabulary * self.decoder.hidden
        total = self.num_params + self.frozen_params
        return max(total - outside, 0) // max(self.decoder.layers, 1)


def of_count(num_params: float) -> Subject:
    """Return a decoder of usual proportions with so many parameters: layers of 12 hidden^2, hidden
    about 128 times the number of layers, 32,000 words.

    Raises:
        ValueError: it is no number of parameters.
    """
    if not 1e5 <= num_params < 1e14:
        raise ValueError(f"params={num_params:g} is no number of parameters. Use 1e5 to 1e14.")
    wanted = int(num_params)
    vocabulary = _ASSUMED_VOCABULARY if wanted >= 5e7 else 256

    def layers_of(hidden: int) -> float:
        return (wanted - 2 * vocabulary * hidden) / (12 * hidden**2)

    unit = _ASSUMED_HEAD if wanted >= 5e7 else 16
    widths = [width for width in range(unit, 65536, unit) if layers_of(width) >= 1]
    hidden = min(widths, key=lambda width: abs(width / layers_of(width) - 128))
    layers = int(layers_of(hidden))
    mlp = 8 * hidden // 3
    shapes: Counter[Shape] = Counter({(vocabulary, hidden): 2})
    shapes += Counter({(3 * hidden, hidden): layers, (hidden, hidden): layers})
    shapes += Counter({(mlp, hidden): 2 * layers, (hidden, mlp): layers})
    rest = wanted - sum(prod(shape) * count for shape, count in shapes.items())
    if rest > 0:
        shapes[(rest,)] += 1
    return Subject(
        shapes=dict(shapes),
        decoder=Decoder(hidden=hidden, mlp=mlp, layers=layers, vocabulary=vocabulary),
        embedding_params=vocabulary * hidden,
        origin=f"a decoder of {layers} layers of {hidden}",
        is_assumed=True,
    )


def of_config(path: Path) -> Subject:
    """Return the model that a Hugging Face ``config.json`` describes.

    Raises:
        ValueError: it is no such file, or of a kind that is not known.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"config={str(path)!r} cannot be read: {error}.") from None
    if not isinstance(config, dict):
        raise ValueError(f"config={str(path)!r} holds no settings. Give a model's config.json.")
    return of_settings(config, str(path))


def of_settings(config: Mapping[str, Any], name: str) -> Subject:
    """Return the model of such settings. ``name`` is where they are from.

    Raises:
        ValueError: of a kind that is not known, or without a needed field.
    """
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise ValueError(
            f"config={name!r} has model_type={kind!r}. Its parameters are counted for "
            f"{', '.join(MODEL_TYPES)}. Use --model module:function for others."
        )

    def number(*names: str, default: int | None = None) -> int:
        for field in names:
            value = config.get(field)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
            if value is not None:
                raise ValueError(f"config={name!r} has {field}={value!r}, which is no count.")
        if default is None:
            raise ValueError(f"config={name!r} has no {names[0]!r}. Add it.")
        return default

    hidden = number("hidden_size", "n_embd")
    layers = number("num_hidden_layers", "n_layer")
    heads = number("num_attention_heads", "n_head")
    if heads > hidden:
        raise ValueError(
            f"config={name!r} has {heads} heads for a hidden size of {hidden}. Correct one of them."
        )
    vocabulary = number("vocab_size")
    shapes: Counter[Shape] = Counter()
    if kind in _GATED:
        mlp = number("intermediate_size")
        head = number("head_dim", default=hidden // heads)
        pairs = number("num_key_value_heads", default=heads)
        query, key = heads * head, pairs * head
        has_bias = bool(config.get("attention_bias"))
        # Qwen2 has these biases without a field.
        if has_bias or kind == "qwen2":
            shapes += Counter({(query,): layers}) + Counter({(key,): 2 * layers})
        if has_bias and kind != "qwen2":
            shapes[(hidden,)] += layers
        if config.get("mlp_bias"):
            shapes += Counter({(mlp,): 2 * layers}) + Counter({(hidden,): layers})
        if kind == "qwen3":
            shapes[(head,)] += 2 * layers
        for shape, count in (
            ((query, hidden), layers),
            ((key, hidden), 2 * layers),
            ((hidden, query), layers),
            ((mlp, hidden), 2 * layers),
            ((hidden, mlp), layers),
            ((hidden,), 2 * layers + 1),
        ):
            shapes[shape] += count
        is_tied = bool(config.get("tie_word_embeddings", False))
    else:
        mlp = number("n_inner", default=4 * hidden)
        for shape, count in (
            ((hidden, 3 * hidden), layers),
            ((3 * hidden,), layers),
            ((hidden, hidden), layers),
            ((hidden, mlp), layers),
            ((mlp,), layers),
            ((mlp, hidden), layers),
            ((hidden,), 6 * layers + 2),
            ((number("n_positions", "max_position_embeddings"), hidden), 1),
        ):
            shapes[shape] += count
        is_tied = bool(config.get("tie_word_embeddings", True))
    shapes[(vocabulary, hidden)] += 1 if is_tied else 2
    return Subject(
        shapes=dict(shapes),
        decoder=Decoder(hidden=hidden, mlp=mlp, layers=layers, vocabulary=vocabulary),
        # A tied one does the head's multiplication.
        embedding_params=0 if is_tied else vocabulary * hidden,
        origin=f"{name} ({kind})",
    )
