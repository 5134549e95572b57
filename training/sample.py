"""Loads a packed folder back into the plain model and samples from it, with a key-value cache."""

import json
from pathlib import Path

import torch
from export import unpack
from model import BitLinear, Cache, Config, StoryTeller
from safetensors.torch import load_file
from tokenizer import render
from tokenizers import Tokenizer
from torch import Tensor


class PackedLinear(BitLinear):
    """A BitLinear whose ternary matrix and scale come from the file instead of a master weight."""

    def __init__(self, packed: Tensor, scale: Tensor) -> None:
        torch.nn.Module.__init__(self)
        self.product_dtype = torch.float32
        self.ternary, self.scale = unpack(packed), scale.float()

    def forward(self, x: Tensor) -> Tensor:
        """Features [..., in] to [..., out], in float32 with exact integer codes."""
        codes, s = self.quantize_input(x)
        return torch.nn.functional.linear(codes, self.ternary) / s * self.scale


def load_config(folder: Path) -> Config:
    """The model's shape from config.json."""
    raw = json.loads((folder / "config.json").read_text())
    return Config(
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=raw["num_attention_heads"],
        num_kv_heads=raw["num_key_value_heads"],
        head_dim=raw["hidden_size"] // raw["num_attention_heads"],
        max_positions=raw["max_position_embeddings"],
        rope_theta=raw["rope_theta"],
        norm_eps=raw["rms_norm_eps"],
    )


def load(folder: Path) -> tuple[StoryTeller, Tokenizer]:
    """The exported model, float32, and its tokenizer."""
    model = StoryTeller(load_config(folder))
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    for name, module in list(model.named_modules()):
        if isinstance(module, BitLinear):
            parent, _, child = name.rpartition(".")
            packed = PackedLinear(tensors.pop(f"{name}.weight"), tensors.pop(f"{name}.weight_scale"))
            setattr(model.get_submodule(parent), child, packed)
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return model.eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))


def choose_token(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """One id from logits [vocabulary]: nucleus sampling, or the largest at temperature 0."""
    if temperature == 0:
        return int(logits.argmax())
    probabilities, order = torch.softmax(logits / temperature, dim=-1).sort(descending=True)
    probabilities[probabilities.cumsum(0) - probabilities > top_p] = 0
    return int(order[torch.multinomial(probabilities, 1, generator=generator)])


class Sampler:
    """Generates replies with fixed settings and one stream of random numbers."""

    def __init__(self, folder: Path, temperature: float = 0.5, top_p: float = 0.9, seed: int = 0) -> None:
        self.model, self.tokenizer = load(folder)
        self.temperature, self.top_p = temperature, top_p
        self.generator = torch.Generator().manual_seed(seed)
        raw = json.loads((folder / "generation_config.json").read_text())
        self.stops = set(raw["eos_token_id"])

    @torch.inference_mode()
    def complete(self, text: str, max_tokens: int = 400) -> tuple[str, bool]:
        """The text that follows (BOS is added in front), and whether it ended by itself."""
        ids = self.tokenizer.encode(text).ids
        caches = [Cache() for _ in self.model.layers]
        logits = self.model(torch.tensor([ids]), 0, caches)[0, -1]
        reply: list[int] = []
        position = len(ids)
        while len(reply) < max_tokens and position < self.model.config.max_positions:
            token = choose_token(logits, self.temperature, self.top_p, self.generator)
            if token in self.stops:
                return self.tokenizer.decode(reply), True
            reply.append(token)
            logits = self.model(torch.tensor([[token]]), position, caches)[0, -1]
            position += 1
        return self.tokenizer.decode(reply), False

    def chat(self, messages: list[dict[str, str]], max_tokens: int = 400) -> tuple[str, bool]:
        """The assistant's next message."""
        return self.complete(render(messages, add_generation_prompt=True), max_tokens)

    def tell(self, request: str) -> tuple[str, bool]:
        """The reply to a single request."""
        return self.chat([{"role": "user", "content": request}])
